"""Training steps in the report: tokens per second and their intervals, what is saved, compiled or as written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attn_zoo.api import load
from attn_zoo.records import Memory, Record
from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.export import export
from attn_zoo.report.pages.findings import panel_findings
from attn_zoo.report.tables.all_tables import make_tables
from attn_zoo.report.tables.table import MISSING, Table
from attn_zoo.report.tables.time_tables import measurement_table, step_table
from tests.report.synthetic import analysed, pictures_of, scaling, write_run, zoo

STEP: dict[str, Any] = {
    "scope": "model",
    "pass_": "step",
    "protocol": "lra-small",
    "batch_size": 8,
    "protocol_version": 202,
}


def step(variant: str, seq_len: int, median_ms: float, *, saved_bytes: int | None = 3 * 2**20, **cell: Any) -> Record:
    """Return a record of a training step with round numbers: 10 % to either side."""
    record = scaling(variant, seq_len, median_ms, **{**STEP, **cell})
    if record.timing is None:
        return record
    ends: dict[str, Any] = {
        "median_ms": median_ms,
        "low_ms": 0.9 * median_ms,
        "high_ms": 1.1 * median_ms,
        "first_ms": 7e3,
    }
    memory = Memory(peak_bytes=10 * 2**20, extra_bytes=2**20, saved_bytes=saved_bytes)
    return replace(record, timing=replace(record.timing, **ends), memory=memory)


def reported(path: Path, *records: Record, **run: Any) -> tuple[Analysis, Table]:
    analysis = analysed(path, records, **run)
    table = step_table(analysis)
    assert table is not None
    return analysis, table


def shown(table: Table) -> list[dict[str, str]]:
    headings = [column.heading for column in table.columns]
    return [dict(zip(headings, row, strict=True)) for row in table.texts()]


def test_titles_beside_steps_name_nothing_that_only_steps_have(tmp_path: Path):
    one = scaling("full", 1024, 5.0, batch_size=1)
    analysis, _ = reported(tmp_path, one, replace(one, cell=replace(one.cell, is_causal=True)), step("full", 1024, 9.0))
    titles = {panel.name: panel.title for panel in analysis.panels}
    assert titles == {
        "fwd-bidirectional": "forward, bidirectional",
        "fwd-causal": "forward, causal",
        "step": "training step",
    }


def test_tokens_per_second_follow_from_the_time_and_so_does_their_interval(tmp_path: Path):
    analysis, table = reported(tmp_path, step("full", 1024, 100.0), step("linformer", 1024, 50.0))
    fast, slow = table.rows
    assert (fast["variant"], slow["variant"]) == ("linformer", "full")
    tokens = 8 * 1024
    for row, seconds in ((fast, 0.05), (slow, 0.1)):
        found = [row[name] for name in ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high")]
        assert found == pytest.approx([tokens / seconds, tokens / seconds / 1.1, tokens / seconds / 0.9])
    assert shown(table)[1] == {
        "variant": "full",
        "length": "1k",
        "mode": "eager",
        "time": "100 ms [90, 110]",
        "tokens/s": "81.9 k [74.5, 91]",
        "peak memory": "10 MiB",
        "saved": "3 MiB",
        "first step": "7 s",
    }
    rows = {row["variant"]: row for row in measurement_table(analysis).rows}
    for row in table.rows:
        assert rows[row["variant"]]["tokens_per_s_low"] == row["tokens_per_s_low"]
    assert "50 ms a step, 164,000 tokens/s" in panel_findings(analysis)[0]


def test_padding_is_no_token(tmp_path: Path):
    _, table = reported(tmp_path, step("full", 1000, 1000.0, has_padding=True, batch_size=4))
    assert table.rows[0]["tokens_per_s"] == pytest.approx(2 * 1000 + 2 * 750)


def test_a_compiled_step_says_so_and_is_not_pooled_with_an_eager_one_of_its_name(tmp_path: Path):
    fast = step("full", 1024, 25.0, overrides={"compile": True})
    _, table = reported(tmp_path, step("full", 1024, 100.0), fast, step("linformer", 1024, 50.0))
    found = [(row["variant"], row["mode"], row["time"].partition(" [")[0]) for row in shown(table)]
    assert found == [
        ("full (compiled)", "compiled", "25 ms"),
        ("linformer", "eager", "50 ms"),
        ("full", "eager", "100 ms"),
    ]
    alone = write_run(tmp_path / "alone", [fast, scaling("full", 1024)])
    assert set(load([alone]).frame["label"]) == {"full"}, "nothing to tell apart"


def test_what_failed_or_was_not_measured_is_no_number(tmp_path: Path):
    failed = scaling("full", 2048, status="oom_host", reason="needed 34.4 GB", **STEP)
    old = step("linformer", 2048, 50.0, saved_bytes=None)
    _, table = reported(tmp_path, failed, old, step("full", 1024, 50.0))
    assert [(row["variant"], row["seq_len"], row["status"]) for row in table.rows] == [
        ("full", 1024, "ok"),
        ("linformer", 2048, "ok"),
        ("full", 2048, "oom_host"),
    ]
    _, before, last = shown(table)
    assert before["saved"] == MISSING
    assert last["time"] not in {MISSING, ""}
    assert {last[name] for name in ("tokens/s", "peak memory", "saved", "mode", "first step")} == {MISSING}
    assert table.rows[2]["tokens_per_s"] is None


def test_the_export_has_them_and_calls_have_none(tmp_path: Path):
    folder = write_run(tmp_path / "run", [step("full", 1024, 100.0), scaling("full", 1024)])
    frame = pd.read_csv(export([folder], "csv", tmp_path / "out.csv"))
    rows = {row["pass"]: row for row in frame.to_dict("records")}
    names = ["num_tokens", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"]
    assert [rows["step"][name] for name in names] == pytest.approx([8192, 81_920, 81_920 / 1.1, 81_920 / 0.9])
    assert all(pd.isna(rows["fwd"][name]) for name in names)
    assert "81.9 k" in export([folder], "markdown", tmp_path / "out.md").read_text()
    latex = export([folder], "latex", tmp_path / "out.tex").read_text()
    assert "tokens/s" in latex


def test_samples_of_several_records_are_pooled_before_the_rate(tmp_path: Path):
    _, table = reported(tmp_path, *(step("full", 1024, 100.0, seed=seed) for seed in (0, 1)))
    [row] = table.rows
    assert row["tokens_per_s"] == pytest.approx(8192e3 / row["median_ms"])
    assert row["tokens_per_s_low"] == pytest.approx(8192e3 / row["high_ms"])


def test_a_report_without_steps_has_no_such_table(tmp_path: Path):
    analysis = analysed(tmp_path, zoo(lengths=[512, 1024]))
    assert step_table(analysis) is None
    assert not any("tokens/s" in text for text in panel_findings(analysis))


def test_steps_of_one_length_have_one_table_and_of_several_wide_ones_too(tmp_path: Path):
    one, _ = reported(tmp_path / "one", step("full", 1024, 100.0), step("linformer", 1024, 50.0))
    names = [table.name for table in make_tables(one)]
    assert not any(name.startswith(("time-", "memory-")) for name in names)
    assert "steps" in names
    two, _ = reported(tmp_path / "two", *(step("full", length, length / 10) for length in (512, 1024)))
    assert any(table.name.startswith("time-") for table in make_tables(two))


def test_what_a_mechanism_claims_is_not_said_of_the_model_around_it(tmp_path: Path):
    lengths = [512, 1024, 2048, 4096]
    analysis, _ = reported(tmp_path, *(step(name, n, n / 10) for name in ("full", "linformer") for n in lengths))
    growth = analysis.panels[0].time
    assert all(found.claimed is None and found.exponent is not None for found in growth.values())
    assert analysis.panels[0].baseline is not None, "exact all the same"
    pictures = pictures_of(analysis)
    assert not any("claimed" in picture.alt for picture in pictures)


def test_at_one_length_nothing_crosses(tmp_path: Path):
    members = [replace(step(name, 1024, ms), bundle="b") for name, ms in (("full", 100.0), ("linformer", 50.0))]
    analysis, _ = reported(tmp_path, *members)
    tables = {table.name: table for table in make_tables(analysis)}
    assert tables["crossovers"].rows == ()
    assert tables["exponents"].note == "Nothing to fit: it takes two lengths."
    assert "cheaper" not in panel_findings(analysis)[0]


def test_an_exact_kernel_is_not_compared_with_twice(tmp_path: Path):
    records = [step(name, 1024, ms) for name, ms in (("full", 100.0), ("linformer", 50.0))]
    slower = step("full", 1024, 120.0, label="full again")
    analysis, _ = reported(tmp_path, *records, slower)
    found = [(crossing.against, crossing.is_main) for crossing in analysis.panels[0].crossings]
    assert found == [("full", True), ("full again", False)]
