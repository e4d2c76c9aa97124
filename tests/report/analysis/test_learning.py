"""Curves over steps, FLOPs and seconds; breakdowns by properties of the examples; the long table of all scores."""

import csv
import io
from typing import Any

import pandas as pd
import pytest

from attn_zoo.report.analysis.breakdown import axes_of, parts
from attn_zoo.report.analysis.learning import COMPILED_FIRST, budgets, mean_curve, seed_curves
from attn_zoo.report.tables.score_tables import equal_cost_table, score_table
from attn_zoo.report.tables.table import to_csv
from attn_zoo.units import capital
from tests.report.synthetic import accuracy, analysed, group


def points(*values, every=100):
    return tuple({"step": float(every * (i + 1)), "train_loss": 1.0, "validation": v} for i, v in enumerate(values))


def test_curves_are_means_over_the_steps_that_all_seeds_have(tmp_path):
    records = [
        accuracy("full", 0, 0.4, score={"curve": points(0.1, 0.3, 0.4), "num_steps": 300}),
        accuracy("full", 1, 0.4, score={"curve": points(0.2, 0.5), "num_steps": 200}),
        accuracy("full", 2, None, status="diverged"),
    ]
    _, scores = group(tmp_path, records)
    places, values = zip(*mean_curve(scores["full"], "validation", "steps"), strict=True)
    assert places == (100.0, 200.0)
    assert values == pytest.approx((0.15, 0.4))
    assert len(seed_curves(scores["full"], "validation", "steps")) == 2
    assert mean_curve(scores["full"], "validation", "flops") == []  # not known for this variant


def test_self_pretraining_counts_as_spent(tmp_path):
    numbers = {"curve": points(0.1, 0.3), "num_steps": 200, "train_s": 20.0, "train_flops": 200.0}
    before = {"pretrain": "masked", "pretrain_s": 5.0, "pretrain_flops": 70.0}
    records = [accuracy("full", 0, 0.3, score=numbers)]
    records.append(accuracy("full", 0, 0.3, score=numbers | before, overrides={"pretrain": "masked"}))
    found, scores = group(tmp_path, records)
    after = scores["full (self-pretrained)"]
    assert [place for place, _ in mean_curve(scores["full"], "validation", "seconds")] == [10.0, 20.0]
    assert [place for place, _ in mean_curve(after, "validation", "seconds")] == [15.0, 25.0]
    assert [place for place, _ in mean_curve(after, "validation", "flops")] == [170.0, 270.0]
    assert [place for place, _ in mean_curve(after, "validation", "steps")] == [100.0, 200.0]
    table = equal_cost_table(found)
    assert table is not None
    assert "Steps are those after self-pretraining; other costs count it." in table.notes


def test_seconds_of_compiling_come_before_the_first_step(tmp_path):
    """Spread over all steps they would put the quickest first although it compiled the longest."""
    numbers = {"curve": points(0.1, 0.3), "num_steps": 200, "train_s": 50.0, "train_flops": 200.0}
    records = [
        accuracy("full", 0, 0.3, score=numbers | {"compile_s": 30.0}),
        accuracy("bigbird", 0, 0.3, score=numbers),
    ]
    found, scores = group(tmp_path, records)
    assert [place for place, _ in mean_curve(scores["full"], "validation", "seconds")] == [40.0, 50.0]
    assert [place for place, _ in mean_curve(scores["bigbird"], "validation", "seconds")] == [25.0, 50.0]
    assert [place for place, _ in mean_curve(scores["full"], "validation", "flops")] == [100.0, 200.0]
    table = equal_cost_table(found)
    assert table is not None
    assert capital(COMPILED_FIRST) in table.note
    eager, _ = group(tmp_path / "eager", [records[1], accuracy("luna", 0, 0.3, score=numbers)])
    table = equal_cost_table(eager)
    assert table is not None
    assert capital(COMPILED_FIRST) not in table.note


