"""What a model is made of: one frozen record for every stack and head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from attn_zoo.attention.context import BuildContext
from attn_zoo.errors import ConfigError
from attn_zoo.metadata import Position as AttentionPosition

PositionKind = Literal["sinusoidal", "learned", "rotary", "alibi", "none"]
NormKind = Literal["layer_norm", "rms_norm", "batch_norm"]
Activation = Literal["gelu", "relu"]
PoolingKind = Literal["mean", "cls"]


LEAKY_NORM = "batch_norm in a decoder: its statistics run over all positions, so later tokens would leak"
"""Why a causal model refuses it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The backbone and the variant inside it. Everything but `variant` and `options` is the same for all variants.

    Args:
        variant: registered name of the mechanism.
        options: its options.
        vocab_size: tokens, padding included.
        max_seq_len: longest input, in tokens.
        embed_dim: E.
        num_heads: H.
        num_kv_heads: G; 0 means H.
        head_dim: D; 0 means E / H.
        num_layers: blocks in each stack.
        ffn_dim: width inside the feed-forward network.
        position: how positions are represented. Sinusoidal (Vaswani et al. 2017) and learned are added to embeddings;
            rotary (Su et al. 2021) and ALiBi (Press et al. 2022) act inside the attention, where it admits them.
        norm: LayerNorm, RMSNorm, or BatchNorm over unpadded positions (the contrast; Shen et al. 2020, "PowerNorm",
            arXiv 2003.07845, discuss why it fails on text).
        norm_order: `"pre"` (normalise before each sublayer, and once at the end) or `"post"` (after each residual sum).
        activation: of the feed-forward network.
        dropout_p: on attention weights.
        resid_dropout_p: on embeddings and on what each sublayer adds.
        pooling: mean over unpadded positions, or a learned CLS vector put in front.
        cross_variant: variant for cross-attention in an encoder-decoder; None means `variant`.
        target_vocab_size: of the decoder in an encoder-decoder; 0 means `vocab_size`.
        has_tied_embeddings: the token head shares the embedding's weights.
        seed: of initialisation, patterns and features.

    Raises:
        ConfigError: sizes are impossible.
    """

    variant: str
    vocab_size: int
    max_seq_len: int
    options: dict[str, Any] = field(default_factory=dict)
    embed_dim: int = 64
    num_heads: int = 2
    num_kv_heads: int = 0
    head_dim: int = 0
    num_layers: int = 2
    ffn_dim: int = 128
    position: PositionKind = "learned"
    norm: NormKind = "layer_norm"
    norm_order: Literal["pre", "post"] = "pre"
    activation: Activation = "gelu"
    dropout_p: float = 0.0
    resid_dropout_p: float = 0.0
    pooling: PoolingKind = "mean"
    cross_variant: str | None = None
    target_vocab_size: int = 0
    has_tied_embeddings: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            (name, f"expected at least 1; got {getattr(self, name)}")
            for name in ("vocab_size", "max_seq_len", "embed_dim", "num_heads", "num_layers", "ffn_dim")
            if getattr(self, name) < 1
        ]
        problems += [
            (name, f"expected 0 <= {name} < 1; got {getattr(self, name)}")
            for name in ("dropout_p", "resid_dropout_p")
            if not 0.0 <= getattr(self, name) < 1.0
        ]
        if problems:
            raise ConfigError("ModelConfig", problems)

    def build_context(self, *, is_causal: bool, is_cross: bool, num_positions: int) -> BuildContext:
        """Return what the variant is told about the first layer.

        Args:
            is_causal: in a decoder's self-attention.
            is_cross: in a decoder's attention to the encoder, where positions of the two sequences do not compare, so
                neither rotary nor ALiBi acts.
            num_positions: longest sequence the mixer will see.
        """
        inside: AttentionPosition = "none"
        if not is_cross and (self.position == "rotary" or self.position == "alibi"):
            inside = self.position
        return BuildContext(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_seq_len=num_positions,
            is_causal=is_causal,
            is_cross=is_cross,
            dropout_p=self.dropout_p,
            position=inside,
            num_layers=self.num_layers,
            seed=self.seed,
        )
