"""Random inputs and padding of scaling cells: the same for the same seed, whatever the number of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

BLOCK_LEN = 2**20
"""Numbers of one tensor that are drawn from one generator: a change of it changes all inputs."""


def padding_of(batch_size: int, seq_len: int, device: str) -> Tensor:
    """Return the mask `[B, L]` of a padded cell: the last quarter of every second sequence, the first one included."""
    mask = torch.zeros(batch_size, seq_len, dtype=torch.bool, device=device)
    mask[::2, seq_len - seq_len // 4 :] = True
    return mask


def normal(shape: tuple[int, ...], seed: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return random normal numbers, drawn on all threads of torch and the same for any number of them.

    `torch.randn` draws on one thread: 3 s for the inputs of 262144 tokens with 8 heads of 64.

    Args:
        shape: of the result.
        seed: equal seeds, equal numbers.
        dtype: of the result.
    """
    tensor = torch.empty(shape, dtype=dtype)
    blocks = torch.split(tensor.view(-1), BLOCK_LEN)
    seeds = np.random.SeedSequence(seed).generate_state(len(blocks)).tolist()

    def fill(block: Tensor, block_seed: int) -> None:
        block.normal_(generator=torch.Generator().manual_seed(block_seed))

    with ThreadPoolExecutor(min(torch.get_num_threads(), len(blocks))) as pool:
        list(pool.map(fill, blocks, seeds))
    return tensor
