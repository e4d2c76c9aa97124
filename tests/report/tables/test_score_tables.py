"""Scores over seeds, with intervals checked against values worked out by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.analysis.floor import size_interval
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import Difference, mean_with_interval
from attn_zoo.report.pages.findings import accuracy_findings, headline
from attn_zoo.report.tables.all_tables import make_tables
from attn_zoo.report.tables.front_table import front_table
from attn_zoo.report.tables.score_tables import accuracy_table, cost_table, equal_cost_table
from attn_zoo.report.tables.table import MISSING
from tests.report.synthetic import CLAIMS, accuracy, analysed, curve, group, write_run


def test_no_interval_goes_beyond_what_a_score_can_be(tmp_path):
    """Two seeds, 10 % and 90 %, span -458 % to 558 % by Student's t; that it beats chance is not settled."""
    _, scores = group(tmp_path, [accuracy("full", 0, 0.1), accuracy("full", 1, 0.9)])
    score = scores["full"]
    assert (score.mean, score.low, score.high) == (0.5, 0.0, 1.0)
    assert score.standing is not None
    assert score.standing.verdict == "not settled"


def test_no_difference_goes_beyond_what_two_scores_can_differ_by(tmp_path):
    values = {"full": (0.2, 0.9), "linformer": (0.6, 0.3)}
    records = [accuracy(name, seed, value) for name, own in values.items() for seed, value in enumerate(own)]
    _, scores = group(tmp_path / "shares", records)
    difference = scores["linformer"].difference
    assert difference is not None
    assert (difference.low, difference.high) == (-1.0, 1.0), "Student's t would say -6.5 to 6.3"
    bits = [replace(one, score=replace(one.score, metric="bits_per_byte", correct="")) for one in records if one.score]
    _, scores = group(tmp_path / "bits", bits)
    difference = scores["linformer"].difference
    assert difference is not None
    assert difference.low == pytest.approx(-6.453, abs=1e-3), "bits have no such bound"


def test_all_answers_right_are_no_proof_where_the_floor_has_nearly_as_many(tmp_path):
    """Ten of ten examples: a model that gets nine of ten right does so in one case of three."""
    for number, (floor, verdict) in enumerate(((0.9, "not settled"), (0.1, "beaten"))):
        score = {"num_examples": 10, "floors": {"counts": floor}, "correct": ""}
        records = [accuracy("full", seed, 1.0, score=score) for seed in range(3)]
        _, scores = group(tmp_path / str(number), records)
        assert scores["full"].standing is not None
        assert scores["full"].standing.verdict == verdict


def test_mean_and_t_interval(tmp_path):
    _, scores = group(tmp_path, [accuracy("full", seed, value) for seed, value in enumerate((0.30, 0.32, 0.34))])
    full = scores["full"]
    assert full.mean == pytest.approx(0.32)
    # standard deviation 0.02, t(0.975, 2) = 4.3027
    assert full.high == pytest.approx(0.32 + 4.3027 * 0.02 / 3**0.5, abs=1e-5)
    assert full.low == pytest.approx(0.32 - 4.3027 * 0.02 / 3**0.5, abs=1e-5)


def test_one_seed_has_no_interval(tmp_path):
    _, scores = group(tmp_path, [accuracy("full", 0, 0.3)])
    assert (scores["full"].mean, scores["full"].low) == (0.3, None)


def test_differences_are_paired_by_seed(tmp_path):
    records = [accuracy("full", seed, 0.30 + 0.1 * seed) for seed in range(3)]
    records += [accuracy("bigbird", seed, 0.31 + 0.1 * seed) for seed in (0, 1, 2, 7)]
    found, scores = group(tmp_path, records)
    bigbird = scores["bigbird"]
    assert found.baseline == "full"
    assert bigbird.difference is not None
    assert bigbird.difference.num_paired == 3  # seed 7 has no partner
    assert bigbird.difference.mean == pytest.approx(0.01)
    # Seeds vary by 0.1, pairs by nothing: only pairing can see this difference.
    assert bigbird.difference.low == pytest.approx(0.01, abs=1e-9)
    assert scores["full"].difference is None


def test_with_one_seed_the_interval_is_over_examples(tmp_path):
    _, scores = group(tmp_path, [accuracy("full", 0, 0.3), accuracy("bigbird", 0, 0.6)])
    found = scores["bigbird"].difference
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert -1 < found.low < found.high < 1
    assert not found.is_settled  # one seed settles nothing