def test_equal_cost_compares_at_what_everyone_has_spent(tmp_path):
    slow = {"curve": points(0.1, 0.3, 0.6), "num_steps": 300, "train_s": 300.0, "train_flops": 30e6}
    fast = {"curve": points(0.2, 0.4, 0.3), "num_steps": 300, "train_s": 150.0, "train_flops": 60e6}
    found, _ = group(tmp_path, [accuracy("full", 0, 0.6, score=slow), accuracy("bigbird", 0, 0.4, score=fast)])
    assert budgets(found.scores) == {"steps": 300.0, "flops": 30e6, "seconds": 150.0}
    table = equal_cost_table(found)
    assert table is not None
    rows = {row["variant"]: row for row in table.rows}
    assert (rows["full"]["at_steps"], rows["full"]["at_flops"], rows["full"]["at_seconds"]) == (0.6, 0.6, 0.1)
    # The best so far counts, as in the selection: 0.4 although the last evaluation says 0.3.
    assert (rows["bigbird"]["at_steps"], rows["bigbird"]["at_flops"], rows["bigbird"]["at_seconds"]) == (0.4, 0.2, 0.4)
    assert [column.heading for column in table.columns[1:]] == ["at 300 steps", "at 30 MFLOP", "at 2.5 min"]


def test_equal_cost_leaves_out_what_a_variant_does_not_know(tmp_path):
    numbers = {"curve": points(0.1, 0.3), "num_steps": 200}
    records = [accuracy("full", 0, 0.3, score=numbers | {"train_flops": 5.0}), accuracy("v", 0, 0.3, score=numbers)]
    found, _ = group(tmp_path, records)
    assert set(budgets(found.scores)) == {"steps", "seconds"}
    assert equal_cost_table(group(tmp_path / "one", records[:1])[0]) is None


def test_parts_are_means_over_seeds_and_further_axes_weighted_by_items(tmp_path):
    def broken(*rows):
        return {
            "breakdown": tuple(dict(zip(("seq_len", "depth", "value", "num_items"), row, strict=True)) for row in rows)
        }

    records = [
        accuracy("full", 0, 0.4, score=broken((64.0, 0.0, 1.0, 30.0), (64.0, 1.0, 0.0, 10.0), (128.0, 0.0, 0.5, 20.0))),
        accuracy("full", 1, 0.4, score=broken((64.0, 0.0, 0.5, 30.0), (64.0, 1.0, 0.5, 10.0))),
    ]
    found, scores = group(tmp_path, records)
    assert axes_of(found) == ("seq_len", "depth")
    by_length = {part.place: part for part in parts(scores["full"], ("seq_len",))}
    assert by_length[(64.0,)].mean == pytest.approx((0.75 + 0.5) / 2)
    assert by_length[(64.0,)].ends is not None
    assert by_length[(128.0,)].mean == 0.5  # the seed without it does not count as 0
    assert by_length[(128.0,)].ends is None
    assert len(parts(scores["full"], ("seq_len", "depth"))) == 3


def test_the_long_table_has_every_run_and_every_part(tmp_path):
    entries = ({"seq_len": 64.0, "value": 1.0, "num_items": 3.0}, {"seq_len": 128.0, "value": 0.5, "num_items": 4.0})
    records = [accuracy("full", 0, 0.4, score={"breakdown": entries}), accuracy("full", 1, None, status="diverged")]
    frame = pd.read_csv(io.StringIO(to_csv(score_table(analysed(tmp_path, records)))))
    assert len(frame) == 4
    whole = frame[frame["part"].isna()]
    assert whole["value"].tolist()[0] == 0.4
    assert pd.isna(whole["value"].tolist()[1])
    assert whole["status"].tolist() == ["ok", "diverged"]
    assert frame["part"].dropna().tolist() == ["seq_len=64", "seq_len=128"]
    assert frame["num_items"].tolist()[1:3] == [3, 4]


def test_the_long_table_counts_items_in_every_row_and_examples_apart(tmp_path):
    entries = (
        {"seq_len": 64.0, "value": 1.0, "num_items": 300.0},
        {"seq_len": 128.0, "value": 0.5, "num_items": 400.0},
    )
    scores: list[dict[str, Any]] = [{"breakdown": entries, "correct": ""}, {"correct": "1" * 700}, {"correct": ""}]
    records = [accuracy("full", seed, 0.4, score=score) for seed, score in enumerate(scores)]
    rows = csv.DictReader(io.StringIO(to_csv(score_table(analysed(tmp_path, records)))))
    assert [(row["part"], row["num_items"], row["num_examples"]) for row in rows] == [
        ("", "700", "200"),
        ("seq_len=64", "300", ""),
        ("seq_len=128", "400", ""),
        ("", "700", "200"),
        ("", "", "200"),  # too many items to keep an answer of each
    ]
