"""Scores over seeds, with intervals checked against values worked out by hand."""

import pytest

from attn_zoo.report.analysis import analyse
from attn_zoo.report.outcome_tables import accuracy_table
from tests.report.synthetic import accuracy, write_run


def group(tmp_path, records):
    (found,) = analyse([write_run(tmp_path / "run", records)]).accuracy
    return found, {score.label: score for score in found.scores}


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
    assert bigbird.num_paired == 3  # seed 7 has no partner
    assert bigbird.difference == pytest.approx(0.01)
    # Seeds vary by 0.1, pairs by nothing: only pairing can see this difference.
    assert bigbird.difference_low == pytest.approx(0.01, abs=1e-9)
    assert scores["full"].difference is None


def test_with_one_seed_the_interval_is_over_examples(tmp_path):
    _, scores = group(tmp_path, [accuracy("full", 0, 0.3), accuracy("bigbird", 0, 0.6)])
    bigbird = scores["bigbird"]
    assert bigbird.difference_low is not None
    assert bigbird.difference_high is not None
    assert -1 < bigbird.difference_low < bigbird.difference_high < 1


def test_a_run_that_diverged_is_shown_and_not_averaged(tmp_path):
    records = [accuracy("full", 0, 0.3), accuracy("full", 1, None, status="diverged")]
    found, scores = group(tmp_path, records)
    assert scores["full"].mean == 0.3
    assert scores["full"].failures[0][0] == "diverged"
    rows = {row["variant"]: row for row in accuracy_table(found).rows}
    assert rows["full"]["failed"] == "1 diverged"
    assert rows["full"]["num_seeds"] == 1


def test_chance_and_floors_are_rows_of_the_table(tmp_path):
    found, _ = group(tmp_path, [accuracy("full", 0, 0.3)])
    rows = {row["variant"]: row["score"] for row in accuracy_table(found).rows}
    assert rows == {"full": 0.3, "chance": 0.1, "floor: length_only": 0.21, "floor: most_frequent": 0.17}


def test_other_protocols_are_never_mixed(tmp_path):
    records = [
        accuracy("full", 0, 0.3),
        accuracy("full", 0, 0.4, protocol="long"),
        accuracy("full", 0, 0.5, level="lra"),
    ]
    groups = analyse([write_run(tmp_path / "run", records)]).accuracy
    assert [len(one.scores[0].values) for one in groups] == [1, 1, 1]
    assert len({one.name for one in groups}) == 3


def test_nothing_finished(tmp_path):
    found, scores = group(tmp_path, [accuracy("full", 0, None, status="diverged")])
    assert (scores["full"].mean, found.chance, found.baseline) == (None, None, "")
    assert accuracy_table(found).texts()[0][0] == "full"
