"""cosFormer: the weights term by term, what the cosine does, the chunked causal form, its state, what it refuses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention
from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.decode import state_bytes
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_flops
from attn_zoo.variants import cosformer
from attn_zoo.variants.cosformer import CHUNK_LEN, cosformer_flops

BATCH, HEADS, DIM = 2, 2, 4
MOST = 640


def make(is_causal: bool = False, *, build: dict[str, Any] | None = None, **options: Any) -> AbstractAttention:
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": MOST, **(build or {})}
    return build_attention("cosformer", BuildContext(is_causal=is_causal, **sizes), **options).double().eval()


def draw(length: int, num_kv_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(BATCH, heads, length, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, num_kv_heads, num_kv_heads)
    )
    return query, key, value


def padding_for(key_len: int) -> Tensor:
    mask = torch.zeros(BATCH, key_len, dtype=torch.bool)
    mask[0, key_len // 2 :] = True
    mask[0, 0] = key_len > 2
    mask[1] = True
    return mask


def by_the_definition(inputs: tuple[Tensor, ...], is_causal: bool, padding: Tensor | None, most: int) -> Tensor:
    """Write the weights out, query by query, key by key, feature by feature."""
    query, key, value = inputs
    output, groups = torch.zeros_like(query), HEADS // key.shape[1]
    for entry in range(BATCH):
        for head in range(HEADS):
            for i in range(query.shape[2]):
                total, weighted = 1e-6, torch.zeros(DIM, dtype=torch.float64)
                for j in range(key.shape[2]):
                    if (is_causal and j > i) or (padding is not None and padding[entry, j]):
                        continue
                    pairs = zip(query[entry, head, i].tolist(), key[entry, head // groups, j].tolist(), strict=True)
                    cosine = math.cos(math.pi * (i - j) / (2 * most))
                    weight = sum(max(q, 0.0) * max(k, 0.0) for q, k in pairs) * cosine
                    total += weight
                    weighted += weight * value[entry, head // groups, j]
                output[entry, head, i] = weighted / total
    return output


@pytest.mark.parametrize(("length", "most"), [(1, 1), (7, 7), (5, 100)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
def test_both_paths_are_the_definition(
    length: int, most: int, is_causal: bool, has_padding: bool, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cosformer, "CHUNK_LEN", 3)
    module = make(is_causal, build={"max_seq_len": most, "num_kv_heads": num_kv_heads})
    inputs, padding = draw(length, num_kv_heads), padding_for(length) if has_padding else None
    expected = by_the_definition(inputs, is_causal, padding, most)
    for run in (module, module.reference):
        torch.testing.assert_close(run(*inputs, key_padding_mask=padding), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", [1, CHUNK_LEN - 1, CHUNK_LEN, CHUNK_LEN + 1, 3 * CHUNK_LEN])
@pytest.mark.parametrize("has_padding", [False, True])
def test_chunked_causal_form_equals_the_dense_one_with_gradients(length: int, has_padding: bool):
    module, padding = make(True), padding_for(length) if has_padding else None
    weights = torch.randn(BATCH, HEADS, length, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for run in (module, module.reference):
        leaves = [x.requires_grad_() for x in draw(length)]
        output = run(*leaves, key_padding_mask=padding)
        results.append([output, *torch.autograd.grad(output, leaves, weights)])
    for fast, slow in zip(*results, strict=True):
        scale = max(1.0, slow.abs().max().item())  # a row whose features hardly meet has steep gradients
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11 * scale)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_agree_with_finite_differences(is_causal: bool):
    leaves = tuple(x[:1, :, :5].clone().requires_grad_() for x in draw(5))
    assert torch.autograd.gradcheck(lambda *x: make(is_causal)(*x), leaves)


def test_weights_fall_with_distance_as_a_cosine():
    """Of equal tokens: without the cosine all weights would be equal."""
    length = 8
    module = make(build={"max_seq_len": length, "head_dim": length, "num_heads": 1, "embed_dim": length})
    same = torch.ones(1, 1, length, length, dtype=torch.float64)
    weights = module(same, same, torch.eye(length, dtype=torch.float64)[None, None])[0, 0]
    at = torch.arange(length, dtype=torch.float64)
    cosine = ((at[:, None] - at) * math.pi / (2 * length)).cos()
    torch.testing.assert_close(weights, cosine / cosine.sum(-1, keepdim=True), rtol=1e-6, atol=0)
    assert weights.min() > 0


def test_padding_at_the_end_of_a_batch_changes_nothing():
    """The authors' code would scale the angles by the length of the batch."""
    inputs, module = draw(40), make()
    short = module(*(x[:, :, :13] for x in inputs))
    mask = torch.arange(40).ge(13).expand(BATCH, -1)
    torch.testing.assert_close(module(*inputs, key_padding_mask=mask)[:, :, :13], short, rtol=0, atol=1e-13)


def test_places_are_exact_far_from_the_first():
    """In float32 the angles of neighbours a million tokens away would be multiples of 6e-8."""
    at = cosformer.angles(2, 2**20 - 2, 2**20, torch.device("cpu"))
    assert (at[1] - at[0]).item() == pytest.approx(math.pi / 2**21, rel=1e-8)
    assert at[1] < math.pi / 2


def test_decode_state_is_wide_does_not_grow_and_ends_at_the_longest_length():
    module, inputs = make(True, build={"num_kv_heads": 1, "max_seq_len": 9}), draw(9, num_kv_heads=1)
    state = module.init_state(BATCH, dtype=torch.float64)
    expected, sizes = module(*inputs), []
    for i in range(9):
        query, key, value = (x[:, :, i : i + 1] for x in inputs)
        row, state = module.step(query, key, value, state)
        torch.testing.assert_close(row[:, :, 0], expected[:, :, i], rtol=0, atol=1e-13)
        sizes.append(state_bytes(state))
    assert set(sizes) == {BATCH * 1 * 2 * DIM * (DIM + 1) * 8}
    assert state_bytes(module.init_state(1, dtype=torch.bfloat16)) == 2 * DIM * (DIM + 1) * 4
    for read in (module.step, module.prefill):
        with pytest.raises(ValueError, match="expected at most max_seq_len = 9 tokens; this makes 10"):
            read(query, key, value, state)
    with pytest.raises(UnsupportedError, match="later tokens"):
        make().init_state(1)


def test_dropout_drops_keys_for_all_queries_alike():
    module = make(build={"dropout_p": 0.5}).train()
    query, key, _ = (x.abs() for x in draw(6))
    identity = torch.eye(6, DIM, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)
    dropped = module(query, key, identity) == 0  # feature d shows the weight of key d
    assert dropped.any()
    assert not dropped.all()
    assert torch.equal(dropped.all(2), dropped.any(2))


def test_flops_are_those_of_the_products_that_run():
    for is_causal in (False, True):
        module = make(is_causal)
        shape = module.build.shape(BATCH, 2 * CHUNK_LEN, config=module.config)
        counted = count_flops(partial(module, *draw(2 * CHUNK_LEN)))
        assert counted == cosformer_flops(shape)  # the empty past of the causal form counts as nothing


def test_which_path_ran():
    for is_causal, name in ((False, "cosformer.sum"), (True, "cosformer.chunked")):
        with recording() as paths:
            make(is_causal)(*draw(3))
        assert paths == [name]


def test_refusals():
    with pytest.raises(UnsupportedError, match="come without theirs"):
        make(build={"is_cross": True})
    with pytest.raises(UnsupportedError, match="no exponentials of scores"):
        make(build={"position": "alibi"})
    with pytest.raises(ConfigError, match="eps: expected more than 0"):
        make(eps=0.0)
