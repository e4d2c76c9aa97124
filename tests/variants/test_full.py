"""Full attention: against the float64 oracle in every dtype, and all it promises about masks, dropout and decoding."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer, describe
from attn_zoo.attention.decode import state_bytes
from attn_zoo.attention.masks import alibi_bias, causal_keep
from attn_zoo.attention.oracle import attention_weights, softmax_attention
from attn_zoo.kernels.trace import recording
from attn_zoo.variants.full import full_flops
from tests.exactness import assert_exact

B, H, D = 3, 4, 8
CPU_BACKENDS = ("auto", "math", "flash")
PAST = pytest.mark.parametrize("is_causal", [False, True], ids=["both_ways", "causal"])


def make(
    *, is_causal=False, num_kv_heads=H, position="none", is_cross=False, dropout_p=0.0, max_seq_len=256, **options
):
    build = BuildContext(
        embed_dim=H * D,
        num_heads=H,
        num_kv_heads=num_kv_heads,
        max_seq_len=max_seq_len,
        is_causal=is_causal,
        is_cross=is_cross,
        position=position,
        dropout_p=dropout_p,
    )
    return build_attention("full", build, **options)


def heads(query_len, key_len=None, *, num_kv_heads=H, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(num_heads, length):
        return torch.randn(B, num_heads, length, D, generator=generator).to(dtype).requires_grad_()

    key_len = query_len if key_len is None else key_len
    return draw(H, query_len), draw(num_kv_heads, key_len), draw(num_kv_heads, key_len)


def padding(key_len):
    """Pad the front of the first sequence, the end of the second, and all of the third."""
    mask = torch.zeros(B, key_len, dtype=torch.bool)
    mask[0, : key_len // 3] = True
    mask[1, key_len // 2 :] = True
    mask[2] = True
    return mask


def bias_of(attention, query_len, key_len, dtype=torch.float64):
    is_alibi = attention.build.position == "alibi"
    return alibi_bias(H, query_len, key_len, dtype=dtype) if is_alibi else None


def plain(attention, tensors, mask):
    """The oracle's equation in the dtype of the query."""
    query, key, value = tensors
    bias = bias_of(attention, query.shape[2], key.shape[2], query.dtype)
    weights = attention_weights(query, key, is_causal=attention.build.is_causal, key_padding_mask=mask, bias=bias)
    return weights @ value.repeat_interleave(H // value.shape[1], dim=1)


CASES = [
    (lengths, is_causal, num_kv_heads, has_padding, position)
    for lengths, is_causal, num_kv_heads, has_padding, position in itertools.product(
        [(1, 1), (5, 5), (37, 37), (7, 40), (40, 7)], [False, True], [H, 1], [False, True], ["none", "alibi"]
    )
    if is_causal or lengths[0] == lengths[1] or position == "none"
]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_kind_of_call_equals_the_oracle(dtype, backend):
    for (query_len, key_len), is_causal, num_kv_heads, has_padding, position in CASES:
        attention = make(
            is_causal=is_causal,
            num_kv_heads=num_kv_heads,
            position=position,
            is_cross=query_len != key_len and not is_causal,
            backend=backend,
        )
        tensors = heads(query_len, key_len, num_kv_heads=num_kv_heads, dtype=dtype)
        mask = padding(key_len) if has_padding else None
        exact = softmax_attention(
            *tensors, is_causal=is_causal, key_padding_mask=mask, bias=bias_of(attention, query_len, key_len)
        )
        outputs = attention(*tensors, key_padding_mask=mask), plain(attention, tensors, mask), exact
        case = f"L={query_len} S={key_len} causal={is_causal} G={num_kv_heads} padded={has_padding} {position}"
        assert outputs[0].dtype == dtype
        assert_exact(*outputs, what=case)
        direction = torch.randn(exact.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
        grads = [torch.autograd.grad(output, tensors, direction.to(output.dtype)) for output in outputs]
        for name, actual, roughly, true in zip(("query", "key", "value"), *grads, strict=True):
            assert_exact(actual, roughly, true, what=f"{case}: gradient of {name}")


@pytest.mark.parametrize("position", ["none", "alibi"])
@PAST
def test_the_reference_is_the_oracles_equation(is_causal, position):
    attention, tensors, mask = make(is_causal=is_causal, position=position), heads(9, num_kv_heads=H), padding(9)
    exact = softmax_attention(*tensors, is_causal=is_causal, key_padding_mask=mask, bias=bias_of(attention, 9, 9))
    torch.testing.assert_close(attention.reference(*tensors, key_padding_mask=mask), exact)


@settings(max_examples=40, deadline=None)
@given(
    query_len=st.integers(1, 20),
    key_len=st.integers(1, 20),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    is_causal=st.booleans(),
    data=st.data(),
)
def test_any_padding_pattern_equals_the_oracle(query_len, key_len, num_kv_heads, is_causal, data):
    mask = torch.tensor([data.draw(st.lists(st.booleans(), min_size=key_len, max_size=key_len)) for _ in range(B)])
    tensors = heads(query_len, key_len, num_kv_heads=num_kv_heads)
    attention = make(is_causal=is_causal, is_cross=not is_causal, num_kv_heads=num_kv_heads)
    exact = softmax_attention(*tensors, is_causal=is_causal, key_padding_mask=mask)
    torch.testing.assert_close(attention(*tensors, key_padding_mask=mask), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
@PAST
def test_garbage_in_padding_matters_neither_forward_nor_backward(is_causal, garbage, backend):
    attention, mask = make(is_causal=is_causal, backend=backend), padding(12)
    query, key, value = heads(12, dtype=torch.float32)
    spoilt = [x.detach().masked_fill(mask[:, None, :, None], garbage).requires_grad_() for x in (key, value)]
    for function in (attention, attention.reference):
        clean_output = function(query, key, value, key_padding_mask=mask)
        output = function(query, *spoilt, key_padding_mask=mask)
        assert torch.equal(output, clean_output)
        clean = torch.autograd.grad(clean_output.sum(), (query, key, value))
        grads = torch.autograd.grad(output.sum(), (query, *spoilt))
        for actual, expected in zip(grads, clean, strict=True):
            assert torch.equal(actual, expected)
        assert not grads[1][mask[:, None, :].expand(B, H, 12)].any()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("position", ["none", "alibi"])
@PAST
def test_rows_that_see_nothing_are_zero_with_finite_gradients(is_causal, position, dropout_p):
    attention = make(is_causal=is_causal, position=position, dropout_p=dropout_p).train()
    tensors, mask = heads(10), padding(10)
    output = attention(*tensors, key_padding_mask=mask)
    assert not output[2].any()
    if is_causal:  # the first keys of the first sequence are padding, so its first queries see nothing
        assert not output[0, :, :3].any()
    if not dropout_p:
        assert output[0, :, 3:].any(-1).all()
    for grad in torch.autograd.grad(output.sum(), tensors):
        assert grad.isfinite().all()


def test_more_queries_than_keys_see_nothing_at_first():
    attention, (query, key, value) = make(is_causal=True), heads(9, 4)
    output = attention(query, key, value)
    assert not output[:, :, :5].any()
    torch.testing.assert_close(output[:, :, 5], value[:, :, 0])


def test_the_last_queries_of_a_longer_past_equal_the_whole():
    attention, (query, key, value) = make(is_causal=True), heads(30)
    torch.testing.assert_close(attention(query[:, :, 19:], key, value), attention(query, key, value)[:, :, 19:])


# --- dropout ---


def weights_of(attention, query, key):
    """Read the attention weights by attending to unit vectors."""
    unit = torch.eye(D, dtype=query.dtype).expand(B, H, D, D)
    return attention(query, key, unit)


@pytest.mark.parametrize("backend", ["auto", "math"])
@PAST
def test_dropout_is_inverted_dropout_on_the_weights(is_causal, backend):
    attention = make(is_causal=is_causal, dropout_p=0.25, backend=backend)
    query, key, _ = heads(D)
    true = weights_of(attention.eval(), query, key)
    torch.manual_seed(0)
    draws = torch.stack([weights_of(attention.train(), query, key) for _ in range(50)])
    is_dropped = draws == 0
    torch.testing.assert_close(draws, torch.where(is_dropped, 0.0, true / 0.75))
    visible = causal_keep(D, D) if is_causal else torch.ones(D, D, dtype=torch.bool)
    rate = is_dropped[..., visible].double().mean()
    num_draws = is_dropped[..., visible].numel()
    assert abs(rate - 0.25) < 5 * (0.25 * 0.75 / num_draws) ** 0.5


def test_dropout_acts_in_training_only_and_follows_the_global_seed():
    attention, tensors = make(dropout_p=0.5), heads(11)
    without = make()(*tensors)
    assert torch.equal(attention.eval()(*tensors), without)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(attention.train()(*tensors))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], without)


@pytest.mark.parametrize("has_padding", [False, True])
@PAST
def test_gradients_through_dropout_are_those_of_the_weights_that_were_kept(is_causal, has_padding):
    attention = make(is_causal=is_causal, dropout_p=0.4).train()
    tensors, mask = heads(6, num_kv_heads=H), padding(6) if has_padding else None

    def attend(*tensors):
        torch.manual_seed(3)
        return attention(*tensors, key_padding_mask=mask)

    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)


