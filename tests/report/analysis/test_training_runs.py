"""Tuning: chosen on validation, the same number of trials for all, and self-pretraining as a second column."""

from dataclasses import replace

import pytest

from attn_zoo.report.analysis.breakdown import parts
from attn_zoo.report.analysis.learning import seed_curves
from attn_zoo.report.pages.findings import accuracy_findings
from attn_zoo.report.tables.score_tables import accuracy_table, pretraining_table, trials_table
from tests.report.synthetic import accuracy, analysed, group, tuned


def test_the_trial_best_on_validation_is_shown_on_test(tmp_path):
    records = [
        accuracy("full", seed, test, score={"validation": best}, overrides={"base_lr": rate}, grid=("base_lr",))
        for rate, best, test in ((1e-3, 0.50, 0.30), (1e-2, 0.40, 0.90))
        for seed in range(3)
    ]
    found, scores = group(tmp_path, records)
    assert scores["full"].mean == pytest.approx(0.30)  # the other trial scores 0.9 on test, which must not be looked at
    assert scores["full"].trial.words == "base_lr=0.001"
    assert scores["full"].num_trials == 2
    table = trials_table(found)
    assert table is not None
    assert [(row["is_selected"], row["test"]) for row in table.rows] == [(True, pytest.approx(0.3)), (False, None)]
    assert "2 trials for each variant" in table.note
    assert accuracy_table(found).rows[0]["tuned"] == "base_lr=0.001"


def test_the_mean_over_seeds_decides_not_the_best_seed(tmp_path):
    _, scores = group(tmp_path, tuned("full", {1e-3: (0.5, 0.5, 0.5), 1e-2: (0.9, 0.2, 0.2)}))
    assert scores["full"].trial.words == "base_lr=0.001"


def test_a_trial_that_lost_a_seed_does_not_win_by_leaving_it_out(tmp_path):
    found, scores = group(tmp_path, tuned("full", {1e-3: (0.5, 0.5, 0.5), 1e-2: (0.9, 0.9, None)}))
    assert scores["full"].trial.words == "base_lr=0.001"
    assert scores["full"].trial.failures == ()
    table = trials_table(found)
    assert table is not None
    assert [row["failed"] for row in table.rows] == ["", "diverged 1 of 3"]


def test_when_every_trial_lost_seeds_the_best_of_those_with_most_is_taken(tmp_path):
    _, scores = group(tmp_path, tuned("full", {1e-3: (0.5, None), 1e-2: (0.6, None), 1e-1: (None, None)}))
    assert scores["full"].trial.words == "base_lr=0.01"
    assert scores["full"].trial.failures == ("diverged",)


def test_lower_is_better_selects_the_smallest(tmp_path):
    records = [
        accuracy(
            "full",
            0,
            value,
            score={"metric": "bits_per_byte", "validation": value},
            overrides={"base_lr": rate},
            grid=("base_lr",),
        )
        for rate, value in ((1e-3, 2.5), (1e-2, 2.1))
    ]
    _, scores = group(tmp_path, records)
    assert scores["full"].mean == 2.1


def test_trials_of_all_variants_stand_in_one_group_and_other_overrides_do_not(tmp_path):
    rates: dict[float, tuple[float | None, ...]] = {1e-3: (0.5,), 1e-2: (0.6,)}
    records = [
        *tuned("full", rates, overrides={"num_steps": 10}),
        *tuned("bigbird", rates, overrides={"num_steps": 10}),
    ]
    records += [*tuned("full", rates, overrides={"num_steps": 20}), accuracy("full", 0, 0.2)]
    found = analysed(tmp_path, records).accuracy
    assert len(found) == 3  # 10 steps tuned, 20 steps tuned, and what was not tuned at all
    assert sorted(len(one.scores) for one in found) == [1, 1, 2]
    assert sorted(one.setting.changes.get("num_steps", 0) for one in found) == [0, 10, 20]


def test_times_of_unlike_numbers_of_processes_do_not_meet(tmp_path):
    records = [accuracy(name, 0, 0.5, data_parallel=ranks) for name in ("full", "bigbird") for ranks in (1, 4)]
    groups = analysed(tmp_path, records).accuracy
    assert [(group.setting.data_parallel, len(group.scores)) for group in groups] == [(1, 2), (4, 2)]
    assert ["4 processes" in group.how for group in groups] == [False, True]
    assert len({group.name for group in groups}) == 2


def test_unequal_trials_are_a_warning(tmp_path):
    records = tuned("full", {1e-3: (0.5,), 1e-2: (0.6,), 3e-2: (0.6,)})
    records += tuned("bigbird", {1e-3: (0.5,)})
    (warning,) = analysed(tmp_path, records).results.warnings
    assert "most 3; bigbird 1" in warning
    records = [*tuned("full", {1e-3: (0.5,)}), *tuned("bigbird", {1e-2: (0.5,)})]
    (warning,) = analysed(tmp_path / "other", records).results.warnings
    assert "different trials" in warning
    records = [*tuned("full", {1e-3: (0.5,), 1e-2: (None,)}), *tuned("bigbird", {1e-3: (0.5,), 1e-2: (0.5,)})]
    assert analysed(tmp_path / "equal", records).results.warnings == ()  # a trial that failed was tried


