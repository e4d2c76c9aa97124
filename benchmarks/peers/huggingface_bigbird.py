"""Peer: BigBird of Hugging Face transformers, as shipped and without the dense matrix it returns.

Installed by `pip install attn-zoo[peers]`. The attention is called between projections, so that it stands beside ours.
As shipped it also assembles the attention probabilities, [B, H, L, L] and mostly zeros, whether or not anybody asks for
them: quadratic in time and memory. `stores_probs = false` takes that away and leaves the rest as it is: the fair
comparison of the mechanism. Window and global blocks are fixed (three; the first and the last).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_zoo import AbstractAttention, BuildContext, UnsupportedError, VariantConfig, register_attention
from attn_zoo.metadata import Capabilities, Complexity, Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceBigBirdConfig(VariantConfig):
    """What can be chosen there, and whether it also stores the probabilities.

    Args:
        block_size: tokens in a block.
        num_random_blocks: random blocks of each row.
        stores_probs: as shipped. False swallows the writes into the dense matrix.
    """

    block_size: int = 64
    num_random_blocks: int = 3
    stores_probs: bool = True

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return both forms."""
        return {}, {"stores_probs": False}


class _Swallow:
    """Stands for the dense matrix: takes every write and every view, holds nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __setitem__(self, where: Any, what: Any) -> None:
        pass

    def __getitem__(self, where: Any) -> _Swallow:
        return self

    def view(self, *shape: int) -> _Swallow:
        return self

    def scatter_(self, *arguments: Any) -> _Swallow:
        return self


@contextlib.contextmanager
def _without_dense_matrix(module: Any, seq_len: int) -> Iterator[None]:
    """Let `torch.zeros` of that module return a `_Swallow` where it makes the [B, H, L, L] matrix."""
    real = module.torch

    def zeros(*shape: Any, **options: Any) -> Any:
        if len(shape) == 4 and shape[-2:] == (seq_len, seq_len):
            return _Swallow(options["device"])
        return real.zeros(*shape, **options)

    proxy = types.SimpleNamespace(**{name: getattr(real, name) for name in dir(real) if not name.startswith("__")})
    proxy.zeros = zeros
    module.torch = proxy
    try:
        yield
    finally:
        module.torch = real


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
            "cross_attention": "blocks are places in one sequence",
            "key_padding_mask": "not wrapped here",
            "decode": "it has no causal form",
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
            "random blocks are drawn only while training; in evaluation every row gets block 0 in their place",
            "masks are -10000 on the scores",
            "below 5 + 2 r blocks its model turns to full attention",
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
            from transformers.models.big_bird import modeling_big_bird
            from transformers.models.big_bird.configuration_big_bird import BigBirdConfig
        except ImportError as error:
            raise UnsupportedError(
                "requires", f"huggingface_bigbird: pip install 'attn-zoo[peers]' ({error})"
            ) from error
        self._source = modeling_big_bird
        settings = BigBirdConfig(
            hidden_size=build.num_heads * build.head_dim,
            num_attention_heads=build.num_heads,
            block_size=config.block_size,
            num_random_blocks=config.num_random_blocks,
            max_position_embeddings=build.max_seq_len,
        )
        inner = modeling_big_bird.BigBirdBlockSparseAttention(settings, seed=build.seed)
        for name in ("query", "key", "value"):  # projections are the mixer's
            setattr(inner, name, None)
        self.inner = inner
        self._masks: tuple[Tensor, ...] | None = None

    def _ones(self, batch_size: int, seq_len: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the masks of sequences without padding, made once."""
        if self._masks is None or self._masks[1].shape[:3:2] != (batch_size, seq_len):
            mask = torch.ones(batch_size, seq_len, device=device)
            blocked, band, from_mask, to_mask = self._source.BigBirdModel.create_masks_for_block_sparse_attn(
                mask, self.config.block_size
            )
            self._masks = (band, from_mask, to_mask, blocked, blocked)
        return self._masks

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return self._run(query, key, value)[0]

    def _run(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, num_heads, seq_len, head_dim = query.shape
        config = self.config
        if seq_len // config.block_size < 5 + 2 * config.num_random_blocks:  # as its model decides
            probs = torch.softmax(query @ key.mT / head_dim**0.5, dim=-1)
            return probs @ value, probs
        stored = contextlib.nullcontext() if config.stores_probs else _without_dense_matrix(self._source, seq_len)
        with stored:
            output, probs = self.inner.bigbird_block_sparse_attention(
                query,
                key,
                value,
                *self._ones(batch_size, seq_len, query.device),
                num_heads,
                config.num_random_blocks,
                head_dim,
                config.block_size,
                config.block_size,
                batch_size,
                seq_len,
                seq_len,
                seed=self.build.seed,
                plan_from_length=None,
                plan_num_rand_blocks=None,
            )
        return output.transpose(1, 2), probs  # [B, H, L, D]
