"""Variants timed in turns: ratios by round, beside the fastest of the same bundle."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attn_zoo.records import Record
from attn_zoo.report.pages.findings import findings, headline
from attn_zoo.report.tables.front_table import front_table
from attn_zoo.report.tables.growth_tables import crossing_text, crossover_table
from attn_zoo.report.tables.table import to_terminal
from attn_zoo.report.tables.time_tables import measurement_table, turns_table
from tests.report.figures.legible import words
from tests.report.synthetic import CLAIMS, analysed, pictures_of, scaling

ROUNDS = (1.0, 4.0, 1.0, 1.0, 5.0, 1.0)  # how slow the machine was in each round


def member(
    variant: str, times_ms: float, bundle: str, *, num_rounds: int = len(ROUNDS), label: str = "", **cell: Any
) -> Record:
    """Return a record whose samples are slow in the slow rounds; two processes with half of the rounds each."""
    record = scaling(variant, cell.pop("seq_len", 2048), label=label, together=bundle, **cell)
    assert record.timing is not None
    samples = tuple(times_ms * slow for slow in ROUNDS[:num_rounds])
    sizes = (num_rounds // 2, num_rounds - num_rounds // 2)
    timing = replace(record.timing, samples_ms=samples, median_ms=times_ms, process_sizes=sizes)
    return replace(record, timing=timing, bundle=bundle, isolation="interleaved")


def test_ratios_are_taken_round_by_round(tmp_path: Path):
    records = [member("full", 30.0, "b1"), member("linformer", 10.0, "b1"), member("bigbird", 12.0, "b1")]
    table = turns_table(analysed(tmp_path, records))
    assert table is not None
    found = [(row["variant"], row["fastest"]) for row in table.rows]
    assert found == [("linformer", "linformer"), ("bigbird", "linformer"), ("full", "linformer")]
    for row, expected in zip(table.rows, (1.0, 1.2, 3.0), strict=True):
        # What slowed a round slowed all of it: the ratio has no spread, although the times have.
        assert [row[name] for name in ("ratio", "ratio_low", "ratio_high")] == pytest.approx([expected] * 3)
        assert (row["num_rounds"], row["num_processes"]) == (6, 2)
    shown = [[column.show(row) for column in table.columns] for row in table.rows]
    assert any("fastest" in cell for cell in shown[0])
    assert any("[" in cell and "3" in cell for cell in shown[2])


def test_bundles_are_not_compared_with_each_other(tmp_path: Path):
    records = [
        member("full", 30.0, "b1"),
        member("bigbird", 12.0, "b1"),
        member("full", 31.0, "b2"),
        member("linformer", 10.0, "b2"),
    ]
    table = turns_table(analysed(tmp_path, records))
    assert table is not None
    found = [(row["variant"], row["fastest"], round(row["ratio"], 3)) for row in table.rows]
    # The one that is in both stands in both, with the samples of its own rounds.
    assert found == [
        ("bigbird", "bigbird", 1.0),
        ("full", "bigbird", 2.5),
        ("linformer", "linformer", 1.0),
        ("full", "linformer", 3.1),
    ]


def test_a_factor_over_exact_attention_is_that_of_the_same_rounds(tmp_path: Path):
    """Another exact one is faster, but was timed in other rounds: a ratio with it has the spread of the machine."""
    records = [member("full", 30.0, "b1"), member("bigbird", 12.0, "b1"), member("full", 20.0, "b2", label="other")]
    records.append(member("linformer", 1.0, "b3"))  # the fastest for certain
    analysis = analysed(tmp_path, records)
    table = front_table(analysis)
    assert table is not None
    shown = {row[0]: row[1] for row in table.texts()}
    assert shown["bigbird"] == "2.5\u00d7 [2.5, 2.5]"
    assert shown["linformer"].startswith("20\u00d7 [")
    assert shown["linformer"].endswith("] (apart)")
    assert table.note.startswith(
        "Speed-up over full, timed in turns with it; in rows of exact ones the median time. "
        "(apart): over other, the fastest exact one, not timed in turns with it."
    )
    assert headline(analysis).endswith("as fast as exact attention (not timed in turns with it).")
    records[-1] = member("linformer", 1.0, "b1")
    together = analysed(tmp_path / "together", records)
    assert headline(together).endswith("at 2k 30\u00d7 [30, 30] as fast as full."), (
        "not over the fastest exact one, which is other"
    )
    table = front_table(together)
    assert table is not None
    assert "apart" not in table.note


def test_a_crossing_is_that_of_the_same_rounds(tmp_path: Path):
    """Rounds differ by a factor of five, their ratios not at all: only pairs can tell that 12 is less than 13."""
    records = [member("full", 13.0, "b1"), member("bigbird", 12.0, "b1"), member("full", 12.5, "b2", label="other")]
    longer = [member("full", 30.0, "b3", seq_len=4096), member("bigbird", 20.0, "b3", seq_len=4096)]
    longer.append(member("full", 29.0, "b4", label="other", seq_len=4096))
    analysis = analysed(tmp_path, [*records, *longer])
    main, apart = analysis.panels[0].crossings
    assert (main.against, main.is_main, main.is_in_turns, crossing_text(main)) == (
        "full",
        True,
        True,
        "from 2k or less",
    )
    assert (apart.against, apart.is_main, apart.is_in_turns, apart.is_settled) == ("other", False, False, False)
    assert "Cheaper than full: bigbird from 2k or less." in findings(analysis)
    table = crossover_table(analysis)
    rows = {row["against"]: row for row in table.rows if row["quantity"] == "time"}
    assert [(name, row["against_is"], row["is_in_turns"]) for name, row in rows.items()] == [
        ("full", "exact", True),
        ("other", "fastest exact", False),
    ]
    assert table.texts()[0][-1] == "full, in turns"
    assert "the ratios of calls of one round" in table.note
    out = io.StringIO()
    to_terminal(table, Console(file=out, width=46, color_system=None))
    assert [line.split()[-1] for line in out.getvalue().splitlines() if " time " in line] == ["full", "other"]
    (time,) = pictures_of(analysis, "time-")
    assert "cheaper than full: from 2k or less" in words(time.figure)


def alone(variant: str, seq_len: int, times_ms: float, label: str = "") -> Record:
    """Return a record of what was not timed in turns."""
    record = scaling(variant, seq_len, label=label)
    assert record.timing is not None
    samples = tuple(times_ms * slow for slow in (1.0, 1.01, 0.99, 1.0, 1.02))
    return replace(record, timing=replace(record.timing, samples_ms=samples, median_ms=times_ms, process_sizes=()))


def test_a_crossing_is_with_the_fastest_where_another_is_beside_it_at_some_lengths_only(tmp_path: Path):
    """Three times as slow as the fastest, nearly three times as fast as what it was timed in turns with."""
    records = []
    for seq_len, factor in ((512, 3.0), (1024, 3.0), (2048, 3.0), (4096, 3.0), (8192, 0.9)):
        size = (seq_len / 512) ** 2
        records.append(alone("full", seq_len, size, "fast"))
        if seq_len in (2048, 4096):
            records += [member("full", 8.0 * size, "b1", seq_len=seq_len, label="slow")]
            records += [member("linformer", factor * size, "b1", seq_len=seq_len)]
        else:
            records += [alone("full", seq_len, 8.0 * size, "slow"), alone("linformer", seq_len, factor * size)]
    main, *apart = analysed(tmp_path, records).panels[0].crossings
    assert (main.against, main.is_main, main.is_in_turns) == ("fast", True, False)
    assert main.result is not None
    assert main.result.length == pytest.approx(7700, rel=0.01)
    assert [one.against for one in apart] == ["slow"]


def test_a_ratio_in_turns_carries_the_marks_of_the_fastest(tmp_path: Path):
    records = [member("full", 30.0, "b1"), member("linformer", 10.0, "b1"), member("bigbird", 12.0, "b2")]
    assert records[1].timing is not None
    records[1] = replace(records[1], timing=replace(records[1].timing, flags=("throttled",)))
    table = turns_table(analysed(tmp_path, records))
    assert table is not None
    shown = {row[0]: (row[2][-1], row[3][-1]) for row in table.texts()}
    assert shown["linformer"][0] == "\u2020"
    assert shown["full"] == ("]", "\u2020")
    assert "\u2020" not in shown["bigbird"]


def test_training_steps_stand_beside_calls_under_a_name_of_their_own(tmp_path: Path):
    step: dict[str, Any] = {
        "scope": "model",
        "pass_": "step",
        "protocol": "lra-small",
        "batch_size": 8,
        "protocol_version": 102,
    }
    records = [
        member("full", 30.0, "b1"),
        member("linformer", 10.0, "b1"),
        member("full", 90.0, "b2", **step),
        member("full", 30.0, "b2", label="full compiled", overrides={"compile": True}, **step),
    ]
    table = turns_table(analysed(tmp_path, records))
    assert table is not None
    assert [row["pass"].partition(",")[0] for row in table.rows] == ["forward", "forward", *["training step"] * 2]
    assert [(row["variant"], round(row["ratio"], 3)) for row in table.rows[2:]] == [
        ("full compiled", 1.0),
        ("full", 3.0),
    ]
    assert "whole model, protocol lra-small" in table.rows[2]["settings"]
    assert "protocol" not in table.rows[0]["settings"]


def test_further_processes_are_named_only_where_there_were_some(tmp_path: Path):
    records = [member("full", 30.0, "b1"), member("linformer", 10.0, "b1")]
    table = turns_table(analysed(tmp_path / "several", records))
    assert table is not None
    assert "and again in further processes" in table.note
    alone = []
    for record in records:
        assert record.timing is not None
        alone.append(replace(record, timing=replace(record.timing, process_sizes=())))
    table = turns_table(analysed(tmp_path / "one", alone))
    assert table is not None
    assert "process," in table.note
    assert "processes" not in table.note


def test_runs_without_bundles_have_no_such_table(tmp_path: Path):
    assert turns_table(analysed(tmp_path, [scaling("full", 512)])) is None


def test_one_speed_up_has_one_number_on_all_of_a_page(tmp_path: Path):
    """The exact one ran in the slow first round of each process only: medians of 150 and 10 ms say nothing."""

    def timed(variant: str, times_ms: float, seq_len: int, rounds: tuple[float, ...]) -> Record:
        record = member(variant, times_ms, f"b{seq_len}", seq_len=seq_len)
        assert record.timing is not None
        samples, sizes = tuple(times_ms * slow for slow in (*rounds, *rounds)), (len(rounds), len(rounds))
        return replace(record, timing=replace(record.timing, samples_ms=samples, process_sizes=sizes))

    records = [timed("full", 30.0, 2048, (5.0,)), timed("linformer", 10.0, 2048, (5.0, 1.0, 1.0))]
    records += [timed("full", 60.0, 4096, (5.0,)), timed("linformer", 15.0, 4096, (5.0, 1.0, 1.0))]
    analysis = analysed(tmp_path, records)
    rows = {(row["variant"], row["seq_len"]): row for row in measurement_table(analysis).rows}
    own, exact = rows["linformer", 2048], rows["full", 2048]
    assert [own[f"speed_up{end}"] for end in ("", "_low", "_high")] == pytest.approx([3.0] * 3)
    assert (own["speed_up_over"], exact["speed_up"], exact["speed_up_low"]) == ("full", 1.0, None)
    front = front_table(analysis)
    assert front is not None
    assert next(row for row in front.texts() if row[0] == "linformer")[1] == "3\u00d7 [3, 3]"
    picture = pictures_of(analysis, "speedup")[0]
    assert "ratio by rounds, timed in turns; bars: 95 % interval" in words(picture.figure)
    assert "linformer: 3\u00d7 at 2k, 4\u00d7 at 4k" in picture.alt


def test_a_control_is_not_the_fastest_and_what_is_alone_is_beside_nothing(tmp_path: Path):
    claims = CLAIMS | {"pooling": {"time_exponent": 1, "memory_exponent": 1, "is_exact": False, "is_control": True}}
    records = [member("full", 30.0, "b1"), member("pooling", 5.0, "b1"), member("linformer", 10.0, "b1")]
    records += [member("bigbird", 12.0, "b2")]
    table = turns_table(analysed(tmp_path, records, claims=claims))
    assert table is not None
    found = [(row["variant"], row["fastest"], round(row["ratio"], 3), row["is_level"]) for row in table.rows]
    assert found == [
        ("linformer", "linformer", 1.0, False),
        ("full", "linformer", 3.0, False),
        ("pooling", "linformer", 0.5, False),
        ("bigbird", "bigbird", 1.0, False),
    ]
    assert "Not judged (a control, which does without attention): pooling." in table.note
    beside = [column.heading for column in table.columns].index("beside the fastest")
    assert [row[beside] for row in table.texts()][::3] == ["fastest", "alone"]