def test_a_run_that_diverged_is_shown_and_not_averaged(tmp_path):
    records = [accuracy("full", 0, 0.3), accuracy("full", 1, None, status="diverged")]
    found, scores = group(tmp_path, records)
    assert scores["full"].mean == 0.3
    assert scores["full"].trial.failures == ("diverged",)
    rows = {row["variant"]: row for row in accuracy_table(found).rows}
    assert rows["full"]["failed"] == "diverged 1 of 2"
    assert rows["full"]["num_seeds"] == 1


def test_chance_and_floors_are_rows_of_the_table(tmp_path):
    found, _ = group(tmp_path, [accuracy("full", 0, 0.3)])
    rows = {row["variant"]: row["score"] for row in accuracy_table(found).rows}
    assert list(rows) == ["full", "floor: length_only", "floor: most_frequent", "chance"]  # best first
    assert rows == {"full": 0.3, "chance": 0.1, "floor: length_only": 0.21, "floor: most_frequent": 0.17}


def test_other_protocols_are_never_mixed(tmp_path):
    records = [
        accuracy("full", 0, 0.3),
        accuracy("full", 0, 0.4, protocol="long"),
        accuracy("full", 0, 0.5, level="lra"),
    ]
    groups = analysed(tmp_path, records).accuracy
    assert [len(one.scores[0].values) for one in groups] == [1, 1, 1]
    assert len({one.name for one in groups}) == 3


def test_nothing_finished(tmp_path):
    found, scores = group(tmp_path, [accuracy("full", 0, None, status="diverged")])
    assert (scores["full"].mean, found.chance, found.baseline) == (None, None, "")
    assert accuracy_table(found).texts()[0][0] == "full"


MORE = "1" * 140 + "0" * 60


def test_a_difference_counts_only_beyond_seeds_and_test_set(tmp_path):
    same = "1" * 100 + "0" * 100

    def run(variant, seed, value, correct, num_examples=200):
        return accuracy(variant, seed, value, score={"correct": correct, "num_examples": num_examples})

    records = [run("full", seed, 0.5, same) for seed in range(3)]
    # Constant over seeds, but on other examples altogether: 0.05 is within what 200 examples can do by chance.
    records += [run("bigbird", seed, 0.55, "0" * 90 + "1" * 110) for seed in range(3)]
    # The same 40 examples more, every time.
    records += [run("linformer", seed, 0.7, MORE) for seed in range(3)]
    found, scores = group(tmp_path, records)
    assert scores["bigbird"].difference.low == scores["bigbird"].difference.high == pytest.approx(0.05)
    assert not scores["bigbird"].difference.is_settled
    assert scores["linformer"].difference.is_settled
    said = " ".join(accuracy_findings(found))
    assert "linformer better by 20.0 points (3 seeds)" in said
    assert "; bigbird not told apart from it by 3 seeds." in said
    # Items of one example are not independent: 200 of 10 examples are not 200 answers.
    runs = [run(name, 0, value, marks, 10) for name, value, marks in (("full", 0.5, same), ("linformer", 0.7, MORE))]
    _, scores = group(tmp_path / "items", runs)
    difference = scores["linformer"].difference
    assert difference.size_error == pytest.approx((0.2 * 0.8 * 200 / 199 / 10) ** 0.5)
    assert (difference.low, difference.high) == pytest.approx((-0.049, 0.449), abs=1e-3)


def test_examples_with_unequal_numbers_of_items_settle_less(tmp_path):
    sizes = {"num_examples": 100, "num_effective": 64.0, "correct": "01" * 200}
    _, scores = group(tmp_path, [accuracy("full", 0, 0.5, score=sizes), accuracy("linformer", 0, 0.5, score=sizes)])
    assert scores["full"].size_error == pytest.approx((0.5 * 0.5 / 64) ** 0.5)


def test_fewer_than_three_seeds_settle_nothing(tmp_path):
    found, _ = group(tmp_path, [accuracy(name, 0, value) for name, value in (("full", 0.3), ("bigbird", 0.9))])
    assert "bigbird not settled: one seed in common, 3 are needed" in " ".join(accuracy_findings(found))


