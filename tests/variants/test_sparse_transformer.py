"""Sparse Transformer: the definition of both patterns, two steps between any two tokens, its cost, what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.masks import alibi_slopes
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.conformance import measure_complexity
from attn_zoo.registry import variants
from attn_zoo.variants.sparse_transformer import (
    FactorisedLayout,
    SparseTransformerConfig,
    sparse_transformer_flops,
    sparse_transformer_mask,
)

BATCH, HEADS, DIM = 2, 3, 8


def make(is_causal: bool = False, *, build: dict[str, Any] | None = None, **options: Any) -> AbstractAttention:
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 1024, **(build or {})}
    context = BuildContext(is_causal=is_causal, **sizes)
    return build_attention("sparse_transformer", context, **{"block_size": 4, **options}).double().eval()


def draw(length: int, num_kv_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(BATCH, heads, length, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, num_kv_heads, num_kv_heads)
    )
    return query, key, value


def padding_for(length: int) -> Tensor:
    """Entry 0 ends in padding, entry 1 is all padding."""
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, length // 2 :] = True
    mask[1] = True
    return mask


def is_seen(head: int, i: int, j: int, length: int, *, size: int, stride: int, pattern: str) -> bool:
    """Write the paper's two sets out for one pair of tokens, in blocks."""
    own, other, last = i // size, j // size, (length - 1) // size
    if pattern == "strided":
        return abs(own - other) < stride or (own - other) % stride == 0
    first = other // stride * stride
    return own // stride == other // stride or other == min(first + stride - 1 - head % stride, last)


