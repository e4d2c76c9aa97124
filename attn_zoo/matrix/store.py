"""A results folder: `run.json`, one record per cell, logs. Each file is whole or absent, whatever happens and when.

run.json            the resolved matrices and every environment by digest
cells/<key>.json    one record; the file is the mark that the cell is done
logs/<key>.log      what the cell printed
replaced/           records that `retry` ran again
quarantine/         files in `cells` that are no records, each with its reason
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attn_zoo
from attn_zoo.errors import StoreError
from attn_zoo.matrix.files import FolderError, hold_lock, write_whole
from attn_zoo.records import SCHEMA_VERSION, Environment, Record

__all__ = ["RunInfo", "Scan", "Store"]

_KEY_DIGITS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What `run.json` holds.

    Args:
        schema: version of the form.
        created: UTC time, ISO 8601.
        version: of attn_zoo that created it.
        matrices: every matrix that was run into the folder, resolved, oldest first.
        environments: by digest.
        claims: by variant, what it says of its cost and exactness; reports print it without loading the variant.
    """

    schema: int = SCHEMA_VERSION
    created: str = ""
    version: str = ""
    matrices: tuple[dict[str, Any], ...] = ()
    environments: dict[str, Environment] = field(default_factory=dict)
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What lies in `cells`.

    Args:
        records: by key.
        problems: file name and why it is no record of ours.
    """

    records: dict[str, Record]
    problems: dict[str, str]


class Store:
    """A results folder. Making the object reads and writes nothing.

    Args:
        folder: existing or not.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.logs = self.folder / "logs"
        self.checkpoints = self.folder / "checkpoints"
        self._cells = self.folder / "cells"
        self._info = self.folder / "run.json"

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
        try:
            data = json.loads(self._info.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FolderError(f"{self.folder}: not a results folder (it has no run.json)") from None
        except (OSError, ValueError) as error:
            raise FolderError(f"{self._info}: cannot be read: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
            raise FolderError(f"{self._info}: not written by attn_zoo (it names no schema)")
        _refuse_newer(data["schema"], self._info)
        try:
            environments = {
                digest: Environment.from_dict(item, f"{self._info}: environments.{digest}")
                for digest, item in data["environments"].items()
            }
            return RunInfo(
                schema=data["schema"],
                created=data["created"],
                version=data["version"],
                matrices=tuple(data["matrices"]),
                environments=environments,
                claims=dict(data.get("claims") or {}),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise FolderError(f"{self._info}: damaged: {type(error).__name__} {error}") from None

    def scan(self) -> Scan:
        """Read all records; files that are none are reported and left where they are.

        Raises:
            StoreError: a newer version of this package wrote a record.
        """
        records: dict[str, Record] = {}
        problems: dict[str, str] = {}
        for path in sorted(self._cells.iterdir()) if self._cells.is_dir() else ():
            if path.name.startswith("."):
                continue  # being written, perhaps by another shard
            try:
                record = _read(path)
            except StoreError as error:
                if isinstance(error, FolderError):
                    raise
                problems[path.name] = str(error)
                continue
            records[record.cell.key] = record
        return Scan(records=records, problems=problems)

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
            if shard is None:  # nobody else writes: what a killed run left half-written is nobody's
                for path in self._cells.glob(".*.tmp"):
                    path.unlink(missing_ok=True)
            scan = self.scan()
            for name, reason in scan.problems.items():
                self._quarantine(name, reason)
            yield scan

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
                differing = _differences(list(info.environments.values())[-1], environment)
                raise FolderError(
                    f"{self.folder}: measured in another environment ({'; '.join(differing)}). Numbers from two "
                    "environments do not compare: use another folder, or --allow-mixed-env to keep both apart in one"
                )
        else:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            info = RunInfo(created=now, version=attn_zoo.__version__)
        matrices = info.matrices if dict(matrix) in info.matrices else (*info.matrices, dict(matrix))
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
        target = self.folder / "replaced"
        try:
            target.mkdir(exist_ok=True)
            number = len(list(target.glob(f"{key}-*.json"))) + 1
            (self._cells / f"{key}.json").rename(target / f"{key}-{number}.json")
        except OSError as error:
            raise StoreError(f"{target}: cannot be written: {error.strerror}") from None

    def _quarantine(self, name: str, reason: str) -> None:
        target = self.folder / "quarantine"
        try:
            target.mkdir(exist_ok=True)
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
            (self._cells / name).rename(target / f"{stamp}-{name}")
            write_whole(target / f"{stamp}-{name}.reason", reason + "\n")
        except OSError as error:
            raise StoreError(f"{target}: cannot be written: {error.strerror}") from None


def _refuse_newer(schema: int, source: Path) -> None:
    if schema > SCHEMA_VERSION:
        raise FolderError(
            f"{source}: written by a newer attn_zoo (schema {schema}; this one reads up to {SCHEMA_VERSION}): "
            "update attn_zoo, or use another folder"
        )


def _read(path: Path) -> Record:
    """Return the record in a file of `cells`; `StoreError` says why it is none."""
    if path.suffix != ".json" or len(path.stem) != _KEY_DIGITS:
        raise StoreError(f"not a record: left by an interrupted write or put here by hand ({path.name})")
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise StoreError(f"not a record: expected a JSON object; got {type(data).__name__}")
    if isinstance(data.get("schema"), int):
        _refuse_newer(data["schema"], path)
    record = Record.from_dict(data, "not a record")
    if record.cell.key != path.stem:
        raise StoreError(f"foreign: the cell inside has the key {record.cell.key}")
    return record


def _differences(old: Environment, new: Environment) -> list[str]:
    before, after = old.to_dict(), new.to_dict()
    texts = []
    for name in before:
        if before[name] == after[name] or name in {"commit", "is_dirty"}:
            continue
        if isinstance(before[name], dict):
            keys = sorted({*before[name], *after[name]})
            pairs = [(f"{name}.{key}", before[name].get(key), after[name].get(key)) for key in keys]
        else:
            pairs = [(name, before[name], after[name])]
        texts += [f"{key}: then {was}, now {now}" for key, was, now in pairs if was != now]
    return texts[:4] + (["..."] if len(texts) > 4 else [])
