"""A results folder: `run.json`, one record per cell, logs. Each file is whole or absent, whatever happens and when.

run.json            the resolved matrices, the cells they were to make, and every environment by digest
ceilings.json       what each machine could do before and after it timed anything
cells/<key>.json    one record; the file is the mark that the cell is done
parts/<key>-<n>.json  repeats of a cell that is not done; see `Repeats`
logs/<key>.log      what the cell printed
weights/            what was trained, one file per cell, where the matrix asks to keep it
sources/            plain files that variants of the run were loaded from
checkpoints/        state of trainings that have not ended
again/<run>/<key>   marks: the record of this cell is to be measured again, and stays until then
replaced/           records that were measured again; repeats of no use
quarantine/         files in `cells` that are no records, each with its reason
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attn_zoo
from attn_zoo.errors import FolderError, StoreError
from attn_zoo.folder import (
    WITHOUT_INFO,
    RunInfo,
    Scan,
    pack_cells,
    read_ceilings,
    read_info,
    read_record,
    record_text,
    scan_cells,
)
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.matrix.store.lock import hold_lock, wait_for_lock
from attn_zoo.records import SCHEMA_VERSION, Ceilings, Cell, Environment, Record
from attn_zoo.whole_files import refuse_links, whole_folder, write_whole


def _write(path: Path, content: str | bytes) -> None:
    """Write a file in the middle of a run, where a place that cannot be written is no mistake in the call."""
    try:
        write_whole(path, content)
    except FolderError as error:
        raise StoreError(str(error)) from None


def _write_new(path: Path, record: Record, what: str) -> None:
    if path.exists():
        raise StoreError(f"{path}: there is {what} already; nothing is overwritten")
    _write(path, record_text(record))


def _aside(folder: Path, key: str) -> Path:
    """Return the path `<key>-<n>.json` in a folder, where n counts what of this key is there."""
    return folder / f"{key}-{len(list(folder.glob(f'{key}-*.json'))) + 1}.json"


class Repeats:
    """Repeats of cells that are not complete. Making the object reads and writes nothing.

    They are no results. When the last repeat is done, the cell gets its one record in `cells` and they go; where one
    fails, the failure is the record and they move to `replaced`. Then nothing below reads them any more.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._replaced = folder / "parts", folder / "replaced"

    def _path(self, key: str, number: int) -> Path:
        return self._folder / f"{key}-{number}.json"

    def count(self) -> dict[str, int]:
        """Return how many repeats each cell has that has any, by key; without reading them."""
        return dict(Counter(path.name.partition("-")[0] for path in self._folder.glob("[!.]*-*.json")))

    def read(self, key: str) -> list[Record]:
        """Return the repeats of a cell, the first of them first.

        Raises:
            StoreError: a newer version of this package wrote one.
        """
        found: list[Record] = []
        while True:
            try:
                found.append(read_record(self._path(key, len(found) + 1), key))
            except StoreError as error:
                if isinstance(error, FolderError):
                    raise
                return found  # absent, or damaged: what comes after it is of no use

    def take(self, key: str, environments: Collection[str] | None, most: int) -> list[Record]:
        """Return the repeats of a cell that a run can go on from, and move its others to `replaced`.

        Args:
            key: of the cell.
            environments: digests that mean the one the next repeat will be measured in: repeats of others do not count;
                None where it follows the first repeat, to a machine like that one's.
            most: repeats that can be used.

        Raises:
            StoreError: a file cannot be moved, or a newer version of this package wrote it.
        """
        usable: list[Record] = []
        for record in self.read(key)[:most]:
            environments = {record.environment} if environments is None else environments
            if record.environment not in environments or record.status != "ok":
                break
            usable.append(record)
        self.retire(key, beyond=len(usable))
        return usable

    def write(self, record: Record, number: int) -> None:
        """Store a repeat, counted from 1.

        Raises:
            StoreError: the disk is full or not writable, or there is this repeat already.
        """
        _write_new(self._path(record.cell.key, number), record, "this repeat")

    def drop(self, key: str) -> None:
        """Delete the repeats of a cell, all of which are in its record."""
        with suppress(OSError):  # what is left does no harm: nothing reads it any more
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
                try:
                    self._replaced.mkdir(exist_ok=True)
                    path.rename(_aside(self._replaced, key))
                except OSError as error:
                    raise StoreError(f"{self._replaced}: cannot be written: {error.strerror}") from None

    def tidy(self) -> None:
        """Remove the folder if nothing is left in it; only for a run that has the results folder for itself."""
        with suppress(OSError):
            self._folder.rmdir()

    def _of(self, key: str) -> list[Path]:
        return sorted(self._folder.glob(f"{key}-*.json"))


