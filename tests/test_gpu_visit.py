"""A visit to a GPU, on a CPU: stages in order within their time, what is left, and files to go on from."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from attn_zoo import api
from tests.processes import wait_for

PATH = Path(__file__).parent.parent / "benchmarks" / "gpu_visit.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_visit", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_visit"] = module
    spec.loader.exec_module(module)
    return module


def test_every_stage_has_its_matrix_and_the_visit_fits_its_time(script):
    assert sum(stage.minutes for stage in script.STAGES) <= 18
    assert all(stage.minutes >= stage.least >= script.LEAST_MINUTES for stage in script.STAGES)
    for stage in script.STAGES:
        assert not stage.matrix or (PATH.parent / f"{stage.matrix}.toml").is_file()
    tests, host = [script.command(stage, Path(), 1.0, "cuda") for stage in script.STAGES if not stage.matrix]
    assert tests[1:3] == ["-m", "pytest"]
    assert str(PATH.parent.parent / "tests" / "kernels" / "test_replay.py") in tests
    assert str(PATH.parent.parent / "tests" / "test_cli.py") not in tests, "to look for tests there takes as long"
    assert (PATH.parent.parent / host[1]).is_file()


def test_make_keeps_what_lies_on_the_path_beside_the_checkout():
    """Where nothing can be installed, wheels are unpacked there."""
    wanted = f"{PATH.parent.parent}{os.pathsep}wheels"
    for target in ("gpu-visit", "gpu-test"):
        arguments = ["make", "--silent", target, "PYTHON=printenv PYTHONPATH;:"]
        answer = subprocess.run(
            arguments,
            cwd=PATH.parent.parent,
            env={**os.environ, "PYTHONPATH": "wheels"},
            capture_output=True,
            text=True,
        )
        assert answer.stdout.splitlines() == [wanted], answer.stderr


def test_shares_come_first_and_the_rest_goes_to_what_is_not_complete(script, tmp_path, monkeypatch):
    clock, log = [0.0], []
    answers = {"a": ["3 cells", ""], "b": [""], "c": ["8 cells"] * 9}

    def run_stage(stage, work, minutes, device):
        log.append((stage.name, round(minutes, 2)))
        clock[0] += 60 * minutes
        return answers[stage.name].pop(0)

    monkeypatch.setattr(script, "run_stage", run_stage)
    monkeypatch.setattr(script, "pack", lambda *_: None)
    stages = [script.Stage(name=name, minutes=2, matrix=name) for name in "abc"]
    state = script.visit(5, tmp_path, tmp_path, "cpu", stages, now=lambda: clock[0])
    assert log == [("a", 2), ("b", 2), ("c", 1)]
    assert state["a"]["left"] == "3 cells"
    log.clear()
    state = script.visit(9, tmp_path, tmp_path, "cpu", stages, now=lambda: clock[0])
    assert log == [("c", 1), ("a", 4), ("c", 4)], "what had its share waits until the others had theirs"
    assert [state[name]["left"] for name in "abc"] == ["", "", "8 cells"]


def test_what_begins_anew_each_time_gets_more_than_it_had_or_nothing(script, tmp_path, monkeypatch):
    """Else tests that were cut off would take all the time that is left, and be cut off earlier."""
    clock, log = [0.0], []

    def run_stage(stage, work, minutes, device):
        log.append((stage.name, round(minutes, 2)))
        clock[0] += 60 * minutes
        return "did not end in its time"

    monkeypatch.setattr(script, "run_stage", run_stage)
    monkeypatch.setattr(script, "pack", lambda *_: None)
    stages = [script.Stage(name="tests", minutes=3), script.Stage(name="peers", minutes=1, matrix="peers-gpu")]
    script.visit(6, tmp_path, tmp_path, "cpu", stages, now=lambda: clock[0])
    assert log == [("tests", 3), ("peers", 1), ("peers", 2)]
    log.clear()
    script.visit(5, tmp_path, tmp_path, "cpu", stages, now=lambda: clock[0])
    assert log == [("tests", 3.75), ("peers", 1.25)]


def test_what_is_timed_in_turns_waits_for_a_call_that_has_time_for_it(script, tmp_path, monkeypatch):
    """What is cut off leaves no record, and its gates begin anew."""
    clock, log = [0.0], []

    def run_stage(stage, work, minutes, device):
        log.append((stage.name, round(minutes, 2)))
        clock[0] += 60 * minutes
        return "3 cells" if stage.name == "steps" else ""

    monkeypatch.setattr(script, "run_stage", run_stage)
    monkeypatch.setattr(script, "pack", lambda *_: None)
    stages = [
        script.Stage(name="peers", minutes=2, matrix="peers-gpu"),
        script.Stage(name="steps", minutes=2, least=2, matrix="peers-gpu"),
    ]
    script.visit(3.5, tmp_path, tmp_path, "cpu", stages, now=lambda: clock[0])
    assert log == [("peers", 2)]
    log.clear()
    script.visit(5.5, tmp_path, tmp_path, "cpu", stages, now=lambda: clock[0])
    assert log == [("steps", 2), ("steps", 3.5)]


PLANS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from gpu_visit import STAGES
from attn_zoo import api, load_file

found = []
for stage in STAGES:
    if not stage.matrix:
        continue
    for path in stage.peers:
        load_file(path, None)
    globs = [part.partition("=")[2] for part in stage.more if part.startswith("--only=")]
    bundles = {}
    for item in api.plan(stage.file, only=globs, device="cuda", is_remote=True).cells:
        if item.isolation == "interleaved" and item.refusal is None:
            bundles.setdefault(item.bundle, []).append(item)
    for bundle, items in bundles.items():
        seconds = sum(item.estimate_s / item.repeats for item in items)
        found.append((stage.name, f"{stage.matrix} {bundle}", sorted(item.cell.key for item in items), seconds))
print(json.dumps(found))
"""