# --- decoding ---


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("num_kv_heads", [H, 2])
@pytest.mark.parametrize("position", ["none", "alibi"])
def test_decoding_step_by_step_equals_the_causal_forward(position, num_kv_heads, backend):
    attention = make(is_causal=True, position=position, num_kv_heads=num_kv_heads, backend=backend)
    query, key, value = heads(13, num_kv_heads=num_kv_heads)
    state = attention.init_state(B, dtype=torch.float64)
    outputs = []
    for at in range(13):
        now = slice(at, at + 1)
        output, state = attention.step(query[:, :, now], key[:, :, now], value[:, :, now], state)
        outputs.append(output)
        shape = attention.build.shape(B, 1, at + 1, attention.config)
        claim = describe("full").complexity.state_bytes
        assert claim is not None
        assert state_bytes(state) == claim(shape, 8)
    torch.testing.assert_close(torch.cat(outputs, dim=2), attention(query, key, value))


def test_a_backend_narrows_what_the_variant_can_do():
    attention, tensors = make(backend="xformers"), heads(5, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="'xformers' is offered without masks") as refusal:
        attention(*tensors, key_padding_mask=padding(5))
    assert refusal.value.capability == "key_padding_mask"
    with pytest.raises(UnsupportedError, match="'flex' has none") as refusal:
        make(backend="flex", dropout_p=0.1)
    assert refusal.value.capability == "attention_dropout"


