"""Peer: torch.nn.MultiheadAttention without returning its weights; in training steps nn.TransformerEncoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attn_zoo import AbstractMixer, BuildContext, UnsupportedError, VariantConfig, register_mixer
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities
from attn_zoo.model import ModelConfig
from attn_zoo.registry import variants
from attn_zoo.training.batches import Batch
from attn_zoo.training.evaluation import precision
from attn_zoo.training.learner import NUM_BATCHES, NUM_CLASSES, AbstractLearner, Learner

FULL = variants["full"]


class TorchClassifier(nn.Module):
    """Our classifier as torch's own modules write it: embedding, pre-norm encoder, mean over positions, head.

    Its layer has one dropout more than ours, inside the feed-forward network.

    Args:
        config: of ours.

    Raises:
        UnsupportedError: `nn.TransformerEncoder` cannot be the model of `config`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        built = (config.position, config.norm, config.norm_order, config.pooling)
        if built != ("learned", "layer_norm", "pre", "mean") or config.dropout_p != config.resid_dropout_p:
            got = f"{', '.join(built)}, {config.dropout_p:g} and {config.resid_dropout_p:g}"
            text = f"torch_multihead: expected learned, layer_norm, pre, mean and one dropout; got {got}"
            raise UnsupportedError("protocol", text)
        dim = config.embed_dim
        self.token, self.position = nn.Embedding(config.vocab_size, dim), nn.Embedding(config.max_seq_len, dim)
        self.dropout = nn.Dropout(config.resid_dropout_p)
        layer = nn.TransformerEncoderLayer(
            dim,
            config.num_heads,
            config.ffn_dim,
            config.dropout_p,
            config.activation,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, config.num_layers, norm=nn.LayerNorm(dim), enable_nested_tensor=False
        )
        self.head = nn.Sequential(nn.Linear(dim, config.ffn_dim), nn.ReLU(), nn.Linear(config.ffn_dim, NUM_CLASSES))

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return logits `[B, C]` of integers `[B, L]`; `key_padding_mask` is bool `[B, L]`, True = padding."""
        note_path("nn.TransformerEncoder")
        hidden = self.dropout(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        hidden = self.encoder(hidden, src_key_padding_mask=key_padding_mask)
        if key_padding_mask is None:
            pooled = hidden.mean(1)
        else:
            keep = ~key_padding_mask[..., None]
            pooled = (hidden * keep).sum(1) / keep.sum(1)
        logits: Tensor = self.head(pooled)
        return logits

    def load_ours(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of our classifier around this peer's mixer, name by name."""
        renamed = {}
        for name, value in weights.items():
            for old, new in _NAMES:
                name = name.replace(old, new)
            renamed[name] = value
        self.load_state_dict(renamed)


_NAMES = (
    ("tower.encoder.", ""),
    ("embedding.token", "token"),
    ("embedding.learned", "position"),
    ("final_norm.norm", "encoder.norm"),
    ("blocks.", "encoder.layers."),
    ("mixer_norm.norm", "norm1"),
    ("ffn_norm.norm", "norm2"),
    ("ffn.up", "linear1"),
    ("ffn.down", "linear2"),
    ("mixer.inner", "self_attn"),
)


class TorchLearner(AbstractLearner):
    """The update a user writes for it: `AdamW` with its defaults, one forward, backward and step.

    It gets its batches ready-made, on the device, and never reads its loss.

    Args:
        ours: the same model written with our backbone, whose weights and batches it takes.
    """

    def __init__(self, ours: Learner) -> None:
        protocol, self._dtype = ours.protocol, ours.trainer.dtype
        weight = next(ours.model.parameters())
        self.model: Any = TorchClassifier(ours.config).to(weight.device, weight.dtype).train()
        self.model.load_ours(ours.model.state_dict())
        if protocol.compile:
            self.model.compile()
        self.protocol = protocol
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), protocol.base_lr, protocol.betas, protocol.eps, protocol.weight_decay
        )
        self._batches = [ours.batch(step) for step in range(1, NUM_BATCHES + 1)]
        self.data = [batch.tokens for batch in self._batches]
        self._num_steps = 0

    def logits(self, batch: Batch) -> Tensor:
        with precision(self._dtype, batch.tokens.device):
            logits: Tensor = self.model(batch.tokens, batch.key_padding_mask)
        return logits

    def step(self) -> None:
        batch = self._batches[self._num_steps % len(self._batches)]
        self._num_steps += 1
        loss = cross_entropy(self.logits(batch).float(), batch.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@register_mixer(
    "torch_multihead",
    config=VariantConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=False,
        key_padding_mask=True,
        positions=("none",),
        why={
            "causal": "not wrapped here",
            "cross_attention": "not wrapped here",
            "positions": "not wrapped here",
            "decode": "not wrapped here",
        },
    ),
    complexity=replace(FULL.complexity, memory="B H L, or B H L S where torch finds no fused kernel"),
    reference=replace(
        FULL.reference, equation="1, section 3.2.2", code="https://github.com/pytorch/pytorch", deviations=()
    ),
    learner=TorchLearner,
)
class TorchMultiheadMixer(AbstractMixer):
    """The module as it is, projections included.

    Args:
        config: has no choices.
        build: sizes.

    Raises:
        UnsupportedError: the heads together are not as wide as the hidden states.
    """

    def __init__(self, config: VariantConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        if build.num_heads * build.head_dim != build.embed_dim:
            got = f"{build.num_heads} x {build.head_dim}, E = {build.embed_dim}"
            raise UnsupportedError("sizes", f"torch_multihead: expected H x D = E; got {got}")
        self.inner = nn.MultiheadAttention(build.embed_dim, build.num_heads, build.dropout_p, batch_first=True)

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        note_path("nn.MultiheadAttention")
        output: Tensor = self.inner(hidden, hidden, hidden, key_padding_mask=key_padding_mask, need_weights=False)[0]
        return output

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute section 3.2.2 as written with the module's own weights."""
        projected = nn.functional.linear(hidden, self.inner.in_proj_weight, self.inner.in_proj_bias)
        query, key, value = (
            part.unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1)
        )
        heads = softmax_attention(query, key, value, key_padding_mask=key_padding_mask).to(hidden.dtype)
        output: Tensor = self.inner.out_proj(heads.transpose(1, 2).flatten(-2))  # [B, L, E]
        return output
