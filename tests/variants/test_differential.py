"""Differential attention: the equations term by term, what cancels, whole rotary pairs, lambda by layer, refusals."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.attention.rotary import rotate
from attn_zoo.measure.flop_count import count_flops
from attn_zoo.variants.differential import DifferentialAttention, DifferentialConfig, differential_flops

BATCH, HEADS, DIM = 2, 2, 8


def make(is_causal: bool = False, *, build: dict[str, Any] | None = None, **options: Any) -> DifferentialAttention:
    """Return a module whose parameters have left where they start."""
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 64, **(build or {})}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = build_attention("differential", BuildContext(is_causal=is_causal, **sizes), **options).double().eval()
        assert isinstance(module, DifferentialAttention)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def draw(query_len: int, key_len: int | None = None, num_kv_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(query_len)
    key_len = query_len if key_len is None else key_len
    query, key, value = (
        torch.randn(BATCH, heads, length, DIM, generator=generator, dtype=torch.float64)
        for heads, length in ((HEADS, query_len), (num_kv_heads, key_len), (num_kv_heads, key_len))
    )
    return query, key, value


def padding_for(key_len: int) -> Tensor:
    mask = torch.zeros(BATCH, key_len, dtype=torch.bool)
    mask[0, key_len // 2 :] = key_len > 1
    mask[1] = True
    return mask


def by_the_equations(
    module: DifferentialAttention, inputs: tuple[Tensor, ...], is_causal: bool, padding: Tensor | None
) -> Tensor:
    """Write them out, query by query, map by map, key by key."""
    query, key, value = inputs
    output, group, late = torch.zeros_like(query), HEADS // key.shape[1], key.shape[2] - query.shape[2]
    start = 0.8 - 0.6 * math.exp(-0.3 * module.build.layer_index)
    lambda_q, lambda_k = module.lambda_query.tolist(), module.lambda_key.tolist()
    dots = [sum(a * b for a, b in zip(lambda_q[part], lambda_k[part], strict=True)) for part in (0, 1)]
    share = math.exp(dots[0]) - math.exp(dots[1]) + start
    for entry in range(BATCH):
        for head in range(HEADS):
            for i in range(query.shape[2]):
                seen = [
                    j
                    for j in range(key.shape[2])
                    if not (is_causal and j > i + late) and (padding is None or not padding[entry, j])
                ]
                if not seen:
                    continue
                total = torch.zeros(DIM, dtype=torch.float64)
                for features, sign in (((0, 2, 4, 6), 1.0), ((1, 3, 5, 7), -share)):
                    scores = [
                        sum(float(query[entry, head, i, f] * key[entry, head // group, j, f]) for f in features)
                        / math.sqrt(len(features))
                        for j in seen
                    ]
                    weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                    total += sign * (weights @ value[entry, head // group, seen])
                root = math.sqrt(float(total.square().mean()) + 1e-5)
                output[entry, head, i] = (1 - start) * module.gain.detach() * total / root
    return output


@pytest.mark.parametrize(("query_len", "key_len"), [(1, 1), (5, 5), (3, 7), (6, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
def test_both_paths_are_the_equations(
    query_len: int, key_len: int, is_causal: bool, has_padding: bool, num_kv_heads: int
) -> None:
    is_cross = query_len != key_len and not is_causal
    module = make(
        is_causal, build={"num_kv_heads": num_kv_heads, "is_cross": is_cross, "layer_index": 1, "num_layers": 2}
    )
    inputs, padding = draw(query_len, key_len, num_kv_heads), padding_for(key_len) if has_padding else None
    expected = by_the_equations(module, inputs, is_causal, padding)
    for run in (module, module.reference):
        torch.testing.assert_close(run(*inputs, key_padding_mask=padding), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_agree_with_finite_differences(is_causal: bool) -> None:
    leaves = tuple(x[:1, :, :5].clone().requires_grad_() for x in draw(5))
    module = make(is_causal)
    assert torch.autograd.gradcheck(lambda *x: module(*x), leaves)


def test_equal_maps_leave_the_direction_of_full_attention() -> None:
    """The share that is taken off only scales, and the norm undoes that: `full` with half of its features."""
    module = make()
    with torch.no_grad():
        module.gain.fill_(1.0)
    query, key, value = draw(9)
    query, key = (x[..., ::2].repeat_interleave(2, dim=-1) for x in (query, key))  # both maps have the same features
    exact = softmax_attention(query[..., ::2], key[..., ::2], value)
    expected = torch.nn.functional.normalize(exact, dim=-1) * math.sqrt(DIM) * (1 - module.lambda_start)
    torch.testing.assert_close(module(query, key, value), expected, rtol=1e-3, atol=0)  # but for the norm's constant


def test_each_map_turns_by_whole_rotary_pairs() -> None:
    """Only then the scores of a map are of relative positions; the first and second half of a head would not be."""
    query, key, value = draw(7)
    near, far = (make()(rotate(query, at), rotate(key, at), value) for at in (0, 11))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-10)
    assert not torch.allclose(near, make()(query, key, value), atol=1e-3)


def test_a_mixer_of_grouped_heads_with_rotary_positions_decodes_what_it_computes() -> None:
    build = BuildContext(
        embed_dim=32, num_heads=4, num_kv_heads=2, max_seq_len=16, is_causal=True, position="rotary", num_layers=1
    )
    mixer = build_mixer("differential", build).double().eval()
    hidden = torch.randn(BATCH, 9, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    start, state = mixer.prefill(hidden[:, :5])
    steps = [start]
    for position in range(5, 9):
        output, state = mixer.step(hidden[:, position : position + 1], state)
        steps.append(output)
    torch.testing.assert_close(torch.cat(steps, dim=1), mixer(hidden), rtol=0, atol=1e-12)


def test_a_cache_ends_at_the_longest_sequence() -> None:
    module = make(True, build={"max_seq_len": 4})
    state = module.prefill(*draw(3))[1]
    state = module.step(*draw(1), state)[1]
    with pytest.raises(ValueError, match="at most max_seq_len = 4 tokens; this makes 5"):
        module.step(*draw(1), state)


def test_how_much_is_taken_off_grows_with_depth() -> None:
    starts = [make(build={"layer_index": index, "num_layers": 4}).lambda_start for index in range(4)]
    assert starts == pytest.approx([0.2, 0.35551, 0.47071, 0.55606], abs=1e-5)
    assert make(lambda_init=0.8, lambda_drop=0.0).lambda_start == 0.8


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_costs_twice_what_full_attention_does(is_causal: bool) -> None:
    build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=128, is_causal=is_causal)
    inputs = [torch.randn(1, 2, 128, 16) for _ in range(3)]
    twice, once = (count_flops(partial(build_attention(name, build), *inputs)) for name in ("differential", "full"))
    assert once is not None
    assert twice == 2 * once
    if not is_causal:  # a kernel's count knows no triangle
        assert differential_flops(build.shape(1, 128, form="attention")) == twice


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lambda_init": 1.0}, "lambda_init: expected less than 1"),
        ({"lambda_drop": -0.1}, "lambda_drop: expected 0 to lambda_init = 0.8; got -0.1"),
        ({"lambda_drop": 0.9}, "lambda_drop: expected 0 to lambda_init = 0.8; got 0.9"),
        ({"lambda_init": math.nan}, "lambda_init: expected less than 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DifferentialConfig(**options)


def test_heads_that_are_no_two_maps_of_pairs_are_refused() -> None:
    build = BuildContext(embed_dim=12, num_heads=2, max_seq_len=8)
    with pytest.raises(
        ConfigError, match="head_dim: expected a multiple of 4, for two maps of whole rotary pairs; got 6"
    ):
        build_attention("differential", build)


def test_dropout_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no attention dropout"):
        make(build={"dropout_p": 0.1})
