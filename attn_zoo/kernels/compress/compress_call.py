"""One compression, as all paths that compute it take it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CompressCall(NamedTuple):
    """One or two sources of tokens (keys and values), one or two matrices; what stands alone goes with both others.

    Args:
        tokens: each `[B, G, S, D]`, alike in shape, strides and dtype.
        matrices: each `[B or 1, G or 1, S, k]`, alike likewise; a 1 is shared along that dimension.
        mask: bool `[B, S]`, True = left out, or None.
    """

    tokens: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]
    mask: Tensor | None

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Which tokens meet which matrix: one pair for each result."""
        count = max(len(self.tokens), len(self.matrices))
        return [(self.tokens[i % len(self.tokens)], self.matrices[i % len(self.matrices)]) for i in range(count)]
