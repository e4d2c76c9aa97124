"""What the formulas of a variant say about one cell: the driver adds it to records, so that reports need no variant."""

from __future__ import annotations

from dataclasses import replace

from attn_zoo.metadata import Shape
from attn_zoo.records import Cell, Record
from attn_zoo.registry import VariantConfig, make_config, variants

__all__ = ["DTYPE_BYTES", "shape_of", "with_costs"]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def shape_of(cell: Cell, config: VariantConfig) -> Shape:
    """Return the sizes of a scaling cell as cost formulas take them.

    Args:
        cell: a scaling cell.
        config: its variant's options.
    """
    assert cell.batch_size is not None and cell.num_heads is not None  # noqa: PT018  a scaling cell has all sizes
    assert cell.seq_len is not None and cell.head_dim is not None  # noqa: PT018
    return Shape(
        batch_size=cell.batch_size,
        num_heads=cell.num_heads,
        num_kv_heads=cell.num_kv_heads or cell.num_heads,
        query_len=cell.seq_len,
        key_len=cell.seq_len,
        head_dim=cell.head_dim,
        is_causal=cell.is_causal,
        form="attention" if cell.scope == "attention" else "mixer",
        config=config,
    )


def with_costs(record: Record) -> Record:
    """Return the record with what its variant claims of one call; a training step has no claims."""
    cell = record.cell
    if record.flops is None or cell.scope == "model" or cell.variant not in variants:
        return record
    variant = variants[cell.variant]
    try:
        shape = shape_of(cell, make_config(variant.config, cell.options, cell.variant))
        return replace(
            record,
            projection_flops=variant.projection_flops(shape),
            min_bytes=variant.min_bytes(shape, DTYPE_BYTES[cell.dtype]),
            backward_ratio=variant.backward_ratio(shape),
        )
    except Exception:  # somebody else's formula must not stop a run whose measurement is done
        return record
