"""Word convolution: windows by hand, dilation by layer, padding, its state, its cost, what it refuses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.decode import state_bytes
from attn_zoo.conformance import gate
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_flops, count_operations
from attn_zoo.registry import variants

BATCH, LENGTH, EMBED = 2, 9, 4
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"kernel_size": 2},
    {"kernel_size": 4},
    {"kernel_size": 3, "max_dilation": 4},
    {"kernel_size": 12},  # wider than the sequence
)


def make(is_causal: bool = False, *, options: dict[str, Any] | None = None, **build: Any) -> Any:
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": 1, "max_seq_len": 512, "layer_index": 1, **build}
    torch.manual_seed(0)
    mixer = build_mixer("word_convolution", BuildContext(is_causal=is_causal, **sizes), **(options or {}))
    torch.nn.init.normal_(mixer.conv.bias)  # type: ignore[union-attr, arg-type]  # zero at first
    return mixer.double().eval()


def draw(length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, EMBED, generator=torch.Generator().manual_seed(length), dtype=torch.float64)


def padding() -> Tensor:
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[0, [0, 3, 8]] = True
    mask[1] = True
    return mask


def by_the_definition(mixer: Any, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Write the equation out, position by position, token by token of its window."""
    config, output = mixer.config, torch.zeros_like(hidden)
    size, dilation = config.kernel_size, config.dilation(mixer.build.layer_index)
    before = size - 1 if mixer.build.is_causal else (size - 1) // 2
    for entry in range(BATCH):
        for i in range(hidden.shape[1]):
            both = mixer.conv.bias.clone()
            for tap in range(size):
                j = i + (tap - before) * dilation
                if 0 <= j < hidden.shape[1] and (mask is None or not bool(mask[entry, j])):
                    both = both + mixer.conv.weight[:, :, tap] @ hidden[entry, j]
            for n in range(EMBED):
                output[entry, i, n] = both[n] / (1.0 + math.exp(-float(both[EMBED + n])))
    return output


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_both_paths_are_the_definition(options: dict[str, Any], is_causal: bool, has_padding: bool):
    mixer, hidden, mask = make(is_causal, options=options), draw(), padding() if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_agree_with_finite_differences(is_causal: bool):
    mixer = make(is_causal, options={"max_dilation": 2})
    assert torch.autograd.gradcheck(lambda x: mixer(x, key_padding_mask=padding()), (draw().requires_grad_(),))


def test_padding_is_nothing_whatever_it_holds():
    mixer, hidden = make(), draw().requires_grad_()
    output = mixer(hidden.masked_fill(padding()[..., None], float("nan")), key_padding_mask=padding())
    assert output.isfinite().all()
    output.sum().backward()
    assert hidden.grad is not None
    assert torch.equal((hidden.grad == 0).all(-1), padding())


@pytest.mark.parametrize(("layer_index", "reach"), [(0, 2), (1, 4), (2, 8), (3, 2)])
def test_dilation_doubles_from_layer_to_layer_and_starts_again(layer_index: int, reach: int):
    mixer = make(True, options={"max_dilation": 4}, layer_index=layer_index)
    hidden = draw(32).requires_grad_()
    (gradient,) = torch.autograd.grad(mixer(hidden)[0, -1].sum(), hidden)
    assert (31 - gradient[0].abs().sum(-1).nonzero().flatten()).tolist() == [reach, reach // 2, 0]
    assert gate("word_convolution", {"max_dilation": 4}, mixer.build, seq_len=131)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_prefill_and_steps_equal_the_forward_and_keep_the_last_tokens(options: dict[str, Any]):
    mixer, hidden = make(True, options=options), draw()
    shape = mixer.build.shape(BATCH, 1, 1, mixer.config, "mixer")
    claim = variants["word_convolution"].complexity.state_bytes
    assert claim is not None
    output, state = mixer.prefill(hidden[:, :4])
    for i in range(4, LENGTH):
        row, state = mixer.step(hidden[:, i : i + 1], state)
        output = torch.cat([output, row], dim=1)
        assert state_bytes(state) == state_bytes(mixer.init_state(BATCH)) == claim(shape, 8)
    torch.testing.assert_close(output, mixer(hidden), rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="one new position"):
        mixer.step(hidden, state)
    with pytest.raises(UnsupportedError, match="later tokens"):
        make().init_state(1)


def test_a_state_keeps_its_dtype_under_autocast():
    """A norm hands on float32, and autocast concatenates in the wider type."""
    mixer, hidden = make(True).float(), draw().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = mixer.init_state(BATCH, dtype=torch.bfloat16)
        for piece in (hidden[:, :4], hidden[:, 4:5]):
            output, state = mixer.prefill(piece, state)
            assert state.dtype == torch.bfloat16
        assert torch.equal(output, mixer(hidden[:, :5])[:, 4:])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_flops_and_bytes_are_those_that_run(options: dict[str, Any], is_causal: bool):
    mixer, variant = make(is_causal, options=options), variants["word_convolution"]
    shape = mixer.build.shape(BATCH, LENGTH, config=mixer.config, form="mixer")
    claim = variant.flops(shape)
    assert claim is not None
    assert count_flops(partial(mixer, draw())) == claim
    num_params = sum(p.numel() for p in mixer.parameters())
    assert variant.min_bytes(shape, 4) == (2 * draw().numel() + num_params) * 4
    leaf = draw().requires_grad_()
    counted = count_operations(lambda: mixer(leaf).sum().backward())
    assert counted is not None
    assert counted.products == pytest.approx(3 * claim, rel=0.01)


def test_variance_is_kept_as_in_the_paper():
    torch.manual_seed(0)
    build = BuildContext(embed_dim=256, num_heads=1, max_seq_len=64)
    weight = build_mixer("word_convolution", build).conv.weight  # type: ignore[union-attr]
    assert weight.std().item() == pytest.approx(math.sqrt(4 / (3 * 256)), rel=0.01)  # type: ignore[operator]


def test_dropout_drops_outputs_and_keeps_their_mean():
    mixer = make(dropout_p=0.5).train()
    hidden = draw()[:1].expand(4000, -1, -1)
    torch.manual_seed(0)
    output = mixer(hidden)
    error = (output.mean(0) - mixer.eval()(hidden)[0]).abs()
    assert (error < 5 * output.std(0) / 4000**0.5).all()


def test_which_path_ran():
    with recording() as paths:
        make()(draw())
    assert paths == ["convolution.gated"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernel_size": 1}, "kernel_size: expected at least 2"),
        ({"max_dilation": 3}, "max_dilation: expected a power of two"),
        ({"max_dilation": 0}, "max_dilation: expected a power of two"),
    ],
)
def test_impossible_kernels(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        make(options=options)


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_cross": True}, "cross_attention"),
        ({"num_heads": 4, "num_kv_heads": 1}, "grouped_query"),
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
        build_attention("word_convolution", BuildContext(embed_dim=EMBED, num_heads=1, max_seq_len=64))
