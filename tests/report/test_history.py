"""Times over the commits of a repository: what was measured, in order, and never joined across machines."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest

from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.report.figures.svg import render
from attn_zoo.report.history import History, history
from tests.report.synthetic import MACHINE, scaling, write_run
from tests.report.test_compare import timed

NEWER = replace(MACHINE, versions={"python": "3.11.9", "torch": "3.0.0"})


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Commit a run four times: 10 ms, 9 ms, README only, then 5 ms with another torch; then take it away."""
    monkeypatch.chdir(tmp_path)

    def git(*arguments):
        done = subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")

    def commit(ms, subject, machine=MACHINE):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        lengths = [timed("v", 512, ms), timed("v", 1024, 2 * ms), timed("w", 1024, 3 * ms), timed("v", 4096, 9.0)]
        records = [*lengths, timed("v", 1024, 99.5, pass_="bwd"), scaling("x", 1024, status="crashed", reason="signal")]
        write_run(
            tmp_path / "runs" / "one",
            [replace(one, environment=machine.digest) for one in records],
            environment=machine,
        )
        git("add", "-A")
        git("commit", "-qm", subject)

    commit(10.0, "first")
    commit(9.0, "faster | with a bar")
    (tmp_path / "runs" / "one" / "README.md").write_text("words")
    git("add", "-A")
    git("commit", "-qm", "words only")
    commit(5.0, "torch", NEWER)
    return git


def test_one_row_for_each_commit_that_changed_the_records_oldest_first(repository):
    found = history("runs/one")
    assert found.title == "Forward, 1k tokens, float32, cpu, over commits"
    v = found.frame[found.frame["label"] == "v"]
    assert v["subject"].tolist() == ["first", "faster | with a bar", "torch"]
    assert v["median_ms"].round().tolist() == [20, 18, 10]
    assert v["era"].tolist() == [1, 1, 2]
    assert set(found.frame["label"]) == {"v", "w"}, "what crashed has no time"
    assert v["commit"].tolist()[-1] == repository("rev-parse", "HEAD")
    assert found.table().texts()[0][0] == v["commit"].tolist()[0][:9]


def test_rows_of_a_commit_are_in_the_order_of_names(repository, tmp_path):
    records = [timed(name, 1024, time) for time, name in enumerate("cab", start=1)]
    shutil.rmtree(tmp_path / "runs")
    write_run(tmp_path / "runs" / "two", records)
    repository("add", "-A")
    repository("commit", "-qm", "three")
    assert history("runs/two").frame["label"].tolist() == ["a", "b", "c"]


@pytest.mark.parametrize("number", [2, 8, 30])
def test_names_of_commits_do_not_overlap(number):
    times = {"median_ms": 5.0, "low_ms": 4.0, "high_ms": 6.0, "era": 1, "doubts": ()}
    times |= {"is_exact": False, "is_control": False}
    rows = [{"commit": f"{place:02}dddddddd", "label": "a_variant_with_a_name", **times} for place in range(number)]
    figure = History(frame=pd.DataFrame(rows), title="Forward").page().figure
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert all(one.x1 < two.x0 for one, two in pairwise(boxes))
    assert len(boxes) >= 2


def test_a_curve_is_of_one_setting_and_of_one_choice_of_options(repository, tmp_path):
    """Padding, the size of a head, options and compilation each make another time, which is no step of history."""
    more: list[dict[str, Any]] = [{}, {"has_padding": True}, {"head_dim": 128}, {"num_kv_heads": 1}, {"dropout_p": 0.1}]
    for number in range(2):
        shutil.rmtree(tmp_path / "runs")
        records = [timed("v", 1024, number + place + 1.0, **cell) for place, cell in enumerate(more)]
        records += [timed("w", 1024, number + 20.0), timed("w", 1024, number + 30.0, options={"proj_len": 32})]
        write_run(tmp_path / "runs" / "two", records)
        repository("add", "-A")
        repository("commit", "-qm", f"number {number}")
    found = history("runs/two")
    medians = {str(label): rows["median_ms"].round().tolist() for label, rows in found.frame.groupby("label")}
    assert medians == {"v": [1, 2], "w (defaults)": [20, 21], "w (proj_len=32)": [30, 31]}
    assert found.title == "Forward, 1k tokens, float32, cpu, 8 key/value heads, head size 64, over commits"


def test_the_length_is_the_longest_that_most_have(repository, tmp_path):
    shutil.rmtree(tmp_path / "runs")
    lengths = {"v": (512, 1024, 4096), "w": (512, 1024), "x": (512,)}
    write_run(tmp_path / "runs" / "two", [timed(name, n, 1.0) for name, every in lengths.items() for n in every])
    repository("add", "-A")
    repository("commit", "-qm", "lengths")
    assert set(history("runs/two").frame["seq_len"]) == {1024}


