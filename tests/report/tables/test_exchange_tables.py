"""What an exchanged mechanism does to trained models, as tables, figures and sentences say it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_zoo.records import REPLACEMENT_VERSION, TRAINING_VERSION
from attn_zoo.report.compare import compare
from attn_zoo.report.tables.all_tables import make_tables
from attn_zoo.report.tables.exchange_tables import exchange_table
from attn_zoo.report.tables.score_tables import accuracy_table
from attn_zoo.report.verify import verify
from tests.report.figures.legible import assert_legible
from tests.report.synthetic import CLAIMS, accuracy, analysed, exchanged, pictures_of, write_run

SCORES = {"full": (0.50, 0.52, 0.48), "bigbird": (0.49, 0.50, 0.48), "linformer": (0.21, 0.20, 0.25)}
ERRORS = {"full": 1e-7, "bigbird": 0.05, "linformer": 0.8}


def records(**cell):
    return [
        exchanged(name, seed, value, error=ERRORS[name], trained=SCORES["full"][seed], **cell)
        for name, own in SCORES.items()
        for seed, value in enumerate(own)
    ]


def analysis(tmp_path, found):
    return analysed(tmp_path, found, variants=CLAIMS)


def test_rows_are_what_models_lose_and_how_far_heads_are(tmp_path):
    (group,) = analysis(tmp_path, records()).accuracy
    table = exchange_table(group)
    assert table is not None
    rows = {row["variant"]: row for row in table.rows}
    assert list(rows) == ["full", "bigbird", "linformer", "mean of the values"]
    assert rows["full"]["difference"] == 0.0
    assert rows["linformer"]["difference"] == pytest.approx(0.22 - 0.5)
    # differences -0.29, -0.32, -0.23: standard deviation 0.0458, t(0.975, 2) = 4.3027
    assert rows["linformer"]["difference_low"] == pytest.approx(-0.28 - 4.3027 * 0.0458258 / 3**0.5, abs=1e-5)
    assert rows["bigbird"]["error"] == pytest.approx(0.05 * (5 / 2) ** 0.5), "root of the mean square of 0.05 and 0.1"
    assert rows["bigbird"]["by_layer"] == "0.05, 0.1"
    assert rows["linformer"]["num_new_params"] == 32
    assert (rows["mean of the values"]["score"], rows["mean of the values"]["error"]) == (0.2, pytest.approx(0.9))
    assert "put in its place" in table.note


def test_what_was_trained_and_what_was_exchanged_are_never_in_one_table(tmp_path):
    trained = [
        accuracy(name, seed, value, protocol_version=TRAINING_VERSION)
        for name, own in SCORES.items()
        for seed, value in enumerate(own)
    ]
    replaced = records(protocol_version=REPLACEMENT_VERSION)
    replaced += records(adapt_steps=100, protocol_version=REPLACEMENT_VERSION)
    found = analysis(tmp_path, [*trained, *replaced])
    assert [group.title for group in found.accuracy] == [
        "listops (short)",
        "listops (short, in place of full)",
        "listops (short, in place of full, after 100 updates)",
    ]
    assert len({group.name for group in found.accuracy}) == 3
    assert [exchange_table(group) is None for group in found.accuracy] == [True, False, False]
    names = [table.name for table in make_tables(found)]
    assert sum(name.startswith("exchange-") for name in names) == 2
    published = [name for name in names if name.startswith("published-") and name != "published-sources"]
    assert len(published) == 1, "published models were trained with theirs"
    assert not found.overviews


def test_the_reference_is_said_to_be_the_same_models(tmp_path):
    (group,) = analysis(tmp_path, records()).accuracy
    table = accuracy_table(group)
    assert "As_trained: the same models with full." in table.note
    assert [row["variant"] for row in table.rows][3] == "reference: as_trained"


def test_a_mechanism_that_failed_has_its_word(tmp_path):
    failed = exchanged("moba", 0, None, status="diverged")
    (group,) = analysis(tmp_path, [*records(), failed]).accuracy
    table = exchange_table(group)
    assert table is not None
    row = next(row for row in table.rows if row["variant"] == "moba")
    assert (row["score"], row["error"]) == (None, None)
    assert "diverged" in row["failed"]


def test_figures_of_exchanges_are_legible_and_say_what_they_show(tmp_path):
    found = pictures_of(analysis(tmp_path, records()))
    assert [picture.name.partition("-")[0] for picture in found] == ["accuracy", "exchange"]
    for picture in found:
        assert_legible(picture.figure)
    assert "linformer: 22.0 % at 1.26" in found[1].alt
    assert "mean of the values: 20.0 % at 0.9" in found[1].alt
    assert "As trained: 50.0 %" in found[1].alt


def test_one_mechanism_alone_draws_no_figure(tmp_path):
    names = [picture.name for picture in pictures_of(analysis(tmp_path, records()[:3]))]
    assert not any(name.startswith("exchange-") for name in names)


def test_differences_refer_to_the_mechanism_of_the_models(tmp_path):
    """An exact one put into models of another is no baseline of theirs."""
    found = [exchanged(name, seed, 0.4 + 0.01 * seed, replaces="linformer") for name in SCORES for seed in range(3)]
    (group,) = analysis(tmp_path, found).accuracy
    assert group.baseline == "linformer"


def test_comparisons_tell_what_was_exchanged_when(tmp_path):
    one = write_run(tmp_path / "one", [*records(), *records(adapt_steps=100)], variants=CLAIMS)
    rows = compare(one, one).scores
    assert {row["start"] for row in rows} == {"in place of full", "in place of full, after 100 updates"}
    assert len(rows) == 2 * len(SCORES)
    trained = [accuracy(name, seed, value) for name, own in SCORES.items() for seed, value in enumerate(own)]
    other = write_run(tmp_path / "other", trained, variants=CLAIMS)
    assert {row["verdict"] for row in compare(one, other).scores} <= {"only in a", "only in b"}


def test_parameters_that_a_mechanism_brings_are_no_fault(tmp_path):
    more = [
        replace(one, score=replace(one.score, num_params=90_000)) if one.cell.variant == "linformer" else one
        for one in records()
        if one.score is not None
    ]
    trained = [replace(one, cell=replace(one.cell, kind="accuracy", replaces="")) for one in more]
    checks = [
        {fault.check for fault in verify(write_run(tmp_path / name, found, variants=CLAIMS))}
        for name, found in (("run", more), ("own", trained))
    ]
    assert ["budgets" in each for each in checks] == [False, True]
