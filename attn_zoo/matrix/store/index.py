"""What the timed records of a large folder came to, in one file: to go on with a run, or to say how it stands.

A record is looked up here instead of read where its file has the size and times that it had. Whoever needs the numbers
in it, the report above all, reads it. An index that is damaged, made by another version or of another user, is none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import attn_zoo
from attn_zoo.errors import StoreError
from attn_zoo.folder import pack_cells, read_record, unpack_cells
from attn_zoo.matrix.kinds.all_kinds import KINDS
from attn_zoo.records import Cell, Record
from attn_zoo.whole_files import read_regular, write_whole

NAME = ".index"
LEAST_RECORDS = 1000
"""Where fewer are planned they are read, and keep their numbers."""

_MAX_BYTES = 2**30
_ENTRY = np.dtype(
    [("key", "S20"), ("size", "<i8"), ("written", "<i8"), ("changed", "<i8"), ("outcome", "<i4"), ("duration_s", "<f8")]
)
"""The two times are in nanoseconds; the second cannot be set by copying. The outcome is a number in a list."""


class Index:
    """Outcomes of timed cells. Its file is a line of JSON, a line with their cells, and their entries, sorted by key.

    Args:
        folder: results folder.
        planned: cells that a run is to make. Where they are few, all records are for others to read.
    """

    def __init__(self, folder: Path, planned: Iterable[Cell]) -> None:
        self._path, self._files = folder / NAME, f"{folder / 'cells'}{os.sep}"
        self._cells = {cell.key: cell for cell in planned if _is_timed(cell)}
        self._is_large = len(self._cells) >= LEAST_RECORDS
        self._packed = b""  # cells of the file, until one is asked for that is not planned
        self._entries = np.empty(0, _ENTRY)
        self._outcomes: list[tuple[Any, ...]] = []  # status, reason and environment: many records share theirs
        if self._is_large:
            self._read()
        self._keys = np.ascontiguousarray(self._entries["key"])
        self._is_found = np.zeros(len(self._entries), bool)
        self._new = bytearray()
        self._numbers = {outcome: number for number, outcome in enumerate(self._outcomes)}

    def _read(self) -> None:
        with suppress(OSError, ValueError, LookupError, TypeError):
            if self._path.lstat().st_uid != os.geteuid():
                return  # what it says is believed as it stands
            head, cells, body = read_regular(self._path, _MAX_BYTES).split(b"\n", 2)
            data = json.loads(head)
            if data["version"] == attn_zoo.__version__ and data["digest"] == _digest(data["outcomes"], cells, body):
                self._entries, self._packed = np.frombuffer(body, _ENTRY), cells
                self._outcomes = [tuple(outcome) for outcome in data["outcomes"]]

    def find(self, path: Path) -> Record | None:
        """Return the record in a file without its numbers, or None where it must be read.

        Raises:
            StoreError: nothing is known of the file, and it is no record.
        """
        if not self._is_large:
            return None
        try:
            found = os.stat(self._files + path.name)  # noqa: PTH116 - a path remembers its text
        except OSError:
            return None
        key, state = os.fsencode(path.stem), [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        at = int(self._keys.searchsorted(key))
        if at < len(self._keys):
            known, *then, outcome, duration_s = self._entries.item(at)
            if known == key and then == state and (cell := self._cell(path.stem)) is not None:
                self._is_found[at] = True
                return self._record(cell, outcome, duration_s)
        record = read_record(path, path.stem)
        if not _is_timed(record.cell):
            return record  # that of a training says how long others will take
        cell = self._cells.setdefault(path.stem, record.cell)
        what = (record.status, record.reason, record.environment)
        if (outcome := self._numbers.setdefault(what, len(self._outcomes))) == len(self._outcomes):
            self._outcomes.append(what)
        self._new += np.array((key, *state, outcome, record.duration_s), _ENTRY).tobytes()
        return self._record(cell, outcome, record.duration_s)

    def _cell(self, key: str) -> Cell | None:
        if key not in self._cells and self._packed:
            for cell in unpack_cells(json.loads(self._packed)):
                self._cells.setdefault(cell.key, cell)
            self._packed = b""
        return self._cells.get(key)

    def _record(self, cell: Cell, outcome: int, duration_s: float) -> Record:
        status, reason, environment = self._outcomes[outcome]
        return Record(cell=cell, status=status, reason=reason, environment=environment, duration_s=duration_s)

    def update(self) -> None:
        """Write the index anew where many records had to be read; one that cannot be written costs time only.

        In somebody else's folder nothing is written: asking how it stands leaves it as it was.
        """
        new = np.frombuffer(self._new, _ENTRY)
        count = int(self._is_found.sum()) + len(new)
        if count < LEAST_RECORDS or len(new) <= 0.1 * count:
            return
        with suppress(OSError, StoreError):
            if self._path.parent.stat().st_uid != os.geteuid():
                return
            entries = np.sort(np.concatenate([self._entries[self._is_found], new]), order="key")
            packed = json.dumps(pack_cells(self._cells[key.decode()] for key in entries["key"])).encode()
            digest = _digest(self._outcomes, packed, entries.tobytes())
            data = {"version": attn_zoo.__version__, "digest": digest, "outcomes": self._outcomes}
            write_whole(self._path, b"\n".join([json.dumps(data).encode(), packed, entries.tobytes()]))


def _is_timed(cell: Cell) -> bool:
    return any(kind.is_timed and kind.owns(cell) for kind in KINDS)


def _digest(outcomes: Sequence[Any], cells: bytes, body: bytes) -> str:
    return hashlib.sha256(json.dumps(outcomes).encode() + cells + body).hexdigest()
