"""The cells of a `[[step]]` group: training steps of one protocol over lengths, refused where a training would be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attn_zoo.errors import UnknownNameError, UnsupportedError
from attn_zoo.matrix.costs import DTYPE_BYTES
from attn_zoo.matrix.plan.estimate import Estimate, attention_flops, estimate, rough_seconds
from attn_zoo.matrix.plan.groups import StepGroup
from attn_zoo.matrix.plan.planned import Point
from attn_zoo.matrix.plan.sentences import Problem
from attn_zoo.records import PASSES, STEP_VERSION, Cell
from attn_zoo.registry import make_config, variants

__all__ = ["step_problems", "steps"]

COMPILE_S = 60.0
"""Assumed, for a model that is compiled first."""


def step_problems(group: Mapping[str, Any], where: str) -> list[Problem]:
    """Return what is wrong with the names in a step group that are not about variants.

    Args:
        group: raw, with defaults.
        where: path of the group, such as `"step[0]"`.
    """
    from attn_zoo.training.protocol import resolve_protocol  # imports the model: only where there is training

    try:
        resolve_protocol(str(group.get("protocol", StepGroup.model_fields["protocol"].default)))
    except UnknownNameError as error:
        return [(f"{where}.protocol", str(error))]
    return []


def steps(group: StepGroup, common: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the cells of one variant in a step group.

    Args:
        group: which group.
        common: fields of the cell that the caller knows: variant, label, options, overrides, digest, device, threads.
    """
    from attn_zoo.training.protocol import resolve_protocol

    protocol = resolve_protocol(group.protocol)
    axes: dict[str, Sequence[Any]] = {
        "dtype": group.dtypes,
        "batch_size": group.batch_size or (protocol.batch_size,),
        "has_padding": group.has_padding,
        "seed": group.seeds,
        "seq_len": sorted(group.seq_len),
    }
    for values in itertools.product(*axes.values()):
        point = {"scope": "model", "protocol": protocol.name, **dict(zip(axes, values, strict=True))}
        cell = Cell(
            kind="scaling",
            pass_="step",  # noqa: S106 - a word of ours
            num_heads=protocol.num_heads,
            num_kv_heads=protocol.num_heads,
            head_dim=protocol.head_dim or protocol.embed_dim // protocol.num_heads,
            dropout_p=protocol.dropout_p,
            protocol_version=STEP_VERSION,
            **point,
            **common,
        )
        try:
            rough = _checked(cell, group)
        except UnsupportedError as error:
            yield point, cell, (error.capability, error.reason), Estimate()
        else:
            yield point, cell, None, rough


def _checked(cell: Cell, group: StepGroup) -> Estimate:
    """Return the rough cost of a cell that no capability refuses: its attention in every layer, and its linear maps.

    Raises:
        UnsupportedError: the variant, or training itself, refuses what it asks.
    """
    from attn_zoo.training.learner import step_protocol, step_spec
    from attn_zoo.training.requirements import require

    assert cell.seq_len is not None and cell.batch_size is not None  # noqa: PT018  every step has both
    protocol, spec = step_protocol(cell), step_spec(cell.seq_len, has_padding=cell.has_padding)
    require(cell, spec, protocol, has_mask=cell.has_padding)
    config = make_config(variants[cell.variant].config, cell.options, cell.variant)
    one = estimate(cell, config, group.repeat_budget_s, group.isolation)
    if one.num_bytes is None:
        return Estimate()
    tokens, embed_dim, ffn_dim = cell.batch_size * cell.seq_len, protocol.embed_dim, protocol.ffn_dim
    linear = tokens * (8 * embed_dim**2 + 4 * embed_dim * ffn_dim)
    flops = protocol.num_layers * (attention_flops(cell, config) + linear) * PASSES["step"].num_forwards(2.0)
    seconds = rough_seconds(flops, cell, group.repeat_budget_s, group.isolation) + (
        COMPILE_S if protocol.compile else 0.0
    )
    saved = tokens * (8 * embed_dim + 2 * ffn_dim) * DTYPE_BYTES[cell.dtype]
    return Estimate(seconds, protocol.num_layers * (one.num_bytes + saved))
