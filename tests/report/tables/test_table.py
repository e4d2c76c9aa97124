"""One table in every dress; nothing in a name may break out of it."""

import io

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.tables.all_tables import make_tables
from attn_zoo.report.tables.table import (
    Column,
    Table,
    guard_frame,
    number_column,
    text_column,
    time_column,
    to_csv,
    to_latex,
    to_markdown,
    to_terminal,
)
from attn_zoo.report.units import human_bytes
from tests.report.synthetic import scaling, trained, write_run, zoo

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
    return make_tables(analyse([write_run(tmp_path_factory.mktemp("nasty") / "run", [*records, *trained(NASTY)])]))


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
        body = text.split(table.note[:10] if table.note else "Left out here")[0]
        assert len(body.splitlines()) == 3 + len(table.rows)


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
    for table in make_tables(analyse([write_run(tmp_path / "run", [])])):
        assert to_csv(table).strip()
        assert not [line for line in to_markdown(table).splitlines() if line.startswith("|")]


@given(st.text(max_size=20))
def test_guarded_text_never_starts_a_formula(text):
    guarded = guard_frame(pd.DataFrame({"a": [text], "b": [-1.5]}))
    start = guarded["a"][0].lstrip()[:1]
    assert start not in {"=", "+", "-", "@"}
    assert guarded["a"][0][:1] not in {"\t", "\r"}
    assert guarded["a"][0].endswith(text)
    assert guarded["b"][0] == -1.5


def test_status_table_groups_lengths_and_says_why(tmp_path):
    records = zoo(lengths=[512, 1024, 2048])
    records += [scaling("v", n, status="unsupported", reason="no causal form") for n in (512, 1024, 2048, 4096)]
    table = next(
        table for table in make_tables(analyse([write_run(tmp_path / "run", records)])) if table.name == "status"
    )
    found = {row["variant"]: (row["status"], row["lengths"], row["reason"]) for row in table.rows}
    assert found["v"] == ("unsupported", "512 to 4k (4)", "no causal form")
    assert found["full"][0] == "oom_host"


def test_the_caption_says_what_the_terminal_shows():
    note = "Median time. In brackets: its 95 % interval. Saved: kept for backward. Of a machine."
    rows = ({"variant": "full", "median_ms": 5.0, "low_ms": 4.0, "high_ms": 6.0, "saved": 7.0},)
    saved = number_column("saved", "saved", str)
    columns = (text_column("variant", "variant", 0), time_column("time", priority=0), saved)
    table = Table(name="t", title="T", note=note, columns=columns, rows=rows)
    wide, narrow = (" ".join(printed(table, width).split()) for width in (80, 16))
    assert note in wide
    assert "[4, 6]" in wide
    assert "Median time. Of a machine. Left out here, in the files: saved." in narrow
    assert "[" not in narrow


def test_the_caption_says_nothing_of_parentheses_that_were_cut():
    columns = (Column(heading="time", show=lambda row: row["time"], brief=lambda text: text.partition(" (")[0]),)
    rows = ({"time": "5 ms (4 ms)"},)
    table = Table(name="t", title="T", note="Median. In parentheses: the GPU alone.", columns=columns, rows=rows)
    assert "In parentheses" in printed(table, 40)
    assert "In parentheses" not in printed(table, 8)


def test_a_column_has_one_unit():
    ends = ("median_ms", "low_ms", "high_ms")
    times = [dict.fromkeys(ends, value) | {"bytes": 2.0**30 * value} for value in (0.1, 1.0, 5720.0)]
    columns = (time_column("time"), number_column("memory", "bytes", human_bytes))
    shown = Table(name="t", title="T", note="", columns=columns, rows=tuple(times)).texts()
    assert [row[0] for row in shown] == ["0.1 ms [0.1, 0.1]", "1 ms [1, 1]", "5720 ms [5720, 5720]"]
    assert [row[1].split()[1] for row in shown] == ["GiB"] * 3
