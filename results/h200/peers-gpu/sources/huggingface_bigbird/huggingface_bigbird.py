"""Peer: BigBird of Hugging Face transformers, as shipped and without what is not the mechanism.

Installed by `pip install attn-zoo[peers]`. The attention is called between projections, so that it stands beside ours.
As shipped it also assembles the attention probabilities, [B, H, L, L] and mostly zeros, whether or not anybody asks for
them, and in training it draws its random blocks anew in every forward, in Python and from one seed, so always the same.
`stores_probs = false` and `draws_each_call = false` take these away and leave the rest as it is: the fair comparison of
the mechanism. Window and global blocks are fixed (three; the first and the last).

It has random blocks while training only: in evaluation each of them is block 0. A mechanism is compared in one form, so
here both modes compute what training does, its draw included.

It computes softmax over a list of blocks; a block that is listed several times counts several times (`reference`). The
probabilities it returns are not those weights: copies of a block overwrite one another in the dense matrix, so one
copy's share is left of them, and such rows sum to less than 1.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from attn_zoo import AbstractAttention, BuildContext, UnsupportedError, VariantConfig, register_attention
from attn_zoo.metadata import Capabilities, Complexity, Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceBigBirdConfig(VariantConfig):
    """What can be chosen there, and what it does besides.

    Args:
        block_size: tokens in a block.
        num_random_blocks: random blocks of each row.
        stores_probs: as shipped. False swallows the writes into the dense matrix.
        draws_each_call: as shipped. False draws the random blocks of a length once and keeps them on the device.
    """

    block_size: int = 64
    num_random_blocks: int = 3
    stores_probs: bool = True
    draws_each_call: bool = True

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return all it does, and the mechanism alone."""
        return {}, {"stores_probs": False, "draws_each_call": False}


