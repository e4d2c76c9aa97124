"""The block: token mixing, optional cross-attention, feed-forward; residuals and normalisation around each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attn_zoo.attention.contract import AbstractMixer, Mixed
from attn_zoo.model.config import ModelConfig
from attn_zoo.model.norm import make_norm


class FeedForward(nn.Module):
    """FFN(x) = W_2 act(W_1 x + b_1) + b_2 (Vaswani et al. 2017, equation 2).

    Args:
        config: gives E, the inner width and the activation.
    """

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
    """One layer. Pre-norm adds f(norm(x)) to x; post-norm normalises x + f(x).

    Args:
        config: sizes, normalisation, dropout.
        mixer: over the sequence itself.
        cross: over an encoder's output, in a decoder of an encoder-decoder.
    """

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
