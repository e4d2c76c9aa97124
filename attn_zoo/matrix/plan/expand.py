"""From a matrix to cells: each runnable or refused with a reason, with a rough estimate, in the order they will run."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from attn_zoo.errors import ConfigError, suggestion
from attn_zoo.matrix.kinds.all_kinds import KINDS, kind_of
from attn_zoo.matrix.kinds.kind import NO_CUDA, AbstractKind, Entry, Group, Member
from attn_zoo.matrix.plan.estimate import ENERGY_S, START_S
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.matrix.plan.probe import probe
from attn_zoo.matrix.plan.schema import Matrix
from attn_zoo.matrix.plan.source_digest import source_digest
from attn_zoo.measure.environment import num_cores
from attn_zoo.registry import tasks, variants

Shard = tuple[int, int]
"""(I, N): the I-th of N parts, counted from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All cells of a run.

    Args:
        matrix: what was expanded.
        cells: in the order they run: lanes together, lengths ascending.
        device: `"cpu"` or `"cuda"`, what `"auto"` means here.
        shard: which part of the matrix this is, or None if it is none that others complete.
        is_whole: these are all cells of the matrix.
        variant_files: plain files that other processes must load to know the variants and tasks of the cells.
    """

    matrix: Matrix
    cells: tuple[PlannedCell, ...]
    device: str
    shard: Shard | None = None
    is_whole: bool = False
    variant_files: tuple[str, ...] = field(default=())

    @property
    def estimate_s(self) -> float:
        """Rough seconds of all cells that can be estimated."""
        return sum(item.estimate_s or 0.0 for item in self.cells if item.refusal is None)


def make_plan(
    matrix: Matrix,
    *,
    device: str | None = None,
    only: Sequence[str] = (),
    shard: Shard | None = None,
    add_variants: Sequence[str] = (),
    data_dir: Path | None = None,
    is_remote: bool = False,
    should_probe: bool = False,
    has_estimates: bool = True,
) -> Plan:
    """Expand a matrix; nothing is run and nothing is written.

    Args:
        matrix: from `load_matrix`.
        device: instead of the matrix's own.
        only: patterns with `*` and `?` over cell ids (`"linformer/*"`); a cell is kept if one matches.
        shard: (I, N): keep the I-th of N parts, alike in their rough seconds. What is timed in turns at one length
            stays together.
        add_variants: registered names added to every group.
        data_dir: where tasks find local data.
        is_remote: workers run on other machines, so that a missing GPU here is no refusal.
        should_probe: also build every module once, without memory, in a child process, so that the plan shows what
            constructors refuse. A run finds that out by itself.
        has_estimates: also say what each cell will take. A run asks only about those that are left, by `estimated`.

    Raises:
        ConfigError: unknown variant, impossible shard, nothing left; a typed variant that was changed since.
        UnknownNameError: `add_variants` names no registered variant.
    """
    has_cuda = is_remote or _has_cuda()
    auto = "cuda" if not is_remote and has_cuda else "cpu"
    matrix = _resolved(matrix, add_variants, device, auto)
    lanes: dict[str, dict[str, PlannedCell]] = {}
    for item in _expand(matrix, has_cuda, data_dir):
        # What is timed in turns stays together, whatever is done with lanes.
        lane = lanes.setdefault(item.cell.together or item.cell.curve, {})
        known = lane.get(item.cell.key)
        lane[item.cell.key] = item if known is None else _asked_twice(known, item)
    ordered = [sorted(lane.values(), key=lambda item: item.cell.seq_len or 0) for lane in lanes.values()]

    def is_kept(item: PlannedCell) -> bool:
        return not only or any(fnmatchcase(item.cell.id, pattern) for pattern in only)

    every = [item for lane in ordered for item in lane]
    if only and not any(map(is_kept, every)):  # looked for in all shards: this one may have none that another has
        raise ConfigError("only", [("", _no_match(only, every))])
    if shard is not None:
        index, count = shard
        if not 1 <= index <= count:
            raise ConfigError("shard", [("", f"expected I/N with 1 <= I <= N; got {index}/{count}")])
        ordered = _dealt(ordered, index, count)
    cells = list(filter(is_kept, _counted_once([item for lane in ordered for item in lane])))
    variant_files = tuple(plain_files(cells))
    if should_probe:
        cells = probe(cells, variant_files)
    if has_estimates:
        cells = estimated(cells)
    return Plan(
        matrix=matrix,
        cells=tuple(cells),
        device=device or auto,
        shard=shard,
        is_whole=shard is None and not only,
        variant_files=variant_files,
    )


def _no_match(patterns: Sequence[str], cells: Sequence[PlannedCell]) -> str:
    """Return the sentence for patterns that no id matches: the known part nearest to one that no id has either."""
    example = cells[0].cell.id if cells else "(none)"
    known = list(dict.fromkeys(part for item in cells for part in item.cell.id.split("/")))
    strange = [
        part.strip("*?")
        for pattern in patterns
        for part in pattern.split("/")
        if not any(fnmatchcase(each, part) for each in known)
    ]
    near = next(filter(None, (suggestion(part, known) for part in strange)), "")
    return f"no cell matches {', '.join(patterns)}{near}  (a cell's id looks like {example})"


def _asked_twice(first: PlannedCell, second: PlannedCell) -> PlannedCell:
    """Return a cell that is in two groups as the more demanding of them wants it: each gets what it asks at least."""
    repeats = max(first.repeats, second.repeats)
    return replace(
        first,
        isolation="cell" if "cell" in {first.isolation, second.isolation} else first.isolation,
        repeats=repeats,
        timeout_s=max(first.timeout_s, second.timeout_s),
        budget_s=max(each.budget_s * each.repeats for each in (first, second)) / repeats,
        has_energy=first.has_energy or second.has_energy,
        keep_weights=first.keep_weights or second.keep_weights,
    )


def _dealt(lanes: Sequence[Sequence[PlannedCell]], index: int, count: int) -> list[list[PlannedCell]]:
    """Return what one of several shards has of each lane: what takes longest is dealt out first, to who has least.

    By estimates for one thread, which are the same on all machines that plan a shard. What has none counts as the
    longest that has one.
    """

    def piece(item: PlannedCell) -> tuple[str, int | None]:
        return item.cell.together or item.cell.curve, item.cell.seq_len

    items = [item for lane in lanes for item in lane]
    known = estimated(replace(item, cell=replace(item.cell, threads=1)) for item in items)
    longest = max((one.estimate_s or 0.0 for one in known), default=0.0) or 1.0
    pieces: dict[tuple[str, int | None], float] = {}
    for item, one in zip(items, known, strict=True):
        seconds = 0.0 if item.refusal else longest if one.estimate_s is None else one.estimate_s
        pieces[piece(item)] = pieces.get(piece(item), 0.0) + seconds
    hands, mine = [(0.0, number) for number in range(1, count + 1)], set()
    for each in sorted(pieces, key=lambda each: -pieces[each]):
        seconds, number = heapq.heappop(hands)
        heapq.heappush(hands, (seconds + pieces[each], number))
        if number == index:
            mine.add(each)
    return [[item for item in lane if piece(item) in mine] for lane in lanes]


def estimated(items: Iterable[PlannedCell]) -> list[PlannedCell]:
    """Return the cells with the rough cost of all their repeats, where one is known."""
    items = list(items)
    processes = [None if item.refusal else item.process for item in items]
    sharing = Counter(processes)
    return [
        item if item.refusal or item.estimate_s is not None else _estimated(item, sharing[process])
        for item, process in zip(items, processes, strict=True)
    ]


def _estimated(item: PlannedCell, num_sharing: int) -> PlannedCell:
    try:
        rough = kind_of(item.cell).estimate(item)
    except Exception:  # somebody else's formula must not stop a plan; the worker will report it
        return item
    energy_s = ENERGY_S if item.has_energy and item.cell.device == "cuda" else 0.0
    once_s = (START_S + rough.shared_s) / num_sharing
    estimate_s = (once_s + rough.seconds) * item.repeats + energy_s
    return replace(item, estimate_s=estimate_s, estimate_bytes=rough.num_bytes)


def require_devices(cells: Iterable[PlannedCell]) -> None:
    """Look whether this machine has as many devices as any cell asks for at once.

    Raises:
        ConfigError: it has fewer.
    """
    most = {item.cell.device: item.cell for item in sorted(cells, key=lambda item: item.cell.data_parallel)}
    for device, cell in most.items():
        if cell.data_parallel == 1 or (device == "cuda" and not _has_cuda()):  # where none is here, that was refused
            continue
        count, what = num_cores(), "CPU cores"
        if device == "cuda":
            import torch

            count, what = torch.cuda.device_count(), "GPUs"
        if cell.data_parallel > count:
            text = f"expected at most {count}, the {what} of this machine; got {cell.data_parallel}"
            raise ConfigError(cell.id, [("data_parallel", text)])


def plain_files(cells: Iterable[PlannedCell]) -> dict[str, list[str]]:
    """Return the plain files that know the variants and tasks of the cells, each with the names it is needed for.

    Raises:
        ConfigError: a typed one was changed since it was registered.
    """
    names = {item.cell.variant for item in cells} | {item.cell.overrides.get("cross_variant") for item in cells}
    names |= {item.cell.replaces for item in cells}
    known = [(name, variants.plain_file(name)) for name in names if name]
    known += [(name, tasks.plain_file(name)) for name in {item.cell.task for item in cells} if name]
    files: dict[str, list[str]] = {}
    for name, path in sorted(known):
        if path:
            files.setdefault(path, []).append(name)
    return files


def _expand(matrix: Matrix, has_cuda: bool, data_dir: Path | None) -> Iterator[PlannedCell]:
    """Yield every cell of the matrix, group by group; some may occur twice."""
    for _, kind, group in matrix.groups():
        members = [_member(entry, matrix.options.get(entry.name, {}), kind, group.device) for entry in group.variants]
        for item in kind.expand(group, members, data_dir):
            if group.device == "cuda" and not has_cuda:
                yield PlannedCell(cell=item.cell, refusal=NO_CUDA, isolation=item.isolation)
            else:
                yield item


def _member(entry: Entry, options: Mapping[str, Any], kind: AbstractKind, device: str) -> Member:
    return {
        "variant": entry.name,
        "label": entry.label or entry.name,
        "options": json.loads(json.dumps({**options, **entry.options})),  # a copy of its own for every entry
        "variant_digest": source_digest(variants[entry.name], kind.rooms, device),
        **({"overrides": overrides} if (overrides := entry.overrides()) else {}),
    }


def _counted_once(cells: Iterable[PlannedCell]) -> list[PlannedCell]:
    """Leave the count of FLOPs to the first of the cells that differ in length and pass only: a forward is a forward.

    The counter takes up to a second to load, so only a process that runs many lengths counts all of them, and a kind
    that needs them.
    """
    counted: list[PlannedCell] = []
    forwards: dict[str, str] = {}  # by curve
    first: dict[str, PlannedCell] = {}  # by forward
    for item in cells:
        if kind_of(item.cell).counts_all_lengths(item.cell):
            counted.append(replace(item, has_count=True))
            continue
        if (curve := item.cell.curve) not in forwards:
            forwards[curve] = item.cell.all_but("seq_len", "pass_", "together")
        seen = first.setdefault(forwards[curve], item)
        is_one = seen is item or (item.isolation == "lane" and seen.cell.curve == curve)
        counted.append(item if item.has_count == is_one else replace(item, has_count=is_one))
    return counted


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _resolved(matrix: Matrix, names: Sequence[str], device: str | None, auto: str) -> Matrix:
    """Return the matrix with added variants and real devices: a folder stores this, and it means the same anywhere."""
    for name in names:
        variants[name]

    def resolved(group: Group) -> Group:
        present = {entry.name for entry in group.variants}
        added = tuple(group.entry(name=name) for name in dict.fromkeys(names) if name not in present)
        wanted = device or group.device
        update = {"variants": group.variants + added, "device": auto if wanted == "auto" else wanted}
        return group.model_copy(update=update)

    update = {kind.name: tuple(resolved(group) for group in getattr(matrix, kind.name)) for kind in KINDS}
    return matrix.model_copy(update=update)
