"""One table, many dresses: the same rows as CSV, Markdown, LaTeX, HTML or terminal text."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import pandas as pd
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from attn_zoo.report.wording import MARKS
from attn_zoo.units import Units, clean, human_ms, shorten, with_ends

Row = Mapping[str, Any]

MISSING = "\u2013"  # en dash

_WIDTHS = (48, 40, 32, 24, 18)
"""Letters to which texts are cut where space is short: the first that fits."""
_ROOMY = (200, 160, 120, 96, 72)
"""Likewise where all columns have space."""
_OPTIONAL = 3  # columns of this priority and above go before texts are made brief


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """How people see one column.

    Args:
        heading: words above it.
        show: text of one row.
        brief: makes that text shorter for narrow terminals.
        sort: what to sort by; None means the text.
        align: numbers go right.
        priority: the column with the largest number is left out first where space is short; 0 never is.
        fit: from all rows to the column that shows them, with one unit for all.
        is_address: its texts are addresses of pages, which lead there. None that a record holds is one.
        is_text: its texts are cut where space is short, whatever is in them.
        is_whole: its texts are cut only where no column can go any more, as those of several names, of which a part
            would be another name.
    """

    heading: str
    show: Callable[[Row], str]
    brief: Callable[[str], str] = str
    sort: Callable[[Row], float | str | None] | None = None
    align: Literal["left", "right"] = "right"
    priority: float = 1
    fit: Callable[[Sequence[Row]], Column] | None = None
    is_address: bool = False
    is_text: bool = False
    is_whole: bool = False

    def cut(self, text: str, longest: int, *, is_last: bool = False) -> str:
        """Return a text in so many letters; whole if it has a number, of which a part would be another number.

        Where nothing but letters is left to go, `is_last`, no text is spared.
        """
        is_number = not self.is_text and any(letter.isdigit() for letter in text)
        return text if not is_last and (self.is_whole or is_number) else shorten(text, longest)


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence of a note that speaks of one thing, and stands only where that is shown.

    Args:
        text: the sentence.
        sign: what it explains, in the texts of any column but the first, whose names may hold any sign.
        heading: of the column that it explains.
    """

    text: str
    sign: str = ""
    heading: str = ""


Note = Sequence[str | Remark]
"""Sentences of which a text always stands; empty ones are left out."""

MARK_REMARKS: Note = tuple(Remark(f"{mark}: {words}.", sign=mark) for mark, _, words in MARKS.values())
"""What the marks behind times mean."""

BRACKETS = Remark("In brackets: 95 % interval.", sign="[")


