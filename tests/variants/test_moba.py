"""MoBA: the definition, its routing and what routing may not see, the sorting of queries, cost, decoding, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.kernels.trace import recording
from attn_zoo.registry import variants
from attn_zoo.variants.moba import moba_flops, routing_mask
from tests.exactness import assert_exact

BATCH, HEADS, DIM = 2, 4, 16


def make(is_causal: bool = True, *, build: dict[str, Any] | None = None, **options: Any) -> AbstractAttention:
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 1024, **(build or {})}
    options = {"block_size": 16, "top_k": 3, **options}
    return build_attention("moba", BuildContext(is_causal=is_causal, **sizes), **options).eval()


def draw(length: int, num_kv_heads: int = HEADS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(BATCH, heads, length, DIM) for heads in (HEADS, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def padding_for(length: int) -> Tensor:
    """Entry 0 ends in padding and has a block of nothing else; every fifth key of entry 1 is padding."""
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, 3 * length // 4 :] = True
    mask[0, 16:32] = True
    mask[1, ::5] = True
    return mask


def by_the_definition(module: AbstractAttention, inputs: list[Tensor], padding: Tensor | None) -> Tensor:
    """Write the paper's equations 2 to 6 out, query by query."""
    query, key, value = inputs
    config, is_causal, length = module.config, module.build.is_causal, query.shape[2]
    output, group = torch.zeros_like(query), HEADS // key.shape[1]
    for entry in range(BATCH):
        for head in range(HEADS):
            keys, values = key[entry, head // group], value[entry, head // group]
            real = [j for j in range(length) if padding is None or not bool(padding[entry, j])]
            for i in range(length):
                own = i // config.block_size
                scores = {}
                for block in range(-(-length // config.block_size)):
                    members = [j for j in real if j // config.block_size == block]
                    if members and (block < own if is_causal else block != own):
                        scores[block] = float(query[entry, head, i] @ keys[members].mean(0))
                chosen = {own, *sorted(scores, key=lambda block: -scores[block])[: config.top_k - 1]}
                seen = [j for j in real if j // config.block_size in chosen and (j <= i or not is_causal)]
                if seen:
                    weights = (keys[seen] @ query[entry, head, i] / math.sqrt(DIM)).softmax(0)
                    output[entry, head, i] = weights @ values[seen]
    return output


@pytest.mark.parametrize("length", [1, 16, 17, 60, 96])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, HEADS])
def test_both_paths_are_the_definition(length: int, is_causal: bool, has_padding: bool, num_kv_heads: int):
    module = make(is_causal, build={"num_kv_heads": num_kv_heads})
    inputs, padding = draw(length, num_kv_heads), padding_for(length) if has_padding else None
    expected = by_the_definition(module, inputs, padding)
    for run in (module, module.reference):
        torch.testing.assert_close(run(*inputs, key_padding_mask=padding), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"block_size": 12, "top_k": 4}, {"block_size": 128, "top_k": 2}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_the_reference_under_the_same_routing(
    dtype: torch.dtype, options: dict[str, Any], is_causal: bool
):
    module, padding = make(is_causal, **options), padding_for(300)
    inputs = draw(300, dtype=dtype)
    routing = module.route(*inputs[:2], key_padding_mask=padding)
    results = []
    for kind in ("fast", "plain", "exact"):
        leaves = [(x.double() if kind == "exact" else x.clone()).requires_grad_() for x in inputs]
        query, key, value = leaves
        if kind == "fast":
            output = module(query, key, value, key_padding_mask=padding)
        else:
            output = module.reference(query, key, value, key_padding_mask=padding, routing=routing)  # type: ignore[call-arg]
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
        results.append([output, *torch.autograd.grad(output, leaves, weights)])
    for what, fast, plain, exact in zip(("output", "query", "key", "value"), *results, strict=True):
        assert fast.isfinite().all()
        assert_exact(fast, plain, exact, what)


def test_routing_is_causal():
    """No choice depends on a later key, not even on those of the query's own block."""
    module, (query, key, _) = make(), draw(96)
    before = module.route(query, key)
    for cut in (5, 16, 40, 95):
        changed = torch.cat([key[:, :, :cut], 100 * torch.randn_like(key[:, :, cut:])], dim=2)
        assert torch.equal(module.route(query, changed)[:, :, :cut], before[:, :, :cut])
    own = torch.arange(96)[:, None] // 16
    assert (before < own).all()
    assert ((before >= 0).sum(-1) == own[:, 0].clamp(max=2)).all()


def test_routing_is_chosen_by_each_query_and_head():
    routing = make().route(*draw(96)[:2])
    assert routing.shape == (BATCH, HEADS, 96, 2)
    last = routing[:, :, 80:].sort(-1).values
    assert (last[:, :, :1] != last).any()  # queries of one block differ
    assert (last[:, :1] != last).any()


def test_a_routing_that_is_given_decides():
    module, inputs = make(), draw(64)
    routing = module.route(*inputs[:2])
    other = torch.where(routing < 0, routing, torch.zeros_like(routing))
    other[..., 1] = -1
    keep = routing_mask(other, 64, module.config, is_causal=True)
    assert int(keep[0, 0, 63].sum()) == 16 + 16
    output = module.reference(*inputs, routing=other)  # type: ignore[call-arg]
    assert not torch.allclose(output[:, :, 48:], module.reference(*inputs)[:, :, 48:])


def test_enough_blocks_are_full_attention():
    for is_causal in (False, True):
        inputs = draw(100)
        expected = softmax_attention(*inputs, is_causal=is_causal)
        torch.testing.assert_close(make(is_causal, top_k=7)(*inputs), expected, rtol=0, atol=1e-13)
        assert (make(is_causal, top_k=2)(*inputs) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "top_k"), [(16, 3), (96, 1), (96, 3), (101, 3), (40, 9)])
def test_flops_count_pairs_and_scores_of_blocks(is_causal: bool, length: int, top_k: int):
    module = make(is_causal, top_k=top_k)
    keep = routing_mask(module.route(*draw(length)[:2]), length, module.config, is_causal=is_causal)
    pairs = float(keep.sum()) / (BATCH * HEADS)
    scored = length * -(-length // 16) if top_k > 1 and length > 16 else 0
    shape = module.build.shape(3, length, config=module.config)
    claimed = moba_flops(shape)
    wanted = 3 * HEADS * DIM * (4 * pairs + 2 * scored)
    # Without a direction, how often the shorter last block is chosen depends on the data.
    tolerance = 0.05 if length == 101 and not is_causal else 1e-12
    assert claimed == pytest.approx(wanted, rel=tolerance)


def test_decoding_chooses_as_the_forward_does():
    module, inputs = make(), draw(70)
    state = module.init_state(BATCH, dtype=torch.float64)
    expected = module(*inputs)
    query, key, value = (x[:, :, :37] for x in inputs)
    start, state = module.prefill(query, key, value, state)
    torch.testing.assert_close(start, expected[:, :, :37], rtol=0, atol=1e-13)
    for i in range(37, 50):
        query, key, value = (x[:, :, i : i + 1] for x in inputs)
        row, state = module.step(query, key, value, state)
        torch.testing.assert_close(row[:, :, 0], expected[:, :, i], rtol=0, atol=1e-13)
    query, key, value = (x[:, :, 50:] for x in inputs)
    rest, state = module.prefill(query, key, value, state)
    torch.testing.assert_close(rest, expected[:, :, 50:], rtol=0, atol=1e-13)


@pytest.mark.parametrize("num_tokens", [7, 16, 40, 70, 80])
def test_a_step_reads_what_is_claimed_and_no_more(num_tokens: int):
    """What it reads of the cache shows where it is not a number; the means of all whole blocks are scored."""
    module = make(build={"embed_dim": DIM, "num_heads": 1})
    inputs = [torch.randn(1, 1, num_tokens + 1, DIM, generator=torch.Generator().manual_seed(0)) for _ in range(3)]
    _, state = module.prefill(*(x[:, :, :-1] for x in inputs))
    query, key, value = (x[:, :, -1:] for x in inputs)
    num_read = state.means.numel()
    for tensor in (state.cache.key, state.cache.value):
        for row in range(num_tokens):
            kept = tensor[:, :, row].clone()
            tensor[:, :, row] = math.nan
            output, _ = module.step(query, key, value, state)
            tensor[:, :, row] = kept
            num_read += DIM * bool(output.isnan().any())
    shape = module.build.shape(1, 1, num_tokens, module.config)
    assert variants["moba"].step_bytes(shape, 4) == 4 * (num_read + 4 * DIM)


def test_one_graph_with_the_same_numbers():
    module, inputs = make(), [x.requires_grad_() for x in draw(96)]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = [
        (output, *torch.autograd.grad(output.square().sum(), inputs))
        for run in (module, compiled)
        for output in [run(*inputs)]
    ]
    torch.compiler.reset()
    for plain, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, plain, rtol=0, atol=1e-12)


def test_routing_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch):
    from attn_zoo.variants import moba

    module, inputs = make(), draw(101)
    whole = module.route(*inputs[:2])
    monkeypatch.setattr(moba, "_MOST_SCORES", 7 * 10)
    assert torch.equal(module.route(*inputs[:2]), whole)


def test_the_path_and_refusals():
    with recording() as paths:
        make()(*draw(96))
    assert paths == ["block_sparse.gather"]
    with pytest.raises(UnsupportedError, match="stands in none of another sequence"):
        make(False, build={"is_cross": True})
    with pytest.raises(UnsupportedError, match="backend 'flex' has none"):
        make(build={"dropout_p": 0.1}, backend="flex")
    with pytest.raises(UnsupportedError, match="CUDA"):
        make(backend="triton")(*draw(16))
    with pytest.raises(UnsupportedError, match="is_causal=True"):
        make(False).init_state(1)
    with pytest.raises(ConfigError, match="block_size, top_k: expected at least 1; got 0"):
        make(top_k=0)


def test_mixer_trains_with_dropout():
    build = BuildContext(embed_dim=16, num_heads=2, max_seq_len=100, dropout_p=0.2, is_causal=True)
    mixer = build_mixer("moba", build, block_size=8)
    hidden = torch.randn(2, 100, 16)
    torch.manual_seed(0)
    first = mixer(hidden)
    assert isinstance(first, Tensor)
    first.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
    assert not torch.equal(mixer(hidden), first)


def test_what_follows_changes_no_choice_among_equal_blocks():
    """Where tokens repeat, blocks have the same mean."""
    module = make(block_size=4, top_k=6)
    query, key = (torch.randn(1, HEADS, 1, DIM, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    query, key = query.expand(-1, -1, 1000, -1), key.expand(-1, -1, 1000, -1)
    whole = module.route(query, key)
    for length in (101, 500, 999):
        assert torch.equal(module.route(query[:, :, :length], key[:, :, :length]), whole[:, :, :length])


def test_tokens_after_others_are_scaled_in_float16_before_they_are_multiplied():
    module = make()
    tokens = [100 * x.sign() for x in draw(4, dtype=torch.float16)]  # q . q = 100^2 D is beyond 65504
    _, state = module.prefill(*(x[:, :, :2] for x in tokens))
    query, _, value = (x[:, :, 2:] for x in tokens)
    rows, _ = module.prefill(query, query, value, state)
    assert rows.isfinite().all()
