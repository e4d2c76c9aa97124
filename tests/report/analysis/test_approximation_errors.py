"""Distances from exact attention in a report: curves, floors, what is said of them, and that nothing is invented."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attn_zoo.api import load
from attn_zoo.errors import ConfigError
from attn_zoo.records import Record
from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.compare import compare
from attn_zoo.report.export import flat_frame
from attn_zoo.report.figures.all_figures import figure_names, front_picture
from attn_zoo.report.figures.error_curves import LEAST, draw_errors
from attn_zoo.report.figures.style import MUTED, make_looks
from attn_zoo.report.flat_records import flat_row, record_of
from attn_zoo.report.pages.findings import error_findings, findings, headline
from attn_zoo.report.pages.leaderboard import leaderboard_readme, read_machines
from attn_zoo.report.tables.all_tables import make_tables, status_table
from attn_zoo.report.tables.front_table import front_table
from tests.report.synthetic import accuracy, analysed, approximation, pictures_of, scaling, write_run


def over_lengths(variant: str, *errors: float, seeds: int = 2, **more: Any) -> list[Record]:
    """Return records of 512, 1024, ... tokens, of which the seeds differ by a hundredth."""
    return [
        approximation(variant, 512 * 2**place, error * (1 + 0.01 * seed), seed=seed, **more)
        for place, error in enumerate(errors)
        for seed in range(seeds)
    ]


RECORDS = [
    *over_lengths("full", 1e-7, 1e-7),
    *over_lengths("linformer", 0.8, 1.2),
    *over_lengths("bigbird", 0.1, 0.2),
    *over_lengths("full", 1e-7, 1e-7, inputs="local"),
    *over_lengths("linformer", 0.3, 0.4, inputs="local"),
    *over_lengths("bigbird", 0.5, 0.6, inputs="local"),
]


def test_a_curve_is_the_mean_over_seeds_with_its_interval(tmp_path):
    (group,) = analysed(tmp_path, RECORDS).errors
    assert [panel.inputs for panel in group.panels] == ["peaked", "local"]
    peaked = group.panels[0]
    assert [curve.label for curve in peaked.over_lengths] == ["full", "bigbird", "linformer"]
    (point,) = [one for one in peaked.ranked[0].points if one.seq_len == 1024]
    assert point.value == pytest.approx(0.201)
    assert point.low is not None
    assert point.high is not None
    assert point.low < 0.2 < 0.202 < point.high
    assert peaked.mean_error == pytest.approx({512: 0.9, 1024: 0.9})
    assert peaked.num_effective_keys == pytest.approx({512: 5.12, 1024: 10.24})


def test_one_seed_has_no_interval(tmp_path):
    (group,) = analysed(tmp_path, over_lengths("bigbird", 0.1, 0.2, seeds=1)).errors
    points = group.panels[0].curves[0].points
    assert [(point.low, point.high) for point in points] == [(None, None)] * 2


def test_what_is_nearest_is_said_and_what_is_no_nearer_than_the_mean(tmp_path):
    analysis = analysed(tmp_path, RECORDS)
    said = headline(analysis)
    assert "at 1k tokens" in said
    assert "peaked: bigbird 0.201 (mean of the values 0.9)" in said
    assert "local: linformer 0.402 (mean of the values 0.9)" in said
    (group,) = analysis.errors
    assert error_findings(group)[1] == "Not 5 % nearer than the mean of the values: on peaked inputs linformer."
    assert "Not 5 % nearer than the mean of the values: on peaked inputs linformer." in findings(analysis)


def test_nothing_is_called_nearest_that_is_no_nearer_than_the_mean(tmp_path):
    records = over_lengths("linformer", 0.9, 1.2)
    wide = [approximation("linformer", 512, error, seed=seed) for seed, error in enumerate((0.2, 1.8))]
    assert "peaked: linformer 1 (mean" in headline(analysed(tmp_path / "wide", wide)), (
        "an interval from 0 settles nothing"
    )
    assert "peaked: none 5 % nearer than the mean of the values, 0.9" in headline(analysed(tmp_path, records))


def test_the_front_table_has_every_kind_of_inputs_at_the_longest_length(tmp_path):
    analysis = analysed(tmp_path, RECORDS)
    table = front_table(analysis)
    assert table is not None
    rows = {row[0]: row for row in table.texts()}
    assert [column.heading for column in table.columns] == ["variant", "peaked", "local", "FLOPs", "of exact"]
    assert list(rows) == ["full", "bigbird", "linformer", "mean of the values"]
    assert rows["bigbird"][1].startswith("0.201 [")
    assert rows["mean of the values"][1] == "0.9"
    assert rows["bigbird"][-1] == "9.8 %"
    names = [table.name for table in make_tables(analysis)]
    assert names == ["error-peaked", "error-local", "approximation", "status"]


def test_what_is_near_on_one_kind_goes_before_what_has_found_nothing_on_any(tmp_path):
    records = [*over_lengths("linformer", 0.89, 0.89), *over_lengths("bigbird", 5.0, 9.0)]
    records += [
        *over_lengths("linformer", 0.85, 0.85, inputs="local"),
        *over_lengths("bigbird", 0.1, 0.1, inputs="local"),
    ]
    (group,) = analysed(tmp_path, records).errors
    assert group.ranked == ["bigbird", "linformer"], "ten times the mean counts as once"


def test_what_has_no_budget_is_named(tmp_path):
    records = [*RECORDS, *over_lengths("linear_attention", 0.9, 0.9, has_budget=False)]
    table = front_table(analysed(tmp_path, records))
    assert table is not None
    assert "Declared with no budget that makes them exact: linear_attention." in table.note
    named = front_table(analysed(tmp_path / "other", RECORDS))
    assert named is not None
    assert "no budget" not in named.note


def test_errors_stand_beside_times_and_scores_and_in_no_panel_of_theirs(tmp_path):
    times = [scaling(name, length) for name in ("full", "bigbird") for length in (512, 1024)]
    scores = [accuracy("full", seed, 0.5) for seed in range(3)]
    analysis = analysed(tmp_path, [*RECORDS, *times, *scores])
    assert [series.label for panel in analysis.panels for series in panel.series] == ["bigbird", "full"]
    front = front_table(analysis)
    assert front is not None
    assert "peaked" not in [column.heading for column in front.columns]
    names = [table.name for table in make_tables(analysis)]
    assert "error-overview" in names
    assert any("Nearest to exact attention" in text for text in findings(analysis))


def test_figures_are_drawn_of_several_lengths_and_of_several_budgets(tmp_path):
    analysis = analysed(tmp_path, RECORDS)
    assert figure_names(analysis) == ["approximation-error", "approximation-cost-error"]
    (picture,) = pictures_of(analysis)
    assert picture.name == "approximation-error"
    assert "bigbird 0.201" in picture.alt
    assert "not drawn: full, exact (up to about 1e-07)" in picture.alt
    small = approximation("bigbird", 1024, 0.7, label="bigbird small", options={"block_size": 8})
    more = analysed(tmp_path / "more", [*RECORDS, small])
    curves, costs = pictures_of(more)
    assert "bigbird small" not in curves.alt, "it has one length"
    assert "bigbird small 0.7 at 9.8 %" in costs.alt
    assert "error-budgets" in [table.name for table in make_tables(more)]


def test_errors_of_the_lower_edge_are_said_to_be_there(tmp_path):
    records = [*RECORDS, *over_lengths("moba", 1e-7, 0.1)]
    assert "at the lower edge: below 0.001" in pictures_of(analysed(tmp_path, records))[0].alt


def test_settings_do_not_mix(tmp_path):
    records = [*RECORDS, *over_lengths("bigbird", 0.3, 0.4, is_causal=True)]
    groups = analysed(tmp_path, records).errors
    assert sorted(group.name for group in groups) == ["error-bidirectional", "error-causal"]
    causal = next(group for group in groups if group.name == "error-causal")
    assert [curve.label for panel in causal.panels for curve in panel.curves] == ["bigbird"]


def test_a_cell_without_a_number_is_a_word(tmp_path):
    failed = approximation("linformer", 2048, 0.0, status="oom_host")
    analysis = analysed(tmp_path, [*RECORDS, approximation("bigbird", 2048, 0.3), failed])
    table = next(table for table in make_tables(analysis) if table.name == "error-peaked")
    rows = {row[0]: row for row in table.texts()}
    assert rows["linformer"][-1] == "OOM"
    assert rows["full"][-1] == "no record"
    (row,) = status_table(analysis).rows
    assert (row["variant"], row["what"], row["lengths"]) == ("linformer", "peaked", "2k")


def test_only_failures_make_no_figure_and_no_claim(tmp_path):
    analysis = analysed(tmp_path, [approximation("linformer", 512, 0.0, status="gate_failed")])
    assert headline(analysis) == "No cell gave a measurement."
    assert pictures_of(analysis) == []
    assert front_table(analysis) is None


def test_of_a_cell_in_two_folders_the_last_counts(tmp_path):
    first, second = (approximation("bigbird", 512, error) for error in (0.5, 0.1))
    folders = [
        write_run(tmp_path / name, [Record.from_dict({**record.to_dict(), "started": started})])
        for name, record, started in (("a", first, "2026-01-01T00:00:00"), ("b", second, "2026-01-02T00:00:00"))
    ]
    analysis = analyse(folders)
    assert analysis.errors[0].panels[0].curves[0].value(512) == 0.1
    assert "in more than one folder: 1 cell; of these the last counts" in analysis.results.warnings


def test_an_export_holds_every_number_and_is_read_back(tmp_path):
    record = RECORDS[0]
    row = flat_row(record)
    assert (row["error"], row["inputs"], row["num_effective_keys"]) == (1e-7, "peaked", 5.12)
    again = record_of({**row, "label": "full", "environment": record.environment}, "row")
    assert again.approximation == record.approximation
    frame = flat_frame(analysed(tmp_path, RECORDS).results.observations)
    assert frame["mean_error"].notna().all()


def test_pages_show_them(tmp_path):
    folder = write_run(tmp_path / "run", RECORDS)
    load([folder]).report(folder)
    page = (folder / "report.html").read_text()
    assert "How near does it come to exact attention?" in page
    assert (folder / "figures" / "approximation-error.svg").is_file()
    assert "bigbird,peaked" in (folder / "tables" / "approximation.csv").read_text()
    readme = leaderboard_readme(read_machines(tmp_path))
    ((run,),) = (machine.runs for machine in read_machines(tmp_path))
    (board,) = run.boards
    assert (board.quantity, board.headings) == ("error", ("variant", "peaked", "local"))
    rows = {row[0].text: row[1:] for row in board.rows}
    assert list(rows) == ["bigbird", "linformer"]
    assert rows["bigbird"][0].text.startswith("0.201 [")
    assert [entry.is_best for entry in rows["bigbird"]] == [True, False]
    wide = [approximation("moba", 1024, error, seed=seed) for seed, error in enumerate((0.001, 0.6))]
    (panel, _) = analysed(tmp_path / "wide", [*RECORDS, *wide]).errors[0].panels
    assert [curve.label for curve in panel.level] == ["bigbird"], "moba has one length, where others have two"
    (alone,) = analysed(tmp_path / "alone", [*wide, approximation("bigbird", 1024, 0.2)]).errors[0].panels
    assert [curve.label for curve in alone.level] == ["bigbird", "moba"], "its interval begins at zero"
    assert rows["linformer"][1].href.endswith("report.html#table-error-local")
    assert 'id="table-error-local"' in page
    assert "**How near does it come to exact attention?** Nearest to exact attention at 1k tokens" in readme


def compared(tmp_path, first, second, **more):
    folders = [write_run(tmp_path / name, records) for name, records in (("a", first), ("b", second))]
    found = compare(*folders, **more)
    return found, {(row["label"], row["inputs"], row["seq_len"]): row for row in found.errors}


def test_two_runs_are_compared_error_by_error(tmp_path):
    first = [*over_lengths("bigbird", 0.1, 0.2, seeds=3), *over_lengths("linformer", 0.5, 0.5, seeds=3)]
    first += [*over_lengths("full", 1e-7, 1e-7, seeds=3), *over_lengths("moba", 0.3, 0.3, seeds=2)]
    second = [*over_lengths("bigbird", 0.1, 0.3, seeds=3), *over_lengths("linformer", 0.25, 0.505, seeds=3)]
    second += [*over_lengths("full", 1.9e-7, 5e-8, seeds=3), *over_lengths("moba", 0.6, 0.3, seeds=2)]
    found, rows = compared(tmp_path, first, second)
    verdicts = {(label, length): row["verdict"] for (label, _, length), row in rows.items()}
    assert verdicts == {
        ("bigbird", 512): "same",
        ("bigbird", 1024): "worse",
        ("linformer", 512): "better",
        ("linformer", 1024): "same",
        ("full", 512): "same",
        ("full", 1024): "same",
        ("moba", 512): "cannot say",
        ("moba", 1024): "same",
    }, "of exact attention rounding is left; two seeds are too few"
    assert rows["bigbird", "peaked", 1024]["ratio"] == pytest.approx(1.5)
    assert found.worse == ["bigbird on peaked inputs L1024: 1.5 [1.5, 1.5] times the error"]
    (table,) = found.tables()
    assert table.name == "compare-errors"
    assert "1 worse by more than 10 %" in found.markdown()
    assert [row["error_b"] for row in found.rows if row["label"] == "moba"] == pytest.approx([0.603, 0.3015])


def test_of_two_versions_in_one_run_the_latest_is_compared(tmp_path):
    old, new = over_lengths("bigbird", 0.9, variant_digest="f"), over_lengths("bigbird", 0.2, variant_digest="a")
    dated = [Record.from_dict({**one.to_dict(), "started": "2026-01-02T00:00:00"}) for one in new]
    _, rows = compared(tmp_path, [*old, *dated], new)
    assert {row["verdict"] for row in rows.values()} == {"same"}


def test_an_error_that_is_gone_or_new_is_said(tmp_path):
    gone = [approximation("bigbird", 512, 0.0, status="gate_failed", seed=seed) for seed in range(3)]
    first = [*over_lengths("bigbird", 0.1, seeds=3), *over_lengths("linformer", 0.5, seeds=3)]
    found, rows = compared(tmp_path, first, [*gone, *over_lengths("moba", 0.5, seeds=3)])
    assert {label: row["verdict"] for (label, *_), row in rows.items()} == {
        "bigbird": "failed in b",
        "linformer": "only in a",
        "moba": "only in b",
    }
    assert found.worse == ["bigbird on peaked inputs L512: no error any more"]


def test_two_runs_without_a_common_error_say_what_differs(tmp_path):
    found, _ = compared(tmp_path, over_lengths("bigbird", 0.1), over_lengths("bigbird", 0.1, inputs="local"))
    with pytest.raises(
        ConfigError, match=r"such as bigbird on peaked inputs L512 float32.*inputs \(peaked against local"
    ):
        found.tables()


def test_one_token_leaves_nothing_to_find(tmp_path):
    def of_one(name: str, error: float) -> Record:
        record = approximation(name, 1, error)
        assert record.approximation is not None
        return replace(record, approximation=replace(record.approximation, mean_error=0.0))

    records = [of_one("linformer", 0.5), of_one("bigbird", 0.0)]
    folder = write_run(tmp_path / "run", records)
    load([folder]).report(folder)
    (group,) = analyse([folder]).errors
    assert group.ranked == ["bigbird", "linformer"]
    assert "none 5 % nearer than the mean of the values, 0;" in f"{headline(analyse([folder]))[:-1]};"


def test_the_mean_of_the_values_is_drawn_where_it_is_exact(tmp_path):
    records = over_lengths("linformer", 0.5, 0.6)
    records = [
        replace(one, approximation=replace(one.approximation, mean_error=0.0)) if one.cell.seq_len == 512 else one
        for one in records
        if one.approximation is not None
    ]
    (group,) = analysed(tmp_path, records).errors
    page = draw_errors(group, make_looks(["linformer"], set()))
    assert page is not None
    (dashed,) = [line for axes in page.figure.axes for line in axes.lines if line.get_color() == MUTED]
    assert np.min(np.asarray(dashed.get_ydata())) == LEAST, "nothing on a logarithmic axis is at 0"


def test_what_is_level_with_the_nearest_is_named_beside_it(tmp_path):
    records = [
        *over_lengths("bigbird", 0.1, 0.2),
        *over_lengths("moba", 0.1, 0.2005),
        *over_lengths("nystrom", 0.5, 0.5),
    ]
    assert "peaked: bigbird or moba 0.201 (mean" in headline(analysed(tmp_path, records))


def test_what_is_a_little_nearer_than_the_mean_is_not_called_no_nearer(tmp_path):
    analysis = analysed(tmp_path, over_lengths("linformer", 0.87, 0.87, seeds=1))
    assert "peaked: none 5 % nearer than the mean of the values, 0.9" in headline(analysis)
    assert "Not 5 % nearer than the mean of the values: on peaked inputs linformer." in findings(analysis)


def test_sentences_and_titles_say_which_setting_they_are_of(tmp_path):
    analysis = analysed(tmp_path, [*RECORDS, *over_lengths("linformer", 0.9, 0.9, seeds=1, is_causal=True)])
    bidirectional, causal = (error_findings(group) for group in analysis.errors)
    assert bidirectional[0].startswith("Nearest to exact attention at 1k tokens (bidirectional, 2 seeds), by")
    assert causal[1].startswith("Not 5 % nearer than the mean of the values (causal): on peaked")
    titles = [table.title for table in make_tables(analysis)]
    assert {"Error on peaked inputs, bidirectional", "Error on peaked inputs, causal"} <= {*titles}
    alone = analysed(tmp_path / "alone", RECORDS)
    assert [group.apart for group in alone.errors] == [""]


def test_a_board_says_why_a_number_is_missing(tmp_path):
    failed = approximation("linformer", 1024, 0.0, inputs="local", status="timeout")
    records = [one for one in RECORDS if (one.cell.variant, one.cell.inputs) != ("linformer", "local")]
    beside = over_lengths("bigbird", 0.1, 0.2, inputs="local")
    write_run(tmp_path / "run", [*records, *over_lengths("linformer", 0.3, inputs="local"), *beside, failed])
    (((board,),),) = ([run.boards for run in machine.runs] for machine in read_machines(tmp_path))
    assert {row[0].text: row[2].text for row in board.rows}["linformer"] == "timeout"


def test_in_float64_rounding_is_told_from_a_change(tmp_path):
    def exact(error: float) -> list[Record]:
        every = over_lengths("full", error, seeds=3, dtype="float64")
        return [
            replace(one, approximation=replace(one.approximation, rounding_error=0.0))
            for one in every
            if one.approximation is not None
        ]

    _, rows = compared(tmp_path, exact(1e-15), exact(2e-15))
    assert [row["verdict"] for row in rows.values()] == ["same"]


def test_exact_attention_alone_is_a_measurement_and_no_answer(tmp_path):
    exact = over_lengths("full", 1e-7, 1e-7)
    assert headline(analysed(tmp_path, exact)) == "Nothing that is not exact gave a number."
    failed = [approximation("bigbird", length, 0.0, status="timeout") for length in (512, 1024)]
    analysis = analysed(tmp_path / "failed", [*over_lengths("full", 1e-7), *failed])
    assert headline(analysis) == "Nothing that is not exact gave a number."
    table = front_table(analysis)
    assert table is not None
    assert [row[0] for row in table.texts()] == ["full", "bigbird", "mean of the values"], "full has one length"


def test_two_versions_of_a_variant_are_no_two_budgets(tmp_path):
    versions = [one for digest in "ab" for one in over_lengths("bigbird", 0.1, 0.2, variant_digest=digest)]
    analysis = analysed(tmp_path, [*over_lengths("full", 1e-7, 1e-7), *versions])
    assert analysis.errors[0].budget_len is None
    assert "error-budgets" not in [table.name for table in make_tables(analysis)]


def test_means_beside_a_ratio_are_over_the_seeds_that_it_is_of(tmp_path):
    def seeded(*errors: tuple[int, float]) -> list[Record]:
        return [approximation("bigbird", 512, error, seed=seed) for seed, error in errors]

    shared = [(0, 0.1), (1, 0.11), (2, 0.12)]
    _, rows = compared(tmp_path, seeded(*shared, (3, 0.9)), seeded(*shared, (4, 0.5)))
    (row,) = rows.values()
    assert (row["error_a"], row["error_b"], row["ratio"]) == pytest.approx((0.11, 0.11, 1.0))
    _, rows = compared(tmp_path / "apart", seeded((0, 0.1)), seeded((1, 0.5)))
    (row,) = rows.values()
    assert (row["error_a"], row["error_b"], row["verdict"]) == (0.1, 0.5, "cannot say")


def test_the_figure_on_top_is_of_the_setting_of_the_table_beside_it(tmp_path):
    failed = approximation("linformer", 512, 0.0, status="timeout", dtype="bfloat16")
    analysis = analysed(tmp_path, [failed, *RECORDS])
    assert [group.name for group in analysis.errors] == ["error-bfloat16", "error-float32"]
    picture = front_picture(analysis, pictures_of(analysis))
    assert picture is not None
    assert picture.name == "approximation-error-float32"


def test_costs_are_there_where_the_first_seed_failed(tmp_path):
    failed = replace(approximation("bigbird", 1024, 0.0, status="timeout"), flops=None)
    records = [*over_lengths("full", 1e-7, 1e-7), *over_lengths("bigbird", 0.1), failed]
    analysis = analysed(tmp_path, [*records, approximation("bigbird", 1024, 0.2, seed=1)])
    table = front_table(analysis)
    assert table is not None
    assert {row[0]: row[-1] for row in table.texts()}["bigbird"] == "9.8 %"


def test_a_length_that_few_have_ranks_nothing(tmp_path):
    """As after an interruption: exact attention alone, or one of three, was measured at the longest length."""
    names = {"bigbird": 0.1, "linformer": 0.5, "moba": 0.3}
    records = [one for name, error in names.items() for one in over_lengths(name, error, error)]
    exact = over_lengths("full", 1e-7, 1e-7, 1e-7)
    said = headline(analysed(tmp_path / "exact", [*exact, *records]))
    assert said.startswith("Nearest to exact attention at 1k tokens (2 seeds), by error")
    assert "peaked: bigbird 0.101 (mean" in said
    longer = [approximation("linformer", 2048, 0.5, seed=seed) for seed in (0, 1)]
    said = headline(analysed(tmp_path / "one", [*exact, *records, *longer]))
    assert "at 1k tokens" in said
    assert "not measured there" not in said
    longer += [approximation("moba", 2048, 0.3, seed=seed) for seed in (0, 1)]
    analysis = analysed(tmp_path / "two", [*exact, *records, *longer])
    assert "at 2k tokens (2 seeds), by error on inputs of each kind: peaked: moba 0.3" in headline(analysis)
    assert headline(analysis).endswith("; not measured there: bigbird.")


def test_few_seeds_are_said_and_name_nothing_that_found_nothing(tmp_path):
    one = headline(analysed(tmp_path / "one", over_lengths("bigbird", 0.1, 0.1, seeds=1)))
    assert one.startswith("Nearest to exact attention at 1k tokens (1 seed), by error")
    wide = [
        approximation("performer", length, error, seed=seed)
        for length in (512, 1024)
        for seed, error in ((0, 1), (1, 9))
    ]
    two = headline(analysed(tmp_path / "two", [*over_lengths("bigbird", 0.1, 0.1), *wide]))
    assert "peaked: bigbird 0.101 (mean" in two, "the interval of the other begins at 0"
    three = headline(analysed(tmp_path / "three", over_lengths("bigbird", 0.1, 0.1, seeds=3)))
    assert "seed" not in three
