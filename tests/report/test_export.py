"""Flat files: complete, strict, harmless in a spreadsheet, and never half written."""

import io
import json

import pandas as pd
import pytest

from attn_zoo.errors import ConfigError, StoreError
from attn_zoo.report.export import FORMATS, export
from attn_zoo.report.flat import COLUMNS
from tests.report.synthetic import accuracy, scaling, write_run

EXPORTED = [name for name in COLUMNS if name != "correct"]


@pytest.fixture
def run(tmp_path):
    records = [
        scaling("full", 512),
        scaling("=1+1", 512, status="error", reason="@SUM(A1)"),
        accuracy("full", 0, 0.25),
        accuracy("full", 1, None, status="diverged"),
    ]
    return write_run(tmp_path / "run", records)


def test_csv(run, tmp_path):
    frame = pd.read_csv(export([run], "csv", tmp_path / "out.csv"))
    assert list(frame.columns) == EXPORTED
    assert len(frame) == 4
    refused = frame[frame["status"] == "error"].iloc[0]
    assert (refused["variant"], refused["reason"]) == ("'=1+1", "'@SUM(A1)")
    measured = frame[frame["median_ms"].notna()].iloc[0]
    assert measured["seq_len"] == 512
    assert len(json.loads(measured["samples_ms"])) == measured["num_samples"] == 15
    assert "512.0" not in (tmp_path / "out.csv").read_text()


def test_jsonl_is_strict_and_nested_values_stay_nested(run, tmp_path):
    def refuse(word):
        raise AssertionError(word)

    lines = export([run], "jsonl", tmp_path / "out.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert len(rows) == 4
    assert all(list(row) == EXPORTED for row in rows)
    by_status = {row["status"]: row for row in rows}
    assert by_status["error"]["median_ms"] is None
    assert by_status["error"]["variant"] == "=1+1"  # no spreadsheet reads this
    assert any(len(row["samples_ms"]) == 15 for row in rows)


def test_parquet_gives_back_the_same_frame(run, tmp_path):
    from attn_zoo.report.analysis.observations import load_runs

    frame = pd.read_parquet(export([run], "parquet", tmp_path / "out.parquet"))
    expected = load_runs([run])
    assert frame["median_ms"].equals(expected["median_ms"])
    assert [list(samples) for samples in frame["samples_ms"]] == expected["samples_ms"].tolist()
    assert str(frame["seq_len"].dtype) == "Int64"


def test_markdown_and_latex_hold_the_tables(run, tmp_path):
    markdown = export([run], "markdown", tmp_path / "out.md").read_text()
    assert "| variant | 512 |" in markdown
    assert "What did not run, and why" in markdown
    latex = export([run], "latex", tmp_path / "out.tex").read_text()
    assert latex.count(r"\begin{table}") == latex.count(r"\end{table}") >= 3


def test_an_unknown_format_names_the_nearest_and_writes_nothing(run, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'parquet'"):
        export([run], "parket", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_folder_without_results_writes_nothing(tmp_path, fmt):
    with pytest.raises(ConfigError, match="not a results folder"):
        export([tmp_path], fmt, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fmt", FORMATS)
def test_an_empty_run_is_exported(tmp_path, fmt):
    path = export([write_run(tmp_path / "run", [])], fmt, tmp_path / "out")
    assert path.exists()
    if fmt == "csv":
        assert list(pd.read_csv(io.StringIO(path.read_text())).columns) == EXPORTED


def test_what_cannot_be_written_is_one_message_and_leaves_the_old_file(run, tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(StoreError, match="cannot be written"):
        export([run], "csv", tmp_path / "file" / "out.csv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        export([run], "csv", tmp_path / "folder")
    assert (tmp_path / "file").read_text() == "old"
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
