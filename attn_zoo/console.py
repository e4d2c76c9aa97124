"""What the command line prints: tables of variants, checks and plans. Plain text, never wider than the terminal."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from enum import Enum
from inspect import formatannotation
from operator import itemgetter
from pathlib import Path
from threading import Timer
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic_core import to_json, to_jsonable_python
from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from attn_zoo.errors import counted
from attn_zoo.metadata import big_o
from attn_zoo.records import ANSWERS
from attn_zoo.units import some

if TYPE_CHECKING:
    from attn_zoo.attention.build import VariantInfo
    from attn_zoo.conformance import CheckResult, MeasuredComplexity
    from attn_zoo.displays import Checks
    from attn_zoo.matrix.drive.run_plan import Standing, Summary
    from attn_zoo.matrix.plan.expand import Plan


def printable(text: str) -> str:
    """Return text that cannot steer the terminal: names, reasons and data come from others."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


if os.environ.get("COLUMNS") == "0":  # of a terminal that does not know its width; nothing would be shown in none
    del os.environ["COLUMNS"]


_PIPE_WIDTH = 200
"""Nothing limits lines that no terminal shows; longer ones are hard to read in an editor."""


class _Console(Console):
    """Prints no control characters but its own."""

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        is_free = self._width is None and not self.is_terminal  # COLUMNS sets the width
        return ConsoleDimensions(_PIPE_WIDTH, super().size.height) if is_free else super().size

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


out = _Console(highlight=False, emoji=False)
err = _Console(stderr=True, highlight=False, emoji=False)


def say(text: str) -> None:
    """Print text as it is, without markup and unwrapped."""
    out.print(text, markup=False, soft_wrap=True)


def tell(text: str) -> None:
    """Print text as it is on the standard error stream."""
    err.print(text, markup=False, soft_wrap=True)


SILENCE_S = 2.0
"""After this long without a word a user wonders what is going on."""


@contextmanager
def told_if_slow(text: str) -> Iterator[None]:
    """Say on the standard error stream what the block does, should it take longer than `SILENCE_S`."""
    timer = Timer(SILENCE_S, tell, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_json(data: Any) -> None:
    """Print plain data as JSON for scripts."""
    plain = json.loads(to_json(data, inf_nan_mode="strings", fallback=str))  # JSON has no infinity
    print(json.dumps(plain, indent=1, sort_keys=True, allow_nan=False))  # noqa: T201


_LEAST = 20
"""Text is wrapped, or cut, to no less: in narrower columns it is one word per line."""


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[str] = (),
    *,
    least: Sequence[str] = (),
    is_cut: bool = False,
) -> None:
    """Print rows under a title; columns named in `right` are numbers.

    The last column takes what room is left: in several lines, or in one that is cut to it, where `is_cut`. The others
    are shown whole: where there is no room, columns are left out, of which a sentence tells, those in `least` first,
    then from the right. Two are kept in any case.
    """
    last = len(columns) - 1
    widths = [max(len(str(text)) for text in texts) for texts in zip(columns, *rows, strict=True)]
    needed = [min(width, _LEAST) if index == last else width for index, width in enumerate(widths)]
    leaving = [*map(columns.index, least), *(index for index in range(last, 0, -1) if columns[index] not in least)]
    kept = list(range(len(columns)))
    while len(kept) > 2 and _total(needed, kept) > out.width:
        kept.remove(leaving.pop(0))
    is_narrow = _total(needed, kept) > out.width  # then all are broken into lines, and none is cut
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    for index in kept:
        is_text = index == last
        table.add_column(
            columns[index],
            justify="right" if columns[index] in right else "left",
            no_wrap=is_cut and is_text,
            overflow="ellipsis" if is_cut and is_text else "fold",
            min_width=None if is_narrow or is_text else widths[index],
            max_width=max(out.width - _total(widths, kept[:-1]) - 2, _LEAST) if is_cut and is_text else None,
        )
    for row in rows:
        table.add_row(*(escape(str(row[index])) for index in kept))
    if title:  # a table breaks its own to its width
        out.print(title, style="italic", markup=False, highlight=False)
    out.print(table)
    if hidden := [column for index, column in enumerate(columns) if index not in kept]:
        out.print(f"Columns left out here, for a wider terminal: {', '.join(hidden)}.", style="dim", markup=False)


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    """Return how wide a table of some columns is, with two spaces between them."""
    return sum(widths[index] + 2 for index in kept) - 2