def test_decoding_refuses_what_it_cannot_mean():
    with pytest.raises(UnsupportedError, match="is_causal=True") as refusal:
        make().init_state(1)
    assert refusal.value.capability == "decode"
    with pytest.raises(UnsupportedError, match="compiles for every length"):
        make(is_causal=True, backend="flex").init_state(1)
    attention, token = make(is_causal=True, max_seq_len=1), torch.zeros(1, H, 1, D)
    _, state = attention.step(token, token, token, attention.init_state(1))
    with pytest.raises(ValueError, match="max_seq_len = 1"):
        attention.step(token, token, token, state)


# --- construction, claims ---


def test_impossible_requests_fail_when_it_is_built():
    with pytest.raises(UnsupportedError, match="distance within one sequence") as refusal:
        make(is_cross=True, position="alibi")
    assert refusal.value.capability == "positions"
    with pytest.raises(UnsupportedError, match="no attention dropout"):
        make(backend="flex", dropout_p=0.1)
    with pytest.raises(ConfigError, match=r"backend.*'flush'"):
        make(backend="flush")


def test_alibi_favours_near_keys():
    attention, zeros = make(is_causal=True, position="alibi"), torch.zeros(B, H, D, D)
    last = weights_of(attention, zeros, zeros)[0, :, -1]
    assert (last.diff(dim=-1) > 0).all()
    assert (last[:-1, -1] > last[1:, -1]).all()  # the first heads look nearest


@given(st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_flops_count_every_visible_pair(query_len, key_len, is_causal):
    build = BuildContext(embed_dim=H * D, num_heads=H, max_seq_len=16, is_causal=is_causal)
    pairs = int(causal_keep(query_len, key_len).sum()) if is_causal else query_len * key_len
    assert full_flops(build.shape(B, query_len, key_len)) == 4 * B * H * D * pairs


@pytest.mark.parametrize("position", ["none", "rotary", "alibi"])
def test_the_mixer_decodes_as_it_runs(position):
    build = BuildContext(embed_dim=16, num_heads=2, num_kv_heads=1, max_seq_len=9, is_causal=True, position=position)
    mixer, hidden = build_mixer("full", build).double(), torch.randn(2, 9, 16, dtype=torch.float64)
    state, outputs = mixer.init_state(2, dtype=torch.float64), []
    for at in range(9):
        output, state = mixer.step(hidden[:, at : at + 1], state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), mixer(hidden))


def test_no_batch_entry_sees_another():
    attention, (query, key, value) = make(), heads(6)
    with recording() as paths:
        whole = attention(query, key, value)
    assert paths == ["sdpa.flash"]
    for at in range(B):
        alone = attention(*(x[at : at + 1] for x in (query, key, value)))
        torch.testing.assert_close(alone, whole[at : at + 1])


def test_the_equation_as_written_has_second_derivatives():
    build = BuildContext(embed_dim=8, num_heads=2, max_seq_len=8, is_causal=True)
    attention = build_attention("full", build, backend="math")
    heads = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(attention, heads)
    assert torch.autograd.gradgradcheck(attention.reference, heads)
