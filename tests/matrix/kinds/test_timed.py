"""What is expected of a timed cell once a shorter one of its curve is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.plan.expand import make_plan
from attn_zoo.matrix.plan.schema import parse_matrix
from attn_zoo.records import Record
from tests.report.synthetic import timing


@pytest.mark.parametrize(
    ("call_ms", "duration_s", "expected_s"),
    [
        (5.0, 2.0, 2.0 + 16 * 63 * 0.005),  # gate and budget: 64 times the calls are still no 128 s
        (14_000.0, 90.0, 90.0 * 64),  # nothing but calls
    ],
)
def test_gate_and_budget_do_not_grow_with_the_length(call_ms, duration_s, expected_s):
    group = {"variants": ["full"], "seq_len": [512, 4096], "device": "cpu", "scope": "attention"}
    short, long = make_plan(parse_matrix({"name": "test", "scaling": [group]}, "test.toml")).cells
    forecast = kind_of(short.cell).forecast()
    record = Record(cell=short.cell, status="ok", duration_s=duration_s, timing=timing(call_ms))
    forecast.add(record)
    assert forecast.seconds(long) == pytest.approx(expected_s, rel=0.02)
    forecast.add(replace(record, status="timeout", timing=None))
    assert forecast.seconds(long) == duration_s * 64, "of one that has no time nothing is known but that it took long"
