"""Exports come back as the records they were made of, and pytest-benchmark's JSON as times; damage is said."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from attn_zoo.api import load
from attn_zoo.errors import ConfigError
from attn_zoo.report.analysis.observations import read_results
from attn_zoo.report.compare import compare
from attn_zoo.report.export import export
from attn_zoo.report.flat_records import flat_row, record_of
from attn_zoo.report.sources import read_source
from tests.report.synthetic import accuracy, costed, curve, exchanged, scaling, tuned, write_run
from tests.report.test_compare import timed

FORMS = ("csv", "jsonl", "parquet")


@pytest.fixture
def records():
    step: dict[str, Any] = {"scope": "model", "pass_": "step", "protocol": "lra-small", "overrides": {"compile": True}}
    return [
        replace(costed(timed("full", 512), 2**40, 2**20), gate=("causality", "finite"), phases={"gate": 0.5}),
        scaling("=1+1", 512, status="error", reason="@SUM(A1)", options={"k": [1, 2], "mode": "x"}),
        scaling("full", 1024, status="unsupported", reason="'quoted', with a comma\nand a line", threads=None),
        scaling("linformer", 512, 3.0, **step),
        accuracy("full", 0, 0.25, score={"curve": curve(0.1, 0.25), "train_flops": 1e18, "correct": ""}),
        accuracy("full", 1, None, status="diverged"),
        *(
            replace(one, score=replace(one.score, correct=""))
            for one in (*tuned("luna", {0.1: [0.5]}), exchanged("linformer", 0, 0.25, adapt_steps=5))
            if one.score
        ),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_an_export_gives_back_its_records(records, tmp_path, form):
    """All but what an export leaves out: traces and single answers. Labels that were derived are there as given."""
    folder = write_run(tmp_path / "run", records)
    back = read_source(export([folder], form, tmp_path / f"all.{form}"))
    assert back.warnings == ()
    assert back.name == "quick"
    read = {one.cell.key: one.record for one in read_results([folder]).observations}
    assert len(back.records) == len(read) == len(records)
    for record in back.records:
        found = replace(record, cell=replace(record.cell, label=""))
        given = read[found.cell.key]
        if given.score is not None:
            found = replace(found, num_params=given.num_params)  # one column for the module's and the model's
        if not given.environment:
            found = replace(found, environment="")  # of a cell that never started: that of its run
        assert found == given


@pytest.mark.parametrize("form", FORMS)
def test_an_export_compares_like_the_run_that_it_is_of(records, tmp_path, form):
    folder = write_run(tmp_path / "run", records)
    slower = [replace(timed("full", 512, 100.0), flops=None)]
    other = write_run(tmp_path / "other", slower)
    path = export([folder], form, tmp_path / f"all.{form}")
    assert set(compare(folder, path).times["verdict"]) == {"same"}
    assert len(load([path]).frame) == len(records)
    there = compare(folder, other).times
    assert compare(path, other).times["verdict"].tolist() == there["verdict"].tolist()


def test_a_row_survives_as_text_alone():
    record = costed(timed("full", 512), 2**53 + 1, 7)
    row = {
        name: json.dumps(value) if isinstance(value, list) else str(value) for name, value in flat_row(record).items()
    }
    empty = {name: "" for name, value in row.items() if value == "None"}
    assert record_of({**row, **empty, "environment": record.environment}, "x") == record


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.csv", "a,b\n1,2\n", "expected an export of attn-zoo; x.csv, row 1"),
        ("x.csv", "run,kin\n", "expected an export of attn-zoo; it has no rows"),
        ("x.csv", '"', "cannot be read"),
        ("x.jsonl", "{", "cannot be read: JSONDecodeError"),
        ("x.jsonl", "[1]\n", "cannot be read"),
        ("x.jsonl", '{"kind": 3}\n', "expected an export of attn-zoo"),
        ("x.parquet", "PAR1", "cannot be read"),
        ("x.json", "[1, 2]", "expected JSON of pytest-benchmark"),
        ("x.json", "{}", "it has no benchmarks"),
        ("x.json", '{"benchmarks": [{"fullname": "f", "stats": {}}]}', "was saved without its samples"),
        ("x.json", '{"benchmarks": [3]}', "cannot be read"),
        ("x.json", "[" * 100_000, "cannot be read"),
        ("x.txt", "hello", "got a file"),
    ],
)
def test_a_file_that_holds_no_results_says_why(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_source(path)


def test_a_damaged_row_is_skipped_with_a_warning(records, tmp_path):
    path = export([write_run(tmp_path / "run", records)], "jsonl", tmp_path / "all.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["samples_ms"], lines[1]["seq_len"] = "[1, ", "many"
    path.write_text("\n".join(map(json.dumps, lines)))
    run = read_source(path)
    assert len(run.records) == len(records) - 2
    assert "row 1: samples_ms: expected a list or JSON; got '[1, '" in run.warnings[0]
    assert "row 2" in run.warnings[1]


def benchmark(path, seconds, commit="c0", cpu="CPU", start="2026-01-01T00:00:00"):
    entry = {"name": "test_x[16]", "fullname": "b.py::test_x[16]", "extra_info": {"seq_len": 16, "device": "cpu"}}
    entry["stats"] = {"data": [seconds * (1 + 0.01 * (index % 3)) for index in range(9)], "iterations": 4}
    machine = {"node": "n", "system": "Linux", "cpu": {"brand_raw": cpu, "count": 2}, "python_version": "3.12"}
    data = {"machine_info": machine, "commit_info": {"id": commit}, "datetime": start, "benchmarks": [entry]}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data))


def test_json_of_pytest_benchmark_is_one_process_and_a_folder_of_it_several(tmp_path):
    for side, seconds in (("a", 0.1), ("b", 0.2)):
        for index in range(3):
            benchmark(tmp_path / side / f"{index}.json", seconds * (1 + 0.002 * index))
    one = compare(tmp_path / "a" / "0.json", tmp_path / "b" / "0.json").times.iloc[0]
    assert (one["verdict"], one["why"]) == ("cannot say", "apart, but of one process, so that nobody can say")
    assert one["median_ms_a"] == pytest.approx(101.0)
    three = compare(tmp_path / "a", tmp_path / "b").times.iloc[0]
    assert (three["verdict"], three["num_processes_a"], three["seq_len"]) == ("slower", 3, 16)
    assert three["ratio"] == pytest.approx(2.0)


def test_benchmarks_of_older_commits_and_other_machines_stay_apart(tmp_path):
    benchmark(tmp_path / "a" / "1.json", 0.5, commit="c1")
    for index in (2, 3):
        benchmark(tmp_path / "a" / f"{index}.json", 0.1, commit="c2", start=f"2026-01-02T00:00:0{index}")
    found = compare(tmp_path / "a", tmp_path / "a").times.iloc[0]
    assert (found["num_processes_a"], found["median_ms_a"]) == (2, pytest.approx(101.0))
    benchmark(tmp_path / "b.json", 0.1, cpu="other")
    with pytest.raises(ConfigError, match=r"differ in environment \(cpu\)"):
        compare(tmp_path / "a", tmp_path / "b.json")
