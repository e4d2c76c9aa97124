"""The command line: what a user types, what comes back, and which exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

import attn_zoo
from attn_zoo import api, cli, console, describe
from attn_zoo.conformance import CheckResult
from attn_zoo.console import print_checks, print_plan, print_standing, print_summary, told_if_slow
from attn_zoo.discovery.providers import LoadFailure
from attn_zoo.displays import Checks
from attn_zoo.errors import ConfigError
from attn_zoo.matrix.drive.progress import PlainProgress
from attn_zoo.matrix.drive.run_plan import Standing, Summary
from attn_zoo.matrix.store.store import Store
from attn_zoo.registry import tasks, variants
from tests.conftest import keep_only
from tests.report.synthetic import scaling, write_run
from tests.test_discovery import VARIANT

RESULTS = Path(__file__).parents[1] / "results"


def in_a_terminal(monkeypatch, width: int | None) -> None:
    """Print from now on as in a terminal of this width; None is none."""
    monkeypatch.setattr(console.out, "_width", width)


def test_each_variant_is_listed_in_one_line_with_its_whole_name(call, monkeypatch):
    in_a_terminal(monkeypatch, 80)
    answer = call("list")
    assert answer.code == 0
    head, *lines, last = answer.out.splitlines()
    assert head.split()[0] == "variant"
    if lines[-1].startswith("Columns left out"):  # beside those of other tests with long names
        lines.pop()
    assert [line.split()[0] for line in lines] == list(variants)
    assert all(len(line.rstrip()) < 80 or line.endswith("…") for line in lines), "what is cut says so"
    assert last == "One of them in full: attn-zoo show NAME"
    assert re.search(r"^retention +N\^1 +only ", answer.out, re.MULTILINE)


def test_list_as_json_is_machine_readable(call):
    data = json.loads(call("list", "--json").out)
    assert {entry["name"] for entry in data["variants"]} == set(variants)
    assert data["failures"] == []


def test_lists_of_tasks_and_variants_say_what_could_not_be_loaded(call, monkeypatch):
    for what, registry, known in (("tasks", tasks, "listops"), ("variants", variants, "full")):
        assert known in registry
        monkeypatch.setattr(registry, "failures", [LoadFailure(provider="broken_package", reason="ValueError: no")])
        out = call("list", what).out
        assert known in out
        assert re.search("broken_package +ValueError: no", out), what


def test_the_list_of_tasks_says_what_each_asks(call):
    rows = {row["name"]: row["summary"] for row in json.loads(call("list", "tasks", "--json").out)}
    assert rows["listops"] == "ListOps: the value of a nested expression over digits, ten classes."
    assert all(summary and "at one level" not in summary for summary in rows.values()), rows


def test_the_version_is_that_of_the_package(call):
    answer = call("--version")
    assert (answer.code, answer.out) == (0, f"attn-zoo {attn_zoo.__version__}\n")


@pytest.mark.parametrize(
    ("what", "name", "words"),
    [
        ("tasks", "mqar", "recall"),
        ("matrices", "quick", "three mechanisms"),
        ("protocols", "cpu-small", "2 layers, width 64"),
        ("checks", "causality", "future"),
    ],
)
def test_everything_with_a_name_is_listed_with_what_it_is(call, what, name, words):
    rows = {entry["name"]: entry["summary"] for entry in json.loads(call("list", what, "--json").out)}
    assert words in rows[name].casefold()
    assert all(rows.values()), "each says what it is"
    assert all(each in call("list", what).out for each in rows)


def test_the_fields_of_a_protocol_that_may_be_overridden_are_in_its_json(call):
    rows = {entry["name"]: entry["settings"] for entry in json.loads(call("list", "protocols", "--json").out)}
    assert rows["cpu-small"]["num_steps"] == 4000
    assert {"base_lr", "pretrain_steps", "compile"} < set(rows["lra-small"])


@pytest.mark.parametrize(
    ("width", "hidden"), [(100, ""), (60, "why"), (40, "outcome, why")], ids=["wide", "narrow", "narrower"]
)
def test_where_a_table_has_no_room_columns_are_left_out_and_named(capsys, monkeypatch, width, hidden):
    in_a_terminal(monkeypatch, width)
    columns = ("check", "seconds", "outcome", "why")
    console.print_table("", columns, [("c" * 22, "1", "o" * 14, "words " * 9)], right=("seconds",))
    out = capsys.readouterr().out
    assert out.partition("\n")[0].split() == [column for column in columns if column not in hidden]
    assert "c" * 22 in out, "a name is never cut"
    told = f"Columns left out here, for a wider terminal: {hidden}."
    assert (told in " ".join(out.split())) == bool(hidden)


def test_the_least_column_goes_first_and_two_are_kept(capsys, monkeypatch):
    in_a_terminal(monkeypatch, 30)
    console.print_table("", ("task", "kind", "data"), [("t" * 20, "k" * 8, "here")], least=("kind",))
    out = capsys.readouterr().out
    assert re.search("^t{20}  here", out, re.MULTILINE)
    console.print_table("", ("cell", "time"), [("c" * 40, "5 s")])
    assert capsys.readouterr().out.count("c") == 1 + 40, "broken, not cut"


def test_nothing_limits_a_pipe(capsys, monkeypatch):
    in_a_terminal(monkeypatch, None)
    console.print_table("", ("variant", "what it is"), [("full", "w" * 150)], is_cut=True)
    assert "w" * 150 in capsys.readouterr().out


def test_lists_fit_eighty_columns(call, monkeypatch):
    in_a_terminal(monkeypatch, 80)
    kinds = [["list", what] for what in ("variants", "tasks", "matrices", "protocols", "checks")]
    for arguments in (*kinds, ["show", "linformer"], ["show", "bigbird"]):
        assert max(len(line) for line in call(*arguments).out.splitlines() if "http" not in line) <= 80, arguments


def test_show_measures_what_is_claimed(call):
    answer = call("show", "local_window", "--measure")
    assert answer.code == 0
    assert "Growth with the length L, bidirectional" in answer.out
    assert re.search(r"maximum path length +L\^1 +L\^0.9", answer.out)
    (row,) = json.loads(call("show", "linformer", "--measure", "--json").out)["measured"]
    assert row["sequential_ops"] == {"claimed": 0.0, "measured": 0.0}
    assert "measured" not in json.loads(call("show", "linformer", "--json").out)


def test_show_prints_source_claims_capabilities_and_options(call):
    answer = call("show", "linformer")
    assert answer.code == 0
    for text in ("2006.04768", "proj_len", "each compressed key mixes all positions", "N^1"):
        assert text in " ".join(answer.out.split())


def test_show_explains_every_option(call):
    for name in variants:
        assert all(option.summary for option in describe(name).options), name
    text = " ".join(call("show", "local_window").out.split())
    assert "window_size 128 W, positions on either side of a query" in text
    assert 'backend "auto" ' in text
    assert "is_fixed false " in " ".join(call("show", "synthesizer").out.split())


def test_show_names_the_values_that_an_option_can_have(call, tmp_path):
    text = " ".join(call("show", "linformer").out.split())
    assert '("none" | "headwise" | "key_value" | "layerwise")' in text
    file = tmp_path / "sorted_out.py"
    options = """
    kind: Kind = Kind.SOFT
    mode: Literal["a", "b"] | None = None
    several: tuple[Literal["x", "y"], ...] = ("x",)
    size: int = field(kw_only=True)
