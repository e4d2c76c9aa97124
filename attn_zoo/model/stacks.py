"""Stacks of blocks: the one Transformer that all variants share. It knows the mixer contract and no variant.

A block is token mixing, optional cross-attention and a feed-forward network, with residuals and normalisation around
each: over features (LayerNorm, RMSNorm) or, as the contrast, over unpadded positions (BatchNorm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attn_zoo.attention.build import build_mixer
from attn_zoo.attention.contract import AbstractMixer, Mixed, product_dtype
from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import Request
from attn_zoo.model.config import LEAKY_NORM, ModelConfig, NormKind
from attn_zoo.model.positions import Embedding
from attn_zoo.registry import capabilities_of


class FeatureNorm(nn.Module):
    """LayerNorm or RMSNorm: each position by itself, so padding cannot matter."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002 (see above)
        """Return `[B, L, E]`, normalised."""
        normal: Tensor = self.norm(hidden)
        return normal


class PositionBatchNorm(nn.Module):
    """BatchNorm (Ioffe and Szegedy 2015, arXiv 1502.03167) with statistics over unpadded positions only."""

    momentum: ClassVar[float] = 0.1
    """Of the running statistics, which are used in evaluation."""
    eps: ClassVar[float] = 1e-5
    """Added to the variance."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(embed_dim))
        self.bias = nn.Parameter(torch.zeros(embed_dim))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(embed_dim))
        self.register_buffer("running_var", torch.ones(embed_dim))

    def forward(self, hidden: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return `[B, L, E]`; padded positions are normalised by the same statistics but do not enter them."""
        mean, var = self.running_mean, self.running_var
        if self.training:
            wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))  # float16 holds no sum over a batch
            keep = wide.new_ones(wide.shape[:2]) if key_padding_mask is None else (~key_padding_mask).to(wide)
            count = keep.sum().clamp(min=1.0)
            mean = (wide * keep[..., None]).sum((0, 1)) / count
            var = ((wide - mean).square() * keep[..., None]).sum((0, 1)) / count
            with torch.no_grad():
                unbiased = var * count / (count - 1).clamp(min=1.0)
                self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
                self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
        normalised = (hidden - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias
        return normalised.to(torch.promote_types(hidden.dtype, self.weight.dtype))


def make_norm(kind: NormKind, embed_dim: int) -> FeatureNorm | PositionBatchNorm:
    """Return the normalisation `kind` over E = `embed_dim` features."""
    if kind == "batch_norm":
        return PositionBatchNorm(embed_dim)
    return FeatureNorm(nn.LayerNorm(embed_dim) if kind == "layer_norm" else nn.RMSNorm(embed_dim))


class FeedForward(nn.Module):
    """FFN(x) = W_2 act(W_1 x + b_1) + b_2 (Vaswani et al. 2017, equation 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.embed_dim, config.ffn_dim)
        self.activation = nn.GELU() if config.activation == "gelu" else nn.ReLU()
        self.down = nn.Linear(config.ffn_dim, config.embed_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[B, L, E]` to `[B, L, E]`."""
        output: Tensor = self.down(self.activation(self.up(hidden)))
        return output


@dataclass(frozen=True, slots=True)
class BlockState:
    """Decode state of a block: of its mixer and, where there is one, of its cross-attention."""

    mixer: Any
    cross: Any = None


class Block(nn.Module):
    """One layer. Pre-norm adds f(norm(x)) to x; post-norm normalises x + f(x). `cross` reads an encoder's output."""

    def __init__(self, config: ModelConfig, mixer: AbstractMixer, cross: AbstractMixer | None = None) -> None:
        super().__init__()
        self.is_pre_norm = config.norm_order == "pre"
        self.mixer = mixer
        self.mixer_norm = make_norm(config.norm, config.embed_dim)
        self.cross = cross
        self.cross_norm = None if cross is None else make_norm(config.norm, config.embed_dim)
        self.ffn = FeedForward(config)
        self.ffn_norm = make_norm(config.norm, config.embed_dim)
        self.dropout = nn.Dropout(config.resid_dropout_p)

    def _before(self, norm: nn.Module, hidden: Tensor, padding: Tensor | None) -> Tensor:
        normal: Tensor = norm(hidden, padding) if self.is_pre_norm else hidden
        return normal

    def _after(self, norm: nn.Module, hidden: Tensor, added: Tensor, padding: Tensor | None) -> Tensor:
        total = hidden + self.dropout(added)
        normal: Tensor = total if self.is_pre_norm else norm(total, padding)
        return normal

    def forward(
        self,
        hidden: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_padding_mask: Tensor | None = None,
        carry: Tensor | None = None,
    ) -> Mixed:
        """Map `[B, L, E]` to `[B, L, E]`, and what the mixer passes on.

        Args:
            hidden: the sequence.
            key_padding_mask: bool `[B, L]`, True = padding.
            context: `[B, S, E]`, the encoder's output.
            context_padding_mask: bool `[B, S]`.
            carry: what the mixer of the block before passed on, or None.
        """
        padding = key_padding_mask
        mixed, carry = self.mixer.mix(
            self._before(self.mixer_norm, hidden, padding), key_padding_mask=padding, carry=carry
        )
        hidden = self._after(self.mixer_norm, hidden, mixed, padding)
        if self.cross is not None and self.cross_norm is not None:
            query = self._before(self.cross_norm, hidden, padding)
            seen = self.cross(query, context=context, key_padding_mask=context_padding_mask)
            hidden = self._after(self.cross_norm, hidden, seen, padding)
        fed = self.ffn(self._before(self.ffn_norm, hidden, padding))
        return Mixed(self._after(self.ffn_norm, hidden, fed, padding), carry)

    def init_state(self, like: Tensor, context: Tensor | None, context_padding_mask: Tensor | None) -> BlockState:
        """Return the empty decode state for sequences of the batch size, device and dtype of `like`."""
        cross = None
        if self.cross is not None:
            cross = self.cross.init_state(
                len(like), context=context, key_padding_mask=context_padding_mask, device=like.device, dtype=like.dtype
            )
        return BlockState(self.mixer.init_state(len(like), device=like.device, dtype=like.dtype), cross)

    def prefill(self, hidden: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        """Map new positions `[B, n, E]` that follow those in the state; return their output and the new state."""
        mixed, mixer_state = _read(self.mixer, self._before(self.mixer_norm, hidden, None), state.mixer)
        hidden = self._after(self.mixer_norm, hidden, mixed, None)
        cross_state = state.cross
        if self.cross is not None and self.cross_norm is not None:
            seen, cross_state = _read(self.cross, self._before(self.cross_norm, hidden, None), state.cross)
            hidden = self._after(self.cross_norm, hidden, seen, None)
        fed = self.ffn(self._before(self.ffn_norm, hidden, None))
        return self._after(self.ffn_norm, hidden, fed, None), BlockState(mixer_state, cross_state)


def _read(mixer: AbstractMixer, hidden: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Step where there is one new position, else prefill."""
    return mixer.step(hidden, state) if hidden.shape[1] == 1 else mixer.prefill(hidden, state)


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


def _refuse_leaks(config: ModelConfig) -> None:
    """Raise `UnsupportedError` where later positions would influence earlier ones: by normalisation or routing."""
    capabilities = capabilities_of(config.variant, config.options)
    capabilities.require(config.variant, Request(is_causal=True, is_autoregressive=True))
    if config.norm == "batch_norm":
        raise UnsupportedError("causal", LEAKY_NORM)


class _Stack(nn.Module):
    """Embedding, blocks and, for pre-norm, a last normalisation."""

    def __init__(
        self, config: ModelConfig, vocab_size: int, *, is_causal: bool, has_cls: bool = False, context_len: int = 0
    ) -> None:
        super().__init__()
        if is_causal:
            _refuse_leaks(config)
        num_positions = config.max_seq_len + (1 if has_cls else 0)
        self.embedding = Embedding(
            vocab_size,
            config.embed_dim,
            num_positions,
            position=config.position,
            resid_dropout_p=config.resid_dropout_p,
            has_cls=has_cls,
        )
        self.blocks = _blocks(config, is_causal=is_causal, num_positions=num_positions, context_len=context_len)
        self.final_norm = make_norm(config.norm, config.embed_dim) if config.norm_order == "pre" else None

    def _through(
        self,
        hidden: Tensor,
        key_padding_mask: Tensor | None,
        context: Tensor | None = None,
        context_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Pass `[B, L, E]` and the carry from block to block."""
        carry: Tensor | None = None
        for block in self.blocks:
            hidden, carry = block(
                hidden,
                key_padding_mask=key_padding_mask,
                context=context,
                context_padding_mask=context_padding_mask,
                carry=carry,
            )
        return self._finish(hidden, key_padding_mask)

    def _finish(self, hidden: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        normal: Tensor = hidden if self.final_norm is None else self.final_norm(hidden, key_padding_mask)
        return normal


class Encoder(_Stack):
    """Tokens to hidden states, every position seeing all others.

    Args:
        config: of the model.
        has_cls: put a learned vector in front of every sequence.
        is_causal: every position sees the past only.

    Raises:
        UnsupportedError: with `is_causal`, what `Decoder` refuses.
    """

    def __init__(self, config: ModelConfig, *, has_cls: bool = False, is_causal: bool = False) -> None:
        super().__init__(config, config.vocab_size, is_causal=is_causal, has_cls=has_cls)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return hidden states `[B, L, E]` of integers `[B, L]`, and their padding mask; with CLS both start with it.

        Args:
            tokens: integers.
            key_padding_mask: bool `[B, L]`, True = padding.
        """
        hidden = self.embedding(tokens)
        if key_padding_mask is not None and self.embedding.cls is not None:
            key_padding_mask = torch.cat([key_padding_mask.new_zeros(len(tokens), 1), key_padding_mask], dim=1)
        return self._through(hidden, key_padding_mask), key_padding_mask


@dataclass(frozen=True, slots=True)
class DecoderState:
    """Decode state of a decoder: one per block, and the position of the next token."""

    blocks: tuple[BlockState, ...]
    position: int = 0


class Decoder(_Stack):
    """Tokens to hidden states, every position seeing the past only; with `context_len`, also an encoder's output.

    Args:
        config: of the model.
        vocab_size: of the tokens read.
        context_len: longest encoder output; 0 means no cross-attention.

    Raises:
        UnsupportedError: the normalisation, or the variant's routing, would let later positions influence earlier ones.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, context_len: int = 0) -> None:
        super().__init__(config, vocab_size, is_causal=True, context_len=context_len)

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
        return self._through(self.embedding(tokens), key_padding_mask, context, context_padding_mask)

    def init_state(
        self, batch_size: int, *, context: Tensor | None = None, context_padding_mask: Tensor | None = None
    ) -> DecoderState:
        """Return the empty decode state, in the type of the weights or, under autocast, in that of its products.

        Raises:
            UnsupportedError: the variant cannot decode step by step.
        """
        weight = self.embedding.token.weight
        like = weight.new_empty(batch_size, 0, dtype=product_dtype(weight.dtype, weight.device))
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