def say(note: Note, headings: Sequence[str], texts: Iterable[Sequence[str]]) -> str:
    """Return what a note says of these columns and of the signs in their texts, row by row."""
    shown = "\n".join(text for row in texts for text in row[1:])
    said = (
        one if isinstance(one, str) else one.text
        for one in note
        if isinstance(one, str) or (one.sign in shown and one.heading in ("", *headings))
    )
    return " ".join(filter(None, said))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Raw rows (for machines) and columns (for people).

    Args:
        name: file name stem.
        title: above the table.
        notes: below it: how to read it, as far as it is shown; `note` is what is said where all of it is.
        columns: for people, but for those that say nothing of any row; without any, the table is for files only.
        rows: raw values with units in their keys; all rows have the same keys.
        fields_if_empty: keys of an empty table, so that its file still has a header.
        is_view: another table's file has its numbers, so it needs none of its own.
    """

    name: str
    title: str
    notes: Note
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    fields_if_empty: tuple[str, ...] = ()
    is_view: bool = False

    def __post_init__(self) -> None:
        fitted = [column.fit(self.rows) if column.fit else column for column in self.columns]
        shown = [column for column in fitted if not self.rows or any(map(column.show, self.rows))]
        object.__setattr__(self, "columns", tuple(shown))

    @property
    def fields(self) -> tuple[str, ...]:
        """Keys of the rows."""
        return tuple(self.rows[0]) if self.rows else self.fields_if_empty

    @property
    def note(self) -> str:
        """How to read the whole table."""
        return say(self.notes, [column.heading for column in self.columns], self.texts())

    def cut(self, most: int) -> Table:
        """Return the table with its first rows only, and a note that says so; itself where it has no more."""
        if len(self.rows) <= most:
            return self
        place = f"tables/{self.name}.{'md' if self.is_view else 'csv'}"
        said = f"The first {most:,} of {len(self.rows):,} rows; {place} has all."
        return replace(self, rows=self.rows[:most], notes=(said, *self.notes))

    def texts(self) -> list[list[str]]:
        """Return what people see, row by row."""
        return self._texts

    @cached_property
    def _texts(self) -> list[list[str]]:
        return [[clean(column.show(row)) or MISSING for column in self.columns] for row in self.rows]


def text_column(heading: str, key: str = "", priority: float = 1) -> Column:
    """Return a column of text, to the left; its heading is also its key, unless that is given."""
    field = key or heading
    return Column(
        heading=heading, show=lambda row: str(row[field] or ""), align="left", priority=priority, is_text=True
    )


def number_column(
    heading: str, key: str, show: Callable[[float], str], priority: float = 1, *, marks: str = ""
) -> Column:
    """Return a column of one number, and of the marks behind it, where these have a key; empty where it is None.

    All that have units have one.
    """

    def column(show: Callable[[float], str]) -> Column:
        def text(row: Row) -> str:
            return "" if row[key] is None else marked(show(row[key]), row[marks] if marks else "")

        return Column(heading=heading, show=text, sort=lambda row: row[key], priority=priority)

    if isinstance(show, Units):
        units = show
        return replace(column(units), fit=lambda rows: column(units.fixed(row[key] for row in rows)))
    return column(show)


def without_interval(text: str) -> str:
    """Return a text without its interval in brackets.

    >>> without_interval("12.3 ms [12.1, 12.6] ¹")
    '12.3 ms ¹'
    """
    return re.sub(r" \[[^\]]*\]", "", text)


def interval_column(
    heading: str,
    key: str,
    show: Callable[[float], str],
    priority: float = 1,
    *,
    show_end: Callable[[float], str] | None = None,
    marks: str = "",
) -> Column:
    """Return a column of `value [low, high]` of `interval_values`, and of the marks behind it, where these have a key.

    The ends may be written shorter than the value.
    """
    end = show_end or show

    def full(row: Row) -> str:
        if row[key] is None:
            return ""
        text = with_ends(show(row[key]), row[f"{key}_low"], row[f"{key}_high"], end)
        return marked(text, row[marks] if marks else "")

    return Column(heading=heading, show=full, brief=without_interval, sort=lambda row: row[key], priority=priority)


def marked(text: str, marks: str) -> str:
    """Return a text with marks behind it, if there are any."""
    return f"{text} {marks}" if marks else text


def interval_values(key: str, value: float | None, low: float | None, high: float | None) -> dict[str, float | None]:
    """Return what a row holds for `interval_column`."""
    return {key: value, f"{key}_low": low, f"{key}_high": high}


def time_column(heading: str, suffix: str = "", priority: float = 1) -> Column:
    """Return a column of a median time with its interval and the marks of `marks`, or of its `word` where it has none.

    All times have one unit. The suffix is that of the keys `median_ms`, `low_ms` and `high_ms`.
    """
    median, low, high = (f"{name}_ms{suffix}" for name in ("median", "low", "high"))

    def column(units: Units) -> Column:
        def show(row: Row) -> str:
            if row[median] is None:
                return str(row["word"])
            return marked(units.interval(row[median], row[low], row[high]), row.get(f"marks{suffix}", ""))

        return Column(
            heading=heading, show=show, brief=without_interval, sort=lambda row: row[median], priority=priority
        )

    return replace(column(human_ms), fit=lambda rows: column(human_ms.fixed(row[median] for row in rows)))


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame as plain data; what is missing is None."""
    rows = frame.astype(object).where(frame.notna(), None).to_dict(orient="records")
    return [{str(name): value for name, value in row.items()} for row in rows]


_FORMULA = re.compile(r"[\t\r]|\s*[=+\-@]")


def guarded(value: Any) -> Any:
    """Return a value; text that a spreadsheet would run as a formula is made harmless by a leading quote."""
    return "'" + value if isinstance(value, str) and _FORMULA.match(value) else value


def unguarded(text: str) -> str:
    """Return a text of a CSV file as it was before `guarded`."""
    return text[1:] if text[:1] == "'" and _FORMULA.match(text[1:]) else text


