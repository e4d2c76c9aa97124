"""How seconds and memory grow with the records of a results folder: invented records, the real command line.

    python benchmarks/large_folders.py                       # 2000 and 20 000 records, every command
    python benchmarks/large_folders.py 100000 --only report  # one command
    python benchmarks/large_folders.py 20000 --room DIR      # folders stay there and serve again

Cells are calls of every shipped mechanism at 16 lengths, four passes, two types and growing batches; each was timed in
three processes of 20 samples. `run` finds everything done. The second run of `compare` took a little longer.
`simulate_cluster.py` shows how the driver's work grows with cells that wait, and with machines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from attn_zoo.folder import record_text
from attn_zoo.matrix.claimed_costs import stored_claims
from attn_zoo.matrix.plan.expand import Plan, make_plan
from attn_zoo.matrix.plan.schema import load_matrix
from attn_zoo.matrix.store.store import Store
from attn_zoo.measure.environment import capture_environment
from attn_zoo.records import Ceilings, Cell, Memory, Record, Timing
from attn_zoo.registry import variants
from attn_zoo.statistics.medians import time_summary

LENGTHS = tuple(128 * 2**step for step in range(16))
PASSES = ("infer", "fwd", "bwd", "fwd_bwd")
DTYPES = ("float32", "bfloat16")
PROCESSES, SAMPLES = 3, 20
GATE = ("shape_and_dtype", "inputs_unchanged", "batch_invariance", "uninitialised_memory", "matches_reference")


def write_matrix(path: Path, count: int) -> None:
    """Write a matrix of about so many cells."""
    entries = [f'{{ name = "{name}", label = "{name}{tail}" }}' for name in variants for tail in ("", " (2)")]
    a_batch = len(entries) * len(LENGTHS) * len(PASSES) * len(DTYPES)
    is_small = count < a_batch  # a whole panel, rather than every panel with gaps
    group = {
        "seq_len": LENGTHS,
        "passes": PASSES[:1] if is_small else PASSES,
        "dtypes": DTYPES[:1] if is_small else DTYPES,
        "batch_size": list(range(1, 1 + max(1, round(count / a_batch)))),
        "scope": "mixer",
        "repeats": PROCESSES,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in group.items()]
    path.write_text("\n".join(['name = "large"', "[[scaling]]", f"variants = [{', '.join(entries)}]", *lines, ""]))


def record_of(cell: Cell, environment: str, slowdown: float) -> Record:
    """Return an invented record: constant, linear and quadratic costs that differ by mechanism, and noise."""
    seed, length = random.Random(cell.label), cell.seq_len or 1
    rng = random.Random(f"{cell.key} {slowdown}")
    power = variants[cell.variant].complexity.time_exponent
    cost = 0.05 + seed.uniform(1, 9) * 1e-5 * length + (power > 1) * seed.uniform(1, 2) * 1e-8 * length**2
    cost *= slowdown * (cell.batch_size or 1) * (1 + PASSES.index(cell.pass_ or "fwd"))
    states = [rng.gauss(1, 0.02) for _ in range(PROCESSES)]
    samples = tuple(round(cost * state * rng.lognormvariate(0, 0.03), 6) for state in states for _ in range(SAMPLES))
    size = 4 * 512 * length * (cell.batch_size or 1)
    return Record(
        cell=cell,
        status="ok",
        environment=environment,
        started="2026-01-01T00:00:00+00:00",
        duration_s=12.5,
        kernels=("sdpa.flash",),
        gate=GATE,
        flops=int(1e3 * length**power),
        min_bytes=4 * size,
        backward_ratio=2.5,
        timing=Timing(
            samples_ms=samples,
            process_sizes=(SAMPLES,) * PROCESSES,
            **time_summary(samples, (SAMPLES,) * PROCESSES),
            first_ms=2 * samples[0],
            num_warmup=3,
            inner_loops=1,
            timer="perf_counter",
        ),
        memory=Memory(peak_bytes=7 * size, extra_bytes=2 * size, saved_bytes=4 * size, input_bytes=3 * size),
        phases={"start": 4.0069, "build": 0.2262, "gate": 0.0307, "timing": 7.5384, "memory": 0.7142},
    )


def make_folder(folder: Path, plan: Plan, slowdown: float = 1.0) -> None:
    """Write what a finished run of the plan leaves."""
    store, environment, cells = Store(folder), capture_environment(), [item.cell for item in plan.cells]
    claims = stored_claims({cell.variant for cell in cells})
    with store.writing(plan.matrix.model_dump(mode="json"), environment, claims=claims, planned=cells):
        roof = Ceilings(device="cpu", dtype="", matmul_flops_per_s=1e16, copy_bytes_per_s=1e13)
        store.add_ceilings(replace(roof, dtype=dtype, environment=environment.digest) for dtype in DTYPES)
        for cell in cells:  # not by the store, which waits for the disk each time
            text = record_text(record_of(cell, environment.digest, slowdown))
            (folder / "cells" / f"{cell.key}.json").write_text(text)


def commands(room: Path, count: int) -> dict[str, list[str]]:
    """Return what is timed, by name."""
    before, after, matrix = (str(room / f"{count}{end}") for end in ("", "-after", ".toml"))
    status = ["status", before]
    run = ["run", matrix, "--out", before, "--device", "cpu", "--allow-cells", f"{2 * count}"]
    return {
        "status": status,
        "run": run,
        "report": ["report", before, "--out", str(room / "report")],
        "export": ["export", before, "--out", str(room / "out.csv")],
        "compare": ["compare", before, after],
        "verify": ["verify", before],
    }


def measure(arguments: list[str]) -> tuple[float, float, float]:
    """Return the wall seconds, processor seconds and greatest MiB of one command."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, "-m", "attn_zoo", *arguments], stdout=said, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(arguments)}: exit code {process.returncode}: {said.read()[-2000:].decode()}")
    return time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


@contextlib.contextmanager
def a_room(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="attn-zoo-") as room:
        yield Path(room)


def main() -> None:
    """Make folders, run commands, and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("records", type=int, nargs="*", default=[2000, 20_000])
    parser.add_argument("--only", nargs="*", help="of the commands, such as status or report")
    parser.add_argument("--room", type=Path, help="where folders are made and stay")
    options = parser.parse_args()
    print("| records | command | seconds | of a processor | MiB |\n| --- | --- | --- | --- | --- |")
    with a_room(options.room) as room:
        for count in options.records:
            matrix = room / f"{count}.toml"
            write_matrix(matrix, count)
            plan = make_plan(load_matrix(matrix, allow_cells=2 * count), device="cpu")
            for end, slowdown in (("", 1.0), ("-after", 1.02)):
                folder = room / f"{count}{end}"
                if not (folder / "run.json").exists():
                    make_folder(folder, plan, slowdown)
                elif {cell.key for cell in Store(folder).info().planned or ()} != {
                    item.cell.key for item in plan.cells
                }:
                    raise SystemExit(f"{folder}: of other sources, so that run would measure all of it: delete it")
            for name, arguments in commands(room, count).items():
                if options.only and name.partition(",")[0] not in options.only:
                    continue
                wall_s, used_s, peak = measure(arguments)
                print(f"| {len(plan.cells)} | {name} | {wall_s:.1f} | {used_s:.1f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