def by_the_definition(module: AbstractAttention, inputs: tuple[Tensor, ...], padding: Tensor | None) -> Tensor:
    query, key, value = inputs
    build, config, length, output = module.build, module.config, query.shape[2], torch.zeros_like(query)
    size = config.block_size
    stride = config.stride_blocks or max(1, round(math.sqrt(math.ceil(length / size))))
    groups = HEADS // key.shape[1]
    for entry in range(BATCH):
        for head in range(HEADS):
            for i in range(length):
                seen = [
                    j
                    for j in range(i + 1 if build.is_causal else length)
                    if is_seen(head, i, j, length, size=size, stride=stride, pattern=config.pattern)
                    and (padding is None or not bool(padding[entry, j]))
                ]
                if not seen:
                    continue
                scores = key[entry, head // groups, seen] @ query[entry, head, i] / math.sqrt(DIM)
                if build.position == "alibi":
                    distance = torch.tensor([abs(i - j) for j in seen])
                    scores = scores - alibi_slopes(HEADS)[head].double() * distance
                output[entry, head, i] = scores.softmax(0) @ value[entry, head // groups, seen]
    return output


@pytest.mark.parametrize("length", [1, 4, 30, 67])
@pytest.mark.parametrize("options", [{}, {"stride_blocks": 2}, {"pattern": "strided"}], ids=["fixed", "two", "strided"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_both_paths_are_the_definition(length: int, options: dict[str, Any], is_causal: bool, has_padding: bool):
    module, inputs = make(is_causal, **options), draw(length)
    padding = padding_for(length) if has_padding else None
    expected = by_the_definition(module, inputs, padding)
    for run in (module, module.reference):
        torch.testing.assert_close(run(*inputs, key_padding_mask=padding), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
def test_alibi_and_grouped_heads_are_the_definition(is_causal: bool):
    module = make(is_causal, build={"position": "alibi", "num_kv_heads": 1})
    inputs = draw(50, num_kv_heads=1)
    expected = by_the_definition(module, inputs, None)
    for run in (module, module.reference):
        torch.testing.assert_close(run(*inputs), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", [33, 300])
@pytest.mark.parametrize("pattern", ["fixed", "strided"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_fast_gradients_are_those_of_the_reference(length: int, pattern: str, is_causal: bool, has_padding: bool):
    module = make(is_causal, pattern=pattern)
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


@pytest.mark.parametrize("pattern", ["fixed", "strided"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_stretch_that_holds_everything_is_full_attention(pattern: str, is_causal: bool):
    inputs = draw(70)
    expected = softmax_attention(*inputs, is_causal=is_causal)
    whole, part = (make(is_causal, pattern=pattern, stride_blocks=count)(*inputs) for count in (18, 4))
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-13)
    assert (part - expected).abs().max() > 1e-3


@pytest.mark.parametrize("length", [1, 20, 64, 131])
@pytest.mark.parametrize("stride", [1, 2, 5, 40])
@pytest.mark.parametrize("pattern", ["fixed", "strided"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_two_steps_join_any_two_tokens(length: int, stride: int, pattern: str, is_causal: bool):
    """The sentence that the paper's factorisation is made for (section 4.2)."""
    config = SparseTransformerConfig(block_size=4, pattern=pattern, stride_blocks=stride)  # type: ignore[arg-type]
    mask = sparse_transformer_mask(config.layout(length, is_causal=is_causal, num_heads=1))[0].int()
    joined = mask @ mask > 0
    wanted = torch.ones(length, length, dtype=torch.bool)
    assert torch.equal(joined, wanted.tril() if is_causal else wanted)


@pytest.mark.parametrize("length", [0, 1, 8, 33, 131])
@pytest.mark.parametrize("stride", [1, 3, 20])
@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [1, 8])
def test_the_table_its_count_and_the_mask_agree(
    length: int, stride: int, is_fixed: bool, is_causal: bool, block_size: int
):
    num_heads = 3 if is_fixed else 1
    layout = FactorisedLayout(
        query_len=length,
        block_size=block_size,
        stride=stride,
        is_fixed=is_fixed,
        num_heads=num_heads,
        is_causal=is_causal,
    )
    mask = sparse_transformer_mask(layout)
    assert torch.equal(layout.make("cpu").to_dense()[0], mask)
    assert layout.mean_pairs == pytest.approx(int(mask.sum()) / num_heads)


def test_heads_have_summaries_of_their_own():
    config = SparseTransformerConfig(block_size=4, stride_blocks=2)
    masks = sparse_transformer_mask(config.layout(64, num_heads=3))
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2]), "a stretch has two blocks"
    strided = SparseTransformerConfig(block_size=4, stride_blocks=2, pattern="strided")
    assert len(sparse_transformer_mask(strided.layout(64, num_heads=3))) == 1


@pytest.mark.parametrize("length", [4096, 2**20])
def test_a_query_sees_about_twice_the_root_of_the_length(length: int):
    """Near and far alike: sqrt(L C) keys each."""
    seen = SparseTransformerConfig().layout(length, num_heads=2).mean_pairs / length
    assert seen == pytest.approx(2 * math.sqrt(length * 64), rel=0.1)


def test_flops_count_the_visible_pairs():
    build = BuildContext(embed_dim=16, num_heads=2, max_seq_len=64)
    config = SparseTransformerConfig(block_size=4)
    pairs = int(sparse_transformer_mask(config.layout(50, num_heads=2)).sum())
    assert sparse_transformer_flops(build.shape(3, 50, config=config)) == 4 * 3 * 8 * pairs


@pytest.mark.parametrize("options", [{}, {"pattern": "strided"}, {"stride_blocks": 4}])
def test_the_claims_are_what_is_measured(options: dict[str, Any]):
    config = SparseTransformerConfig(block_size=4, **options)
    assert variants["sparse_transformer"].complexity_of(config).time_exponent == (
        2 if "stride_blocks" in options else 1.5
    )
    found = measure_complexity("sparse_transformer", {"block_size": 4, **options})
    assert not any(row.max_path.is_contradicted for row in found)


def test_refusals():
    with pytest.raises(UnsupportedError, match="stretches are places in one sequence"):
        make(build={"is_cross": True})
    with pytest.raises(UnsupportedError, match="no attention dropout"):
        make(build={"dropout_p": 0.1}, backend="flex")
    with pytest.raises(UnsupportedError, match="stretches grow with the sequence"):
        make(True).init_state(1)
    with pytest.raises(ConfigError, match=r"stride_blocks: expected at least 1, or 0 for sqrt\(L / C\); got -1"):
        make(stride_blocks=-1)
    with pytest.raises(ConfigError, match="block_size: expected at least 1; got 0"):
        make(block_size=0)


def test_mixer_trains_with_dropout():
    context = BuildContext(embed_dim=16, num_heads=2, max_seq_len=100, dropout_p=0.2)
    mixer = build_mixer("sparse_transformer", context, block_size=8)
    hidden = torch.randn(2, 100, 16)
    torch.manual_seed(0)
    first = mixer(hidden)
    first.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
    assert not torch.equal(mixer(hidden), first)