def test_what_does_not_beat_the_best_floor_is_said(tmp_path):
    floors = {"floors": {"root_operator": 0.36, "majority": 0.17}, "num_examples": 2000}
    records = [accuracy("full", seed, 0.45 + 0.001 * seed, score=floors) for seed in range(3)]
    records += [accuracy("bigbird", seed, 0.365 + 0.001 * seed, score=floors) for seed in range(3)]
    records += [accuracy("linformer", seed, 0.11, score=floors) for seed in range(3)]
    found, scores = group(tmp_path, records)
    words = {label: score.standing.words for label, score in scores.items()}
    assert words == {
        "full": "beats the root-operator floor",
        "bigbird": "does not clearly beat the root-operator floor",  # by 0.6 points; 2,000 examples leave 2.1
        "linformer": "does not beat the root-operator floor",
    }
    assert scores["full"].size_error == pytest.approx((0.451 * 0.549 / 2000) ** 0.5)
    said = " ".join(accuracy_findings(found))
    assert (
        "linformer does not beat the root-operator floor; bigbird does not clearly beat the root-operator floor."
        in said
    )
    rows = {row["variant"]: row for row in accuracy_table(found).rows}
    assert rows["linformer"]["gain_over_floor"] == pytest.approx(-0.25)
    assert rows["bigbird"]["verdict"].startswith("does not clearly beat")


def test_chance_counts_as_a_floor(tmp_path):
    _, scores = group(tmp_path, [accuracy("full", 0, 0.11, score={"floors": {}, "num_examples": 100})])
    assert scores["full"].standing.words == "does not clearly beat chance"


def test_lower_is_better_turns_order_floors_and_words(tmp_path):
    def run(variant, seed, value):
        numbers = {"metric": "bits_per_byte", "chance": 8.0, "floors": {"unigram": 4.2, "trigram": 2.9}, "correct": ""}
        return accuracy(variant, seed, value, score=numbers)

    records = [run("full", seed, 2.0 + 0.001 * seed) for seed in range(3)]
    records += [run("linformer", seed, 2.4 + 0.002 * seed) for seed in range(3)]
    records += [run("bigbird", seed, 3.0 + 0.001 * seed) for seed in range(3)]
    found, scores = group(tmp_path, records)
    assert [score.label for score in found.ranked] == ["full", "linformer", "bigbird"]
    assert scores["full"].standing.floor == "trigram"
    assert scores["full"].standing.verdict == "beaten"
    assert scores["bigbird"].standing.words == "does not beat the trigram floor"
    assert scores["full"].size_error is None
    rows = [row["variant"] for row in accuracy_table(found).rows]
    assert rows == ["full", "linformer", "bigbird", "floor: trigram", "floor: unigram", "chance"]
    said = " ".join(accuracy_findings(found))
    assert "Bits per byte (lower is better)" in said
    assert "linformer worse by 0.401 bits per byte" in said
    assert "the trigram floor with 2.900" in said


def test_one_run_of_a_metric_without_an_error_is_uncertain(tmp_path):
    numbers = {"metric": "bits_per_byte", "chance": 8.0, "floors": {"unigram": 4.2}, "correct": ""}
    _, scores = group(tmp_path, [accuracy("full", 0, 2.0, score=numbers)])
    assert scores["full"].standing.verdict == "unknown"
    assert scores["full"].standing.words == "beats the unigram floor, uncertain: one run"


@pytest.mark.parametrize(
    ("params", "words"), [(110_000, ""), (110_100, "+10 %"), (125_000, "+25 %"), (80_000, "\u221220 %")]
)
def test_other_sizes_are_named(tmp_path, params, words):
    records = [accuracy("full", 0, 0.3, score={"num_params": 100_000})]
    found, _ = group(tmp_path, [*records, accuracy("bigbird", 0, 0.3, score={"num_params": params})])
    rows = {row["name"]: row for row in accuracy_table(found).rows if "chance" not in row["variant"] and row["name"]}
    assert rows["bigbird"]["variant"] == (f"bigbird (params {words})" if words else "bigbird")
    shown = {row[0]: row for row in cost_table(found).texts()}
    assert shown["bigbird"][2] == f"{params:,}" + (f" ({words})" if words else "")