def _is_beginning(path: Path) -> bool:
    """Tell whether this is what a run leaves that could not write its `run.json`."""
    if path.name in {"cells", "logs"} and path.is_dir():
        return not any(path.iterdir())
    return path.name.startswith(".lock") or path.match(".run.json-*.tmp")


def _asked(cell: Cell) -> tuple[str, int | None]:
    """Return what is equal for cells that ask the same of other sources or data; ids are not: they leave sizes out."""
    return cell.all_but("seq_len", "together", *_SOURCES), cell.seq_len


def _sources(cell: Cell) -> tuple[object, ...]:
    return tuple(getattr(cell, name) for name in _SOURCES)


_SOURCES = ("variant_digest", "data_digest", "protocol_version")


def _followed(earlier: Sequence[Cell], planned: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return the cells of earlier runs, then those of this one; where sources or data changed, the new one stands."""
    keys = {cell.key for cell in planned}
    if not (others := [cell for cell in earlier if cell.key not in keys]):
        return tuple(planned)
    today = {_asked(cell): _sources(cell) for cell in planned}
    changed = [cell for cell in others if today.get(_asked(cell), _sources(cell)) != _sources(cell)]
    gone = {cell.key for cell in changed}
    turns = {(cell.together, cell.seq_len) for cell in changed if cell.together}  # nobody times these any more
    kept = (cell for cell in others if cell.key not in gone and (cell.together, cell.seq_len) not in turns)
    return (*kept, *planned)


def with_known_data(items: Iterable[PlannedCell], planned: Iterable[Cell]) -> list[PlannedCell]:
    """Return the items; those without their data here with the digest that earlier runs found: they are the same."""
    known = {_asked(cell): cell.data_digest for cell in planned if cell.data_digest}

    def with_data(item: PlannedCell) -> PlannedCell:
        # Without data nothing runs; what refuses a cell may be something else, which is said first.
        if item.refusal is None or item.cell.data_digest or not (digest := known.get(_asked(item.cell))):
            return item
        return replace(item, cell=replace(item.cell, data_digest=digest))

    return [with_data(item) for item in items] if known else list(items)


def asked_before(items: Iterable[PlannedCell], planned: Iterable[Cell], done: Collection[str]) -> list[PlannedCell]:
    """Return what earlier runs were to make, of all that their matrices say today. They may have been parts."""
    items, planned = list(items), list(planned)
    today = {item.cell.key for item in items}
    keys = {cell.key for cell in planned}.union(done)
    changed = {_asked(cell) for cell in planned if cell.key not in today}
    if not changed.issubset({_asked(item.cell) for item in items} if changed else ()):
        return items  # another version of this package planned them: which part of today's they were is not known
    return [item for item in items if item.cell.key in keys or (changed and _asked(item.cell) in changed)]


class Store:
    """A results folder. Making the object reads and writes nothing.

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
        self._again = self.folder / "again"
        self._info = self.folder / "run.json"
        self._ceilings = self.folder / "ceilings.json"

    @property
    def exists(self) -> bool:
        """Whether there is a results folder here already."""
        return self._info.is_file()

    def check(self) -> None:
        """Raise `StoreError` unless the folder is absent, empty, or a results folder we can read."""
        if self.exists:
            self.info(has_plan=False)
        elif self.folder.is_dir():
            foreign = sorted(item.name for item in self.folder.iterdir() if not _is_beginning(item))
            if foreign:
                names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
                raise FolderError(
                    f"{self.folder}: not a results folder: it has no run.json but holds {names}; choose another folder"
                )
        elif self.folder.exists() or self.folder.is_symlink():
            raise FolderError(f"{self.folder}: expected a folder for results; there is a file of this name")

    def info(self, *, has_plan: bool = True) -> RunInfo:
        """Return what `run.json` says, where `has_plan` with the planned cells, of which there may be very many.

        Raises:
            StoreError: there is none, it is damaged, or a newer version of this package wrote it.
        """
        info = read_info(self.folder, has_plan=has_plan)
        if info.problems:
            raise FolderError(f"{self.folder}: {info.problems[0]}; {WITHOUT_INFO}")
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
        environment: Environment | None,
        *,
        allow_mixed_env: bool = False,
        shard: tuple[int, int] | None = None,
        is_whole: bool = False,
        claims: Mapping[str, dict[str, Any]] | None = None,
        planned: Sequence[Cell] = (),
    ) -> Iterator[Scan]:
        """Hold the folder for one run: create or resume it, put what is no record into quarantine, yield the records.

        Shards hold locks of their own and share the folder: their cells differ.

        Args:
            matrix: resolved.
            environment: of this machine; None if it measures nothing.
            allow_mixed_env: go on in a folder of another environment.
            shard: which part of the matrix this run is, or None if it is none that others complete.
            is_whole: it is of all cells of the matrix.
            claims: of the variants.
            planned: cells that the run is to make. They are noted beside those of earlier runs; where the source or the
                data of one changed, the new one takes the place of the old.

        Raises:
            StoreError: no results folder, not writable, another run is at it, or another environment.
        """
        self.check()
        refuse_links(self.folder)
        try:
            for folder in (self.folder, self._cells, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(f"{self.folder}: cannot be written: {error.strerror}") from None
        with hold_lock(self.folder, shard):
            with wait_for_lock(self.folder / ".lock-info"):
                ran = (1, 1) if is_whole else shard
                self._enter(matrix, environment, allow_mixed_env, claims or {}, tuple(planned), ran)
            if shard is None:  # nobody else writes, so these were left by a killed run
                for pattern in (".run.json-*.tmp", ".ceilings.json-*.tmp", "cells/.*.tmp", "parts/.*.tmp"):
                    for path in self.folder.glob(pattern):
                        path.unlink(missing_ok=True)
            scan = self.scan()
            for name, reason in scan.problems.items():
                self._quarantine(name, reason)
            yield scan
            if shard is None:
                self.repeats.tidy()
                with suppress(OSError):  # marks are left
                    self._again.rmdir()

    def _enter(
        self,
        matrix: Mapping[str, Any],
        environment: Environment | None,
        allow_mixed_env: bool,
        claims: Mapping[str, dict[str, Any]],
        planned: Sequence[Cell] = (),
        ran: tuple[int, int] | None = None,
    ) -> None:
        """Note matrix, environment, plan and shard in `run.json`."""
        if self.exists:
            info = self.info()
            if environment is not None and not allow_mixed_env and (problem := info.refusal(environment)):
                raise FolderError(f"{self.folder}: {problem}")
        else:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            info = RunInfo(created=now, version=attn_zoo.__version__, planned=(), shards=())
        matrices = info.matrices if dict(matrix) in info.matrices else (*info.matrices, dict(matrix))
        environments = dict(info.environments)
        if environment is not None:
            before = environments.get(digest := environment.digest)
            environments[digest] = environment if before is None else environment.following(before)
        cells = None
        if info.planned is not None:  # else the folder began under a version that noted no plan, and stays unknown
            cells = _followed(info.planned, planned)
        shards = info.shards
        if shards is not None and ran is not None:  # likewise
            shards = tuple(dict.fromkeys((*shards, (str(matrix.get("name")), *ran))))
        claimed = {**info.claims, **claims}
        entered = replace(info, matrices=matrices, environments=environments, claims=claimed, stopped="")
        entered = replace(entered, planned=cells, shards=shards)
        if entered != info or not self.exists:
            self.write_info(entered)

    def write_info(self, info: RunInfo) -> None:
        """Write `run.json`, over the one that is there."""
        data = {
            "schema": SCHEMA_VERSION,
            "created": info.created,
            "version": info.version,
            "matrices": list(info.matrices),
            "environments": {digest: item.to_dict() for digest, item in info.environments.items()},
            "claims": info.claims,
            "stopped": info.stopped,
            **({} if info.planned is None else {"planned": pack_cells(info.planned)}),
            **({} if info.shards is None else {"shards": info.shards}),
        }
        write_whole(self._info, json.dumps(data, indent=1, sort_keys=True, allow_nan=False))

    def note_end(self, stopped: str) -> None:
        """Note in `run.json` why a run ended early; empty where it did not."""
        with wait_for_lock(self.folder / ".lock-info"):
            self.write_info(replace(self.info(), stopped=stopped))

    def add_environment(self, environment: Environment) -> None:
        """Note one more environment: that of another machine of a cluster."""
        with wait_for_lock(self.folder / ".lock-info"):
            info = self.info(has_plan=False)
            self._enter(info.matrices[-1], environment, allow_mixed_env=True, claims={})

    def ceilings(self) -> tuple[Ceilings, ...]:
        """Return what machines could do before they timed anything; nothing in a folder of an older version.

        Raises:
            FolderError: the file cannot be used.
        """
        return read_ceilings(self.folder)

    def add_ceilings(self, ceilings: Iterable[Ceilings]) -> None:
        """Store ceilings; of what was measured several times, the fastest."""
        best: dict[tuple[str, str, str, int | None], Ceilings] = {}
        for one in (*self.ceilings(), *ceilings):
            best[one.subject] = best.get(one.subject, one).or_faster(one)
        data = {"schema": SCHEMA_VERSION, "ceilings": [best[subject].to_dict() for subject in sorted(best, key=str)]}
        write_whole(self._ceilings, json.dumps(data, indent=1, sort_keys=True, allow_nan=False))

    def mark_again(self, statuses: Iterable[str], planned: Sequence[Cell], keys: Collection[str]) -> None:
        """Mark records that are to be measured again. Each stays, and is what is read, until `write` has the next one.

        Where marks are left of another run that asked for the same, that one was interrupted: nothing more is marked,
        so that this run goes on from there.

        Args:
            statuses: that the run measures again.
            planned: its cells.
            keys: of those whose records have such a status.

        Raises:
            StoreError: not writable.
        """
        if not keys:
            return
        text = "\n".join([*sorted(statuses), *sorted(str(_asked(cell)) for cell in planned)])
        marks = self._again / hashlib.sha256(text.encode()).hexdigest()[:16]
        if any((marks / cell.key).exists() for cell in planned):
            return
        shutil.rmtree(marks, ignore_errors=True)  # those of sources that changed since
        with whole_folder(marks) as folder:
            for key in keys:
                (folder / key).touch()

    def marked_again(self) -> set[str]:
        """Return the keys of cells that are to be measured again."""
        return {mark.name for mark in self._again.glob("[!.]*/*")}

    def write(self, record: Record) -> None:
        """Store a record, once and for all; one that it was marked to follow is kept in `replaced`.

        Raises:
            StoreError: the disk is full or not writable, or there is a record of this cell already.
        """
        key = record.cell.key
        path, marks = self._cells / f"{key}.json", list(self._again.glob(f"[!.]*/{key}"))
        if marks and path.exists():
            text = record_text(record)
            _write(_aside(self.folder / "replaced", key), path.read_bytes())
            _write(path, text)
        else:
            _write_new(path, record, "a record of this cell")
        for mark in marks:
            with suppress(OSError):  # the last one of its run takes the folder with it
                mark.unlink()
                mark.parent.rmdir()

    def _quarantine(self, name: str, reason: str) -> None:
        target = self.folder / "quarantine"
        try:
            target.mkdir(exist_ok=True)
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
            (self._cells / name).rename(target / f"{stamp}-{name}")
            write_whole(target / f"{stamp}-{name}.reason", reason + "\n")
        except FileNotFoundError:
            return  # another shard was first
        except OSError as error:
            raise StoreError(f"{target}: cannot be written: {error.strerror}") from None
