"""Global pooling: the means by hand, blindness to queries, padding, decoding, cost, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention import AbstractMixer
from attn_zoo.attention.decode import state_bytes
from attn_zoo.kernels.trace import recording
from attn_zoo.variants.global_pooling import (
    global_pooling_flops,
    global_pooling_projection_flops,
    global_pooling_state_bytes,
)

BATCH, LENGTH, EMBED = 2, 7, 6


def make(is_causal: bool = False, **build: Any) -> AbstractMixer:
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": 2, "max_seq_len": 64, **build}
    torch.manual_seed(0)
    return build_mixer("global_pooling", BuildContext(is_causal=is_causal, **sizes)).double().eval()


def draw() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def padding() -> Tensor:
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[0, [0, 5, 6]] = True
    mask[1] = True
    return mask


def by_the_definition(mixer: Any, hidden: Tensor, mask: Tensor | None) -> Tensor:
    output = torch.zeros_like(hidden)
    for entry in range(BATCH):
        for i in range(LENGTH):
            seen = [
                j for j in range(i + 1 if mixer.build.is_causal else LENGTH) if mask is None or not bool(mask[entry, j])
            ]
            values = [mixer.value_proj(hidden[entry, j]) for j in seen]
            mean = sum(values) / len(values) if values else torch.zeros(EMBED, dtype=torch.float64)
            output[entry, i] = mixer.out_proj(mean)
    return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_both_paths_are_the_definition(is_causal: bool, has_padding: bool):
    mixer, hidden, mask = make(is_causal), draw(), padding() if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-14)


def test_every_position_receives_the_same():
    mixer, hidden = make(), draw()
    output = mixer(hidden)
    torch.testing.assert_close(output, output[:, :1].expand_as(output), rtol=0, atol=0)
    torch.testing.assert_close(mixer(hidden.flip(1)), output)  # no order


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_gradients_agree_with_finite_differences(is_causal: bool, has_padding: bool):
    mixer, mask = make(is_causal), padding() if has_padding else None
    assert torch.autograd.gradcheck(lambda x: mixer(x, key_padding_mask=mask), (draw().requires_grad_(),))


def test_decoding_keeps_one_sum():
    mixer, hidden = make(True, head_dim=5), draw()  # wider than E: values are what is summed
    state, expected = mixer.init_state(BATCH), mixer(hidden)
    for i in range(LENGTH):
        row, state = mixer.step(hidden[:, i : i + 1], state)
        torch.testing.assert_close(row[:, 0], expected[:, i], rtol=0, atol=1e-14)
        shape = mixer.build.shape(BATCH, 1, i + 1)
        assert state_bytes(state) == global_pooling_state_bytes(shape, 8) == BATCH * 10 * 8
    with pytest.raises(ValueError, match="one new position"):
        mixer.step(hidden, state)
    with pytest.raises(UnsupportedError, match="later tokens"):
        make().init_state(1)


def test_long_sums_keep_their_digits_in_half_precision():
    mixer = make(True, max_seq_len=4096).bfloat16()
    hidden = torch.ones(1, 4096, EMBED, dtype=torch.bfloat16)
    output = mixer(hidden)
    torch.testing.assert_close(output[:, -1], output[:, 0], rtol=0.02, atol=0.02)  # in bfloat16 a sum stops at 256


def test_dropout_drops_positions_and_keeps_the_mean():
    mixer, hidden = make(dropout_p=0.5).train(), draw()[:1].expand(4000, -1, -1)
    torch.manual_seed(0)
    output = mixer(hidden)[:, 0]
    error = (output.mean(0) - mixer.eval()(hidden)[0, 0]).abs()
    assert (error < 5 * output.std(0) / 4000**0.5).all()
    assert (output.std(0) > 0).all()


def test_cost():
    build = BuildContext(embed_dim=EMBED, num_heads=2, max_seq_len=64)
    assert global_pooling_flops(build.shape(1, 10)) == 10 * EMBED
    assert global_pooling_projection_flops(build.shape(1, 10)) == 4 * EMBED**2
    causal = BuildContext(embed_dim=EMBED, num_heads=2, max_seq_len=64, is_causal=True)
    assert global_pooling_flops(causal.shape(1, 10)) == 10 * EMBED
    assert global_pooling_projection_flops(causal.shape(1, 10)) == 40 * EMBED**2
    with recording() as paths:
        make()(draw())
        make(True)(draw())
    assert paths == ["pool.all", "pool.running"]


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_cross": True}, "cross_attention"),
        ({"num_kv_heads": 1}, "grouped_query"),
        ({"position": "rotary"}, "positions"),
        ({"position": "alibi"}, "positions"),
    ],
)
def test_refusals(build: dict[str, Any], capability: str):
    with pytest.raises(UnsupportedError) as caught:
        make(**build)
    assert caught.value.capability == capability


def test_there_is_no_form_over_heads():
    with pytest.raises(UnsupportedError, match="build_mixer"):
        build_attention("global_pooling", BuildContext(embed_dim=EMBED, num_heads=2, max_seq_len=64))