def test_costs_stand_beside_the_score_and_shared_times_are_marked(tmp_path):
    numbers = {"train_flops": 2e12, "peak_bytes": 3 * 2**20, "padding_frac": 0.25}
    records = [accuracy("full", seed, 0.3, score=numbers) for seed in range(2)]
    records += [accuracy("bigbird", seed, 0.3, score=numbers, num_jobs=2) for seed in range(2)]
    found, scores = group(tmp_path, records)
    assert scores["bigbird"].is_shared
    table = cost_table(found)
    assert [column.heading for column in table.columns[2:]] == [
        *("parameters", "compute", "time", "tokens/s", "memory", "padding")
    ]
    shown = {row[0]: row[2:] for row in table.texts()}
    assert shown["full"] == ["65,000", "2 TFLOP", "20 s", "50,000", "3 MiB", "25 %"]
    assert shown["bigbird"][2:4] == ["20 s (shared)", "65,000 (shared)"]
    assert "other cells ran on the device" in table.note
    assert "other cells" not in cost_table(group(tmp_path / "alone", records[:2])[0]).note


def test_no_time_is_not_a_time(tmp_path):
    """A variant that was not compiled took no time for it, and where none was there is nothing to show."""
    records = [accuracy(name, 0, 0.3, score={"compile_s": s}) for name, s in (("full", 0.0), ("bigbird", 2.0))]
    found, _ = group(tmp_path / "one", records)
    table = cost_table(found)
    place = [column.heading for column in table.columns].index("compiling")
    assert {row[0]: row[place] for row in table.texts()} == {"full": MISSING, "bigbird": "2 s"}
    found, _ = group(tmp_path / "none", records[:1])
    assert "compiling" not in [column.heading for column in cost_table(found).columns]


def test_shared_seconds_are_no_equal_cost(tmp_path):
    def run(variant, jobs):
        points = tuple(point | {"train_s": 0.01 * point["step"]} for point in curve(0.1, 0.4))
        return accuracy(variant, 0, 0.4, score={"curve": points, "train_flops": 1e12}, num_jobs=jobs)

    for jobs, headings in ((1, ["variant", "at 400 steps", "at 1 TFLOP", "at 20 s"]), (2, ["variant", "at 400 steps"])):
        found, _ = group(tmp_path / str(jobs), [run("full", 1), run("bigbird", jobs)])
        table = equal_cost_table(found)
        assert table is not None
        assert [column.heading for column in table.columns][: len(headings)] == headings
        assert any("at 20 s" in column.heading for column in table.columns) is (jobs == 1)
        assert ("FLOPs and seconds" in table.note) is (jobs == 1)


def test_the_error_of_the_test_set_is_the_most_that_any_score_has(tmp_path):
    records = [accuracy("full", 0, 0.5), accuracy("bigbird", 0, 0.01)]
    found, _ = group(tmp_path / "run", records)
    assert "200 test examples alone make a standard error of up to 3.5 %." in accuracy_table(found).note


def test_a_reference_is_said_to_be_no_floor(tmp_path):
    found, _ = group(tmp_path / "with", [accuracy("full", 0, 0.5, score={"references": {"bag_of_words": 0.77}})])
    assert "Reference: no floor and no rival" in accuracy_table(found).note
    found, _ = group(tmp_path / "without", [accuracy("full", 0, 0.5)])
    assert "Reference" not in accuracy_table(found).note


def test_a_cost_that_no_run_knows_has_no_column(tmp_path):
    found, _ = group(tmp_path, [accuracy("full", 0, 0.3)])
    assert [column.heading for column in cost_table(found).columns] == [
        *("variant", "accuracy", "parameters", "time", "tokens/s")
    ]


def test_directions_of_attention_are_not_mixed(tmp_path):
    records = [accuracy("full", 0, 0.3), accuracy("full", 0, 0.9, is_causal=True)]
    groups = analysed(tmp_path, records).accuracy
    assert sorted(one.title for one in groups) == ["listops (short)", "listops (short, causal)"]
    assert len({one.name for one in groups}) == 2


def test_results_of_the_first_version_still_load(tmp_path):
    record = accuracy("full", 0, 0.3).to_dict()
    del record["cell"]["grid"], record["num_jobs"]
    for name in ("breakdown", "settings", "peak_bytes", "padding_frac", "pretrain", "pretrain_s", "pretrain_flops"):
        del record["score"][name]
    run = write_run(tmp_path / "run", [])
    (run / "cells" / "old.json").write_text(json.dumps(record))
    (found,) = analyse([run]).accuracy
    assert found.scores[0].mean == 0.3
    assert not found.is_shared


def test_thread_counts_are_not_mixed(tmp_path):
    records = [accuracy("full", 0, 0.3, threads=threads) for threads in (1, 2)]
    groups = analysed(tmp_path, records).accuracy
    assert [one.how.rpartition(", ")[2] for one in groups] == ["1 thread", "2 threads"]


