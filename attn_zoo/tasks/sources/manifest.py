"""What a data folder should hold: names, sizes and SHA-256 of its files, and where they came from.

`manifest.json` is in the folder it describes. Several sources may share a folder: writing keeps the entries of files
that it does not mention. What `attn-zoo data list` and `data verify` say is here too, as plain data and lines of text.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from attn_zoo.errors import ConfigError
from attn_zoo.registry import tasks
from attn_zoo.whole_files import whole_file

if TYPE_CHECKING:
    from attn_zoo.tasks.sources.source import Source

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file as it was when the manifest was written.

    Args:
        num_bytes: size.
        sha256: of the content, 64 hexadecimal digits.
        origin: `hub:ID@COMMIT/PATH`, an address, or `local`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    num_bytes: Annotated[int, Field(ge=0, strict=True)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Manifest:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: Literal[1]
    files: dict[str, Entry]


_ADAPTER = TypeAdapter(_Manifest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What differs from the manifest: names relative to the folder, sorted.

    Args:
        good: files as they should be.
        missing: files that are not there.
        truncated: files that are shorter and may have been cut short.
        changed: files with other content.
        extra: files the manifest does not know; they do no harm.
    """

    good: tuple[str, ...]
    missing: tuple[str, ...]
    truncated: tuple[str, ...]
    changed: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether every file of the manifest is as it should be."""
        return not (self.missing or self.truncated or self.changed)

    def sentences(self) -> list[str]:
        """Return one line for each kind of difference, with at most five names."""
        lines = []
        for kind in ("missing", "truncated", "changed", "extra"):
            names: tuple[str, ...] = getattr(self, kind)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            if names:
                lines.append(f"{kind}: {', '.join(names[:5])}{more}")
        return lines


def describe(path: Path, origin: str) -> Entry:
    """Return what the manifest says of a file. Reads all of it: cached hashes are not used here.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Entry(num_bytes=file.tell(), sha256=digest, origin=origin)


def read_manifest(folder: Path) -> dict[str, Entry] | None:
    """Return the entries by name of file, or None where the folder has no manifest.

    Raises:
        ConfigError: the manifest cannot be read or is not one; says what is wrong.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(str(path), [("", f"cannot be read: {error.strerror}")]) from None
    try:
        files = _ADAPTER.validate_json(text).files
    except ValidationError as error:
        problems = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
        raise ConfigError(str(path), problems) from None
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ConfigError(str(path), [(f"files.{name}", "expected a path inside the folder")])
    return files


def write_manifest(folder: Path, entries: Mapping[str, Entry]) -> Path:
    """Write or extend the manifest of a folder, atomically; return its path.

    Raises:
        ConfigError: there is one that cannot be read.
        FolderError: the folder cannot be written.
    """
    files = {**(read_manifest(folder) or {}), **entries}
    data = {"format": 1, "files": {name: asdict(entry) for name, entry in sorted(files.items())}}
    with whole_file(folder / MANIFEST, replace=True) as temporary:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return folder / MANIFEST


def verify(folder: Path) -> Verification:
    """Compare a folder with its manifest. Reads every file of it.

    Raises:
        ConfigError: there is no manifest, or it or a file cannot be read.
    """
    entries = read_manifest(folder)
    if entries is None:
        raise ConfigError(str(folder), [("", f"has no {MANIFEST} to compare with")])
    states: dict[str, list[str]] = {kind: [] for kind in ("good", "missing", "truncated", "changed", "extra")}
    for name, entry in entries.items():
        states[_state(folder / name, entry)].append(name)
    present = (path for path in folder.rglob("*") if not path.is_dir())
    names = {path.relative_to(folder).as_posix() for path in present}
    states["extra"] = list(names - set(entries) - {MANIFEST})
    return Verification(**{kind: tuple(sorted(names)) for kind, names in states.items()})


def _state(path: Path, entry: Entry) -> str:
    """Return the field of `Verification` that a file belongs to."""
    if not path.is_file():
        return "missing"
    try:
        if (size := path.stat().st_size) != entry.num_bytes:
            return "truncated" if size < entry.num_bytes else "changed"
        return "good" if describe(path, entry.origin).sha256 == entry.sha256 else "changed"
    except OSError as error:
        raise ConfigError(str(path), [("", f"cannot be read: {error.strerror}")]) from None


_SPLITS = ("train", "validation", "test")


def describe_levels(data_dir: Path | None) -> list[dict[str, Any]]:
    """Return what is known of each level of each task without making data.

    Each has `task`, `level`, `kind`, `sizes` by split (of generated levels; those of files are known when they are
    read), `data` (`generated`, `here` or `missing`); and for levels with files `folder` (None where they are missing),
    `source`, `missing`, `hint`, `terms`, `num_bytes`, `is_fetchable`.
    """
    rows = []
    for name in tasks:
        for level, config in tasks[name].levels.items():
            row = {"task": name, "level": level, "kind": tasks[name](level, data_dir=data_dir).spec.kind}
            source = tasks[name].source(level)
            if source is not None:
                rows.append({**row, "sizes": {}, **_files(source, data_dir)})
                continue
            counted = {split: _count(asdict(config), f"num_{split}") for split in _SPLITS}
            sizes = {split: count for split, count in counted.items() if count is not None}
            rows.append({**row, "sizes": sizes, "data": "generated"})
    return rows


def _files(source: Source, data_dir: Path | None) -> dict[str, Any]:
    folder = source.found(data_dir)
    return {
        "data": "missing" if folder is None else "here",
        "folder": None if folder is None else str(folder),
        "source": source.name,
        "missing": source.missing(data_dir),
        "hint": source.hint,
        "terms": source.terms,
        "num_bytes": source.num_bytes,
        "is_fetchable": source.is_fetchable,
    }


def _count(described: object, field: str) -> int | None:
    """Return the sum of a field over a level's description, whose parts may be nested; None where it has none."""
    if isinstance(described, dict):
        own = described.get(field)
        counts = [own if isinstance(own, int) else None, *(_count(part, field) for part in described.values())]
    elif isinstance(described, list | tuple):
        counts = [_count(part, field) for part in described]
    else:
        return None
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _short(count: int) -> str:
    """Return a count in four characters at most."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.2g}k" if count < 9_950 else f"{count / 1000:.0f}k"


def table_rows(levels: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of a table: task (once), level, kind, rounded sizes, data."""
    rows: list[tuple[str, ...]] = []
    previous = ""
    for row in levels:
        sizes = "/".join(_short(row["sizes"][split]) if split in row["sizes"] else "-" for split in _SPLITS)
        task = "" if row["task"] == previous else row["task"]
        kind = row["kind"].replace("token_classification", "token classes").replace("_", " ")
        rows.append((task, row["level"], kind, sizes if row["sizes"] else "-", row["data"]))
        previous = row["task"]
    return rows


