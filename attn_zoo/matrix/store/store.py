"""A results folder: `run.json`, one record per cell, logs. Each file is whole or absent, whatever happens and when.

run.json            the resolved matrices and every environment by digest
ceilings.json       what each machine could do before it timed anything
cells/<key>.json    one record; the file is the mark that the cell is done
parts/<key>-<n>.json  repeats of a cell that is not done; see `attn_zoo.matrix.store.repeats`
logs/<key>.log      what the cell printed
weights/            what was trained, one file per cell, where the matrix asks to keep it
checkpoints/        state of trainings that have not ended
replaced/           records that `retry` ran again; repeats of no use
quarantine/         files in `cells` that are no records, each with its reason
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attn_zoo
from attn_zoo.errors import FolderError, StoreError
from attn_zoo.folder import RunInfo, Scan, differences, read_ceilings, read_info, scan_cells
from attn_zoo.matrix.store.lock import hold_lock, move_aside
from attn_zoo.matrix.store.repeats import Repeats
from attn_zoo.records import SCHEMA_VERSION, Ceilings, Environment, Record
from attn_zoo.whole_files import write_whole


class Store:
    """A results folder. Making the object reads and writes nothing.

    Args:
        folder: existing or not.

    Attributes:
        repeats: those of cells that are not done.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.logs = self.folder / "logs"
        self.checkpoints = self.folder / "checkpoints"
        self.weights = self.folder / "weights"
        self.repeats = Repeats(self.folder)
        self._cells = self.folder / "cells"
        self._info = self.folder / "run.json"
        self._ceilings = self.folder / "ceilings.json"

    @property
    def exists(self) -> bool:
        """Whether there is a results folder here already."""
        return self._info.is_file()

    def log(self, key: str) -> Path:
        """Return where the cell's output goes."""
        return self.logs / f"{key}.log"

    def check(self) -> None:
        """Raise `StoreError` unless the folder is absent, empty, or a results folder we can read."""
        if self.exists:
            self.info()
        elif self.folder.is_dir():
            foreign = sorted(item.name for item in self.folder.iterdir() if not item.name.startswith(".lock"))
            if foreign:
                names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
                raise FolderError(
                    f"{self.folder}: not a results folder: it has no run.json but holds {names}; choose another folder"
                )
        elif self.folder.exists() or self.folder.is_symlink():
            raise FolderError(f"{self.folder}: expected a folder for results; there is a file of this name")

    def info(self) -> RunInfo:
        """Return what `run.json` says.

        Raises:
            StoreError: there is none, it is damaged, or a newer version of this package wrote it.
        """
        info = read_info(self.folder)
        if info.problems:
            raise FolderError(f"{self.folder}: {info.problems[0]}")
        return info

    def scan(self) -> Scan:
        """Read all records; files that are none are reported and left where they are.

        Raises:
            StoreError: a newer version of this package wrote a record.
        """
        return scan_cells(self.folder)

    def records(self) -> list[Record]:
        """Return all records, sorted by key."""
        return list(self.scan().records.values())

    @contextmanager
    def writing(
        self,
        matrix: Mapping[str, Any],
        environment: Environment,
        *,
        allow_mixed_env: bool = False,
        shard: tuple[int, int] | None = None,
        claims: Mapping[str, dict[str, Any]] | None = None,
    ) -> Iterator[Scan]:
        """Hold the folder for one run: create or resume it, put what is no record into quarantine, yield the records.

        Shards hold locks of their own and share the folder: their cells differ.

        Raises:
            StoreError: no results folder, not writable, another run is at it, or another environment.
        """
        self.check()
        try:
            for folder in (self.folder, self._cells, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(f"{self.folder}: cannot be written: {error.strerror}") from None
        with hold_lock(self.folder, shard):
            with hold_lock(self.folder, None, name=".lock-info", wait=True):
                self._enter(matrix, environment, allow_mixed_env, claims or {})
            if shard is None:  # nobody else writes, so these were left by a killed run
                for path in (*self._cells.glob(".*.tmp"), *self.folder.glob("parts/.*.tmp")):
                    path.unlink(missing_ok=True)
            scan = self.scan()
            for name, reason in scan.problems.items():
                self._quarantine(name, reason)
            yield scan
            if shard is None:
                self.repeats.tidy()

    def _enter(
        self,
        matrix: Mapping[str, Any],
        environment: Environment,
        allow_mixed_env: bool,
        claims: Mapping[str, dict[str, Any]],
    ) -> None:
        """Note the matrix and the environment in `run.json`."""
        if self.exists:
            info = self.info()
            if info.environments and environment.digest not in info.environments and not allow_mixed_env:
                differing = differences(list(info.environments.values())[-1], environment)
                raise FolderError(
                    f"{self.folder}: measured in another environment ({'; '.join(differing)}). Numbers from two "
                    "environments do not compare: use another folder, or --allow-mixed-env to keep both apart in one"
                )
        else:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            info = RunInfo(created=now, version=attn_zoo.__version__)
        matrices = info.matrices if dict(matrix) in info.matrices else (*info.matrices, dict(matrix))
        if (before := info.environments.get(environment.digest)) is not None:
            environment = environment.following(before)
        environments = {**info.environments, environment.digest: environment}
        data = {
            "schema": SCHEMA_VERSION,
            "created": info.created,
            "version": info.version,
            "matrices": list(matrices),
            "environments": {digest: item.to_dict() for digest, item in environments.items()},
            "claims": {**info.claims, **claims},
        }
        write_whole(self._info, json.dumps(data, indent=1, sort_keys=True, allow_nan=False))

    def add_environment(self, environment: Environment) -> None:
        """Note one more environment: that of another machine of a cluster."""
        with hold_lock(self.folder, None, name=".lock-info", wait=True):
            info = self.info()
            self._enter(info.matrices[-1], environment, allow_mixed_env=True, claims={})

    def ceilings(self) -> tuple[Ceilings, ...]:
        """Return what machines could do before they timed anything; nothing in a folder of an older version.

        Raises:
            StoreError: the file cannot be read.
        """
        return read_ceilings(self.folder)

    def add_ceilings(self, ceilings: Iterable[Ceilings]) -> None:
        """Store ceilings; of what was measured before, the first stays."""
        first = {one.subject: one for one in (*ceilings, *self.ceilings())}
        data = {"schema": SCHEMA_VERSION, "ceilings": [first[subject].to_dict() for subject in sorted(first, key=str)]}
        write_whole(self._ceilings, json.dumps(data, indent=1, sort_keys=True, allow_nan=False))

    def write(self, record: Record) -> None:
        """Store a record, once and for all.

        Raises:
            StoreError: the disk is full or not writable, or there is a record of this cell already.
        """
        path = self._cells / f"{record.cell.key}.json"
        if path.exists():
            raise StoreError(f"{path}: there is a record of this cell already; nothing is overwritten")
        write_whole(path, record.to_json())

    def retire(self, key: str) -> None:
        """Move a record to `replaced`, so that its cell runs again."""
        move_aside(self._cells / f"{key}.json", self.folder / "replaced", key)

    def _quarantine(self, name: str, reason: str) -> None:
        target = self.folder / "quarantine"
        try:
            target.mkdir(exist_ok=True)
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
            (self._cells / name).rename(target / f"{stamp}-{name}")
            write_whole(target / f"{stamp}-{name}.reason", reason + "\n")
        except OSError as error:
            raise StoreError(f"{target}: cannot be written: {error.strerror}") from None
