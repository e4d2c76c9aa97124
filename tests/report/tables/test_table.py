"""One table in every dress; nothing in a name may break out of it."""

import io
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from attn_zoo.records import Memory
from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.tables.all_tables import make_tables
from attn_zoo.report.tables.front_table import front_table
from attn_zoo.report.tables.growth_tables import exponent_table
from attn_zoo.report.tables.table import (
    BRACKETS,
    MARK_REMARKS,
    Column,
    Remark,
    Table,
    guarded,
    number_column,
    text_column,
    time_column,
    to_csv,
    to_latex,
    to_markdown,
    to_terminal,
)
from attn_zoo.units import human_bytes
from tests.report.synthetic import CLAIMS, DOUBLINGS, analysed, costed, roof, scaling, trained, zoo

NASTY = [
    "=HYPERLINK(1)",
    "<script>alert(1)</script>",
    "a|b",
    "\x1b[31mred",
    "[bold]x[/bold]",
    "x" * 200,
    "注意 🚀",
    "$x$",
]


@pytest.fixture(scope="module")
def nasty_tables(tmp_path_factory):
    lengths = [512 * 2**power for power in range(12)]
    records = [scaling(name, n) for name in [*NASTY, "full"] for n in lengths]
    records += [scaling("y", n, status="oom_host", reason="needed\nmore than\tthere is") for n in lengths]
    return make_tables(analysed(tmp_path_factory.mktemp("nasty"), [*records, *trained(NASTY)]))


