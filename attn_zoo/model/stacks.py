"""Stacks of blocks: the one Transformer that all variants share. It knows the mixer contract and no variant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn_zoo.attention.build import build_mixer
from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import Request
from attn_zoo.model.block import Block, BlockState
from attn_zoo.model.config import ModelConfig
from attn_zoo.model.norm import make_norm
from attn_zoo.model.positions import Embedding
from attn_zoo.registry import capabilities_of


def _blocks(config: ModelConfig, *, is_causal: bool, num_positions: int, context_len: int = 0) -> nn.ModuleList:
    """Return the blocks; with cross-attention to `context_len` positions where that is not 0."""
    own = config.build_context(is_causal=is_causal, is_cross=False, num_positions=num_positions)
    across = config.build_context(is_causal=False, is_cross=True, num_positions=max(context_len, num_positions))
    blocks = nn.ModuleList()
    for layer in range(config.num_layers):
        mixer = build_mixer(config.variant, own.at_layer(layer), **config.options)
        cross = None
        if context_len:
            # Options belong to `variant`; another cross variant takes its defaults.
            name = config.cross_variant or config.variant
            options = config.options if name == config.variant else {}
            cross = build_mixer(name, across.at_layer(layer), **options)
        blocks.append(Block(config, mixer, cross))
    return blocks


def _each(blocks: nn.ModuleList) -> list[Block]:
    """Return the blocks with their type: a ModuleList forgets it."""
    return [block for block in blocks if isinstance(block, Block)]


def _embedding(config: ModelConfig, vocab_size: int, num_positions: int, *, has_cls: bool) -> Embedding:
    return Embedding(
        vocab_size,
        config.embed_dim,
        num_positions,
        position=config.position,
        resid_dropout_p=config.resid_dropout_p,
        has_cls=has_cls,
    )


def _refuse_leaks(config: ModelConfig) -> None:
    """Raise `UnsupportedError` where later positions would influence earlier ones: by normalisation or routing."""
    capabilities = capabilities_of(config.variant, config.options)
    capabilities.require(config.variant, Request(is_causal=True, is_autoregressive=True))
    if config.norm == "batch_norm":
        raise UnsupportedError(
            "causal", "batch_norm in a decoder: its statistics run over all positions, so later tokens would leak"
        )


class Encoder(nn.Module):
    """Tokens to hidden states, every position seeing all others.

    Args:
        config: of the model.
        has_cls: put a learned vector in front of every sequence.
        is_causal: every position sees the past only.

    Raises:
        UnsupportedError: with `is_causal`, what `Decoder` refuses.
    """

    def __init__(self, config: ModelConfig, *, has_cls: bool = False, is_causal: bool = False) -> None:
        super().__init__()
        if is_causal:
            _refuse_leaks(config)
        num_positions = config.max_seq_len + (1 if has_cls else 0)
        self.embedding = _embedding(config, config.vocab_size, num_positions, has_cls=has_cls)
        self.blocks = _blocks(config, is_causal=is_causal, num_positions=num_positions)
        self.final_norm = make_norm(config.norm, config.embed_dim) if config.norm_order == "pre" else None

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Encode.

        Args:
            tokens: integers `[B, L]`.
            key_padding_mask: bool `[B, L]`, True = padding.

        Returns:
            Hidden states `[B, L, E]` and their padding mask; with CLS both start with it.
        """
        hidden = self.embedding(tokens)
        if key_padding_mask is not None and self.embedding.cls is not None:
            key_padding_mask = torch.cat([key_padding_mask.new_zeros(len(tokens), 1), key_padding_mask], dim=1)
        carry: Tensor | None = None
        for block in self.blocks:
            hidden, carry = block(hidden, key_padding_mask=key_padding_mask, carry=carry)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden, key_padding_mask)
        return hidden, key_padding_mask


@dataclass(frozen=True, slots=True)
class DecoderState:
    """Decode state of a decoder: one per block, and the position of the next token."""

    blocks: tuple[BlockState, ...]
    position: int = 0


class Decoder(nn.Module):
    """Tokens to hidden states, every position seeing the past only; with `context_len`, also an encoder's output.

    Args:
        config: of the model.
        vocab_size: of the tokens read.
        context_len: longest encoder output; 0 means no cross-attention.

    Raises:
        UnsupportedError: the normalisation, or the variant's routing, would let later positions influence earlier ones.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, context_len: int = 0) -> None:
        super().__init__()
        _refuse_leaks(config)
        self.embedding = _embedding(config, vocab_size, config.max_seq_len, has_cls=False)
        self.blocks = _blocks(config, is_causal=True, num_positions=config.max_seq_len, context_len=context_len)
        self.final_norm = make_norm(config.norm, config.embed_dim) if config.norm_order == "pre" else None

    def forward(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        context: Tensor | None = None,
        context_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states `[B, L, E]` of integers `[B, L]`.

        Args:
            tokens: integers.
            key_padding_mask: bool `[B, L]`, True = padding.
            context: `[B, S, E]`, the encoder's output.
            context_padding_mask: bool `[B, S]`.
        """
        hidden = self.embedding(tokens)
        carry: Tensor | None = None
        for block in self.blocks:
            hidden, carry = block(
                hidden,
                key_padding_mask=key_padding_mask,
                context=context,
                context_padding_mask=context_padding_mask,
                carry=carry,
            )
        return self._finish(hidden)

    def _finish(self, hidden: Tensor) -> Tensor:
        normal: Tensor = hidden if self.final_norm is None else self.final_norm(hidden)
        return normal

    def init_state(
        self, batch_size: int, *, context: Tensor | None = None, context_padding_mask: Tensor | None = None
    ) -> DecoderState:
        """Return the empty decode state.

        Raises:
            UnsupportedError: the variant cannot decode step by step.
        """
        like = self.embedding.token.weight.new_empty(batch_size, 0)
        return DecoderState(
            tuple(block.init_state(like, context, context_padding_mask) for block in _each(self.blocks))
        )

    def prefill(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read n tokens per sequence `[B, n]`; return their hidden states `[B, n, E]` and the new state."""
        hidden = self.embedding(tokens, state.position)
        states = []
        for block, block_state in zip(_each(self.blocks), state.blocks, strict=True):
            hidden, new_state = block.prefill(hidden, block_state)
            states.append(new_state)
        return self._finish(hidden), DecoderState(tuple(states), state.position + tokens.shape[1])
