"""The inputs of the checks and the tolerances they compare with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_zoo.attention import BuildContext
from attn_zoo.conformance.inputs import padding_mask, random_tensor
from attn_zoo.conformance.subject import Subject
from attn_zoo.conformance.tolerance import largest_error, rounding, working_tolerance
from attn_zoo.metadata import Form
from attn_zoo.registry import variants


def subject(form: Form, build: BuildContext, dtype: torch.dtype) -> Subject:
    return Subject(variant=variants["full"], form=form, options={}, build=build, dtypes=(dtype,), lengths=())


@pytest.mark.parametrize("kind", ["end", "scattered"])
@pytest.mark.parametrize("key_len", [2, 3, 5, 70])
def test_padding_leaves_every_entry_a_key_and_hides_one(kind: str, key_len: int) -> None:
    mask = padding_mask(3, key_len, kind)  # type: ignore[arg-type]
    assert mask.shape == (3, key_len)
    assert mask.any(-1).all()
    assert not mask.all(-1).any()
    assert bool(mask[:, -1].all()) if kind == "end" else bool(mask[:, 0].all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_poison_is_in_padded_keys_and_nowhere_else(dtype: torch.dtype) -> None:
    build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=9)
    plain = subject("attention", build, dtype).inputs(build, 7)
    assert plain.poisoned() is plain
    mask = padding_mask(2, 7, "scattered")
    query, *keys = replace(plain, key_padding_mask=mask).poisoned().tensors
    assert torch.equal(query, plain.tensors[0])
    for tensor, before in zip(keys, plain.tensors[1:], strict=True):
        assert torch.equal(tensor.transpose(1, 2)[~mask], before.transpose(1, 2)[~mask])
        assert not tensor.transpose(1, 2)[mask].isfinite().any()
    both = torch.cat([tensor.transpose(1, 2)[mask] for tensor in keys])
    assert both.isnan().any()
    assert both.isposinf().any()
    assert both.isneginf().any()


def test_values_are_the_same_in_every_dtype() -> None:
    wide = random_tensor((2, 3), 4, torch.float64, "cpu")
    assert torch.equal(random_tensor((2, 3), 4, torch.bfloat16, "cpu"), wide.bfloat16())
    assert not torch.equal(random_tensor((2, 3), 5, torch.float64, "cpu"), wide)


def test_words_say_every_size_that_matters() -> None:
    build = BuildContext(embed_dim=32, num_heads=4, num_kv_heads=2, max_seq_len=9, is_cross=True)
    inputs = subject("attention", build, torch.float32).inputs(build, 5, key_len=7, batch_size=3)
    assert inputs.words() == "attention form, B=3 H=4 G=2 L=5 S=7 D=8 float32"
    mixer = subject("mixer", build, torch.float32).inputs(build, 5, key_len=7, batch_size=1)
    assert mixer.words() == "mixer form, B=1 L=5 S=7 E=32 float32"
    assert mixer.names == ("hidden", "context")
    assert not mixer.is_shared


def test_a_value_that_is_not_finite_is_an_infinite_error() -> None:
    assert largest_error(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")
    assert largest_error(torch.tensor([1.5]), torch.tensor([1.0])) == 0.5


def test_tolerances_scale_with_values_and_dtype() -> None:
    ones = torch.ones(1, dtype=torch.float64)
    assert rounding(10 * ones, 64) == pytest.approx(10 * rounding(ones, 64))
    assert rounding(ones, 64) < 1e-13
    assert rounding(ones, 64, torch.float32) < 1e-5
    # Twice the error of the plain computation, plus rounding of the result.
    eps = torch.finfo(torch.bfloat16).eps
    assert working_tolerance(0.01, 1.0, 64, torch.bfloat16) == pytest.approx(0.02 + 2 * eps)
    # One that is not finite, or as large as the result, excuses neither zeros nor the opposite sign.
    assert [working_tolerance(error, 1.0, 64, torch.float16) < 0.26 for error in (1.0, float("inf"))] == [True, True]
