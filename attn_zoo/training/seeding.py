"""Randomness as a function of (seed, stream, step): independent streams, and nothing to save when a run is interrupted.

Every stream (initialisation, data order, dropout) has its own seed, derived by hashing, so that a change in one leaves
the others as they were: two variants that differ in dropout still see the same batches.
"""

from __future__ import annotations

import functools
import hashlib
import random
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from attn_zoo.attention.generators import seed_generators

Stream = Literal["init", "data", "dropout", "evaluation", "buckets", "pretrain", "hidden", "rank", "gate"]


def derive_seed(seed: int, stream: Stream, index: int = 0) -> int:
    """Return a 31-bit seed for part `index` of a stream.

    >>> derive_seed(0, "init") == derive_seed(0, "init"), derive_seed(0, "init") == derive_seed(0, "data")
    (True, False)
    """
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the global generators of python, numpy and torch (all devices): a variant may use any of them."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the old global state is exactly what has to be fixed
    seed_generators(seed)


@functools.lru_cache(maxsize=2)  # every batch of an epoch asks for it
def epoch_order(num_examples: int, seed: int, epoch: int) -> Tensor:
    """Return the order in which pass `epoch` over the data visits its examples, `[N]`."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "data", epoch))
    return torch.randperm(num_examples, generator=generator)


def batch_rows(step: int, batch_size: int, num_examples: int, seed: int) -> Tensor:
    """Return the examples of update `step` (1 is the first): the next `batch_size` of all passes laid end to end.

    No example is dropped at the end of a pass; a batch may span two.
    """
    first = (step - 1) * batch_size
    parts = []
    while batch_size > 0:
        epoch, offset = divmod(first, num_examples)
        part = epoch_order(num_examples, seed, epoch)[offset : offset + batch_size]
        parts.append(part)
        first += len(part)
        batch_size -= len(part)
    return torch.cat(parts)
