"""Whatever holds results, read as a run: a folder, a packed run, a commit, an export, or pytest-benchmark's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from attn_zoo.errors import ConfigError, StoreError, UnsupportedError
from attn_zoo.folder import Choose, Run, read_run
from attn_zoo.packed_run import opened
from attn_zoo.records import Cell, Environment, Record, Timing
from attn_zoo.report.flat_records import record_of
from attn_zoo.report.tables.table import plain_rows, unguarded
from attn_zoo.statistics.medians import time_summary

MAX_FILE_BYTES = 2 * 2**30
"""Of an export or the JSON of pytest-benchmark, which are read at once."""

BENCHMARK = "pytest-benchmark"


def read_source(source: str | Path, choose: Choose | None = None) -> Run:
    """Read results from wherever they are; parts that cannot be read become warnings.

    Args:
        source: results folder; packed run; `REV:FOLDER` of the git repository here; export as CSV, JSON Lines or
            Parquet; JSON of pytest-benchmark, or a folder of such files, each of which is a process.
        choose: of very many records in a folder; see `attn_zoo.folder.read_run`.

    Raises:
        ConfigError: it is none of these, or cannot be read.
        UnsupportedError: Parquet needs pyarrow.
    """
    path = Path(source)
    if path.is_file() and (read := _FILES.get(path.suffix)) is not None:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(str(path), [("", f"too large to be read at once (over {MAX_FILE_BYTES} bytes)")])
        try:
            return read(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            text = f"cannot be read: {type(error).__name__}: {error}"
            raise ConfigError(str(path), [("", text)]) from None
    if path.is_dir() and not (path / "run.json").exists():
        files = [file for file in sorted(path.glob("*.json")) if _is_benchmark(file)]
        if files:
            runs = [_read_benchmark(file) for file in files]
            machines = {digest: one for run in runs for digest, one in run.environments.items()}
            records = tuple(record for run in runs for record in run.records)
            return Run(name=path.resolve().name, environments=machines, records=records)
    with opened(source) as folder:
        return read_run(folder, choose)


def _read_export(path: Path) -> Run:
    records, warnings = [], []
    rows = list(_ROWS[path.suffix](path))
    for number, row in enumerate(rows, 1):
        try:
            records.append(record_of(row, f"{path.name}, row {number}"))
        except StoreError as error:
            warnings.append(f"{error}: skipped")
    if not records:
        raise ConfigError(str(path), [("", f"expected an export of attn-zoo; {[*warnings, 'it has no rows'][0]}")])
    names = dict.fromkeys(str(row["run"]) for row in rows if row.get("run"))
    return Run(name=" + ".join(names) or path.stem, records=tuple(records), warnings=tuple(warnings))


def _rows_of_csv(path: Path) -> Iterator[dict[str, Any]]:
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    for row in frame.to_dict("records"):
        yield {str(name): unguarded(value) for name, value in row.items()}


def _rows_of_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield dict(json.loads(line))


def _rows_of_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow.fs import LocalFileSystem

        # Or pandas opens it: a thread of Arrow's that holds a file of Python's aborts the process, or hangs, where it
        # ends just then: github.com/apache/arrow/issues/50482.
        yield from plain_rows(pd.read_parquet(path, engine="pyarrow", filesystem=LocalFileSystem()))
    except ImportError:
        raise UnsupportedError(
            "parquet", "parquet needs pyarrow, which is not installed; pip install pyarrow"
        ) from None


_ROWS: Mapping[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".csv": _rows_of_csv,
    ".jsonl": _rows_of_jsonl,
    ".parquet": _rows_of_parquet,
}


def _is_benchmark(path: Path) -> bool:
    try:
        return path.stat().st_size <= MAX_FILE_BYTES and "benchmarks" in json.loads(path.read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _read_benchmark(path: Path) -> Run:
    data = json.loads(path.read_bytes())
    if not isinstance(data, dict) or "benchmarks" not in data:
        raise ConfigError(str(path), [("", f"expected JSON of {BENCHMARK} (--benchmark-json); it has no benchmarks")])
    machine = data.get("machine_info") or {}
    cpu = machine.get("cpu") or {}
    environment = Environment(
        host=hashlib.sha256(str(machine.get("node", "")).encode()).hexdigest()[:12],
        platform="-".join(str(machine.get(name, "")) for name in ("system", "release", "machine")),
        cpu=str(cpu.get("brand_raw") or machine.get("processor") or ""),
        num_cores=int(cpu.get("count") or 0),
        memory_bytes=0,  # not in the file
        threads=0,
        versions={"python": str(machine.get("python_version", ""))},
    )
    commit = str((data.get("commit_info") or {}).get("id") or "")
    records = [
        _benchmark_record(entry, environment.digest, commit, str(data.get("datetime") or ""), path)
        for entry in data["benchmarks"]
    ]
    return Run(name=path.stem, environments={environment.digest: environment}, records=tuple(records))


def _benchmark_record(entry: Mapping[str, Any], environment: str, commit: str, started: str, path: Path) -> Record:
    stats, extra = entry["stats"], entry.get("extra_info") or {}
    samples = tuple(1e3 * float(seconds) for seconds in stats.get("data") or ())
    if not samples:
        text = (
            f"{entry['fullname']} was saved without its samples; --benchmark-json and --benchmark-save-data keep them"
        )
        raise ConfigError(str(path), [("", text)])
    seq_len, device = extra.get("seq_len"), extra.get("device")
    cell = Cell(
        kind="scaling",
        variant=str(entry["fullname"]),
        label=str(entry.get("name") or entry["fullname"]),
        variant_digest=commit,
        device=device if isinstance(device, str) else "cpu",
        seq_len=seq_len if isinstance(seq_len, int) else None,
        protocol=BENCHMARK,
        protocol_version=1,
    )
    timing = Timing(
        samples_ms=samples,
        **time_summary(samples),
        first_ms=samples[0],
        num_warmup=0,
        inner_loops=int(stats.get("iterations") or 1),
        timer="perf_counter",
    )
    return Record(cell=cell, status="ok", environment=environment, started=started, timing=timing)


_FILES: Mapping[str, Callable[[Path], Run]] = {**dict.fromkeys(_ROWS, _read_export), ".json": _read_benchmark}
