"""Sinkhorn attention: sorting and attention token by token by the definition, balancing, masks, gradients, cost."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.measure.flop_count import count_operations
from attn_zoo.registry import variants
from attn_zoo.variants.sinkhorn import SinkhornAttention, SinkhornConfig, SortedLayout, balance, sinkhorn_flops

BATCH, HEADS, DIM, SIZE = 2, 2, 3, 4

LENGTHS = [*((length, False) for length in (1, 4, 7, 8, 13, 30)), (8, True), (13, True), (30, True)]


def make(*, build: dict[str, Any] | None = None, **options: Any) -> SinkhornAttention:
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 64, **(build or {})}
    torch.manual_seed(0)
    module = build_attention("sinkhorn", BuildContext(**sizes), **({"block_size": SIZE} | options)).double().eval()
    assert isinstance(module, SinkhornAttention)
    return module


def draw(length: int, num_kv_heads: int = HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    heads = (HEADS, num_kv_heads, num_kv_heads)
    return [torch.randn(BATCH, count, length, DIM, generator=generator, dtype=torch.float64) for count in heads]


def part(inputs: list[Tensor], start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (x[:, :, start:stop] for x in inputs)
    return query, key, value


def padding_for(length: int) -> Tensor:
    """Hide whole blocks, of one sequence at its start, of the other in the middle, and parts of others."""
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, : SIZE + 1] = True
    mask[1, SIZE : 2 * SIZE] = True
    mask[1, length - 1] = True
    mask[0, length - 1] = False
    return mask


def sorting_of(module: SinkhornAttention, keys: Tensor, is_hidden: list[bool], group: int) -> list[list[Any]]:
    """Write S out for the keys `[L, D]` of one head of one sequence; block n gets S[n][m] of block m."""
    config, length = module.config, len(keys)
    count = -(-length // config.block_size)
    tokens = [[j for j in range(length) if j // config.block_size == n and not is_hidden[j]] for n in range(count)]
    zero = torch.zeros(DIM, dtype=torch.float64)

    def power(n: int, m: int) -> Tensor:
        summed = tokens[n]
        if module.build.is_causal:
            first = n * config.block_size
            summed = [j for j in range(first + 1) if not is_hidden[j]]
        total = sum((keys[j] for j in summed), zero)
        return torch.exp(module.places[group, m] @ total / config.temperature)

    real = [n for n in range(count) if tokens[n]]
    if module.build.is_causal:
        found: list[list[Any]] = [[0.0] * count for _ in range(count)]
        for n in range(count):
            powers = {m: power(n, m) for m in real if m < n}
            for m, one in powers.items():
                found[n][m] = one / sum(powers.values())
        return found
    found = [[power(n, m) if n in real and m in real else 0.0 for m in range(count)] for n in range(count)]
    for n in range(count):
        if n not in real:
            found[n][n] = 1.0
    for _ in range(config.num_iterations):
        found = [[x / sum(row) for x in row] for row in found]
        sums = [sum(row[m] for row in found) for m in range(count)]
        found = [[x / total for x, total in zip(row, sums, strict=True)] for row in found]
    return found


def by_the_definition(module: SinkhornAttention, inputs: list[Tensor], padding: Tensor | None) -> Tensor:
    """Write both blocks of each query out, key by key; what no block has a token for cannot be seen."""
    query, key, value = inputs
    output, length, size = torch.zeros_like(query), query.shape[2], module.config.block_size
    count, is_causal = -(-length // size), module.build.is_causal
    for entry in range(BATCH):
        is_hidden = [False] * length if padding is None else padding[entry].tolist()
        for head in range(HEADS):
            group = head // (HEADS // key.shape[1])
            q, k, v = query[entry, head], key[entry, group], value[entry, group]
            shares = sorting_of(module, k, is_hidden, group)
            for i in range(length):
                n, seen = i // size, []
                for j in range(n * size, min((n + 1) * size, length)):
                    if not is_hidden[j] and (not is_causal or j <= i):
                        seen.append((k[j], v[j]))
                for place in range(size):
                    sources = range(n) if is_causal else range(count)
                    at = [m * size + place for m in sources]
                    there = [j for j in at if j < length and not is_hidden[j]]
                    if there and count > 1:
                        mixed = [sum(shares[n][j // size] * x[j] for j in there) for x in (k, v)]
                        seen.append((torch.as_tensor(mixed[0]), torch.as_tensor(mixed[1])))
                powers = [math.exp(float(q[i] @ one) / DIM**0.5) for one, _ in seen]
                for power, (_, one) in zip(powers, seen, strict=True):
                    output[entry, head, i] += power / sum(powers) * one
    return output


@pytest.mark.parametrize(("length", "has_padding"), LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
def test_both_paths_are_the_definition(length: int, has_padding: bool, is_causal: bool, num_kv_heads: int):
    module = make(build={"num_kv_heads": num_kv_heads, "is_causal": is_causal}, num_iterations=3)
    inputs, padding = draw(length, num_kv_heads), padding_for(length) if has_padding else None
    with torch.no_grad():
        expected = by_the_definition(module, inputs, padding)
        kept = torch.ones(BATCH, length, dtype=torch.bool) if padding is None else ~padding
        for run in (module, module.reference):
            actual = run(*inputs, key_padding_mask=padding).transpose(1, 2)[kept]
            torch.testing.assert_close(actual, expected.transpose(1, 2)[kept], rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_both_paths_agree_with_those_of_finite_differences(is_causal: bool):
    module, padding = make(build={"is_causal": is_causal}), padding_for(13)
    upstream = torch.randn(BATCH, HEADS, 13, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upstream = upstream.masked_fill(padding[:, None, :, None], 0.0)
    results = []
    for run in (module, module.reference):
        leaves = [x.requires_grad_() for x in draw(13)]
        results.append(torch.autograd.grad(run(*leaves, key_padding_mask=padding), [*leaves, module.places], upstream))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    short = [x[:1].clone().requires_grad_() for x in draw(7)]

    def run_short(query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
        del places
        return module(query, key, value)

    assert torch.autograd.gradcheck(run_short, (*short, module.places))


@pytest.mark.parametrize("iterations", [1, 5, 200])
def test_balancing_ends_with_rows_and_columns_that_sum_to_one(iterations: int):
    scores = torch.randn(3, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    found = balance(scores, iterations)
    torch.testing.assert_close(found.sum(-2), torch.ones(3, 9, dtype=torch.float64))
    off = (found.sum(-1) - 1).abs().max()
    assert (off < 1e-8) == (iterations == 200)
    # What is the same in a row or in a column does not matter in the end.
    shifted = balance(scores + scores[:, :1] + scores[:, :, :1], 2000)
    torch.testing.assert_close(shifted, balance(scores, 2000), rtol=0, atol=1e-9)


def test_below_the_diagonal_rows_and_columns_that_sum_to_one_are_the_shift_by_one():
    """Why the causal form normalises rows alone."""
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    past = scores.masked_fill(torch.ones(6, 6).triu() > 0, float("-inf"))[1:, :-1]
    torch.testing.assert_close(balance(past, 20000), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-3)


@torch.no_grad()
def test_a_low_temperature_sorts_whole_blocks():
    module, (query, key, value) = make(temperature=0.005, num_iterations=4000), draw(20)
    found = module._sorting(key.unflatten(2, (-1, SIZE)), None)
    assert (found.max(-1).values > 0.99).all()
    chosen = found.argmax(-1)
    assert torch.equal(chosen.sort(-1).values, torch.arange(5).expand(BATCH, HEADS, -1))
    for n in range(5):  # each block beside the one that was brought to it
        own = list(range(n * SIZE, (n + 1) * SIZE))
        at = (chosen[0, 0, n] * SIZE + torch.arange(SIZE)).tolist() + own
        expected = softmax_attention(query[:1, :1, own], key[:1, :1, at], value[:1, :1, at])
        torch.testing.assert_close(module(query, key, value)[:1, :1, own], expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_block_is_softmax_attention(is_causal: bool):
    inputs = draw(13)
    expected = softmax_attention(*inputs, is_causal=is_causal)
    for size, is_equal in ((13, True), (64, True), (5, False)):
        module = make(build={"is_causal": is_causal}, block_size=size)
        assert torch.allclose(module(*inputs), expected, rtol=0, atol=1e-12) == is_equal


def test_later_tokens_change_neither_outputs_nor_gradients_before_them():
    module, inputs = make(build={"is_causal": True}), draw(19)
    for cut in (5, 8, 10):  # inside a block, and at the start of one
        results = []
        for end in (0.0, 3.0):
            leaves = [torch.cat([x[:, :, :cut], x[:, :, cut:] + end], dim=2).requires_grad_() for x in inputs]
            output = module(*leaves)[:, :, :cut]
            gradients = torch.autograd.grad(output.square().sum(), [*leaves, module.places])
            results.append((output, *(x[:, :, :cut] for x in gradients[:3]), gradients[3]))
            assert all(torch.equal(x[:, :, cut:], torch.zeros_like(x[:, :, cut:])) for x in gradients[:3])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_the_sorted_block_acts_and_is_learned():
    """A token of another block reaches a query, by the sorted block alone; its share depends on what was learned."""
    for is_causal in (False, True):
        module, (query, key, value) = make(build={"is_causal": is_causal}), draw(16)
        value.requires_grad_()
        (near,) = torch.autograd.grad(module(query, key, value)[:, :, 13].sum(), value)
        assert (near[:, :, 1].abs() > 1e-6).all()
        with torch.no_grad():
            module.places.add_(torch.randn_like(module.places))
        (moved,) = torch.autograd.grad(module(query, key, value)[:, :, 13].sum(), value)
        assert ((near - moved)[:, :, 1].abs() > 1e-6).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [7, 8, 63])
def test_padding_may_hold_anything_and_be_of_any_length(is_causal: bool, length: int):
    module, inputs = make(build={"is_causal": is_causal, "max_seq_len": 100}), draw(length)
    for extra in (1, 4, 37):
        rest = torch.full((BATCH, HEADS, extra, DIM), float("nan"), dtype=torch.float64)
        behind = (torch.ones_like(rest), rest, rest)
        leaves = [torch.cat(pair, dim=2).requires_grad_() for pair in zip(inputs, behind, strict=True)]
        mask = torch.zeros(BATCH, length + extra, dtype=torch.bool)
        mask[:, length:] = True
        padded = module(*leaves, key_padding_mask=mask)[:, :, :length]
        torch.testing.assert_close(padded, module(*inputs), rtol=0, atol=1e-12)
        gradients = torch.autograd.grad(padded.square().sum(), [*leaves, module.places])
        assert all(x.isfinite().all() for x in gradients)
        assert all(torch.equal(x[:, :, length:], torch.zeros_like(x[:, :, length:])) for x in gradients[:3])


def test_a_sequence_of_padding_only_is_zero_and_harms_no_other():
    for is_causal in (False, True):
        module, inputs = make(build={"is_causal": is_causal}), draw(10)
        padding = torch.zeros(BATCH, 10, dtype=torch.bool)
        padding[1] = True
        for run in (module, module.reference):
            output = run(*inputs, key_padding_mask=padding)
            assert torch.equal(output[1], torch.zeros_like(output[1]))
            torch.testing.assert_close(output[:1], module(*(x[:1] for x in inputs)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
@pytest.mark.parametrize("cuts", [(1, 2, 3), (4, 8, 9), (5, 5, 13), (0, 7, 18)])
def test_a_sequence_that_is_cut_anywhere_is_the_causal_forward(num_kv_heads: int, cuts: tuple[int, int, int]):
    module = make(build={"is_causal": True, "num_kv_heads": num_kv_heads})
    inputs, outputs, state = draw(19, num_kv_heads), [], None
    first, second, third = cuts
    for run, ends in ((module.prefill, (0, first)), (module.prefill, (first, second))):
        if ends[0] < ends[1]:
            output, state = run(*part(inputs, *ends), state)
            outputs.append(output)
    if state is None:
        state = module.init_state(BATCH, dtype=torch.float64)
    for at in range(second, third):
        output, state = module.step(*part(inputs, at, at + 1), state)
        outputs.append(output)
    outputs.append(module.prefill(*part(inputs, third, 19), state)[0])
    torch.testing.assert_close(torch.cat(outputs, dim=2), module(*inputs), rtol=0, atol=1e-12)


def test_decoding_ends_at_the_last_place():
    module, inputs = make(build={"is_causal": True, "max_seq_len": 9}), draw(9)
    _, state = module.prefill(*inputs)
    with pytest.raises(ValueError, match="at most max_seq_len = 9 tokens; this makes 10"):
        module.step(*part(draw(1), 0, 1), state)
    with pytest.raises(ValueError, match="one new position"):
        module.step(*part(draw(2), 0, 2), state)
    with pytest.raises(UnsupportedError, match="is_causal=True"):
        make().init_state(1)


def test_a_token_reads_its_block_and_the_sorted_one_and_the_first_of_a_block_everything():
    """Bytes of keys and values that the next token needs, found by making each of them NaN in turn."""
    module, inputs = make(build={"is_causal": True}), draw(20)
    for length in (3, 4, 6, 8, 11, 16, 18):
        shape = module.build.shape(BATCH, 1, length, config=module.config)
        _, state = module.prefill(*part(inputs, 0, length))
        step_bytes = variants["sinkhorn"].complexity.step_bytes
        assert step_bytes is not None
        read = 0
        for held in (state.cache.keys, state.cache.values, state.sorted_key, state.sorted_value):
            for place in range(held.shape[2]):
                kept = held[:, :, place].clone()
                held[:, :, place] = float("nan")
                output, _ = module.step(*part(inputs, length, length + 1), state)
                read += BATCH * HEADS * DIM * int(output.isnan().any())
                held[:, :, place] = kept
        assert step_bytes(shape, 8) == 8 * read


@pytest.mark.parametrize("length", [5, 64, 100, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
def test_cost_is_what_runs_in_both_directions(length: int, is_causal: bool, num_kv_heads: int):
    build = {"is_causal": is_causal, "num_kv_heads": num_kv_heads, "max_seq_len": 256}
    module, variant = make(build=build, block_size=16), variants["sinkhorn"]
    shape = module.build.shape(BATCH, length, config=module.config)
    leaves = [x.requires_grad_() for x in draw(length, num_kv_heads)]
    forward = count_operations(partial(module, *leaves))
    both = count_operations(lambda: module(*leaves).sum().backward())
    assert forward is not None
    assert both is not None
    assert forward.products == sinkhorn_flops(shape)
    ratio = variant.backward_ratio(shape)
    assert ratio is not None
    assert both.products == pytest.approx((1 + ratio) * forward.products, rel=0.01)


def test_cost_has_both_terms_of_the_claim():
    """4 L 2 C D of attention for each head, and 4 L (L / C) D of sorting beside the scores of blocks."""
    build = BuildContext(embed_dim=64, num_heads=1, max_seq_len=4096)
    config = SinkhornConfig(block_size=32)
    length, count = 4096, 128
    expected = 4 * length * (2 * 32 + count) * 64 + 2 * count**2 * 64
    assert sinkhorn_flops(build.shape(1, length, config=config)) == expected


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [3, 4, 11])
def test_the_layout_is_what_it_says(is_causal: bool, length: int):
    layout = SortedLayout(query_len=length, block_size=SIZE, is_causal=is_causal)
    dense = layout.pattern("cpu").to_dense()[0, 0]
    first = layout.num_blocks * SIZE  # of the sequence's own keys
    assert dense.shape == (length, first + length)
    for i in range(length):
        start, end = i // SIZE * SIZE, (i // SIZE + 1) * SIZE
        own = range(start, i + 1 if is_causal else min(end, length))
        sees_sorted = length > SIZE and not (is_causal and i < SIZE)
        expected = [*(range(start, end) if sees_sorted else ()), *(first + j for j in own)]
        assert dense[i].nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sixteen_bits_come_near(dtype: torch.dtype, is_causal: bool):
    module, inputs = make(build={"is_causal": is_causal}), [x.to(dtype) for x in draw(30)]
    expected = module(*(x.double() for x in inputs))
    output = module.to(dtype)(*inputs)
    assert output.dtype == dtype
    assert (output.double() - expected).abs().max() < 16 * torch.finfo(dtype).eps * expected.abs().max()


def test_sorting_keeps_its_digits_under_autocast():
    module, (_, key, _) = make().float(), draw(30)
    blocks = torch.nn.functional.pad(key.float(), (0, 0, 0, 2)).unflatten(2, (-1, SIZE))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module._sorting(blocks, None)
    assert torch.equal(found, module._sorting(blocks, None))


def test_dropout_acts_in_training_alone():
    module, inputs = make(build={"dropout_p": 0.5}).train(), draw(16)
    torch.manual_seed(0)
    assert not torch.equal(module(*inputs), module(*inputs))
    assert torch.equal(module.eval()(*inputs), make()(*inputs))
    assert torch.equal(make().train()(*inputs), make()(*inputs)), "no noise without dropout"


def test_refusals():
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"block_size": 0}, "block_size: expected at least 1"),
        ({"num_iterations": 0}, "num_iterations: expected at least 1"),
        ({"temperature": 0.0}, "temperature: expected a number above 0"),
        ({"temperature": float("nan")}, "temperature: expected a number above 0"),
    )
    for options, words in wrong:
        with pytest.raises(ConfigError, match=words):
            make(**options)
    with pytest.raises(UnsupportedError, match="stands in none of another"):
        make(build={"is_cross": True})
    with pytest.raises(UnsupportedError, match="backend 'flex' has none"):
        make(build={"dropout_p": 0.1}, backend="flex")
    with pytest.raises(UnsupportedError, match="mean over blocks"):
        make(build={"position": "alibi"})


@pytest.mark.parametrize("is_causal", [False, True])
def test_mixer_trains_in_bfloat16(is_causal: bool):
    build = BuildContext(embed_dim=8, num_heads=2, max_seq_len=80, position="rotary", is_causal=is_causal)
    mixer = build_mixer("sinkhorn", build, block_size=8)
    output = mixer.bfloat16()(torch.randn(1, 77, 8).bfloat16())
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
