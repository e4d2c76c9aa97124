"""Which sequence lengths are tried: short ones in full, longer ones by one probe each, at the cost of a call or two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from attn_zoo.registry import VariantConfig

LENGTHS = (1, 2, 3, 5, 8, 33, 70)
FEW_LENGTHS = (1, 5, 70)  # for further sets of options and for the shared mixer around an attention that was checked
SPANS = (512, 709)  # what kernels like, whole blocks of any usual size, and eleven of 64 with a ragged one
LONGEST = 1100  # a probe may be compared with something dense; two blocks of 512 and one token more


def block_sizes(config: VariantConfig) -> tuple[int, ...]:
    """Return every whole number above 1 among the options, sorted: any of them may be a block, a chunk or a window."""
    values: list[object] = []
    for item in fields(config):
        value = getattr(config, item.name)
        values += value if isinstance(value, tuple) else [value]
    return tuple(sorted({value for value in values if type(value) is int and value > 1}))


def across_blocks(config: VariantConfig) -> tuple[int, ...]:
    """Return the lengths one token above one and two of each of `block_sizes`, as far as probes go.

    >>> from attn_zoo.registry import variants
    >>> across_blocks(variants["moba"].config(block_size=64))
    (4, 7, 65, 129)
    """
    lengths = {count * size + 1 for size in block_sizes(config) for count in (1, 2)}
    return tuple(sorted(length for length in lengths if length <= LONGEST))


def fitting(lengths: Iterable[int], multiple: int, longest: int) -> tuple[int, ...]:
    """Return the lengths rounded up to the variant's multiple, sorted, as far as they fit."""
    return tuple(sorted({fitted for length in lengths if (fitted := -(-length // multiple) * multiple) <= longest}))