def csv_lines(rows: Iterable[Iterable[Any]]) -> str:
    """Return lines of a CSV file, guarded; numbers keep all digits."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(guarded, row) for row in rows)
    return text.getvalue()


def to_csv(table: Table) -> str:
    """Return raw values with a header."""
    return csv_lines([table.fields, *([row[name] for name in table.fields] for row in table.rows)])


def to_markdown(table: Table) -> str:
    """Return a GitHub table with its title and note."""
    title, note = f"### {escape_markdown(table.title)}", escape_markdown(table.note)
    if not table.rows:
        return "\n".join([title, "", note or "Nothing to show.", ""])
    headings = [column.heading for column in table.columns]
    rule = "|".join("---:" if column.align == "right" else "---" for column in table.columns)
    head, *rows = ["| " + " | ".join(map(escape_markdown, texts)) + " |" for texts in (headings, *table.texts())]
    return "\n".join([title, "", head, f"|{rule}|", *rows, "", *([note, ""] if note else [])])


def escape_markdown(text: str) -> str:
    """Escape what would end a cell or start markup; a lone `_` inside a name needs no escape on GitHub."""
    text = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|`*\[\]])", r"\\\1", text)


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\u00d7": r"$\times$",
    "µ": r"\textmu{}",
    "\u2013": "--",
    "\u2212": "$-$",
    "…": r"\ldots{}",
    "²": r"\textsuperscript{2}",
    "±": r"$\pm$",
}


def to_latex(table: Table) -> str:
    """Return a `table` environment with rules of the booktabs package; its label is `tab:NAME`."""
    lines = [r"\begin{table}", f"\\caption{{{_latex(table.title)}}}", f"\\label{{tab:{table.name}}}"]
    lines.append("\\begin{tabular}{" + "".join(column.align[0] for column in table.columns) + "}")
    lines.append(r"\toprule")
    lines.append(" & ".join(_latex(column.heading) for column in table.columns) + r" \\")
    lines.append(r"\midrule")
    for row in table.texts():
        line = " & ".join(_latex(text) for text in row)
        # The end of the row before takes a bracket or a star for an argument of its own.
        lines.append(("{}" if line.startswith(("[", "*")) else "") + line + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in clean(text))


def to_terminal(table: Table, console: Console, elsewhere: str = "in the files") -> None:
    """Print the table in the width of `console`: shorter texts first, then fewer columns, never a wrapped line.

    `elsewhere` says where columns are that were left out.
    """
    console.print(f"[bold]{escape(clean(table.title))}[/bold]", highlight=False)
    if not table.rows:
        console.print(escape(clean(table.note)) or "Nothing to show.", highlight=False)
        return
    texts, kept = _fit(table, console.width)
    out = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for index in kept:
        out.add_column(escape(table.columns[index].heading), justify=table.columns[index].align, no_wrap=True)
    for row in texts:
        out.add_row(*(escape(row[index]) for index in kept))
    console.print(out, highlight=False)
    headings = [table.columns[index].heading for index in kept]
    below = clean(say(table.notes, headings, [[row[index] for index in kept] for row in texts]))
    if hidden := [column.heading for index, column in enumerate(table.columns) if index not in kept]:
        below += f" Columns left out here, {elsewhere}: {', '.join(hidden)}."
    if below:
        console.print(f"[dim]{escape(below.strip())}[/dim]", highlight=False)


def _fit(table: Table, width: int) -> tuple[list[list[str]], list[int]]:
    """Return the texts to print and the columns that fit: first without the optional columns, then with brief texts."""
    wanted = list(range(len(table.columns)))
    for longest in (*_ROOMY, _WIDTHS[0]):
        full = _cut(table, longest, is_brief=False)
        if _width(table, full, wanted) <= width:
            return full, wanted
    while _width(table, full, wanted) > width:
        worst = max(wanted, key=lambda index: (table.columns[index].priority, index))
        if table.columns[worst].priority < _OPTIONAL:
            break
        wanted = [index for index in wanted if index != worst]
    else:
        return full, wanted
    briefs = [_cut(table, longest) for longest in _WIDTHS]
    kept = wanted
    while _width(table, briefs[-1], kept) > width:
        worst = max(kept, key=lambda index: (table.columns[index].priority, index))
        if table.columns[worst].priority == 0:  # then nothing is left to go but letters
            briefs.append(_cut(table, _WIDTHS[-1], is_last=True))
            break
        kept = [index for index in kept if index != worst]
    return next((brief for brief in briefs if _width(table, brief, kept) <= width), briefs[-1]), kept


def _cut(table: Table, longest: int, *, is_brief: bool = True, is_last: bool = False) -> list[list[str]]:
    return [
        [
            column.cut(column.brief(text) if is_brief else text, longest, is_last=is_last)
            for column, text in zip(table.columns, row, strict=True)
        ]
        for row in table.texts()
    ]


def _width(table: Table, texts: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    widths = [max([cell_len(table.columns[index].heading), *(cell_len(row[index]) for row in texts)]) for index in kept]
    return sum(widths) + 2 * (len(kept) - 1)
