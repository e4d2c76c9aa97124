"""Models: a stack and a head for each kind of task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attn_zoo.attention.contract import AbstractMixer
from attn_zoo.model.config import ModelConfig
from attn_zoo.model.initialise import initialise
from attn_zoo.model.stacks import Decoder, Encoder

__all__ = ["Classifier", "LanguageModel", "Retriever", "Seq2Seq", "pool_mean"]


def pool_mean(hidden: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return the mean `[B, E]` over unpadded positions of `[B, L, E]`; zero where all are padding."""
    if key_padding_mask is None:
        return hidden.mean(1)
    keep = (~key_padding_mask).to(hidden.dtype)[..., None]
    return hidden.masked_fill(key_padding_mask[..., None], 0.0).sum(1) / keep.sum(1).clamp(min=1.0)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Build a model under its own seed, leaving the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


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
        with _seeded(config.seed):
            self.tower = _PooledEncoder(config)
            self.head = _mlp(config.embed_dim, config, num_classes)
        initialise(self, config.seed)

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
        with _seeded(config.seed):
            self.tower = _PooledEncoder(config)
            self.head = _mlp(4 * config.embed_dim, config, num_classes)
        initialise(self, config.seed)

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


def _can_step(model: nn.Module) -> bool:
    """Whether every causal mixer of `model` decodes with state."""
    mixers = [part for part in model.modules() if isinstance(part, AbstractMixer) and part.build.is_causal]
    return all(part.variant is not None and part.variant.capabilities.decode != "none" for part in mixers)


class LanguageModel(nn.Module):
    """Decoder and token head.

    Args:
        config: of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        with _seeded(config.seed):
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
        state = self.decoder.init_state(len(prompt))
        hidden: Tensor | None = None
        for position in range(prompt.shape[1] + num_tokens - 1):
            hidden, state = self.decoder.step(tokens[:, position : position + 1], state)
            if position >= prompt.shape[1] - 1:
                tokens = torch.cat([tokens, self.head(hidden).argmax(-1)], dim=1)
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
        with _seeded(config.seed):
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
        self, source: Tensor, num_tokens: int, *, start_token: int, source_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Decode greedily from `start_token`: with explicit state where the variant decodes.

        Args:
            source: integers `[B, S]`.
            num_tokens: to produce.
            start_token: first input of the decoder.
            source_padding_mask: bool `[B, S]`, True = padding.

        Returns:
            `[B, num_tokens]`, without the start token.
        """
        context, padding = self.encoder(source, source_padding_mask)
        tokens = torch.full((len(source), 1), start_token, dtype=torch.long, device=source.device)
        can_step = _can_step(self.decoder)
        state = (
            self.decoder.init_state(len(source), context=context, context_padding_mask=padding) if can_step else None
        )
        for _ in range(num_tokens):
            if state is not None:
                hidden, state = self.decoder.step(tokens[:, -1:], state)
            else:
                hidden = self.decoder(tokens, context=context, context_padding_mask=padding)
            tokens = torch.cat([tokens, self.head(hidden[:, -1:]).argmax(-1)], dim=1)
        return tokens[:, 1:]