"""
    enum = 'class Kind(StrEnum):\n    SOFT = "soft"\n    HARD = "hard"\n\n\n@dataclass(frozen'
    call("new", "sorted_out", "--folder", str(tmp_path))
    source = file.read_text().replace("    temperature: float = 1.0\n", options.lstrip("\n"))
    source = source.replace("/ self.config.temperature", "").replace("@dataclass(frozen", enum, 1)
    imports = "from dataclasses import field\nfrom enum import StrEnum\nfrom typing import Literal\n\nfrom torch"
    file.write_text(source.replace("from torch", imports))
    answer = call("show", "sorted_out", "--variant-file", str(file), "--json")
    types = {option["name"]: option["type"] for option in json.loads(answer.out)["options"]}
    assert types == {"kind": '"soft" | "hard"', "mode": '"a" | "b"', "several": '["x" | "y", ...]', "size": "int"}
    rows = [line.split()[:2] for line in call("show", "sorted_out").out.splitlines()]
    for row in (["kind", '"soft"'], ["mode", "unset"], ["several", '["x"]'], ["size", "required"]):
        assert row in rows, "a default is written as a matrix file writes it"


def test_a_typo_is_one_line_with_the_nearest_name(call):
    answer = call("show", "linfromer")
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.strip().startswith("unknown variant 'linfromer'; did you mean 'linformer'?")
    assert len(answer.err.strip().splitlines()) == 1


def test_an_unknown_kind_of_list_names_the_kinds(call):
    answer = call("list", "variant")
    assert answer.code == 2
    assert "did you mean 'variants'?" in answer.err


@pytest.mark.usefixtures("registry_kept")
def test_a_new_variant_passes_its_checks_before_it_is_touched(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("new", "my_twist").code == 0
    path = tmp_path / "my_twist.py"
    assert "my_twist" in call("list", "--variant-file", str(path)).out
    answer = call("check", "my_twist")
    assert answer.code == 0, answer.out
    assert "0 failed" in answer.out


@pytest.mark.usefixtures("registry_kept")
def test_a_check_says_what_it_checks_before_it_does_and_whatever_takes_long(call, tmp_path, monkeypatch):
    path = tmp_path / "loud.py"
    path.write_text("print('loaded')\n" + VARIANT.format(name="loud"))
    told = []

    def told_if_slow(text):
        told.append(text)
        return nullcontext()

    monkeypatch.setattr("attn_zoo.console.told_if_slow", told_if_slow)
    answer = call("check", "loud", "--variant-file", str(path), "--only", "shape_and_dtype")
    assert answer.err.splitlines() == ["loaded", "checking loud"]
    twice = f"loading {path}: in a process of its own, as it may crash, then in this one"
    assert told == [twice, "loading torch and all variants", "[1/1] shape_and_dtype"]


@pytest.mark.usefixtures("registry_kept")
def test_of_an_unknown_name_nothing_is_checked_and_what_the_file_registers_is_said(call, tmp_path, monkeypatch):
    monkeypatch.setattr("attn_zoo.console.SILENCE_S", 1e6)  # however slow this machine is
    path = tmp_path / "first_try.py"
    path.write_text(VARIANT.format(name="loud"))
    answer = call("check", "first_try", "--variant-file", str(path))
    assert (answer.code, answer.out) == (2, "")
    # Beside those of other tests of this process.
    assert re.fullmatch(r"unknown variant 'first_try'  \(attn-zoo list shows all \d+; .*\)\n", answer.err)
    assert "; first_try.py registers 'loud'" in answer.err


@pytest.mark.parametrize("is_slow", [True, False])
def test_what_takes_long_is_told_while_it_does(is_slow, capsys, monkeypatch):
    monkeypatch.setattr("attn_zoo.console.SILENCE_S", 0.0 if is_slow else 1e6)
    timers = set(threading.enumerate())
    with told_if_slow("[3/45] modes"):
        (timer,) = set(threading.enumerate()) - timers or [None]
        if is_slow and timer is not None:
            timer.join()
    if timer is not None:
        timer.join()
    assert capsys.readouterr().err == ("[3/45] modes\n" if is_slow else "")


@pytest.mark.usefixtures("registry_kept")
def test_what_a_new_file_forgets_is_named(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call("new", "careless")
    path = tmp_path / "careless.py"
    text = path.read_text()
    for right, wrong in (
        ("is_causal=self.build.is_causal,", "is_causal=False,"),
        ("key_padding_mask=key_padding_mask,", "key_padding_mask=None,"),
    ):
        assert right in text
        text = text.replace(right, wrong)
    path.write_text(text)
    checks = ("causality", "padding_length")
    only = [word for check in checks for word in ("--only", check)]
    answer = call("check", "careless", "--variant-file", str(path), *only)
    assert answer.code == 1
    for check in checks:
        assert re.search(rf"{check}\s+FAILED", answer.out)
    assert answer.out.count("smallest example") == 2


def test_what_raises_at_one_place_is_told_once(capsys):
    places = {"modes": "mine.py:3", "causality": "mine.py:3", "dropout": "mine.py:4"}
    messages = {check: f"IndexError: {number} ({place})" for number, (check, place) in enumerate(places.items())}
    messages |= {"decode": "differs", "carry": "differs (a lot)"}
    failed = [
        CheckResult(
            check=name,
            outcome="failed",
            message=text,
            has_raised=text.endswith(tuple(f"({at})" for at in places.values())),
        )
        for name, text in messages.items()
    ]
    results = Checks(failed)
    results.variant = "mine"
    print_checks(results)
    table, _, below = capsys.readouterr().out.partition("\n\n")
    assert table.count("see below") == len(failed)
    assert "IndexError" not in table, "nor in the table"
    told = below.splitlines()
    assert [line.partition(":")[0] for line in told[:-1]] == ["modes, causality", "dropout", "decode", "carry"]


def test_of_many_checks_that_meet_one_fault_three_are_named(capsys):
    results = Checks(CheckResult(check=name, outcome="failed", message="differs") for name in "abcde")
    results.variant = "mine"
    print_checks(results)
    assert "a, b, c and 2 more: differs" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_file_in_the_place_of_a_name_is_told_where_files_go(call, command):
    answer = call(command, "variants/mine.py")
    assert (answer.code, answer.out) == (2, "")
    told = "NAME: expected the name of a variant; got 'variants/mine.py': a file is given by --variant-file, "
    assert answer.err.startswith(told)


def test_a_new_matrix_is_one_to_start_from(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("new", "matrix", "mine").code == 0
    planned = json.loads(call("plan", "mine.toml", "--json").out)
    assert [cell["key"] for cell in planned] == [item.cell.key for item in api.plan("quick").cells]
    assert call("new", "matrix", "--like", "zoo-cpu").code == 0
    assert 'name = "my-matrix"' in Path("my-matrix.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["matrix", "a b"], "expected a name of letters"),
        (["matrix", "../up"], "expected a name of letters"),
        (["matrix", "mine", "--like", "quik"], "did you mean 'quick'"),
        (["mine", "matrix"], "expected one name"),
        (["class"], "got 'class', a keyword of Python"),
        (["My-Attention"], "got 'My-Attention'; did you mean 'my_attention'?"),
        (["Linear-Attention"], "got 'Linear-Attention'\n"),  # whose other spelling is taken
        (["mine", "--like", "quick"], "--like: it is for matrices: new matrix NAME --like quick"),
    ],
)
def test_new_says_what_it_expected(call, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    answer = call("new", *arguments)
    assert answer.code == 2
    assert message in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["Full", "with-dash", "class", "1st", "ful l", "", "random", "torch"])
def test_new_refuses_names_that_cannot_be_used(call, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert call("new", name).code == 2
    assert list(tmp_path.iterdir()) == []


def test_new_refuses_what_exists(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "already registered" in call("new", "full").err
    (tmp_path / "mine.py").write_text("keep me")
    answer = call("new", "mine")
    assert answer.code == 2
    assert "exists" in answer.err
    assert (tmp_path / "mine.py").read_text() == "keep me"

    def fill(path, text, **options):
        path.write_bytes(text.encode()[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    assert "half.py: No space left on device; nothing of it was left behind" in call("new", "half").err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [("raise ValueError('broken inside')", "ValueError: broken inside"), ("import sys; sys.exit(3)", "sys.exit(3)")],
)
def test_a_broken_variant_file_is_one_message(call, tmp_path, content, expected):
    path = tmp_path / "broken.py"
    path.write_text(content)
    answer = call("list", "--variant-file", str(path))
    assert answer.code == 2
    assert expected in answer.err
    assert "Traceback" not in answer.err


def test_options_are_given_as_toml(call):
    assert call("check", "linformer", "-o", "proj_len=8", "--only", "shape_and_dtype").code == 0
    answer = call("check", "linformer", "-o", "projlen=8", "--only", "shape_and_dtype")
    assert answer.code == 2
    assert "did you mean 'proj_len'?" in answer.err
    assert "expected KEY=VALUE" in call("check", "linformer", "-o", "proj_len").err


def test_help_is_fast_enough_to_ask_for():
    """Asking for help must import neither torch, which alone takes a second, nor what draws and tabulates."""
    program = """
