"""A report says nothing that its records contradict: unfinished, launch-bound, short, level, doubtful ones."""

import io
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from attn_zoo.displays import Run
from attn_zoo.folder import pack_cells
from attn_zoo.records import REPLACEMENT_VERSION, TRAINING_VERSION, Memory, Record, Status
from attn_zoo.report.analysis.analyse import Analysis, analyse
from attn_zoo.report.pages.findings import (
    accuracy_findings,
    completeness,
    findings,
    headline,
    memory_findings,
    panel_findings,
)
from attn_zoo.report.pages.html import build_page
from attn_zoo.report.pages.leaderboard import read_machines
from attn_zoo.report.tables.all_tables import make_tables, status_table, tables_by_question
from attn_zoo.report.tables.front_table import front_table
from attn_zoo.report.tables.growth_tables import crossing_text, crossover_table, exponent_table
from attn_zoo.report.tables.table import MISSING, Table, to_terminal
from attn_zoo.report.tables.time_tables import length_table, measurement_table, turns_table
from attn_zoo.statistics.medians import time_summary
from attn_zoo.units import TIMES
from tests.report.figures.legible import assert_legible, words
from tests.report.synthetic import (
    CLAIMS,
    accuracy,
    analysed,
    costed,
    pictures_of,
    roof,
    scaling,
    timing,
    trained,
    write_run,
    zoo,
)

LENGTHS = [512 * 2**power for power in range(8)]
HOST_MS = 0.7


def on_gpu(variant: str, seq_len: int, device_ms: float, *, graph: bool = False, host_ms: float = HOST_MS) -> Record:
    """Return a call that takes what the slower of host and GPU takes."""
    record = scaling(variant, seq_len, max(host_ms, device_ms), device="cuda", dtype="bfloat16")
    assert record.timing is not None
    return replace(record, timing=replace(record.timing, timer="cuda_event", graph_ms=device_ms if graph else None))


def launch_bound(*, graph: bool = False) -> list[Record]:
    """Exact attention is busy from 8k tokens on, the linear variant never: its GPU time is a tenth of the host's."""
    exact = [on_gpu("full", n, 1.2e-8 * n**2, graph=graph, host_ms=0.3) for n in LENGTHS]
    return exact + [on_gpu("linformer", n, 1e-6 * n, graph=graph) for n in LENGTHS]


def flagged(record: Record, *flags: str) -> Record:
    assert record.timing is not None
    return replace(record, timing=replace(record.timing, flags=flags))


def row_of(table: Table, variant: str) -> list[str]:
    """Return what the row of a variant says; the best comes first."""
    return next(texts for row, texts in zip(table.rows, table.texts(), strict=True) if row["variant"] == variant)


def said(analysis: Analysis) -> str:
    """Return every sentence of a report, and what its figures say of themselves."""
    tables = [table.note for table in make_tables(analysis)]
    sentences = [headline(analysis), completeness(analysis), *findings(analysis), *panel_findings(analysis)]
    return "\n".join([*sentences, *tables, *(picture.alt for picture in pictures_of(analysis))])


@pytest.fixture
def unfinished(tmp_path):
    every = [scaling(variant, n) for variant in ("full", "linformer") for n in LENGTHS[:5]]
    planned = pack_cells(record.cell for record in every)
    return write_run(tmp_path / "run", every[:7], planned=planned, stopped="time limit")


def test_an_unfinished_run_says_so_everywhere(unfinished):
    analysis = analyse([unfinished])
    assert completeness(analysis).startswith("7 of 10 cells; left (time limit): linformer/scaling/fwd/L2048")
    (panel,) = analysis.panels
    assert row_of(length_table(panel, "time"), "linformer")[3:6] == ["time limit"] * 3
    front = front_table(analysis)
    assert front is not None
    assert front.texts()[2][3:6] == ["time limit"] * 3
    (row,) = status_table(analysis).rows
    assert (row["status"], row["num_cells"], row["reason"]) == ("cancelled", 3, "time limit")
    assert "gave a measurement" not in said(analysis)
    Run([unfinished]).report(has_readme=True)
    text = (unfinished / "README.md").read_text(encoding="utf-8")
    assert "7 of 10 cells" in text
    assert "7 of 10 cells" in (unfinished / "report.html").read_text(encoding="utf-8")
    strip = pictures_of(analysis, "time-")[0]
    assert "linformer: not run at 2k, 4k, 8k" in strip.alt
    assert_legible(strip.figure)


def test_a_cell_that_waits_for_processes_is_shown_with_those_it_has(tmp_path):
    records = [scaling("full", n) for n in LENGTHS[:3]]
    run = write_run(
        tmp_path / "run", records[:2], planned=pack_cells(each.cell for each in records), stopped="time limit"
    )
    begun = run / "parts"
    begun.mkdir()
    for number in (1, 2):
        part = replace(records[2], duration_s=float(number))
        (begun / f"{records[2].cell.key}-{number}.json").write_text(part.to_json(), encoding="utf-8")
    (begun / f"{records[0].cell.key}-1.json").write_text(records[0].to_json(), encoding="utf-8")  # left by a kill
    analysis = analyse([run])
    assert completeness(analysis) == (
        "2 of 3 cells; left (time limit): 1 with fewer processes than planned, shown all the same."
    )
    assert not analysis.results.warnings, "nothing is pooled that belongs apart"
    ((points),) = [series.points for panel in analysis.panels for series in panel.series]
    assert [point.seq_len for point in points] == LENGTHS[:3]
    assert [point.num_processes for point in points] == [1, 1, 2]
    stale = scaling("full", LENGTHS[2], variant_digest="0123")  # of a source that was edited meanwhile
    (begun / f"{stale.cell.key}-1.json").write_text(stale.to_json(), encoding="utf-8")
    assert "1 with fewer processes than planned" in completeness(analyse([run]))


def test_a_variant_of_which_nothing_was_run_has_its_row(tmp_path):
    done, left = scaling("full", 512), scaling("bigbird", 512)
    run = write_run(tmp_path / "run", [done], planned=pack_cells([done.cell, left.cell]))
    table = length_table(analyse([run]).panels[0], "time")
    assert table.texts()[1][:2] == ["bigbird", "not run"], "below what was measured"


def test_a_finished_run_says_nothing_of_it_and_an_older_one_that_nobody_knows(tmp_path):
    records = [scaling("full", n) for n in LENGTHS[:3]]
    run = write_run(tmp_path / "new", records, planned=pack_cells(record.cell for record in records))
    assert completeness(analyse([run])) == ""
    assert status_table(analyse([run])).note == "Every planned cell was run and gave a measurement."
    planned = pack_cells(record.cell for record in records)
    part = write_run(tmp_path / "part", records, planned=planned, shards=[["quick", 1, 3], ["quick", 2, 3]])
    assert completeness(analyse([part])) == "Shard 3 of 3 has not run here."
    rest = write_run(tmp_path / "rest", [], planned=[], shards=[["quick", 3, 3]])
    assert "hard" not in completeness(analyse([part, rest])), "read together they are all of them"
    old = analysed(tmp_path / "old", [*records, scaling("bigbird", 512)])
    assert completeness(old).startswith("4 cells; how many were planned is not known; no record, where others")
    assert "bigbird forward at 1k" in completeness(old)
    assert row_of(length_table(old.panels[0], "time"), "bigbird")[2:] == ["no record", "no record"]
    assert "not known" in status_table(old).note


def test_trainings_that_were_not_run_are_counted_and_no_row_is_lost(tmp_path):
    records, left = trained(seeds=(0, 1)), [accuracy(variant, 2, 0.1).cell for variant in ("full", "bigbird")]
    planned = pack_cells([*(record.cell for record in records), *left])
    analysis = analysed(tmp_path, records, planned=planned)
    assert completeness(analysis).startswith("6 of 8 cells; left: ")
    (group,) = analysis.accuracy
    assert {score.name: score.trial.failed for score in group.scores}["full"] == "not run 1 of 3"
    assert all(score.mean is not None for score in group.scores)


