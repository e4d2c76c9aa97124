"""The key/value cache: holds what was put in, grows by doubling, refuses what does not fit, counts its bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from attn_zoo import BuildContext, build_mixer, list_variants
from attn_zoo.attention import AbstractMixer
from attn_zoo.attention.decode import KVCache, state_bytes
from attn_zoo.registry import variants

DECODING = [name for name in list_variants(causal=True) if variants[name].capabilities.decode != "none"]


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


def test_a_backward_that_reads_keys_which_need_none_goes_on_after_more_were_put_in():
    tokens, queries = torch.randn(6, 1, 1, 1, 3), torch.randn(6, 1, 1, 1, 3, requires_grad=True)
    cache, total = KVCache.empty(1, 1, 3), torch.zeros(())
    buffers = set()
    for token, query in zip(tokens, queries, strict=True):
        cache = cache.append(token, token)
        total = total + (query @ cache.keys.mT).sum()
        buffers.add(cache.key.data_ptr())
    with torch.no_grad():
        cache.append(tokens[0], tokens[0])
    (grad,) = torch.autograd.grad(total, queries)
    torch.testing.assert_close(grad, tokens.cumsum(0))
    assert len(buffers) == 4  # of capacity 1, 2, 4 and 8: nothing was copied for the sake of the backward


def test_tangents_and_transforms_reach_what_is_kept():
    tokens, tangents = torch.randn(2, 6, 1, 1, 1, 3, dtype=torch.float64)

    def decode(tokens: Tensor) -> Tensor:
        cache, total = KVCache.empty(1, 1, 3, dtype=tokens.dtype), torch.zeros((), dtype=tokens.dtype)
        for token in tokens:
            cache = cache.append(token, token)
            total = total + (cache.keys * cache.values).sum()
        return total

    expected = (torch.func.grad(decode)(tokens) * tangents).sum()
    torch.testing.assert_close(torch.func.jvp(decode, (tokens,), (tangents,))[1], expected)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(decode(forward_ad.make_dual(tokens, tangents))).tangent
    torch.testing.assert_close(found, expected)
    both = torch.stack([tokens, tangents])
    torch.testing.assert_close(torch.vmap(decode)(both), torch.stack([decode(each) for each in both]))


def _decode(mixer: AbstractMixer, hidden: Tensor, num_at_once: int) -> Tensor:
    """Read some positions at once and the others one by one, from a state without a dtype where there are none."""
    outputs = []
    if num_at_once:
        output, state = mixer.prefill(hidden[:, :num_at_once])
        outputs.append(output)
    else:
        state = mixer.init_state(len(hidden))
    for at in range(num_at_once, hidden.shape[1]):
        output, state = mixer.step(hidden[:, at : at + 1], state)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _mixer(name: str) -> AbstractMixer:
    torch.manual_seed(0)
    options = next(iter(variants[name].config.check_options()), {})
    return build_mixer(name, BuildContext(embed_dim=16, num_heads=2, max_seq_len=64, is_causal=True), **options).eval()


@pytest.mark.parametrize("part", ["query_proj", "mechanism"])
@pytest.mark.parametrize("num_at_once", [0, 13])
@pytest.mark.parametrize("name", DECODING)
def test_decoding_has_the_gradient_of_the_forward_where_keys_and_values_need_none(name, num_at_once, part):
    mixer = _mixer(name).double()
    given = [each for path, each in mixer.named_parameters() if path.startswith(("key_proj.", "value_proj."))]
    if part == "query_proj":
        given = [each for path, each in mixer.named_parameters() if not path.startswith("query_proj.")]
    for each in given:
        each.requires_grad_(False)
    wanted = [each for each in mixer.parameters() if each.requires_grad]
    if not wanted:
        pytest.skip("it projects no queries")
    hidden, weight = torch.randn(2, 2, 40, 16, dtype=torch.float64)
    grads = [
        torch.autograd.grad((output * weight).sum(), wanted, allow_unused=True)
        for output in (mixer(hidden), _decode(mixer, hidden, num_at_once))
    ]
    for expected, found in zip(*grads, strict=True):
        if expected is not None or found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_at_once", [0, 1, 13])
@pytest.mark.parametrize("name", DECODING)
def test_under_autocast_a_state_needs_no_dtype(name, num_at_once):
    mixer, hidden = _mixer(name), torch.randn(2, 40, 16)
    with torch.no_grad():
        exact = mixer(hidden)
        with torch.autocast("cpu", torch.bfloat16):
            whole, found = mixer(hidden), _decode(mixer, hidden, num_at_once)
    torch.testing.assert_close(found.float(), whole.float(), rtol=2**-6, atol=2**-6 * float(exact.abs().max()))


@pytest.mark.parametrize("name", [name for name in DECODING if variants[name].capabilities.decode == "kv_cache"])
def test_under_autocast_keys_and_values_are_kept_in_its_type(name):
    mixer, hidden = _mixer(name), torch.randn(2, 40, 16)
    with torch.no_grad():
        _, state = mixer.prefill(hidden)
        with torch.autocast("cpu", torch.bfloat16):
            _, small = mixer.prefill(hidden)
            _, same = mixer.double().prefill(hidden.double())
    assert state_bytes(small) < 0.7 * state_bytes(state)  # means of blocks stay in float32
    assert state_bytes(same) == 2 * state_bytes(state)
