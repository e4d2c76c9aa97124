"""The multi-head mixer, against torch's own multi-head attention, in decoding, and with garbage in padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_mixer
from attn_zoo.attention.decode import state_bytes

E, H, B = 12, 3, 2


def make(*, seed=0, dtype=torch.float64, **changes):
    torch.manual_seed(seed)
    build = BuildContext(**{"embed_dim": E, "num_heads": H, "max_seq_len": 16, **changes})
    return build_mixer("full", build).to(dtype).eval()


def torch_twin(mixer):
    """Return nn.MultiheadAttention with the same weights."""
    twin = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64).eval()
    projections = (mixer.query_proj, mixer.key_proj, mixer.value_proj)
    with torch.no_grad():
        twin.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        twin.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
    twin.out_proj.load_state_dict(mixer.out_proj.state_dict())
    return twin


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_it_equals_torchs_multi_head_attention(is_causal, has_padding):
    mixer, hidden = make(is_causal=is_causal), torch.randn(B, 7, E, dtype=torch.float64)
    mask = torch.zeros(B, 7, dtype=torch.bool)
    mask[1, 4:] = True
    padding = mask if has_padding else None
    hidden_keys = torch.ones(7, 7, dtype=torch.bool).triu(1) if is_causal else None
    expected, _ = torch_twin(mixer)(
        hidden, hidden, hidden, key_padding_mask=padding, attn_mask=hidden_keys, need_weights=False
    )
    torch.testing.assert_close(mixer(hidden, key_padding_mask=padding), expected)
    torch.testing.assert_close(mixer.reference(hidden, key_padding_mask=padding), expected)


def test_cross_attention_equals_torchs():
    mixer = make(is_cross=True)
    hidden, context = (torch.randn(B, length, E, dtype=torch.float64) for length in (5, 8))
    expected, _ = torch_twin(mixer)(hidden, context, context, need_weights=False)
    torch.testing.assert_close(mixer(hidden, context=context), expected)


def test_projections_have_the_sizes_of_their_heads():
    mixer = make(num_kv_heads=1, head_dim=5)
    assert mixer.query_proj.weight.shape == (15, E)
    assert mixer.key_proj.weight.shape == mixer.value_proj.weight.shape == (5, E)
    assert mixer.out_proj.weight.shape == (E, 15)
    assert mixer(torch.randn(B, 4, E, dtype=torch.float64)).shape == (B, 4, E)


def test_rotary_needs_pairs_of_features():
    with pytest.raises(ConfigError, match="even number for rotary"):
        make(head_dim=5, position="rotary")


def test_rotary_makes_order_matter_through_distance_only():
    mixer, hidden = make(position="rotary"), torch.randn(B, 6, E, dtype=torch.float64)
    assert not torch.allclose(mixer(hidden).flip(1), mixer(hidden.flip(1)))
    plain = make()
    torch.testing.assert_close(plain(hidden).flip(1), plain(hidden.flip(1)))


@pytest.mark.parametrize("position", ["none", "rotary"])
@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_cross_attention_decodes_and_never_reads_padding(position, garbage):
    mixer = make(is_cross=True, position=position, head_dim=4)
    hidden, context = (torch.randn(B, length, E, dtype=torch.float64) for length in (5, 8))
    mask = torch.zeros(B, 8, dtype=torch.bool)
    mask[0, 5:] = True
    mask[1] = True
    expected = mixer(hidden, context=context, key_padding_mask=mask)
    spoilt = context.masked_fill(mask[:, :, None], garbage)
    torch.testing.assert_close(mixer(hidden, context=spoilt, key_padding_mask=mask), expected)
    state, outputs = mixer.init_state(B, context=spoilt, key_padding_mask=mask), []
    for at in range(5):
        output, state = mixer.step(hidden[:, at : at + 1], state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected)
    torch.testing.assert_close(expected[1], mixer.out_proj.bias.expand(5, E))  # everything padded: zero heads


@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_gradients_do_not_carry_garbage_from_padding(garbage):
    mixer = make(is_cross=True)
    hidden, context = (torch.randn(B, length, E, dtype=torch.float64, requires_grad=True) for length in (3, 4))
    mask = torch.tensor([[False, False, True, True], [True, True, True, True]])
    spoilt = context.detach().masked_fill(mask[:, :, None], garbage).requires_grad_()
    results = []
    for other in (context, spoilt):
        output = mixer(hidden, context=other, key_padding_mask=mask)
        results.append(torch.autograd.grad(output.square().sum(), (hidden, other, *mixer.parameters())))
    for clean, spoilt_grad in zip(*results, strict=True):
        assert spoilt_grad.isfinite().all()
        torch.testing.assert_close(spoilt_grad, clean)


@pytest.mark.parametrize("garbage", [float("inf"), float("-inf"), float("nan"), 1e308, -1e200])
@pytest.mark.parametrize("name", ["full", "linformer", "luna"])
def test_padded_queries_carry_no_garbage_into_the_weights(name, garbage):
    build = BuildContext(embed_dim=E, num_heads=H, max_seq_len=16)
    mixer, mask = (
        build_mixer(name, build).double(),
        torch.tensor([[False, False, True, False], [True, False, False, True]]),
    )
    hidden, results = torch.randn(B, 4, E, dtype=torch.float64), []
    for token in (0.0, garbage):
        tokens = hidden.masked_fill(mask[:, :, None], token).requires_grad_()
        output = mixer(tokens, key_padding_mask=mask)[~mask]
        results.append((output, *torch.autograd.grad(output.square().sum(), (tokens, *mixer.parameters()))))
    for clean, spoilt in zip(*results, strict=True):
        torch.testing.assert_close(spoilt, clean)


@pytest.mark.parametrize("seed", range(8))
def test_padded_queries_too_large_for_a_backward_that_recomputes_do_no_harm(seed):
    # As wide as the heads of protocol cpu-small, in which forward and backward round products of 1e10 differently.
    torch.manual_seed(seed)
    mixer = build_mixer("full", BuildContext(embed_dim=64, num_heads=2, max_seq_len=64))
    mask = torch.arange(64) >= torch.tensor([[40], [64]])
    tokens = torch.randn(2, 64, 64).masked_fill(mask[:, :, None], 1e10).requires_grad_()
    output = mixer(tokens, key_padding_mask=mask)[~mask]
    for grad in torch.autograd.grad(output.square().sum(), (tokens, *mixer.parameters())):
        assert grad.isfinite().all()


def test_a_real_token_that_is_not_finite_is_not_hidden():
    mixer, hidden = make(), torch.randn(B, 4, E, dtype=torch.float64)
    hidden[0, 1] = float("nan")
    mask = torch.tensor([[False, False, True, True]] * B)
    output = mixer(hidden, key_padding_mask=mask)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_decoding_in_a_models_own_dtype_needs_no_word_about_it():
    mixer = make(is_causal=True, dtype=torch.bfloat16)
    state = mixer.init_state(B)
    output, state = mixer.step(torch.randn(B, 1, E, dtype=torch.bfloat16), state)
    assert output.dtype == torch.bfloat16
    assert state_bytes(state) == 2 * B * E * 2


@pytest.mark.parametrize("name", ["global_pooling", "lstm", "retention", "word_convolution"])
def test_mixers_of_their_own_refuse_a_context_as_well(name):
    mixer = build_mixer(name, BuildContext(embed_dim=E, num_heads=H, max_seq_len=16, is_causal=True))
    with pytest.raises(UnsupportedError, match=f"{name}: expected no context"):
        mixer.init_state(B, context=torch.zeros(B, 4, E))


def test_steps_that_do_not_fit_are_refused():
    mixer = make(is_causal=True)
    with pytest.raises(ValueError, match=r"hidden: expected one new position \[B, 1, E\]; got \[2, 2, 12\]"):
        mixer.step(torch.zeros(B, 2, E, dtype=torch.float64), mixer.init_state(B))
    cross = make(is_cross=True)
    with pytest.raises(ValueError, match=r"context: expected .* with B = 2 to decode across; got none"):
        cross.init_state(B)
    with pytest.raises(UnsupportedError, match="prompts of unlike length"):
        mixer.init_state(B, key_padding_mask=torch.zeros(B, 4, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match=r"full: expected no context, as .*is_cross=False; got \[2, 4, 12\]"):
        mixer.init_state(B, context=torch.zeros(B, 4, E, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"got \[1, 4, 12\]"):
        cross.init_state(B, context=torch.zeros(1, 4, E, dtype=torch.float64))


def test_decoding_across_drops_nothing_and_leaves_the_mode_as_it_was():
    mixer = make(is_cross=True, dropout_p=0.5).train()
    mixer.out_proj.eval()
    state = mixer.init_state(B, context=torch.randn(B, 9, E, dtype=torch.float64))
    hidden = torch.randn(B, 1, E, dtype=torch.float64)
    assert torch.equal(mixer.step(hidden, state)[0], mixer.step(hidden, state)[0])
    assert mixer.attention.training
    assert not mixer.out_proj.training


@pytest.mark.parametrize(
    ("context", "mask", "match"),
    [
        ((B, 0, E), None, r"context: expected at least one token; got \[2, 0, 12\]"),
        ((B, 9, E + 1), None, r"context: expected \[B, S, E\] = \[2, S, 12\]; got \[2, 9, 13\]"),
        ((B, 99, E), None, "expected at most max_seq_len"),
        ((B, 9, E), torch.zeros(B, 9), "key_padding_mask: expected bool"),
        ((B, 9, E), torch.zeros(B, 8, dtype=torch.bool), r"key_padding_mask: expected \[B, S\] = \[2, 9\]"),
    ],
)
def test_a_context_to_decode_across_is_checked_like_that_of_a_call(context, mask, match):
    mixer, hidden = make(is_cross=True), torch.zeros(context, dtype=torch.float64)
    with pytest.raises(ValueError, match=match):
        mixer.init_state(B, context=hidden, key_padding_mask=mask)
    with pytest.raises(ValueError, match=match):
        mixer(torch.zeros(B, 3, E, dtype=torch.float64), context=hidden, key_padding_mask=mask)
