"""Gated linear attention: the parallel form pair by pair, features that forget beside those that keep, and digits."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, build_mixer
from attn_zoo.variants.gated_linear_attention import NORM_EPS, Writes, gated_sums, recur

BATCH, HEADS, DIM, EMBED = 2, 3, 4, 12


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    build = BuildContext(embed_dim=EMBED, num_heads=HEADS, max_seq_len=64, is_causal=True)
    mixer: Any = build_mixer("gated_linear_attention", build, **options).double().eval()
    with torch.no_grad():  # a scale of 1 hides that it is missing
        mixer.norm_scale += 0.1 * torch.randn_like(mixer.norm_scale)
    return mixer


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
    """Write the parallel form out: each pair of tokens has a weight, the sum over features of q k alpha .. alpha."""
    output = torch.zeros_like(hidden)
    tau, first, second = mixer.config.temperature, mixer.rank_proj.weight, mixer.decay_proj.weight
    for entry, tokens in enumerate(hidden):
        rows = tokens if mask is None else tokens.masked_fill(mask[entry, :, None], 0.0)
        decays = 1 / (1 + (-(rows @ first.T @ second.T + mixer.decay_proj.bias)).exp()) ** (1 / tau)
        for t, row in enumerate(rows):
            heads = []
            for head in range(HEADS):
                mine = slice(head * DIM, (head + 1) * DIM)
                query = (mixer.query_proj.weight @ row)[mine]
                total = torch.zeros(DIM * mixer.config.value_factor, dtype=torch.float64)
                for i in range(t + 1):
                    key = (mixer.key_proj.weight @ rows[i])[mine]
                    kept = [math.prod(decays[i + 1 : t + 1, column].tolist()) for column in range(DIM * HEADS)[mine]]
                    weight = sum(float(q * k) * d for q, k, d in zip(query, key, kept, strict=True)) / math.sqrt(DIM)
                    total += weight * (mixer.value_proj.weight @ rows[i]).view(HEADS, -1)[head]
                heads.append(total / (total.square().mean() + NORM_EPS).sqrt() * mixer.norm_scale)
            gate = mixer.gate_proj.weight @ row
            output[entry, t] = mixer.out_proj.weight @ (gate * gate.sigmoid() * torch.cat(heads))
    return output


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("options", [{}, {"value_factor": 2, "gate_rank": 2, "temperature": 0.7}])
def test_both_paths_are_the_definition(length: int, has_padding: bool, options: dict[str, Any]):
    mixer, hidden = make(chunk_len=4, **options), draw(length)
    mask = padding_for(length) if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-11)


def test_what_came_before_padding_decays_over_it():
    """A gap of padding counts as time: a token behind it sees the past as it would behind a gap of zeros."""
    mixer, hidden = make(chunk_len=4, temperature=1.0), draw(12)
    mask = torch.zeros(BATCH, 12, dtype=torch.bool)
    mask[:, 3:9] = True
    blanked = hidden.masked_fill(mask[..., None], 0.0)
    output = mixer(hidden, key_padding_mask=mask)
    torch.testing.assert_close(output, mixer(blanked), rtol=0, atol=1e-12)
    without_gap = mixer(torch.cat([hidden[:, :3], hidden[:, 9:]], dim=1))
    assert (output[:, 9:] - without_gap[:, 3:]).abs().max() > 1e-3


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_no_temperature_but_a_positive_one(temperature: float):
    with pytest.raises(ConfigError, match="temperature: expected a number above 0"):
        make(temperature=temperature)


def written(length: int, log_decay: Tensor, dtype: torch.dtype = torch.float64) -> Writes:
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 1, 2, length, DIM, generator=generator, dtype=torch.float64)
    return Writes(*(x.to(dtype) for x in (query, key, value, log_decay.expand(1, 2, length, DIM))))


def results(function: Any, writes: Writes, **options: Any) -> list[Tensor]:
    """Return the output, the last memory, and the gradients of all that goes in."""
    leaves = [x.detach().clone().requires_grad_() for x in astuple(writes)]
    start = torch.linspace(-1, 1, 2 * DIM * DIM, dtype=writes.key.dtype).view(1, 2, DIM, DIM).requires_grad_()
    output, memory = function(Writes(*leaves), start, **options)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    gradients = torch.autograd.grad((output * upstream).sum() + memory.square().sum(), [*leaves, start])
    return [x.detach().double() for x in (output, memory, *gradients)]


@pytest.mark.parametrize("chunk_len", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 70])
def test_chunks_are_the_recurrence_with_gradients(length: int, chunk_len: int):
    writes = written(length, -torch.rand(1, 2, length, DIM, generator=torch.Generator().manual_seed(3)).double())
    for fast, slow in zip(results(gated_sums, writes, chunk_len=chunk_len), results(recur, writes), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("log_decay", [0.0, -1e-9, -30.0, -800.0])
def test_any_decay_is_finite_and_right(log_decay: float):
    """A decay may underflow to nothing in a chunk, whose later weights must not divide by it."""
    writes = written(70, torch.tensor(log_decay, dtype=torch.float64))
    for fast, slow in zip(results(gated_sums, writes, chunk_len=16), results(recur, writes), strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


def test_a_feature_that_forgets_takes_nothing_from_one_that_keeps():
    """Of the first feature nothing is left after a token, while the second is summed."""
    log_decay = torch.tensor([-torch.inf, 0.0, -900.0, -1e-3], dtype=torch.float64).clamp(min=-1e4)
    writes = written(40, log_decay)
    output, memory = gated_sums(writes, torch.ones(1, 2, DIM, DIM, dtype=torch.float64), chunk_len=16)
    key, value = writes.key, writes.value
    own, total = key[..., -1:, :].mT * value[..., -1:, :], 1 + key.mT @ value
    torch.testing.assert_close(memory[:, :, [0, 2]], own[:, :, [0, 2]])
    torch.testing.assert_close(memory[:, :, 1], total[:, :, 1])
    torch.testing.assert_close(output[:, :, -1:], writes.query[:, :, -1:] @ memory)


def bounded_by_the_recurrence(writes: Writes, chunk_len: int) -> None:
    """Compare in float32: twice the error of the recurrence in float32, and rounding, are allowed."""
    narrow = Writes(*(x.float() for x in astuple(writes)))
    exact = results(recur, Writes(*(x.double() for x in astuple(narrow))))
    plain, fast = results(recur, narrow), results(gated_sums, narrow, chunk_len=chunk_len)
    for reference, by_steps, by_chunks in zip(exact, plain, fast, strict=True):
        rounding = 4 * torch.finfo(torch.float32).eps * reference.abs().max()
        assert (by_chunks - reference).abs().max() <= 2 * (by_steps - reference).abs().max() + rounding


@pytest.mark.parametrize("strong", [20.0, 80.0, 200.0])
def test_what_follows_tokens_that_forget_keeps_its_digits(strong: float):
    log_decay = -0.05 * torch.rand(1, 2, 90, DIM, generator=torch.Generator().manual_seed(1))
    log_decay[..., [*range(20), 40, 70], :] -= strong
    bounded_by_the_recurrence(written(90, log_decay), chunk_len=64)


@pytest.mark.parametrize("weak", [1e-9, 1e-5, 1e-3])
def test_slow_decays_keep_their_digits(weak: float):
    """Decays of 1 - 10^-9 are 1 in float32, in the recurrence as well."""
    log_decay = -weak * torch.rand(1, 2, 300, DIM, generator=torch.Generator().manual_seed(1))
    bounded_by_the_recurrence(written(300, log_decay), chunk_len=64)


@torch.no_grad()
@pytest.mark.parametrize("weak", [3e-8, 1e-6])
def test_rounded_decays_do_not_add_up_over_chunks(weak: float):
    """One of 1 - 3 10^-8 is 1 in float32: by steps, the oldest of 8192 tokens keep 0.02 % too much."""
    wide = written(8192, torch.tensor(-weak, dtype=torch.float32).double())
    narrow = Writes(*(x.float() for x in astuple(wide)))
    start = torch.zeros(1, 2, DIM, DIM, dtype=torch.float64)
    _, exact = gated_sums(Writes(*(x.double() for x in astuple(narrow))), start, chunk_len=64)
    _, memory = gated_sums(narrow, start.float(), chunk_len=64)
    assert (memory - exact).abs().max() < 64 * torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_reference_decays_in_16_bits_as_in_64(dtype: torch.dtype):
    """Decays above 1 - 2^-12 are 1 in 16 bits."""
    torch.manual_seed(0)
    context = BuildContext(embed_dim=32, num_heads=4, max_seq_len=400, is_causal=True)
    mixer: Any = build_mixer("gated_linear_attention", context, temperature=1e4).to(dtype).eval()
    hidden = torch.randn(1, 400, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        narrow = mixer.reference(hidden)
        wide = mixer.double().reference(hidden.double())
    assert narrow.dtype == dtype
    assert (narrow.double() - wide).abs().max() < 4 * torch.finfo(dtype).eps * wide.abs().max()
