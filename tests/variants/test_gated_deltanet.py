"""Gated DeltaNet: equation 10 term by term, and memories that are replaced, kept and lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, build_mixer
from attn_zoo.variants.gated_deltanet import LENGTH_EPS, NORM_EPS, Writes, gated_delta_rule, recur

BATCH, HEADS, DIM, EMBED = 2, 3, 4, 12


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    build = BuildContext(embed_dim=EMBED, num_heads=HEADS, max_seq_len=64, is_causal=True)
    return build_mixer("gated_deltanet", build, **options).double().eval()


def draw(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(BATCH, length, EMBED, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2, length - 1]] = True
    mask[1] = True
    return mask


def convolved(mixer: Any, projection: Any, rows: Tensor, first: int) -> Tensor:
    """Return silu of the short convolution of one projection, whose features begin at `first`, `[L, width]`."""
    projected, weights = projection(rows), mixer.conv[:, first : first + projection.out_features]
    mixed = torch.zeros_like(projected)
    for t in range(len(rows)):
        for back in range(min(t + 1, len(weights))):
            mixed[t] += weights[len(weights) - 1 - back] * projected[t - back]
    return mixed * mixed.sigmoid()


@torch.no_grad()
def by_the_definition(mixer: Any, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Write equation 10 as it stands in the paper, S = S (alpha (1 - beta k k^T)) + beta v k^T, S as `[V, D]`."""
    output, width = torch.zeros_like(hidden), HEADS * DIM
    for entry, tokens in enumerate(hidden):
        is_padding = torch.zeros(len(tokens), dtype=torch.bool) if mask is None else mask[entry]
        rows = tokens.masked_fill(is_padding[:, None], 0.0)
        query = convolved(mixer, mixer.query_proj, rows, 0)
        key = convolved(mixer, mixer.key_proj, rows, width)
        value = convolved(mixer, mixer.value_proj, rows, 2 * width)
        heads = []
        for head in range(HEADS):
            mine = slice(head * DIM, (head + 1) * DIM)
            values = value.view(len(rows), HEADS, -1)[:, head]
            memory, read = torch.zeros(values.shape[1], DIM, dtype=torch.float64), []
            for t, row in enumerate(rows):
                step = math.log1p(math.exp(float(mixer.decay_proj(row)[head] + mixer.step_bias[head])))
                alpha = math.exp(-math.exp(float(mixer.log_rate[head])) * step)
                beta = 0.0 if is_padding[t] else 1 / (1 + math.exp(-float(mixer.strength_proj(row)[head])))
                k, q = (x[t, mine] / (x[t, mine].square().sum() + LENGTH_EPS).sqrt() for x in (key, query))
                memory = memory @ (alpha * (torch.eye(DIM, dtype=torch.float64) - beta * torch.outer(k, k)))
                memory = memory + beta * torch.outer(values[t], k)
                o = memory @ q / math.sqrt(DIM)
                read.append(o / (o.square().mean() + NORM_EPS).sqrt() * mixer.norm_scale)
            heads.append(torch.stack(read))
        gate = mixer.gate_proj(rows)
        output[entry] = mixer.out_proj(gate * gate.sigmoid() * torch.cat(heads, dim=-1))
    return output


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("options", [{}, {"value_factor": 2, "conv_len": 2}, {"conv_len": 1}])
def test_both_paths_are_the_definition(length: int, has_padding: bool, options: dict[str, Any]):
    mixer, hidden = make(chunk_len=4, **options), draw(length)
    mask = padding_for(length) if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-11)


def test_a_row_of_nothing_has_a_gradient_in_float16():
    mixer, hidden = make().half(), draw(9).half()
    for run in (mixer, mixer.reference):
        output = run(hidden, key_padding_mask=padding_for(9))
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), [*mixer.parameters()]))


def written(length: int, *, log_decay: float, strength: float) -> Writes:
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 1, 1, length, 8, generator=generator, dtype=torch.float64)
    ones = torch.ones(1, 1, length, dtype=torch.float64)
    return Writes(query, key / key.norm(dim=-1, keepdim=True), value, log_decay * ones, strength * ones)


def test_a_full_write_is_read_back_and_replaces_what_the_key_had():
    writes = written(40, log_decay=0.0, strength=1.0)
    _, memory = gated_delta_rule(writes, torch.randn(1, 1, 8, 8, dtype=torch.float64), chunk_len=8)
    torch.testing.assert_close(writes.key[:, :, -1:] @ memory, writes.value[:, :, -1:])


@pytest.mark.parametrize(("log_decay", "strength"), [(0.0, 1.0), (-1e-3, 0.5), (-30.0, 0.9), (-800.0, 1.0), (0.0, 0.0)])
def test_any_decay_and_strength_are_finite_and_right(log_decay: float, strength: float):
    """A decay may underflow to nothing in a chunk, whose later weights must not divide by it."""
    writes, start = written(70, log_decay=log_decay, strength=strength), torch.ones(1, 1, 8, 8, dtype=torch.float64)
    leaf = writes.log_decay.requires_grad_()
    results = []
    for output, memory in (recur(writes, start), gated_delta_rule(writes, start, chunk_len=16)):
        (gradient,) = torch.autograd.grad(output.square().sum() + memory.sum(), leaf)
        results.append((output, memory, gradient))
    for fast, slow in zip(*results, strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strong", [20.0, 80.0])
def test_what_follows_tokens_that_forget_keeps_its_digits(strong: float):
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 1, 2, 90, 4, generator=generator)
    log_decay, strength = torch.rand(2, 1, 2, 90, generator=generator)
    log_decay = -0.05 * log_decay
    log_decay[..., [*range(20), 40, 70]] -= strong
    start, weights = torch.ones(1, 2, 4, 4), torch.randn(1, 2, 90, 4, generator=generator)

    def run(is_fast: bool, dtype: torch.dtype) -> list[Tensor]:
        given = (query, key / key.norm(dim=-1, keepdim=True), value, log_decay, strength)
        leaves = [x.to(dtype).requires_grad_() for x in given]
        writes, memory = Writes(*leaves), start.to(dtype)
        output, last = gated_delta_rule(writes, memory, chunk_len=64) if is_fast else recur(writes, memory)
        gradients = torch.autograd.grad((output * weights.to(dtype)).sum() + last.sum(), leaves)
        return [x.detach().double() for x in (output, last, *gradients)]

    exact, plain, fast = run(False, torch.float64), run(False, torch.float32), run(True, torch.float32)
    for reference, by_steps, by_chunks in zip(exact, plain, fast, strict=True):
        rounding = 4 * torch.finfo(torch.float32).eps * reference.abs().max()
        assert (by_chunks - reference).abs().max() <= 2 * (by_steps - reference).abs().max() + rounding
