"""ProbSparse attention: the algorithm step by step, which queries it chooses, its draws, padding, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, UnsupportedError, build_attention
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.variants import prob_sparse
from attn_zoo.variants.prob_sparse import ProbSparseAttention, ProbSparseConfig

BATCH, HEADS, DIM = 2, 2, 4


def make(build: dict[str, Any] | None = None, **options: Any) -> ProbSparseAttention:
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 256, **(build or {})}
    module = build_attention("prob_sparse", BuildContext(**sizes), **options).double().eval()
    assert isinstance(module, ProbSparseAttention)
    return module


def draw(query_len: int, key_len: int | None = None, num_kv_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(query_len)
    key_len = query_len if key_len is None else key_len
    query, key, value = (
        torch.randn(BATCH, heads, length, DIM, generator=generator, dtype=torch.float64)
        for heads, length in ((HEADS, query_len), (num_kv_heads, key_len), (num_kv_heads, key_len))
    )
    return query, key, value


def by_the_algorithm(
    module: ProbSparseAttention, inputs: tuple[Tensor, ...], padding: Tensor | None, *, has_own_keys: bool
) -> Tensor:
    """Write it out, head by head and query by query."""
    query, key, value = inputs
    (_, _, query_len, _), key_len, group = query.shape, key.shape[2], HEADS // key.shape[1]
    num_chosen = min(query_len, max(1, module.config.factor * math.ceil(math.log(query_len))))
    sample = module.sample(query_len, key_len).tolist()
    output = torch.zeros_like(query)
    for entry in range(BATCH):
        is_key = [padding is None or not bool(padding[entry, j]) for j in range(key_len)]
        seen = [j for j in range(key_len) if is_key[j]]
        for head in range(HEADS):
            keys, values = key[entry, head // group], value[entry, head // group]
            measures = []
            for i in range(query_len):
                scores = [float(query[entry, head, i] @ keys[j]) / math.sqrt(DIM) for j in sample[i] if is_key[j]]
                is_real = bool(scores) and (not has_own_keys or is_key[i])
                measures.append(max(scores) - sum(scores) / len(scores) if is_real else -math.inf)
            for i in range(query_len):
                if not seen:
                    continue
                output[entry, head, i] = values[seen].mean(0)
            for i in sorted(range(query_len), key=lambda i: -measures[i])[:num_chosen]:
                if seen and measures[i] > -math.inf:
                    weights = (keys[seen] @ query[entry, head, i] / math.sqrt(DIM)).softmax(0)
                    output[entry, head, i] = weights @ values[seen]
    return output


@pytest.mark.parametrize(("query_len", "key_len"), [(1, 1), (2, 2), (40, 40), (5, 30), (30, 5)])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
def test_both_paths_are_the_algorithm(query_len: int, key_len: int, has_padding: bool, num_kv_heads: int) -> None:
    is_cross = query_len != key_len
    module = make({"is_cross": is_cross, "num_kv_heads": num_kv_heads}, factor=2)
    inputs, padding = draw(query_len, key_len, num_kv_heads), None
    if has_padding:
        padding = torch.zeros(BATCH, key_len, dtype=torch.bool)
        padding[0, key_len // 2 :], padding[1] = key_len > 1, True
    expected = by_the_algorithm(module, inputs, padding, has_own_keys=not is_cross)
    if padding is not None and not is_cross:  # the output of a query that is padding is of no use
        inputs = (inputs[0].masked_fill(padding[:, None, :, None], math.nan), *inputs[1:])
    for run in (module, module.reference):
        output = run(*inputs, key_padding_mask=padding)
        if padding is not None and not is_cross:
            output, expected = (x.masked_fill(padding[:, None, :, None], 0.0) for x in (output, expected))
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-13)


def test_a_query_that_stands_out_attends_if_a_key_that_it_likes_was_drawn_and_the_others_get_the_mean() -> None:
    module, length = make(factor=3), 64
    _, key, value = draw(length)
    key, liked = torch.ones_like(key), range(0, length, 16)
    key[:, :, liked] = -1.0
    mean = value.mean(2, keepdim=True).expand_as(value)
    could_tell = [bool(set(drawn) & set(liked)) for drawn in module.sample(length, length).tolist()]
    positions = [could_tell.index(True), length - 1 - could_tell[::-1].index(True), could_tell.index(False)]
    for position in positions:
        query = 1e-3 * torch.ones_like(key)
        query[:, :, position] = -3.0
        output, routing = module(query, key, value), module.route(query, key)
        assert ((routing == position).any(-1) == could_tell[position]).all()
        exact = softmax_attention(query, key, value)
        expected = exact if could_tell[position] else mean
        torch.testing.assert_close(output[:, :, position], expected[:, :, position], rtol=0, atol=1e-13)
        is_other = torch.ones(BATCH, HEADS, length, dtype=torch.bool).scatter(2, routing, value=False)
        torch.testing.assert_close(output[is_other], mean[is_other], rtol=0, atol=1e-13)
        assert int(is_other.sum()) == BATCH * HEADS * (length - 15)  # u = 3 ceil(ln 64)


def test_draws_follow_from_seed_and_layer_are_even_and_survive_a_narrow_type() -> None:
    module = make()
    sample = module.sample(200, 100)
    assert sample.shape == (200, 25)
    assert int(sample.min()) >= 0
    assert int(sample.max()) == 99
    counts = torch.bincount(sample.flatten(), minlength=100)
    assert float(((counts - 50) ** 2 / 50).sum()) < 180  # chi-square of 99 degrees: beyond in one of 10^6
    assert torch.equal(sample, make().bfloat16().sample(200, 100))
    for other in ({"seed": 1}, {"layer_index": 1, "num_layers": 2}):
        assert not torch.equal(sample, make(other).sample(200, 100))


def test_memory_is_bounded_by_reading_the_sample_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (query, key, _) = make(), draw(70)
    padding = torch.zeros(BATCH, 70, dtype=torch.bool)
    padding[1, 30:] = True
    whole = [module.route(query, key, key_padding_mask=mask).sort().values for mask in (None, padding)]
    monkeypatch.setattr(prob_sparse, "_MOST_NUMBERS", 7 * query.numel())  # of 25: parts of 7, 7, 7 and 4
    parts = [module.route(query, key, key_padding_mask=mask).sort().values for mask in (None, padding)]
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


def test_keys_learn_from_chosen_queries_and_values_from_all() -> None:
    module, (query, key, value) = make(factor=1), draw(20)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    chosen = module.route(query, key)
    from_query, _, from_value = torch.autograd.grad(module(*leaves).sum(), leaves)
    learns = from_query.abs().sum(-1) > 0
    assert torch.equal(learns, torch.zeros_like(learns).scatter(2, chosen, value=True))
    assert (from_value.abs().sum(-1) > 0).all()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="factor: expected at least 1; got 0"):
        ProbSparseConfig(factor=0)
    with pytest.raises(UnsupportedError, match="no causal form: which queries are chosen depends on all of them"):
        make({"is_causal": True})
    with pytest.raises(UnsupportedError, match="no attention dropout"):
        make({"dropout_p": 0.1})
