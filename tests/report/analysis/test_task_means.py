"""Several tasks together: a mean only over what all have, and nothing missing counted as nought."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from attn_zoo.report.pages.findings import headline, overview_finding
from attn_zoo.report.tables.front_table import front_table
from attn_zoo.report.tables.score_tables import overview_table
from attn_zoo.report.tables.table import to_terminal
from attn_zoo.statistics.paired import interval_of_means
from tests.report.synthetic import accuracy, analysed


def overviews(tmp_path, records):
    return analysed(tmp_path, records).overviews


def runs(task, values, **more):
    return [
        accuracy(variant, 0, value, status="ok" if value is not None else "diverged", task=task, **more)
        for variant, value in values.items()
    ]


def test_a_missing_score_leaves_the_task_out_of_the_mean(tmp_path):
    records = runs("a", {"full": 0.4, "bigbird": 0.3})
    records += runs("b", {"full": 0.6, "bigbird": 0.7})
    records += runs("c", {"full": 0.9, "bigbird": None})
    (found,) = overviews(tmp_path, records)
    assert found.mean("full") == pytest.approx(0.5)
    assert found.mean("bigbird") == pytest.approx(0.5)
    assert [group.title for group in found.common] == ["a (short)", "b (short)"]
    assert "not over c (short): no score of bigbird" in found.scope()
    table = overview_table(found)
    rows = {row["variant"]: row for row in table.rows}
    assert rows["bigbird"]["c (short)"] is None
    assert rows["full"]["mean"] == pytest.approx(0.5)
    shown = {row[0]: row for row in table.texts()}
    assert shown["bigbird"][-1] == "diverged 1 of 1"
    assert shown["chance"] == ["chance", "10.0 %", "10.0 %", "10.0 %", "10.0 %"]
    assert shown["best floor"][1] == "21.0 %"
    assert "never counted as 0" in table.note
    narrow = io.StringIO()
    to_terminal(replace(table, columns=(*table.columns[:2], *table.columns[:1:-1])), Console(file=narrow, width=44))
    assert narrow.getvalue().splitlines()[1].split() == ["variant", "mean", *("b", "(short)", "a", "(short)")]
    said = overview_finding(found)
    assert "mean over a (short), b (short); not over c (short)" in said


def test_the_front_says_which_tasks_a_mean_is_over_and_which_have_no_column(tmp_path):
    means = {"full": 0.8, "bigbird": 0.22}
    records = [run for task in "abc" for run in runs(task, means)]
    records += runs("d", {"full": 0.9}) + runs("e", {"full": 0.5})
    analysis = analysed(tmp_path, records)
    front = front_table(analysis)
    assert front is not None
    assert [column.heading for column in front.columns] == ["variant", "mean", "a (short)", "b (short)", "c (short)"]
    assert "Mean: over a (short) and b (short) and c (short)." in front.note
    assert "Not in this table: d (short), e (short)." in front.note
    assert "Scores: accuracy, protocol cpu-small; mean over seeds on test." in front.note
    assert headline(analysis).startswith("Accuracy, mean over a (short) and b (short) and c (short): full 80.0 %")
    out = io.StringIO()
    to_terminal(front, Console(file=out, width=80, color_system=None))
    shown = " ".join(out.getvalue().split())
    assert "Columns left out here, in the files: mean." in shown, "before what it is made of"
    assert "22.0 % (n=1) (floor?)" in shown
    assert "Mean: over" not in shown


def test_a_label_with_one_task_is_left_out_and_named(tmp_path):
    records = runs("a", {"full": 0.4, "bigbird": 0.3, "extra": 0.9})
    records += runs("b", {"full": 0.6, "bigbird": 0.7})
    (found,) = overviews(tmp_path, records)
    assert found.labels == ("bigbird", "full")
    assert found.mean("extra") is None
    assert "without extra" in found.scope()
    assert {row["variant"]: row["mean"] for row in overview_table(found).rows}["extra"] is None


def test_without_two_common_tasks_there_is_no_mean(tmp_path):
    records = runs("a", {"full": 0.4, "bigbird": 0.3}) + runs("b", {"full": 0.6, "bigbird": None})
    records += runs("c", {"full": None, "bigbird": 0.5})
    (found,) = overviews(tmp_path, records)
    assert found.mean("full") is None
    assert "mean" not in [column.heading for column in overview_table(found).columns]
    assert "No mean over tasks" in overview_finding(found)


def test_one_task_metrics_of_another_kind_and_other_protocols_make_no_overview(tmp_path):
    values = {"full": 0.4, "bigbird": 0.3}
    assert overviews(tmp_path / "one", runs("a", values)) == ()
    bits = runs("b", {"full": 2.0, "bigbird": 2.1}, score={"metric": "bits_per_byte"})
    assert overviews(tmp_path / "bits", runs("a", values) + bits) == ()
    assert overviews(tmp_path / "other", runs("a", values) + runs("b", values, protocol="long")) == ()
    assert overviews(tmp_path / "ranks", runs("a", values) + runs("b", values, data_parallel=2)) == ()


def test_overrides_may_differ_between_tasks_but_a_task_is_never_counted_twice(tmp_path):
    values = {"full": 0.4, "bigbird": 0.3}
    records = runs("a", values, overrides={"num_steps": 10}) + runs("b", values, overrides={"num_steps": 20})
    assert len(overviews(tmp_path / "two", records)) == 1
    records += runs("a", values, overrides={"num_steps": 20})
    (found,) = overviews(tmp_path / "three", records)
    assert [group.setting.changes["num_steps"] for group in found.groups] == [20, 20]


def test_tasks_trained_with_other_numbers_of_threads_are_apart(tmp_path):
    values = {"full": 0.4, "bigbird": 0.3}
    records = [run for task in "ab" for threads in (2, 8) for run in runs(task, values, threads=threads)]
    assert [each.apart for each in overviews(tmp_path, records)] == ["2 threads", "8 threads"]


def test_what_was_tuned_is_said_whole(tmp_path):
    values = {"full": 0.4, "bigbird": 0.3}
    records = []
    for names in (["base_lr"], ["base_lr", "weight_decay"]):
        given = {"grid": tuple(names), "overrides": dict.fromkeys(names, 0.1)}
        records += [run for task in "ab" for run in runs(task, values, **given)]
    assert {each.apart for each in overviews(tmp_path, records)} == {"tuned: base_lr", "tuned: base_lr, weight_decay"}


def test_a_ranking_that_is_cut_says_so(tmp_path):
    values = {f"v{number}": 0.3 + 0.01 * number for number in range(9)}
    (found,) = overviews(tmp_path, runs("a", values) + runs("b", values))
    assert "v3 33.0 % and 3 more" in overview_finding(found)


def test_speed_is_a_geometric_mean_and_memory_the_most(tmp_path):
    records = runs("a", {"full": 0.4, "v": 0.3}, score={"tokens_per_s": 100.0, "peak_bytes": 10})
    records += runs("b", {"full": 0.4, "v": 0.3}, score={"tokens_per_s": 400.0, "peak_bytes": 30})
    (found,) = overviews(tmp_path, records)
    assert found.speed("full") == pytest.approx(200.0)
    assert found.peak_bytes("full") == 30


def test_self_pretrained_tasks_are_not_averaged_with_others(tmp_path):
    values = {"full": 0.4, "bigbird": 0.3}
    records = runs("a", values) + runs("b", values, score={"pretrain": "masked"}, overrides={"pretrain": "masked"})
    assert overviews(tmp_path, records) == ()


def test_a_protocol_whose_name_begins_another_one_needs_no_number(tmp_path):
    scores = {"full": 0.4, "bigbird": 0.3}
    records = runs("a", scores, protocol="cpu-small") + runs("b", scores, protocol="cpu-small")
    records += runs("b", scores, protocol="cpu") + runs("c", scores, protocol="cpu")
    assert [each.name for each in overviews(tmp_path, records)] == ["tasks-accuracy-cpu-small", "tasks-accuracy-cpu"]


def test_the_mean_has_an_interval_over_seeds_where_every_task_has_seeds(tmp_path):
    values = {"a": [0.42, 0.44, 0.47], "b": [0.97, 0.98, 1.0]}
    records = [accuracy("full", seed, value, task=task) for task in values for seed, value in enumerate(values[task])]
    records += [accuracy("bigbird", 0, 0.5, task=task) for task in values]
    (found,) = overviews(tmp_path, records)
    low, high = found.interval("full")
    assert (low, high) == interval_of_means(list(values.values()))
    assert found.interval("bigbird") == (None, None)
    table = overview_table(found)
    shown = {row[0]: row[1] for row in table.texts()}
    assert shown["full"] == f"71.3 % [{100 * low:.1f}, {100 * high:.1f}]"
    assert shown["bigbird"] == "50.0 %"
    assert shown["chance"] == "10.0 %"
    assert "each task with its own spread" in table.note


def test_the_interval_of_a_mean_stays_within_what_a_score_can_be(tmp_path):
    records = [accuracy("full", seed, 0.6 + 0.4 * seed, task=task) for task in "ab" for seed in (0, 1)]
    (found,) = overviews(tmp_path, records)
    assert found.interval("full")[1] == 1.0


def test_of_one_seed_a_mean_of_all_right_may_still_be_off(tmp_path):
    """Twice the same Wilson interval: the mean's is narrower by the root of two, to either side."""
    records = runs("a", {"full": 1.0, "bigbird": 0.9}) + runs("b", {"full": 1.0, "bigbird": 0.9})
    (found,) = overviews(tmp_path, records)
    (one, _), (other, _) = (found.scores(label) for label in ("full", "bigbird"))
    assert one.ends is not None
    assert found.ends("full") == (pytest.approx(1 - (1 - one.ends[0]) / 2**0.5), 1.0)
    assert found.ends("full")[0] < 1.0
    low, high = found.ends("bigbird")
    assert 0.9 - low > high - 0.9 > 0
    assert 0.9 - low == pytest.approx((0.9 - other.ends[0]) / 2**0.5)


def test_the_headline_says_of_which_tasks_nothing_beats_the_floor(tmp_path):
    records = runs("a", {"full": 0.8, "bigbird": 0.7}) + runs("b", {"full": 0.22, "bigbird": 0.2})
    said = headline(analysed(tmp_path, records))
    assert said.endswith("; mean of the best floors 21.0 %; nothing clearly beats the floor of b (short).")


def test_what_a_mechanism_stands_in_place_of_is_said_once(tmp_path):
    replacing = {"kind": "replacement", "replaces": "full"}
    scores = {"full": 0.8, "bigbird": 0.7}
    records = [run for steps in (0, 100) for task in "ab" for run in runs(task, scores, adapt_steps=steps, **replacing)]
    said = headline(analysed(tmp_path, records))
    assert said.startswith("Accuracy, in place of full, mean over a (short) and b (short): full 80.0 %")
