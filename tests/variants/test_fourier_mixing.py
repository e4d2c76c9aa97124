"""Fourier mixing: the sums of the paper term by term, the gradient, padding, its one length, cost, a training."""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention import AbstractMixer
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_operations
from attn_zoo.registry import variants
from attn_zoo.training import run_training
from attn_zoo.variants.fourier_mixing import fourier_mixing_flops
from tests.exactness import assert_transforms_as_autograd
from tests.training.toy_task import cell, toy_task


def make(length: int, embed_dim: int = 6, **build: Any) -> AbstractMixer:
    return build_mixer("fourier_mixing", BuildContext(embed_dim=embed_dim, num_heads=1, max_seq_len=length, **build))


def draw(batch_size: int, length: int, embed_dim: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch_size, length, embed_dim, generator=generator, dtype=torch.float64)


def dft(values: list[complex]) -> list[complex]:
    """Write equation 1 out."""
    size = len(values)
    return [sum(x * cmath.exp(-2j * cmath.pi * n * k / size) for n, x in enumerate(values)) for k in range(size)]


def by_the_definition(hidden: Tensor) -> Tensor:
    """Transform the features of every position, then every feature over the positions, and keep the real part."""
    output = torch.zeros_like(hidden)
    for entry, rows in enumerate(hidden.tolist()):
        columns = zip(*[dft(row) for row in rows], strict=True)
        mixed = [dft(list(column)) for column in columns]
        output[entry] = torch.tensor([[x.real for x in column] for column in mixed], dtype=hidden.dtype).T
    return output


@pytest.mark.parametrize("embed_dim", [1, 2, 5, 6])
@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_both_paths_are_the_definition(length: int, embed_dim: int):
    mixer, hidden = make(length, embed_dim), draw(2, length, embed_dim)
    expected = by_the_definition(hidden)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 4, 5])
def test_the_map_is_its_own_adjoint(length: int):
    mixer, hidden, weights = make(length), draw(2, length).requires_grad_(), draw(2, length).flip(0)
    (gradient,) = torch.autograd.grad(mixer(hidden), hidden, weights)
    torch.testing.assert_close(gradient, mixer(weights), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(mixer, (draw(1, length).requires_grad_(),))
    assert torch.autograd.gradgradcheck(mixer, (draw(1, length).requires_grad_(),))


def test_padding_counts_as_zero():
    hidden, mask = draw(2, 7), torch.zeros(2, 7, dtype=torch.bool)
    mask[0, [1, 6]] = True
    mask[1] = True
    expected = by_the_definition(hidden.masked_fill(mask[..., None], 0.0))
    hidden[mask] = torch.nan
    for run in (make(7), make(7).reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-12)


def test_every_position_reaches_every_position():
    hidden = draw(1, 9).requires_grad_()
    (gradient,) = torch.autograd.grad(make(9)(hidden)[0, 4, 1], hidden)
    assert (gradient.abs() > 0).all()


def test_bfloat16_is_transformed_in_float32():
    hidden = draw(2, 31).bfloat16()
    output = make(31)(hidden)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, make(31)(hidden.float()).bfloat16(), rtol=0, atol=0)


def test_float16_is_refused_as_a_sum_of_ordinary_inputs_leaves_its_range():
    mixer, hidden = make(2048, 512), torch.full((1, 2048, 512), 0.1)
    with pytest.raises(UnsupportedError, match="sums all L E inputs, and float16 ends at 65504") as caught:
        mixer.half()(hidden.half())
    assert caught.value.capability == "dtypes"
    assert mixer(hidden).max() > 65504


def test_cost_is_what_runs_in_both_directions():
    mixer, hidden = make(64, 16), draw(3, 64, 16).requires_grad_()
    shape = mixer.build.shape(3, 64, form="mixer")
    claim = fourier_mixing_flops(shape)
    assert claim == 2.5 * 3 * 64 * 16 * 10
    forward = count_operations(lambda: mixer(hidden))
    both = count_operations(lambda: mixer(hidden).sum().backward())
    assert forward is not None
    assert both is not None
    assert forward.products == claim
    assert both.products == (1 + variants["fourier_mixing"].complexity.ratio(shape)) * claim
    assert list(mixer.parameters()) == []
    with recording() as paths:
        mixer(hidden)
    assert paths == ["fourier.rfft"]


@pytest.mark.parametrize("length", [1, 7])
def test_another_length_is_refused(length: int):
    with pytest.raises(UnsupportedError, match="max_seq_len = 8") as caught:
        make(8)(draw(1, length))
    assert caught.value.capability == "variable_seq_len"


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_causal": True}, "causal"),
        ({"is_cross": True}, "cross_attention"),
        ({"dropout_p": 0.1}, "attention_dropout"),
        ({"position": "rotary"}, "positions"),
    ],
)
def test_refusals(build: dict[str, Any], capability: str):
    with pytest.raises(UnsupportedError) as caught:
        make(8, **build)
    assert caught.value.capability == capability


def test_there_is_no_form_over_heads():
    with pytest.raises(UnsupportedError, match="build_mixer"):
        build_attention("fourier_mixing", BuildContext(embed_dim=6, num_heads=2, max_seq_len=64))


def test_one_graph_for_the_compiler():
    mixer, hidden = make(16), draw(2, 16).requires_grad_()
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    for plain, traced in zip(
        *[(f(hidden), *torch.autograd.grad(f(hidden).sin().sum(), hidden)) for f in (mixer, compiled)], strict=True
    ):
        torch.testing.assert_close(traced, plain)


def test_transforms_of_functions_agree_with_autograd():
    assert_transforms_as_autograd(make(7), torch.stack([draw(2, 7), draw(2, 7).cos()]))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_it_trains_on_sequences_of_many_lengths(pooling: str):
    with toy_task():
        result = run_training(cell(variant="fourier_mixing", pooling=pooling))
    assert (result.status, result.reason) == ("ok", "")
    assert result.kernels == ("fourier.rfft",)
    score = result.score
    assert score is not None
    assert score.train_flops
    assert score.curve[-1]["train_loss"] < score.curve[0]["train_loss"]
