"""Rates beside measured ceilings: the arithmetic by hand, what is left out, what is flagged, tables and the figure."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.figures.roofline import MOST_BESIDE
from attn_zoo.report.tables.all_tables import make_tables
from attn_zoo.report.tables.efficiency_tables import efficiency_table
from attn_zoo.report.tables.table import MISSING, to_csv, to_markdown
from attn_zoo.report.tables.time_tables import length_table, measurement_table
from tests.report.figures.legible import MANY, assert_legible, one_picture, pictures, texts, words
from tests.report.synthetic import DOUBLINGS, MACHINE, analysed, costed, pictures_of, roof, scaling, write_run, zoo


def exact_and_half(**cell):
    """Two variants of 1 GFLOP and 0.5 GFLOP and 10 MB, in 20 and 12.5 ms."""
    return [
        costed(scaling("full", 512, 20.0, spread=0.0, **cell), 10**9, 10**7, 2.5),
        costed(scaling("bigbird", 512, 12.5, spread=0.0, **cell), 5 * 10**8, 10**7, 2.0),
    ]


def roofed(tmp_path, records, ceilings=None, **more):
    return analysed(tmp_path, records, ceilings=[roof()] if ceilings is None else ceilings, **more)


@pytest.mark.parametrize(
    ("pass_", "flops", "num_bytes"),
    [("infer", 1.0, 1), ("fwd", 1.0, 1), ("bwd", 2.5, 2), ("fwd_bwd", 3.5, 3)],
)
def test_every_pass_counts_its_own_work(tmp_path, pass_, flops, num_bytes):
    found = roofed(tmp_path, exact_and_half(pass_=pass_)).panels[0].efficiency["full"][0]
    assert found.flops == flops * 1e9
    assert found.min_bytes == num_bytes * 1e7
    assert found.flops_per_s == pytest.approx(flops * 1e9 / 0.020)
    assert found.bytes_per_s == pytest.approx(num_bytes * 1e7 / 0.020)
    assert found.roof_frac == pytest.approx(flops * 0.010 / 0.020)  # 1 GFLOP at 100 GFLOP/s is 10 ms
    assert found.mfu is None


def test_the_slower_of_arithmetic_and_traffic_is_the_floor(tmp_path):
    slow_copies = [roof(copy_bytes_per_s=6.25e8)]
    found = roofed(tmp_path, exact_and_half(), slow_copies).panels[0].efficiency
    assert found["full"][0].roof_frac == pytest.approx(0.016 / 0.020)  # 10 MB at 0.625 GB/s


def test_realised_is_the_speed_up_that_came_of_the_one_promised(tmp_path):
    found = roofed(tmp_path, exact_and_half()).panels[0].efficiency
    assert found["bigbird"][0].realised == pytest.approx((20 / 12.5) / 2)
    assert found["full"][0].realised is None


def test_realised_counts_the_backward_of_each_variant(tmp_path):
    found = roofed(tmp_path, exact_and_half(pass_="fwd_bwd")).panels[0].efficiency
    assert found["bigbird"][0].realised == pytest.approx((20 / 12.5) / (3.5e9 / 1.5e9))


def test_without_ceilings_of_this_machine_the_report_is_as_before(tmp_path):
    foreign = [roof(environment="elsewhere"), roof(dtype="bfloat16"), roof(threads=None), roof(device="cuda")]
    with_foreign = roofed(tmp_path / "a", exact_and_half(), foreign)
    without = roofed(tmp_path / "b", exact_and_half(), [])
    names = [table.name for table in make_tables(without)]
    assert not {name for name in names if "rates" in name or "efficiency" in name}
    assert [table.name for table in make_tables(with_foreign)] == names
    assert [to_markdown(table) for table in make_tables(with_foreign)] == [
        to_markdown(table) for table in make_tables(without)
    ]
    assert not pictures(tmp_path, exact_and_half(), start="roofline")


def test_records_without_formulas_and_simulated_ones_are_left_out(tmp_path):
    full, bigbird = exact_and_half()
    records = [full, replace(bigbird, is_simulated=True), scaling("linformer", 512)]
    assert list(roofed(tmp_path, records).panels[0].efficiency) == ["full"]


def test_of_a_formula_without_its_backward_nothing_is_said(tmp_path):
    """None of a record is no rate of zero, and a figure of rates of zero cannot be drawn."""
    full, other = exact_and_half(pass_="bwd")
    analysis = roofed(tmp_path, [full, replace(other, backward_ratio=None)])
    assert list(analysis.panels[0].efficiency) == ["full"]
    assert pictures_of(analysis, "roofline")
    none = roofed(tmp_path / "none", [replace(full, backward_ratio=None)])
    assert efficiency_table(none) is None


def test_more_than_the_roof_is_said_in_words(tmp_path):
    doubtful = [roof(matmul_flops_per_s=4e10, flags=("loaded_host",))]
    analysis = roofed(tmp_path, exact_and_half(), doubtful)
    one = analysis.panels[0]
    assert one.efficiency["bigbird"][0].doubt == ""
    assert one.efficiency["full"][0].doubt.startswith("125 % of the roof: the ceiling was measured too low")
    assert "loaded host while it was measured" in one.efficiency["full"][0].doubt
    assert [text for text in analysis.results.warnings if text.startswith("full, forward, at 512: 125 %")]
    table = efficiency_table(analysis)
    assert table is not None
    shown = to_markdown(table)
    assert "| above the roof |" in shown
    assert "125 % of the roof: the ceiling was measured too low" in shown
    assert "doubtful: loaded host" in shown


def test_of_several_lengths_above_the_roof_the_most_is_said_to_be_the_most(tmp_path):
    records = [costed(scaling("full", n, ms, spread=0.0), 10**9, 10**7) for n, ms in ((512, 8.0), (1024, 5.0))]
    (said,) = [text for text in roofed(tmp_path, records).results.warnings if "of the roof" in text]
    assert said.startswith("full, forward, at 512, 1k: up to 200 % of the roof")


@pytest.mark.parametrize("which", ["full", "bigbird", ""])
def test_shares_carry_the_marks_of_the_times_they_are_made_of(tmp_path, which):
    records = []
    for one in exact_and_half():
        assert one.timing is not None
        flags = ("throttled", "few_samples") if one.cell.variant == which else ()
        records.append(replace(one, timing=replace(one.timing, flags=flags)))
    table = efficiency_table(roofed(tmp_path, records))
    assert table is not None
    headings = [column.heading for column in table.columns]
    shown = {row[0]: dict(zip(headings, row, strict=True)) for row in table.texts()}
    for name, row in shown.items():
        assert row["time"].endswith(" †§") is (name == which)
    assert shown["bigbird"]["realised"] == ("80 % †§" if which else "80 %")
    assert shown["full"]["realised"] == MISSING
    assert ("†: the GPU was throttled" in table.note) is bool(which)
    assert "above the roof" not in headings


def test_of_the_gpu_alone_it_is_not_said_that_it_waits_for_the_host(tmp_path):
    ceilings = [roof(device="cuda")]
    records = exact_and_half(device="cuda")
    alone = []
    for one in records:
        assert one.timing is not None
        alone.append(replace(one, timing=replace(one.timing, graph_ms=one.timing.median_ms / 4)))
    table = efficiency_table(roofed(tmp_path / "alone", alone, ceilings))
    assert table is not None
    assert {row["marks"] for row in table.rows} == {""}
    assert "of the GPU alone, where that was measured" in table.note
    table = efficiency_table(roofed(tmp_path / "calls", records, ceilings))
    assert table is not None
    assert "GPU alone" not in table.note


def test_tables_say_rates_shares_and_conventions(tmp_path):
    analysis = roofed(tmp_path, [*exact_and_half(), *exact_and_half(pass_="bwd")])
    table = efficiency_table(analysis)
    assert table is not None
    text = to_markdown(table)
    for part in ("50 GFLOP/s", "500 MB/s", "| 50 % |", "| 80 % |", "2 (bigbird) or 2.5 (full) forwards"):
        assert part in text, part
    assert "MFU" not in text
    first = to_csv(table).splitlines()
    assert first[0].startswith("variant,pass,settings,marks,seq_len,median_ms,time_ms,is_waiting,flops,min_bytes")
    assert "matrix products 100 GFLOP/s in float32, copies 10 GB/s" in table.note


def test_the_brief_table_has_the_longest_length_of_each(tmp_path):
    records = sweep(["full", "bigbird"], DOUBLINGS)
    tables = {table.name: table for table in make_tables(roofed(tmp_path, records))}
    assert [row["seq_len"] for row in tables["efficiency-longest"].rows] == [DOUBLINGS[-1]] * 2
    assert len(tables["efficiency"].rows) == 2 * len(DOUBLINGS)
    assert tables["efficiency-longest"].note == tables["efficiency"].note
    assert "a backward counts as 2.5 (bigbird, full) forwards" in tables["efficiency"].note


def test_the_data_sheet_gives_mfu(tmp_path):
    sheet = [roof(peak_flops_per_s=2e11, peak_bytes_per_s=2e10)]
    table = efficiency_table(roofed(tmp_path, exact_and_half(), sheet))
    assert table is not None
    assert [row["variant"] for row in table.rows] == ["full", "bigbird"], "the larger share of the roof first"
    assert [row["mfu"] for row in table.rows] == pytest.approx([1e9 / 0.020 / 2e11, 5e8 / 0.0125 / 2e11])
    assert "| 25 % |" in to_markdown(table)
    assert "MFU: share of the maker's product rate" in table.note


def test_a_damaged_file_is_a_warning(tmp_path):
    run = write_run(tmp_path / "run", exact_and_half())
    for text in ("{", "[]", '{"ceilings": [1]}', json.dumps({"ceilings": [{"device": "cpu"}]})):
        (run / "ceilings.json").write_text(text)
        analysis = analyse([run])
        assert analysis.panels[0].efficiency == {}
        assert [one for one in analysis.results.warnings if one.startswith("run/ceilings.json was skipped")], text


def sweep(names, lengths, **cell):
    """Intensities as the formulas have them: constant for linear variants, growing for exact ones."""
    records = []
    for place, name in enumerate(names):
        for n in lengths:
            pairs = n * n if name == "full" else n * (256 + 16 * place)
            flops = 4 * 8 * 64 * pairs
            ms = 1e3 * flops / (9e10 / (1 + 0.3 * place)) + 0.5
            records.append(costed(scaling(name, n, ms, **cell), flops, 4 * 8 * n * 64 * 4))
    return records


@pytest.mark.parametrize(
    ("names", "lengths"),
    [
        (["full", "linformer", "bigbird"], [512 * 2**power for power in range(12)]),
        (["bigbird"], [512]),
        (MANY[:6], DOUBLINGS),
        (MANY, DOUBLINGS),
    ],
    ids=["three-by-twelve", "one-point", "six", "many"],
)
def test_the_roofline_is_legible(tmp_path, names, lengths):
    for sheet in ({}, {"peak_flops_per_s": 1.3e11, "peak_bytes_per_s": 1.2e10}):
        picture = one_picture("roofline", tmp_path / str(len(sheet)), sweep(names, lengths), ceilings=[roof(**sheet)])
        assert_legible(picture.figure)
        shown = words(picture.figure)
        assert "roof, measured" in shown
        assert ("data sheet" in [text for text, _ in texts(picture.figure)]) is bool(sheet)
        assert ("(data sheet 130 GFLOP/s, 12 GB/s)" in " ".join(shown.split())) is bool(sheet)
        assert "of the roof at" in picture.alt
        lines = picture.figure.axes[0].get_lines()
        assert all(line.get_markersize() >= 5 for line in lines if line.get_marker() not in ("None", "")), "too small"


def test_the_data_sheet_s_line_is_named_where_only_its_bytes_are_known(tmp_path):
    (picture,) = pictures(
        tmp_path, sweep(["full"], DOUBLINGS), ceilings=[roof(peak_bytes_per_s=1.2e10)], start="roofline"
    )
    assert "data sheet" in [text for text, _ in texts(picture.figure)]
    assert "(data sheet 12 GB/s)" in " ".join(words(picture.figure).split())


def test_names_stand_beside_the_roofline_and_cover_none_of_it(tmp_path):
    (picture,) = pictures(tmp_path, sweep(MANY[:6], DOUBLINGS), ceilings=[roof()], start="roofline")
    shown = texts(picture.figure)
    names = [box for text, box in shown if text.endswith("% of the roof") or text in MANY[:6]]
    assert len(names) == 6 + 2 * 6, "each with its share, and once more beside its bytes"
    assert min(box.x0 for box in names) > picture.figure.axes[0].get_window_extent().x1


def test_of_many_the_names_stand_at_their_marks_and_cover_none_of_them(tmp_path):
    names = [f"variant_{index}" for index in range(MOST_BESIDE + 4)]
    (picture,) = pictures(tmp_path, sweep(names, DOUBLINGS), ceilings=[roof()], start="roofline")
    shown, (roofline, below) = texts(picture.figure), picture.figure.axes
    frame = roofline.get_window_extent()
    inside = [box for text, box in shown if text in names and frame.contains(*box.min)]
    assert len(inside) == len(names)
    marks = [line for line in roofline.get_lines() if line.get_marker() not in ("None", "")]
    assert len(marks) == len(names), "one of each, at its longest length"
    for x, y in (roofline.transData.transform(line.get_xydata()[0]) for line in marks):
        assert not any(box.contains(x, y) for box in inside)
    shares = [box for text, box in shown if text.endswith("% of the roof")]
    assert len(shares) == len(names)
    assert min(box.x0 for box in shares) > below.get_window_extent().x1, "beside their bytes"


@pytest.mark.parametrize(
    ("times", "waiting", "joined"),
    [
        ([(1.0, 0.01), (1.0, None), (1.0, None), (1.8, None), (3.8, None)], {1, 2}, {(1, 2), (2, 3), (3, 4)}),
        ([(1.0, 0.01), (1.0, None), (1.0, 0.01), (1.8, None), (3.8, None)], {1}, {(2, 3), (3, 4)}),
    ],
    ids=["calls-go-on", "the-gpu-alone-goes-on"],
)
def test_no_line_of_a_roofline_joins_the_gpu_alone_to_calls_that_wait(tmp_path, times, waiting, joined):
    records = []
    for n, (call_ms, device_ms) in zip(DOUBLINGS, times, strict=False):
        record = costed(scaling("full", n, call_ms, spread=0.0, device="cuda"), 10**6 * n, 1000 * n)
        assert record.timing is not None
        records.append(replace(record, timing=replace(record.timing, graph_ms=device_ms)))
    (panel,) = roofed(tmp_path / "a", records, [roof(device="cuda")]).panels
    assert {place for place, row in enumerate(panel.efficiency["full"]) if row.is_waiting} == waiting
    (picture,) = pictures(tmp_path / "b", records, ceilings=[roof(device="cuda")], start="roofline")
    assert "times of the GPU alone where they were measured" in " ".join(words(picture.figure).split())
    pairs = set()
    for line in picture.figure.axes[1].get_lines():
        points = [(DOUBLINGS.index(x), y) for x, y in zip(*line.get_data(), strict=True) if x in DOUBLINGS]
        pairs |= {
            (one, other) for (one, y), (other, end) in pairwise(points) if one != other and math.isfinite(y + end)
        }
    assert pairs == joined


def test_graph_times_are_shown_apart_where_there_are_any(tmp_path):
    plain_tables = roofed(tmp_path / "a", zoo(["full"], [512])).panels[0]
    assert "CUDA graph" not in length_table(plain_tables, "time").note
    (record,) = zoo(["full"], [512])
    assert record.timing is not None
    replayed = replace(record, timing=replace(record.timing, timer="cuda_event", graph_ms=0.0125))
    analysis = roofed(tmp_path / "b", [replayed])
    table = length_table(analysis.panels[0], "time")
    assert table.texts()[0][1].endswith("(0.0125 ms)")
    assert "replayed from a CUDA graph, cache warm" in table.note
    long = measurement_table(analysis)
    assert "from a graph" in [column.heading for column in long.columns]
    assert long.rows[0]["graph_ms"] == 0.0125


def test_machines_do_not_lend_each_other_their_roof(tmp_path):
    other = replace(MACHINE, cpu="Another CPU")
    run = write_run(tmp_path / "a", exact_and_half(), ceilings=[roof()])
    records = [replace(one, environment=other.digest) for one in exact_and_half()]
    second = write_run(tmp_path / "b", records, environment=other)
    found = [bool(one.efficiency) for one in analyse([run, second]).panels]
    assert sorted(found) == [False, True]