def test_a_variant_that_was_refused_does_not_make_trials_unequal(tmp_path):
    records = tuned("full", {1e-3: (0.5,), 1e-2: (0.6,)})
    overrides = {"base_lr": 1e-3}
    records.append(accuracy("linformer", 0, None, status="unsupported", overrides=overrides, grid=("base_lr",)))
    assert analysed(tmp_path, records).results.warnings == ()


def pretrained(variant, seed, value, **more):
    score = {"pretrain": "masked", "pretrain_s": 7.0, "pretrain_flops": 1e12, **more}
    return accuracy(variant, seed, value, score=score, overrides={"num_steps": 10, "pretrain": "masked"})


def test_self_pretraining_is_a_second_column_with_its_gain(tmp_path):
    records = [
        accuracy("full", seed, 0.30 + 0.1 * seed, overrides={"num_steps": 10}, score={"train_flops": 2e12})
        for seed in range(3)
    ]
    records += [pretrained("full", seed, 0.35 + 0.1 * seed, train_flops=2e12) for seed in range(3)]
    records.append(accuracy("bigbird", 0, 0.2, overrides={"num_steps": 10}))
    overrides = {"num_steps": 10, "pretrain": "masked"}
    records.append(accuracy("bigbird", 0, None, status="diverged", overrides=overrides))
    found, scores = group(tmp_path, records)
    assert list(scores) == ["bigbird", "bigbird (self-pretrained)", "full", "full (self-pretrained)"]
    after = scores["full (self-pretrained)"]
    spent = [after.costs[name] for name in ("train_s", "pretrain_s", "train_flops", "pretrain_flops")]
    assert spent == [20.0, 7.0, 2e12, 1e12]
    assert after.difference is None  # it is the baseline of its own kind
    table = pretraining_table(found)
    assert table is not None
    rows = {row["variant"]: row for row in table.rows}
    assert rows["full"]["scratch"] == pytest.approx(0.4)
    assert rows["full"]["after_0"] == pytest.approx(0.45)
    assert rows["full"]["gain_0"] == pytest.approx(0.05)
    assert rows["full"]["gain_0_low"] == pytest.approx(0.05)  # paired by seed: seeds differ by 0.1, gains by nothing
    assert (rows["bigbird"]["after_0"], rows["bigbird"]["gain_0"]) == (None, None)
    assert "Self-pretraining on listops (short) gains, in points: full +5.0" in " ".join(accuracy_findings(found))


def test_a_gain_is_positive_where_lower_is_better(tmp_path):
    numbers = {"metric": "bits_per_byte", "correct": ""}
    records = [accuracy("full", seed, 2.5, overrides={"num_steps": 10}, score=numbers) for seed in range(2)]
    records += [pretrained("full", seed, 2.1 + 0.1 * seed, **numbers) for seed in range(2)]
    found, _ = group(tmp_path, records)
    table = pretraining_table(found)
    assert table is not None
    row = table.rows[0]
    assert row["gain_0"] == pytest.approx(0.35)
    assert row["gain_0_low"] < 0.35 < row["gain_0_high"]


def test_only_one_kind_of_start_needs_no_second_column(tmp_path):
    for name, records in (("a", [accuracy("full", 0, 0.3)]), ("b", [pretrained("full", 0, 0.3)])):
        found, _ = group(tmp_path / name, records)
        assert pretraining_table(found) is None
        assert trials_table(found) is None


def test_two_kinds_of_self_pretraining_are_told_apart(tmp_path):
    records = [accuracy("full", 0, 0.3, overrides={"pretrain": ""})]
    for kind in ("masked", "causal"):
        numbers = {"pretrain": kind, "pretrain_s": 1.0}
        records.append(accuracy("full", 0, 0.5, overrides={"pretrain": kind}, score=numbers))
    for steps in (5, 6):
        numbers = {"pretrain": "causal", "pretrain_s": 1.0}
        overrides = {"pretrain": "causal", "pretrain_steps": steps}
        records.append(accuracy("full", 1, 0.5, overrides=overrides, score=numbers))
    _, scores = group(tmp_path, records)
    assert list(scores) == [
        "full",
        "full (self-pretrained, causal: pretrain=causal)",
        "full (self-pretrained, causal: pretrain=causal, pretrain_steps=5)",
        "full (self-pretrained, causal: pretrain=causal, pretrain_steps=6)",
        "full (self-pretrained, masked)",
    ]