def _mark(answer: bool | str) -> str:
    """Return an answer of the capabilities for a table; a word such as "masked" stands for itself."""
    return answer if isinstance(answer, str) else "yes" if answer else "-"


def print_failures(failures: Sequence[tuple[str, str]]) -> None:
    """Print which providers could not be loaded, and why; nothing where all were."""
    if failures:
        out.print()
        print_table("Could not be loaded", ("provider", "reason"), failures)


def print_variants(infos: Sequence[VariantInfo], failures: Sequence[tuple[str, str]]) -> None:
    """Print what is registered, and what could not be loaded with the reason."""
    rows = [
        (
            info.name,
            f"N^{info.complexity.time_exponent:g}",
            _mark(info.capabilities.causal) if info.capabilities.bidirectional else "only",
            _mark(info.capabilities.cross_attention),
            _mark(info.capabilities.key_padding_mask),
            info.capabilities.decode.replace("none", "-"),
            info.summary.rstrip("."),
        )
        for info in infos
    ]
    print_table("", ("variant", "time", "causal", "cross", "padding", "decode", "what it is"), rows, is_cut=True)
    out.print("One of them in full: attn-zoo show NAME", markup=False)
    print_failures(failures)


def print_variant(info: VariantInfo) -> None:
    """Print everything known about one variant."""
    paper = info.reference
    out.print(f"[bold]{escape(info.name)}[/bold]  {escape(info.summary)}")
    say(f'{paper.authors} {paper.year}, "{paper.title}", {paper.url}')
    if paper.equation:
        out.print(f"equation {escape(paper.equation)}")
    if paper.code:
        say(f"authors' code: {paper.code}")
    for deviation in paper.deviations:
        out.print(f"differs: {escape(deviation)}")
    out.print()
    print_table("Claimed cost", ("", ""), cost_rows(info))
    out.print()
    print_table("Capabilities", ("", ""), capability_rows(info))
    out.print()
    if info.options:
        print_table("Options", ("name", "default", "what it does"), option_rows(info))
    else:
        out.print("No options.")


def cost_rows(info: VariantInfo) -> list[tuple[str, str]]:
    """Return what a variant claims to cost, in words."""
    cost = info.complexity
    return [
        ("time", f"{big_o(cost.time)}, grows as N^{cost.time_exponent:g}"),
        ("memory", f"{big_o(cost.memory)}, grows as N^{cost.memory_exponent:g}"),
        ("sequential operations", big_o(cost.sequential_ops)),
        ("maximum path length", big_o(cost.max_path)),
    ]


def capability_rows(info: VariantInfo) -> list[tuple[str, str]]:
    """Return each capability with its answer, and why it is a no."""
    can, shown = info.capabilities, []
    for item in fields(can):
        if item.name == "why":
            continue
        value = getattr(can, item.name)
        if isinstance(value, bool):
            value = "yes" if value else "no"
        text = ", ".join(value) if isinstance(value, tuple) else str(value)
        reason = can.why.get(item.name)
        shown.append((item.name, f"{text}: {reason}" if reason else text or "-"))
    return shown


def option_rows(info: VariantInfo) -> list[tuple[str, str, str]]:
    """Return each option with its default, as a matrix file writes it, and what it does."""
    from attn_zoo.registry import option_fields, variants

    types = _option_types(info)
    needed = {
        item.name
        for item in option_fields(variants[info.name].config)
        if item.default is MISSING and item.default_factory is MISSING
    }
    return [
        (
            one.name,
            "required" if one.name in needed else in_toml(to_jsonable_python(one.default, fallback=str)),
            f"{one.summary} ({types[one.name]})".strip(),
        )
        for one in info.options
    ]


