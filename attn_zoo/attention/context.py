"""What a variant is told when it is built: sizes, direction, seed. Frozen, and free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from attn_zoo.errors import ConfigError
from attn_zoo.metadata import Form, Position, Request, Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """Everything a variant may know about the model it is built into.

    Args:
        embed_dim: E, width of the hidden states.
        num_heads: H, query heads.
        max_seq_len: longest query or key sequence that will be passed, in tokens.
        is_causal: query i sees keys j <= i + S - L (aligned bottom right).
        num_kv_heads: G, key/value heads; must divide `num_heads`. Default: `num_heads`.
        head_dim: D. Default: `embed_dim // num_heads`.
        is_cross: keys and values come from another sequence.
        dropout_p: probability of dropping an attention weight in training.
        position: scheme inside the attention. `"rotary"` is applied to projected queries and keys by the multi-head
            mixer before the attention sees them; `"alibi"` is a bias the attention itself adds.
        layer_index: 0-based depth, for ranks and patterns that differ by layer.
        seed: for everything random that is fixed at construction (patterns, features).
        num_layers: depth of the model, for parameters shared between layers.
        shared: modules shared between the layers of one model, by key; the model passes one mapping to all layers.

    Raises:
        ConfigError: sizes are impossible or do not fit each other.
    """

    embed_dim: int
    num_heads: int
    max_seq_len: int
    is_causal: bool = False
    num_kv_heads: int = 0
    head_dim: int = 0
    is_cross: bool = False
    dropout_p: float = 0.0
    position: Position = "none"
    layer_index: int = 0
    seed: int = 0
    num_layers: int = 1
    shared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = (
            "embed_dim",
            "num_heads",
            "max_seq_len",
            "num_layers",
            "num_kv_heads",
            "head_dim",
            "layer_index",
            "seed",
        )
        wrong = [name for name in sizes if type(getattr(self, name)) is not int]
        is_no_bool = [name for name in ("is_causal", "is_cross") if type(getattr(self, name)) is not bool]
        if wrong or is_no_bool:
            expected = dict.fromkeys(wrong, "an integer") | dict.fromkeys(is_no_bool, "True or False")
            problems = [(name, f"expected {what}; got {getattr(self, name)!r}") for name, what in expected.items()]
            raise ConfigError("BuildContext", problems)
        problems = [
            (name, f"expected at least {least}; got {getattr(self, name)}")
            for least, names in (
                (1, ("embed_dim", "num_heads", "max_seq_len", "num_layers")),
                (0, ("num_kv_heads", "head_dim", "layer_index", "seed")),
            )
            for name in names
            if getattr(self, name) < least
        ]
        if not 0.0 <= self.dropout_p < 1.0:
            problems.append(("dropout_p", f"expected 0 <= dropout_p < 1; got {self.dropout_p}"))
        if self.is_causal and self.is_cross:
            problems.append(
                ("is_cross", "cross-attention has no order between queries and keys; is_causal must be off")
            )
        if not problems and not self.head_dim and self.embed_dim % self.num_heads:
            problems.append(
                (
                    "embed_dim",
                    f"expected a multiple of num_heads={self.num_heads}, or give head_dim; got {self.embed_dim}",
                )
            )
        if not problems and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            problems.append(
                ("num_kv_heads", f"expected a divisor of num_heads={self.num_heads}; got {self.num_kv_heads}")
            )
        if problems:
            raise ConfigError("BuildContext", problems)
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.embed_dim // self.num_heads)

    def at_layer(self, layer_index: int) -> BuildContext:
        """Return the same context for another layer of the same model."""
        return replace(self, layer_index=layer_index)

    def request(self) -> Request:
        """Return what this context asks of a variant's capabilities."""
        return Request(
            is_causal=self.is_causal,
            is_cross=self.is_cross,
            is_grouped_query=self.num_kv_heads != self.num_heads,
            dropout_p=self.dropout_p,
            position=self.position,
        )

    def shape(
        self,
        batch_size: int,
        query_len: int,
        key_len: int | None = None,
        config: object = None,
        form: Form = "attention",
    ) -> Shape:
        """Return the sizes of one call, for cost formulas."""
        return Shape(
            batch_size=batch_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            query_len=query_len,
            key_len=query_len if key_len is None else key_len,
            head_dim=self.head_dim,
            embed_dim=self.embed_dim,
            is_causal=self.is_causal,
            is_cross=self.is_cross,
            position=self.position,
            form=form,
            layer_index=self.layer_index,
            config=config,
            max_seq_len=self.max_seq_len,
        )
