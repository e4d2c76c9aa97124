"""Decoded tokens in the report: their state, tokens per second, and what slopes mean of them."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attn_zoo.records import Memory, Record
from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.analysis.contradictions import contradicted_exponents
from attn_zoo.report.figures.all_figures import Picture
from attn_zoo.report.figures.scaling_curves import _growth_words
from attn_zoo.report.pages.findings import explanation, findings, headline, memory_findings, panel_findings
from attn_zoo.report.tables.efficiency_tables import efficiency_table
from attn_zoo.report.tables.table import MISSING, to_csv, to_latex, to_markdown
from attn_zoo.report.tables.time_tables import length_table, measurement_table
from tests.report.figures.legible import assert_legible, words
from tests.report.synthetic import DOUBLINGS, analysed, pictures_of, roof, scaling, write_run

DECODE: dict[str, Any] = {"kind": "decode", "pass_": "decode", "is_causal": True, "batch_size": 4}


def token(variant: str, seq_len: int, median_ms: float, state_bytes: int) -> Record:
    """Return a record of one token, whose peak memory is twice its state."""
    record = scaling(variant, seq_len, median_ms, spread=1e-3, **DECODE)
    return replace(record, flops=None, memory=Memory(peak_bytes=2 * state_bytes, state_bytes=state_bytes))


def tokens() -> list[Record]:
    return [
        record
        for length in DOUBLINGS
        for record in (
            token("full", length, 1e-4 * length, 4096 * length),
            token("linformer", length, 0.3, 2**20),
        )
    ]


def test_what_is_claimed_of_a_sequence_is_not_held_against_a_token(tmp_path: Path):
    analysis = analysed(tmp_path, tokens())
    [panel] = analysis.panels
    assert panel.title == "one decoded token"
    assert {label: growth.verdict for label, growth in panel.time.items()} == {
        "full": "linear",
        "linformer": "constant",
    }
    for growth in (*panel.time.values(), *panel.memory.values()):
        assert growth.claimed is None
    assert contradicted_exponents(analysis.panels) == []
    grown = panel.memory["linformer"]
    assert grown.exponent is not None
    assert _growth_words(replace(grown, exponent=replace(grown.exponent, value=-1e-4)), ()) == "N^0.00"
    assert headline(analysis).startswith("One decoded token on Example CPU @ 2.0 GHz: the fastest is full up to")
    (said,) = panel_findings(analysis)
    assert "linformer from 4k; after 32k 10.9" in said
    assert re.search(r"; linformer after 32k takes \d+ µs a token, 1\d,\d00 tokens/s\.$", said), said


def test_the_state_is_shown_and_the_peak_says_what_it_includes(tmp_path: Path):
    analysis = analysed(tmp_path, tokens())
    table = measurement_table(analysis)
    headings = [column.heading for column in table.columns]
    assert "state" in headings
    assert "saved" not in headings
    row = next(row for row in table.rows if row["variant"] == "full" and row["seq_len"] == 1024)
    assert row["state_bytes"] == 4096 * 1024
    assert row["tokens_per_s"] == pytest.approx(4 / 0.1024 * 1e3, rel=1e-3)
    shown = next(column for column in table.columns if column.heading == "tokens/s")
    assert shown.show(row).startswith("39 k [")
    assert "Tokens per second: read or written" in table.note
    whole = measurement_table(analysed(tmp_path / "calls", [scaling("full", 1024)]))
    assert "tokens/s" not in [column.heading for column in whole.columns]
    assert any("State: what a decoded token starts from" in str(note) for note in table.notes)
    assert not any("training step" in str(note) for note in table.notes)
    [panel] = analysis.panels
    assert "weights and buffers of the state included" in str(length_table(panel, "memory").notes)


def test_extra_memory_says_of_each_kind_of_call_what_it_is_without(tmp_path: Path):
    """The output of a token counts, that of a whole call does not."""
    extra = replace(scaling("full", 1024), memory=Memory(extra_bytes=2**20))
    token_extra = replace(tokens()[0], memory=Memory(extra_bytes=2**10))

    folders = (tmp_path / str(number) for number in itertools.count())

    def note(*records: Record) -> str:
        return measurement_table(analysed(next(folders), list(records))).note

    of_token = "of a decoded token without weights and buffers of the state."
    assert f"Extra memory: peak {of_token}" in note(token_extra)
    whole = "Extra memory: peak without inputs, output and gradients of the inputs"
    assert f"{whole}; {of_token}" in note(token_extra, extra)
    assert f"{whole}." in note(extra)


def test_a_rate_keeps_its_digits_however_low_it_is(tmp_path: Path):
    """Four tokens in three seconds are neither 1 a second nor none."""
    for median_ms, rate in ((3000.0, "1.33"), (30_000.0, "0.133"), (8.0, "500")):
        analysis = analysed(tmp_path / rate, [token("full", 1024, median_ms, 2**20)])
        assert panel_findings(analysis)[0].endswith(f" a token, {rate} tokens/s.")


def test_slopes_are_explained_of_what_was_timed(tmp_path: Path):
    both = [*tokens(), *(scaling("full", length) for length in DOUBLINGS)]
    of_tokens, of_both = explanation(analysed(tmp_path, tokens())), explanation(analysed(tmp_path / "both", both))
    assert "quadratic" not in of_tokens
    assert "slope 0" in of_tokens
    assert "quadratic" in of_both
    assert of_both.endswith(of_tokens)


def test_a_cache_that_grows_is_not_put_down_to_fused_kernels(tmp_path: Path):
    analysis = analysed(tmp_path, tokens())
    assert analysis.panels[0].memory["full"].verdict == "linear"
    assert memory_findings(analysis) == []
    assert not any("fused" in text for text in findings(analysis))


def test_a_token_stands_beside_the_roof_by_what_it_must_read(tmp_path: Path):
    """1 GB at 10 GB/s is 100 ms; nothing is promised by FLOPs."""
    records = [
        replace(token(name, 1024, ms, 10**9), min_bytes=10**9, counted_flops=10**6)
        for name, ms in (("full", 200.0), ("linformer", 400.0))
    ]
    analysis = analysed(tmp_path, records, ceilings=[roof(copy_bytes_per_s=1e10)])
    [panel] = analysis.panels
    [full], [other] = (panel.efficiency[name] for name in ("full", "linformer"))
    assert full.roof_frac == pytest.approx(0.5, rel=1e-3)
    assert other.roof_frac == pytest.approx(0.25, rel=1e-3)
    assert full.flops_per_s == pytest.approx(10**6 / 0.2, rel=1e-3)
    assert other.realised is None
    table = efficiency_table(analysis)
    assert table is not None
    assert "realised" not in [column.heading for column in table.columns]
    assert table.note.startswith("Of a decoded token: FLOPs as counted")
    assert "a backward counts" not in table.note


def roofline(path: Path, flops: dict[str, int], lengths: Sequence[int] = DOUBLINGS) -> Picture:
    """Return the roofline of tokens of 1 MB whose FLOPs were counted at some lengths."""
    records = [
        replace(record, min_bytes=10**6, counted_flops=flops[name] if record.cell.seq_len in lengths else None)
        for record in tokens()
        if (name := record.cell.variant) in flops
    ]
    (picture,) = pictures_of(analyse([write_run(path, records, ceilings=[roof()])]), "roofline")
    assert_legible(picture.figure)
    return picture


def test_where_copies_are_the_only_roof_bytes_are_drawn_and_nothing_else(tmp_path: Path):
    picture = roofline(tmp_path, {"full": 500_000, "linformer": 600_000}, DOUBLINGS[:2])
    said = " ".join(words(picture.figure).split())
    assert "0.5 to 0.6 counted FLOP per byte: the roof is that of copies" in said
    assert "FLOPs were counted at 512, 1k only" in said
    assert "% of the roof" in said
    (below,) = picture.figure.axes
    assert sum(line.get_marker() not in {"None", ""} for line in below.lines) == 2 * len(DOUBLINGS)
    assert "full: 305 MB/s, 3.1 % of the roof at 32k" in picture.alt, "FLOP/s of the longest nobody knows"
    other = roofline(tmp_path / "unknown", {"full": 1}, [])
    assert "FLOPs are not known: the roof is that of copies" in " ".join(words(other.figure).split())


@pytest.mark.parametrize("flops", [{"full": 500_000, "linformer": 2_000_000}, {"full": 10**9}], ids=["apart", "right"])
def test_where_arithmetic_differs_or_counts_its_rate_stands_under_the_roof(tmp_path: Path, flops: dict[str, int]):
    picture = roofline(tmp_path, flops, DOUBLINGS[:2])
    above, below = (sum(line.get_marker() not in {"None", ""} for line in axes.lines) for axes in picture.figure.axes)
    assert (above, below) == (2 * len(flops), len(DOUBLINGS) * len(flops))
    said = " ".join(words(picture.figure).split())
    assert "marks grow with the length, 512 to 1k; share of the roof: at the longest of each" in said
    assert "counted FLOP per byte that must move" in said


def test_a_count_that_is_missing_is_missing_in_every_format(tmp_path: Path):
    record = token("full", 1024, 200.0, 10**9)
    records = [
        replace(record, cell=record.cell.at(length), min_bytes=10**9, counted_flops=count)
        for length, count in ((1024, 10**9), (2048, None))
    ]
    run = write_run(tmp_path / "run", records, ceilings=[roof()])
    table = efficiency_table(analyse([run]))
    assert table is not None
    (known, missing), names = csv.DictReader(io.StringIO(to_csv(table))), ("flops", "flops_per_s", "flops_per_byte")
    assert [missing[name] for name in names] == ["", "", ""]
    assert "" not in [known[name] for name in names]
    assert missing["backward_ratio"] == ""
    assert f"| {MISSING} | {MISSING} | 5 GB/s |" in to_markdown(table)
    assert " & -- & -- & 5 GB/s & " in to_latex(table)
    assert table.texts()[1][3:5] == [MISSING, MISSING]
    for text in (to_csv(table), to_markdown(table), to_latex(table), " ".join(table.texts()[1])):
        assert "nan" not in text.lower()
        assert "None" not in text


def test_a_token_whose_flops_were_not_counted_has_its_share_of_the_roof_and_no_rate(tmp_path: Path):
    record = replace(token("full", 1024, 200.0, 10**9), min_bytes=10**9)
    analysis = analysed(tmp_path, [record], ceilings=[roof(copy_bytes_per_s=1e10)])
    table = efficiency_table(analysis)
    assert table is not None
    [row] = table.rows
    assert (row["flops"], row["flops_per_s"], row["flops_per_byte"], row["mfu"]) == (None, None, None, None)
    assert row["roof_frac"] == pytest.approx(0.5, rel=1e-3)