import sys
import attn_zoo
from attn_zoo import cli
sys.argv = ["attn-zoo", "--help"]
try:
    cli.main()
finally:
    print(sorted({"torch", "matplotlib", "pandas"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [[], ["plan"], ["data", "list"]], ids=" ".join)
def test_help_has_a_short_name(call, words):
    answer = call(*words, "-h")
    assert answer.code == 0
    assert answer.out == call(*words, "--help").out


TINY = """
name = "tiny"
[defaults]
num_heads = 2
head_dim = 8
budget_s = 0.02
isolation = "lane"
[[scaling]]
variants = ["full", "linformer"]
seq_len = [16, 32]
passes = ["fwd"]
is_causal = [false, true]
"""


@pytest.mark.slow
def test_plan_run_status_report_export_and_compare_work_together(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attn_zoo.matrix.drive.run_plan.note_ceilings", lambda *_, **__: None)  # seconds, each time
    Path("tiny.toml").write_text(TINY.replace('"full", ', ""))
    planned = call("plan", "tiny.toml")
    assert "4 cells on cpu: 2 to run, 2 refused" in planned.out
    assert "each compressed key mixes all positions" in " ".join(planned.out.split())
    assert not Path("runs").exists(), "a plan writes nothing"

    assert call("run", "tiny.toml", "--out", "one").code == 0
    again = call("run", "tiny.toml", "--out", "one")
    assert "(0 new)" in again.out

    status = call("status", "one")
    assert status.code == 0
    assert "4 done, 0 left" in status.out
    assert max(len(line) for line in status.out.splitlines()) <= 80

    report = call("report", "one", "--readme")
    assert report.code == 0
    for pattern in ("report.html", "README.md", "figures/time-*.svg", "figures/memory-*.png", "tables/*.csv"):
        assert list(Path("one").glob(pattern)), pattern

    assert call("export", "one", "--out", "all.csv").code == 0
    assert len(Path("all.csv").read_text().splitlines()) == 5

    table = ("--table", "exponents", "--format", "latex", "--out", "growth.tex")
    assert call("export", "one", *table).code == 0
    latex = Path("growth.tex").read_text()
    assert latex.count(r"\begin{table}") == latex.count(r"\label{tab:exponents}") == 1
    assert call("export", "one", *table[:2], "--out", "again.tex").code == 0
    assert Path("again.tex").read_text() == latex
    assert call("export", "one", "--out", "all.jsonl").code == 0
    assert len({json.loads(line)["key"] for line in Path("all.jsonl").read_text().splitlines()}) == 4
    assert "did you mean 'exponents'" in call("export", "one", "--table", "exponent", "--out", "x").err
    parquet = call("export", "one", "--table", "exponents", "--format", "parquet", "--out", "x")
    assert (parquet.code, "expected one of csv, markdown, latex" in parquet.err) == (2, True)
    assert not Path("x").exists()

    shutil.copytree("one", "two")
    kept = [path for path in Path("two", "cells").iterdir() if json.loads(path.read_text())["status"] == "ok"]
    kept[0].unlink()
    assert "(1 new)" in call("run", "tiny.toml", "--out", "two").out
    compared = call("compare", "one", "two")
    assert compared.code == 0
    assert " of 2 timed cells agree" in compared.out


@pytest.mark.usefixtures("registry_kept")
def test_what_a_variant_prints_does_not_break_json(call, tmp_path):
    path = tmp_path / "loud.py"
    path.write_text("print('[')\n" + VARIANT.format(name="loud"))
    answer = call("check", "loud", "--json", "--only", "shape_and_dtype", "--variant-file", str(path))
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)
    assert "[" in answer.err


HOSTILE = "\x1b[31mred\x9b\u202e"


def test_nothing_in_a_results_folder_steers_the_terminal(call, tmp_path):
    record = replace(scaling("full", 512), status="error", reason=HOSTILE, timing=None)
    labelled = replace(scaling("full", 1024), cell=replace(scaling("full", 1024).cell, label=HOSTILE))
    folder = write_run(tmp_path / "run", [record, labelled, scaling("full", 2048)], name=HOSTILE)
    (folder / "cells" / f"{HOSTILE}.json").write_text("{")
    for command in (["status", folder], ["report", folder], ["compare", folder, folder]):
        answer = call(*map(str, command))
        assert answer.code == 0, answer.err
        assert not {"\x1b", "\x9b", "\u202e"} & set(answer.out + answer.err)
    page = (folder / "report.html").read_text()
    assert "\x1b" not in page


MEASURED = str(RESULTS / "xeon-avx512-2cores" / "peers-cpu")


def test_a_terminal_that_knows_latin_1_only_and_not_its_width_is_served():
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "COLUMNS": "0"}
    line = [sys.executable, "-m", "attn_zoo", "compare", MEASURED, MEASURED]
    done = subprocess.run(line, env=environment, capture_output=True, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert "FlexAttention bigbird" in done.stdout.decode("latin-1")


@pytest.mark.parametrize(("closed", "what", "code"), [("stdout", "matrices", 0), ("stderr", "nosuch", 2)])
def test_a_closed_stream_changes_no_exit_code(monkeypatch, closed, what, code):
    monkeypatch.setattr(sys, closed, None)  # what Python makes of `>&-`
    monkeypatch.setattr(sys, "argv", ["attn-zoo", "list", what])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    getattr(sys, closed).close()
    assert stop.value.code == code


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "command", [["compare", MEASURED, MEASURED], ["list", "tasks", "--json"]], ids=["table", "json"]
)
def test_output_into_a_full_disk_is_one_message(command):
    with Path("/dev/full").open("w") as full:
        line = [sys.executable, "-m", "attn_zoo", *command]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert re.fullmatch(r"standard output or a file in \S+: cannot be written: No space left on device\n", done.stderr)


def test_a_full_disk_for_temporary_files_is_not_blamed_on_the_output_alone(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    done = subprocess.run(
        [sys.executable, "-m", "attn_zoo", "plan", "tiny.toml"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(RESULTS.parent)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY)),
    )
    assert done.returncode == 4
    said = [line for line in done.stderr.splitlines() if not line.startswith("planning tiny.toml: ")]  # it may be slow
    assert said == [f"standard output or a file in {tmp_path}: cannot be written: File too large"]


def test_a_broken_matrix_is_reported_whole_and_nothing_is_written(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text(TINY.replace('"linformer"', '"linfromer"').replace('"fwd"', '"forward"'))
    answer = call("run", "bad.toml", "--out", "out")
    assert answer.code == 2
    assert "bad.toml: 2 problems" in answer.err
    assert "did you mean 'linformer'?" in answer.err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "nowhere"),
        ("status", "."),
        ("export", ".", "--out", "x.csv"),
        ("run", "missing.toml"),
        ("run", "tiny.toml", "--shard", "3"),
        ("run", "tiny.toml", "--engine", "rai"),
        ("run", "tiny.toml", "--only", "nothing/*"),
        ("run", "tiny.toml", "--retry", "tiemout"),
        ("run", "tiny.toml", "--device", "gpu"),
        ("plan", "tiny.toml", "--device", "gpu"),
        ("check", "full", "--device", "gpu"),
    ],
)
def test_mistakes_are_one_message_with_exit_code_two(call, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    answer = call(*arguments)
    assert answer.code == 2
    assert answer.err.strip()
    assert "Traceback" not in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--engine", "rai", "did you mean 'ray'?"),
        ("--jobs", "0", "--jobs: expected 1 or more; got 0"),
        ("--retry", "tiemout", "did you mean 'timeout'?"),
        ("--track", "wand", "did you mean 'wandb'?"),
    ],
)
@pytest.mark.parametrize("command", ["run", "retry"])
def test_what_is_wrong_with_an_option_is_said_before_anything_is_planned(
    call, tmp_path, monkeypatch, command, option, value, message
):
    def plan(*_: object, **__: object) -> None:
        pytest.fail("planned")

    for name in ("plan", "_stored_plan"):
        monkeypatch.setattr(api, name, plan)
    monkeypatch.chdir(tmp_path)
    answer = call(command, "quick", "--only" if (command, option) == ("retry", "--retry") else option, value)
    assert answer.code == 2
    assert message in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("module", "told"), [("torch", "loading torch\n"), ("tomllib", "")])  # of doctor, of all
