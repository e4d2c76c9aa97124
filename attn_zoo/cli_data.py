"""The commands around data: what there is, what is missing and how to get it, what it looks like."""

from __future__ import annotations

import textwrap
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_zoo import console
from attn_zoo.cli_options import AsJson, DataDir, HereDataDir, one_of
from attn_zoo.errors import ConfigError, FolderError, counted

if TYPE_CHECKING:
    from attn_zoo.tasks.abstract_task import AbstractTask, SplitName
    from attn_zoo.tasks.sources.source import Source

data = typer.Typer(help="The data of tasks: list, show, fetch, verify, export.", no_args_is_help=True)

Task = Annotated[str, typer.Argument(help="Name, see attn-zoo data list.", show_default=False)]
Level = Annotated[str | None, typer.Option(help="Difficulty; by default the first.")]
SplitOption = Annotated[str, typer.Option(help="train, validation or test")]


def _task(name: str, level: str | None, data_dir: Path | None) -> AbstractTask:
    from attn_zoo.registry import tasks

    made: AbstractTask = tasks[name](level or next(iter(tasks[name].levels)), data_dir=data_dir)
    return made


def _split(name: str) -> SplitName:
    from attn_zoo.tasks.abstract_task import SplitName

    split: SplitName = one_of(SplitName, "split", name)
    return split


def _told(task: AbstractTask, split: str) -> AbstractContextManager[None]:
    return console.told_if_slow(f"making all {split} examples of {task.name}, level {task.level}")


def _sources(task: str | None, level: str | None) -> dict[str, Source]:
    """Return the sources of one task or all, each once, by task (and level, where levels differ)."""
    from attn_zoo.registry import tasks

    sources: dict[str, Source] = {}
    for name in tasks if task is None else [task]:
        own: dict[str, Source] = {}
        for one in tasks[name].levels if level is None else [level]:
            tasks[name].check_level(one)
            source = tasks[name].source(one)
            if source is not None and source not in own.values():
                own[one] = source
        sources |= {name if len(own) == 1 else f"{name}, level {one}": source for one, source in own.items()}
    return sources


_SPLITS = ("train", "validation", "test")


def _levels(data_dir: Path | None) -> list[dict[str, Any]]:
    """Return what is known of each level of each task without making data.

    Each has `task`, `level`, `kind`, `sizes` by split (of generated levels; those of files are known when they are
    read), `data` (`generated`, `here` or `missing`); and for levels with files `folder` (None where they are missing),
    `source`, `missing`, `hint`, `terms`, `num_bytes`, `is_fetchable`.
    """
    from attn_zoo.registry import tasks

    rows = []
    for name in tasks:
        for level, config in tasks[name].levels.items():
            row = {"task": name, "level": level, "kind": tasks[name](level, data_dir=data_dir).spec.kind}
            source = tasks[name].source(level)
            if source is not None:
                rows.append({**row, "sizes": {}, **_files(source, data_dir)})
                continue
            counts = {split: _count(asdict(config), f"num_{split}") for split in _SPLITS}
            sizes = {split: count for split, count in counts.items() if count is not None}
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


def _hints(levels: list[dict[str, Any]]) -> list[str]:
    """Return where the files are that are here, and how to get those that are missing: a block for each source."""
    firsts: dict[tuple[str, str], dict[str, Any]] = {}  # of the levels that share a source
    for row in levels:
        if "source" in row:
            firsts.setdefault((row["task"], row["source"]), row)
    num_sources = Counter(task for task, _ in firsts)
    lines: list[str] = []
    for (task, source), first in firsts.items():
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
    """Return lines of at most 79 characters, or what the terminal has, without breaking words."""
    width = min(79, console.out.width)
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


@data.command("list")
def list_command(data_dir: HereDataDir = None, as_json: AsJson = False) -> None:
    """List tasks, their levels, and whether their data are here. Touches no network and makes no data."""
    levels = _levels(data_dir)
    if as_json:
        console.print_json(levels)
        return
    columns = ("task", "level", "kind", "train/val/test", "data")
    console.print_table("", columns, table_rows(levels), least=("kind", "train/val/test"))
    for line in _hints(levels):
        console.say(line)


