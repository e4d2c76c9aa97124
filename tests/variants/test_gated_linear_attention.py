"""Gated linear attention: the equations term by term, halves of a chunk, digits behind tokens that forget."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, build_mixer
from attn_zoo.variants.gated_linear_attention import (
    NORM_EPS,
    GatedLinearAttention,
    GatedLinearAttentionConfig,
    Writes,
    gated_sums,
    recur,
    within_chunk,
)

BATCH, HEADS, DIM, EMBED = 2, 2, 3, 6


def make(**options: Any) -> GatedLinearAttention:
    """Return a module whose parameters have left where they start."""
    torch.manual_seed(0)
    build = BuildContext(embed_dim=EMBED, num_heads=HEADS, max_seq_len=64, is_causal=True)
    module = build_mixer("gated_linear_attention", build, **options).double().eval()
    assert isinstance(module, GatedLinearAttention)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return module


def draw(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(BATCH, length, EMBED, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2, length - 1]] = True
    mask[1] = True
    return mask


@torch.no_grad()
def by_the_definition(module: GatedLinearAttention, hidden: Tensor, padding: Tensor | None) -> Tensor:
    """Write equation 4 and the output out: query by query, key by key, feature by feature."""
    output, temperature = torch.zeros_like(hidden), module.config.gate_temperature
    if padding is not None:  # a padded position writes nothing; time passes
        hidden = hidden.masked_fill(padding[..., None], 0.0)
    for entry in range(BATCH):
        rows = hidden[entry]
        logits = module.decay_up_proj(module.decay_down_proj(rows)).view(-1, HEADS, DIM).tolist()
        alphas = [[[(1 / (1 + math.exp(-x))) ** (1 / temperature) for x in head] for head in row] for row in logits]
        queries, keys, values = (
            projection(rows).view(len(rows), HEADS, -1)
            for projection in (module.query_proj, module.key_proj, module.value_proj)
        )
        for t in range(len(rows)):
            heads = []
            for head in range(HEADS):
                total = torch.zeros_like(values[t, head])
                for i in range(t + 1):
                    score = sum(
                        float(queries[t, head, d] * keys[i, head, d])
                        * math.prod(alphas[j][head][d] for j in range(i + 1, t + 1))
                        for d in range(DIM)
                    )
                    total += score / math.sqrt(DIM) * values[i, head]
                heads.append(total / (total.square().mean() + NORM_EPS).sqrt() * module.norm_scale)
            gate = module.gate_proj(rows[t])
            output[entry, t] = module.out_proj(gate * torch.sigmoid(gate) * torch.cat(heads))
    return output


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"chunk_len": 4}, {"chunk_len": 3, "value_factor": 2, "gate_rank": 2, "gate_temperature": 1.0}, {}],
)
def test_both_paths_are_the_definition(length: int, has_padding: bool, options: dict[str, Any]) -> None:
    module, hidden = make(**options), draw(length)
    padding = padding_for(length) if has_padding else None
    expected = by_the_definition(module, hidden, padding)
    for run in (module, module.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=padding), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_halves_of_a_chunk_have_every_pair_once(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    query, key, log_decay = torch.randn(3, size, DIM, generator=generator, dtype=torch.float64)
    log_decay = -log_decay.abs()
    value = torch.eye(size, dtype=torch.float64)  # so that the output is the matrix of weights
    weights = within_chunk(Writes(query, key, value, log_decay))
    expected = torch.zeros(size, size, dtype=torch.float64)
    for t in range(size):
        for i in range(t + 1):
            expected[t, i] = query[t] @ (key[i] * log_decay[i + 1 : t + 1].sum(0).exp())
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("strong", [0.0, 30.0, 3000.0])
def test_what_follows_tokens_that_forget_keeps_its_digits(strong: float) -> None:
    """Each feature by tokens of its own: a factor that is shared would lose what another one keeps, or overflow."""
    generator = torch.Generator().manual_seed(1)
    query, key, value, drawn = torch.randn(4, 1, 2, 90, 4, generator=generator)
    log_decay = -0.05 * drawn.abs()
    log_decay[..., [*range(20), 40, 70], 0] -= strong
    log_decay[..., [10, 33, 64], 1] -= strong
    start, weights = torch.ones(1, 2, 4, 4), torch.randn(1, 2, 90, 4, generator=generator)

    def run(is_fast: bool, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value, log_decay)]
        writes, memory = Writes(*leaves), start.to(dtype)
        output, last = gated_sums(writes, memory, chunk_len=64) if is_fast else recur(writes, memory)
        gradients = torch.autograd.grad((output * weights.to(dtype)).sum() + last.sum(), leaves)
        return [x.detach().double() for x in (output, last, *gradients)]

    exact, plain, fast = run(False, torch.float64), run(False, torch.float32), run(True, torch.float32)
    for reference, by_steps, by_chunks in zip(exact, plain, fast, strict=True):
        rounding = 4 * torch.finfo(torch.float32).eps * reference.abs().max()
        assert (by_chunks - reference).abs().max() <= 2 * (by_steps - reference).abs().max() + rounding


def test_a_gate_that_is_open_sums_and_one_that_is_shut_remembers_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = torch.randn(3, 1, 1, 20, 4, generator=generator, dtype=torch.float64)
    nothing = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    for log_decay, seen in ((0.0, torch.ones(20, 20).tril()), (-1e30, torch.eye(20))):
        output, _ = gated_sums(Writes(query, key, value, torch.full_like(query, log_decay)), nothing, chunk_len=8)
        expected = (query @ key.mT * seen.double()) @ value
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate_rank": 0}, "gate_rank: expected at least 1; got 0"),
        ({"gate_temperature": 0.0}, "gate_temperature: expected more than 0; got 0.0"),
        ({"gate_temperature": math.nan}, "gate_temperature: expected more than 0; got nan"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedLinearAttentionConfig(**options)