def test_a_curve_that_waits_for_the_host_has_no_exponent_and_its_crossing_says_so(tmp_path):
    analysis = analysed(tmp_path, launch_bound())
    (panel,) = analysis.panels
    growth = panel.time["linformer"]
    assert (growth.exponent, growth.verdict) == (None, "too few lengths")
    assert growth.why == "waits for the host up to 64k; 0 lengths above it"
    assert panel.time["full"].verdict == "quadratic"
    crossing = panel.crossing("linformer")
    assert crossing is not None
    assert crossing.waiting == ("linformer", "full")
    assert "(calls wait for the host)" in crossing_text(crossing)
    for width, host in ((120, "(calls wait for the host)"), (50, "(host)")):
        out = io.StringIO()
        to_terminal(crossover_table(analysis), Console(file=out, width=width, color_system=None))
        assert host in out.getvalue()
        assert "their costs of launching cross" in " ".join(out.getvalue().split())
    text = length_table(panel, "time")
    assert all("°" in cell for cell in row_of(text, "linformer")[1:])
    assert "the GPU alone was not timed" in text.note
    assert "N^0" not in said(analysis)
    for picture in pictures_of(analysis):
        assert "exponent 0" not in picture.alt
        assert_legible(picture.figure)


def test_the_longest_lengths_are_the_gpus_where_they_lie_on_one_line_however_slow_the_host_was_before(tmp_path):
    """Linformer's calls on an H100: the slowest of those that wait is two thirds of one that keeps the GPU busy."""
    calls_ms = [0.583, 0.69, 0.695, 0.707, 0.673, 0.936, 0.475, 0.827, 0.695, 1.39, 2.87]
    lengths = [1024 * 2**power for power in range(len(calls_ms))]
    records = [on_gpu("linformer", n, ms, host_ms=0.0) for n, ms in zip(lengths, calls_ms, strict=True)]
    records += [on_gpu("full", n, 5e-9 * n**2, host_ms=0.2) for n in lengths]
    analysis = analysed(tmp_path, records)
    (panel,) = analysis.panels
    waiting = {series.label: max(series.waiting) for series in panel.series}
    assert waiting == {"full": 4096, "linformer": 131_072}
    assert panel.time["linformer"].verdict == "linear"
    assert "calls wait for the host: full at least up to 4k, linformer at least up to 128k" in headline(analysis)
    assert "by single calls the fastest is" in headline(analysis)
    short = analysed(tmp_path / "short", records[:10]).panels[0]
    assert max(short.series[0].waiting) == lengths[9], "two lengths lie on any line"


def test_device_time_is_what_is_fitted_compared_and_held_against_the_roof(tmp_path):
    records = [costed(one, flops=10**6 * (one.cell.seq_len or 0), min_bytes=10**3) for one in launch_bound(graph=True)]
    ceilings = [roof(device="cuda", dtype="bfloat16", matmul_flops_per_s=1e13)]
    analysis = analysed(tmp_path, records, ceilings=ceilings)
    (panel,) = analysis.panels
    growth = panel.time["linformer"]
    assert growth.exponent is not None
    assert growth.exponent.value == pytest.approx(1.0, abs=1e-3)
    assert (growth.verdict, growth.is_device) == ("linear", True)
    (alone,) = panel.device_crossings
    assert alone.result is not None
    assert alone.result.kind == "always_faster", "they cross at 83 tokens"
    (row,) = [row for row in panel.efficiency["linformer"] if row.seq_len == 65536]
    assert row.time_ms == pytest.approx(1e-6 * 65536)
    assert not row.is_waiting
    assert row.roof_frac == pytest.approx(1e6 * 65536 / 1e13 / (row.time_ms * 1e-3))
    assert any("on the GPU alone" in text for text in findings(analysis))
    assert "; on the GPU alone cheaper than full: linformer from 512 or less" in headline(analysis)
    assert "calls wait for the host: full up to 4k, linformer up to 64k" in headline(analysis), (
        "it is known, not inferred"
    )


@pytest.mark.parametrize(("host_ms", "waits"), [(0.01, False), (0.05, True), (None, True)])
def test_a_call_whose_launch_was_hidden_does_not_wait_for_the_host(tmp_path, host_ms, waits):
    """A write runs before it for longer than the host needs: what it takes beside the GPU's time is something else."""
    record = on_gpu("full", 512, 0.005, graph=True, host_ms=0.012)
    assert record.timing is not None
    record = replace(record, timing=replace(record.timing, host_ms=host_ms))
    (panel,) = analysed(tmp_path, [record]).panels
    assert bool(panel.series[0].waiting) is waits


@pytest.mark.parametrize(("factor", "text"), [(0.97, "from 562 or less"), (0.9, "from 512 or less")])
def test_single_medians_of_the_gpu_settle_no_narrow_lead(tmp_path, factor, text):
    """At the shortest length they differ by less than replays of one kernel do; marks of calls are not theirs."""
    records = [on_gpu("full", n, 1e-6 * n**2 * (n / 512) ** 0.5, graph=True) for n in LENGTHS[:4]]
    records += [on_gpu("linformer", n, 1e-6 * n**2 * factor, graph=True) for n in LENGTHS[:4]]
    analysis = analysed(tmp_path, [flagged(one, "too_short") for one in records])
    row = next(row for row in crossover_table(analysis).rows if row["quantity"] == "time of the GPU")
    assert row["is_settled"] is (factor < 0.95)
    assert (row["words"], row["marks"]) == (text, "")
    assert "of one median a length the interval is what 8 %" in crossover_table(analysis).note


def test_the_gpu_alone_in_several_processes_has_intervals_of_its_own(tmp_path):
    def times(record, *factors):
        assert record.timing is not None
        by_process = tuple(factor * record.timing.graph_ms for factor in factors)
        flags = ("throttled",) if record.cell.seq_len == 1024 else ()
        return replace(record, timing=replace(record.timing, graph_by_process_ms=by_process, graph_flags=flags))

    factors = {"steady": (1.0, 1.001, 0.999), "drifting": (1.0, 2.0, 0.5)}
    for name, own in factors.items():
        records = [times(on_gpu("full", n, 1e-6 * n**2, graph=True), *own) for n in LENGTHS[:4]]
        records += [times(on_gpu("linformer", n, 1e-3 * n, graph=True), *own[::-1]) for n in LENGTHS[:4]]
        analysis = analysed(tmp_path / name, records)
        (growth,) = [
            row for row in exponent_table(analysis).rows if row["variant"] == "full" and "GPU" in row["quantity"]
        ]
        assert (growth["reading"] == "quadratic") is (name == "steady")
        assert growth["exponent_low"] < 2 < growth["exponent_high"]
        assert "†" in growth["exponent_marks"]
        row = next(row for row in crossover_table(analysis).rows if row["quantity"] == "time of the GPU")
        assert row["is_settled"] is (name == "steady")
        assert "†" in row["marks"]


def test_the_last_slope_of_the_gpu_is_not_that_of_calls(tmp_path):
    """Calls take what the host takes at both lengths, so their slope is none."""
    records = [on_gpu("linformer", n, 1e-6 * n, graph=True) for n in LENGTHS[:2]]
    row = next(iter(exponent_table(analysed(tmp_path, records)).rows))
    assert row["quantity"] == "time of the GPU"
    assert row["last_slope"] == pytest.approx(1.0)
    assert (row["last_slope_low"], row["last_slope_marks"]) == (None, "")


@pytest.mark.parametrize(("host_ms", "is_said"), [(0.9, True), (0.8, False), (None, False)])
def test_energy_is_said_to_count_a_gpu_that_waits(tmp_path, host_ms, is_said):
    """The call takes hardly more than the GPU alone, and the host longer than that to enqueue the next one."""
    record = on_gpu("full", 4096, 0.85, graph=True)
    assert record.timing is not None
    record = replace(record, energy_joules=0.0123, timing=replace(record.timing, host_ms=host_ms))
    table = measurement_table(analysed(tmp_path, [record]))
    headings = [column.heading for column in table.columns]
    assert table.texts()[0][headings.index("energy")] == "12.3 mJ"
    assert "Energy: of one call of many as a user makes them" in table.note
    assert ("Of full at 4k the host was the limit: the GPU waited" in table.note) is is_said
    without = measurement_table(analysed(tmp_path / "without", [replace(record, energy_joules=None)]))
    assert "energy" not in without.note.casefold()


