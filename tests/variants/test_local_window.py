"""Local attention: the definition, the bounded cache, its cost, what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.decode import state_bytes
from attn_zoo.attention.masks import alibi_slopes
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.conformance import measure_complexity
from attn_zoo.registry import variants
from attn_zoo.variants.local_window import LocalWindowConfig, local_window_flops, local_window_state_bytes

BATCH, HEADS, DIM = 2, 2, 8


def make(is_causal: bool = False, *, build: dict[str, Any] | None = None, **options: Any) -> AbstractAttention:
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 1024, **(build or {})}
    return build_attention("local_window", BuildContext(is_causal=is_causal, **sizes), **options).double().eval()


def draw(length: int, num_kv_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(BATCH, heads, length, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, num_kv_heads, num_kv_heads)
    )
    return query, key, value


def padding_for(length: int) -> Tensor:
    """Entry 0 ends in padding longer than a window, so that some queries see nothing; entry 1 is all padding."""
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, length // 2 :] = True
    mask[1] = True
    return mask


def by_the_definition(module: AbstractAttention, inputs: tuple[Tensor, ...], padding: Tensor | None) -> Tensor:
    query, key, value = inputs
    build, reach, output = module.build, module.config.window_size, torch.zeros_like(query)
    groups = HEADS // key.shape[1]
    for entry in range(BATCH):
        for head in range(HEADS):
            for i in range(query.shape[2]):
                last = i if build.is_causal else min(i + reach, query.shape[2] - 1)
                seen = [j for j in range(max(0, i - reach), last + 1) if padding is None or not bool(padding[entry, j])]
                if not seen:
                    continue
                keys = key[entry, head // groups, seen]
                scores = keys @ query[entry, head, i] / math.sqrt(DIM)
                if build.position == "alibi":
                    distance = torch.tensor([abs(i - j) for j in seen])
                    scores = scores - alibi_slopes(HEADS)[head].double() * distance
                output[entry, head, i] = scores.softmax(0) @ value[entry, head // groups, seen]
    return output


@pytest.mark.parametrize("length", [1, 2, 17, 64, 90])
@pytest.mark.parametrize("reach", [0, 1, 5, 16, 40, 100])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_both_paths_are_the_definition(length: int, reach: int, is_causal: bool, has_padding: bool):
    module, inputs = make(is_causal, window_size=reach), draw(length)
    padding = padding_for(length) if has_padding else None
    expected = by_the_definition(module, inputs, padding)
    for run in (module, module.reference):
        torch.testing.assert_close(run(*inputs, key_padding_mask=padding), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_length_that_is_padded_to_does_not_matter(is_causal: bool):
    module, inputs = make(is_causal, window_size=5), draw(40)
    padding = (torch.arange(40) >= 21).expand(BATCH, -1)
    expected = module(*(x[:, :, :21] for x in inputs))
    torch.testing.assert_close(module(*inputs, key_padding_mask=padding)[:, :, :21], expected, rtol=0, atol=1e-13)
    assert variants["local_window"].capabilities.is_padding_invariant


@pytest.mark.parametrize("is_causal", [False, True])
def test_alibi_and_grouped_heads_are_the_definition(is_causal: bool):
    module = make(is_causal, build={"position": "alibi", "num_kv_heads": 1}, window_size=7)
    inputs = draw(50, num_kv_heads=1)
    expected = by_the_definition(module, inputs, None)
    for run in (module, module.reference):
        torch.testing.assert_close(run(*inputs), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", [1, 33, 200])
@pytest.mark.parametrize("reach", [3, 32, 250])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_fast_gradients_are_those_of_the_reference(length: int, reach: int, is_causal: bool, has_padding: bool):
    module = make(is_causal, window_size=reach)
    padding = padding_for(length) if has_padding else None
    weights = torch.randn(BATCH, HEADS, length, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for run in (module, module.reference):
        leaves = [x.requires_grad_() for x in draw(length)]
        output = run(*leaves, key_padding_mask=padding)
        results.append(torch.autograd.grad(output, leaves, weights))
    for fast, slow in zip(*results, strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_over_everything_is_full_attention(is_causal: bool):
    inputs = draw(70)
    expected = softmax_attention(*inputs, is_causal=is_causal)
    torch.testing.assert_close(make(is_causal, window_size=69)(*inputs), expected, rtol=0, atol=1e-13)
    assert (make(is_causal, window_size=40)(*inputs) - expected).abs().max() > 1e-3


def test_the_cache_holds_the_window_and_no_more():
    module = make(True, build={"position": "alibi"}, window_size=4)
    inputs, state = draw(12), module.init_state(BATCH, dtype=torch.float64)
    expected = module(*inputs)
    for i in range(12):
        query, key, value = (x[:, :, i : i + 1] for x in inputs)
        row, state = module.step(query, key, value, state)
        torch.testing.assert_close(row[:, :, 0], expected[:, :, i], rtol=0, atol=1e-13)
        shape = module.build.shape(BATCH, 1, i + 1, module.config)
        assert state_bytes(state) == local_window_state_bytes(shape, 8) == 2 * BATCH * HEADS * DIM * 8 * min(i + 1, 5)
    with pytest.raises(ValueError, match="one new position"):
        module.step(inputs[0], key, value, state)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "reach"), [(1, 3), (20, 0), (20, 3), (20, 19), (20, 50)])
def test_flops_count_the_visible_pairs(length: int, reach: int, is_causal: bool):
    build = BuildContext(embed_dim=16, num_heads=2, max_seq_len=64, is_causal=is_causal)
    pairs = sum(1 for i in range(length) for j in range(length) if abs(i - j) <= reach and (j <= i or not is_causal))
    config = LocalWindowConfig(window_size=reach)
    assert local_window_flops(build.shape(3, length, config=config)) == 4 * 3 * 2 * 8 * pairs


@pytest.mark.parametrize(("reach", "path"), [(0, "never"), (1, "L / W"), (5, "L / W")])
def test_the_claimed_path_is_what_is_measured(reach: int, path: str):
    assert variants["local_window"].complexity_of(LocalWindowConfig(window_size=reach)).max_path == path
    assert not any(row.max_path.is_contradicted for row in measure_complexity("local_window", {"window_size": reach}))


def test_blocks_are_smaller_than_the_window():
    sizes = {reach: LocalWindowConfig(window_size=reach).block_size for reach in (0, 5, 32, 64, 100, 128, 4096)}
    assert sizes == {0: 16, 5: 16, 32: 16, 64: 32, 100: 32, 128: 64, 4096: 64}


def test_refusals():
    with pytest.raises(UnsupportedError, match="a window is a place in one sequence") as caught:
        make(build={"is_cross": True})
    assert caught.value.capability == "cross_attention"
    query, key, value = draw(8)
    with pytest.raises(UnsupportedError, match="a window is a place"):
        make(True)(query[:, :, 4:], key, value)
    with pytest.raises(UnsupportedError, match="no attention dropout"):
        make(build={"dropout_p": 0.1}, backend="flex")
    with pytest.raises(UnsupportedError, match="CUDA"):
        make(backend="flex")(query, key, value)
    with pytest.raises(UnsupportedError, match="later tokens"):
        make().init_state(1)
    with pytest.raises(ConfigError, match="window_size: expected at least 0; got -1"):
        make(window_size=-1)


def test_mixer_trains_with_dropout():
    mixer = build_mixer("local_window", BuildContext(embed_dim=16, num_heads=2, max_seq_len=100, dropout_p=0.2))
    hidden = torch.randn(2, 100, 16)
    torch.manual_seed(0)
    first = mixer(hidden)
    first.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
    assert not torch.equal(mixer(hidden), first)


def test_a_step_in_float16_scales_before_it_multiplies():
    module = make(True).half()
    query, _, value = (100 * x[:, :, :1].sign().half() for x in draw(1))  # q . q = 100^2 D is beyond 65504
    row, _ = module.step(query, query, value, module.init_state(BATCH, dtype=torch.float16))
    assert torch.equal(row, value)


@pytest.mark.parametrize("length", [1, 20, 300])
def test_tokens_of_another_dtype_than_the_state_are_refused(length):
    attention = build_attention(
        "local_window", BuildContext(embed_dim=16, num_heads=2, max_seq_len=400, is_causal=True), window_size=5
    )
    tokens = torch.randn(1, 2, length, 8, dtype=torch.bfloat16)
    message = "key: expected dtype and device of the cache .torch.float32, cpu.; got torch.bfloat16"
    with pytest.raises(ValueError, match=message):
        attention.prefill(tokens, tokens, tokens, attention.init_state(1))
    one = tokens[:, :, :1]
    with pytest.raises(ValueError, match=message):
        attention.step(one, one, one, attention.init_state(1))
