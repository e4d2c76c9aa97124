"""Export records as flat files: one row per observation."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pandas as pd

from attn_zoo.errors import ConfigError, UnsupportedError, suggestion
from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.analysis.observations import load_runs
from attn_zoo.report.tables.all_tables import summary_tables
from attn_zoo.report.tables.table import guard_frame, to_latex, to_markdown
from attn_zoo.whole_files import write_whole

__all__ = ["FORMATS", "export"]


def export(dirs: Iterable[str | Path], fmt: str, out: str | Path) -> Path:
    """Write `dirs` in one format to `out` (replaced if it exists) and return its path.

    Args:
        dirs: results folders.
        fmt: one of `FORMATS`.
        out: file to write.

    `csv`, `jsonl` and `parquet` hold one row per observation (see `attn_zoo.report.flat.COLUMNS`) with raw samples;
    `markdown` and `latex` hold the tables of the report. In `csv`, text that a spreadsheet would run as a formula gets
    a leading quote.

    Raises:
        ConfigError: unknown format, or a directory is not a results folder; nothing is written then.
        UnsupportedError: `parquet` needs pyarrow.
        StoreError: `out` cannot be written.
    """
    if fmt not in FORMATS:
        hint = suggestion(fmt, FORMATS)
        raise ConfigError("export", [("format", f"expected one of {', '.join(FORMATS)}; got {fmt!r}{hint}")])
    path = Path(out)
    write_whole(path, FORMATS[fmt](list(dirs)))
    return path


def _frame(dirs: Iterable[str | Path]) -> pd.DataFrame:
    return load_runs(dirs).drop(columns="correct")


def _csv(dirs: Iterable[str | Path]) -> bytes:
    frame = _frame(dirs)
    frame["samples_ms"] = [json.dumps(samples) if samples else "" for samples in frame["samples_ms"]]
    return guard_frame(frame).to_csv(index=False, lineterminator="\n").encode()


def _jsonl(dirs: Iterable[str | Path]) -> bytes:
    frame = _frame(dirs).astype(object)
    rows = frame.where(frame.notna(), None).to_dict("records")
    return "".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows).encode()


def _parquet(dirs: Iterable[str | Path]) -> bytes:
    frame = _frame(dirs)
    buffer = io.BytesIO()
    try:
        frame.to_parquet(buffer, index=False, engine="pyarrow")
    except ImportError:
        raise UnsupportedError(
            "parquet", "export to parquet needs pyarrow, which is not installed; pip install pyarrow"
        ) from None
    return buffer.getvalue()


def _markdown(dirs: Iterable[str | Path]) -> bytes:
    return "\n".join(to_markdown(table) for table in summary_tables(analyse(dirs))).encode()


def _latex(dirs: Iterable[str | Path]) -> bytes:
    return "\n".join(to_latex(table) for table in summary_tables(analyse(dirs)) if table.rows).encode()


FORMATS: Mapping[str, Callable[[list[str | Path]], bytes]] = {
    "csv": _csv,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "markdown": _markdown,
    "latex": _latex,
}
