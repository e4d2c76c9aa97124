"""Measure what this machine can do, before and after a run: the roof of its roofline.

One look may fall on a moment in which others use the machine, and then what is timed later would beat the roof: the
fastest counts. A run that is over before such a moment would have passed looks once. A process of its own measures and
ends: the driver holds no memory of a GPU and computes nothing. Shards that share a folder measure one after another. On
a cluster each kind of node is measured once, on one of them.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from os import getpid

from attn_zoo.discovery.import_trial import ask_python
from attn_zoo.errors import StoreError, counted
from attn_zoo.matrix.drive.engines.process import spawn_environment
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.limits import die_with_parent
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.matrix.store.lock import wait_for_lock
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Ceilings

LIMIT_S = 90.0
"""Starting Python and torch included; a few seconds is what it takes."""
LASTING_S = 60.0
"""Sooner after a look another one would find the same moment."""

_Place = tuple[str, int | None]
Subject = tuple[str, str, int | None]
"""Device, dtype and threads."""


def ceilings_text(one: Ceilings) -> str:
    """Return the figures for people.

    >>> ceilings_text(Ceilings(device="cpu", dtype="float32", matmul_flops_per_s=1.2e11, copy_bytes_per_s=2e10))
    'cpu float32: products 0.12 TFLOP/s, copies 20 GB/s'
    """
    threads = f", {counted(one.threads, 'thread')}" if one.threads is not None else ""
    rates = f"products {one.matmul_flops_per_s / 1e12:.3g} TFLOP/s, copies {one.copy_bytes_per_s / 1e9:.4g} GB/s"
    idle = f", idle {one.idle_watts:.0f} W" if one.idle_watts is not None else ""
    doubt = f" ({', '.join(one.flags).replace('_', ' ')})" if one.flags else ""
    return f"{one.device} {one.dtype}{threads}: {rates}{idle}{doubt}"


def subjects_of(items: Iterable[PlannedCell]) -> set[Subject]:
    """Return (device, dtype, threads) of the ceilings that the timings among `items` need."""
    return {
        (item.cell.device, item.cell.dtype, item.cell.threads)
        for item in items
        if kind_of(item.cell).is_timed and item.refusal is None
    }


def note_ceilings(
    items: Sequence[PlannedCell],
    store: Store,
    environment: str,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
    is_done: bool = False,
) -> None:
    """Measure and store the ceilings that the timings among `items` need.

    Before they run, those that the folder does not have; when that `is_done`, once more those that were not measured
    within the last minute, and of each the faster stays. `should_stop` is asked several times a second; True ends it
    without a result.
    """
    subjects, is_told = subjects_of(items), False
    if not subjects or should_stop():
        return

    def should_give_up() -> bool:
        nonlocal is_told
        if not is_told:
            say("another shard measures the ceilings of its machine; waiting for it ...")
        is_told = True
        return should_stop()

    with ExitStack() as stack:
        try:
            stack.enter_context(wait_for_lock(store.folder / ".lock-ceilings", should_give_up))
            here = store.info(has_plan=False).names_of(environment)
            known = {one.subject[1:]: one for one in store.ceilings() if one.environment in here}
        except StoreError as error:
            say(f"{error}; nothing new is measured")
            return
        subjects -= {subject for subject, one in known.items() if not is_done or _is_new(one)}
        if not subjects:
            return
        say(f"measuring the ceilings of this machine{' again' if is_done else ''} ...")
        for one in measure_subjects(subjects, environment, say, should_stop):
            earlier = known.get(one.subject[1:])
            store.add_ceilings([replace(one, environment=earlier.environment if earlier else environment)])
            say(f"  {ceilings_text(one)}")


def _is_new(one: Ceilings) -> bool:
    now = datetime.now(UTC)
    return bool(one.measured) and abs(now - datetime.fromisoformat(one.measured)).total_seconds() < LASTING_S


def measure_subjects(
    subjects: Iterable[Subject], environment: str, say: Callable[[str], None], should_stop: Callable[[], bool]
) -> Iterator[Ceilings]:
    """Yield what this machine can do, and say of what that could not be measured; see `note_ceilings`."""
    places: dict[_Place, list[str]] = {}
    for device, dtype, threads in sorted(subjects, key=str):
        places.setdefault((device, threads), []).append(dtype)
    for place, dtypes in places.items():
        measured = _measure(place, dtypes, should_stop)
        if isinstance(measured, str):
            say(f"no ceilings of {place[0]}: {measured}")
        else:
            yield from (replace(one, environment=environment) for one in measured)


def _measure(place: _Place, dtypes: list[str], should_stop: Callable[[], bool]) -> list[Ceilings] | str:
    """Return what a process of its own measured, or why it could not."""
    device, threads = place
    arguments = ["-m", "attn_zoo.matrix.drive.machine_ceilings", str(getpid())]
    request = json.dumps({"device": device, "threads": threads, "dtypes": dtypes}).encode()
    environment = spawn_environment(threads)
    try:
        answer = ask_python(arguments, environment, LIMIT_S, request=request, should_stop=should_stop)
    except subprocess.TimeoutExpired:
        return "stopped" if should_stop() else f"not done within {LIMIT_S:g} s"
    if answer.returncode:
        lines = answer.stderr.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {answer.returncode}"
    return [Ceilings.from_dict(data, "ceilings") for data in json.loads(answer.stdout)]


def main() -> None:
    """Answer one request with one list."""
    die_with_parent(int(sys.argv[1]))
    import torch

    from attn_zoo.matrix.cell.conditions import Conditions
    from attn_zoo.measure.ceilings import measure_ceilings
    from attn_zoo.measure.energy import clocks

    request = json.load(sys.stdin)
    device, threads = request["device"], request["threads"]
    if threads is not None:
        torch.set_num_threads(threads)
    idle = clocks(device)
    with Conditions(device) as conditions:
        measured = measure_ceilings(device, request["dtypes"])
    extra = {
        "threads": threads,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "idle_watts": idle.power_w if idle else None,
        "temperature_c": idle.temperature_c if idle else None,
        "clocks_mhz": conditions.clocks_mhz,
        "flags": conditions.flags,
    }
    json.dump([replace(one, **extra).to_dict() for one in measured], sys.stdout)
    gc.freeze()  # or the end would look through all that was loaded


if __name__ == "__main__":
    main()