def in_toml(value: Any) -> str:
    """Return plain data as TOML; what it has no word for is what an option means that is left out.

    >>> in_toml([1, "two", True, None]), in_toml({"step": float("inf")})
    ('[1, "two", true, unset]', '{step = inf}')
    """
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {in_toml(each)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(in_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


def _option_types(info: VariantInfo) -> dict[str, str]:
    """Return the type of each option in words."""
    from attn_zoo.registry import variants

    hints = get_type_hints(variants[info.name].config)
    return {one.name: _type_words(hints[one.name]) for one in info.options}


def _type_words(hint: Any) -> str:
    """Return a type in words; where its values can be counted, these, as a matrix file writes them."""
    if get_origin(hint) is Literal:
        return " | ".join(json.dumps(value) for value in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(json.dumps(one.value) for one in hint)
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_type_words(one) for one in get_args(hint) if one is not NoneType)  # that is left out
    if isinstance(origin := get_origin(hint), type):
        name = "" if origin is tuple else origin.__name__
        return f"{name}[{', '.join('...' if one is ... else _type_words(one) for one in get_args(hint))}]"
    return formatannotation(hint).replace("typing.", "")


def print_complexity(rows: Sequence[MeasuredComplexity]) -> None:
    """Print claimed and measured exponents of the sequence length, one table for each direction."""
    for row in rows:
        growths = (
            ("cost of a layer", row.cost),
            ("sequential operations", row.sequential_ops),
            ("maximum path length", row.max_path),
        )
        cells = [(what, growth.claim_in_words(), growth.in_words()) for what, growth in growths]
        out.print()
        title = f"Growth with the length L, {'causal' if row.is_causal else 'bidirectional'}"
        print_table(title, ("", "claimed", "measured"), cells)


def variant_data(info: VariantInfo) -> dict[str, Any]:
    """Return a `VariantInfo` as plain data, without the formulas."""
    cost = {key: value for key, value in asdict(info.complexity).items() if not callable(value)}
    types = _option_types(info)
    return {
        "name": info.name,
        "summary": info.summary,
        "capabilities": {
            item.name: getattr(info.capabilities, item.name) for item in fields(info.capabilities) if item.name != "why"
        }
        | {"why": dict(info.capabilities.why)},
        "complexity": cost,
        "reference": asdict(info.reference),
        "options": [asdict(option) | {"type": types[option.name]} for option in info.options],
        "provider": info.provider,
    }


def print_checks(results: Checks) -> None:
    """Print one line per check, and beneath the table what failed with its smallest example."""
    told = {result.check for result in results.failed}
    rows = [(name, outcome, "see below" if name in told else why) for name, outcome, why in results.rows()]
    print_table(f"Conformance of {results.variant}", ("check", "outcome", "why"), rows)
    out.print()
    faults: dict[str, list[CheckResult]] = {}
    for result in results.failed:  # whatever raises at one place is one fault, which most checks meet
        place = result.message.rpartition(" (")[2] if result.has_raised else ""
        faults.setdefault(place or result.message, []).append(result)
    for first, *others in faults.values():
        names = some(result.check for result in (first, *others))
        out.print(f"[bold red]{escape(names)}[/bold red]: {escape(first.message)}")
        if first.example:
            out.print(f"  smallest example: {escape(first.example)}")
    out.print(escape(str(results)))


def _amount(value: float | None, steps: Sequence[tuple[float, str]]) -> str:
    """Return a rough number with the largest unit that keeps it above 1."""
    if value is None:
        return "-"
    for size, unit in steps:
        if value >= size:
            return f"{value / size:.0f} {unit}"
    return f"< 1 {steps[-1][1]}"


def print_plan(plan: Plan) -> None:
    """Print every cell, what it will roughly take, and what is refused with the reason."""
    from attn_zoo.matrix.plan.estimate import assumed_rate

    rows = [
        (
            item.cell.id,
            "refused" if item.refusal else _amount(item.estimate_s, _SECONDS),
            "" if item.refusal else _amount(item.estimate_bytes, _BYTES),
        )
        for item in plan.cells
    ]
    print_table("", ("cell", "time", "memory"), rows, right=("time", "memory"))
    reasons: dict[str, list[str]] = {}  # beside each cell they would wrap in a narrow terminal
    for item in plan.cells:
        if item.refusal:
            reasons.setdefault(item.refusal[1], []).append(item.cell.id)
    for reason, cells in reasons.items():
        say(f"refused: {some(cells, 1)}: {reason}")
    refused = sum(len(cells) for cells in reasons.values())
    rounds = max((item.repeats for item in plan.cells), default=1)
    repeated = sum(item.repeats > 1 and item.refusal is None for item in plan.cells)
    repeats = f"{repeated} of them in up to {rounds} rounds over the matrix, a process each time; " if repeated else ""
    places = {(item.cell.device, item.cell.threads) for item in plan.cells if item.estimate_s is not None}
    rates = sorted({(device, assumed_rate(device, threads) / 1e9) for device, threads in places})
    assumed = "".join(f", at an assumed {rate:g} GFLOP/s in float32 on {device}" for device, rate in rates)
    say(
        f"{counted(len(plan.cells), 'cell')} on {plan.device}: {len(plan.cells) - refused} to run, {refused} refused; "
        f"{repeats}one after another they take {_amount(plan.estimate_s, _SECONDS)} (roughly{assumed}), "
        "gates and evaluations not counted"
    )


_SECONDS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"))


def print_summary(summary: Summary) -> None:
    """Print what a run did, what is left, and what to type next."""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(summary.counts.items())) or "no cell is complete"
    say(f"{counts}  ({summary.new} new) in {summary.folder}")
    if summary.left:
        why = f" ({summary.stopped})" if summary.stopped else ""
        say(f"{len(summary.left)} left{why}: {some((item.cell.id for item in summary.left), 5)}")
        kept = f", with {counted(summary.num_repeats, 'repeat')} of them" if summary.num_repeats else ""
        out.print(f"the same command goes on from here{kept}{_old_records(summary.num_again)}")
    elif summary.missing_shards:
        say(f"{summary.missing_shards}; attn-zoo merge joins the folders of all shards")
    elif summary.counts:
        say(f"next: attn-zoo report {shlex.quote(str(summary.folder))}")


def _old_records(num_again: int) -> str:
    return f"; kept until measured again: {counted(num_again, 'old record')}" if num_again else ""


MOST_ALIKE = 20
"""Places that a terminal shows of one reason."""


def print_reasons(found: Iterable[tuple[str, str, str]]) -> int:
    """Print (what, why, where) as one paragraph for each reason: beside every place it would wrap in a terminal.

    Returns:
        How many places are not shown, as many have the same reason.
    """
    places: dict[tuple[str, str], list[str]] = {}
    for what, why, where in found:
        places.setdefault((what, why), []).append(where)
    for index, ((what, why), alike) in enumerate(places.items()):
        if index:
            out.print()
        out.print(f"[bold]{what}[/bold]: {escape(why)}")
        for where in alike[:MOST_ALIKE]:
            say(f"  {where}")
        if len(alike) > MOST_ALIKE:
            out.print(f"  and {len(alike) - MOST_ALIKE:,} more")
    return sum(max(0, len(alike) - MOST_ALIKE) for alike in places.values())


def print_standing(now: Standing, ceilings: Sequence[str], folder: Path, files: Sequence[Path]) -> None:
    """Print what a results folder has, what failed with which reason, what is left, and what its machines could do.

    `files` were loaded for this, and are for what is done next.
    """
    counts = Counter(record.status for record in now.done)
    if counts:
        print_table("", ("status", "cells"), sorted(counts.items()), right=("cells",))
    failed = [(record.status, record.reason, record.cell.id) for record in now.done if record.status != "ok"]
    if failed:
        out.print()
        print_reasons(sorted(failed, key=itemgetter(0, 1)))
    if now.problems:
        out.print()
        print_table("No records", ("file", "why"), sorted(now.problems.items()))
    if ceilings:
        out.print()
        print_table("Measured ceilings", ("",), [(text,) for text in ceilings])
    out.print()
    stale = f"; {counted(len(now.stale), 'record')} stale, of source or data that changed since" if now.stale else ""
    other = f"; {counted(len(now.other), 'record')} of other matrices" if now.other else ""
    begun = f" ({len(now.begun)} begun, with {counted(sum(now.begun.values()), 'repeat')})" if now.begun else ""
    left = f", {len(now.left)} left" if now.has_plan else ""
    time = f"; one after another they take about {_amount(now.left_s, _SECONDS)}" if now.left_s else ""
    out.print(f"{len(now.done)} done{left}{begun}{_old_records(now.num_again)}{time}{stale}{other}")
    for text in filter(None, (now.missing_shards, now.doubt)):
        out.print(escape(text))
    given = [word for path in files for word in ("--variant-file", str(path))]
    failures = counts.keys() - ANSWERS
    if failures == {"timeout"}:  # once more would take as long
        words = shlex.join(["--out", str(folder), *given, "--retry", "timeout"])
        say(f"next: raise timeout_s in the matrix FILE, then attn-zoo run FILE {words}")
    elif failures:
        say(f"next: attn-zoo retry {shlex.join([str(folder), *given])}")
