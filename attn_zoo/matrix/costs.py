"""What the formulas of a variant say about a cell, and the sizes that they take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attn_zoo.attention import BuildContext
from attn_zoo.metadata import Shape
from attn_zoo.records import Cell
from attn_zoo.registry import make_config, variants

__all__ = ["DTYPE_BYTES", "Claims", "build_context", "call_shape", "claims", "forward_flops", "stored_claims"]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """Fields of a record that formulas decide; see `Record`."""

    flops: int | None = None
    min_bytes: int | None = None
    backward_ratio: float | None = None


def claims(cell: Cell) -> Claims:
    """Return what the variant's formulas say of one forward of a scaling cell.

    Only attention alone has a formula for its traffic: the projections of a mixer are not counted in it.
    """
    complexity = variants[cell.variant].complexity
    if complexity.flops is None:
        return Claims()
    shape = call_shape(cell)
    flops = complexity.flops(shape)
    if cell.scope != "attention":
        return Claims(flops=flops)
    try:
        min_bytes = complexity.min_bytes(shape, DTYPE_BYTES[cell.dtype])
    except Exception:  # somebody else's formula must not spoil a measurement that is done
        return Claims(flops=flops)
    return Claims(flops=flops, min_bytes=min_bytes, backward_ratio=complexity.backward_ratio)


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
    config = make_config(variants[cell.variant].config, cell.options, cell.variant)
    return context.shape(cell.batch_size, context.max_seq_len, config=config)


def forward_flops(cell: Cell) -> float:
    """Return the FLOPs of one forward of the variant alone, by its formula or else its claimed exponent."""
    shape, claim = call_shape(cell), variants[cell.variant].complexity
    if claim.flops:
        return float(claim.flops(shape))
    return 4.0 * shape.batch_size * shape.num_heads * float(shape.query_len**claim.time_exponent) * shape.head_dim


def stored_claims(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return exponents, formulas and exactness by variant, stored with a run so that a report need load no variant."""
    return {
        name: {
            "time_exponent": variants[name].complexity.time_exponent,
            "memory_exponent": variants[name].complexity.memory_exponent,
            "time": variants[name].complexity.time,
            "memory": variants[name].complexity.memory,
            "is_exact": variants[name].capabilities.is_exact,
        }
        for name in sorted(set(names) & set(variants))
    }
