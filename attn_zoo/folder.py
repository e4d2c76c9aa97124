"""A results folder, read: for the driver, the report and Python alike. Nothing is written here; no torch.

`run.json` holds the matrices, environments and claims, `ceilings.json` what the machines could do, `cells/<key>.json`
one record each; `attn_zoo.matrix.store.store` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

from attn_zoo.errors import ConfigError, FolderError, StoreError
from attn_zoo.records import SCHEMA_VERSION, Ceilings, Cell, Environment, Record, checksum
from attn_zoo.whole_files import read_regular

MAX_BYTES = 2**28
"""Of a file of ours. The largest records hold the answers to all items of a test set, some megabytes."""
MOST_READ = 20_000
"""Records of a folder that are all read, even if some would do."""
WITHOUT_INFO = "to go on, run the same matrix into a new folder with --time-limit 0 and copy all but run.json there"
"""What to do with a folder whose `run.json` is damaged."""
_MOST_SHARDS = 5
"""That a sentence names."""

Choose = Callable[[Iterable[Cell]], Callable[[Cell], bool]]
"""From all cells of a folder that have a record, what tells which of them are wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a variant says about itself, as stored with the run: a report never loads a variant.

    Args:
        time_exponent: power of the sequence length that time grows with.
        memory_exponent: likewise for memory, inputs and outputs included.
        is_exact: equals softmax attention up to rounding, so it can serve as a baseline.
        routing_sees_future: its causal form masks every query, but decides with knowledge of the future which keys a
            query may choose from. False in runs of older versions.
        is_control: no mechanism, but what a model does without one. False in runs of older versions.
        depends_on_padding: what it computes of an example may depend on how far its batch is padded. Likewise.
    """

    time_exponent: float | None = None
    memory_exponent: float | None = None
    is_exact: bool = False
    routing_sees_future: bool = False
    is_control: bool = False
    depends_on_padding: bool = False


RunShard = tuple[str, int, int]
"""Name of a matrix, I and N of a run of its I-th of N parts; 1 of 1 is a run of all."""


def missing_shards(shards: Iterable[RunShard]) -> str:
    """Return which shards have not run, of matrices of which others have, in words; empty where none is missing.

    >>> missing_shards([("quick", 1, 3), ("quick", 2, 3)])
    'shard 3 of 3 has not run here'
    """
    ran: dict[str, dict[int, set[int]]] = {}
    for name, index, count in shards:
        ran.setdefault(name, {}).setdefault(count, set()).add(index)
    said = []
    for name, by_count in ran.items():
        if any(len(found) == count for count, found in by_count.items()):
            continue  # that is all of the matrix
        for count, found in by_count.items():
            number, left = count - len(found), (str(each) for each in range(1, count + 1) if each not in found)
            which = f"shard{'s' * (number > 1)} {', '.join(islice(left, _MOST_SHARDS))}"
            more = f" and {number - _MOST_SHARDS} more" if number > _MOST_SHARDS else ""
            of = f"{count} of {name}" if len(ran) > 1 else f"{count}"
            said.append(f"{which}{more} of {of} {'has' if number == 1 else 'have'} not run here")
    return "; ".join(said)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What `run.json` holds.

    Args:
        schema: version of the form.
        created: UTC time, ISO 8601.
        version: of attn_zoo that created it.
        matrices: every matrix that was run into the folder, resolved, oldest first.
        environments: by the digest that records name.
        claims: by variant, as stored; see `Claim`.
        planned: cells that the runs into the folder were to make; None where the folder does not say.
        shards: what the runs were of; None where the folder does not say.
        stopped: why the last of these runs ended early, in words; empty where it did not, or was killed.
        problems: what could not be read, one sentence each.
    """

    schema: int = SCHEMA_VERSION
    created: str = ""
    version: str = ""
    matrices: tuple[dict[str, Any], ...] = ()
    environments: dict[str, Environment] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)
    planned: tuple[Cell, ...] | None = None
    shards: tuple[RunShard, ...] | None = None
    stopped: str = ""
    problems: tuple[str, ...] = ()

    @property
    def missing_shards(self) -> str:
        """Which shards have not run, in words; see `missing_shards`."""
        return missing_shards(self.shards or ())

    def names_of(self, digest: str) -> frozenset[str]:
        """Return the digests that records name and that mean this environment today.

        Folders of older versions have one for each host, however alike they are.
        """
        return frozenset({digest, *(name for name, one in self.environments.items() if one.digest == digest)})

    def refusal(self, environment: Environment) -> str:
        """Return why what is measured in an environment does not belong here; empty where it does."""
        known = list(self.environments.values())
        if not known or environment.digest in {one.digest for one in known}:
            return ""
        return (
            f"measured in another environment ({'; '.join(differences(known[-1], environment))}). Numbers from two "
            "environments do not compare: use another folder, or --allow-mixed-env to keep both apart in one"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What lies in `cells`.

    Args:
        records: by the stem of their file, which is the cell's key.
        problems: file name and why it is no record of ours.
    """

    records: dict[str, Record]
    problems: dict[str, str]


def _is_cell(_: Cell) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A whole results folder.

    Args:
        name: of the run, for people.
        matrices: what was run into the folder, resolved, oldest first.
        environments: by digest.
        environment_names: digests that the files of the folder name, by the one that stands for them today.
        claims: by variant.
        ceilings: what the machines could do; empty in folders of older versions.
        records: what could be read, ordered by key.
        begun: repeats of cells that have no record yet, as not all of their processes have run.
        planned: how many cells it was to have; None where the folder does not say, as those of older versions.
        left: planned cells that have no record.
        shards: what the runs into it were of; empty where the folder does not say.
        num_unread: records that were not wanted.
        is_wanted: tells of a cell whether its record was.
        strays: keys of records that are of no planned cell.
        foreign: of files of `cells` named after another cell, the key of the one inside, if no file is named after it.
        stopped: why the last run into the folder ended early, in words; empty where it did not, or was killed.
        problems: files that could not be read, or not as a whole, each with a reason.
        warnings: the same for people, one sentence each.
    """

    name: str
    matrices: tuple[Mapping[str, Any], ...] = ()
    environments: Mapping[str, Environment] = field(default_factory=dict)
    environment_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    claims: Mapping[str, Claim] = field(default_factory=dict)
    ceilings: tuple[Ceilings, ...] = ()
    records: tuple[Record, ...] = ()
    begun: tuple[Record, ...] = ()
    planned: int | None = None
    left: tuple[Cell, ...] = ()
    shards: tuple[RunShard, ...] = ()
    num_unread: int = 0
    is_wanted: Callable[[Cell], bool] = _is_cell
    strays: frozenset[str] = frozenset()
    foreign: Mapping[str, str] = field(default_factory=dict)
    stopped: str = ""
    problems: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


def read_run(folder: str | Path, choose: Choose | None = None) -> Run:
    """Read a results folder; parts that cannot be read become warnings.

    Args:
        folder: the results folder.
        choose: of more than `MOST_READ` records only those that it wants are read, where the folder names its cells.

    Raises:
        ConfigError: `folder` is not a results folder, or its `run.json` cannot be read.
    """
    folder = Path(folder)
    try:
        info = read_info(folder)
    except FolderError as error:
        raise ConfigError("", [("", str(error))]) from None
    problems = [("run.json", problem.removeprefix("run.json: ")) for problem in info.problems]
    claims = {}
    for variant, entry in info.claims.items():
        if isinstance(entry, dict):
            claims[variant] = _claim(entry)
        else:
            problems.append(("run.json", f"the claim of {variant} was skipped: expected an object"))
    ceilings: tuple[Ceilings, ...] = ()
    try:
        ceilings = read_ceilings(folder)
    except FolderError as error:
        problems.append(("ceilings.json", str(error)))
    is_wanted: Callable[[Cell], bool] = _is_cell
    unread = frozenset[str]()
    stems = {path.stem for path in cell_files(folder)} if choose and info.planned else set()
    if choose and info.planned and len(stems) > MOST_READ:
        there = [cell for cell in info.planned if cell.key in stems]
        is_wanted = choose(there)
        unread = frozenset(cell.key for cell in there if not is_wanted(cell))
    # Keys of old records may be made otherwise today, and newer ones are no reason to show nothing.
    scan = scan_cells(folder, is_strict=False, skip=unread)
    problems += [(f"cells/{name}", problem) for name, problem in scan.problems.items()]
    keys = {name: record.cell.key for name, record in scan.records.items()}
    # What keeps folders in step writes `KEY (1).json` beside a file: pooled, it would count as a further process.
    second = {name: key for name, key in keys.items() if key != name and keys.get(key) == key}
    problems += [(f"cells/{name}.json", f"a second record of the cell of {key}.json") for name, key in second.items()]
    records = {name: record for name, record in scan.records.items() if name not in second}
    begun = []
    for path in sorted((folder / "parts").glob("[!.]*-*.json")):
        if path.stem.partition("-")[0] in scan.records.keys() | unread:
            continue
        try:
            begun.append(read_record(path))
        except StoreError as error:
            problems.append((f"parts/{path.name}", str(error)))
    names = dict.fromkeys(str(matrix["name"]) for matrix in info.matrices if matrix.get("name"))
    today = {name: one.digest for name, one in info.environments.items()}
    planned = {cell.key for cell in info.planned or ()}
    return Run(
        name=" + ".join(names) or folder.resolve().name,
        matrices=info.matrices,
        environments={one.digest: one for one in info.environments.values()},
        environment_names={
            digest: tuple(sorted(name for name, own in today.items() if own == digest)) for digest in today.values()
        },
        claims=claims,
        ceilings=tuple(_renamed(ceilings, today)),
        records=tuple(_renamed(records.values(), today)),
        begun=tuple(_renamed(begun, today)),
        planned=None if info.planned is None else len(info.planned),
        left=tuple(cell for cell in info.planned or () if cell.key not in scan.records and cell.key not in unread),
        shards=info.shards or (),
        num_unread=len(unread),
        is_wanted=is_wanted,
        strays=frozenset() if info.planned is None else frozenset(keys.values()) - planned,
        foreign={f"{name}.json": key for name, key in keys.items() if key != name and name not in second},
        stopped=info.stopped,
        problems=tuple(problems),
        warnings=tuple(
            f"{folder.name}/{name}{':' if name == 'run.json' else ' was skipped:'} {problem}"
            for name, problem in problems
        ),
    )


_Named = TypeVar("_Named", Record, Ceilings)


def _renamed(entries: Iterable[_Named], today: Mapping[str, str]) -> Iterator[_Named]:
    """Yield records or ceilings with the digest that their environment has today."""
    for one in entries:
        name = today.get(one.environment, one.environment)
        yield one if name == one.environment else replace(one, environment=name)


def _claim(entry: Mapping[str, Any]) -> Claim:
    def exponent(name: str) -> float | None:
        value = entry.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    return Claim(
        time_exponent=exponent("time_exponent"),
        memory_exponent=exponent("memory_exponent"),
        is_exact=entry.get("is_exact") is True,
        routing_sees_future=entry.get("routing_sees_future") is True,
        is_control=entry.get("is_control") is True,
        depends_on_padding=entry.get("depends_on_padding") is True,
    )


def read_info(folder: Path, *, has_plan: bool = True) -> RunInfo:
    """Return what `run.json` of a folder says, where `has_plan` with the planned cells.

    Raises:
        FolderError: there is none, it is damaged, or a newer version of this package wrote it.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise FolderError(f"{folder}: {not_a_results_folder(folder)}")
    try:
        data = _read_object(path)
    except StoreError as error:
        raise FolderError(f"{path}: {error}; {WITHOUT_INFO}") from None
    if not isinstance(data.get("schema"), int):
        raise FolderError(f"{path}: not written by attn_zoo (it names no schema)")
    _refuse_newer(data["schema"], path)
    environments, problems, planned = {}, [], None
    try:
        planned = unpack_cells(data["planned"]) if has_plan and "planned" in data else None
    except (StoreError, KeyError, TypeError, ValueError) as error:
        problems.append(f"run.json: the planned cells cannot be read: {error}")
    try:
        for digest, entry in data["environments"].items():
            try:
                environments[digest] = Environment.from_dict(entry if isinstance(entry, dict) else {})
            except StoreError as error:
                problems.append(f"run.json: environment {digest} cannot be read: {error}")
        return RunInfo(
            schema=data["schema"],
            created=str(data["created"]),
            version=str(data["version"]),
            matrices=tuple(matrix for matrix in data["matrices"] if isinstance(matrix, dict)),
            environments=environments,
            claims=dict(data.get("claims") or {}),
            planned=planned,
            shards=_read_shards(data["shards"]) if "shards" in data else None,
            stopped=str(data.get("stopped") or ""),
            problems=tuple(problems),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FolderError(f"{path}: damaged: {type(error).__name__} {error}; {WITHOUT_INFO}") from None


def _read_shards(entries: Iterable[Any]) -> tuple[RunShard, ...]:
    shards = tuple((str(name), int(index), int(count)) for name, index, count in entries)
    if wrong := [shard for shard in shards if not 1 <= shard[1] <= shard[2]]:
        raise ValueError(f"there is no shard {wrong[0][1]} of {wrong[0][2]}")
    return shards


def pack_cells(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Return cells as plain data: what those have in common that differ in length and seed is said once.

    Fields that have their default are left out, but for the version, whose default changes.

    >>> pack_cells([Cell(kind="scaling", variant="full", seq_len=n, protocol_version=4) for n in (512, 1024)])
    [{'cell': {'kind': 'scaling', 'variant': 'full', 'protocol_version': 4}, 'at': [[512, 0], [1024, 0]]}]
    """
    groups: dict[str, dict[str, Any]] = {}
    of_curve: dict[str, dict[str, Any]] = {}
    for cell in cells:
        if (curve := cell.curve) not in of_curve:
            common = {
                name: value
                for name, value in cell.to_dict().items()
                if name not in {"seq_len", "seed"} and (name == "protocol_version" or value != _DEFAULTS[name])
            }
            text = json.dumps(common, sort_keys=True)
            of_curve[curve] = groups.setdefault(text, {"cell": common, "at": []})
        of_curve[curve]["at"].append([cell.seq_len, cell.seed])
    return list(groups.values())


_DEFAULTS = Cell(kind="", variant="").to_dict()


def unpack_cells(groups: Iterable[Mapping[str, Any]]) -> tuple[Cell, ...]:
    """Return the cells that `pack_cells` made plain data of.

    Raises:
        StoreError: a field is unknown or of another type.
    """
    return tuple(cell for group in groups for cell in _unpack(group))


def _unpack(group: Mapping[str, Any]) -> Iterator[Cell]:
    last: Cell | None = None
    for seq_len, seed in group["at"]:
        if last is not None and seed == last.seed and type(seq_len) is int and 0 < seq_len < 2**63:
            last = last.at(seq_len)  # in no need of being checked
        else:
            last = Cell.from_dict({**group["cell"], "seq_len": seq_len, "seed": seed})
        yield last


def not_a_results_folder(folder: Path) -> str:
    """Return why a path is none, and where one is."""
    if not folder.exists():
        return "not a results folder: no such directory"
    if not folder.is_dir():
        others = "packed runs (.zip), exports (.csv, .jsonl, .parquet) and JSON of pytest-benchmark"
        return f"expected a results folder; got a file (report, compare and export open {others} too)"
    runs = [
        str(head.parent.relative_to(folder))
        for level in ("*", "*/*")
        for head in sorted(folder.glob(f"{level}/run.json"))
    ]
    hint = f"; it contains {', '.join(runs[:3])}: name one of these" if runs else ""
    return f"not a results folder: it has no run.json{hint}"


def _refuse_unheld(values: Iterable[Any]) -> None:
    """Raise `ValueError` for a number in JSON, however deep, that 64 bits cannot hold."""
    for value in values:
        kind = type(value)
        if kind is float or kind is int:
            if not -_LIMIT < value < _LIMIT and (kind is int or math.isinf(value)):
                what = "an integer" if kind is int else "a number"
                raise ValueError(f"{what} of 64 bits cannot hold {str(value)[:25]}")
        elif kind is list:
            _refuse_unheld(value)
        elif kind is dict:
            _refuse_unheld(value.values())


_LIMIT = 2**63


def _parsed(content: str | bytes) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: it is no JSON, or tables or files of UTF-8 could not hold what it says.
    """
    data = from_json(content, allow_inf_nan=False)
    _refuse_unheld([data])
    return data


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file: whatever it holds, tables and UTF-8 files can hold too."""
    try:
        data = _parsed(read_regular(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"not readable as JSON ({type(error).__name__}: {error})") from None
    if not isinstance(data, dict):
        raise StoreError(f"expected a JSON object; got {type(data).__name__}")
    return data


def _refuse_newer(schema: int, source: Path) -> None:
    if schema > SCHEMA_VERSION:
        raise FolderError(
            f"{source}: written by a newer attn_zoo (schema {schema}; this one reads up to {SCHEMA_VERSION}): "
            "update attn_zoo, or use another folder"
        )


def read_ceilings(folder: Path) -> tuple[Ceilings, ...]:
    """Return what `ceilings.json` of a folder says; nothing where there is none.

    Raises:
        FolderError: it cannot be used.
    """
    path = folder / "ceilings.json"
    if not path.exists():
        return ()
    try:
        entries = _read_object(path).get("ceilings")
        if not isinstance(entries, list):
            raise StoreError('expected an object with a list "ceilings"')  # noqa: TRY301 - told as the others are
        return tuple(Ceilings.from_dict(entry if isinstance(entry, dict) else {}, "an entry") for entry in entries)
    except StoreError as error:
        raise FolderError(f"{path}: {error}") from None


def record_text(record: Record) -> str:
    """Return what `read_record` reads: the record with a checksum, so that a bit that flips on a disk is noticed.

    Raises:
        StoreError: a number is not finite, or text is not Unicode.
    """
    try:
        data = json.loads(record.to_json())
        text = json.dumps({**data, "checksum": checksum(data)}, sort_keys=True, indent=1)
        _parsed(text)  # what could not be read again is not stored
    except ValueError as error:
        raise StoreError(f"{record.cell.id}: cannot be stored ({error})") from None
    return text


def read_record(path: Path, key: str = "") -> Record:
    """Return the record in a file. Those of older versions have no checksum.

    Args:
        path: of the file.
        key: that its cell must have; empty where any will do: keys of old records may be made otherwise today.

    Raises:
        StoreError: it is no record, or not the one of that key.
        FolderError: a newer version of this package wrote it.
    """
    if path.suffix != ".json":
        raise StoreError(f"not a record: left by an interrupted write or put here by hand ({path.name})")
    data = _read_object(path)
    if isinstance(data.get("schema"), int):
        _refuse_newer(data["schema"], path)
    record = Record.from_dict(data, "not a record")
    if key and record.cell.key != key:
        raise StoreError(f"foreign: the cell inside has the key {record.cell.key}")
    return record


def cell_files(folder: Path) -> list[Path]:
    """Return the files of `cells`, sorted; hidden ones are being written, perhaps by another shard."""
    cells = folder / "cells"
    paths = sorted(cells.iterdir(), key=lambda path: path.name) if cells.is_dir() else []
    return [path for path in paths if path.name[0] != "."]


def scan_cells(
    folder: Path,
    *,
    is_strict: bool = True,
    skip: Container[str] = (),
) -> Scan:
    """Read all records.

    Args:
        folder: results folder.
        is_strict: each must be the one its file is named after, and of no newer version.
        skip: stems of files that are left out.

    Raises:
        FolderError: a newer version of this package wrote a record, and `is_strict`.
    """
    records: dict[str, Record] = {}
    problems: dict[str, str] = {}
    for path in cell_files(folder):
        if path.stem in skip:
            continue
        try:
            records[path.stem] = read_record(path, path.stem if is_strict else "")
        except StoreError as error:
            if is_strict and isinstance(error, FolderError):
                raise
            if path.exists() or path.is_symlink():  # else another shard moved it aside meanwhile
                problems[path.name] = str(error)
    return Scan(records=records, problems=problems)


def differences(old: Environment, new: Environment) -> list[str]:
    """Return what differs between two environments, for people; at most a few items."""
    before, after = old.deciding(), new.deciding()
    texts = []
    for name in before:
        if before[name] == after[name]:
            continue
        if isinstance(before[name], dict):
            keys = sorted({*before[name], *after[name]})
            pairs = [(f"{name}.{key}", before[name].get(key), after[name].get(key)) for key in keys]
        else:
            pairs = [(name, before[name], after[name])]
        texts += [f"{key}: then {was}, now {now}" for key, was, now in pairs if was != now]
    return texts[:4] + (["..."] if len(texts) > 4 else [])
