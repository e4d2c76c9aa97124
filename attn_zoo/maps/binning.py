"""Weights of long inputs in few squares: the mean of each block of pairs, or the one furthest from zero."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Axis", "Pool", "PooledWeights", "make_axis", "pool_weights"]

Pool = Literal["max", "mean"]


@dataclass(frozen=True, slots=True)
class Axis:
    """Positions of one sequence, in bins of equally many.

    Args:
        symbols: a name for each position.
        width: positions in a bin; the last one may have fewer.
    """

    symbols: tuple[str, ...]
    width: int = 1

    @property
    def num_bins(self) -> int:
        """How many squares."""
        return -(-len(self.symbols) // self.width)


def make_axis(symbols: tuple[str, ...], max_bins: int) -> Axis:
    """Return the positions in at most `max_bins` bins."""
    return Axis(symbols, max(1, -(-len(symbols) // max_bins)))


@dataclass(frozen=True, slots=True)
class PooledWeights:
    """What one panel for each head shows.

    Args:
        name: of the layer.
        values: `[H, rows, columns]`, in squares.
        rows: of the queries.
        columns: of the keys.
        heads: number of each head, counted from 1.
    """

    name: str
    values: NDArray[np.float32]
    rows: Axis
    columns: Axis
    heads: tuple[int, ...]


def pool_weights(pieces: Iterable[Tensor], rows: Axis, columns: Axis, pool: Pool) -> NDArray[np.float32]:
    """Return `[H, rows, columns]` of pieces of columns `[1, H, L, n]`, holding no more than one piece in full.

    Args:
        pieces: as `attn_zoo.attention.effective.weight_columns` yields them; what is beyond either axis is padding.
        rows: of the queries.
        columns: of the keys.
        pool: `"max"` keeps the weight of each block that is furthest from zero, with its sign; `"mean"` averages.
    """
    num_rows, num_columns = len(rows.symbols), len(columns.symbols)
    narrow = [_pooled(piece[0, :, :num_rows].float(), 1, rows.width, pool) for piece in pieces]
    wide = torch.cat(narrow, dim=2)[:, :, :num_columns]
    found: NDArray[np.float32] = _pooled(wide, 2, columns.width, pool).numpy()
    return found


def _pooled(values: Tensor, dim: int, width: int, pool: Pool) -> Tensor:
    if width == 1:
        return values
    parts = torch.split(values, width, dim)
    if pool == "mean":
        return torch.stack([part.mean(dim) for part in parts], dim)
    high, low = (torch.stack([getattr(part, name)(dim) for part in parts], dim) for name in ("amax", "amin"))
    return torch.where(high >= -low, high, low)
