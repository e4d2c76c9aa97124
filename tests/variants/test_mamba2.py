"""Mamba-2: its recurrence and its dual form term by term, and decay of any size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, build_mixer
from attn_zoo.variants.mamba2 import NORM_EPS, Inputs, recur, state_space_dual

BATCH, HEADS, DIM, EMBED = 2, 3, 4, 12


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    build = BuildContext(embed_dim=EMBED, num_heads=HEADS, max_seq_len=64, is_causal=True)
    return build_mixer("mamba2", build, **options).double().eval()


def draw(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(BATCH, length, EMBED, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2, length - 1]] = True
    mask[1] = True
    return mask


@torch.no_grad()
def by_the_definition(mixer: Any, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Write the dual form out: query by query, key by key, the decay between them a product."""
    output = torch.zeros_like(hidden)
    size, wide = mixer.config.state_dim, HEADS * DIM * mixer.config.expand
    for entry, tokens in enumerate(hidden):
        is_padding = torch.zeros(len(tokens), dtype=torch.bool) if mask is None else mask[entry]
        rows = tokens.masked_fill(is_padding[:, None], 0.0)
        projected, mixed = mixer.conv_proj(rows), torch.zeros(len(rows), wide + 2 * size, dtype=torch.float64)
        for t in range(len(rows)):
            total = mixer.conv_bias.clone()
            for back in range(min(t + 1, len(mixer.conv))):
                total += mixer.conv[len(mixer.conv) - 1 - back] * projected[t - back]
            mixed[t] = total * total.sigmoid() * ~is_padding[t]
        x, key, query = (
            mixed[:, :wide].view(len(rows), HEADS, -1),
            mixed[:, wide : wide + size],
            mixed[:, wide + size :],
        )
        dt = (mixer.step_proj(rows) + mixer.step_bias).exp().log1p()
        for t, row in enumerate(rows):
            heads = []
            for head in range(HEADS):
                y, decay = mixer.skip[head] * x[t, head], 1.0
                for i in range(t, -1, -1):
                    y = y + decay * (query[t] @ key[i]) * dt[i, head] * x[i, head]
                    decay *= math.exp(-math.exp(float(mixer.log_rate[head])) * float(dt[i, head]))
                heads.append(y)
            gate = mixer.gate_proj(row)
            gated = torch.cat(heads) * gate * gate.sigmoid()
            output[entry, t] = mixer.out_proj(gated / (gated.square().mean() + NORM_EPS).sqrt() * mixer.norm_scale)
    return output


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("options", [{}, {"expand": 1, "conv_len": 2}, {"conv_len": 1}])
def test_both_paths_are_the_definition(length: int, has_padding: bool, options: dict[str, Any]):
    mixer, hidden = make(chunk_len=4, state_dim=5, **options), draw(length)
    mask = padding_for(length) if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("log_decay", [0.0, -1e-3, -30.0, -800.0])
def test_any_decay_is_finite_and_right(log_decay: float):
    """A decay may underflow to nothing in a chunk, whose later weights must not divide by it."""
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(1, 70, 2, 3, generator=generator, dtype=torch.float64)
    key, query = torch.randn(2, 1, 70, 4, generator=generator, dtype=torch.float64)
    step, leaf = torch.rand(2, 1, 70, 2, generator=generator, dtype=torch.float64)
    leaf = (log_decay * leaf).requires_grad_()
    inputs, start = Inputs(value, key, query, step, leaf), torch.ones(1, 1, 4, 6, dtype=torch.float64)
    results = []
    for output, memory in (recur(inputs, start), state_space_dual(inputs, start, chunk_len=16)):
        (gradient,) = torch.autograd.grad(output.square().sum() + memory.sum(), leaf)
        results.append((output, memory, gradient))
    for fast, slow in zip(*results, strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strong", [20.0, 80.0])
def test_what_follows_tokens_that_forget_keeps_its_digits(strong: float):
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(1, 90, 2, 3, generator=generator)
    key, query = torch.randn(2, 1, 90, 4, generator=generator)
    step, log_decay = torch.rand(2, 1, 90, 2, generator=generator)
    log_decay = -0.05 * log_decay
    log_decay[:, [*range(20), 40, 70]] -= strong
    start, weights = torch.ones(1, 1, 4, 6), torch.randn(1, 90, 2, 3, generator=generator)

    def run(is_fast: bool, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (value, key, query, step, log_decay)]
        inputs, memory = Inputs(*leaves), start.to(dtype)
        output, last = state_space_dual(inputs, memory, chunk_len=64) if is_fast else recur(inputs, memory)
        gradients = torch.autograd.grad((output * weights.to(dtype)).sum() + last.sum(), leaves)
        return [x.detach().double() for x in (output, last, *gradients)]

    exact, plain, fast = run(False, torch.float64), run(False, torch.float32), run(True, torch.float32)
    for reference, by_steps, by_chunks in zip(exact, plain, fast, strict=True):
        rounding = 4 * torch.finfo(torch.float32).eps * reference.abs().max()
        assert (by_chunks - reference).abs().max() <= 2 * (by_steps - reference).abs().max() + rounding
