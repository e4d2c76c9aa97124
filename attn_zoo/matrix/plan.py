"""From a matrix to cells: each runnable or refused with a reason, with a rough estimate, in the order they will run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.matrix.estimate import Estimate, estimate
from attn_zoo.matrix.groups import AccuracyGroup, Entry, Matrix, ScalingGroup
from attn_zoo.matrix.sources import source_digest
from attn_zoo.metadata import Request
from attn_zoo.records import Cell
from attn_zoo.registry import make_config, tasks, variants

__all__ = ["Plan", "PlannedCell", "Refusal", "Shard", "make_plan"]

Refusal = tuple[str, str]
"""Capability that is missing, and the sentence that says so."""

Shard = tuple[int, int]
"""(I, N): the I-th of N parts, counted from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCell:
    """A cell and how it will be run.

    Args:
        cell: what is measured.
        refusal: why it will not run, or None.
        isolation: a process of its own, or one shared with the shorter lengths of its lane.
        timeout_s: seconds it may take.
        budget_s: seconds of sampling.
        has_energy: measure energy too.
        has_count: count FLOPs too. One length checks the formula, and the counter takes seconds to load, so isolated
            cells leave it to the shortest of their lane.
        estimate_s: rough seconds, set-up included; None where nothing is known (training).
        estimate_bytes: rough bytes at the peak; None likewise.
    """

    cell: Cell
    refusal: Refusal | None = None
    isolation: Literal["cell", "lane"] = "cell"
    timeout_s: float = 600.0
    budget_s: float = 1.0
    has_energy: bool = False
    has_count: bool = True
    estimate_s: float | None = None
    estimate_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All cells of a run.

    Args:
        matrix: what was expanded.
        cells: in the order they run: lanes together, lengths ascending.
        device: `"cpu"` or `"cuda"`, what `"auto"` means here.
        shard: which part of the matrix this is, or None for all.
        variant_files: plain files that workers must load first.
    """

    matrix: Matrix
    cells: tuple[PlannedCell, ...]
    device: str
    shard: Shard | None = None
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
    variant_files: Sequence[str] = (),
    data_dir: Path | None = None,
    is_remote: bool = False,
    should_probe: bool = False,
) -> Plan:
    """Expand a matrix; nothing is run and nothing is written.

    Args:
        matrix: from `load_matrix`.
        device: instead of the matrix's own.
        only: patterns with `*` and `?` over cell ids (`"linformer/*"`); a cell is kept if one matches.
        shard: (I, N): keep the I-th of N parts. Lanes stay whole.
        add_variants: registered names added to every group.
        variant_files: plain files, loaded already, that workers must load too.
        data_dir: where tasks find local data.
        is_remote: workers run on other machines, so that a missing GPU here is no refusal.
        should_probe: also build every module once, without memory, in a child process, so that the plan shows what
            constructors refuse. A run finds that out by itself.

    Raises:
        ConfigError: unknown variant, impossible shard, nothing left.
        UnknownNameError: `add_variants` names no registered variant.
    """
    matrix = _with_variants(matrix, add_variants)
    has_cuda = is_remote or _has_cuda()
    auto = "cuda" if not is_remote and has_cuda else "cpu"
    lanes: dict[str, dict[str, PlannedCell]] = {}
    for item in _expand(matrix, device, auto, has_cuda, data_dir):
        lanes.setdefault(item.cell.lane, {}).setdefault(item.cell.key, item)
    ordered = [_ascending(lane.values()) for lane in lanes.values()]
    if shard is not None:
        index, count = shard
        if not 1 <= index <= count:
            raise ConfigError("shard", [("", f"expected I/N with 1 <= I <= N; got {index}/{count}")])
        ordered = ordered[index - 1 :: count]
    cells = [item for lane in ordered for item in lane]
    if only:
        kept = [item for item in cells if any(fnmatchcase(item.cell.id, pattern) for pattern in only)]
        if not kept:
            example = cells[0].cell.id if cells else "(none)"
            raise ConfigError("only", [("", f"no cell matches {', '.join(only)}; a cell's id looks like {example}")])
        cells = kept
    if should_probe:
        from attn_zoo.matrix.probe import probe

        cells = probe(cells, variant_files)
    return Plan(
        matrix=matrix, cells=tuple(cells), device=device or auto, shard=shard, variant_files=tuple(variant_files)
    )


def _ascending(lane: Iterable[PlannedCell]) -> list[PlannedCell]:
    items = sorted(lane, key=lambda item: item.cell.seq_len or 0)
    return [replace(item, has_count=index == 0 or item.isolation == "lane") for index, item in enumerate(items)]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _with_variants(matrix: Matrix, names: Sequence[str]) -> Matrix:
    for name in names:
        variants[name]

    def extended(group: Any) -> Any:
        present = {entry.name for entry in group.variants}
        added = tuple(Entry(name=name) for name in dict.fromkeys(names) if name not in present)
        return group.model_copy(update={"variants": group.variants + added})

    update = {kind: tuple(extended(group) for group in getattr(matrix, kind)) for kind in ("scaling", "accuracy")}
    return matrix.model_copy(update=update)


def _expand(
    matrix: Matrix, device: str | None, auto: str, has_cuda: bool, data_dir: Path | None
) -> Iterator[PlannedCell]:
    groups: tuple[ScalingGroup | AccuracyGroup, ...] = (*matrix.scaling, *matrix.accuracy)
    for group in groups:
        wanted = device or group.device
        target = auto if wanted == "auto" else wanted
        for entry in group.variants:
            options = {**matrix.options.get(entry.name, {}), **entry.options}
            common: dict[str, Any] = {
                "variant": entry.name,
                "label": entry.label or entry.name,
                "options": json.loads(json.dumps(options)),  # a copy of its own for every entry
                "variant_digest": source_digest(variants[entry.name]),
                "device": target,
                "threads": group.threads,
            }
            for item in (
                _scaling(group, common) if isinstance(group, ScalingGroup) else _accuracy(group, common, data_dir)
            ):
                yield item if has_cuda or target != "cuda" else _refused(item, "cuda", "no CUDA device here")


def _refused(item: PlannedCell, capability: str, reason: str) -> PlannedCell:
    return PlannedCell(cell=item.cell, refusal=(capability, reason), isolation=item.isolation)


def _scaling(group: ScalingGroup, common: dict[str, Any]) -> Iterator[PlannedCell]:
    axes: dict[str, Sequence[Any]] = {
        "scope": group.scope,
        "dtype": group.dtypes,
        "batch_size": group.batch_size,
        "num_heads": group.num_heads,
        "head_dim": group.head_dim,
        "is_causal": group.is_causal,
        "has_padding": group.has_padding,
        "dropout_p": group.dropout_p,
        "pass_": group.passes,
        "seed": group.seeds,
        "seq_len": sorted(group.seq_len),
    }
    config = make_config(variants[common["variant"]].config, common["options"], common["variant"])
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        cell = Cell(kind="scaling", num_kv_heads=group.num_kv_heads or point["num_heads"], **point, **common)
        refusal = _refusal(cell)
        rough = Estimate() if refusal else estimate(cell, config, group.budget_s, group.isolation)
        yield PlannedCell(
            cell=cell,
            refusal=refusal,
            isolation=group.isolation,
            timeout_s=group.timeout_s,
            budget_s=group.budget_s,
            has_energy=group.has_energy,
            estimate_s=rough.seconds,
            estimate_bytes=rough.num_bytes,
        )


def _accuracy(group: AccuracyGroup, common: dict[str, Any], data_dir: Path | None) -> Iterator[PlannedCell]:
    missing: Refusal | None = None
    try:
        digest = tasks[group.task].digest(group.level, data_dir=data_dir)
    except (UnsupportedError, ConfigError) as error:  # its data are not here
        digest, missing = "", ("data", str(error))
    for dtype, seed in itertools.product(group.dtypes, group.seeds):
        cell = Cell(
            kind="accuracy",
            dtype=dtype,
            seed=seed,
            task=group.task,
            level=group.level,
            protocol=group.protocol,
            overrides=json.loads(json.dumps(group.overrides)),
            data_digest=digest,
            **common,
        )
        yield PlannedCell(cell=cell, refusal=_refusal(cell) or missing, timeout_s=group.timeout_s)


def _refusal(cell: Cell) -> Refusal | None:
    """Return what the capabilities refuse. A task's masks and lengths are checked when the model is built."""
    variant = variants[cell.variant]
    request = Request(
        is_causal=cell.is_causal,
        has_key_padding_mask=cell.has_padding,
        is_grouped_query=cell.num_kv_heads != cell.num_heads,
        dropout_p=cell.dropout_p,
        seq_len=cell.seq_len,
        dtype=cell.dtype,
        device=cell.device,
    )
    if cell.kind == "accuracy":
        # Direction is the task's business and not known here: ask for the one it has.
        request = Request(dtype=cell.dtype, device=cell.device, is_causal=not variant.capabilities.bidirectional)
    elif cell.scope == "attention" and variant.attention is None:
        return ("attention", 'needs hidden states [B, L, E]: scope = "mixer"')
    return variant.capabilities.missing(request)
