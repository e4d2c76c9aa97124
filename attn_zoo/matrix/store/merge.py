"""Results folders of one plan made one: shards of a matrix that ran on several machines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from attn_zoo.errors import ConfigError
from attn_zoo.folder import RunInfo
from attn_zoo.matrix.store.store import Store
from attn_zoo.packed_run import opened
from attn_zoo.records import Environment, Record
from attn_zoo.whole_files import whole_folder

_KEPT = ("logs", "weights", "sources", "checkpoints")


def merge(sources: Iterable[str | Path], out: str | Path) -> Path:
    """Write a new results folder with the records of several, and return its path.

    All must have run the same matrices from the same sources. A record that several have is kept once; where two differ
    the cell was measured twice, and nothing here chooses. Machines stay apart, as everywhere, by their environments.
    Repeats of a cell that no shard has completed are kept likewise, and so are checkpoints of trainings, which packed
    runs have not: a run into the merged folder goes on from them.

    Args:
        sources: results folders or packed runs, one for each shard.
        out: folder to make.

    Raises:
        ConfigError: fewer than two, or one twice; they are of other plans, or a cell has two records.
        StoreError: one is no results folder or has a record that cannot be read; `out` exists or cannot be written.
    """
    paths = [Path(source) for source in ([sources] if isinstance(sources, str) else sources)]
    if len(paths) < 2:
        raise ConfigError("merge", [("", f"expected two results folders or more; got {len(paths)}")])
    for place, path in enumerate(paths):
        if path.resolve() in {other.resolve() for other in paths[:place]}:
            raise ConfigError("merge", [("", f"expected each folder once; got {path} twice")])
    with ExitStack() as stack:
        stores = {path: Store(stack.enter_context(opened(path))) for path in paths}
        infos = {path: store.info() for path, store in stores.items()}
        _refuse_other_plans(infos)
        records = _union({path: _records(path, store) for path, store in stores.items()})
        with whole_folder(Path(out)) as folder:
            merged = Store(folder)
            merged.write_info(_merged_info(list(infos.values())))
            merged.add_ceilings(one for store in stores.values() for one in store.ceilings())
            for (key, number), record in records.items():
                if number == 0:
                    merged.write(record)
                elif (key, 0) not in records:
                    merged.repeats.write(record, number)
            for store in stores.values():
                for name in _KEPT:
                    if (store.folder / name).is_dir():
                        shutil.copytree(store.folder / name, folder / name, ignore=_links, dirs_exist_ok=True)
    return Path(out)


def _links(folder: str, names: list[str]) -> list[str]:
    """Return what is not copied: a link may lead anywhere."""
    return [name for name in names if (Path(folder) / name).is_symlink()]


def _refuse_other_plans(infos: Mapping[Path, RunInfo]) -> None:
    (first, info), *others = infos.items()
    for path, other in others:
        one, two = ({json.dumps(matrix, sort_keys=True) for matrix in each.matrices} for each in (info, other))
        if one == two:
            continue
        names = [sorted({str(matrix.get("name")) for matrix in each.matrices}) for each in (info, other)]
        if names[0] == names[1]:
            both = list(zip(info.matrices, other.matrices, strict=False))
            fields = sorted({name for a, b in both for name in {*a, *b} if a.get(name) != b.get(name)})
            why = f"their matrices differ in {', '.join(fields) or 'number'}"
        else:
            why = f"one has the matrix {', '.join(names[0])}, the other {', '.join(names[1])}"
        raise ConfigError("merge", [("", f"expected shards of one plan; {first} and {path} are not: {why}")])


_Place = tuple[str, int]
"""Key of a cell, and which of its repeats; 0 for its record."""


def _records(path: Path, store: Store) -> dict[_Place, Record]:
    scan = store.scan()
    for name, reason in scan.problems.items():
        raise ConfigError("merge", [("", f"{path}/cells/{name} is no record: {reason}")])
    found = {(key, 0): record for key, record in scan.records.items()}
    for key in sorted(store.repeats.count()):
        found |= {(key, number): record for number, record in enumerate(store.repeats.read(key), 1)}
    return found


def _union(by_path: Mapping[Path, Mapping[_Place, Record]]) -> dict[_Place, Record]:
    """Return all records, and all repeats."""
    union: dict[_Place, tuple[Path, Record]] = {}
    digests: dict[tuple[str, str, str], dict[Path, set[str]]] = {}
    for path, records in by_path.items():
        for place, record in records.items():
            before, known = union.setdefault(place, (path, record))
            if known.to_json() != record.to_json():
                text = f"{record.cell.id} was measured in {before} and in {path}: compare them, and merge only one"
                raise ConfigError("merge", [("", text)])
            cell = record.cell
            versions = digests.setdefault((cell.variant, cell.kind, cell.scope or ""), {})
            versions.setdefault(path, set()).add(cell.variant_digest)
    for (variant, _, _), versions in digests.items():
        first, *others = versions.items()
        for path, found in others:
            if not found & first[1]:
                text = f"{variant} has one source in {first[0]} and another in {path}: these are not shards of one plan"
                raise ConfigError("merge", [("", text)])
    return {place: record for place, (_, record) in union.items()}


def _merged_info(infos: list[RunInfo]) -> RunInfo:
    environments: dict[str, Environment] = {}
    for info in infos:
        for digest, one in info.environments.items():
            before = environments.get(digest)
            environments[digest] = one if before is None else one.following(before)
    planned = {cell.key: cell for info in infos for cell in info.planned or ()}
    return replace(
        infos[0],
        created=min(info.created for info in infos),
        environments=environments,
        claims={name: claim for info in reversed(infos) for name, claim in info.claims.items()},
        planned=None if any(info.planned is None for info in infos) else tuple(planned.values()),
        shards=None
        if any(info.shards is None for info in infos)
        else tuple(dict.fromkeys(shard for info in infos for shard in info.shards or ())),
        stopped="; ".join(dict.fromkeys(info.stopped for info in infos if info.stopped)),
    )
