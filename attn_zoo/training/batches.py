"""Batches: rows of a split, padded to a length that suits protocol and variant.

A batch is padded to its longest example, rounded up to `pad_multiple` (and to the multiple a variant asks for).
Examples are not sorted by length: that would change the data order, and with it what variants whose pattern depends on
the length compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_zoo.metadata import Capabilities
from attn_zoo.tasks import Split, TaskSpec
from attn_zoo.training.protocol import Protocol

__all__ = ["Batch", "Batcher", "Feed"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Model input and target.

    Args:
        tokens: int64 `[B, L]`.
        key_padding_mask: bool `[B, L]`, True = padding; None for tasks without padding.
        labels: int64 `[B]`.
        num_tokens: tokens that are not padding.
    """

    tokens: Tensor
    key_padding_mask: Tensor | None
    labels: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Feed:
    """A split on the training device, in its compact type.

    Args:
        split: the examples.
        lengths: the same as in `split`, on the host, where the width of a batch is decided.
    """

    split: Split
    lengths: Tensor


class Batcher:
    """Decide lengths and make batches.

    Args:
        spec: of the task.
        protocol: gives pooling and padding.
        capabilities: of the variant.
        device: where batches go.
    """

    def __init__(
        self, spec: TaskSpec, protocol: Protocol, capabilities: Capabilities, device: torch.device | str
    ) -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.num_extra = 1 if protocol.pooling == "cls" else 0  # what the mixer sees beyond the tokens
        self.multiple = math.lcm(protocol.pad_multiple, capabilities.seq_len_multiple)
        self.is_full_length = protocol.is_full_length or not capabilities.variable_seq_len
        self.max_seq_len = self._rounded(spec.max_seq_len)
        """Longest batch: what the model must be built for."""

    def _rounded(self, longest: int) -> int:
        return -(-(longest + self.num_extra) // self.multiple) * self.multiple - self.num_extra

    def width(self, longest: int) -> int:
        """Return the padded length of a batch whose longest example has `longest` tokens."""
        return self.max_seq_len if self.is_full_length else self._rounded(longest)

    def feed(self, split: Split) -> Feed:
        """Return the split ready for `batch`."""
        on_device = Split(
            tokens=split.tokens.to(self.device),
            lengths=split.lengths.to(self.device),
            labels=split.labels.to(self.device),
        )
        return Feed(on_device, split.lengths.cpu())

    def batch(self, feed: Feed, rows: Tensor) -> Batch:
        """Return the given rows (indices on the host)."""
        lengths = feed.lengths[rows]
        width = self.width(int(lengths.max()))
        picked = feed.split.select(rows.to(self.device))
        stored = min(width, picked.tokens.shape[1])
        tokens = torch.full((len(rows), width), self.spec.pad_id, dtype=torch.int64, device=self.device)
        tokens[:, :stored] = picked.tokens[:, :stored]
        mask = None
        if self.spec.has_padding:
            mask = torch.arange(width, device=self.device) >= picked.lengths.long()[:, None]
        return Batch(tokens, mask, picked.labels.long(), int(lengths.sum(dtype=torch.int64)))
