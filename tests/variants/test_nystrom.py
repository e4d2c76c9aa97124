"""Nyström attention: equation 13 term by term, its landmarks, its pseudoinverse, what it converges to, its costs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.measure.flop_count import count_flops
from attn_zoo.variants.nystrom import NystromAttention, filtered, nystrom_flops, pseudoinverse

BATCH, HEADS, DIM = 2, 2, 4


def make(*, build: dict[str, Any] | None = None, **options: Any) -> NystromAttention:
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 4096, **(build or {})}
    defaults: dict[str, Any] = {"num_landmarks": 4, "conv_len": 3, "pinv_iterations": 40}
    module = build_attention("nystrom", BuildContext(**sizes), **(defaults | options)).double().eval()
    assert isinstance(module, NystromAttention)
    return module


def draw(length: int, num_kv_heads: int = HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    heads = (HEADS, num_kv_heads, num_kv_heads)
    return [torch.randn(BATCH, count, length, DIM, generator=generator, dtype=torch.float64) for count in heads]


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, length - length // 2 :] = True  # whole segments, and a part of one
    mask[0, 1:2] = length > 4
    return mask


def by_the_definition(module: NystromAttention, inputs: list[Tensor], padding: Tensor | None) -> Tensor:
    """Write equation 13 out for each sequence and head, over its unpadded positions, with torch's pseudoinverse."""
    query, key, value = inputs
    output, length = torch.zeros_like(query), query.shape[2]
    width = -(-length // module.config.num_landmarks)
    for entry in range(BATCH):
        kept = [i for i in range(length) if padding is None or not padding[entry, i]]
        segments = [[i for i in kept if i // width == s] for s in range(-(-length // width))]
        segments = [segment for segment in segments if segment]
        for head in range(HEADS):
            group = head // (HEADS // key.shape[1])
            q, k, v = query[entry, head], key[entry, group], value[entry, group]
            q_marks, k_marks = (torch.stack([x[segment].mean(0) for segment in segments]) for x in (q, k))
            to_marks = (q @ k_marks.mT / DIM**0.5).softmax(-1)
            between = (q_marks @ k_marks.mT / DIM**0.5).softmax(-1)
            from_marks = (q_marks @ k[kept].mT / DIM**0.5).softmax(-1)
            mixed = to_marks @ torch.linalg.pinv(between) @ (from_marks @ v[kept])
            if module.filter is not None:
                taps = module.filter[head].tolist()
                for i in range(length):
                    for tap, weight in enumerate(taps):
                        j = i + tap - len(taps) // 2
                        if j in kept:
                            mixed[i] = mixed[i] + weight * v[j]
            output[entry, head] = mixed
    return output


@pytest.mark.parametrize("length", [1, 3, 4, 8, 13, 30])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("conv_len", [0, 3])
@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
def test_both_paths_are_the_definition(length: int, has_padding: bool, conv_len: int, num_kv_heads: int):
    module = make(build={"num_kv_heads": num_kv_heads}, conv_len=conv_len)
    inputs, padding = draw(length, num_kv_heads), padding_for(length) if has_padding else None
    with torch.no_grad():
        expected = by_the_definition(module, inputs, padding)
        for run in (module, module.reference):
            torch.testing.assert_close(run(*inputs, key_padding_mask=padding), expected, rtol=0, atol=1e-9)


def test_gradients_of_both_paths_agree_with_those_of_finite_differences():
    module, padding = make(pinv_iterations=6), padding_for(13)
    upstream = torch.randn(BATCH, HEADS, 13, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for run in (module, module.reference):
        leaves = [x.requires_grad_() for x in draw(13)]
        assert module.filter is not None
        wanted = [*leaves, module.filter]
        results.append(torch.autograd.grad(run(*leaves, key_padding_mask=padding), wanted, upstream))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-10)
    short = tuple(x[:1, :, :6].clone().requires_grad_() for x in draw(6))
    assert torch.autograd.gradcheck(lambda *x: module(*x), short)


def test_one_landmark_for_each_position_is_softmax_attention():
    inputs = draw(24)
    expected = softmax_attention(*inputs)

    def error(count: int) -> float:
        module = make(num_landmarks=count, pinv_iterations=6, conv_len=0)
        return float((module(*inputs) - expected).square().mean().sqrt())

    errors = [error(count) for count in (3, 12, 24)]
    assert errors[0] > errors[1] > 1e-3
    assert errors[2] < 1e-14, "computed, not iterated: six iterations leave small singular values out"
    assert error(1000) == errors[2], "landmarks are never more than positions"


def test_six_iterations_come_nearer_to_softmax_attention_than_the_pseudoinverse():
    """They leave out small singular values of A, which the pseudoinverse turns into large ones."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 70, 16, generator=generator, dtype=torch.float64)
    sizes: dict[str, Any] = {"build": {"embed_dim": 16, "num_heads": 1}, "num_landmarks": 17, "conv_len": 0}
    expected = softmax_attention(query, key, value)
    few, many = (make(pinv_iterations=count, **sizes)(query, key, value) for count in (6, 40))
    assert 2 * (few - expected).norm() < (many - expected).norm()


def test_a_sequence_of_padding_only_is_zero_and_harms_no_other():
    module, inputs = make(), draw(10)
    padding = torch.zeros(BATCH, 10, dtype=torch.bool)
    padding[1] = True
    output = module(*inputs, key_padding_mask=padding)
    assert torch.equal(output[1], torch.zeros_like(output[1]))
    torch.testing.assert_close(output[:1], module(*(x[:1] for x in inputs)), rtol=0, atol=1e-12)


def test_sequences_of_a_batch_do_not_depend_on_each_other():
    module, inputs = make(pinv_iterations=2), draw(16)
    changed = [torch.cat([x[:1], 5.0 * x[1:]]) for x in inputs]
    torch.testing.assert_close(module(*changed)[0], module(*inputs)[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [1, 5, 40])
def test_the_iteration_ends_at_the_pseudoinverse(size: int):
    generator = torch.Generator().manual_seed(size)
    matrix = torch.randn(3, size, size, generator=generator, dtype=torch.float64).softmax(-1)
    found = pseudoinverse(matrix, 40)
    torch.testing.assert_close(found, torch.linalg.pinv(matrix), rtol=1e-6, atol=1e-6)
    if size == 1:
        return
    few = [float((matrix @ pseudoinverse(matrix, count) @ matrix - matrix).norm()) for count in (2, 6, 12)]
    assert few[0] > few[1] > few[2]
    assert torch.equal(pseudoinverse(torch.zeros(1, size, size), 6), torch.zeros(1, size, size))


@pytest.mark.parametrize(("length", "num_taps"), [(1, 3), (63, 35), (64, 1), (65, 35), (150, 129), (512, 35)])
def test_the_filter_in_float32_with_its_gradients(length: int, num_taps: int):
    """At 512 tokens torch's convolution by groups has a gradient of the filter that is off by some per cent."""
    generator = torch.Generator().manual_seed(length)
    value, upstream = torch.randn(2, 1, 4, length, 16, generator=generator, dtype=torch.float64)
    taps = torch.randn(4, num_taps, generator=generator, dtype=torch.float64)
    near = torch.nn.functional.pad(value, (0, 0, num_taps // 2, num_taps // 2)).unfold(2, num_taps, 1)
    expected = [torch.einsum("bhldk,hk->bhld", near, taps), torch.einsum("bhldk,bhld->hk", near, upstream)]
    leaf = taps.float().requires_grad_()
    output = filtered(value.float(), leaf)
    found = [output, *torch.autograd.grad(output, leaf, upstream.float())]
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() < 2e-6 * other.norm()


@pytest.mark.parametrize("length", [8, 64, 100])
@pytest.mark.parametrize("conv_len", [0, 5])
def test_flops_are_those_of_the_products_that_run(length: int, conv_len: int):
    module = make(num_landmarks=8, pinv_iterations=6, conv_len=conv_len)
    shape = module.build.shape(BATCH, length, config=module.config)
    assert count_flops(partial(module, *draw(length))) == nystrom_flops(shape)


def test_refusals():
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_landmarks": 0}, "num_landmarks: expected at least 1"),
        ({"pinv_iterations": 0}, "pinv_iterations: expected at least 1"),
        ({"conv_len": 4}, "conv_len: expected an odd number"),
    )
    for options, words in wrong:
        with pytest.raises(ConfigError, match=words):
            make(**options)
    with pytest.raises(UnsupportedError, match="mean of a segment"):
        make(build={"is_causal": True})
    with pytest.raises(UnsupportedError, match="over the same segments"):
        make(build={"is_cross": True})


def test_mixer_trains_in_bfloat16():
    mixer = build_mixer("nystrom", BuildContext(embed_dim=8, num_heads=2, max_seq_len=80), num_landmarks=8)
    output = mixer.bfloat16()(torch.randn(1, 80, 8).bfloat16())
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
