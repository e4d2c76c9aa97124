"""A cell that several processes train together: `torchrun` starts them from the worker, one for each device.

When a rank dies, `torchrun` ends the others. The cell ends as that rank did: with the record that it left; or, if it
was killed or crashed, the worker ends in the same way, so that its supervisor sees what it would have seen of one
process, and tries again what was killed from outside. Each rank dies with the worker.

Worker and ranks share an unnamed file, which nobody has to tidy up: the order is its first line, answers follow as they
come. This module is the program of a rank too.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Never
from uuid import uuid4

from attn_zoo.conformance.verdicts import known, learn
from attn_zoo.matrix.cell.log import be_patient
from attn_zoo.matrix.cell.run_order import answer
from attn_zoo.matrix.limits import die_with_parent
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.measure.environment import num_cores
from attn_zoo.records import Record

_AGREED = ("ok", "diverged")
"""What all ranks come to together. Every other status is of one of them, for which the others must not wait."""


def run_on_ranks(order: WorkOrder) -> list[Record]:
    """Run the one cell of an order on as many ranks as it asks for; return its record.

    Does not return if a rank was killed, or crashed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=order.cells[0].data_parallel,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,  # the supervisor knows what is worth another attempt
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # what ranks print goes where the worker's output goes
    )
    died: dict[int, int] = {}
    stopped_by = 0
    with tempfile.TemporaryFile("a+b") as shared:
        shared.write(json.dumps(order.to_dict()).encode() + b"\n")
        shared.flush()
        nothing = os.dup(0)
        os.dup2(shared.fileno(), 0)  # the only file that torchrun lets them inherit beside the log
        try:
            elastic_launch(config, sys.executable)("-X", "faulthandler", "-m", __name__, str(os.getpid()))
        except SignalException as stopped:
            stopped_by = int(stopped.sigval)
        except ChildFailedError as error:
            died = {rank: failure.exitcode for rank, failure in error.failures.items()}
        finally:
            os.dup2(nothing, 0)
            os.close(nothing)
        shared.seek(0)
        lines = shared.read().splitlines()[1:]
    if stopped_by:
        _end_like(-stopped_by)
    answers: dict[int, dict[str, Any]] = {}
    for line in lines:
        with suppress(ValueError):  # empty, or of a rank that was killed as it wrote
            given = json.loads(line)
            answers[given["rank"]] = given
            learn(given["verdicts"])
    return [_outcome(answers, died)]


def _outcome(answers: Mapping[int, Mapping[str, Any]], died: Mapping[int, int]) -> Record:
    """Return the record of the cell: of the first rank, or of the one at fault; the first that `died` comes first."""
    own = [rank for rank, given in answers.items() if rank in died and not given["has_lost_another"]]
    silent = [rank for rank in died if rank not in answers]
    if died and not own and silent:
        # Those that torchrun ended, once one had failed, were sent SIGTERM.
        rank = next((rank for rank in silent if died[rank] != -signal.SIGTERM), silent[0])
        print(f"rank {rank} ended with exit code {died[rank]} and no result", file=sys.stderr)  # noqa: T201  to the log
        _end_like(died[rank])
    at_fault = next(iter([*own, *died, 0]))
    return Record.from_dict(answers[at_fault]["record"], f"rank {at_fault}")


def _end_like(code: int) -> Never:
    """End this process by the signal, if negative, or else with the exit code."""
    sys.stderr.flush()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left one, where that is wanted
        with suppress(OSError):  # SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _main() -> None:
    die_with_parent(int(sys.argv[1]))
    shared, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    be_patient()
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host's name resolves to
    text = os.pread(shared, os.fstat(shared).st_size, 0).partition(b"\n")[0]
    order = WorkOrder.from_dict(json.loads(text), "order")
    import torch

    from attn_zoo.training.ranks import LostRankError

    cell = order.cells[0]
    if cell.threads is None:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), num_cores() // cell.data_parallel)))
    learn(order.verdicts)
    (record,) = answer(order, lambda _: None)
    given = {
        "rank": int(os.environ["RANK"]),
        "record": record.to_dict(),
        "verdicts": known(),
        "has_lost_another": record.reason.startswith(LostRankError.__name__),
    }
    os.write(shared, b"\n" + json.dumps(given, allow_nan=False).encode() + b"\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if record.status in _AGREED else 1)


if __name__ == "__main__":
    _main()
