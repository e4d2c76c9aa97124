"""Positions that are added to embeddings. Rotary and ALiBi act inside the attention and are not here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_zoo.model.config import PositionKind


def sinusoidal_positions(num_positions: int, embed_dim: int) -> Tensor:
    """Return the table `[num_positions, E]` of Vaswani et al. 2017, arXiv 1706.03762, section 3.5.

    PE(pos, 2i) = sin(pos / 10000^(2i / E)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / E)).

    >>> sinusoidal_positions(1, 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """
    position = torch.arange(num_positions, dtype=torch.float64)[:, None]
    angle = position / 10_000.0 ** (torch.arange(0, embed_dim, 2, dtype=torch.float64) / embed_dim)
    table = torch.zeros(num_positions, embed_dim, dtype=torch.float64)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, : embed_dim // 2]
    return table.to(torch.get_default_dtype())


class Embedding(nn.Module):
    """Tokens to hidden states: embedding, positions, dropout; optionally a learned CLS vector in front.

    Args:
        vocab_size: tokens.
        embed_dim: E.
        num_positions: longest sequence, CLS included.
        position: which positions to add.
        resid_dropout_p: on the sum.
        has_cls: put a learned vector in front of every sequence.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_positions: int,
        *,
        position: PositionKind,
        resid_dropout_p: float,
        has_cls: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, embed_dim)
        self.num_positions = num_positions
        self.learned = nn.Embedding(num_positions, embed_dim) if position == "learned" else None
        self.sinusoidal: Tensor | None
        table = sinusoidal_positions(num_positions, embed_dim) if position == "sinusoidal" else None
        self.register_buffer("sinusoidal", table, persistent=False)
        self.cls = nn.Parameter(torch.zeros(embed_dim)) if has_cls else None
        self.dropout = nn.Dropout(resid_dropout_p)

    def forward(self, tokens: Tensor, first_position: int = 0) -> Tensor:
        """Return hidden states `[B, L, E]` (or `[B, L + 1, E]` with CLS) of integer tokens `[B, L]`.

        Args:
            tokens: integers.
            first_position: of the first token, while decoding.

        Raises:
            ValueError: the sequence is longer than the model was built for.
        """
        hidden = self.token(tokens)
        if self.cls is not None:
            hidden = torch.cat([self.cls.expand(len(tokens), 1, -1), hidden], dim=1)
        last = first_position + hidden.shape[1]
        if last > self.num_positions:
            extra = 0 if self.cls is None else 1
            raise ValueError(f"expected at most max_seq_len = {self.num_positions - extra} tokens; got {last - extra}")
        if self.learned is not None:
            hidden = hidden + self.learned.weight[first_position:last]
        elif self.sinusoidal is not None:
            hidden = hidden + self.sinusoidal[first_position:last]
        dropped: Tensor = self.dropout(hidden)
        return dropped
