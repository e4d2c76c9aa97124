"""A worker process: answers its supervisor's orders, one JSON line each, until there are no more.

Orders come on what was its standard input and answers go to what was its standard output. Both are moved out of reach
first: whatever a variant prints or reads goes to the cell's log and to nowhere. It dies with its supervisor.
"""

from __future__ import annotations

import gc
import json
import os
import sys

from attn_zoo.matrix.cell.log import be_patient, log_to, private_streams
from attn_zoo.matrix.limits import be_first_to_die, die_with_parent


def main() -> None:
    """Answer orders until the supervisor closes the pipe, or a failure makes this process unfit for another cell."""
    die_with_parent(int(sys.argv[1]))
    place = int(sys.argv[2])
    be_first_to_die()
    orders, answers = private_streams()
    be_patient()
    # Before "ready", so that no cell pays for it: torch, and what is registered in this package and installed ones.
    # All of it stays to the end: looking through it for garbage takes a quarter of a start, and then of every cell.
    gc.disable()
    from attn_zoo.conformance.verdicts import known, learn
    from attn_zoo.kernels.compiled_code import keep_compiled_code_apart
    from attn_zoo.matrix.cell.run_order import answer
    from attn_zoo.matrix.plan.work_order import WorkOrder
    from attn_zoo.measure.capture import num_failed
    from attn_zoo.records import CLEAN
    from attn_zoo.registry import variants

    keep_compiled_code_apart()  # a variant of the user's may compile by itself
    list(variants)
    gc.freeze()
    gc.enable()
    print(json.dumps({"event": "ready"}), file=answers, flush=True)
    for line in orders:
        order = WorkOrder.from_dict(json.loads(line), "order")
        log_to(order.log)
        learn(order.verdicts)
        if order.cells[0].data_parallel > 1:
            from attn_zoo.matrix.cell.rank_processes import run_on_ranks

            records = run_on_ranks(order)
        else:
            # Written, not sent: a message would wake the supervisor while something is timed.
            records = answer(order, lambda index: os.pwrite(place, index.to_bytes(4, "little"), 0))
        sys.stdout.flush()
        is_fit = all(record.status in CLEAN for record in records) and not num_failed()  # to serve another order
        done = [record.to_dict() for record in records]
        message = {"event": "done", "records": done, "verdicts": known(), "is_fit": is_fit}
        print(json.dumps(message, allow_nan=False), file=answers, flush=True)
        if not is_fit:
            break
    sys.stderr.flush()
    os._exit(0)  # taking a loaded torch apart takes a fifth of a second, and nothing here needs it


if __name__ == "__main__":
    main()
