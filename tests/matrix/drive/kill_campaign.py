"""Kill a running matrix at random moments, again and again, and look what is left: not a test, but what tests rest on.

    python -m tests.matrix.drive.kill_campaign --kills 300

Each kill is a SIGKILL of the runner or, now and then, of one of its workers. After each one no record may be damaged,
changed or lost, and no process left; a matrix that has come to its end must have the results that an undisturbed run
has. Ends with exit code 1 and says what it saw where that does not hold.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from attn_zoo.folder import read_record, scan_cells
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.plan.expand import Plan, make_plan
from attn_zoo.matrix.plan.schema import parse_matrix
from attn_zoo.matrix.store.store import Store
from tests.matrix.conftest import TINY_TRAINING, prepare_process
from tests.processes import start_process

LIMIT_S = 15.0
"""How long what was killed may take to be gone."""


def _plan() -> Plan:
    small = {"num_heads": 1, "head_dim": 8, "threads": 1, "budget_s": 0.02, "device": "cpu"}
    names = ["fake_ok", "fake_daemon"]
    scaling = [
        {**small, "variants": names, "seq_len": [16, 48, 900], "isolation": "lane"},
        {**small, "variants": names, "seq_len": [32, 950], "isolation": "interleaved"},
        {**small, "variants": ["fake_nan", "fake_device_memory"], "seq_len": [1000], "repeats": 2},
    ]
    training = {"variants": ["fake_ok"], "task": "fake_task", "overrides": TINY_TRAINING, "seeds": [0, 1]}
    group = {**training, "device": "cpu", "threads": 1}
    return make_plan(parse_matrix({"name": "campaign", "scaling": scaling, "accuracy": [group]}, "campaign.toml"))


def _run_it(folder: Path) -> int:
    """What a runner does; also one that finds cells that failed, as planned, says so by its exit code."""
    prepare_process()
    summary = run(_plan(), Store(folder))
    return 3 if summary.left else 0


def _table(folder: Path) -> set[tuple[str, str]]:
    return {(record.cell.id, record.status) for record in scan_cells(folder).records.values()}


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _workers(pid: int) -> list[psutil.Process]:
    """Return what came of the workers of a runner, wherever it went."""
    sign = f"attn_zoo.matrix.cell.worker {pid}"
    return [each for each in psutil.process_iter(["cmdline"]) if sign in " ".join(each.info["cmdline"] or [])]


class Campaign:
    """Kills, and what was seen.

    Args:
        place: folder to work in.
        seed: of all that is random.
    """

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.rng = place, random.Random(seed)
        self.faults: list[str] = []
        self.num_kills = self.num_ends = 0
        self.known: dict[str, bytes] = {}
        self.longest_s = 20.0

    def undisturbed(self) -> set[tuple[str, str]]:
        """Run once to the end, and return what a run has to come to."""
        begin = time.monotonic()
        process = start_process(_run_it, self.place / "whole", errors=self.place / "errors")
        process.join()
        self.longest_s = time.monotonic() - begin
        if process.exitcode != 0:
            raise RuntimeError(f"exit code {process.exitcode}: {(self.place / 'errors').read_text()[-2000:]}")
        return _table(self.place / "whole")

    def strike(self, folder: Path) -> bool:
        """Run, kill at a random moment, and look; return whether the run had come to its end before."""
        process = start_process(_run_it, folder, errors=self.place / "errors")
        delay_s, aims_at_worker = self.rng.uniform(0, self.longest_s * 0.3), self.rng.random() < 0.2
        process.join(delay_s)
        pid = process.pid or 0
        if process.exitcode is None and aims_at_worker and (workers := _workers(pid)):
            self.num_kills += 1
            self.rng.choice(workers).send_signal(signal.SIGKILL)
            process.join(self.rng.uniform(0, self.longest_s * 0.2))
        code = process.exitcode
        if code is None:
            own = psutil.Process(pid).children(recursive=True)
            process.kill()
            process.join()
            self.num_kills += 1
        else:
            own = []
            if code != 0:
                self.faults.append(f"exit code {code}: {(self.place / 'errors').read_text()[-500:]}")
        end = time.monotonic() + LIMIT_S
        while (left := _living([*own, *_workers(pid)])) and time.monotonic() < end:
            time.sleep(0.05)
        self.faults += [f"outlived its runner: {each.pid} {' '.join(each.cmdline())[-200:]}" for each in left]
        self._look(folder)
        return code is not None

    def _look(self, folder: Path) -> None:
        found = {path.name: path.read_bytes() for path in (folder / "cells").glob("[!.]*")}
        for name, content in self.known.items():
            if found.get(name) != content:
                self.faults.append(f"{name} was {'lost' if name not in found else 'changed'}")
        for name in found:
            try:
                read_record(folder / "cells" / name, Path(name).stem)
            except Exception as error:
                self.faults.append(f"{name} is damaged: {error}")
        if (folder / "quarantine").exists():
            self.faults.append("something is in quarantine")
        self.known = found


def main() -> int:
    """Kill as often as asked, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare_process()
    place = Path(tempfile.mkdtemp(prefix="attn-zoo-kills-"))
    campaign, begin = Campaign(place, arguments.seed), time.monotonic()
    expected = campaign.undisturbed()
    say = sys.stdout.write
    say(f"{len(expected)} cells in {campaign.longest_s:.0f} s undisturbed\n")
    folder = place / "run0"
    while campaign.num_kills < arguments.kills:
        if campaign.strike(folder):
            if (table := _table(folder)) != expected:
                campaign.faults.append(f"another table: {sorted(table ^ expected)}")
            campaign.num_ends += 1
            shutil.rmtree(folder)
            folder, campaign.known = place / f"run{campaign.num_ends}", {}
        sys.stdout.flush()
        if campaign.num_kills % 10 == 0:
            say(f"{campaign.num_kills} kills, {campaign.num_ends} runs ended, {len(campaign.faults)} faults\n")
    say(f"{campaign.num_kills} kills in {time.monotonic() - begin:.0f} s, {campaign.num_ends} runs to the end\n")
    for fault in campaign.faults:
        say(f"FAULT {fault}\n")
    if not campaign.faults:
        say("no record damaged, changed or lost, no process left, the same table each time\n")
        shutil.rmtree(place)
    return int(bool(campaign.faults))


if __name__ == "__main__":
    sys.exit(main())
