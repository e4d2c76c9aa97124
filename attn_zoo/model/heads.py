"""Whole models: a stack and a head.

Models that read have an encoder and give a class per sequence, per pair of sequences or per position; models that write
have a causal decoder and a token head, alone or behind an encoder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attn_zoo.attention.contract import AbstractMixer
from attn_zoo.model.config import ModelConfig
from attn_zoo.model.initialise import initialise, seeded
from attn_zoo.model.stacks import Decoder, Encoder


def pool_mean(hidden: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return the mean `[B, E]` over unpadded positions of `[B, L, E]`; zero where all are padding."""
    if key_padding_mask is None:
        return hidden.mean(1)
    wide = torch.promote_types(hidden.dtype, torch.float32)  # the sum of a long sequence is beyond float16
    count = (~key_padding_mask).sum(1, dtype=wide)[:, None]
    total = hidden.masked_fill(key_padding_mask[..., None], 0.0).sum(1, dtype=wide)
    return (total / count.clamp(min=1.0)).to(hidden.dtype)


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


class _PooledModel(nn.Module):
    """Pooled vectors and the classification head of Long Range Arena, which has one hidden layer."""

    num_vectors: ClassVar[int] = 1
    """What the head sees, in vectors `[B, E]`."""

    def __init__(self, config: ModelConfig, num_classes: int = 2) -> None:
        super().__init__()
        self.config = config
        with seeded(config.seed):
            self.tower = _PooledEncoder(config)
            self.head = nn.Sequential(
                nn.Linear(self.num_vectors * config.embed_dim, config.ffn_dim),
                nn.ReLU(),
                nn.Linear(config.ffn_dim, num_classes),
            )
        initialise(self, config.seed)

    @property
    def encoder(self) -> Encoder:
        """The part that pretraining shares."""
        return self.tower.encoder


class Classifier(_PooledModel):
    """Encoder, pooling, classification head.

    Args:
        config: of the model.
        num_classes: C.
    """

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return logits `[B, C]` of integers `[B, L]`; `key_padding_mask` is bool `[B, L]`, True = padding."""
        logits: Tensor = self.head(self.tower(tokens, key_padding_mask))
        return logits


class Retriever(_PooledModel):
    """Two towers with shared weights; the head sees both pooled vectors, their product and their difference.

    These features are those of Nystromformer's port; Long Range Arena's release feeds the first two only.

    Args:
        config: of the model.
        num_classes: C.
    """

    num_vectors: ClassVar[int] = 4

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


def _can_step(model: nn.Module) -> bool:
    """Whether every causal mixer of `model` decodes with state."""
    mixers = [part for part in model.modules() if isinstance(part, AbstractMixer) and part.build.is_causal]
    return all(can is not None and can.decode != "none" for can in (part.capabilities for part in mixers))


class LanguageModel(nn.Module):
    """Decoder and token head.

    Args:
        config: of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        with seeded(config.seed):
            self.decoder = Decoder(config, config.vocab_size)
            self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        initialise(self, config.seed)
        if config.has_tied_embeddings:
            self.head.weight = self.decoder.embedding.token.weight

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return logits `[B, L, V]` for the token after each of `[B, L]`."""
        logits: Tensor = self.head(self.decoder(tokens, key_padding_mask))
        return logits

    @torch.no_grad()
    def generate(self, prompt: Tensor, num_tokens: int) -> Tensor:
        """Continue greedily: with explicit state where the variant decodes, else by running all so far again.

        Args:
            prompt: integers `[B, L]`, L at least 1, no padding.
            num_tokens: to add.

        Returns:
            `[B, L + num_tokens]`.
        """
        tokens = prompt
        if not _can_step(self):
            for _ in range(num_tokens):
                tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
            return tokens
        hidden, state = self.decoder.prefill(prompt, self.decoder.init_state(len(prompt)))
        for index in range(num_tokens):
            tokens = torch.cat([tokens, self.head(hidden[:, -1:]).argmax(-1)], dim=1)
            if index < num_tokens - 1:
                hidden, state = self.decoder.prefill(tokens[:, -1:], state)
        return tokens


class Seq2Seq(nn.Module):
    """Encoder-decoder with cross-attention and token head (Vaswani et al. 2017, figure 1).

    Args:
        config: of the model; `target_vocab_size` is the decoder's vocabulary.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        vocab_size = config.target_vocab_size or config.vocab_size
        with seeded(config.seed):
            self.encoder = Encoder(config)
            self.decoder = Decoder(config, vocab_size, context_len=config.max_seq_len)
            self.head = nn.Linear(config.embed_dim, vocab_size, bias=False)
        initialise(self, config.seed)
        if config.has_tied_embeddings:
            self.head.weight = self.decoder.embedding.token.weight

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[B, L, V]` for the token after each of `target` `[B, L]`, given `source` `[B, S]`."""
        context, padding = self.encoder(source, source_padding_mask)
        hidden = self.decoder(target, target_padding_mask, context=context, context_padding_mask=padding)
        logits: Tensor = self.head(hidden)
        return logits

    @torch.no_grad()
    def generate(
        self, source: Tensor, num_tokens: int, *, start_token: int | Tensor, source_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Decode greedily from `start_token`: with explicit state where the variant decodes.

        Elsewhere the decoder reads all `num_tokens` positions at every step, of which those not yet written cannot
        matter: so a variant whose pattern depends on the length computes what it computed in training.

        Args:
            source: integers `[B, S]`.
            num_tokens: to produce.
            start_token: first input of the decoder, for all or `[B]`.
            source_padding_mask: bool `[B, S]`, True = padding.

        Returns:
            `[B, num_tokens]`, without the start token.
        """
        context, padding = self.encoder(source, source_padding_mask)
        tokens = torch.zeros(len(source), num_tokens + 1, dtype=torch.long, device=source.device)
        tokens[:, 0] = start_token
        can_step = _can_step(self.decoder)
        state = (
            self.decoder.init_state(len(source), context=context, context_padding_mask=padding) if can_step else None
        )
        for position in range(num_tokens):
            if state is not None:
                hidden, state = self.decoder.prefill(tokens[:, position : position + 1], state)
            else:
                hidden = self.decoder(tokens[:, :-1], context=context, context_padding_mask=padding)
                hidden = hidden[:, position : position + 1]
            tokens[:, position + 1] = self.head(hidden)[:, 0].argmax(-1)
        return tokens[:, 1:]
