"""One visit to a GPU that is lent for minutes: tests, scaling, peers, energy, accuracy, in pieces.

    python benchmarks/gpu_visit.py --minutes 9 --pack out            # again and again, until nothing is left
    python benchmarks/gpu_visit.py --minutes 9 --pack out --from out  # on a machine that has lost the work folder

Stages run in order, the most valuable first, each for its share, which is small: a visit of 18 minutes has something of
all. What time is left then goes to those that are not complete, as their shares are. Stages are parts of the matrices,
chosen so that a share is enough for some of them; all of a matrix is what its own target runs. Each goes on where it
stopped; on an unlike machine what is left is measured beside, its environment noted. After each stage its records are
packed into one file that is small enough to carry, so a visit that is cut off loses at most a stage. The files of one
call are of all stages, whichever of them it ran.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEAST_MINUTES = 0.5  # a stage is not begun for less
START_MINUTES = 0.25  # until a run counts its time: it loads torch first
TELL_S = 20  # to say what failed, for tests whose time is over
MOST_PACKED_BYTES = 15 * 2**20  # what carries them may take 16 MiB, names in the archive included
LEFT_OUT = {"logs", "weights", "replaced", "figures", "tables", "checkpoints"}
"""Folders of a results folder that a pack leaves out: large, or made again from the records. Of checkpoints it takes
those that still fit: without its own a training begins anew."""

# A curve of each from end to end comes before other head sizes, types and passes; of exact attention, which takes up to
# half a minute a call, not the longest.
FIRST = (
    *(f"*/fwd*/L{1024 * 2**power}/bf16/seed0" for power in range(8)),
    *(f"{name}/*/fwd*/L{length}/bf16/seed0" for name in ("linformer", "bigbird") for length in (262_144, 1_048_576)),
)
# One length of every group, kernels that nothing has measured yet among them.
PEERS_FIRST = "*/scaling/fwd_bwd/L4096/*"
# Two of them compiled: each is foretold to take a minute, and what would not fit is not begun.
STEPS = ("full", "full compiled", "nn.TransformerEncoder", "nn.TransformerEncoder compiled", "linformer", "bigbird")
# Of all with a state the gates alone take minutes; these took 42 s on an H100.
DECODED = ("full", "linear_attention", "local_window")
GPU_TESTS = sorted(str(path) for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text("utf-8"))
HOST_BOUND = ("full", "linformer", "bigbird", "local_window", "moba", "linear_attention")


def _only(*globs: str) -> tuple[str, ...]:
    return tuple(f"--only={glob}" for glob in globs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A part of the visit.

    Args:
        name: of the stage.
        minutes: its share, and its weight where more time is shared out.
        least: minutes for which it is begun: what is timed in turns is recorded when all of it is there.
        matrix: name of its file in `benchmarks`; empty where the stage runs something else.
        more: further arguments of `attn-zoo run`, or all of them of Python.
    """

    name: str
    minutes: float
    least: float = LEAST_MINUTES
    matrix: str = ""
    more: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """Its matrix."""
        return ROOT / "benchmarks" / f"{self.matrix}.toml"

    @property
    def peers(self) -> list[Path]:
        """Files of variants that it needs."""
        return sorted((ROOT / "benchmarks" / "peers").glob("*.py")) if self.matrix.startswith("peers") else []


STAGES: tuple[Stage, ...] = (
    Stage(
        name="tests",
        minutes=3.25,
        more=(
            *("-m", "pytest", *GPU_TESTS),
            *("-m", "gpu", "-q", "-n", "12", "--dist", "worksteal", "--benchmark-disable", "-rfE"),
        ),
    ),
    Stage(name="host-time", minutes=0.75, more=("benchmarks/host_time.py", "--profile", *HOST_BOUND)),
    Stage(name="scaling, first", minutes=2.25, matrix="scaling-gpu", more=_only(*FIRST)),
    Stage(name="peers, first", minutes=2.5, matrix="peers-gpu", more=_only(PEERS_FIRST)),
    Stage(
        name="steps",
        minutes=2.75,
        least=2.75,
        matrix="peers-gpu",
        more=_only(*(f"{label}/scaling/step/L2048/*" for label in STEPS)),
    ),
    Stage(name="accuracy", minutes=2.25, matrix="lra-small", more=("--jobs", "3", *_only("*/seed0"))),
    Stage(
        name="decode",
        minutes=1.75,
        least=1.5,
        matrix="decode-gpu",
        more=_only(*(f"{name}/decode/L*" for name in DECODED)),
    ),
    Stage(name="energy", minutes=1.5, least=1.5, matrix="energy-gpu"),
    # Not the steps: a plan in which those of a bundle have unequally many repeats begins all of it anew.
    Stage(name="peers", minutes=0.5, matrix="peers-gpu", more=_only("*/scaling/fwd*")),
    Stage(name="scaling", minutes=0.5, matrix="scaling-gpu"),
)


