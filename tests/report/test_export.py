"""Flat files: complete, strict, harmless in a spreadsheet, and never half written."""

import io
import json
from dataclasses import replace

import pandas as pd
import pytest

import attn_zoo.report.export as exporting
from attn_zoo.errors import ConfigError, StoreError
from attn_zoo.report.analysis.observations import read_results
from attn_zoo.report.export import COLUMNS, FORMATS, export, flat_frame
from tests.report.synthetic import accuracy, scaling, write_run

EXPORTED = [name for name in COLUMNS if name != "correct"]

# fmt: off
PROMISED = {
    "variant", "label", "kind", "seq_len", "batch_size", "num_heads", "num_kv_heads", "head_dim", "dtype", "device",
    "pass", "scope", "is_causal", "has_padding", "dropout_p", "status", "reason", "median_ms", "q1_ms", "q3_ms",
    "low_ms", "high_ms", "first_ms", "num_warmup", "inner_loops", "timer", "process_cpu_ms", "process_sizes",
    "graph_ms", "graph_reason", "peak_bytes", "extra_bytes", "saved_bytes", "input_bytes", "output_bytes",
    "reserved_bytes", "process_bytes", "flops", "min_bytes", "backward_ratio", "counted_flops", "energy_joules",
    "kernel", "is_simulated", "num_params", "task", "level", "metric", "value", "validation", "num_examples",
    "chance", "best_step", "num_steps", "train_flops", "train_s", "tokens_per_s", "padding_frac", "pretrain",
    "pretrain_s", "pretrain_flops", "tokens_per_s_low", "tokens_per_s_high", "num_tokens", "train_peak_bytes",
    "floors", "references", "seed", "threads", "protocol", "overrides", "grid", "protocol_version", "options",
    "variant_digest", "data_digest", "environment", "run", "key", "started", "duration_s", "overhead_s", "phases",
    "isolation", "bundle", "attempt", "exit_code", "num_jobs", "gate", "flags", "num_samples", "samples_ms",
    "breakdown", "curve", "settings",
}
# fmt: on
"""Columns of version 0.1: what reads them by name must go on working."""


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


@pytest.mark.parametrize("fmt", ["csv", "jsonl"])
def test_parts_make_the_same_file_and_keep_all_digits(tmp_path, monkeypatch, fmt):
    long = replace(scaling("full", 1024), flops=2**62 + 1, phases={"timing": 1.0})
    run = write_run(tmp_path / "run", [long, *(accuracy("full", seed, 0.25) for seed in range(4))])
    whole = export([run], fmt, tmp_path / "whole").read_bytes()
    monkeypatch.setattr(exporting, "ROWS_OF_A_PART", 2)
    assert export([run], fmt, tmp_path / "parts").read_bytes() == whole
    assert str(2**62 + 1).encode() in whole
    assert len(whole.splitlines()) == 5 + (fmt == "csv")


def test_no_column_is_lost():
    assert set(PROMISED) <= set(EXPORTED)


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
    frame = pd.read_parquet(export([run], "parquet", tmp_path / "out.parquet"))
    expected = flat_frame(read_results([run]).observations)
    assert frame["median_ms"].equals(expected["median_ms"])
    assert [list(samples) for samples in frame["samples_ms"]] == expected["samples_ms"].tolist()
    assert str(frame["seq_len"].dtype) == "Int64"


def test_markdown_and_latex_hold_the_tables(run, tmp_path):
    markdown = export([run], "markdown", tmp_path / "out.md").read_text()
    assert "| variant | 512 |" in markdown
    assert "Cells without a measurement" in markdown
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
