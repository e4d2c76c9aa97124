"""What the timed records of a large folder came to, in one file: to go on with a run, or to say how it stands.

A record is looked up here instead of read where its file has the size and times that it had. Whoever needs the numbers
in it, the report above all, reads it. An index that is damaged, or made by another version, is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attn_zoo
from attn_zoo.errors import StoreError
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.records import Cell, Record, checksum
from attn_zoo.whole_files import read_regular, write_whole

NAME = ".index"
LEAST_RECORDS = 1000
"""Fewer are read at once."""

_MAX_BYTES = 2**30
_FIELDS = ("status", "reason", "environment", "duration_s")


def _state(path: Path) -> list[int]:
    """Return what changes when a file does: the last cannot be set by copying."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


class Index:
    """Outcomes by key, of timed cells.

    Args:
        folder: results folder.
        planned: cells that a run is to make; records of others are always read.
    """

    def __init__(self, folder: Path, planned: Iterable[Cell]) -> None:
        self._path = folder / NAME
        # A training's record says how long others will take.
        self._cells = {cell.key: cell for cell in planned if kind_of(cell).is_timed}
        self._entries = self._read() if self._cells else {}
        self._num_found = 0

    def _read(self) -> dict[str, list[Any]]:
        with suppress(OSError, ValueError, LookupError, TypeError):
            data = json.loads(read_regular(self._path, _MAX_BYTES))
            if data["version"] == attn_zoo.__version__ and data["checksum"] == checksum(data["entries"]):
                return dict(data["entries"])
        return {}

    def find(self, path: Path) -> Record | None:
        """Return the record in a file, without its numbers, or None where it must be read."""
        entry, cell = self._entries.get(path.stem), self._cells.get(path.stem)
        if entry is None or cell is None or entry[0] != _state(path):
            return None
        self._num_found += 1
        return Record(cell=cell, **dict(zip(_FIELDS, entry[1:], strict=True)))

    def update(self, records: Mapping[str, Record], cells: Path) -> None:
        """Write the index anew where many of the records had to be read; one that cannot be written costs time only."""
        timed = {key: record for key, record in records.items() if kind_of(record.cell).is_timed}
        if len(timed) < LEAST_RECORDS or self._num_found > 0.9 * len(timed):
            return
        with suppress(OSError, StoreError):
            entries = {
                key: [_state(cells / f"{key}.json"), *(getattr(record, name) for name in _FIELDS)]
                for key, record in timed.items()
            }
            data = {"version": attn_zoo.__version__, "checksum": checksum(entries), "entries": entries}
            write_whole(self._path, json.dumps(data))
