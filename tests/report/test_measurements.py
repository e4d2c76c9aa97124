"""The numbers of records: each is exported, and what tables say of them is where records keep it."""

from dataclasses import fields, replace

import pytest

from attn_zoo.records import Approximation, Memory, Record, Replacement, Score, Timing
from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.export import COLUMNS
from attn_zoo.report.measurements import CALLS, COSTS
from attn_zoo.report.tables.score_tables import cost_table
from attn_zoo.report.tables.time_tables import measurement_table
from tests.report.synthetic import accuracy, analysed, scaling, write_run

PARTS = {
    "record": Record,
    "timing": Timing,
    "memory": Memory,
    "score": Score,
    "approximation": Approximation,
    "replacement": Replacement,
}
RENAMED = {"kernels": "kernel"}  # joined
LEFT_OUT = {"cell", "timing", "memory", "score", "approximation", "replacement", "trace"}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_every_field_of_a_record_is_a_column_without_being_named(part):
    names = {RENAMED.get(field.name, field.name) for field in fields(part)} - LEFT_OUT
    assert names <= set(COLUMNS)


@pytest.mark.parametrize("each", [*CALLS, *COSTS], ids=lambda each: each.name)
def test_a_table_reads_a_number_where_records_keep_it(each):
    assert (each.field or each.name) in {field.name for field in fields(PARTS[each.part])}


def test_a_number_is_shown_by_its_entry_alone(tmp_path):
    record = scaling("full", 512)
    assert record.timing is not None
    assert record.memory is not None
    timing = replace(record.timing, graph_ms=0.25)
    calls = [replace(record, timing=timing, memory=replace(record.memory, saved_bytes=3 * 2**20))]
    costs = [accuracy("full", 0, 0.3, score={"peak_bytes": 5 * 2**20})]
    analysis = analysed(tmp_path, [*calls, *costs])
    table = measurement_table(analysis)
    shown = dict(zip((column.heading for column in table.columns), table.texts()[0], strict=True))
    assert (shown["from a graph"], shown["saved"]) == ("250 µs", "3 MiB")
    table = cost_table(analysis.accuracy[0])
    shown = dict(zip((column.heading for column in table.columns), table.texts()[0], strict=True))
    assert shown["memory"] == "5 MiB"


def test_several_records_give_the_most_or_the_mean(tmp_path):
    """Two folders with one cell, and two seeds: bytes do not average, times do."""
    record = scaling("full", 512)
    assert record.memory is not None
    runs = [
        write_run(tmp_path / str(size), [replace(record, memory=replace(record.memory, peak_bytes=size), flops=size)])
        for size in (100, 300)
    ]
    (point,) = analyse(runs).panels[0].series[0].points
    assert (point.memory.peak_bytes, point.record.flops, point.num_processes) == (300, 300, 2)
    costs = [accuracy("full", seed, 0.3, score={"train_s": 10.0 + seed, "peak_bytes": 7 + seed}) for seed in (0, 1)]
    (score,) = analysed(tmp_path, costs).accuracy[0].scores
    assert (score.costs["train_s"], score.costs["train_peak_bytes"]) == (10.5, 8)
