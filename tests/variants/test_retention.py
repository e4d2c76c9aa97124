"""Retention: the equations term by term, and what a gap of padding is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, build_mixer
from attn_zoo.variants.retention import NORM_EPS

BATCH, HEADS, DIM, EMBED = 2, 3, 4, 12


def make(head_dim: int = DIM, **options: Any) -> Any:
    torch.manual_seed(0)
    build = BuildContext(embed_dim=EMBED, num_heads=HEADS, head_dim=head_dim, max_seq_len=64, is_causal=True)
    return build_mixer("retention", build, **options).double().eval()


def draw(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(BATCH, length, EMBED, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2, length - 1]] = True
    mask[1] = True
    return mask


def turned(vector: list[float], position: int) -> list[complex]:
    """Return the pairs (x_i, x_{i + D/2}) as complex numbers, turned by e^{i n theta_i}."""
    half = len(vector) // 2
    return [
        complex(vector[i], vector[i + half]) * complex(math.cos(a), math.sin(a))
        for i in range(half)
        for a in [position * 10_000 ** (-i / half)]
    ]


def by_the_definition(mixer: Any, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Write equations 5 and 8 out, query by query, key by key."""
    output = torch.zeros_like(hidden)
    for entry in range(BATCH):
        for n, row in enumerate(hidden[entry]):
            if mask is not None and mask[entry, n]:
                continue
            heads = []
            for head in range(HEADS):
                gamma = 1 - 2 ** (-5 - head)
                mine = slice(head * DIM, (head + 1) * DIM)
                query = turned(mixer.query_proj(row)[mine].tolist(), n)
                total = torch.zeros(DIM * mixer.config.value_factor, dtype=torch.float64)
                for m in range(n + 1):
                    if mask is not None and mask[entry, m]:
                        continue
                    key = turned(mixer.key_proj(hidden[entry, m])[mine].tolist(), m)
                    score = sum((q * k.conjugate()).real for q, k in zip(query, key, strict=True)) / math.sqrt(DIM)
                    value = mixer.value_proj(hidden[entry, m]).view(HEADS, -1)[head]
                    total += gamma ** (n - m) * score * value
                spread = total - total.mean()
                heads.append(spread / (spread.square().mean() + NORM_EPS).sqrt())
            gate = mixer.gate_proj(row)
            output[entry, n] = mixer.out_proj(gate * torch.sigmoid(gate) * torch.cat(heads))
    return output


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("value_factor", [1, 2])
def test_both_paths_are_the_definition(length: int, has_padding: bool, value_factor: int):
    mixer, hidden = make(chunk_len=4, value_factor=value_factor), draw(length)
    mask = padding_for(length) if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-11)


def test_what_came_before_padding_decays_over_it():
    """A gap of padding counts as time: a token behind it sees the past as it would behind a gap of zeros."""
    mixer, hidden = make(chunk_len=4), draw(12)
    mask = torch.zeros(BATCH, 12, dtype=torch.bool)
    mask[:, 3:9] = True
    blanked = hidden.masked_fill(mask[..., None], 0.0)
    torch.testing.assert_close(mixer(hidden, key_padding_mask=mask), mixer(blanked), rtol=0, atol=1e-12)
    assert (mixer(hidden, key_padding_mask=mask) - mixer(hidden)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_reference_decays_in_16_bits_as_in_64(dtype: torch.dtype):
    """The last of eight heads has gamma = 1 - 2^-12, which 16 bits round to 1."""
    torch.manual_seed(0)
    context = BuildContext(embed_dim=32, num_heads=8, max_seq_len=1000, is_causal=True)
    mixer: Any = build_mixer("retention", context).to(dtype).eval()
    hidden = torch.randn(1, 1000, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        narrow = mixer.reference(hidden)
        wide = mixer.double().reference(hidden.double())
    assert narrow.dtype == dtype
    assert (narrow.double() - wide).abs().max() < 4 * torch.finfo(dtype).eps * wide.abs().max()


def test_features_are_turned_in_pairs():
    with pytest.raises(ConfigError, match="head_dim: expected an even number"):
        make(head_dim=5)