def printed(table, width):
    out = io.StringIO()
    to_terminal(table, Console(file=out, width=width, force_terminal=False, color_system=None))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_row_wraps(nasty_tables, width):
    for table in nasty_tables:
        text = printed(table, width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert "\x1b" not in text
        body = text.split(table.note[:10] if table.note else "Columns left out here")[0]
        assert len(body.splitlines()) == 3 + len(table.rows)


def test_a_reason_stands_whole_where_the_terminal_is_wide_enough():
    reason = "backend 'flash' cannot serve this call: it takes no mask, and causal calls with L != S need one"
    columns = (text_column("variant", priority=0), text_column("reason", priority=2))
    table = Table(name="t", title="T", notes=(), columns=columns, rows=({"variant": "full", "reason": reason},))
    assert reason in printed(table, 120)
    assert "\u2026" not in printed(table, 120)
    assert [len(line) <= 80 for line in printed(table, 80).splitlines()] == [True] * 4
    assert "\u2026" in printed(table, 80)


def test_the_longest_and_the_shortest_length_are_the_last_to_go(nasty_tables):
    table = next(table for table in nasty_tables if table.name.startswith("time-"))
    heading = printed(table, 60).splitlines()[1].split()
    assert heading[1] == "512"
    assert heading[-1] == "1M"
    assert len(heading) < 13


def test_interval_is_shown_where_there_is_room(analysis):
    table = next(table for table in make_tables(analysis) if table.name.startswith("time-"))
    assert " ms [" in printed(table, 200)
    assert " ms [" not in printed(table, 60)


def test_markdown_cells_cannot_break_out(nasty_tables):
    for table in nasty_tables:
        lines = [line for line in to_markdown(table).splitlines() if line.startswith("|")]
        counts = {line.replace("\\|", "").count("|") for line in lines}
        assert counts in (set(), {len(table.columns) + 1})
        assert "<script" not in to_markdown(table)


def test_latex_escapes_every_special_character(nasty_tables):
    text = "".join(to_latex(table) for table in nasty_tables)
    assert r"\$x\$" in text
    assert r"$x$" not in text.replace(r"\$x\$", "")


def test_latex_takes_no_name_for_an_argument():
    rows = tuple({"variant": name} for name in ("[2mm]", "*", "full"))
    table = Table(name="t", title="T", notes=(), columns=(text_column("variant"),), rows=rows)
    assert to_latex(table).splitlines()[7:10] == [r"{}[2mm] \\", r"{}* \\", r"full \\"]


def test_csv_holds_raw_numbers_and_guards_text(nasty_tables):
    table = next(table for table in nasty_tables if table.name == "scaling")
    frame = pd.read_csv(io.StringIO(to_csv(table)))
    assert len(frame) == len(table.rows)
    assert "'=HYPERLINK(1)" in set(frame["variant"])
    row = frame[(frame["variant"] == "full") & (frame["seq_len"] == 512)].iloc[0]
    assert row["median_ms"] == next(
        row["median_ms"] for row in table.rows if row["variant"] == "full" and row["seq_len"] == 512
    )


def test_an_empty_table_still_has_a_header(tmp_path):
    for table in make_tables(analysed(tmp_path, [])):
        assert to_csv(table).strip()
        assert not [line for line in to_markdown(table).splitlines() if line.startswith("|")]


@given(st.text(max_size=20))
def test_guarded_text_never_starts_a_formula(text):
    harmless = guarded(text)
    assert harmless.lstrip()[:1] not in {"=", "+", "-", "@"}
    assert harmless[:1] not in {"\t", "\r"}
    assert harmless.endswith(text)
    assert guarded(-1.5) == -1.5


def test_status_table_groups_lengths_and_says_why(tmp_path):
    records = zoo(lengths=[512, 1024, 2048])
    records += [scaling("v", n, status="unsupported", reason="no causal form") for n in (512, 1024, 2048, 4096)]
    table = next(table for table in make_tables(analysed(tmp_path, records)) if table.name == "status")
    found = {row["variant"]: (row["status"], row["lengths"], row["reason"]) for row in table.rows}
    assert found["v"] == ("unsupported", "512 to 4k (4)", "no causal form")
    assert found["full"][0] == "oom_host"


def test_reasons_that_name_the_length_are_in_its_order(tmp_path):
    records = [scaling("v", n, status="gate_failed", reason=f"wrong at L={n}") for n in (1024, 128, 64)]
    table = next(table for table in make_tables(analysed(tmp_path, records)) if table.name == "status")
    assert [row["lengths"] for row in table.rows] == ["64", "128", "1k"]


NOTES = (
    "Median time.",
    BRACKETS,
    Remark("In parentheses: the GPU alone.", sign="("),
    *MARK_REMARKS,
    Remark("Saved: kept for backward, by default.", heading="saved"),
    "",
    "Of a machine.",
)


def timed(**changes):
    row = {"variant": "full", "median_ms": 5.0, "low_ms": 4.0, "high_ms": 6.0, "saved": 7.0} | changes
    columns = (
        text_column("variant", "variant", 0),
        time_column("time", priority=0),
        number_column("saved", "saved", str),
    )
    return Table(name="t", title="T", notes=NOTES, columns=columns, rows=(row,))


def test_the_note_says_what_is_shown_and_nothing_else():
    table = timed(marks="†")
    wide, narrow = (" ".join(printed(table, width).split()) for width in (120, 18))
    throttled = "†: the GPU was throttled or changed its clock."
    assert (
        table.note
        == f"Median time. In brackets: 95 % interval. {throttled} Saved: kept for backward, by default. Of a machine."
    )
    assert table.note in wide
    assert "[4, 6] †" in wide
    assert f"Median time. {throttled} Of a machine. Columns left out here, in the files: saved." in narrow
    assert "[" not in narrow
    assert "†" not in timed().note
    assert table.note in to_markdown(table).replace("\\", "")


def test_signs_in_the_names_of_rows_are_not_explained():
    assert timed(variant="full (math) [x] °").note == timed().note


def test_a_remark_on_a_sign_that_was_cut_goes_with_it():
    columns = (
        text_column("variant", priority=0),
        Column(heading="time", show=lambda row: row["time"], brief=lambda text: text.partition(" (")[0], priority=0),
    )
    table = Table(name="t", title="T", notes=NOTES, columns=columns, rows=({"variant": "a", "time": "5 ms (4 ms)"},))
    assert "In parentheses" in printed(table, 40)
    assert "In parentheses" not in printed(table, 14)


def test_the_note_of_a_cut_table_is_about_the_rows_that_are_left():
    table = timed(marks="†")
    whole = replace(table, rows=({**table.rows[0], "marks": ""}, *table.rows))
    assert "†" in whole.note
    assert whole.cut(1).note.startswith("The first 1 of 2 rows; tables/t.csv has all. Median time. In brackets")
    assert "†" not in whole.cut(1).note


def test_columns_of_panels_are_told_apart_where_they_are_cut(tmp_path):
    records = [
        scaling("full", n, pass_="fwd_bwd", dtype=dtype, head_dim=size)
        for n in (512, 1024, 2048)
        for dtype in ("float32", "bfloat16")
        for size in (64, 128)
    ]
    tables = {table.name: table for table in make_tables(analysed(tmp_path, records))}
    for name in ("exponents", "scaling"):
        text = printed(tables[name], 60)
        rows = [line.split() for line in text.splitlines()[3:] if line.startswith("full")]
        kinds = {"time", "memory"} if name == "exponents" else set()
        passes = {next(word for word in row[1:] if word not in kinds) for row in rows}
        assert len(passes) == 4, text


def test_a_name_is_cut_no_shorter_than_the_columns_that_are_left_ask():
    columns = [text_column("pass", priority=0), text_column("kernel", priority=2), text_column("reading", priority=1)]
    row = {"pass": "fwd_bwd-bidirectional", "kernel": "x" * 18, "reading": "not settled"}
    table = Table(name="t", title="T", notes=(), columns=tuple(columns), rows=(row,))
    assert printed(table, 34).splitlines()[3].split("  ") == ["fwd_bwd-bidirectional", "not settled"]
    assert "…" in printed(table, 33)


def test_the_best_come_first_and_who_is_not_judged_last(tmp_path):
    costs = {"pooling": 0.01, "bigbird": 2.0, "linformer": 1.0, "full": 5.0}
    lengths = [512 * 2**power for power in range(7)]
    records = [
        costed(
            replace(scaling(name, n, ms * n / 512), memory=Memory(peak_bytes=int(1e8 / ms) * n)), int(1e6 * n), 10**6
        )
        for name, ms in costs.items()
        for n in lengths
        if name != "full" or n < lengths[-1]
    ]
    claims = CLAIMS | {"pooling": {"time_exponent": 1, "memory_exponent": 1, "is_exact": False, "is_control": True}}
    analysis = analysed(tmp_path, records, claims=claims, ceilings=[roof()])
    tables = {table.name: table for table in make_tables(analysis)}
    order = {name: list(dict.fromkeys(row["variant"] for row in table.rows)) for name, table in tables.items()}
    fastest = ["linformer", "bigbird", "full", "pooling"]
    for name in ("time-fwd", "scaling", "efficiency", "efficiency-longest"):
        assert order[name] == fastest, name
    assert order["memory-fwd"] == ["bigbird", "linformer", "full", "pooling"]


def test_growth_is_listed_from_the_slowest(tmp_path):
    powers = {"full": 2.0, "bigbird": 1.3, "linformer": 1.0}
    records = [scaling(name, n, 1e-4 * n**power, spread=0.0) for name, power in powers.items() for n in DOUBLINGS]
    table = exponent_table(analysed(tmp_path, records))
    assert [row["variant"] for row in table.rows if row["quantity"] == "time"] == ["linformer", "bigbird", "full"]


def test_a_column_has_one_unit():
    ends = ("median_ms", "low_ms", "high_ms")
    times = [dict.fromkeys(ends, value) | {"bytes": 2.0**30 * value} for value in (0.1, 1.0, 5720.0)]
    columns = (time_column("time"), number_column("memory", "bytes", human_bytes))
    shown = Table(name="t", title="T", notes=(), columns=columns, rows=tuple(times)).texts()
    assert [row[0] for row in shown] == ["0.1 ms [0.1, 0.1]", "1 ms [1, 1]", "5720 ms [5720, 5720]"]
    assert [row[1].split()[1] for row in shown] == ["GiB"] * 3


def test_a_number_is_never_cut_where_a_column_can_go(tmp_path):
    rows = ({"name": "a_variant_with_a_very_long_name", "text": "from 123,456 or less", "more": "x" * 30},)
    long = Column(heading="from", show=lambda row: row["text"], priority=0)
    table = Table(
        name="t",
        title="t",
        notes=(),
        columns=(text_column("variant", "name", 0), long, text_column("more", priority=1)),
        rows=rows,
    )
    out = io.StringIO()
    to_terminal(table, Console(file=out, width=45, color_system=None))
    assert "from 123,456 or less" in out.getvalue()
    assert "a_variant…ong_name" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 45


def test_names_of_the_best_are_never_cut_where_a_column_can_go(tmp_path):
    """A part of `linformer or bigbird or full` would be the name of somebody else."""
    records = [scaling(name, n, n / 512) for name in ("linformer", "bigbird", "full") for n in DOUBLINGS]
    table = front_table(analysed(tmp_path, records))
    for width in (60, 80, 120):
        line = next(line for line in printed(table, width).splitlines() if line.startswith("best"))
        assert set(line.split()) <= {"best", "linformer", "or", "bigbird", "full"}, line


@pytest.mark.parametrize("run", ["h100/scaling-gpu", "epyc-avx2-2cores/approximation-cpu"])
def test_rows_hold_plain_values(run):
    """What files and frames get; texts are for people."""
    analysis = analyse([Path(__file__).parents[3] / "results" / run])
    for table in make_tables(analysis):
        found = {type(value) for row in table.rows for value in row.values()}
        assert found <= {str, int, float, bool, type(None)}, table.name
    (table, *_) = [one for one in make_tables(analysis) if one.name.startswith(("time-", "error-"))]
    columns = [name for name in table.fields if name.startswith(("median_ms_", "error_"))]
    assert all(isinstance(row[columns[0]], float) for row in table.rows)
