"""The key/value cache: holds what was put in, grows by doubling, refuses what does not fit, counts its bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_zoo.attention.decode import KVCache, state_bytes


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_it_holds_what_was_put_in(sizes):
    cache, keys, values = KVCache.empty(2, 3, 5), [], []
    for size in sizes:
        keys.append(torch.randn(2, 3, size, 5))
        values.append(torch.randn(2, 3, size, 5))
        cache = cache.append(keys[-1], values[-1])
        assert torch.equal(cache.keys, torch.cat(keys, dim=2))
        assert torch.equal(cache.values, torch.cat(values, dim=2))
        assert cache.length == sum(map(len, (key[0, 0] for key in keys)))
        assert state_bytes(cache) == 2 * cache.keys.numel() * 4


def test_it_grows_by_doubling_so_that_a_step_is_cheap_on_average():
    cache, capacities = KVCache.empty(1, 1, 1), set()
    for _ in range(100):
        cache = cache.append(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
        capacities.add(cache.key.shape[2])
    assert capacities == {1, 2, 4, 8, 16, 32, 64, 128}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3)), min_size=1, max_size=25))
def test_it_is_a_value_that_may_be_continued_in_several_ways(choices):
    caches, contents = [KVCache.empty(1, 1, 1)], [torch.zeros(1, 1, 0, 1)]
    for choice, size in choices:
        parent, new = choice % len(caches), torch.randn(1, 1, size, 1)
        caches.append(caches[parent].append(new, -new))
        contents.append(torch.cat([contents[parent], new], dim=2))
    for cache, content in zip(caches, contents, strict=True):
        assert torch.equal(cache.keys, content)
        assert torch.equal(cache.values, -content)


def test_only_a_second_continuation_copies():
    one = torch.ones(1, 1, 1, 1)
    cache = KVCache.empty(1, 1, 1)
    for _ in range(5):
        cache = cache.append(one, one)
    first, second = cache.append(one, one), cache.append(one, one)
    assert first.key is cache.key
    assert second.key is not cache.key
    assert second.append(one, one).key is second.key
    rolled_back = replace(first, length=2)
    assert torch.equal(rolled_back.append(2 * one, one).keys.flatten(), torch.tensor([1.0, 1.0, 2.0]))
    assert torch.equal(first.keys, torch.ones(1, 1, 6, 1))


def test_buffers_of_unknown_history_are_not_written_to():
    buffer = torch.zeros(1, 1, 4, 1)
    one = torch.ones(1, 1, 1, 1)
    assert KVCache(buffer, buffer.clone(), 2).append(one, one).length == 3
    assert torch.equal(buffer, torch.zeros(1, 1, 4, 1))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (torch.zeros(1, 2, 1, 4), r"key: expected \[B, G, n, D\] = \[2, 2, 1, 4\]; got \[1, 2, 1, 4\]"),
        (torch.zeros(2, 2, 1, 3), r"got \[2, 2, 1, 3\]"),
        (torch.zeros(2, 2, 1, 4, dtype=torch.float64), r"torch.float32.*got torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused_rather_than_cast(key, message):
    fitting = torch.zeros(2, 2, 1, 4)
    with pytest.raises(ValueError, match=message):
        KVCache.empty(2, 2, 4).append(key, fitting)
    with pytest.raises(ValueError, match="value: expected"):
        KVCache.empty(2, 2, 4).append(fitting, torch.zeros(2, 2, 2, 4))


def test_bytes_of_any_state_are_counted():
    @dataclass
    class State:
        total: torch.Tensor
        count: int

    four = torch.zeros(4, dtype=torch.float16)
    assert state_bytes(four) == 8
    assert state_bytes({"a": [four, (four,)], "b": State(four, 3)}) == 24
    assert state_bytes(3) == 0


def test_two_threads_may_continue_one_cache():
    new = [torch.full((1, 1, 2000, 64), float(thread)) for thread in range(2)]
    cache = KVCache.empty(1, 1, 64).append(new[0], new[0]).append(new[0][:, :, :1], new[0][:, :, :1])
    whole = replace(cache, key=torch.cat([cache.keys, *new], 2), value=torch.cat([cache.values, *new], 2))  # with room
    with ThreadPoolExecutor(2) as threads:
        for _ in range(50):
            cache = replace(whole, _free_from={cache.length: True})
            for continued, tokens in zip(threads.map(lambda x, of=cache: of.append(x, -x), new), new, strict=True):
                assert torch.equal(continued.keys[:, :, -2000:], tokens)
                assert torch.equal(continued.values[:, :, -2000:], -tokens)


def test_what_a_backward_reads_is_not_written_to():
    tokens = torch.randn(3, 1, 1, 1, 1, dtype=torch.float64)

    def decode(tokens: Tensor) -> Tensor:
        """Sum over each step what its cache holds, squared, so that a backward reads it."""
        cache, total = KVCache.empty(1, 1, 1, dtype=tokens.dtype), torch.zeros((), dtype=tokens.dtype)
        for token in tokens:
            cache = cache.append(token, token)
            total = total + (cache.keys * cache.values).sum()
            with torch.no_grad():
                cache.append(token, token)
        return total

    assert torch.autograd.gradcheck(decode, tokens.requires_grad_())


def test_a_cache_made_in_inference_mode_goes_on_outside():
    one = torch.ones(1, 1, 1, 1)
    with torch.inference_mode():
        cache = KVCache.empty(1, 1, 1)
        for _ in range(3):
            cache = cache.append(one, one)
    assert cache.append(2 * one, one).keys.flatten().tolist() == [1, 1, 1, 2]