def test_energy_has_a_figure_and_a_sentence_where_it_was_measured(tmp_path):
    """At 4096 tokens the host is the limit of the cheaper one, so what the GPU draws meanwhile is no mechanism's."""
    joules = {"full": (0.4, 6.25), "linformer": (0.13, 0.25)}
    records = []
    for name, known in joules.items():
        for length, each in zip((4096, 16384), known, strict=True):
            record = on_gpu(name, length, each, graph=True)
            assert record.timing is not None
            is_bound = (name, length) == ("linformer", 4096)
            timing = replace(record.timing, host_ms=9.0 if is_bound else 1e-3)
            records.append(replace(record, energy_joules=each, timing=timing))
    analysis = analysed(tmp_path, records)
    assert "Energy of a call at 16k: linformer 250 mJ, full 6.25 J." in findings(analysis)
    more = [replace(one, cell=replace(one.cell, label=f"{one.cell.variant} {i}")) for one in records for i in (2, 3)]
    every = "linformer 250 mJ, linformer 2 250 mJ, linformer 3 250 mJ; the most: full 3 6.25 J"
    assert f"Energy of a call at 16k: {every}." in findings(analysed(tmp_path / "more", records + more))
    (picture,) = pictures_of(analysis, "energy-")
    assert picture.section == "efficiency"
    assert "linformer: 130 mJ at 4k (waits for the host), 250 mJ at 16k" in picture.alt, picture.alt
    assert "full: 400 mJ at 4k, 6.25 J at 16k" in picture.alt, picture.alt
    bare = analysed(tmp_path / "bare", [replace(record, energy_joules=None) for record in records])
    assert not any("nergy" in text for text in findings(bare))
    assert not pictures_of(bare, "energy-")


@pytest.mark.parametrize("graph", [False, True], ids=["older", "new"])
def test_of_one_length_nobody_knows_whether_calls_wait_unless_the_gpu_alone_was_timed(tmp_path, graph):
    records = [on_gpu(variant, 1024, 0.1, graph=graph) for variant in ("full", "linformer")]
    (panel,) = analysed(tmp_path, records).panels
    note = length_table(panel, "time").note
    assert ("nobody knows whether short calls wait for the host" in note) is not graph
    assert ("waits for the host, not for the GPU" in note) is graph


def test_a_linear_curve_of_a_busy_gpu_is_not_said_to_wait(tmp_path):
    records = [on_gpu("linformer", n, 1e-2 * n) for n in LENGTHS]
    (panel,) = analysed(tmp_path, records).panels
    assert panel.series[0].waiting == frozenset()
    assert panel.time["linformer"].verdict == "linear"


def test_what_is_not_a_gpu_never_waits(tmp_path):
    records = [scaling("linformer", n, 1.0) for n in LENGTHS]
    (panel,) = analysed(tmp_path, records).panels
    assert panel.series[0].waiting == frozenset()
    assert panel.time["linformer"].verdict == "constant"


def test_two_lengths_make_no_exponent(tmp_path):
    records = [scaling(variant, n) for variant in ("full", "linformer") for n in (512, 4096)]
    analysis = analysed(tmp_path, records)
    growth = analysis.panels[0].time["full"]
    assert (growth.exponent, growth.why) == (None, "2 lengths in the top decade, 3 are needed")
    assert not any("N^" in text for text in [*findings(analysis), *panel_findings(analysis)])
    assert not any("exponent 1" in picture.alt or "exponent 2" in picture.alt for picture in pictures_of(analysis))


def test_level_curves_are_not_ranked(tmp_path):
    """197 us against 199, each known to 8 %: the first is not the fastest, and not always faster either."""
    records = [scaling("full", n, n * 199e-6, spread=0.08) for n in LENGTHS[:4]]
    records += [scaling("linformer", n, n * 197e-6, spread=0.08) for n in LENGTHS[:4]]
    analysis = analysed(tmp_path, records)
    assert "linformer or full (not settled) at 512 to 4k tokens" in headline(analysis)
    crossing = analysis.panels[0].crossing("linformer")
    assert crossing is not None
    assert not crossing.is_settled
    assert "from 512 or less" not in crossing_text(crossing)
    (time,) = pictures_of(analysis, "time-")
    assert f"cheaper: {crossing_text(crossing)}" in words(time.figure), "a figure says what the sentences say"


@pytest.mark.parametrize(
    ("exact", "text"),
    [
        ((10.0, 30.0, 90.0), "from 512 or less"),  # against 5, 10, 20
        ((5.5, 30.0, 90.0), "from 541 or less"),  # level at the shortest, for all that the intervals tell
        ((4.5, 30.0, 90.0), "from 595 or less"),  # dearer there by its median, but not for certain
        ((2.0, 30.0, 90.0), "from 702"),
        ((2.0, 8.0, 21.0), "not below 1,000, then not settled"),
        ((2.0, 5.0, 10.0), "none up to 2k"),
    ],
)
def test_figures_sentences_and_tables_say_alike_from_where_a_curve_is_cheaper(tmp_path, exact, text):
    lengths = (512, 1024, 2048)
    records = [scaling("full", n, ms, spread=0.5) for n, ms in zip(lengths, exact, strict=True)]
    records += [scaling("linformer", n, ms, spread=0.5) for n, ms in zip(lengths, (5.0, 10.0, 20.0), strict=True)]
    analysis = analysed(tmp_path, records)
    crossing = analysis.panels[0].crossing("linformer")
    assert crossing is not None
    assert crossing_text(crossing) == text
    assert f"Cheaper than full: linformer {text}." in findings(analysis)
    (time,) = pictures_of(analysis, "time-")
    assert f"cheaper: {text}" in words(time.figure)


def test_a_crossing_of_bytes_pretends_no_interval(tmp_path):
    """Bytes do not vary, so that resampling them says nothing of how well two lengths tell where they cross."""
    records = [scaling("full", n, quadratic_memory=True) for n in LENGTHS[:4]]
    records += [
        replace(one, memory=replace(one.memory, peak_bytes=12_000_000 + (one.memory.peak_bytes or 0)))
        for n in LENGTHS[:4]
        if (one := scaling("linformer", n)).memory is not None
    ]
    table = crossover_table(analysed(tmp_path, records))
    (row,) = [row for row in table.rows if row["quantity"] == "memory"]
    assert (row["outcome"], row["crossing_low"], row["crossing_high"]) == ("crosses", None, None)
    assert "interval" not in [column.heading for column in table.columns], "nor has the time one, which always wins"


def test_the_only_time_is_not_called_all_of_them(tmp_path):
    said = findings(analysed(tmp_path, [flagged(scaling("full", 512), "throttled")]))
    assert "The only time of a throttled GPU\u00a0†, of one process." in said


def test_doubtful_times_are_marked_where_they_stand(tmp_path):
    records = [scaling(variant, n) for variant in ("full", "linformer") for n in LENGTHS[:3]]
    records[0], records[1] = flagged(records[0], "throttled"), flagged(records[1], "other_gpu_process", "unstable")
    analysis = analysed(tmp_path, records)
    (panel,) = analysis.panels
    row = row_of(length_table(panel, "time"), "full")
    assert [cell.split()[-1] for cell in row[1:3]] == ["†", "‡"]
    assert "†" not in row[3]
    assert "the GPU was throttled" in length_table(panel, "time").note
    tables = {table.name: table for table in make_tables(analysis)}
    assert any("†" in text for text in row_of(tables["scaling"], "full"))
    assert any(
        text == "1 of 6 times of a throttled GPU\u00a0†, 1 of a busy machine\u00a0‡, all of one process."
        for text in findings(analysis)
    )
    front = front_table(analysis)
    assert front is not None
    assert any("†" in text for text in front.texts()[1])


