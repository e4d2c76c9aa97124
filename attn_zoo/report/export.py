"""Export records as flat files: one row per record."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from attn_zoo.errors import ConfigError, UnsupportedError, suggestion
from attn_zoo.report.analysis.analyse import analysis_of
from attn_zoo.report.analysis.observations import Observation, Results, read_results
from attn_zoo.report.flat_records import FIELDS, flat_row
from attn_zoo.report.measurements import token_rates
from attn_zoo.report.tables.all_tables import find_table, summary_tables
from attn_zoo.report.tables.table import Table, csv_lines, to_csv, to_latex, to_markdown
from attn_zoo.whole_files import require_writable, write_whole

_COMPUTED: Mapping[str, type] = {
    "label": str,
    "environment": str,
    "run": str,
    "key": str,
    "num_tokens": float,
    "overhead_s": float,
    "tokens_per_s_low": float,
    "tokens_per_s_high": float,
    "num_samples": int,
}


_NESTED = {field.name for field in FIELDS if field.kind in {"list", "json"}}
_HINTS: Mapping[str, Any] = {**_COMPUTED, **{field.name: field.hint for field in FIELDS}}

COLUMNS: tuple[str, ...] = tuple(sorted(_HINTS, key=lambda name: name in _NESTED))
"""Every column; what is nested (samples as a list, the rest as JSON) comes last.

Units are in the suffixes; what was not measured is empty."""


def flat_frame(observations: Sequence[Observation]) -> pd.DataFrame:
    """Return one flat row per record; see `COLUMNS`."""
    frame = pd.DataFrame.from_records([_row(one) for one in observations], columns=list(COLUMNS))
    for name, hint in _HINTS.items():
        for number, dtype in ((int, "Int64"), (float, "float64")):
            if name not in _NESTED and number in {hint, *get_args(hint)}:
                frame[name] = frame[name].astype(dtype)  # type: ignore[call-overload]
    return frame


def _row(one: Observation) -> dict[str, Any]:
    record = one.record
    computed = {
        "label": one.label,
        "environment": one.environment,
        "run": one.run,
        "key": record.cell.key,
        "num_tokens": record.cell.num_tokens,
        "overhead_s": None if record.overhead_s is None else float(record.overhead_s),
        "num_samples": len(record.timing.samples_ms) if record.timing else None,
    }
    return flat_row(record) | computed | token_rates(record)


def export(
    dirs: Iterable[str | Path],
    fmt: str,
    out: str | Path,
    table: str | None = None,
    warn: Callable[[str], object] = lambda _: None,
) -> Path:
    """Write `dirs` in one format to `out` (replaced if it exists) and return its path.

    Args:
        dirs: results folders.
        fmt: one of `FORMATS`; of a single table one of `TABLE_FORMATS`.
        out: file to write.
        table: name of the only table to write, such as `"exponents"`.
        warn: told of everything that could not be read and is left out, a sentence each.

    `csv`, `jsonl` and `parquet` hold one row per observation (see `COLUMNS`) with raw samples;
    `markdown` and `latex` hold the tables of the report. In `csv`, text that a spreadsheet would run as a formula gets
    a leading quote.

    Raises:
        ConfigError: unknown format, or a directory is not a results folder; nothing is written then.
        UnknownNameError: these results have no such table.
        UnsupportedError: `parquet` needs pyarrow.
        StoreError: `out` cannot be written.
    """
    known: Iterable[str] = TABLE_FORMATS if table else FORMATS
    if fmt not in known:
        hint = suggestion(fmt, known)
        raise ConfigError("export", [("format", f"expected one of {', '.join(known)}; got {fmt!r}{hint}")])
    path = Path(out)
    require_writable(path)
    results = read_results(dirs)
    content = TABLE_FORMATS[fmt](find_table(analysis_of(results), table)) if table else FORMATS[fmt](results)
    write_whole(path, content)
    for text in results.warnings:
        warn(text)
    return path


def _parts(observations: Sequence[Observation]) -> Iterator[list[list[Any]]]:
    """Return the values of `_EXPORTED` in parts: of all rows they take much room."""
    starts = range(0, len(observations), ROWS_OF_A_PART)
    parts = (map(_row, observations[start : start + ROWS_OF_A_PART]) for start in starts)
    return ([[row.get(name) for name in _EXPORTED] for row in part] for part in parts)


ROWS_OF_A_PART = 1000

_EXPORTED = [name for name in COLUMNS if name != "correct"]  # a digit for each test item
_LISTS = {_EXPORTED.index(field.name) for field in FIELDS if field.kind == "list"}


def _csv(results: Results) -> Iterator[bytes]:
    yield csv_lines([_EXPORTED]).encode()
    for rows in _parts(results.observations):
        for row in rows:
            for index in _LISTS:
                row[index] = json.dumps(row[index]) if row[index] else ""
        yield csv_lines(rows).encode()


def _jsonl(results: Results) -> Iterator[bytes]:
    lines = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode
    return (
        "".join(f"{lines(dict(zip(_EXPORTED, row, strict=True)))}\n" for row in rows).encode()
        for rows in _parts(results.observations)
    )


def _parquet(results: Results) -> bytes:
    frame = flat_frame(results.observations)[_EXPORTED]
    buffer = io.BytesIO()
    try:
        frame.to_parquet(buffer, index=False, engine="pyarrow")
    except ImportError:
        raise UnsupportedError(
            "parquet", "export to parquet needs pyarrow, which is not installed; pip install pyarrow"
        ) from None
    return buffer.getvalue()


def _markdown(results: Results) -> bytes:
    return "\n".join(to_markdown(table) for table in summary_tables(analysis_of(results))).encode()


def _latex(results: Results) -> bytes:
    return "\n".join(to_latex(table) for table in summary_tables(analysis_of(results)) if table.rows).encode()


FORMATS: Mapping[str, Callable[[Results], bytes | Iterable[bytes]]] = {
    "csv": _csv,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "markdown": _markdown,
    "latex": _latex,
}

SUFFIXES: Mapping[str, str] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".md": "markdown",
    ".tex": "latex",
}
"""Formats by what the name of a file ends in."""

TABLE_FORMATS: Mapping[str, Callable[[Table], str]] = {"csv": to_csv, "markdown": to_markdown, "latex": to_latex}
