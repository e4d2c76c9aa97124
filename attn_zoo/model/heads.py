"""Models that read: an encoder and a head, for a class per sequence, per pair of sequences or per position."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attn_zoo.model.config import ModelConfig
from attn_zoo.model.initialise import initialise, seeded
from attn_zoo.model.stacks import Encoder


def pool_mean(hidden: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return the mean `[B, E]` over unpadded positions of `[B, L, E]`; zero where all are padding."""
    if key_padding_mask is None:
        return hidden.mean(1)
    keep = (~key_padding_mask).to(hidden.dtype)[..., None]
    return hidden.masked_fill(key_padding_mask[..., None], 0.0).sum(1) / keep.sum(1).clamp(min=1.0)


class _PooledEncoder(nn.Module):
    """Encoder and pooling: one vector `[B, E]` per sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.has_cls = config.pooling == "cls"
        self.encoder = Encoder(config, has_cls=self.has_cls)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        hidden, padding = self.encoder(tokens, key_padding_mask)
        first: Tensor = hidden[:, 0]
        return first if self.has_cls else pool_mean(hidden, padding)


def _mlp(in_dim: int, config: ModelConfig, num_classes: int) -> nn.Sequential:
    """Return the classification head of Long Range Arena: one hidden layer."""
    return nn.Sequential(nn.Linear(in_dim, config.ffn_dim), nn.ReLU(), nn.Linear(config.ffn_dim, num_classes))


class Classifier(nn.Module):
    """Encoder, pooling, classification head.

    Args:
        config: of the model.
        num_classes: C.
    """

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        self.config = config
        with seeded(config.seed):
            self.tower = _PooledEncoder(config)
            self.head = _mlp(config.embed_dim, config, num_classes)
        initialise(self, config.seed)

    @property
    def encoder(self) -> Encoder:
        """The part that pretraining shares."""
        return self.tower.encoder

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return logits `[B, C]` of integers `[B, L]`; `key_padding_mask` is bool `[B, L]`, True = padding."""
        logits: Tensor = self.head(self.tower(tokens, key_padding_mask))
        return logits


class Retriever(nn.Module):
    """Two towers with shared weights; the head sees both pooled vectors, their product and their difference.

    These features are those of Nystromformer's port; Long Range Arena's release feeds the first two only.

    Args:
        config: of the model.
        num_classes: C.
    """

    def __init__(self, config: ModelConfig, num_classes: int = 2) -> None:
        super().__init__()
        self.config = config
        with seeded(config.seed):
            self.tower = _PooledEncoder(config)
            self.head = _mlp(4 * config.embed_dim, config, num_classes)
        initialise(self, config.seed)

    @property
    def encoder(self) -> Encoder:
        """The part that pretraining shares."""
        return self.tower.encoder

    def forward(
        self,
        tokens: Tensor,
        other: Tensor,
        key_padding_mask: Tensor | None = None,
        other_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[B, C]` of pairs of sequences `[B, L]` and `[B, L']`."""
        one, two = self.tower(tokens, key_padding_mask), self.tower(other, other_padding_mask)
        logits: Tensor = self.head(torch.cat([one, two, one * two, one - two], dim=-1))
        return logits


class TokenClassifier(nn.Module):
    """Encoder and a linear map to classes at every position; nothing is pooled.

    Args:
        config: of the model.
        num_classes: C.
        is_causal: every position sees the past only.

    Raises:
        UnsupportedError: the variant, or the normalisation, has no such form.
    """

    def __init__(self, config: ModelConfig, num_classes: int, *, is_causal: bool = False) -> None:
        super().__init__()
        self.config = config
        with seeded(config.seed):
            self.encoder = Encoder(config, is_causal=is_causal)
            self.head = nn.Linear(config.embed_dim, num_classes)
        initialise(self, config.seed)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return logits `[B, L, C]` of integers `[B, L]`; `key_padding_mask` is bool `[B, L]`, True = padding."""
        hidden, _ = self.encoder(tokens, key_padding_mask)
        logits: Tensor = self.head(hidden)
        return logits


class Denoiser(nn.Module):
    """What a model is pretrained in: its encoder, with one more token for what is hidden, and a linear token head.

    Args:
        config: of the model to pretrain. Token `config.vocab_size` means "hidden".
        is_causal: every position sees the past only.
        has_cls: the model's encoder puts a learned vector in front.

    Raises:
        UnsupportedError: the variant, or the normalisation, has no such form.
    """

    def __init__(self, config: ModelConfig, *, is_causal: bool, has_cls: bool) -> None:
        super().__init__()
        self.config = config
        self.has_cls = has_cls
        with seeded(config.seed):
            self.encoder = Encoder(
                replace(config, vocab_size=config.vocab_size + 1), has_cls=has_cls, is_causal=is_causal
            )
            self.head = nn.Linear(config.embed_dim, config.vocab_size)
        initialise(self, config.seed)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return logits `[B, L, V]` of integers `[B, L]`; `key_padding_mask` is bool `[B, L]`, True = padding."""
        hidden, _ = self.encoder(tokens, key_padding_mask)
        logits: Tensor = self.head(hidden[:, 1:] if self.has_cls else hidden)
        return logits

    def encoder_weights(self) -> dict[str, Tensor]:
        """Return what the encoder of the model has too: all but the embedding of the hidden token."""
        weights: dict[str, Tensor] = self.encoder.state_dict()
        name = "embedding.token.weight"
        return {**weights, name: weights[name][: self.config.vocab_size]}