def test_the_front_says_what_has_no_mean_who_is_level_and_which_tasks_have_no_score(tmp_path):
    def runs(task, values):
        return [accuracy(name, seed, value, task=task) for name, value in values.items() for seed in range(3)]

    lost = [accuracy("full", seed, None, task="a0", status="diverged") for seed in range(3)]
    tasks = {task: {"full": 1.0, "linformer": 1.0, "bigbird": 0.5} for task in "abcd"}
    records = [*lost, *(one for task, values in tasks.items() for one in runs(task, values))]
    records += runs("e", {"full": 0.5, "linformer": 0.5, "bigbird": 0.5}) + runs("f", {"luna": 0.9})
    front = front_table(analysed(tmp_path, records))
    assert front is not None
    assert "a0 (short)" not in [column.heading for column in front.columns]
    rows = {row[0]: row for row in front.texts()}
    assert rows["best"][1:3] == ["full or linformer", "full or linformer (by mean)"]
    assert "luna" not in rows, "it has a score in no task of the table"
    assert "Not in this table: a0 (short), e (short), f (short)." in front.note
    records += runs("a", {"moba": 0.9})
    front = front_table(analysed(tmp_path / "more", records))
    assert front is not None
    assert {row[0]: row[1] for row in front.texts()}["moba"] == "no mean"


def test_the_front_says_whose_model_is_larger_and_that_nothing_beats_the_floor(tmp_path):
    sizes, scores = {"full": 65_000, "linformer": 130_000}, {"full": 0.2, "linformer": 0.205}
    records = [
        accuracy(name, seed, scores[name], score={"num_params": size})
        for name, size in sizes.items()
        for seed in (0, 1, 2)
    ]
    analysis = analysed(tmp_path, records)
    front = front_table(analysis)
    assert front is not None
    rows = {row[0]: row[1] for row in front.texts()}
    assert rows["best"] == "none clearly beats the floor"
    assert rows["linformer"] == "20.5 % (params +100 %) (floor not beaten)"
    assert rows["full"] == "20.0 % (floor not beaten)"
    assert "Params: how many more than the baseline" in front.note
    assert "linformer (params +100 %) 20.5 %" in headline(analysis)


def test_what_may_depend_on_padding_is_named(tmp_path):
    claims = CLAIMS | {"nystrom": {"is_exact": False, "depends_on_padding": True}}
    runs = [accuracy(name, seed, 0.5) for name in claims for seed in (0, 1)]
    analysis = analysed(tmp_path, runs, claims=claims)
    (table,) = [each for each in make_tables(analysis) if each.name.startswith("accuracy")]
    assert "Not declared to be the same however far a batch is padded: nystrom." in table.note


def test_seeds_and_test_examples_may_both_favour_one_of_two_equal_models():
    """The errors are of equal size, and known; each for itself would let 9 % pass that only chance made."""
    rng, num_seeds, num_models = np.random.default_rng(0), 5, 4000
    examples = rng.standard_normal(num_models)
    seeds = num_seeds**0.5 * rng.standard_normal((num_models, num_seeds))
    found = []
    for shift, spread in zip(examples, seeds, strict=True):
        mean, low, high = mean_with_interval(list((spread + shift) / 100))
        assert mean is not None
        found.append(Difference(mean=mean, low=low, high=high, num_paired=num_seeds, size_error=0.01))
    assert np.mean([one.is_settled for one in found]) <= 0.05
    apart = [one for one in found if one.low is not None and one.high is not None and not one.low <= 0.0 <= one.high]
    assert np.mean([abs(one.mean) > 1.96 * 0.01 for one in apart]) * len(apart) / num_models > 0.08


def test_all_answers_right_in_one_seed_are_an_interval_all_the_same(tmp_path):
    """Of 1,000 examples that are all right, 99.62 % is as low as Wilson's interval goes."""
    score = {"num_examples": 1000, "correct": ""}
    _, scores = group(tmp_path, [accuracy("full", 0, 1.0, score=score)])
    assert scores["full"].ends == pytest.approx((1 / (1 + 1.96**2 / 1000), 1.0))
    counts = np.arange(1001)
    chances = stats.binom.pmf(counts, 1000, 0.999)
    ends = [size_interval(count / 1000, 1000, Metric("accuracy")) or (1.0, 0.0) for count in counts]
    assert sum(chance for chance, (low, high) in zip(chances, ends, strict=True) if low <= 0.999 <= high) > 0.9