@pytest.mark.parametrize("which", ["full", "linformer", ""])
def test_a_ratio_carries_the_marks_of_both_of_its_sides(tmp_path, which):
    records = [scaling(variant, n) for variant in ("full", "linformer") for n in LENGTHS[:5]]
    doubtful = [flagged(one, "throttled") if one.cell.variant == which else one for one in records]
    analysis = analysed(tmp_path, doubtful)
    front = front_table(analysis)
    assert front is not None
    rows = {row[0]: row[1:6] for row in front.texts()}
    has_mark = bool(which)
    assert [text.endswith(" †") for text in rows["linformer"][:-1]] == [has_mark] * len(rows["linformer"][:-1])
    why = "† of a throttled GPU, of one process" if has_mark else "of one process"
    assert headline(analysis).endswith(f"as fast as exact attention ({why}).")
    assert ("†" in headline(analysis)) is has_mark
    speed_ups = [row["speed_up_marks"] for row in measurement_table(analysis).rows if row["variant"] == "linformer"]
    assert speed_ups == ["†" if has_mark else ""] * 5
    grown = findings(analysis)[0]
    assert [f"{name} †" in grown for name in ("full", "linformer")] == [name == which for name in ("full", "linformer")]
    growths = {row["variant"]: row for row in exponent_table(analysis).rows if row["quantity"] == "time"}
    for name, row in growths.items():
        assert (row["exponent_marks"], row["last_slope_marks"]) == (("†", "†") if name == which else ("", ""))


def test_a_slope_has_the_marks_of_the_lengths_it_was_fitted_to(tmp_path):
    """The exponent is that of the top decade; what was throttled below does not matter, nor does it in the bytes."""
    records = [scaling("full", n) for n in LENGTHS]
    records[0] = flagged(records[0], "throttled")
    table = exponent_table(analysed(tmp_path / "short", records))
    assert not any("†" in text for row in table.texts() for text in row)
    assert "†" not in table.note
    records[-3] = flagged(records[-3], "throttled")
    table = exponent_table(analysed(tmp_path / "long", records))
    marks = {row["quantity"]: (row["exponent_marks"], row["last_slope_marks"]) for row in table.rows}
    assert marks == {"time": ("†", ""), "memory": ("", "")}
    assert "†: the GPU was throttled" in table.note


def test_a_crossing_has_the_marks_of_the_lengths_that_it_lies_between(tmp_path):
    """Exact attention gets dearer between 512 and 1k; what was throttled beyond does not move that."""
    records = [scaling("full", n) for n in LENGTHS[:5]] + [scaling("linformer", n, 6.0) for n in LENGTHS[:5]]
    unmarked = analysed(tmp_path / "well", records)
    (crossing,) = unmarked.panels[0].crossings
    assert crossing.result is not None
    assert crossing.result.low is not None
    assert 512 < crossing.result.low < 1024
    for index, mark in ((1, " †"), (4, "")):
        doubtful = [flagged(one, "throttled") if place == index else one for place, one in enumerate(records)]
        analysis = analysed(tmp_path / f"throttled{index}", doubtful)
        (crossing,) = analysis.panels[0].crossings
        text = crossing_text(crossing, {"throttled"})
        assert text == crossing_text(crossing) + mark
        assert f"Cheaper than full: linformer {text}." in findings(analysis)
        table = crossover_table(analysis)
        assert text in table.texts()[0]
        assert ("the GPU was throttled" in table.note) is bool(mark)
        assert (table.rows[0]["marks"], table.rows[1]["quantity"], table.rows[1]["marks"]) == (mark[1:], "memory", "")
        (time,) = pictures_of(analysis, "time-")
        assert f"cheaper: {text}" in words(time.figure)
        assert "1 of 10 times of a throttled GPU †, all of one process" in words(time.figure).replace("\u00a0", " ")
    cheap = [scaling("linformer", n, 0.01) for n in LENGTHS[:5]]
    always = [*records[:4], flagged(records[4], "throttled"), *cheap]
    (crossing,) = analysed(tmp_path / "always", always).panels[0].crossings
    assert crossing_text(crossing, {"throttled"}) == "from 512 or less †", "all lengths decide that"
    level = [scaling("full", n, ms, spread=0.5) for n, ms in zip(LENGTHS[:4], (5.5, 30.0, 90.0, 300.0), strict=True)]
    level += [scaling("linformer", n, 5.0 * 2**step, spread=0.5) for step, n in enumerate(LENGTHS[:4])]
    for index, mark in ((1, " †"), (3, "")):
        doubtful = [flagged(one, "throttled") if place == index else one for place, one in enumerate(level)]
        (crossing,) = analysed(tmp_path / f"level{index}", doubtful).panels[0].crossings
        assert crossing_text(crossing, {"throttled"}) == f"from 541 or less{mark}"


def test_what_ended_at_a_shorter_length_is_cheaper_up_to_there_and_may_have_needed_more(tmp_path):
    costs = {"full": 30.0, "early": 3.0, "whole": 2.0, "third": 2.0, "fourth": 2.0}
    records = [
        _of_memory(scaling(name, n, cost * (n / 512) ** 2), 70 if name == "early" else place + 1)
        for place, (name, cost) in enumerate(costs.items())
        for n in LENGTHS[: 3 if name == "early" else 5]
    ]
    analysis = analysed(tmp_path, records)
    crossing = analysis.panels[0].crossing("early")
    assert crossing is not None
    assert crossing_text(crossing) == "from 512 or less (up to 2k)"
    _, cheaper, memory, *_ = findings(analysis)
    assert "early from 512 or less (up to 2k)" in cheaper
    assert memory.endswith("; the most: fourth 5 MiB; early 70 MiB at 2k.")


@pytest.mark.parametrize(
    ("times", "text"),
    [
        (
            {"full": (1, 3, 9, 20), "linformer": (2, 2, 2, 2), "bigbird": (3, 3, 2, 3)},
            "full at 512 tokens, linformer from 1k (not settled against bigbird at 2k); ",
        ),
        (
            {"full": (1, 1, 9, 20), "linformer": (2, 1, 2, 2), "bigbird": (3, 3, 2, 2)},
            "full up to 1k tokens (not settled against linformer at 1k), bigbird or linformer (not settled) from 2k; ",
        ),
        (
            {"full": (2, 2, 9, 20), "linformer": (2, 2, 2, 2), "bigbird": (2, 3, 2, 3)},
            "linformer at 512 to 4k tokens (not settled against bigbird at 512 and 2k, against full at 512 and 1k); ",
        ),
        (
            {"full": (1, 9, 9, 9), "linformer": (3, 1, 3, 1), "bigbird": (3, 3, 1, 3)},
            "full at 512 tokens, linformer from 1k, bigbird from 2k, linformer from 4k; ",
        ),
    ],
)
def test_the_headline_says_a_name_once_for_each_stretch_of_lengths(tmp_path, times, text):
    records = [
        scaling(variant, n, float(ms), spread=0.0)
        for variant, own in times.items()
        for n, ms in zip(LENGTHS, own, strict=False)
    ]
    assert f"the fastest is {text}" in headline(analysed(tmp_path, records))


def test_many_changes_of_the_fastest_are_said_in_a_few_words(tmp_path):
    times = {"full": (1, 9, 9, 9, 9, 9), "linformer": (3, 1, 3, 1, 3, 1), "bigbird": (3, 3, 1, 3, 1, 3)}
    records = [
        scaling(variant, n, float(ms), spread=0.0)
        for variant, own in times.items()
        for n, ms in zip(LENGTHS, own, strict=False)
    ]
    said = headline(analysed(tmp_path, records))
    assert "full at 512 tokens, linformer and bigbird by turns up to 8k, linformer from 16k; " in said


