"""The commands around data: what there is, what is missing and how to get it, what it looks like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_zoo import console
from attn_zoo.cli_options import AsJson, DataDir, one_of
from attn_zoo.errors import ConfigError, FolderError

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


@data.command("list")
def list_command(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List tasks, their levels, and whether their data are here. Touches no network and makes no data."""
    from attn_zoo.tasks.sources.manifest import describe_levels, hints, table_rows

    levels = describe_levels(data_dir)
    if as_json:
        console.print_json(levels)
        return
    console.print_table("", ("task", "level", "kind", "train/val/test", "data"), table_rows(levels))
    for line in hints(levels):
        console.say(line)


@data.command("show")
def show(
    task: Task,
    level: Level = None,
    split: SplitOption = "test",
    count: Annotated[int, typer.Option(min=1, help="How many examples.")] = 3,
    data_dir: DataDir = None,
) -> None:
    """Print examples as a person reads them."""
    made = _task(task, level, data_dir)
    examples = made.split(_split(split))
    spec = made.spec
    console.out.print(
        f"{task}, level {made.level}, {split}: {len(examples)} examples of at most {spec.max_seq_len} tokens, "
        f"{spec.num_classes} classes, guessing scores {spec.chance:g} ({spec.metric.replace('_', ' ')})",
        soft_wrap=True,
    )
    for index in range(min(count, len(examples))):
        example = examples.example(index)
        values = [] if examples.groups is None else examples.groups[index].tolist()
        groups = ", ".join(f"{axis} {value:g}" for axis, value in zip(spec.group_axes, values, strict=True))
        sizes = f"{len(example.tokens)} tokens"
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
    """Fetch the data of a task, check them, and write a manifest. No other command uses the network."""
    from attn_zoo.tasks.sources.fetch import fetch

    sources = _sources(task, level)
    if not sources:
        console.out.print(f"{task} is generated here; there is nothing to fetch", markup=False)
    for source in sources.values():
        if source.terms:
            console.say(f"{source.name}: terms: {source.terms}")
        fetch(source, data_dir=data_dir, force=force, say=console.say)


@data.command("verify")
def verify_command(
    task: Annotated[str | None, typer.Argument(help="Name of a task; by default all.", show_default=False)] = None,
    level: Annotated[str | None, typer.Option(help="Difficulty; by default all.")] = None,
    data_dir: DataDir = None,
    record: Annotated[bool, typer.Option("--record", help="Write a manifest where there is none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare data files with their manifests; exit code 1 if one is missing, cut short or changed."""
    from attn_zoo.tasks.sources.manifest import verify_source

    if level is not None and task is None:
        raise ConfigError("--level", [("", "expected a task before it")])
    sources = _sources(task, level)
    states: dict[str, Any] = {name: verify_source(source, data_dir, record=record) for name, source in sources.items()}
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
    data_dir: DataDir = None,
) -> None:
    """Write a split for other programs: JSON Lines, or the task's published form, or pictures."""
    name = _split(split)
    made = _task(task, level, data_dir)
    if out.exists():
        raise FolderError(f"{out}: exists already and is not overwritten; delete it or choose another name")
    for path in made.export(name, out):
        console.say(f"wrote {path}")
