"""The cells of a matrix, and whether and how each will be run."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from attn_zoo.matrix.kinds.accuracy import Known, known_of, trainings
from attn_zoo.matrix.kinds.step import steps
from attn_zoo.matrix.plan.estimate import Estimate, estimate
from attn_zoo.matrix.plan.groups import Matrix, ScalingGroup, StepEntry, StepGroup
from attn_zoo.matrix.plan.planned import PlannedCell, Point, Refusal
from attn_zoo.matrix.plan.source_digest import source_digest
from attn_zoo.metadata import Request
from attn_zoo.records import Cell
from attn_zoo.registry import VariantConfig, make_config, variants

__all__ = ["PlannedCell", "Refusal", "expand"]


def expand(matrix: Matrix, has_cuda: bool, data_dir: Path | None) -> Iterator[PlannedCell]:
    """Yield every cell of the matrix, group by group; some may occur twice.

    Args:
        matrix: whose cells; every group names a real device.
        has_cuda: cells on `"cuda"` can run.
        data_dir: where tasks find local data.
    """

    @cache
    def known(task: str, level: str) -> Known:
        return known_of(task, level, data_dir)

    for group in matrix.groups:
        members: list[dict[str, Any]] = []
        for entry in group.variants:
            options = {**matrix.options.get(entry.name, {}), **entry.options}
            member = {
                "variant": entry.name,
                "label": entry.label or entry.name,
                "options": json.loads(json.dumps(options)),  # a copy of its own for every entry
                "variant_digest": source_digest(variants[entry.name]),
            }
            if isinstance(entry, StepEntry):
                member["overrides"] = {"compile": True} if entry.compile else {}
            members.append(member)
        for member in members:
            common = {**member, "device": group.device, "threads": group.threads}
            cells = (
                _timed(group, common, members)
                if isinstance(group, ScalingGroup | StepGroup)
                else trainings(group, common, known)
            )
            for item in cells:
                yield item if has_cuda or group.device != "cuda" else _refused(item, "cuda", "no CUDA device here")


def _refused(item: PlannedCell, capability: str, reason: str) -> PlannedCell:
    return PlannedCell(cell=item.cell, refusal=(capability, reason), isolation=item.isolation)


def _together(group: ScalingGroup | StepGroup, members: Sequence[dict[str, Any]], common: dict[str, Any]) -> str:
    """Return the digest of what is timed in turns and how: another peer, or another source of one, is another cell."""
    lane = {name: value for name, value in common.items() if name not in {*members[0], "seq_len"}}
    text = json.dumps([list(members), group.repeats, lane], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _timed(
    group: ScalingGroup | StepGroup, common: dict[str, Any], members: Sequence[dict[str, Any]]
) -> Iterator[PlannedCell]:
    """Yield the cells of one variant in a group that is timed over lengths."""
    points = steps(group, common) if isinstance(group, StepGroup) else _scaling(group, common)
    for point, cell, refusal, rough in points:
        if group.isolation == "interleaved":
            cell = replace(cell, together=_together(group, members, {**point, **common}))
        seconds = None if rough.seconds is None else rough.seconds * group.repeats
        yield PlannedCell(
            cell=cell,
            refusal=refusal,
            isolation=group.isolation,
            repeats=group.repeats,
            timeout_s=group.timeout_s,
            budget_s=group.repeat_budget_s,
            has_energy=group.has_energy,
            estimate_s=seconds,
            estimate_bytes=rough.num_bytes,
        )


def _scaling(group: ScalingGroup, common: dict[str, Any]) -> Iterator[Point]:
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
        refusal = _refusal(cell, config)
        rough = Estimate() if refusal else estimate(cell, config, group.repeat_budget_s, group.isolation)
        yield point, cell, refusal, rough


def _refusal(cell: Cell, config: VariantConfig) -> Refusal | None:
    """Return what the capabilities refuse to a scaling cell."""
    variant = variants[cell.variant]
    if cell.scope == "attention" and variant.attention is None:
        return ("attention", 'needs hidden states [B, L, E]: scope = "mixer"')
    request = Request(
        is_causal=cell.is_causal,
        has_key_padding_mask=cell.has_padding,
        is_grouped_query=cell.num_kv_heads != cell.num_heads,
        dropout_p=cell.dropout_p,
        seq_len=cell.seq_len,
        dtype=cell.dtype,
        device=cell.device,
    )
    return variant.capabilities_of(config).missing(request)