def test_a_stage_has_time_for_what_is_timed_in_turns_and_no_other_has_a_part_of_it(script):
    """What is foretold to take longer is not begun. Those of a bundle with unequally many repeats would lose them all.

    In a process of its own, for the names of peers would stay for all other tests.
    """
    command = [sys.executable, "-c", PLANS, str(PATH.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PATH.parent.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    first: dict[str, float] = {}
    parts: dict[str, set[tuple[str, ...]]] = {}
    for name, bundle, keys, seconds in json.loads(done.stdout):
        first.setdefault(name, seconds)
        parts.setdefault(bundle, set()).add(tuple(keys))
    assert {len(chosen) for chosen in parts.values()} == {1}
    least = {stage.name: 60 * (stage.least - script.START_MINUTES) for stage in script.STAGES}
    assert set(first) >= {"peers, first", "steps", "decode", "energy"}
    assert all(0 < seconds < least[name] for name, seconds in first.items()), first


def test_what_takes_minutes_and_says_least_comes_last(script):
    """Lanes run one after another: exact attention at its longest would come before the others at their shortest."""
    [globs] = [stage.more for stage in script.STAGES if stage.name == "scaling, first"]

    def lengths_of(name: str, rest: str) -> list[int]:
        cells = {length: rest.format(length) for length in [512 * 2**power for power in range(12)]}
        return [
            length
            for length, cell in cells.items()
            if any(fnmatch.fnmatch(f"{name}/scaling/{cell}", glob.partition("=")[2]) for glob in globs)
        ]

    doublings = [1024 * 2**power for power in range(8)]
    for pass_ in ("fwd", "fwd_bwd"):
        assert lengths_of("full", pass_ + "/L{}/bf16/seed0") == doublings
        assert lengths_of("bigbird", pass_ + "/L{}/bf16/seed0") == [*doublings, 262_144, 1_048_576]
    for rest in ("bwd/L{}/bf16/seed0", "fwd/L{}/bf16/D128/seed0", "fwd/L{}/fp32/seed0"):
        assert not lengths_of("bigbird", rest)


def test_the_state_of_the_latest_pack_stays_whenever_its_file_was_copied(script, tmp_path):
    out = tmp_path / "out"
    for name, minutes in (("a", 9.0), ("b", 3.0)):
        work = tmp_path / name
        (work / name).mkdir(parents=True)
        (work / name / "run.json").write_text(name)
        (work / "visit.json").write_text(json.dumps({name: {"minutes": minutes, "left": ""}}))
        script.pack(script.Stage(name=name, minutes=1, matrix=name), work, out)
        os.utime(out / f"{name}.tar.gz", (1.0, 1.0))
    script.unpack(out, tmp_path)
    assert json.loads((tmp_path / "visit.json").read_text()) == {"a": {"minutes": 9.0, "left": ""}}
    assert not (out / "visit.json").exists()
    new = tmp_path / "new"
    new.mkdir()
    script.unpack(out, new)
    assert sorted(path.name for path in new.iterdir()) == ["a", "b", "visit.json"]
    assert (new / "b" / "run.json").read_text() == "b"


def test_the_files_of_one_call_are_of_all_stages(script, tmp_path, monkeypatch):
    """What comes back from a machine may be the files of the last call only."""
    monkeypatch.setattr(script, "run_stage", lambda stage, work, *_: (work / stage.matrix).mkdir() or "")
    stages = [script.Stage(name=name, minutes=1, matrix=name) for name in "ab"]
    for number, known in ((1, stages[:1]), (2, stages)):
        script.visit(2, tmp_path / "work", tmp_path / f"out{number}", "cpu", known)
    assert sorted(path.name for path in (tmp_path / "out2").iterdir()) == ["a.tar.gz", "b.tar.gz"]


def test_a_visit_that_is_cut_off_while_it_packs_leaves_the_file_before(script, tmp_path, monkeypatch):
    (tmp_path / "visit.json").write_text("{}")
    (tmp_path / "lra").mkdir()
    stage = script.Stage(name="accuracy", minutes=1, matrix="lra")
    script.pack(stage, tmp_path, tmp_path / "out")
    before = (tmp_path / "out" / "lra.tar.gz").read_bytes()

    def add(archive, *_, **__):
        archive.fileobj.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(tarfile.TarFile, "add", add)
    with pytest.raises(KeyboardInterrupt):
        script.pack(stage, tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "lra.tar.gz").read_bytes() == before
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_files_to_go_on_from_must_be_there(script, tmp_path, monkeypatch, capsys):
    """A path that is mistyped would begin all anew."""
    arguments = ["gpu_visit.py", "--pack", str(tmp_path), "--work", str(tmp_path / "work"), "--from", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(script, "visit", lambda *_: pytest.fail("it began"))
    assert script.main() == 2
    assert "there is none" in capsys.readouterr().err


def test_what_is_left_is_told_with_the_data_that_were_run_with(script, tmp_path, monkeypatch):
    """Cells of tasks that read files have other keys without them, and would be left for ever."""
    asked = {}
    plan = api.plan({"name": "tiny", "scaling": [{"variants": ["full"], "seq_len": [16, 32], "num_heads": 1}]})
    monkeypatch.setenv("ATTN_ZOO_DATA", "data")
    monkeypatch.setattr(api, "plan", lambda *_, **given: asked.update(given) or plan)
    (tmp_path / "lra" / "cells").mkdir(parents=True)
    (tmp_path / "lra" / "run.json").touch()
    (tmp_path / "lra" / "cells" / f"{plan.cells[0].cell.key}.json").touch()
    stage = script.Stage(name="accuracy", minutes=1, matrix="lra")
    assert script.num_left(stage, tmp_path, "cpu") == "1 cells"
    assert (asked["data_dir"], asked["device"]) == ("data", "cpu")


def test_checkpoints_are_packed_as_far_as_they_can_be_carried(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "MOST_PACKED_BYTES", 40_000)
    (tmp_path / "visit.json").write_text("{}")
    for key, size in (("small", 10_000), ("large", 50_000)):
        folder = tmp_path / "lra" / "checkpoints" / key
        folder.mkdir(parents=True)
        (folder / "train.safetensors").write_bytes(os.urandom(size))
    script.pack(script.Stage(name="accuracy", minutes=1, matrix="lra"), tmp_path, tmp_path / "out")
    packed = tmp_path / "out" / "lra.tar.gz"
    assert packed.stat().st_size < 40_000
    with tarfile.open(packed) as archive:
        names = archive.getnames()
    assert "lra/checkpoints/small/train.safetensors" in names
    assert not any("large" in name for name in names)
    assert "1 checkpoints of trainings are too large to carry" in capsys.readouterr().out


def test_tests_whose_time_is_over_say_what_failed(script, tmp_path, monkeypatch):
    test = tmp_path / "test_slow.py"
    test.write_text("import time\ndef test_first():\n    assert 1 == 2\ndef test_second():\n    time.sleep(300)\n")
    command = [sys.executable, "-m", "pytest", str(test), "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist"]
    monkeypatch.setattr(script, "command", lambda *_: command)
    log = tmp_path / "tests.log"
    wait = script.subprocess.Popen.wait

    def when_one_failed(process, timeout=None):
        end = time.monotonic() + 60
        while timeout == 60 and "F" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        return wait(process, 0.0 if timeout == 60 else timeout)

    monkeypatch.setattr(script.subprocess.Popen, "wait", when_one_failed)
    assert script.run_stage(script.Stage(name="tests", minutes=1), tmp_path, 1.0, "cpu") == "did not end in its time"
    assert "test_slow.py::test_first" in log.read_text()


def test_no_process_of_the_tests_is_left_for_the_next_stage(script, tmp_path, monkeypatch):
    """Here two: one that waits for the other, which has written its number."""
    note = tmp_path / "pid"
    child = f"import os, time; open({str(note)!r} + '.new', 'w').write(str(os.getpid()))"
    child += f"; os.replace({str(note)!r} + '.new', {str(note)!r}); time.sleep(300)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    monkeypatch.setattr(script, "command", lambda *_: [sys.executable, "-c", parent])
    wait = script.subprocess.Popen.wait

    def when_both_run(process, timeout=None):
        end = time.monotonic() + 60
        while timeout is not None and not note.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return wait(process, None if timeout is None else 0.0)

    monkeypatch.setattr(script.subprocess.Popen, "wait", when_both_run)
    assert script.run_stage(script.Stage(name="tests", minutes=1), tmp_path, 1.0, "cpu") == "did not end in its time"
    end = time.monotonic() + 60
    while _runs(int(note.read_text())) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _runs(int(note.read_text()))


def test_a_call_that_is_ended_ends_what_it_runs(tmp_path):
    """As by a batch system: whatever went on would be timed beside the next call."""
    note = tmp_path / "pid"
    code = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid()) + ' '); time.sleep(300)"
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("gpu_visit", {str(PATH)!r})
script = sys.modules["gpu_visit"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
stage = script.Stage(name="tests", minutes=1, more=("-c", {code!r}))
visit = script.visit
script.visit = lambda *given: visit(*given, [stage])
sys.exit(script.main())
"""
    call = subprocess.Popen(
        [sys.executable, "-c", program, "--pack", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    )
    try:
        wait_for(lambda: note.exists() and note.read_text().endswith(" "))
        call.terminate()
        assert call.wait(60) == 128 + signal.SIGTERM
        assert not _runs(int(note.read_text()))
    finally:
        call.kill()


def test_a_stage_that_breaks_before_it_has_a_folder_does_not_end_the_visit(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "command", lambda *_: [sys.executable, "-c", "raise OSError('no card')"])
    stage = script.Stage(name="scaling", minutes=1, matrix="scaling-gpu")
    assert script.run_stage(stage, tmp_path, 1.0, "cpu") == "exit code 1: OSError: no card"


def test_a_script_finds_the_package_and_when_it_fails_that_is_no_result(script, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code = "import os; raise OSError(os.environ['PYTHONPATH'])"
    monkeypatch.setattr(script, "command", lambda *_: [sys.executable, "-c", code])
    stage = script.Stage(name="host-time", minutes=1, more=("script.py",))
    assert script.run_stage(stage, tmp_path, 1.0, "cpu") == f"exit code 1: OSError: {script.ROOT}"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Of a kind that is not timed: no call measures what the machine can do, which takes most of its time.
TINY = """
name = "tiny"
[[approximation]]
variants = ["full"]
seq_len = [16, 32]
inputs = "diffuse"
seeds = [0]
num_heads = 2
head_dim = 8
"""


@pytest.mark.slow
def test_a_machine_that_lost_everything_goes_on_from_the_files(script, tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "tiny.toml").write_text(TINY)
    monkeypatch.setenv("PYTHONPATH", str(script.ROOT))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    only = tuple(f"--only=full/approximation/diffuse/L{length}/*" for length in (16, 32))
    stage = script.Stage(name="scaling", minutes=3, matrix="tiny", more=only[:1])
    state = script.visit(2, tmp_path / "one", tmp_path / "out", "cpu", [stage])
    assert state["scaling"]["left"] == ""
    with tarfile.open(tmp_path / "out" / "tiny.tar.gz") as archive:
        names = archive.getnames()
    assert "tiny/run.json" in names
    assert "visit.json" in names
    assert not any("/logs" in name for name in names)
    work = tmp_path / "two"
    work.mkdir()
    script.unpack(tmp_path / "out", work)
    assert json.loads((work / "visit.json").read_text()) == state
    before = sorted(path.name for path in (work / "tiny" / "cells").iterdir())
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # of the environment: an unlike machine
    more = script.Stage(name="more", minutes=3, matrix="tiny", more=only)
    assert script.visit(2, work, tmp_path / "out", "cpu", [more])["more"]["left"] == ""
    after = sorted(path.name for path in (work / "tiny" / "cells").iterdir())
    assert len(before) == 1
    assert set(before) < set(after)
    assert len(after) == 2