def test_gaps_are_said_of_the_run_that_has_them(tmp_path):
    """Two runs without a plan, of one name: what one measured at more lengths is no gap of the other."""
    first = [scaling("full", n) for n in LENGTHS[:2]]
    second = [scaling("bigbird", n) for n in LENGTHS[:4]] + [scaling("linformer", 512)]
    folders = [write_run(tmp_path / place / "quick", own) for place, own in (("here", first), ("there", second))]
    analysis = analyse(folders)
    one, other = completeness(analysis).split("not known")[1:]
    assert one == ". there/quick: 5 cells; how many were planned is "
    assert other.startswith("; no record, where others of the panel have one: linformer forward at 1k")
    assert "full" not in completeness(analysis)
    assert analysis.title == "here/quick, there/quick"
    left = scaling("full", 1024).cell
    folders = [
        write_run(tmp_path / place / "quick", own, planned=pack_cells([*(one.cell for one in own), left]))
        for place, own in (("done", first), ("cut", [scaling("bigbird", 512)]))
    ]
    assert completeness(analyse(folders)) == "cut/quick: 1 of 2 cells; left."


def test_by_how_much_is_said_at_the_longest_length_that_exact_attention_has(tmp_path):
    records = [scaling("full", n) for n in LENGTHS[:4]]
    records += [scaling("linformer", n, 1e-3 * n) for n in LENGTHS[:5]]
    records += [scaling("bigbird", n, 2e-3 * n if n < LENGTHS[5] else 1e-3) for n in LENGTHS[:6]]
    text = headline(analysed(tmp_path, records))
    assert re.search(rf"; at 4k 5[\d.]+{TIMES} \[[\d., ]+\] as fast as exact attention \(of one process\)\.$", text)


def test_weights_that_grow_stand_beside_the_time(tmp_path):
    records = [replace(scaling("linformer", n), num_params=512 * n) for n in LENGTHS[:3]]
    records += [replace(scaling("full", n), num_params=0) for n in LENGTHS[:3]]
    analysis = analysed(tmp_path, records)
    (panel,) = analysis.panels
    for quantity in ("time", "memory"):
        table = length_table(panel, quantity)
        assert [row_of(table, name)[-1] for name in ("full", "linformer")] == [MISSING, "1.05 M parameters at 2k"]
    assert any("linformer 1.05 M parameters at 2k" in text for text in findings(analysis))


def test_linear_memory_of_exact_attention_is_explained_once(tmp_path):
    records = [scaling(variant, n, pass_=p) for variant in ("full", "bigbird") for n in LENGTHS for p in ("fwd", "bwd")]
    analysis = analysed(tmp_path, records)
    assert len(memory_findings(analysis)) == 1
    assert "fused kernels never store the scores" in memory_findings(analysis)[0]
    page = build_page(analysis, tables_by_question(analysis), [])
    assert page.count("fused kernels never store the scores") == 1
    quadratic = [scaling("full", n, quadratic_memory=True) for n in LENGTHS]
    assert memory_findings(analysed(tmp_path / "other", quadratic)) == []


def test_level_ones_timed_in_turns_are_not_ranked(tmp_path):
    records = [
        replace(scaling(variant, 512, ms, spread=0.08), isolation="interleaved", bundle="b")
        for variant, ms in (("full", 10.0), ("linformer", 10.01), ("bigbird", 20.0))
    ]
    assert records[1].timing is not None
    backwards = replace(records[1].timing, samples_ms=records[1].timing.samples_ms[::-1])  # rounds have no common mood
    records[1] = replace(records[1], timing=backwards)
    table = turns_table(analysed(tmp_path, records))
    assert table is not None
    said = {row[0]: row[3] for row in table.texts()}
    assert sorted(variant for variant, text in said.items() if text.endswith(", not settled")) == ["full", "linformer"]
    assert "fastest, not settled" in said.values()


def test_what_took_part_in_fewer_rounds_is_judged_by_those(tmp_path):
    """The slower one has spent its budget before the machine gets slow, so that its median is the lower one."""

    def taken(variant: str, base_ms: float, count: int) -> Record:
        samples = tuple(base_ms * (1.0 if place < 20 else 2.0) for place in range(count))
        record = replace(scaling(variant, 512), isolation="interleaved", bundle="b")
        assert record.timing is not None
        return replace(record, timing=replace(record.timing, samples_ms=samples, **time_summary(samples)))

    records = [taken("full", 1.0, 100), taken("linformer", 1.1, 20), taken("bigbird", 1.2, 18)]
    analysis = analysed(tmp_path, records)
    assert headline(analysis).endswith(": the fastest is full at 512 tokens.")
    table = turns_table(analysis)
    assert table is not None
    found = [(row[0], row[3].partition(" ")[0]) for row in table.texts()]
    assert found == [("full", "fastest"), ("linformer", f"1.1{TIMES}"), ("bigbird", f"1.2{TIMES}")]


def test_the_peak_of_float32_is_not_that_of_tf32(tmp_path):
    records = [costed(scaling("full", n, device="cuda", threads=None), 10**9, 10**6) for n in LENGTHS[:3]]
    fields = {"device": "cuda", "threads": None, "peak_flops_per_s": 5e14, "peak_bytes_per_s": 3e12}
    for is_tf32, mfu in ((None, False), (False, True), (True, True)):
        ceilings = [roof(**fields, is_tf32=is_tf32)]
        (panel,) = analysed(tmp_path / str(is_tf32), records, ceilings=ceilings).panels
        assert (panel.efficiency["full"][0].mfu is not None) is mfu, "an older record has TF32's figure for float32"


def test_the_front_of_a_report_is_one_sentence_one_figure_one_table_and_a_few_lines(tmp_path):
    records = [scaling(variant, n) for variant in ("full", "linformer", "bigbird") for n in LENGTHS]
    analysis = analysed(tmp_path, [*records, *trained()])
    front = front_table(analysis)
    assert front is not None
    headings = [column.heading for column in front.columns]
    assert headings[1:4] == ["1k", "4k", "32k"]
    assert headings[-1] == "listops (short)"
    rows = {row[0]: row for row in front.texts()}
    assert rows["best"][1:4] == ["linformer", "linformer", "linformer"]
    assert TIMES in rows["linformer"][3]
    assert rows["full"][-1] == "37.8 %"
    assert len(findings(analysis)) <= 7
    assert headline(analysis).count(". ") == 0
    Run([tmp_path / "run"]).report(has_readme=True)
    readme = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 40
    assert readme.count("![") == 1


def test_a_label_is_said_to_be_what_it_is(tmp_path):
    records = [scaling("full", 512), scaling("full", 512, label="only math", options={"backend": "math"})]
    records += [scaling("plain_sdpa", 512, label="torch SDPA")]
    front = front_table(analysed(tmp_path, records))
    assert front is not None
    assert front.note.endswith("Labels: only math is full with backend=math; torch SDPA is plain_sdpa.")
    assert "where none was measured" not in front.note
    other = [scaling("full", 1024, label="only flex", options={"backend": "flex"}, pass_="fwd_bwd")]
    front = front_table(analysed(tmp_path / "other", records + other))
    assert front is not None
    assert ("only flex" in front.note) == any(row["variant"] == "only flex" for row in front.rows)
    front = front_table(analysed(tmp_path / "plain", records[:1]))
    assert front is not None
    assert "Labels" not in front.note


