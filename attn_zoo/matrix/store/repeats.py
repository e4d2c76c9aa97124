"""Repeats of cells that are not complete: `parts/<key>-<n>.json`, whole or absent like every file of a results folder.

They are no results. When the last repeat is done, the cell gets its one record in `cells` and they go; where one
fails, the failure is the record and they move to `replaced`. Then the cell's record is there, and nothing below
reads them any more.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

from attn_zoo.errors import FolderError, StoreError
from attn_zoo.folder import read_record
from attn_zoo.matrix.store.lock import move_aside
from attn_zoo.records import Record
from attn_zoo.whole_files import write_whole


class Repeats:
    """The repeats of a results folder. Making the object reads and writes nothing.

    Args:
        folder: the results folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._replaced = folder / "parts", folder / "replaced"

    def _path(self, key: str, number: int) -> Path:
        return self._folder / f"{key}-{number}.json"

    def count(self) -> dict[str, int]:
        """Return how many repeats each cell has that has any, by key; without reading them."""
        return dict(Counter(path.name.partition("-")[0] for path in self._folder.glob("[!.]*-*.json")))

    def take(self, key: str, environment: str, most: int) -> list[Record]:
        """Return the repeats of a cell that a run can go on from, and move its others to `replaced`.

        Args:
            key: of the cell.
            environment: digest of the one that the next repeat will be measured in: repeats of another do not count.
            most: repeats that can be used.

        Raises:
            StoreError: a file cannot be moved, or a newer version of this package wrote it.
        """
        usable: list[Record] = []
        for number in range(1, most + 1):
            try:
                record = read_record(self._path(key, number), key)
            except StoreError as error:
                if isinstance(error, FolderError):
                    raise
                break  # absent, or damaged: what comes after it is of no use
            if record.environment != environment or record.status != "ok":
                break
            usable.append(record)
        self.retire(key, beyond=len(usable))
        return usable

    def write(self, record: Record, number: int) -> None:
        """Store a repeat, counted from 1.

        Raises:
            StoreError: the disk is full or not writable, or there is this repeat already.
        """
        path = self._path(record.cell.key, number)
        if path.exists():
            raise StoreError(f"{path}: there is this repeat already; nothing is overwritten")
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise FolderError(f"{self._folder}: cannot be written: {error.strerror}") from None
        write_whole(path, record.to_json())

    def drop(self, key: str) -> None:
        """Delete the repeats of a cell, all of which are in its record."""
        for path in self._of(key):
            path.unlink(missing_ok=True)

    def retire(self, key: str, beyond: int = 0) -> None:
        """Move the repeats of a cell from the one after `beyond` on to `replaced`.

        Raises:
            StoreError: not writable.
        """
        kept = {self._path(key, number) for number in range(1, beyond + 1)}
        for path in self._of(key):
            if path not in kept:
                move_aside(path, self._replaced, key)

    def tidy(self) -> None:
        """Remove the folder if nothing is left in it; only for a run that has the results folder for itself."""
        with suppress(OSError):
            self._folder.rmdir()

    def _of(self, key: str) -> list[Path]:
        return sorted(self._folder.glob(f"{key}-*.json"))
