"""Latent attention: the equations term by term, what decoding keeps and reads, decoding across, cost, refusals."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_mixer
from attn_zoo.attention.decode import state_bytes
from attn_zoo.measure.flop_count import count_flops
from attn_zoo.variants.mla import Mla, MlaConfig, mla_state_bytes

BATCH, HEADS, DIM, EMBED = 2, 3, 12, 20
TURNED = 4
"""Rotary features of a head of twelve."""


def make(*, build: dict[str, Any] | None = None, **options: Any) -> Mla:
    """Return a module whose parameters have left where they start."""
    sizes = {"embed_dim": EMBED, "num_heads": HEADS, "head_dim": DIM, "max_seq_len": 16, **(build or {})}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = build_mixer("mla", BuildContext(**sizes), **{"latent_factor": 2, **options}).double().eval()
        assert isinstance(module, Mla)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def draw(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(BATCH, length, EMBED, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, length // 2 :] = length > 1
    mask[1] = True
    return mask


def normed(row: Tensor, gain: Tensor) -> Tensor:
    return row / math.sqrt(float(row.square().mean()) + 1e-6) * gain


def turned(row: Tensor, position: int) -> Tensor:
    """Turn the features of `[R]`, pair by pair."""
    half = len(row) // 2
    result = row.clone()
    for pair in range(half):
        angle = position * 10_000.0 ** (-pair / half)
        a, b = float(row[pair]), float(row[pair + half])
        result[pair] = a * math.cos(angle) - b * math.sin(angle)
        result[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return result


@torch.no_grad()
def by_the_equations(module: Mla, hidden: Tensor, context: Tensor, padding: Tensor | None) -> Tensor:
    """Write them out: position by position, head by head."""
    num_turned, latent_dim = (TURNED if module.build.position == "rotary" else 0), 2 * DIM
    content, named = DIM - num_turned, dict(module.named_parameters())
    down, gain, up = module.down_proj.weight, module.latent_norm.weight, module.up_proj.weight.view(HEADS, -1, 2 * DIM)
    output = torch.zeros_like(hidden)
    for entry, (rows, seen_rows) in enumerate(zip(hidden, context, strict=True)):
        latents = [normed((down @ row)[:latent_dim], gain) for row in seen_rows]
        shared = [turned((down @ row)[latent_dim:], at) for at, row in enumerate(seen_rows)]
        for i, row in enumerate(rows):
            if module.config.query_latent_factor:
                latent = normed(named["query_proj.0.weight"] @ row, named["query_proj.1.weight"])
                query = named["query_proj.2.weight"] @ latent
            else:
                query = named["query_proj.weight"] @ row
            heads = torch.zeros(HEADS, DIM, dtype=torch.float64)
            seen = [
                j
                for j in range(len(seen_rows))
                if not (module.build.is_causal and j > i) and (padding is None or not padding[entry, j])
            ]
            for head, own in enumerate(query.view(HEADS, DIM)):
                asked = torch.cat([own[:content], turned(own[content:], i)])
                keys = [torch.cat([up[head, :content] @ latents[j], shared[j]]) for j in seen]
                values = [up[head, content:] @ latents[j] for j in seen]
                if seen:
                    weights = (torch.stack(keys) @ asked / math.sqrt(DIM)).softmax(0)
                    heads[head] = weights @ torch.stack(values)
            output[entry, i] = module.out_proj.weight @ heads.flatten()
    return output


@pytest.mark.parametrize("position", ["none", "rotary"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("query_latent_factor", [0, 1])
def test_both_paths_are_the_equations(
    position: str, is_causal: bool, has_padding: bool, query_latent_factor: int
) -> None:
    module = make(build={"position": position, "is_causal": is_causal}, query_latent_factor=query_latent_factor)
    for length in (1, 6):
        hidden, padding = draw(length), padding_for(length) if has_padding else None
        expected = by_the_equations(module, hidden, hidden, padding)
        for run in (module, module.reference):
            torch.testing.assert_close(run(hidden, key_padding_mask=padding), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("has_padding", [False, True])
def test_across_it_is_the_equations_and_decodes_from_what_is_kept_of_the_context(has_padding: bool) -> None:
    module = make(build={"is_cross": True})
    hidden, context, padding = draw(5), draw(7), padding_for(7) if has_padding else None
    expected = by_the_equations(module, hidden, context, padding)
    output = module(hidden, context=context, key_padding_mask=padding)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    state = module.init_state(BATCH, context=context, key_padding_mask=padding)
    start, state = module.prefill(hidden[:, :2], state)
    parts = [start]
    for position in range(2, 5):
        part, state = module.step(hidden[:, position : position + 1], state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", ["none", "rotary"])
def test_gradients_agree_with_finite_differences(position: str) -> None:
    module = make(build={"position": position, "is_causal": True})
    assert torch.autograd.gradcheck(lambda hidden: module(hidden), (draw(4)[:1].requires_grad_(),))


@pytest.mark.parametrize("position", ["none", "rotary"])
def test_decoding_reads_latents_and_computes_the_same(position: str) -> None:
    module = make(build={"position": position, "is_causal": True}, query_latent_factor=2)
    hidden = draw(11)
    start, state = module.prefill(hidden[:, :4])
    parts = [start]
    for piece in (hidden[:, 4:5], hidden[:, 5:8]):
        part, state = module.prefill(piece, state)
        parts.append(part)
    for at in range(8, 11):
        part, state = module.step(hidden[:, at : at + 1], state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), module(hidden), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("position", "num_turned"), [("none", 0), ("rotary", TURNED)])
def test_what_a_position_leaves_is_one_row_whatever_the_heads(position: str, num_turned: int) -> None:
    for num_heads in (1, 6):
        build = {"position": position, "is_causal": True, "num_heads": num_heads}
        module = make(build=build)
        state = module.prefill(draw(9))[1]
        expected = BATCH * 9 * (2 * DIM + num_turned) * 8
        assert state_bytes(state) == expected
        assert mla_state_bytes(module.build.shape(BATCH, 9, form="mixer", config=module.config), 8) == expected


def test_a_step_makes_no_keys_and_no_values() -> None:
    """Each position so far costs a score and a sum for each head, as wide as what is kept, and nothing else."""
    module = make(build={"position": "rotary", "is_causal": True})
    token = draw(1)
    few, many = (count_flops(partial(module.step, token, module.prefill(draw(length))[1])) for length in (5, 12))
    assert few is not None
    assert many is not None
    assert many - few == 7 * BATCH * HEADS * 2 * 2 * (2 * DIM + TURNED)


def test_a_cache_ends_at_the_longest_sequence() -> None:
    module = make(build={"max_seq_len": 4, "is_causal": True})
    state = module.prefill(draw(4))[1]
    with pytest.raises(ValueError, match="at most max_seq_len = 4 tokens; this makes 5"):
        module.step(draw(1), state)


def test_a_state_of_another_context_or_batch_is_refused() -> None:
    across = make(build={"is_cross": True})
    with pytest.raises(ValueError, match=r"context: expected \[B, S, E\] with B = 2 to decode across; got none"):
        across.init_state(BATCH)
    module = make(build={"is_causal": True})
    with pytest.raises(ValueError, match="2"):
        module.step(draw(1)[:1], module.init_state(BATCH, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latent_factor": 0}, "latent_factor: expected at least 1; got 0"),
        ({"query_latent_factor": -1}, "query_latent_factor: expected at least 0; got -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlaConfig(**options)


def test_sizes_without_a_rotary_pair_or_with_half_a_feature_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim: expected at least 6, of which 2 are a rotary pair; got 4"):
        make(build={"head_dim": 4, "position": "rotary"})
    with pytest.raises(ConfigError, match="expected an even width of the latent, latent_factor \\* head_dim; got 5"):
        make(build={"head_dim": 5}, latent_factor=1)


def test_heads_in_groups_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="all heads share one latent"):
        make(build={"num_kv_heads": 1})