def hints(levels: list[dict[str, Any]]) -> list[str]:
    """Return where the files are that are here, and how to get those that are missing: a block for each source."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in levels:
        if "source" in row:
            groups.setdefault((row["task"], row["source"]), []).append(row)
    num_sources = Counter(task for task, _ in groups)
    lines: list[str] = []
    for (task, source), rows in groups.items():
        first = rows[0]
        lines += ["", *_wrapped(f"{task}: {source}, {first['data']}", "")]
        if first["folder"]:
            lines.append(f"  in {first['folder']}")
            continue
        lines += _wrapped(f"missing {', '.join(first['missing'])}")
        lines += _wrapped(first["hint"])
        command = f"attn-zoo data fetch {task}" + (f" --level {first['level']}" if num_sources[task] > 1 else "")
        if first["is_fetchable"] and command not in first["hint"]:
            size = f"  ({first['num_bytes'] / 1e6:,.0f} MB)" if first["num_bytes"] else ""
            lines += _wrapped(f"{command}{size}")
        if first["terms"]:
            lines += _wrapped(f"terms: {first['terms']}")
    return lines


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    """Return lines of at most 79 characters, without breaking words."""
    return textwrap.wrap(
        text, 79, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def verify_source(source: Source, data_dir: Path | None, *, record: bool) -> dict[str, Any]:
    """Return how the files of a source compare with the manifest beside them; `record` writes one where there is none.

    Returns:
        `source`, `folder`, `verdict` (one sentence), `details` (lines), `is_bad` (whether a file is not as it should
        be; missing data that were never fetched are not).

    Raises:
        ConfigError: a manifest or file cannot be read.
        FolderError: a manifest cannot be written.
    """
    folder = _folder_of(source, data_dir)
    answer: dict[str, Any] = {"source": source.name, "folder": None, "details": [], "is_bad": False}
    if folder is None:
        return {**answer, "verdict": f"{source.name} is not here"}
    answer["folder"] = str(folder)
    known = read_manifest(folder)
    if source.found(data_dir) is not None:
        paths = {path.relative_to(folder).as_posix(): path for path in source.locate(data_dir).values()}
        new = {name: path for name, path in paths.items() if known is None or name not in known}
        if new and record:
            write_manifest(folder, {name: describe(path, "local") for name, path in new.items()})
            return {**answer, "verdict": f"recorded {', '.join(new)} in {folder / MANIFEST}"}
        if new:
            verdict = f"{', '.join(new)} in {folder} are in no {MANIFEST} to compare with (--record writes one)"
            return {**answer, "verdict": verdict}
    result = verify(folder)
    if result.is_good:
        verdict = f"{len(result.good)} files in {folder} are as recorded"
    else:
        way = "; attn-zoo data fetch --force fetches them again" if source.is_fetchable else ""
        verdict = f"files in {folder} are not as recorded{way}"
    return {**answer, "verdict": verdict, "details": result.sentences(), "is_bad": not result.is_good}


def _folder_of(source: Source, data_dir: Path | None) -> Path | None:
    """Return the folder that holds the files, or else one that should, by its manifest."""
    at = source.found(data_dir)
    if at is not None:
        return at
    return next((at for at in source.folders(data_dir) if (at / MANIFEST).is_file()), None)
