"""Peer: torch's compiled FlexAttention over the pattern that our BigBird draws.

On a CPU it has no backward pass, so only `infer` can be measured there, and its block mask holds all pairs of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attn_zoo import AbstractAttention, BuildContext, UnsupportedError, VariantConfig, register_attention
from attn_zoo.kernels.blocks.call import why_not_flex
from attn_zoo.kernels.blocks.layout import BlockLayout
from attn_zoo.kernels.exact.flex_attention import run_compiled
from attn_zoo.metadata import Capabilities, Complexity, Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class FlexBigBirdConfig(VariantConfig):
    """The pattern.

    Args:
        block_size: tokens in a block.
        num_window_blocks: around the query's own.
        num_global_blocks: leading blocks that see and are seen by all.
        num_random_blocks: further blocks for each row and head.
    """

    block_size: int = 64
    num_window_blocks: int = 3
    num_global_blocks: int = 2
    num_random_blocks: int = 3


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (count, indices) of the true blocks of each row of `[H, rows, columns]`, those first, for a batch of 1."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None], order.int()[None]


@register_attention(
    "flex_bigbird",
    config=FlexBigBirdConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=False,
        key_padding_mask=False,
        positions=("none",),
        dtypes=("float32", "bfloat16", "float16"),
        why={
            "causal": "not wrapped here",
            "cross_attention": "blocks are places in one sequence",
            "key_padding_mask": "not wrapped here",
            "decode": "not wrapped here",
        },
    ),
    complexity=Complexity(
        time="B H L (g + w + r) C D",
        memory="(L / C)^2",
        time_exponent=1,
        memory_exponent=2,
        sequential_ops="1",
        max_path="1",
    ),
    reference=Reference(
        title="Flex Attention",
        authors="Dong et al.",
        year=2024,
        url="https://arxiv.org/abs/2412.05496",
        code="https://github.com/pytorch/pytorch",
    ),
)
class FlexBigBirdAttention(AbstractAttention):
    """BigBird by FlexAttention.

    Args:
        config: the pattern.
        build: sizes.
    """

    config: FlexBigBirdConfig

    def __init__(self, config: FlexBigBirdConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self._masks: dict[int, tuple[BlockMask, Tensor]] = {}

    def _mask(self, seq_len: int, device: torch.device) -> tuple[BlockMask, Tensor]:
        if seq_len not in self._masks:
            config = self.config
            size = config.block_size
            # Of blocks as if they were tokens: the draw is the same, and [H, L, L] would be 69 GB at 65 536 tokens.
            layout = BlockLayout(
                query_len=-(-seq_len // size),
                block_size=1,
                num_window_blocks=config.num_window_blocks,
                num_global_blocks=config.num_global_blocks,
                num_random_blocks=config.num_random_blocks,
                num_extra_tokens=0,
                is_permuted=False,
                is_causal=False,
                num_heads=self.build.num_heads,
                seed=self.build.seed,
                layer_index=self.build.layer_index,
            )
            seen = layout.pattern().to_dense()[0].to(device)  # [H, blocks, blocks]
            # As `create_block_mask` has it, which asks every pair of tokens, and copies what it is told: 2 H L L bytes.
            partial, full = torch.zeros_like(seen), seen.clone()
            if seq_len % size:  # the ends hang over
                partial[:, -1], partial[:, :, -1] = seen[:, -1], seen[:, :, -1]
                full &= ~partial

            def is_visible(batch: Tensor, head: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:  # noqa: ARG001
                return seen[head, query_at // size, key_at // size]

            lists = [*_lists(partial), *_lists(full)]
            mask = BlockMask.from_kv_blocks(
                *lists, BLOCK_SIZE=size, mask_mod=is_visible, seq_lengths=(seq_len, seq_len)
            )
            self._masks[seq_len] = (mask, seen)
        return self._masks[seq_len]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        if query.device.type == "cpu":
            if needs_grad:
                raise UnsupportedError("devices", "flex_bigbird: FlexAttention has no backward pass on a CPU")
            query, key, value = (x.detach() for x in (query, key, value))  # it looks at requires_grad alone
        elif needs_grad:
            kind = query.device, query.dtype, query.shape[-1], self.config.block_size
            if reason := why_not_flex(*kind, needs_grad=True):
                raise UnsupportedError("options", f"flex_bigbird: {reason}")
        # Compiled for every shape, or refused: beyond a limit of shapes torch would run it unfused, and say so once.
        mask = self._mask(query.shape[2], query.device)[0]
        output: Tensor = run_compiled(query, key, value, mask=mask, slopes=None, offset=0)
        return output

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute softmax over the visible pairs, dense."""
        scores = query @ key.mT / query.shape[-1] ** 0.5
        seq_len, size = query.shape[2], self.config.block_size
        seen = self._mask(seq_len, query.device)[1].to(query.device)
        keep = seen.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, :seq_len, :seq_len]
        return torch.softmax(scores.masked_fill(~keep, -torch.inf), dim=-1) @ value
