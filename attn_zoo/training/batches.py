"""Batches: which rows of a split an update sees, padded to a length that suits protocol and variant.

A batch is padded to its longest example, rounded up to `pad_multiple` (and to the multiple a variant asks for). Where
all inputs of a task have one length, nothing is rounded but for the variant, and there is a mask only if that adds
positions: a token id never says what is padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_zoo.metadata import Capabilities
from attn_zoo.tasks import Split, TaskKind, TaskSpec
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training.protocol import Protocol
from attn_zoo.training.seeding import batch_rows, derive_seed

POOLED_KINDS: frozenset[TaskKind] = frozenset({"classification", "pair"})
"""Kinds of task whose model pools a sequence to one vector."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Model input and target.

    Args:
        tokens: int64 `[B, L]`.
        key_padding_mask: bool `[B, L]`, True = padding; None where there is none.
        labels: int64, `[B]` or one for each position of the input (of the target, for seq2seq).
        num_tokens: tokens that are not padding, in both sequences.
        num_positions: tokens and padding.
        other_tokens: int64 `[B, L']`: second input, or target as the decoder reads it.
        other_padding_mask: of those.
        weight: share of the items of a larger batch, whose numbers the two above then are; None for a whole batch.
    """

    tokens: Tensor
    key_padding_mask: Tensor | None
    labels: Tensor
    num_tokens: int
    num_positions: int
    other_tokens: Tensor | None = None
    other_padding_mask: Tensor | None = None
    weight: Tensor | None = None

    def part(self, index: int, count: int) -> Batch:
        """Return every `count`-th example, from `index` on, padded as all are."""
        own = slice(index, None, count)
        masks = (self.key_padding_mask, self.other_padding_mask)
        key_padding_mask, other_padding_mask = (None if mask is None else mask[own] for mask in masks)
        is_item = self.labels != IGNORED_LABEL
        return replace(
            self,
            tokens=self.tokens[own],
            key_padding_mask=key_padding_mask,
            labels=self.labels[own],
            other_tokens=None if self.other_tokens is None else self.other_tokens[own],
            other_padding_mask=other_padding_mask,
            weight=is_item[own].sum().double() / is_item.sum().clamp(min=1),
        )

    def tell_compiler(self) -> None:
        """Tell torch's compiler that lengths vary, and only they.

        It would find out by compiling for the first length alone. And where training and evaluation have batches of
        different sizes, it would make code for any size of the later ones.
        """
        from torch._dynamo import mark_static, maybe_mark_dynamic  # loads the compiler

        for tensor in (self.tokens, self.key_padding_mask, self.other_tokens, self.other_padding_mask):
            if tensor is not None:
                mark_static(tensor, 0)
                maybe_mark_dynamic(tensor, 1)

    @property
    def shapes(self) -> tuple[torch.Size | None, ...]:
        """Sizes of both inputs."""
        return self.tokens.shape, None if self.other_tokens is None else self.other_tokens.shape


@dataclass(frozen=True, slots=True)
class Feed:
    """A split on the training device, in its compact type.

    Args:
        tensors: of the split, by name. Not a `Split`, which would wait for the device to look at the lengths again.
        lengths: the same on the host, where the width of a batch is decided.
        other_lengths: likewise of second sequences.
        groups: of the examples, on the host alone, where scores are broken down.
    """

    tensors: Mapping[str, Tensor]
    lengths: Tensor
    other_lengths: Tensor | None = None
    groups: Tensor | None = None

    @property
    def costs(self) -> Tensor:
        """Tokens of each example, `[N]`."""
        return self.lengths.long() if self.other_lengths is None else self.lengths.long() + self.other_lengths.long()


class Batcher:
    """Decide lengths and make batches of a task on a device, as protocol and variant want them padded."""

    def __init__(
        self, spec: TaskSpec, protocol: Protocol, capabilities: Capabilities, device: torch.device | str
    ) -> None:
        self.spec = spec
        self.device = torch.device(device)
        # What the mixer sees beyond the tokens.
        self.num_extra = 1 if protocol.pooling == "cls" and spec.kind in POOLED_KINDS else 0
        self.multiple = math.lcm(protocol.pad_multiple if spec.has_padding else 1, capabilities.seq_len_multiple)
        self.is_full_length = protocol.is_full_length or not capabilities.variable_seq_len
        longest = max(spec.max_seq_len, spec.other_max_seq_len)
        self.max_seq_len = self._rounded(longest)
        """Longest batch: what the model must be built for."""
        self.has_mask = spec.has_padding or self.max_seq_len > min(spec.max_seq_len, spec.other_max_seq_len or longest)
        """Whether batches may hold padding."""
        self.is_fixed_length = self.is_full_length or not spec.has_padding
        """Whether all batches have one length."""

    def _rounded(self, longest: int) -> int:
        return -(-(longest + self.num_extra) // self.multiple) * self.multiple - self.num_extra

    def width(self, longest: int) -> int:
        """Return the padded length of a batch whose longest example has `longest` tokens."""
        return self.max_seq_len if self.is_full_length else self._rounded(longest)

    def feed(self, split: Split) -> Feed:
        """Return the split ready for `batch`."""
        on_device = {name: tensor.to(self.device) for name, tensor in split.tensors().items() if name != "groups"}
        return Feed(on_device, split.lengths, split.other_lengths, split.groups)

    def batch(self, feed: Feed, rows: Tensor) -> Batch:
        """Return the given rows (indices on the host)."""
        on_device = send(rows, self.device)
        picked = {name: tensor[on_device] for name, tensor in feed.tensors.items()}
        lengths = feed.lengths[rows]
        tokens, mask = self._padded(picked["tokens"], picked["lengths"], lengths)
        num_tokens, num_positions, width = int(lengths.sum(dtype=torch.int64)), tokens.numel(), tokens.shape[1]
        other_tokens = other_mask = None
        if feed.other_lengths is not None:
            lengths = feed.other_lengths[rows]
            other_tokens, other_mask = self._padded(picked["other_tokens"], picked["other_lengths"], lengths)
            num_tokens += int(lengths.sum(dtype=torch.int64))
            num_positions += other_tokens.numel()
            width = other_tokens.shape[1] if self.spec.kind == "seq2seq" else width
        labels = picked["labels"].long()
        if labels.ndim == 2:
            labels = _fitted(labels, width, IGNORED_LABEL)
        return Batch(tokens, mask, labels, num_tokens, num_positions, other_tokens, other_mask)

    def _padded(self, tokens: Tensor, lengths: Tensor, host_lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        longest, width = int(host_lengths.max()), self.width(int(host_lengths.max()))
        mask = None
        if self.spec.has_padding or width > longest:
            mask = torch.arange(width, device=self.device) >= lengths.long()[:, None]
        return _fitted(tokens, width, self.spec.pad_id), mask


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device; from pinned memory, so that the host does not wait for the GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _fitted(rows: Tensor, width: int, fill: int) -> Tensor:
    """Return `rows` `[B, L]` as int64 `[B, width]`, cut or filled on the right."""
    stored = min(width, rows.shape[1])
    fitted = rows.new_full((len(rows), width), fill, dtype=torch.int64)
    fitted[:, :stored] = rows[:, :stored]
    return fitted


class DataOrder:
    """Which examples each update sees: a function of seed and step, the same for every variant.

    Without bucketing the passes over the data are laid end to end and cut into batches. With it, batches of similar
    lengths are formed, so that less is padded: the batches of one pass are taken in windows, the examples of a window
    sorted by length and cut into batches again, and these shuffled. A batch that begins in one pass and ends in the
    next belongs to no window. Either way a pass visits every example once.

    Args:
        costs: tokens of each example, `[N]`, on the host.
        batch_size: examples per update.
        seed: of the run.
        bucket_batches: batches in a window; 0 or 1 forms none.
    """

    def __init__(self, costs: Tensor, *, batch_size: int, seed: int, bucket_batches: int = 0) -> None:
        self.costs, self.batch_size, self.seed, self.bucket_batches = costs, batch_size, seed, bucket_batches
        self._window: tuple[int, list[Tensor]] | None = None  # the one in use: its first batch, and its batches

    def rows(self, step: int) -> Tensor:
        """Return the examples of update `step` (1 is the first)."""
        batch = step - 1
        first, last = self._window_around(batch)
        if last - first < 2:
            return batch_rows(step, self.batch_size, len(self.costs), self.seed)
        if self._window is None or self._window[0] != first:
            self._window = first, self._sorted(first, last)
        return self._window[1][batch - first]

    def _window_around(self, batch: int) -> tuple[int, int]:
        """Return the first batch of the window that holds `batch`, and the first after it."""
        size, num_examples = self.batch_size, len(self.costs)
        epoch = batch * size // num_examples
        if self.bucket_batches < 2 or (batch + 1) * size > (epoch + 1) * num_examples:
            return batch, batch + 1
        begin, end = -(-epoch * num_examples // size), (epoch + 1) * num_examples // size  # whole batches of the pass
        first = begin + (batch - begin) // self.bucket_batches * self.bucket_batches
        return first, min(first + self.bucket_batches, end)

    def _sorted(self, first: int, last: int) -> list[Tensor]:
        steps = range(first + 1, last + 1)
        rows = torch.cat([batch_rows(step, self.batch_size, len(self.costs), self.seed) for step in steps])
        rows = rows[torch.sort(self.costs[rows], stable=True).indices]
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "buckets", first))
        batches = torch.split(rows, self.batch_size)
        return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