class _Swallow:
    """Stands for the dense matrix: takes every write and every view, holds nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __setitem__(self, where: Any, what: Any) -> None:
        pass

    def __getitem__(self, *anything: Any) -> _Swallow:
        return self

    view = scatter_ = __getitem__


class _Torch:
    """Torch with some functions of ours in the place of its own."""

    def __init__(self, own: dict[str, Any]) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return self._own.get(name) or getattr(torch, name)


@register_attention(
    "huggingface_bigbird",
    config=HuggingFaceBigBirdConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=False,
        key_padding_mask=False,
        seq_len_multiple=64,
        why={
            "causal": "it has no causal form",
            "decode": "it has no causal form",
            "cross_attention": "blocks are places in one sequence",
            "key_padding_mask": "not wrapped here",
            "seq_len_multiple": "it takes whole blocks only",
        },
    ),
    complexity=Complexity(
        time="B H L (g + w + r) C D",
        memory="B H L L as shipped",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
    ),
    reference=Reference(
        title="Big Bird: Transformers for Longer Sequences",
        authors="Zaheer et al.",
        year=2020,
        url="https://github.com/huggingface/transformers",
        code="https://github.com/huggingface/transformers",
        deviations=(
            "evaluation draws the random blocks of training; as shipped every row gets block 0 in their place",
            "a block that is listed several times counts several times",
            "the probabilities it returns keep one copy of such a block: times the values, they are not the output",
            "masks are -10000 on the scores",
            "up to 5 + 2 r blocks its model turns to full attention",
            "every forward seeds numpy's global generator",
        ),
    ),
)
class HuggingFaceBigBirdAttention(AbstractAttention):
    """`BigBirdBlockSparseAttention` between its projections.

    Args:
        config: block size and random blocks.
        build: sizes.

    Raises:
        UnsupportedError: the package is not installed.
    """

    config: HuggingFaceBigBirdConfig

    def __init__(self, config: HuggingFaceBigBirdConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        try:
            from transformers.models.big_bird.configuration_big_bird import BigBirdConfig
        except ImportError as error:
            hint = "huggingface_bigbird: pip install 'attn-zoo[peers]'"
            raise UnsupportedError("requires", f"{hint} ({error})") from error
        sizes = {"block_size": config.block_size, "num_random_blocks": config.num_random_blocks}
        sizes |= {"hidden_size": build.num_heads * build.head_dim, "num_attention_heads": build.num_heads}
        settings = BigBirdConfig(**sizes, max_position_embeddings=build.max_seq_len)
        inner = self._source.BigBirdBlockSparseAttention(settings, seed=build.seed)
        for name in ("query", "key", "value"):  # projections are the mixer's
            setattr(inner, name, None)
        self.inner = inner.train()
        self._masks: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}
        self._drawn: dict[int, list[np.ndarray]] = {}
        self._on_device: dict[tuple[int, torch.device], Tensor] = {}

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but its code, which keeps its random blocks; nothing else there depends on the mode."""
        super().train(mode)
        self.inner.train()
        return self

    @property
    def _source(self) -> Any:
        """Its code: no attribute, for a copy of this module must not copy that."""
        from transformers.models.big_bird import modeling_big_bird

        return modeling_big_bird

    def _ones(self, query: Tensor) -> tuple[Tensor, ...]:
        """Return the masks of sequences without padding, made once."""
        key = (query.shape[0], query.shape[2], query.dtype)
        if key not in self._masks:
            mask = torch.ones(key[:2], device=query.device, dtype=query.dtype)
            blocked, band, from_mask, to_mask = self._source.BigBirdModel.create_masks_for_block_sparse_attn(
                mask, self.config.block_size
            )
            self._masks[key] = (band, from_mask, to_mask, blocked, blocked)
        return self._masks[key]

    def _draw(self, seq_len: int) -> list[np.ndarray]:
        """Return the random blocks its own code draws: `[blocks - 2, r]` for each head."""
        inner, size, count = self.inner, self.config.block_size, self.config.num_random_blocks
        heads = range(self.build.num_heads)
        np.random.seed(self.build.seed)  # noqa: NPY002 - what it does itself
        if seq_len in (1024, 3072, 4096):  # "old plans used in paper"
            spans, row_of = (inner.max_seqlen, inner.max_seqlen, size, size), inner._bigbird_block_rand_mask
            return [row_of(*spans, count, last_idx=1024)[: seq_len // size - 2] for _ in heads]
        plan = inner._get_rand_attn_plan(seq_len, size, count)
        spans = (seq_len, seq_len, size, size)
        return list(inner._bigbird_block_rand_mask_with_head(*spans, len(heads), *plan))

    @contextlib.contextmanager
    def _stripped(self, seq_len: int) -> Iterator[None]:
        """Take away from its code what the options do not want of it."""
        inner, source, own = self.inner, self._source, dict[str, Any]()

        def zeros(*shape: Any, **options: Any) -> Any:  # of which one is the [B, H, L, L] matrix
            if len(shape) == 4 and shape[-2:] == (seq_len, seq_len):
                return _Swallow(options["device"])
            return torch.zeros(*shape, **options)

        def tensor(data: Any, *, device: torch.device, dtype: torch.dtype) -> Tensor:
            """Return the blocks as they were copied to the device at first: each copy would be waited for."""
            place = seq_len, device
            if place not in self._on_device:
                self._on_device[place] = torch.tensor(data, device=device, dtype=dtype)
            return self._on_device[place]

        if not self.config.stores_probs:
            own["zeros"] = zeros
        if not self.config.draws_each_call:
            if seq_len not in self._drawn:
                self._drawn[seq_len] = self._draw(seq_len)
            heads = itertools.cycle(self._drawn[seq_len])
            inner._bigbird_block_rand_mask = lambda *_, **__: next(heads)
            inner._bigbird_block_rand_mask_with_head = lambda *_, **__: self._drawn[seq_len]
            own["tensor"] = tensor
        if own:
            source.torch = _Torch(own)
        try:
            yield
        finally:
            source.torch = torch
            if not self.config.draws_each_call:
                del inner._bigbird_block_rand_mask, inner._bigbird_block_rand_mask_with_head

    def _is_dense(self, seq_len: int) -> bool:
        """Whether its model would turn to full attention."""
        return seq_len // self.config.block_size <= 5 + 2 * self.config.num_random_blocks

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return self._run(query, key, value)[0]

    def _run(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, num_heads, seq_len, head_dim = query.shape
        config = self.config
        if self._is_dense(seq_len):
            probs = torch.softmax(query @ key.mT / head_dim**0.5, dim=-1)
            return probs @ value, probs
        with self._stripped(seq_len):
            output, probs = self.inner.bigbird_block_sparse_attention(
                *(query, key, value),
                *self._ones(query),
                *(num_heads, config.num_random_blocks, head_dim, config.block_size, config.block_size),
                *(batch_size, seq_len, seq_len),
                seed=self.build.seed,
                plan_from_length=None,
                plan_num_rand_blocks=None,
            )
        return output.transpose(1, 2), probs  # [B, H, L, D]

    def counts(self, seq_len: int) -> Tensor:
        """Return how often each row of blocks lists each block, `[H, blocks, blocks]`."""
        num_blocks = seq_len // self.config.block_size
        counts = torch.ones(self.build.num_heads, num_blocks, num_blocks)
        if self._is_dense(seq_len):
            return counts
        counts[:, 1:-1] = 0
        for head, drawn in enumerate(self._draw(seq_len)):
            for row, blocks in enumerate(drawn.tolist(), start=1):
                near = {row - 1, row, row + 1} | {0, num_blocks - 1}
                for block in [*near, *blocks]:
                    counts[head, row, block] += 1
        return counts

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """Return what its output weighs the values by, `[B, H, L, L]`: a block listed twice counts twice."""
        size = self.config.block_size
        counts = self.counts(query.shape[2]).to(query).repeat_interleave(size, 1).repeat_interleave(size, 2)
        return torch.softmax(query @ key.mT / query.shape[-1] ** 0.5 + counts.log(), dim=-1)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute softmax over its list of blocks, dense; only the choice of random blocks is its own code's."""
        return self.weights(query, key) @ value