@data.command("show")
def show(
    task: Task,
    level: Level = None,
    split: SplitOption = "test",
    count: Annotated[int, typer.Option(min=1, help="How many examples.")] = 3,
    data_dir: HereDataDir = None,
) -> None:
    """Print examples as a person reads them."""
    name = _split(split)
    made = _task(task, level, data_dir)
    with _told(made, split):
        examples = made.split(name)
    spec = made.spec
    console.say(
        f"{task}, level {made.level}, {split}: {counted(len(examples), 'example')} of at most "
        f"{counted(spec.max_seq_len, 'token')}, {counted(spec.num_classes, 'class', 'classes')}, "
        f"chance is {spec.chance:g} ({spec.metric.replace('_', ' ')})"
    )
    for index in range(min(count, len(examples))):
        example = examples.example(index)
        values = [] if examples.groups is None else examples.groups[index].tolist()
        groups = ", ".join(f"{axis} {value:g}" for axis, value in zip(spec.group_axes, values, strict=True))
        sizes = counted(len(example.tokens), "token")
        if example.other_tokens is not None:
            sizes += f" and {len(example.other_tokens)}"
        console.say(f"\n{index}: {made.show(example)}")
        console.say(f"   ({', '.join(filter(None, [sizes, groups]))})")


@data.command("fetch")
def fetch_command(
    task: Task,
    level: Annotated[str | None, typer.Option(help="Difficulty; by default all.")] = None,
    data_dir: DataDir = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch again, over files that are there.")] = False,
) -> None:
    """Fetch the data of a task, check them, and write a manifest. No other command downloads anything."""
    from attn_zoo.tasks.sources.fetch import fetch

    sources = _sources(task, level)
    if not sources:
        console.out.print(f"{task} is generated here; there is nothing to fetch", markup=False)
    for source in sources.values():
        if source.terms:
            console.say(f"{source.name}: terms: {source.terms}")
        fetch(source, data_dir=data_dir, force=force, say=console.say)


def _verdict(source: Source, data_dir: Path | None, *, record: bool) -> dict[str, Any]:
    """Return how the files of a source compare with the manifest beside them; `record` writes one where there is none.

    Returns:
        `source`, `folder`, `verdict` (one sentence), `details` (lines), `is_bad` (whether a file is not as it should
        be; missing data that were never fetched are not).

    Raises:
        ConfigError: a manifest or file cannot be read.
        FolderError: a manifest cannot be written.
    """
    from attn_zoo.tasks.sources.manifest import MANIFEST, describe, read_manifest, verify, write_manifest

    noted = (at for at in source.folders(data_dir) if (at / MANIFEST).is_file())
    folder = source.found(data_dir) or next(noted, None)
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
        verdict = f"as recorded: {counted(len(result.good), 'file')} in {folder}"
    else:
        way = "; attn-zoo data fetch --force fetches them again" if source.is_fetchable else ""
        verdict = f"files in {folder} are not as recorded{way}"
    return {**answer, "verdict": verdict, "details": result.sentences(), "is_bad": not result.is_good}


@data.command("verify")
def verify_command(
    task: Annotated[str | None, typer.Argument(help="Name of a task; by default all.", show_default=False)] = None,
    level: Annotated[str | None, typer.Option(help="Difficulty; by default all.")] = None,
    data_dir: HereDataDir = None,
    record: Annotated[bool, typer.Option("--record", help="Write a manifest where there is none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare data files with their manifests; exit code 1 if a recorded one is missing, cut short or changed."""
    if level is not None and task is None:
        raise ConfigError("--level", [("", "expected a task before it")])
    sources = _sources(task, level)
    states: dict[str, Any] = {name: _verdict(source, data_dir, record=record) for name, source in sources.items()}
    if as_json:
        console.print_json(states)
    elif not states:
        console.out.print(f"{task or 'every task'} is generated here; there is nothing to verify", markup=False)
    else:
        for name, state in states.items():
            console.say(f"{name}: {state['verdict']}")
            for line in state["details"]:
                console.say(f"  {line}")
    raise typer.Exit(int(any(state["is_bad"] for state in states.values())))


@data.command("export")
def export(
    task: Task,
    out: Annotated[Path, typer.Option(help="File (or, for pictures, folder) to write; must not exist.")],
    level: Level = None,
    split: SplitOption = "test",
    data_dir: HereDataDir = None,
) -> None:
    """Write a split for other programs: JSON Lines, or the task's published form, or pictures."""
    name = _split(split)
    made = _task(task, level, data_dir)
    if out.exists():
        raise FolderError(f"{out}: exists already and is not overwritten; delete it or choose another name")
    with _told(made, split):
        paths = list(made.export(name, out))
    for path in paths:
        console.say(f"wrote {path}")
