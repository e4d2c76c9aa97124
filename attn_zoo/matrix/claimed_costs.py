"""What the formulas of a variant say about a cell, and the sizes that they take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from attn_zoo.attention import BuildContext
from attn_zoo.metadata import Form, Shape
from attn_zoo.records import Cell
from attn_zoo.registry import VariantConfig, make_config, variants

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """Fields of a record that formulas decide; see `Record`."""

    flops: int | None = None
    projection_flops: int | None = None
    min_bytes: int | None = None
    backward_ratio: float | None = None
    time_exponent: float | None = None
    memory_exponent: float | None = None


def claims(cell: Cell) -> Claims:
    """Return what the variant's formulas say of one forward of a scaling cell."""
    variant, shape = variants[cell.variant], call_shape(cell)
    flops, claimed = variant.flops(shape), variant.complexity_of(config_of(cell))
    exponents = Claims(time_exponent=claimed.time_exponent, memory_exponent=claimed.memory_exponent)
    if flops is None:
        return exponents
    try:
        return replace(
            exponents,
            flops=flops,
            projection_flops=variant.projection_flops(shape),
            min_bytes=variant.min_bytes(shape, DTYPE_BYTES[cell.dtype]),
            backward_ratio=variant.backward_ratio(shape),
        )
    except Exception:  # somebody else's formula must not spoil a measurement that is done
        return replace(exponents, flops=flops)


def form_of(cell: Cell) -> Form:
    """Return how a cell's variant is called."""
    return "attention" if cell.scope == "attention" else "mixer"


def config_of(cell: Cell) -> VariantConfig:
    """Return the options of a cell's variant."""
    return make_config(variants[cell.variant].config, cell.options, cell.variant)


def build_context(cell: Cell) -> BuildContext:
    """Return what a cell's variant is built for.

    Raises:
        ValueError: the cell leaves out a size.
    """
    for name in ("num_heads", "head_dim", "batch_size", "seq_len"):
        if getattr(cell, name) is None:
            raise ValueError(f"a {cell.kind} cell needs {name}")
    assert cell.num_heads is not None and cell.head_dim is not None and cell.seq_len is not None  # noqa: PT018
    return BuildContext(
        embed_dim=cell.num_heads * cell.head_dim,
        num_heads=cell.num_heads,
        num_kv_heads=cell.num_kv_heads or cell.num_heads,
        head_dim=cell.head_dim,
        max_seq_len=cell.seq_len,
        is_causal=cell.is_causal,
        dropout_p=cell.dropout_p,
        seed=cell.seed,
    )


def call_shape(cell: Cell) -> Shape:
    """Return all sizes of one call, as cost formulas take them.

    Raises:
        ValueError: the cell leaves out a size.
    """
    context = build_context(cell)
    assert cell.batch_size is not None  # checked above
    return context.shape(cell.batch_size, context.max_seq_len, config=config_of(cell), form=form_of(cell))


def forward_flops(cell: Cell, shape: Shape) -> float:
    """Return the FLOPs of one forward of the variant, by its formula or else its claimed exponent."""
    variant = variants[cell.variant]
    if (flops := variant.flops(shape)) is not None:
        return float(flops)
    growth = float(shape.query_len ** variant.complexity_of(config_of(cell)).time_exponent)
    return 4.0 * shape.batch_size * shape.num_heads * growth * shape.head_dim


def stored_claims(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what a run stores of each variant, so that a report need load none; see `attn_zoo.folder.Claim`."""
    known = {name: variants[name] for name in sorted(set(names) & set(variants))}
    return {
        name: {
            "time_exponent": one.complexity.time_exponent,
            "memory_exponent": one.complexity.memory_exponent,
            "time": one.complexity.time,
            "memory": one.complexity.memory,
            "is_exact": one.capabilities.is_exact,
            "routing_sees_future": one.capabilities.causal == "masked",
            "is_control": one.capabilities.is_control,
            "depends_on_padding": not one.capabilities.is_padding_invariant,
        }
        for name, one in known.items()
    }
