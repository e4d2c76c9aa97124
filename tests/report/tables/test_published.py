"""Published values: each with its source, printed as they are, never mixed with ours."""

from importlib.resources import files

import pytest

from attn_zoo.errors import StoreError
from attn_zoo.registry import tasks, variants
from attn_zoo.report.tables.all_tables import make_tables
from attn_zoo.report.tables.published import load_published, parse_published, published_table, sources_table
from tests.report.synthetic import accuracy, analysed

GOOD = """
[[source]]
name = "A"
title = "A paper"
url = "https://example.org/a"
repository = "someone/a"
setup = "one run"
levels = { listops = ["lra"] }
[[source.model]]
name = "Transformer"
accuracy = { listops = 36.37 }
"""


def table(tmp_path, records):
    analysis = analysed(tmp_path, records)
    return published_table(analysis.accuracy[0], analysis.variants)


def test_every_entry_has_a_source_and_belongs_to_something_we_have():
    sources = load_published()
    assert len({source.name for source in sources}) == len(sources) >= 4
    for source in sources:
        assert source.url.startswith("https://github.com/")
        assert source.repository in source.url
        assert len(source.title) > 20
        assert len(source.setup) > 20
        assert set(source.levels) <= set(tasks), "a task that is not registered would never be shown"
        for task, levels in source.levels.items():
            assert set(levels) <= set(tasks[task].levels), (source.name, task)
        for model in source.model:
            assert not model.variant or model.variant in variants, model.name
            assert set(model.hours) == set(model.gigabytes)
        assert sum(model.is_exact for model in source.model) == 1


def test_the_spread_of_the_baseline_is_the_known_one():
    found: dict[str, list[float]] = {}
    for source in load_published():
        for model in source.model:
            for task, value in model.accuracy.items():
                if model.is_exact and not isinstance(value, str):
                    found.setdefault(task, []).append(value)
    assert found["listops"] == [36.37, 37.10, 37.5, 38.37]
    assert found["retrieval"] == [57.46, 79.35, 79.24, 80.69]
    assert found["pathfinder"] == [71.40, 74.16, 70.37, 65.26]


def test_tables_of_the_file_are_as_long_as_printed():
    sizes = {source.name: len(source.model) for source in load_published()}
    assert sizes == {"LRA": 11, "LRA Path-X": 7, "Nyströmformer": 5, "xformers": 7, "Skyformer": 9}


def test_it_stands_beside_ours_and_says_that_it_is_not_ours(tmp_path):
    records = [
        accuracy("full", 0, 0.345, level="lra"),
        accuracy("linformer", 0, 0.3, level="lra", label="linformer-k32"),
    ]
    found = table(tmp_path, records)
    assert found is not None
    assert "not ours" in found.title
    rows = {row["model"]: row for row in found.rows}
    assert rows["Transformer / Standard / Self-attention"]["ours"] == "34.5 %"
    assert rows["Linformer / Linformer seq/4"]["ours"] == "30.0 %"
    assert rows["Reformer"]["ours"] == ""
    assert rows["Reformer"]["xformers"] is None  # not printed there, so not shown as anything
    assert "36.4 to 38.4 % over 4 repositories" in found.note
    assert "do not compare" not in found.note
    assert rows["Transformer / Standard / Self-attention"]["cost"] == "2.24 h, 5.37 GB (Skyformer)"


def test_another_level_is_named_as_one(tmp_path):
    found = table(tmp_path, [accuracy("full", 0, 0.345)])
    assert found is not None
    assert "Ours is at level 'short'" in found.note
    assert "do not compare" in found.note
    assert "ours (short)" in [column.heading for column in found.columns]


def test_what_nobody_published_has_no_table(tmp_path):
    analysis = analysed(tmp_path, [accuracy("full", 0, 0.3, task="mine")])
    assert not [one for one in make_tables(analysis) if one.name.startswith("published")]
    assert sources_table(analysis.accuracy) is None


def test_a_printed_failure_is_a_word_and_not_nought(tmp_path):
    source = next(source for source in load_published() if source.name == "LRA Path-X")
    (levels,) = source.levels.values()
    found = table(tmp_path, [accuracy("full", 0, 0.5, task="pathfinder", level=levels[0])])
    assert found is not None
    assert {row["LRA Path-X"] for row in found.rows} == {"fail"}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('url = "https://example.org/a"', "", "url"),
        ('setup = "one run"', 'setup = ""', "setup"),
        ("36.37", "0.3637", "in percent"),
        ("36.37", '"failed"', "accuracy"),
        ("listops = 36.37", "other = 36.37", "no level is given for other"),
        ('name = "A"', 'name = "A"\nyear = 2020', "year"),
        ("[[source]]", "[[source]", "not readable as TOML"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(old, new, words):
    assert parse_published(GOOD)[0].model[0].accuracy == {"listops": 36.37}
    with pytest.raises(StoreError, match=words):
        parse_published(GOOD.replace(old, new, 1))


def test_the_file_travels_with_the_package():
    assert (files("attn_zoo.report.tables") / "published.toml").is_file()