def test_a_part_of_a_matrix_is_said_to_be_one(tmp_path):
    """The matrix lists two tasks of three variants, as the run resolved it; trainings of one task were planned."""
    group = {"variants": [{"name": name} for name in ("full", "linformer", "bigbird")], "level": ["short"]}
    group |= {"dtypes": ["float32"], "seeds": [0, 1, 2], "grid": {}}
    matrix = {"name": "m", "accuracy": [group | {"task": ["listops"]}, group | {"task": ["text"]}]}
    planned = pack_cells(record.cell for record in trained())
    part = analysed(tmp_path / "part", trained(), planned=planned, matrices=[matrix])
    assert completeness(part) == "Planned were 9 of the 18 trainings of its matrix, none of text."
    whole = matrix | {"accuracy": matrix["accuracy"][:1]}
    assert completeness(analysed(tmp_path / "whole", trained(), planned=planned, matrices=[whole])) == ""
    causal = matrix | {"accuracy": [group | {"task": ["listops"], "is_causal": [False, True]}]}
    both = analysed(tmp_path / "causal", trained(), planned=planned, matrices=[causal])
    assert completeness(both) == "Planned were 9 of the 18 trainings of its matrix."
    for number, damaged in enumerate(({"accuracy": None}, {"accuracy": [{}]}, {"accuracy": [{"task": ["a"]}]})):
        run = write_run(tmp_path / str(number), trained(), planned=planned, matrices=[damaged])
        assert completeness(analyse([run])) == ""


def test_a_run_that_has_only_a_plan_gives_a_page(tmp_path):
    cells = [scaling("full", n).cell for n in LENGTHS[:2]] + [record.cell for record in trained(seeds=(0,))]
    run = write_run(tmp_path / "run", [], planned=pack_cells(cells))
    Run([run]).report(has_readme=True)
    text = (run / "README.md").read_text(encoding="utf-8")
    assert "No cell has been run yet." in text
    assert "0 of 5 cells" in text
    assert not list((run / "figures").glob("*")) if (run / "figures").exists() else True


def test_a_floor_is_beaten_or_not_or_not_for_certain(tmp_path):
    """One seed of three that learned the task beats the floor by its mean, which is no reason to say it does not."""
    values = {"full": (0.9, 0.91, 0.92), "linformer": (0.9, 0.3, 0.3), "bigbird": (0.1, 0.1, 0.1)}
    floors = {"floors": {"pairs": 0.25, "counts": 0.25}, "references": {"bag_of_words": 0.7}}
    records = [accuracy(name, n, value, score=floors) for name, own in values.items() for n, value in enumerate(own)]
    analysis = analysed(tmp_path, records)
    (group,) = analysis.accuracy
    assert [score.standing and score.standing.verdict for score in group.ranked] == [
        *("beaten", "not settled", "not beaten")
    ]
    first, floor, *_ = accuracy_findings(group)
    assert first.endswith("; to beat: the counts floor with 25.0 %."), "a reference scores more and has no attention"
    assert floor == (
        "On listops (short), bigbird does not beat the counts floor; linformer does not clearly beat the counts floor."
    ), "both name one floor"
    assert any(
        text.endswith("; best floor not beaten: bigbird; best floor not clearly beaten: linformer.")
        for text in findings(analysis)
    )


def test_of_bits_per_byte_less_is_better_in_every_sentence(tmp_path):
    bits = {"metric": "bits_per_byte", "floors": {"5-gram": 2.5}, "chance": 8.0, "correct": ""}
    records = [
        accuracy(name, seed, bpb + seed / 100, score=bits)
        for name, bpb in (("full", 2.6), ("linformer", 2.2))
        for seed in (0, 1, 2)
    ]
    analysis = analysed(tmp_path, records)
    every = " ".join([said(analysis), *(text for each in analysis.accuracy for text in accuracy_findings(each))])
    assert "above" not in every.replace("not above it", "")
    assert "full does not beat the 5-gram floor" in every
    assert "best floor not beaten: full." in every


def test_a_control_is_never_the_one_to_choose(tmp_path):
    claims = CLAIMS | {"pooling": {"time_exponent": 1, "memory_exponent": 1, "is_exact": False, "is_control": True}}
    costs = {"full": 1.0, "linformer": 0.5, "pooling": 0.001}
    records = [scaling(name, n, cost * n) for name, cost in costs.items() for n in LENGTHS[:4]]
    analysis = analysed(tmp_path, records, claims=claims)
    assert f"the fastest is linformer at 512 to 4k tokens; at 4k 2{TIMES} " in headline(analysis)
    assert headline(analysis).endswith(" as fast as exact attention (of one process); not judged: pooling (a control).")
    front = front_table(analysis)
    assert front is not None
    assert front.texts()[0][1:5] == ["linformer"] * 4
    assert "Not judged (a control, which does without attention): pooling." in front.note
    grown, cheaper, *_ = findings(analysis)
    assert grown == "Growth of time: linear: linformer, full."
    assert cheaper == "Cheaper than full: linformer from 512 or less."
    assert any(text.startswith("Peak memory at 4k: full, linformer 56 MiB each;") for text in findings(analysis))
    assert [row["variant"] for row in crossover_table(analysis).rows] == ["linformer", "pooling"] * 2
    assert {one.labels for one in analysis.panels[0].winners} == {("linformer",)}


def test_a_control_that_scores_most_is_not_called_the_best(tmp_path):
    claims = CLAIMS | {"pooling": {"is_exact": False, "is_control": True}}
    means = {"full": 0.5, "linformer": 0.4, "pooling": 0.6}
    records = [
        accuracy(name, seed, mean + seed / 100, task=task)
        for name, mean in means.items()
        for task in ("listops", "text", "image", "needle", "mqar")
        for seed in range(3)
    ]
    run = write_run(tmp_path / "runs" / "one", records, claims=claims)
    front = front_table(analyse([run]))
    assert front is not None
    assert front.texts()[0][1:] == ["full", *["full (by mean)"] * 4], "the mean over tasks, and each of four tasks"
    assert front.note.count("Not judged (a control, which does without attention): pooling.") == 1
    ((page,),) = (machine.runs for machine in read_machines(tmp_path / "runs"))
    bold = {row[0].text: {entry.is_best for entry in row[1:]} for row in page.boards[0].rows}
    assert bold == {"full": {True}, "linformer": {False}, "pooling": {False}}
    assert "Not judged (a control, which does without attention): pooling." in page.boards[0].note


def test_a_board_of_many_lengths_shows_some_over_all_of_the_range(tmp_path):
    records = [scaling(name, n) for name in ("full", "linformer") for n in range(100, 900, 100)]
    write_run(tmp_path / "one", records)
    ((page,),) = (machine.runs for machine in read_machines(tmp_path))
    assert page.boards[0].headings[1:7] == ("100", "200", "300", "400", "600", "800")


def test_the_time_of_a_training_step_is_that_of_the_variant_that_is_named(tmp_path):
    """That of a control, or of what failed at the longest length, is not the fastest one's."""
    claims = CLAIMS | {"pooling": {"is_exact": False, "is_control": True}}
    costs = {"full": 10.0, "linformer": 8.0, "pooling": 1.0}
    records = [scaling(name, 512, ms, pass_="step", scope="model", protocol="p") for name, ms in costs.items()]
    (text,) = panel_findings(analysed(tmp_path, records, claims=claims))
    assert re.search(r"; linformer at 512 takes (7\.9|8\.)\d* ms a step, 6\d,\d00 tokens/s\.$", text), text


def test_of_many_that_are_level_the_front_says_how_many_more(tmp_path):
    records = [scaling(f"v{number}", 512, 1.0, spread=0.1) for number in range(10)]
    front = front_table(analysed(tmp_path, records))
    assert front is not None
    assert front.texts()[0][1:] == ["v0 or v1 or v2 and 7 more"] * 2


def test_two_lengths_are_said_to_be_why_no_exponent_is_settled(tmp_path):
    records = [scaling(name, n, cost * n) for name, cost in (("full", 1.0), ("linformer", 0.5)) for n in LENGTHS[:2]]
    grown, *_ = findings(analysed(tmp_path, records))
    assert grown == "How time grows is not settled (2 lengths in the top decade, 3 are needed)."


def test_a_slope_that_is_no_whole_power_is_told_by_its_side_of_linear(tmp_path):
    powers = {"full": 1.6, "linformer": 1.0, "window": 0.3}
    records = [scaling(name, n, n**power, spread=0.01) for name, power in powers.items() for n in LENGTHS[:5]]
    records += [scaling("wide", n, n, spread=0.6) for n in LENGTHS[:5]]
    grown, *_ = findings(analysed(tmp_path, records))
    known = "Growth of time: less than linear: window; linear: linformer; more than linear: full"
    assert re.fullmatch(re.escape(known) + r"; not settled: wide \(slope 0\.\d\d \[.*\]: too wide to tell\)\.", grown)


