"""The commands that read results: what a user types, what comes back, and which exit code."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command

from attn_zoo import cli
from tests.report.synthetic import MACHINE, accuracy, scaling, write_run
from tests.report.test_compare import timed


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Make the runs `before` and `after`, of which one cell is slower, one known too little, one the same."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "before", [timed("v", 512, 10.0), timed("v", 1024, 10.0), timed("v", 2048, 10.0)])
    write_run(tmp_path / "after", [timed("v", 512, 12.0), scaling("v", 1024, 12.0), timed("v", 2048, 10.001)])


@pytest.mark.usefixtures("folders")
def test_an_index_is_written_over_the_folders_in_a_folder(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "one", [scaling("full", 512), scaling("full", 1024)])
    write_run(tmp_path / "runs" / "box" / "two", [scaling("full", 512)])
    done = call("report", "runs", "--index")
    assert done.code == 0
    assert "wrote runs/index.html" in done.out
    text = (tmp_path / "runs" / "README.md").read_text(encoding="utf-8")
    assert "(one/report.html)" in text
    assert "(box/two/report.html)" in text
    assert call("report", "runs", "--index").code == 0, "our own pages are written anew"
    (tmp_path / "runs" / "README.md").write_text("# My project\n")
    refused = call("report", "runs", "--index")
    assert refused.code == 2
    assert "runs/README.md: not written by `attn-zoo report --index`" in refused.err
    assert (tmp_path / "runs" / "README.md").read_text() == "# My project\n"
    assert call("report", "runs", "--index", "--readme").code == 2
    assert "expected results folders in it" in call("report", "runs/one", "--index").err


@pytest.mark.usefixtures("folders")
def test_a_run_beside_itself_passes_and_a_slower_one_fails_with_code_three(call):
    itself = call("compare", "before", "before", "--fail", "--fail-above", "0%")
    assert (itself.code, itself.err) == (0, "")
    assert "3 of 3 timed cells agree" in itself.out

    assert call("compare", "before", "after").code == 0, "nobody asked for a verdict"
    slower = call("compare", "before", "after", "--fail-above", "5%")
    assert slower.code == 3
    assert slower.err.startswith("worse: v fwd L512: 1.2 [")
    assert slower.err.count("worse:") == 1
    assert call("compare", "before", "after", "--fail-above", "0.5").code == 0
    assert call("compare", "before", "after", "--fail").code == 3
    assert call("compare", "after", "before", "--fail-above", "5%").code == 0


def test_what_failed_or_grew_fails_too(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "before", [timed("v", 512, 10.0)])
    write_run(tmp_path / "failed", [scaling("v", 512, status="gate_failed")])
    large = timed("v", 512, 10.0)
    assert large.memory is not None
    peak_bytes = 2 * (large.memory.peak_bytes or 0)
    write_run(tmp_path / "larger", [replace(large, memory=replace(large.memory, peak_bytes=peak_bytes))])
    assert [call("compare", "before", name, "--fail").code for name in ("before", "failed", "larger")] == [0, 3, 3]


@pytest.mark.usefixtures("folders")
def test_compare_prints_a_comment_or_data(call):
    comment = call("compare", "before", "after", "--fail-above", "5%", "--markdown")
    assert (comment.code, comment.err) == (3, "")
    assert comment.out.startswith("## 1 worse by more than 5 %\n")
    both = call("compare", "before", "after", "--json", "--markdown")
    assert (both.code, both.out) == (2, "")
    assert "expected either --markdown or --json" in both.err
    rows = json.loads(call("compare", "before", "after", "--json").out)
    assert {row["seq_len"]: row["verdict"] for row in rows} == {512: "slower", 1024: "cannot say", 2048: "same"}


def test_of_very_many_cells_and_faults_a_terminal_shows_some_and_says_so(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lengths = range(1, 251)
    write_run(tmp_path / "many", [timed("v", length, 10.0) for length in lengths])
    write_run(tmp_path / "slow", [timed("v", length, 20.0) for length in lengths])
    (tmp_path / "many" / "cells" / "half.json").write_text("{")
    checked = call("verify", "many")
    assert checked.code == 1
    assert "cells/half.json" in checked.out, "no check crowds out another"
    assert checked.out.count("without a correctness") == 1, "one reason is said once"
    assert checked.out.count("  v/scaling/fwd/") == 20
    assert "  and 230 more\n" in checked.out
    assert "21 of 251 shown; --json has all" in checked.out
    assert len(json.loads(call("verify", "many", "--json").out)) == 251

    compared = call("compare", "many", "slow", "--fail-above", "5%")
    assert compared.code == 3
    assert compared.out.count("slower") == 201, "each row, and once in the sentence below"
    assert "The 200 that differ most of 250 cells" in compared.out
    assert compared.err.count("worse: v fwd L") == 200
    assert compared.err.endswith("worse: 50 more\n")
    assert len(json.loads(call("compare", "many", "slow", "--json").out)) == 250


def test_a_comparison_says_what_it_could_not_read(call, tmp_path):
    records = [scaling("full", n) for n in (512, 1024)]
    write_run(tmp_path / "before", records)
    (write_run(tmp_path / "after", records) / "cells" / f"{records[0].cell.key}.json").write_text('{"x":')
    answer = call("compare", str(tmp_path / "before"), str(tmp_path / "after"))
    assert answer.code == 0
    assert f"warning: after/cells/{records[0].cell.key}.json was skipped" in answer.err
    comment = call("compare", str(tmp_path / "before"), str(tmp_path / "after"), "--markdown").out
    assert "was skipped: not readable as JSON" in comment


@pytest.mark.parametrize("options", [["--format", "jsonl"], ["--format", "markdown"], ["--table", "exponents"]])
def test_an_export_says_what_it_could_not_read(call, tmp_path, options):
    run = write_run(tmp_path / "run", [scaling("full", length) for length in (512, 1024, 2048)])
    assert call("export", str(run), "--out", str(tmp_path / "whole"), *options).err == ""
    (run / "cells" / f"{scaling('full', 512).cell.key}.json").write_text("{")
    answer = call("export", str(run), "--out", str(tmp_path / "rest"), *options)
    assert answer.code == 0
    assert answer.err.startswith(f"warning: run/cells/{scaling('full', 512).cell.key}.json was skipped: not readable")
    assert answer.err.count("\n") == 1
    assert (tmp_path / "rest").read_bytes() not in {b"", (tmp_path / "whole").read_bytes()}


def test_where_a_report_cannot_be_written_is_found_before_it_is_made(call, tmp_path, monkeypatch):
    """A folder of many records takes minutes, and the message said after them is the one said at once."""
    run = write_run(tmp_path / "run", [scaling("full", length) for length in (512, 1024)])
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("attn_zoo.console.SILENCE_S", 300.0)  # a slow machine has nothing else to say either
    with monkeypatch.context() as late:
        late.setattr("attn_zoo.report.pages.write.require_writable", lambda path: None)
        written = call("report", str(run), "--out", str(tmp_path / "file" / "below"))
    monkeypatch.setattr("attn_zoo.report.analysis.analyse.read_results", lambda *_: pytest.fail("it began to read"))
    answer = call("report", str(run), "--out", str(tmp_path / "file" / "below"))
    assert answer == written
    assert answer.err == f"{tmp_path}/file/below/report.html: cannot be written: Not a directory\n"
    assert (answer.code, answer.out) == (2, "")
    assert call("report", str(run), "--out", "/proc/nowhere/report").code == 4
    assert "Not a directory" in call("export", str(run), "--out", str(tmp_path / "file" / "below.csv")).err
    assert "Not a directory" in call("share", str(run), "--out", str(tmp_path / "file" / "below.zip")).err
    answer = call("export", str(run), "--out", str(tmp_path / "all.parqet"))
    assert (answer.code, "got 'parqet'; did you mean 'parquet'?" in answer.err) == (2, True)


@pytest.mark.usefixtures("folders")
def test_doubtful_rows_do_not_fail_a_build(call, tmp_path):
    loaded = timed("v", 512, 20.0)
    write_run(tmp_path / "noisy", [replace(loaded, timing=replace(loaded.timing, flags=("loaded_host",)))])
    answer = call("compare", "before", "noisy", "--fail", "--fail-above", "5%")
    assert answer.code == 0
    assert "disturbed (loaded host)" in " ".join(answer.out.split())
    assert call("compare", "before", "noisy", "--fail-above", "5%", "--allow", "flagged").code == 3


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--fail-above", "fast"), "expected a share, such as 5% or 0.05; got 'fast'"),
        (("--fail-above", "-5%"), "expected a share"),
        (("--fail-above", "nan"), "expected a share"),
        (("--fail-above", "5"), "expected a share"),
        (("--allow", "env"), "unknown allowance 'env'"),
    ],
)
def test_a_mistake_in_an_option_is_one_message(call, arguments, words):
    answer = call("compare", "before", "after", *arguments)
    assert answer.code == 2
    assert words in answer.err


def test_other_environments_are_compared_where_they_are_allowed(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = replace(MACHINE, cpu="Other CPU")
    write_run(tmp_path / "a", [timed("v", 512, 10.0)])
    write_run(tmp_path / "b", [replace(timed("v", 512, 10.0), environment=other.digest)], environment=other)
    refused = call("compare", "a", "b")
    assert (refused.code, "differ in environment (cpu)" in refused.err) == (2, True)
    assert call("compare", "a", "b", "--allow", "environment").code == 0


@pytest.mark.usefixtures("folders")
def test_a_packed_run_is_opened_by_every_command_that_reads(call, tmp_path):
    said = call("share", "before")
    assert said.code == 0
    assert said.out.startswith("wrote before.zip (")
    for arguments in (
        ("compare", "before", "before.zip", "--fail-above", "5%"),
        ("report", "before.zip"),
        ("export", "before.zip", "--out", "all.csv"),
    ):
        assert call(*arguments).code == 0, arguments
    assert (tmp_path / "before" / "report.html").is_file(), "beside the packed run, in a folder of its name"
    readme = call("report", "before.zip", "--readme")
    assert (readme.code, "expected one results folder" in readme.err) == (2, True)


def test_a_model_of_another_size_is_told_of_and_no_mistake(call, tmp_path):
    sizes = {"full": 65_000, "linformer": 130_000}
    records = [
        accuracy(name, 0, 0.3, score={"num_params": size, "correct": "1110000000"}) for name, size in sizes.items()
    ]
    answer = call("verify", str(write_run(tmp_path / "run", records)))
    assert (answer.code, "100.00 % more parameters than full" in " ".join(answer.out.split())) == (0, True)
    assert "budgets: 1 told" in answer.out


@pytest.mark.usefixtures("folders")
def test_verify_says_what_is_wrong_and_fails(call):
    answer = call("verify", "before")
    assert answer.code == 1
    assert answer.out.startswith("gate: ")
    assert "gate: 3 wrong" in answer.out
    assert "limits: passed" in answer.out
    assert "v/scaling/fwd/L512/fp32/seed0" in "".join(answer.out.split())
    rows = json.loads(call("verify", "before", "--json").out)
    assert {row["check"] for row in rows} == {"gate"}
    assert call("verify", "nowhere").code == 2


def test_shards_are_merged(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one", [scaling("v", 512)])
    write_run(tmp_path / "two", [scaling("v", 1024)])
    done = call("merge", "one", "two", "--out", "all of it")
    assert done.code == 0
    assert done.out.endswith("next: attn-zoo status 'all of it'\n"), "as a shell takes it"
    assert len(list((tmp_path / "all of it" / "cells").iterdir())) == 2
    for number in (1, 2):
        write_run(tmp_path / str(number), [scaling("v", 512 * number)], shards=[["quick", number, 3]])
    assert "; shard 3 of 3 has not run here; next:" in call("merge", "1", "2", "--out", "three").out
    again = call("merge", "one", "two", "--out", "all of it")
    assert (again.code, "exists already" in again.err) == (2, True)


def test_hostile_names_print_no_escape_codes(call, tmp_path):
    hostile = "\x1b]0;owned\x07[red]x[/red]"
    folder = write_run(tmp_path / "run", [timed(hostile, 512, 10.0)])
    for command in (["verify", str(folder)], ["compare", str(folder), str(folder), "--markdown"]):
        printed = call(*command)
        assert "\x1b" not in printed.out + printed.err
        assert "[red]x" in printed.out.replace("\\", "")


PAGE = Path(__file__).parents[1] / "docs" / "continuous-integration.md"


def test_the_workflow_that_the_documents_show_can_be_planned_and_says_no_unknown_option(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    (matrix,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    Path("ci.toml").write_text(matrix)
    planned = call("plan", "ci.toml")
    assert "4 cells on cpu: 4 to run" in planned.out
    assert "in up to 5 rounds" in planned.out
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    for line in re.findall(r"attn-zoo ([a-z]+ [^\n`&]*)", text):
        name, *words = line.split()
        known = {option for each in commands[name].params for option in each.opts}
        assert {word for word in words if word.startswith("--")} <= known, line
