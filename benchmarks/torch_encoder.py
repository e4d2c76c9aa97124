"""The yardstick of training: our classifier as torch's own modules write it, and the update a user writes for it.

`nn.TransformerEncoder` in eager mode, `torch.optim.AdamW` with its defaults, one forward, backward and step. It gets
its batches ready-made, on the device, and never reads its loss. Its layer has one dropout more than ours, inside the
feed-forward network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attn_zoo.model import Classifier, ModelConfig
from attn_zoo.training.batches import Batch
from attn_zoo.training.evaluation import precision
from attn_zoo.training.protocol import Protocol

__all__ = ["TorchClassifier", "TorchTrainer"]


class TorchClassifier(nn.Module):
    """Embedding, learned positions, pre-norm encoder, mean over unpadded positions, head of one hidden layer.

    Args:
        config: of ours; what it asks beyond this is refused.
        num_classes: C.

    Raises:
        ValueError: this is not the model of `config`.
    """

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        built = (config.position, config.norm, config.norm_order, config.pooling)
        if built != ("learned", "layer_norm", "pre", "mean") or config.dropout_p != config.resid_dropout_p:
            raise ValueError(f"TorchClassifier: expected learned, layer_norm, pre, mean and one dropout; got {config}")
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
        self.head = nn.Sequential(nn.Linear(dim, config.ffn_dim), nn.ReLU(), nn.Linear(config.ffn_dim, num_classes))

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return logits `[B, C]` of integers `[B, L]`; `key_padding_mask` is bool `[B, L]`, True = padding."""
        hidden = self.dropout(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        hidden = self.encoder(hidden, src_key_padding_mask=key_padding_mask)
        if key_padding_mask is None:
            pooled = hidden.mean(1)
        else:
            keep = ~key_padding_mask[..., None]
            pooled = (hidden * keep).sum(1) / keep.sum(1)
        logits: Tensor = self.head(pooled)
        return logits

    @torch.no_grad()
    def load_ours(self, model: Classifier) -> None:
        """Take the weights of ours, name by name."""
        ours = {name.removeprefix("tower.encoder."): value for name, value in model.state_dict().items()}
        for layer in range(len(self.encoder.layers)):
            mixer = f"blocks.{layer}.mixer"
            for kind in ("weight", "bias"):
                parts = [ours.pop(f"{mixer}.{part}_proj.{kind}") for part in ("query", "key", "value")]
                ours[f"{mixer}.in_proj_{kind}"] = torch.cat(parts)
        renamed = {}
        for name, value in ours.items():
            for old, new in _NAMES:
                name = name.replace(old, new)
            renamed[name] = value
        self.load_state_dict(renamed)


_NAMES = (
    ("embedding.token", "token"),
    ("embedding.learned", "position"),
    ("final_norm.norm", "encoder.norm"),
    ("blocks.", "encoder.layers."),
    ("mixer_norm.norm", "norm1"),
    ("ffn_norm.norm", "norm2"),
    ("ffn.up", "linear1"),
    ("ffn.down", "linear2"),
    ("mixer.", "self_attn."),
)


class TorchTrainer:
    """The plain update.

    Args:
        model: on its device.
        protocol: gives rate, decay and the like.
        dtype: `"bfloat16"` trains under autocast.
    """

    def __init__(self, model: TorchClassifier, protocol: Protocol, dtype: str) -> None:
        self.model, self.dtype = model.train(), dtype
        self.optimizer = torch.optim.AdamW(
            model.parameters(), protocol.base_lr, protocol.betas, protocol.eps, protocol.weight_decay
        )

    def update(self, batch: Batch) -> None:
        """Make one update."""
        with precision(self.dtype, batch.tokens.device):
            logits = self.model(batch.tokens, batch.key_padding_mask)
        loss = cross_entropy(logits.float(), batch.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