def test_self_pretraining_that_a_grid_tries_is_not_tuned(tmp_path):
    def tried(variant, kind, value, **more):
        overrides = {"num_steps": 10, "pretrain": kind, "pretrain_steps": 5, "base_lr": 1e-3}
        score = {"pretrain": kind} if value is not None else None
        return accuracy(variant, 0, value, overrides=overrides, score=score, **more)

    for name, grid in (("alone", ("pretrain",)), ("with a rate", ("base_lr", "pretrain"))):
        records = [tried("full", "", 0.3, grid=grid), tried("full", "masked", 0.4, grid=grid)]
        records.append(tried("bigbird", "", None, status="diverged", grid=grid))
        records.append(tried("bigbird", "masked", None, status="timeout", grid=grid))
        analysis = analysed(tmp_path / name, records)
        (found,) = analysis.accuracy
        assert analysis.results.warnings == ()
        assert found.setting.tuned == grid[:-1]
        assert {score.name: (score.num_trials, score.trial.failed) for score in found.scores} == {
            "bigbird": (1, "diverged 1 of 1"),
            "bigbird (self-pretrained)": (1, "timeout 1 of 1"),
            "full": (1, ""),
            "full (self-pretrained)": (1, ""),
        }
        assert pretraining_table(found) is not None
        assert (trials_table(found) is None) == ("of each variant the trial" not in accuracy_table(found).note)
        assert (trials_table(found) is None) == (len(grid) == 1)


def test_tried_ways_of_self_pretraining_stand_side_by_side(tmp_path):
    records = []
    for steps in (5, 6):
        overrides = {"pretrain": "masked", "pretrain_steps": steps}
        records.append(
            accuracy("full", 0, 0.3, overrides=overrides, grid=("pretrain_steps",), score={"pretrain": "masked"})
        )
        records.append(accuracy("full", 1, None, status="diverged", overrides=overrides, grid=("pretrain_steps",)))
    _, scores = group(tmp_path, records)
    assert [score.start for score in scores.values()] == [
        f"masked: pretrain=masked, pretrain_steps={steps}" for steps in (5, 6)
    ]


def test_settings_of_a_pretraining_that_nobody_asked_for_are_none(tmp_path):
    for name, before in (("absent", {}), ("empty", {"pretrain": ""})):
        records = [accuracy("full", 0, None, status="diverged", overrides={**before, "pretrain_steps": 5})]
        _, scores = group(tmp_path / name, records)
        assert [score.start for score in scores.values()] == [""]


def test_a_seed_that_ran_twice_is_one_seed(tmp_path):
    def run(seed, value, minute, before=None, **more):
        record = accuracy("full", seed, value, overrides={"num_steps": 10, **(before or {})}, **more)
        return replace(record, started=f"2026-01-01T00:0{minute}:00+00:00")

    entries = {
        "curve": ({"step": 10.0, "validation": 0.5},),
        "breakdown": ({"n": 1.0, "value": 0.5, "num_items": 9.0},),
    }
    unused = {"pretrain_steps": 500}  # of a pretraining that does not take place: the same model is trained
    records = [run(0, 0.3, 2, score=entries), run(0, 0.4, 1, unused, score=entries)]
    analysis = analysed(tmp_path / "one", records)
    (found,) = analysis.accuracy
    (score,) = found.scores
    assert (score.mean, score.low, score.high, len(score.runs)) == (0.3, None, None, 1)  # the latest, and no interval
    assert accuracy_table(found).rows[0]["num_seeds"] == 1
    assert len(seed_curves(score, "validation", "steps")) == 1
    assert parts(score, ("n",))[0].ends is None
    (warning,) = analysis.results.warnings
    assert warning == (
        "listops (short): more than one cell of one seed, of which the latest that finished counts: full seed 0"
    )

    records = [run(0, 0.3, 1), run(0, None, 2, {"pretrain": ""}, status="diverged"), run(1, 0.5, 1)]
    records += [run(2, 0.4, minute, before) for minute, before in ((1, unused), (2, {"pretrain": "", **unused}))]
    analysis = analysed(tmp_path / "more", records)
    ((score,),) = (found.scores for found in analysis.accuracy)
    assert score.values == {0: 0.3, 1: 0.5, 2: 0.4}
    assert score.trial.failed == ""
    assert analysis.results.warnings[0].endswith("counts: full seeds 0, 2")


def test_a_repeated_seed_of_a_trial_is_named_with_it(tmp_path):
    records = [
        accuracy("full", 0, 0.3, overrides={"base_lr": rate, **before}, grid=("base_lr",))
        for rate, before in ((1e-3, {}), (1e-2, {}), (1e-2, {"pretrain": ""}))
    ]
    (found,) = analysed(tmp_path, records).accuracy
    assert [len(trial.runs) for trial in found.trials["full", ""]] == [1, 1]
    assert found.warnings[0].endswith("counts: full base_lr=0.01 seed 0")