@pytest.mark.usefixtures("repository")
def test_what_is_shown_can_be_chosen(tmp_path, monkeypatch):
    assert set(history("runs/one", variants=["w"]).frame["label"]) == {"w"}
    assert history("runs/one", pass_="bwd").frame["median_ms"].round().tolist() == [100, 100, 100]
    assert history("runs/one", seq_len=512).frame["median_ms"].round().tolist() == [10, 9, 5]
    assert history("runs/one", most=1, variants=["v"]).frame["subject"].tolist() == ["torch"]
    monkeypatch.chdir(tmp_path / "runs")
    assert len(history("one").frame) == len(history(str(tmp_path / "runs" / "one")).frame) == 6


@pytest.mark.usefixtures("repository")
def test_the_figure_joins_no_points_of_different_machines():
    page = history("runs/one", variants=["v"]).page()
    (axes,) = page.figure.axes[:1]
    curves = [
        np.asarray(line.get_xdata()).tolist() for line in axes.lines if line.get_marker() not in ("None", None, "")
    ]
    assert sorted(curves) == [[1, 2], [3]]
    assert "Dashed: another machine" in page.note
    assert page.alt.count("ms") >= 3
    assert render(page.figure, "svg") == render(history("runs/one", variants=["v"]).page().figure, "svg")


def test_of_a_folder_of_two_machines_no_line_parts_points_that_compare(repository, tmp_path):
    """One variant is measured anew on another machine at the second commit, the other one at the third."""
    both = {machine.digest: machine.to_dict() for machine in (MACHINE, NEWER)}
    for number in range(4):
        shutil.rmtree(tmp_path / "runs")
        since = {"v": 1, "w": 2}
        records = [
            replace(timed(name, 512, number + 1.0), environment=(NEWER if number >= at else MACHINE).digest)
            for name, at in since.items()
        ]
        write_run(tmp_path / "runs" / "two", records, environments=both)
        repository("add", "-A")
        repository("commit", "-qm", f"number {number}")
    page = history("runs/two").page()
    assert "Dashed" not in page.note
    assert "only points that are joined compare" in page.note
    (axes,) = page.figure.axes[:1]
    curves = [np.asarray(line.get_xdata()).tolist() for line in axes.lines if line.get_marker() not in ("None", "")]
    assert sorted(curves) == [[1], [1, 2], [2, 3, 4], [3, 4]]


def test_what_makes_a_time_doubtful_stands_beside_it(repository, tmp_path):
    disturbed = timed("v", 1024, 5.0)
    disturbed = replace(disturbed, timing=replace(disturbed.timing, flags=("loaded_host",)))
    shutil.rmtree(tmp_path / "runs")
    write_run(tmp_path / "runs" / "one", [disturbed], environment=NEWER)
    repository("add", "-A")
    repository("commit", "-qm", "beside a build")
    found = history("runs/one", variants=["v"], seq_len=1024)
    assert [text[3].endswith("\u2021") for text in found.table().texts()] == [False, False, False, True]
    assert "\u2021: something else used the machine meanwhile." in found.table().note
    assert "covers what differs between the 3 processes" in found.table().note
    assert found.page().note.endswith("1 of 4 times of a busy machine.")
    assert "busy" not in history("runs/one", variants=["w"], seq_len=1024).page().note


@pytest.mark.usefixtures("repository")
def test_a_folder_that_was_taken_away_has_its_past(repository):
    repository("rm", "-rq", "runs")
    repository("commit", "-qm", "gone")
    assert len(history("runs/one", variants=["v"]).frame) == 3


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"variants": ["vv"]}, "unknown variant 'vv'"),
        ({"pass_": "fwdd"}, "unknown pass 'fwdd'; did you mean 'fwd'"),
        ({"seq_len": 1000}, "unknown length '1000'"),
    ],
)
def test_what_no_commit_timed_is_named(arguments, words):
    with pytest.raises(UnknownNameError, match=words):
        history("runs/one", **arguments)


@pytest.mark.usefixtures("repository")
def test_a_folder_without_commits_or_times_says_so(repository, tmp_path):
    with pytest.raises(ConfigError, match="no commit of it in a git repository here"):
        history("runs/two")
    write_run(tmp_path / "empty", [])
    repository("add", "-A")
    repository("commit", "-qm", "empty")
    with pytest.raises(ConfigError, match="none of its 1 commits holds times"):
        history("empty")


@pytest.mark.usefixtures("repository")
def test_the_command_prints_the_table_and_writes_the_figure(call, tmp_path):
    answer = call("history", "runs/one", "--variant", "v", "--out", "h.png")
    assert answer.code == 0
    assert answer.out.count("2026") + answer.out.count("20") >= 3
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    assert call("history", "runs/none").code == 2


@pytest.mark.usefixtures("repository")
def test_columns_without_room_are_not_said_to_be_in_files(call, monkeypatch):
    monkeypatch.setattr("attn_zoo.console.out._width", 50)
    assert "left out here, with --json: subject" in " ".join(call("history", "runs/one").out.split())
