"""What is checked at a cell's own length catches what only goes wrong there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_zoo.attention import BuildContext, build_attention, build_mixer
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.conformance import FirstCall, check_output, own_length
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.errors import GateError


def case(
    *, is_causal: bool = False, heads: int = 4, groups: int = 2, length: int = 75, dtype: torch.dtype = torch.float32
) -> tuple[BuildContext, list[Tensor]]:
    build = BuildContext(
        embed_dim=8 * heads, num_heads=heads, num_kv_heads=groups, head_dim=8, max_seq_len=length, is_causal=is_causal
    )
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 8), (2, groups, length, 8), (2, groups, length, 8)]
    return build, [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def checked(
    output: Tensor, inputs: list[Tensor], build: BuildContext, mask: Tensor | None = None, name: str = "full"
) -> tuple[str, ...]:
    given = Inputs(form="attention", tensors=tuple(inputs), key_padding_mask=mask, is_causal=build.is_causal)
    return check_output(FirstCall(module=build_attention(name, build), inputs=given, output=output))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 75, 300])
@pytest.mark.parametrize("has_padding", [False, True])
def test_right_outputs_pass(dtype, is_causal, length, has_padding, monkeypatch):
    monkeypatch.setattr(own_length, "CHUNK_LEN", 64)
    build, inputs = case(is_causal=is_causal, length=length, dtype=dtype)
    mask = None
    if has_padding and length > 1:
        mask = torch.zeros(2, length, dtype=torch.bool)
        mask[::2, length - length // 4 - 1 :] = True
    query, key, value = inputs
    output = softmax_attention(query, key, value, is_causal=is_causal, key_padding_mask=mask).to(dtype)
    assert checked(output, inputs, build, mask) == ("own_shape", "own_rows")


def exact(inputs: list[Tensor], **how) -> Tensor:
    query, key, value = inputs
    return softmax_attention(query, key, value, **how).to(query.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["last_block", "first_row", "last_head", "causal", "padding"])
def test_faults_that_only_a_long_sequence_shows_are_caught(fault, dtype):
    build, inputs = case(length=300, dtype=dtype, is_causal=fault == "causal")
    mask, output = None, exact(inputs)
    if fault == "last_block":
        output[:, :, -64:] = 0.0
    elif fault == "first_row":
        output[:, :, 0] = output[:, :, 1]
    elif fault == "last_head":
        output[:, -1] = output[:, 0]
    elif fault == "padding":
        mask = torch.zeros(2, 300, dtype=torch.bool)
        mask[:, 200:] = True
    with pytest.raises(GateError, match="own_rows: full: differs from float64 softmax attention"):
        checked(output, inputs, build, mask)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_number_that_is_none_is_caught_in_any_variant(bad):
    build, inputs = case(groups=4)
    output = exact(inputs)
    output[1, 2, 33, 4] = bad
    for name in ("full", "linformer"):
        with pytest.raises(GateError, match=rf"own_shape: {name}: the output is not finite"):
            checked(output, inputs, build, name=name)
    output[1, 2, 33, 5] = -bad
    with pytest.raises(GateError, match="not finite"):
        checked(output, inputs, build)


def test_shape_and_dtype_are_those_of_the_first_input():
    build, inputs = case()
    for output in (exact(inputs)[:, :, 1:], exact(inputs).double()):
        with pytest.raises(GateError, match="own_shape"):
            checked(output, inputs, build)


def test_rows_are_known_for_exact_attention_without_dropout_only():
    build, inputs = case(groups=4)
    output = exact(inputs) + 1
    assert checked(output, inputs, build, name="linformer") == ("own_shape",)
    assert checked(output, inputs, replace(build, dropout_p=0.1)) == ("own_shape",)
    mixer, hidden = build_mixer("full", build), torch.randn(2, 75, 32)
    first = FirstCall(module=mixer, inputs=Inputs(form="mixer", tensors=(hidden,)), output=hidden)
    assert check_output(first) == ("own_shape",)