def test_the_front_table_ranks_by_the_longest_length_and_what_is_not_judged_is_last(tmp_path):
    claims = CLAIMS | {"pooling": {"time_exponent": 1, "memory_exponent": 1, "is_exact": False, "is_control": True}}
    costs = {"bigbird": 2.0, "full": 4.0, "linformer": 1.0, "pooling": 0.1}
    records = [scaling(name, n, cost * n) for name, cost in costs.items() for n in LENGTHS[:3]]
    records += [scaling("stops", n, 0.5 * n) for n in LENGTHS[:2]]
    front = front_table(analysed(tmp_path, records, claims=claims))
    assert front is not None
    assert [row[0] for row in front.texts()] == ["best", "linformer", "bigbird", "full", "stops", "pooling"]
    trained = [accuracy(name, seed, mean) for name, mean in (("full", 0.5), ("linformer", 0.7)) for seed in range(3)]
    front = front_table(analysed(tmp_path / "trained", trained))
    assert front is not None
    assert [row[0] for row in front.texts()] == ["best", "linformer", "full"]


def test_the_front_table_has_the_longest_length(tmp_path):
    lengths = (1024, 2048, 4096, 32768, 65536)
    front = front_table(analysed(tmp_path, [scaling("full", n, n) for n in lengths]))
    assert front is not None
    assert [column.heading for column in front.columns][1:5] == ["1k", "4k", "32k", "64k"]


def test_what_is_cheaper_at_short_lengths_only_is_not_called_cheaper_nowhere(tmp_path):
    records = [scaling("full", n, 1 + 1e-6 * n**2) for n in LENGTHS[:5]]
    records += [scaling("linformer", n, 0.3 + 1e-9 * n**3) for n in LENGTHS[:5]]
    analysis = analysed(tmp_path, records)
    assert "the fastest is linformer up to 1k tokens, full from 2k" in headline(analysis)
    assert "Cheaper than full: linformer at 512, 1k only." in findings(analysis)


def test_level_with_exact_attention_is_not_so_many_times_as_fast(tmp_path):
    records = [scaling(name, n, n * 1e-3, spread=0) for name in ("full", "linformer") for n in LENGTHS[:3]]
    text = headline(analysed(tmp_path, records))
    assert text.endswith("the fastest is full or linformer (not settled) at 512 to 2k tokens.")


def test_whoever_is_not_judged_was_measured_all_the_same(tmp_path):
    records = [scaling("full", n) for n in LENGTHS[:3]]
    records += [replace(scaling("linformer", n, 1e-3), is_simulated=True) for n in LENGTHS[:3]]
    text = headline(analysed(tmp_path, records))
    assert text.endswith("full has no rival, at 512 to 2k tokens; not judged: linformer (dense scores underneath).")
    apart = [scaling("full", 512), scaling("linformer", 1024)]
    text = headline(analysed(tmp_path / "apart", apart))
    assert text.endswith("no two were measured at one length.")


def test_scores_of_one_task_in_several_settings_are_told_apart_wherever_they_stand(tmp_path):
    settings: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"overrides": {"num_layers": 4}}, {"protocol": "lra"}]
    records = [
        accuracy("full", seed, 0.4 + place / 10 + seed / 100, task=task, **setting)
        for place, setting in enumerate(settings)
        for task in ("listops", "text")
        for seed in range(3)
    ]
    analysis = analysed(tmp_path / "all", records)
    first, *_ = findings(analysis)
    assert first == "Accuracy on listops (short, protocol cpu-small, bfloat16): full 51.0 %.", "not in the table"
    front = front_table(analysis)
    assert front is not None
    headings = [column.heading for column in front.columns]
    assert len(set(headings)) == len(headings) == 9
    assert "mean, protocol lra, float32" in headings
    assert headline(analysis).startswith(
        "Accuracy, mean over listops (short) and text (short) (protocol cpu-small, float32, num_layers=4): full 61.0 %"
    )
    titles = [table.title for table in make_tables(analysis) if table.name.startswith(("accuracy", "cost"))]
    assert len(set(titles)) == len(titles) == 16
    group, _ = analysed(tmp_path / "one", records[:6]).accuracy
    assert (group.title, group.heading) == ("listops (short)", "listops (short), cpu-small")


def test_the_score_of_one_seed_is_said_to_be_one(tmp_path):
    records = [accuracy("full", seed, 0.4) for seed in range(3)] + [accuracy("linformer", 1, 0.7)]
    text = headline(analysed(tmp_path, records))
    assert text == "Accuracy on listops (short): linformer 70.0 % (one seed), full 40.0 %."
    old = f"(one seed); floors of training version {TRAINING_VERSION - 1}; those of {TRAINING_VERSION} may be stronger."
    records = [accuracy("full", 0, 0.4, protocol_version=TRAINING_VERSION - 1)]
    assert headline(analysed(tmp_path / "old", records)).endswith(old)
    records = [accuracy("full", 0, 0.4, kind="replacement", replaces="full", protocol_version=REPLACEMENT_VERSION - 1)]
    assert headline(analysed(tmp_path / "replaced", records)).endswith(old)


def test_a_description_says_which_of_its_times_are_the_gpu_s(tmp_path):
    """At the shortest length the time of the device is known, at the longest that of a call that waits for nothing."""
    records = [on_gpu("full", n, 1.2e-8 * n**2, graph=n == LENGTHS[0], host_ms=0.3) for n in LENGTHS]
    records += [on_gpu("linformer", n, 1e-6 * n) for n in LENGTHS]
    time = pictures_of(analysed(tmp_path, records), "time")[0]
    assert re.search(r"full: 3\.15 µs at 512 \(the GPU alone\), 5[\d.]+ ms at 64k, exponent", time.alt)
    assert re.search(r"linformer: [67]\d\d µs at 512 \(waits for the host\), ", time.alt)


def test_an_interval_of_two_samples_is_marked(tmp_path):
    """It covers the median in one case of two; of several processes that take two each, in the promised ones."""
    short, long = (
        flagged(scaling("full", n, spread=0.1), *flags) for n, flags in ((512, ()), (1024, ("few_samples",)))
    )
    assert long.timing is not None
    two = replace(long.timing, samples_ms=long.timing.samples_ms[:2])
    (panel,) = analysed(tmp_path / "one", [short, replace(long, timing=two)]).panels
    assert [text.endswith(" §") for text in length_table(panel, "time").texts()[0][1:]] == [False, True]
    assert (
        "§: fewer than five samples, and the interval is no more than their range" in length_table(panel, "time").note
    )
    three = replace(two, samples_ms=long.timing.samples_ms[:6], process_sizes=(2, 2, 2))
    (panel,) = analysed(tmp_path / "three", [short, replace(long, timing=three)]).panels
    assert "§" not in length_table(panel, "time").texts()[0][2]


def test_lines_of_the_front_are_in_the_order_of_what_they_say(tmp_path):
    """By names, the last would be first: what is cheaper from the shortest length on, and what takes least memory."""
    costs = {"full": (0.1, 2), "always_b": (1.0, 1), "a_late": (300.0, 1), "always_a": (2.0, 1), "b_soon": (60.0, 1)}
    costs |= {"z_middle": (120.0, 1), "dear": (5000.0, 1)}
    records = [
        scaling(name, n, cost * n**power, spread=0.001) for name, (cost, power) in costs.items() for n in LENGTHS[:5]
    ]
    records = [_of_memory(record, list(reversed(costs)).index(record.cell.variant) + 1) for record in records]
    analysis = analysed(tmp_path, records)
    _, cheaper, memory, *_ = findings(analysis)
    assert cheaper == (
        "Cheaper than full: always_b, always_a from 512 or less; b_soon from 600; z_middle from 1,200; "
        "2 more, the last dear none up to 8k."
    )
    assert memory == ("Peak memory at 8k: dear 1 MiB, z_middle 2 MiB, b_soon 3 MiB; the most: full 7 MiB.")
    times = [row["variant"] for row in crossover_table(analysis).rows if row["quantity"] == "time"]
    assert times == ["always_a", "always_b", "b_soon", "z_middle", "a_late", "dear"]