def command(stage: Stage, work: Path, minutes: float, device: str) -> list[str]:
    """Return the command line of a stage."""
    if not stage.matrix:
        return [sys.executable, *stage.more]
    limit = f"{minutes - START_MINUTES:.2f}"
    return [
        *(sys.executable, "-m", "attn_zoo", "run", str(stage.file)),
        *("--device", device, "--out", str(work / stage.matrix), "--time-limit", limit, "--allow-mixed-env"),
        *(part for path in stage.peers for part in ("--variant-file", str(path))),
        *stage.more,
    ]


def run_stage(stage: Stage, work: Path, minutes: float, device: str) -> str:
    """Run a stage for so many minutes; return what is left of it, or nothing where it is complete."""
    arguments = command(stage, work, minutes, device)
    log = work / f"{stage.name.replace(', ', '-')}.log"
    print(f"== {stage.name}: {minutes:.1f} min", flush=True)
    # A script finds what lies beside it, which is not the package.
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("a", encoding="utf-8") as out:
        # What tests have started ends with them, or the next stage would be timed beside it; a matrix sees to its own.
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=not stage.matrix,
            # It is ignored where a shell ran this with "&". There are no threads here.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        try:
            # A matrix keeps its own limit, and gets a little longer to write what it has.
            code = process.wait(60 * minutes + (30 if stage.matrix else 0))
        except BaseException as error:
            try:
                if isinstance(error, subprocess.TimeoutExpired) and not stage.matrix:
                    process.send_signal(signal.SIGINT)  # tests then say what failed so far
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(TELL_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    (process.kill if stage.matrix else partial(os.killpg, process.pid, signal.SIGKILL))()
                process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return "did not end in its time"
            raise
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    print("   " + "\n   ".join(said[-3:]), flush=True)
    if not stage.matrix:
        if code == 0 or (code == 1 and "pytest" in stage.more):  # 1: a test failed, which is a result
            return ""
    elif code in (0, 1) and (left := num_left(stage, work, device)) is not None:
        return left
    return f"exit code {code}: {said[-1] if said else 'nothing said'}"


def num_left(stage: Stage, work: Path, device: str) -> str | None:
    """Return how many cells of a stage have no record, in words; empty for none, None if it broke before it began."""
    from attn_zoo import api
    from attn_zoo.registry import load_file

    if not (work / stage.matrix / "run.json").is_file():
        return None
    for path in stage.peers:
        load_file(path, None)  # the run has tried it
    globs = [part.partition("=")[2] for part in stage.more if part.startswith("--only=")]
    data_dir = os.environ.get("ATTN_ZOO_DATA")  # as the run does: what is in it decides which cells there are
    plan = api.plan(stage.file, only=globs, device=device, data_dir=data_dir, has_estimates=False)
    done = {path.stem for path in (work / stage.matrix / "cells").glob("*.json")}
    count = sum(item.cell.key not in done for item in plan.cells)
    return f"{count} cells" if count else ""


def packed(stage: Stage, folder: Path) -> Path:
    """Return the file that what a stage has is packed into."""
    return folder / f"{stage.matrix or stage.name}.tar.gz"


def pack(stage: Stage, work: Path, folder: Path) -> None:
    """Write what a stage has into one file of `folder`; whoever is killed meanwhile leaves the one that was there."""
    from attn_zoo.whole_files import whole_file

    sources = [work / stage.matrix] if stage.matrix else sorted(work.glob("*.log"))
    target = packed(stage, folder)
    checkpoints = [path for source in sources for path in source.glob("checkpoints/*/*") if path.is_file()]
    fitting: list[Path] = []
    with whole_file(target, replace=True) as temporary:
        size = _write_pack(temporary, sources, work)
        if size > MOST_PACKED_BYTES:
            print(f"   {target.name} has {size / 2**20:.0f} MiB, which may be too much to carry", flush=True)
        for path in sorted(checkpoints, key=lambda path: path.stat().st_size):  # they hardly compress
            size += path.stat().st_size
            fitting += [path] if size < MOST_PACKED_BYTES else []
        if fitting:
            _write_pack(temporary, sources, work, fitting)
    if behind := len(checkpoints) - len(fitting):
        print(f"   {behind} checkpoints of trainings are too large to carry: elsewhere these begin anew", flush=True)


def _write_pack(path: Path, sources: Sequence[Path], work: Path, more: Sequence[Path] = ()) -> int:
    with tarfile.open(path, "w:gz") as archive:
        for source in sources:
            if source.exists():
                archive.add(source, source.name, filter=_is_kept)
        for each in (*more, work / "visit.json"):
            archive.add(each, each.relative_to(work))
    return path.stat().st_size


def _is_kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(entry.name).parts
    return None if len(parts) > 1 and parts[1] in LEFT_OUT else entry


def unpack(folder: Path, work: Path) -> None:
    """Lay out what an earlier part of the visit packed, where the work folder has nothing of it."""
    states = []
    for path in sorted(folder.glob("*.tar.gz")):
        with tarfile.open(path) as archive:
            members = [one for one in archive.getmembers() if not (work / Path(one.name).parts[0]).exists()]
            archive.extractall(work, members, filter="data")
        saved = work / "visit.json"
        states.append(saved.read_text(encoding="utf-8"))
        saved.unlink()
    if states:  # every pack has the state of its time, and files that were copied all have the time of that
        latest = max(states, key=lambda text: sum(one["minutes"] for one in json.loads(text).values()))
        (work / "visit.json").write_text(latest, encoding="utf-8")


def visit(
    minutes: float,
    work: Path,
    folder: Path,
    device: str,
    stages: Sequence[Stage] = STAGES,
    now: Any = time.monotonic,
) -> dict[str, dict[str, Any]]:
    """Run what is left for so many minutes; return for each stage the minutes it has had and what is left of it."""
    begin = now()
    work.mkdir(parents=True, exist_ok=True)
    saved = work / "visit.json"
    state: dict[str, dict[str, Any]] = {stage.name: {"minutes": 0.0, "left": "not begun"} for stage in stages}
    if saved.exists():
        state |= json.loads(saved.read_text(encoding="utf-8"))
        for stage in stages:  # of earlier calls, whose files may lie elsewhere
            if state[stage.name]["minutes"] and not packed(stage, folder).exists():
                pack(stage, work, folder)
    for is_rest in (False, True):
        for place, stage in enumerate(stages):
            mine = state[stage.name]
            rest = minutes - (now() - begin) / 60
            share = stage.minutes - mine["minutes"]
            if is_rest:
                weights = sum(one.minutes for one in stages[place:] if _goes_on(state[one.name]))
                share = max(stage.least, rest * stage.minutes / weights) if weights else 0.0
            share = min(rest, share)
            is_broken = is_rest and not _goes_on(mine)
            # What begins anew would not come further than it did.
            is_hopeless = not stage.matrix and share <= mine["minutes"]
            if not mine["left"] or is_broken or is_hopeless or share < stage.least:
                continue
            start = now()
            mine["left"] = run_stage(stage, work, share, device)
            mine["minutes"] += (now() - start) / 60
            saved.write_text(json.dumps(state), encoding="utf-8")
            pack(stage, work, folder)
    return state


def _goes_on(state: dict[str, Any]) -> bool:
    """Return whether a stage is neither complete nor broken."""
    return bool(state["left"]) and not state["left"].startswith("exit code")


def not_installed(names: Sequence[str]) -> str:
    """Return those of these packages that cannot be imported, for a sentence."""
    return ", ".join(name for name in names if importlib.util.find_spec(name) is None)


def main() -> int:
    """Return 0, or 2 where a package is missing, or the files of an earlier call."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.5, help="of this call (default 8.5)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "gpu-visit", help="results folders")
    parser.add_argument("--pack", type=Path, required=True, help="where to put one file for each matrix")
    parser.add_argument("--from", dest="earlier", type=Path, help="files of an earlier call, to go on from")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # a package that is not installed is found beside this file
    needed = ("torch", "numpy", "scipy", "psutil", "pydantic", "typer", "rich", "safetensors")
    testing = ("pytest", "xdist", "pytest_benchmark", "pytest_timeout", "hypothesis")
    if missing := not_installed((*needed, *testing)):
        print(f"missing packages: {missing}; install them, or put wheels on PYTHONPATH", file=sys.stderr)
        return 2
    if missing := not_installed(("datasets", "transformers", "linformer")):
        print(f"not installed: {missing}; cells that need them are refused", flush=True)
    if not_installed(["pynvml"]):
        print("not installed: nvidia-ml-py; energy, clocks and other processes of the GPU are not recorded", flush=True)
    if given.earlier is not None and not list(given.earlier.glob("*.tar.gz")):
        print(f"{given.earlier}: expected what an earlier call packed, *.tar.gz; there is none", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what runs ends too
    given.work.mkdir(parents=True, exist_ok=True)
    if given.earlier is not None and not (given.work / "visit.json").exists():
        unpack(given.earlier, given.work)
    state = visit(given.minutes, given.work, given.pack, given.device)
    print(f"\n{'stage':<16}{'minutes':>8}  left")
    for name, one in state.items():
        print(f"{name:<16}{one['minutes']:>8.1f}  {one['left'] or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
