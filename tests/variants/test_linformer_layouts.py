"""Linformer's two layouts are one mechanism: same parameters, same names, same outputs and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attn_zoo.attention import AbstractMixer, BuildContext, MultiHeadMixer, build_attention, build_mixer
from attn_zoo.errors import UnsupportedError
from attn_zoo.variants.linformer import CompressFirstMixer
from tests.variants.test_linformer import BUILD, EVERY, K, padding


def mixers(build: BuildContext, options: dict[str, Any]) -> tuple[AbstractMixer, AbstractMixer]:
    """Return one mixer in each layout with equal parameters."""
    pair: list[AbstractMixer] = []
    for layout in ("project_first", "compress_first"):
        torch.manual_seed(len(pair))  # different weights, until they are loaded
        pair.append(build_mixer("linformer", build, **{"proj_len": K, **options}, layout=layout).double())
    pair[1].load_state_dict(pair[0].state_dict())
    return pair[0], pair[1]


@pytest.mark.parametrize("options", [o for o in EVERY if o.get("sharing") != "none"], ids=str)
@pytest.mark.parametrize("is_cross", [False, True])
@pytest.mark.parametrize("num_kv_heads", [3, 1])
@pytest.mark.parametrize("is_padded", [False, True])
def test_both_layouts_are_one_mechanism(options: dict[str, Any], is_cross: bool, num_kv_heads: int, is_padded: bool):
    build = replace(BUILD, is_cross=is_cross, num_kv_heads=num_kv_heads, shared={})
    project_first, compress_first = mixers(build, options)
    assert isinstance(compress_first, CompressFirstMixer)
    assert not isinstance(project_first, CompressFirstMixer)
    hidden = torch.randn(2, 40, 12, dtype=torch.float64, requires_grad=True)
    context = torch.randn(2, 70, 12, dtype=torch.float64, requires_grad=True) if is_cross else None
    mask = padding(40 if context is None else 70) if is_padded else None
    upstream = torch.randn(2, 40, 12, dtype=torch.float64)
    results = []
    for mixer in (project_first, compress_first):
        out = mixer(hidden, context=context, key_padding_mask=mask)
        leaves = [hidden, *([] if context is None else [context]), *mixer.parameters()]
        results.append((out, *torch.autograd.grad(out, leaves, upstream)))
        torch.testing.assert_close(mixer.reference(hidden, context=context, key_padding_mask=mask), out)
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)


def test_compress_first_compresses_shared_inputs_once_and_decodes_across():
    _, mixer = mixers(replace(BUILD, shared={}), {"sharing": "key_value"})
    hidden, context = torch.randn(2, 4, 12, dtype=torch.float64), torch.randn(2, 70, 12, dtype=torch.float64)
    with FlopCounterMode(display=False) as both, torch.no_grad():
        expected = mixer(hidden, context=context)
    _, separate = mixers(replace(BUILD, shared={}), {"sharing": "headwise"})
    with FlopCounterMode(display=False) as apart, torch.no_grad():
        separate(hidden, context=context)
    assert apart.get_total_flops() - both.get_total_flops() == 2 * 2 * 70 * K * (12 + 1)  # X, and ones for the bias
    state, rows = mixer.init_state(2, context=context), []
    for position in range(4):
        row, state = mixer.step(hidden[:, position : position + 1], state)
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), expected, rtol=1e-10, atol=1e-10)


def test_auto_compresses_first_where_that_is_exact():
    build = replace(BUILD, is_cross=False)
    assert isinstance(build_mixer("linformer", build), CompressFirstMixer)
    for refused in ({"sharing": "none"}, {"layout": "project_first"}):
        assert type(build_mixer("linformer", build, **refused)) is MultiHeadMixer
    rotary = build_mixer("linformer", replace(build, position="rotary"))
    assert type(rotary) is MultiHeadMixer
    assert rotary(torch.randn(2, 40, 12)).shape == (2, 40, 12)


def test_compress_first_is_refused_where_it_is_not_exact():
    build = replace(BUILD, is_cross=False)
    with pytest.raises(UnsupportedError, match="each head has a matrix of its own"):
        build_mixer("linformer", build, layout="compress_first", sharing="none")
    with pytest.raises(UnsupportedError, match="rotation acts on projected keys"):
        build_mixer("linformer", replace(build, position="rotary"), layout="compress_first")
    with pytest.raises(UnsupportedError, match="use build_mixer"):
        build_attention("linformer", build, layout="compress_first")