def _of_memory(record: Record, mib: int) -> Record:
    return replace(record, memory=Memory(peak_bytes=mib * 2**20))


def test_samples_too_short_for_the_clock_have_a_mark_as_other_doubts_have(tmp_path):
    records = [scaling(name, n) for name in ("full", "linformer") for n in LENGTHS[:3]]
    records[3] = flagged(records[3], "too_short")
    analysis = analysed(tmp_path, records)
    table = length_table(analysis.panels[0], "time")
    assert [text.endswith(" ¶") for text in row_of(table, "linformer")[1:]] == [True, False, False]
    assert "¶: the clock is a part of samples this short." in table.note
    assert any("1 of 6 times too short for the clock\u00a0¶" in text for text in findings(analysis))


def test_tokens_of_which_some_are_dearer_have_a_mark(tmp_path):
    """The median of a mechanism that now and then does the work of many tokens is not what a token costs."""

    def decoded(variant: str, *processes: list[float]) -> Record:
        record = scaling(variant, 1024, kind="decode", pass_="decode", is_causal=True)
        samples, sizes = tuple(itertools.chain(*processes)), tuple(map(len, processes))
        return replace(record, timing=replace(timing(1.0), samples_ms=samples, process_sizes=sizes))

    even, dear = [1.0] * 9 + [1.2], [1.0] * 9 + [9.0]
    records = [decoded("full", even, even), decoded("lstm", even, dear), decoded("sinkhorn", dear, dear)]
    table = length_table(analysed(tmp_path, records).panels[0], "time")
    assert {row[0]: row[1].endswith(" ‖") for row in table.texts()} == {"full": False, "lstm": False, "sinkhorn": True}
    assert "‖: some tokens take longer" in table.note
    whole = [replace(scaling("full", 1024), timing=records[2].timing)]
    assert "‖" not in length_table(analysed(tmp_path / "whole", whole).panels[0], "time").note


def test_what_all_of_a_report_shares_has_no_column(tmp_path):
    """The pass where there is one panel, and what no row knows; the files keep both."""
    analysis = analysed(tmp_path / "one", zoo(lengths=LENGTHS[:4]))
    for table in (measurement_table(analysis), exponent_table(analysis), crossover_table(analysis)):
        headings = [column.heading for column in table.columns]
        assert not {"pass", "state", "energy"} & set(headings), headings
    assert {"pass", "state_bytes"} <= set(measurement_table(analysis).fields)
    two = [*zoo(lengths=LENGTHS[:4]), *(scaling("full", n, pass_="bwd") for n in LENGTHS[:4])]
    both = analysed(tmp_path / "two", two)
    assert "pass" in [column.heading for column in measurement_table(both).columns]


def test_times_of_one_table_have_one_unit_where_they_can(tmp_path):
    records = [scaling("full", n, ms) for n, ms in ((512, 0.2), (1024, 50.0))]
    records += [scaling("linformer", n, 0.15) for n in (512, 1024)]
    table = length_table(analysed(tmp_path / "near", records).panels[0], "time")
    assert {text.split()[1] for row in table.texts() for text in row[1:]} == {"ms"}
    records[1] = scaling("full", 1024, 50_000.0)
    table = length_table(analysed(tmp_path / "far", records).panels[0], "time")
    assert [text.split()[1] for text in row_of(table, "linformer")[1:]] == ["µs", "µs"]


def test_tasks_that_the_front_table_leaves_out_have_the_first_lines(tmp_path):
    tasks = ("byte_lm", "listops", "needle", "text", "mqar", "image")
    records = [accuracy("full", seed, 0.5 + seed / 100, task=task) for task in tasks for seed in range(3)]
    analysis = analysed(tmp_path, records)
    front = front_table(analysis)
    assert front is not None
    shown = [column.heading for column in front.columns]
    left = [f"{task} (short)" for task in sorted(tasks) if f"{task} (short)" not in shown]
    assert left
    said = [text.partition(" on ")[2].partition(":")[0] for text in findings(analysis)]
    assert said[: len(left)] == left
    assert len(said) == 5


def test_a_narrow_terminal_keeps_the_longest_length_and_cuts_no_number(tmp_path):
    powers = {"full": 1.6, "a_mechanism_of_a_long_name": 1.25, "another_one_of_such_a_name": 0.3}
    records = [scaling(name, n, n**power, spread=0.2) for name, power in powers.items() for n in LENGTHS]
    analysis = analysed(tmp_path, records)
    front = front_table(analysis)
    assert front is not None
    for width in (60, 80, 100):
        for table in (front, exponent_table(analysis), measurement_table(analysis)):
            out = io.StringIO()
            to_terminal(table, Console(file=out, width=width, color_system=None))
            shown = out.getvalue()
            assert re.search(r"\d…|…\d|\[[^\]\n]*…", shown) is None, shown
            assert max(map(len, shown.splitlines())) <= width
    out = io.StringIO()
    to_terminal(front, Console(file=out, width=60, color_system=None))
    assert "64k" in out.getvalue().splitlines()[1]


def test_what_takes_as_much_memory_is_not_the_most(tmp_path):
    claims = dict.fromkeys(("a", "b", "c", "d", "e"), CLAIMS["full"])
    records = [_of_memory(scaling(name, n), 100) for name in claims for n in LENGTHS[:2]]
    said = findings(analysed(tmp_path, records, claims=claims))
    (memory,) = [text for text in said if text.startswith("Peak memory")]
    assert memory.startswith("Peak memory at 1k: a, b, c and 2 more 100 MiB each")


def test_memory_is_that_of_the_longest_length_where_any_is_known(tmp_path):
    records = [_of_memory(scaling(name, 512), 2 + len(name)) for name in ("full", "linformer")]
    records += [scaling(name, 1024, status="oom_host") for name in ("full", "linformer")]
    analysis = analysed(tmp_path, records)
    assert any(text.startswith("Peak memory at 512: full 6 MiB, linformer 11 MiB") for text in findings(analysis))
    front = front_table(analysis)
    assert front is not None
    assert "memory at 512" in [column.heading for column in front.columns]


def test_who_leads_where_a_rival_was_not_measured_is_said(tmp_path):
    records = [scaling(name, n, cost * n) for name, cost in (("full", 1.0), ("linformer", 0.5)) for n in LENGTHS[:4]]
    records = [one for one in records if (one.cell.variant, one.cell.seq_len) != ("linformer", 1024)]
    records += [scaling("bigbird", n, 0.8 * n) for n in LENGTHS[:4]]
    assert "; no time of linformer at 1k" in headline(analysed(tmp_path, records))


def test_reasons_that_are_not_named_are_counted_in_cells(tmp_path):
    failures: dict[Status, int] = {"oom_host": 1, "timeout": 2, "gate_failed": 3, "crashed": 4, "error": 5}
    records = [scaling("full", 2**n, status=status) for status, number in failures.items() for n in range(number)]
    records = [replace(one, cell=replace(one.cell, seed=place)) for place, one in enumerate(records)]
    said = findings(analysed(tmp_path, records))
    assert said == [
        "15 of 15 cells gave no measurement: 5 error, 4 crashed, 3 failed the correctness gate, 3 for other reasons."
    ]


def test_a_seed_that_was_not_run_has_not_failed(tmp_path):
    kept, unrun = accuracy("full", 0, 0.6), accuracy("full", 1, None, status="cancelled")
    analysis = analysed(tmp_path, [kept, unrun, accuracy("full", 2, None, status="diverged")])
    (picture,) = pictures_of(analysis, "accuracy")
    assert "60.0 % (n=1, 1 failed, 1 not run)" in picture.alt
