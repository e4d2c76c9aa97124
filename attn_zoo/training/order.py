"""Which examples each update sees: a function of seed and step, the same for every variant.

Without bucketing the passes over the data are laid end to end and cut into batches. With it, batches of similar lengths
are formed, so that less is padded: the batches of one pass are taken in windows, the examples of a window sorted by
length and cut into batches again, and these shuffled. A batch that begins in one pass and ends in the next belongs to
no window. Either way a pass visits every example once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_zoo.training.seeding import batch_rows, derive_seed

__all__ = ["DataOrder"]


class DataOrder:
    """The rows of every batch.

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
