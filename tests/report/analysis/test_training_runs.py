"""Tuning: chosen on validation, the same number of trials for all, and self-pretraining as a second column."""

import pytest

from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.pages.findings import accuracy_findings
from attn_zoo.report.tables.score_tables import accuracy_table, pretraining_table, trials_table
from tests.report.synthetic import accuracy, tuned, write_run


def analysed(tmp_path, records):
    return analyse([write_run(tmp_path / "run", records)])


def group(tmp_path, records):
    (found,) = analysed(tmp_path, records).accuracy
    return found, {score.name: score for score in found.scores}


def test_the_trial_best_on_validation_is_shown_on_test(tmp_path):
    records = [
        accuracy("full", seed, test, score={"validation": best}, overrides={"base_lr": rate}, grid=("base_lr",))
        for rate, best, test in ((1e-3, 0.50, 0.30), (1e-2, 0.40, 0.90))
        for seed in range(3)
    ]
    found, scores = group(tmp_path, records)
    assert scores["full"].mean == pytest.approx(0.30)  # the other trial scores 0.9 on test, which must not be looked at
    assert scores["full"].trial == "base_lr=0.001"
    assert scores["full"].num_trials == 2
    table = trials_table(found)
    assert table is not None
    assert [(row["is_selected"], row["test"]) for row in table.rows] == [(True, pytest.approx(0.3)), (False, None)]
    assert "2 trials for each variant" in table.note
    assert accuracy_table(found).rows[0]["tuned"] == "base_lr=0.001"


def test_the_mean_over_seeds_decides_not_the_best_seed(tmp_path):
    _, scores = group(tmp_path, tuned("full", {1e-3: (0.5, 0.5, 0.5), 1e-2: (0.9, 0.2, 0.2)}))
    assert scores["full"].trial == "base_lr=0.001"


def test_a_trial_that_lost_a_seed_does_not_win_by_leaving_it_out(tmp_path):
    found, scores = group(tmp_path, tuned("full", {1e-3: (0.5, 0.5, 0.5), 1e-2: (0.9, 0.9, None)}))
    assert scores["full"].trial == "base_lr=0.001"
    assert scores["full"].failures == ()
    table = trials_table(found)
    assert table is not None
    assert [row["failed"] for row in table.rows] == ["", "diverged 1 of 3"]


def test_when_every_trial_lost_seeds_the_best_of_those_with_most_is_taken(tmp_path):
    _, scores = group(tmp_path, tuned("full", {1e-3: (0.5, None), 1e-2: (0.6, None), 1e-1: (None, None)}))
    assert scores["full"].trial == "base_lr=0.01"
    assert [status for status, _ in scores["full"].failures] == ["diverged"]


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