def test_ctrl_c_ends_a_command_that_loads_what_drops_exceptions(tmp_path, module, told):
    drops = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (tmp_path / f"{module}.py").write_text(f"{drops}print('it goes on')\n")
    program = (
        "import runpy, signal, sys; sys.argv[1:] = ['doctor'];"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # what a shell runs in the background ignores it
        "runpy.run_module('attn_zoo', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{RESULTS.parent}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{told}interrupted\n")


def test_a_device_that_is_not_there_is_an_error_and_no_record(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Path("tiny.toml").write_text(TINY)
    Path("gpu.toml").write_text(TINY.replace("[defaults]", '[defaults]\ndevice = "cuda"'))
    assert "did you mean 'cuda'?" in call("run", "tiny.toml", "--device", "gpu").err
    for arguments in (["run", "tiny.toml", "--device", "cuda"], ["run", "gpu.toml"]):
        answer = call(*arguments)
        assert answer.code == 2
        assert "no CUDA device here" in answer.err
    assert not Path("runs").exists()
    assert "6 to run" in call("plan", "gpu.toml", "--device", "cpu").out


@pytest.mark.usefixtures("registry_kept")
def test_a_results_folder_is_read_without_its_variant_file(call, tmp_path, monkeypatch):
    """Where it was measured its source is at hand; elsewhere nothing of it is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "attn_zoo.matrix.drive.run_plan.note_ceilings", lambda *_, **__: None
    )  # seconds, of the machine
    before = tuple(variants)
    Path("mine").mkdir()
    call("new", "my_kept", "--folder", "mine")
    written = Path("mine/my_kept.py")
    written.write_text(written.read_text() + "\nimport typer\nfrom my_kept_scale import SCALE\n")
    Path("mine/my_kept_scale.py").write_text("SCALE = 1.0\n")
    both = TINY.replace('["full", "linformer"]', '["full"]').replace("[false, true]", "false")
    Path("tiny.toml").write_text(both.replace("[16, 32]", "[16]").replace('"lane"', '"interleaved"'))
    done = call("run", "tiny.toml", "--variant-file", str(written), "--add", "my_kept", "--out", "one")
    assert done.code == 0, done.err
    packages = {record.cell.variant: record.packages for record in Store(Path("one")).records()}
    assert packages == {"full": {}, "my_kept": {"typer": metadata.version("typer")}}

    def forget() -> None:
        keep_only(variants, before)
        for name in [name for name in sys.modules if name.startswith(("attn_zoo_file_my_kept", "my_kept"))]:
            del sys.modules[name]

    forget()
    shutil.rmtree("mine")
    assert "2 done, 0 left" in call("status", "one").out
    forget()
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "of somebody else"))
    assert "2 done, 0 left" in call("status", "one").out
    for arguments in (["report", "one"], ["export", "one", "--out", "all.csv"], ["compare", "one", "one"]):
        assert call(*arguments).code == 0
    assert "my_kept" not in variants
    retry = call("retry", "one")
    assert retry.code == 2
    assert "unknown variant 'my_kept'" in retry.err
    source = Path("one/sources/my_kept/my_kept.py")
    assert f"{source} was not measured by you: read it, then load it (--variant-file)" in retry.err
    assert call("retry", "one", "--variant-file", str(source)).code == 0


def test_what_to_type_next_names_the_files_that_were_given(tmp_path, capsys):
    """Without them the source that was measured is run again, not the one that was mended since."""
    failures = [replace(scaling("full", n), status="error", reason="raised") for n in (512, 1024)]
    folder, files = write_run(tmp_path / "a run", failures), [Path("my file.py")]
    print_standing(api.status(folder), [], folder, files)
    assert capsys.readouterr().out.endswith(f"next: attn-zoo retry '{folder}' --variant-file 'my file.py'\n")


def test_after_time_outs_alone_the_limit_is_to_be_raised_first(tmp_path, capsys):
    slow = replace(scaling("full", 512), status="timeout", reason="slow")
    wrong = replace(scaling("full", 1024), status="error", reason="raised")
    folder = tmp_path / "a run"
    raised = f"next: raise timeout_s in the matrix FILE, then attn-zoo run FILE --out '{folder}' --retry timeout"
    for records, said in (([slow, scaling("full", 64)], raised), ([slow, wrong], f"next: attn-zoo retry '{folder}'")):
        print_standing(api.status(write_run(folder, records)), [], folder, [])
        assert capsys.readouterr().out.endswith(f"{said}\n")
        shutil.rmtree(folder)


def test_one_is_said_in_the_singular(capsys):
    groups = [{"variants": ["full"], "seq_len": [64], "passes": ["fwd"], "dtypes": ["float32"], "device": "cpu"}]
    plan = api.plan({"name": "one", "scaling": groups})
    print_plan(plan)
    (item,), stale = plan.cells, (scaling("full", 1024),)
    begun = {item.cell.key: 1}
    now = Standing(done=(), left=(item,), stale=stale, other=stale, begun=begun, left_s=59.0)
    print_standing(now, [], Path("run"), [])
    print_summary(Summary(left=(item,), num_repeats=1, folder=Path("run")))
    PlainProgress(sys.stdout).begin(1, 0, 1, 0.0)
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        " 1 cell on cpu: 1 to run, 0 refused;",
        " 0 done, 1 left (1 begun, with 1 repeat); one after another they take about 59 s; 1 record stale,",
        " of source or data that changed since; 1 record of other",
        " the same command goes on from here, with 1 repeat of them 1 cell",
    ):
        assert text in said
    assert "status cells" not in said, "no table without rows"


def test_the_status_of_a_folder_says_what_is_not_known(call, tmp_path, monkeypatch):
    """One of variants that are not registered here; then as it was before folders said what was planned."""
    in_a_terminal(monkeypatch, 80)
    folder = Path(MEASURED)
    older = shutil.copytree(folder, tmp_path / "older")
    run = json.loads((folder / "run.json").read_text())
    (older / "run.json").write_text(json.dumps({name: run[name] for name in run if name not in ("planned", "stopped")}))
    unknown = "not known: unknown variant 'plain_sdpa'"
    for where, known in (
        (folder, f"75 done, 0 left what changed since is {unknown}"),
        (older, f"75 done what is left, and what changed since, is {unknown}"),
    ):
        answer = call("status", str(where))
        assert answer.code == 0
        assert max(len(line) for line in answer.out.splitlines()) <= 80
        text = " ".join(answer.out.split())
        assert known in text
        assert "files of variants are named by --variant-file" in text
        assert "unsupported: flex_bigbird: FlexAttention has no backward pass on a CPU FlexAttention bigbird/" in text


def test_the_status_of_a_folder_with_a_damaged_file_names_it_and_goes_on(call, tmp_path):
    folder = shutil.copytree(MEASURED, tmp_path / "damaged")
    (folder / "ceilings.json").write_text("{")
    answer = call("status", str(folder))
    assert answer.code == 0
    assert "75 done" in answer.out
    assert "ceilings.json: not readable as JSON" in answer.err
    assert json.loads(call("status", str(folder), "--json").out)["ceilings"] == []
    damaged = next((folder / "cells").glob("*.json"))
    damaged.write_text("{")
    found = json.loads(call("status", str(folder), "--json").out)
    assert [Path(name).name for name in found["problems"]] == [damaged.name]
    assert found["left"] is not None
    assert len({one["key"] for one in found["done"]}) == 74
    assert damaged.stem not in {one["key"] for one in found["done"]}


def test_a_path_that_cannot_be_looked_at_is_one_line(call):
    answer = call("status", "a" * 300)
    assert answer.code == 2
    assert answer.err.endswith("File name too long\n")
    assert answer.err.count("\n") == 1


def test_data_of_other_machines_need_not_be_here(call, monkeypatch):
    asked = []

    def run(*_: object, **options: object) -> None:
        asked.append(options["data_dir"])
        raise ConfigError("the engine", [("", "is none")])

    monkeypatch.setattr(api, "run", run)
    assert call("run", "quick", "--engine", "ray", "--data-dir", "/there/only").err == "the engine: is none\n"
    assert asked == [Path("/there/only")]


def test_no_part_of_a_text_is_taken_for_a_picture(capsys):
    text = "results/a:key:b"
    console.say(text)
    console.tell(text)
    console.print_table("", ("file", "why"), [(text, text)])
    said = capsys.readouterr()
    assert (said.out + said.err).count(text) == 4


def test_infinity_is_printed_as_json(capsys):
    console.print_json({"clip": float("inf"), "path": Path("run")})
    assert json.loads(capsys.readouterr().out) == {"clip": "Infinity", "path": "run"}


def test_doctor_says_what_runs_here(call):
    answer = call("doctor", "--wait")
    assert answer.code == 0
    assert re.search(r"sdpa\.math", answer.out)
    assert "trying full math on cpu" in answer.err, "it is never silent"
    assert re.search(r"torch's choice, tokens first +flash_attention", answer.out)
    assert "CUDA" in answer.out


def test_ctrl_c_in_a_check_is_said(call, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("attn_zoo.matrix.checks_apart.ask_python", interrupt)
    answer = call("check", "full")
    assert (answer.code, answer.out) == (130, "")
    assert answer.err.splitlines()[-1] == "interrupted"
