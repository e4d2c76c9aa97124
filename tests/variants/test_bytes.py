"""The least traffic that variants claim, against tensors that are really there: what is read and what is written.

The claim is counted from the sizes of a call; here inputs, the output and every weight that the output depends on are
counted one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from attn_zoo import BuildContext, UnsupportedError, build_attention, build_mixer
from attn_zoo.registry import make_config, variants

LENGTH, BATCH = 48, 2

CASES = [(name, options) for name in variants for options in variants[name].config.check_options()]
CASES += [("linformer", {"proj_len": 12, "sharing": "layerwise"})]  # among the others only in a mixer's layout


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{at}" for at, (name, _) in enumerate(CASES)])
def test_least_bytes_are_inputs_weights_and_the_output(name, options, num_kv_heads):
    variant = variants[name]
    if num_kv_heads < 4 and not variant.capabilities.grouped_query:
        num_kv_heads = 4
    build = BuildContext(
        embed_dim=32,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        max_seq_len=LENGTH,
        is_causal=not variant.capabilities.bidirectional,
    )
    torch.manual_seed(0)
    sizes: list[tuple[int, ...]] = [(BATCH, heads, LENGTH, 8) for heads in (4, num_kv_heads, num_kv_heads)]
    if variant.attention is None:
        sizes = [(BATCH, LENGTH, 32)]
    make: Callable[..., nn.Module] = build_mixer if variant.attention is None else build_attention
    try:
        module = make(name, build, **options)
    except UnsupportedError as error:
        pytest.skip(str(error))
    with torch.no_grad():  # off the start, where half of a weight of s4d does nothing: its first frequency is zero
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.01)
    inputs = [torch.randn(size, requires_grad=True) for size in sizes]
    output = module(*inputs)
    output.square().sum().backward()
    read = sum(x.numel() for x in (*inputs, *module.buffers()) if x.is_floating_point())
    narrow = sum(x.nbytes for x in module.buffers() if not x.is_floating_point())  # of the same size in every dtype
    for weight in module.parameters():
        assert weight.grad is not None
        read += int((weight.grad != 0).sum())
    shape = build.shape(BATCH, LENGTH, config=make_config(variant.config, options, name), form=variant.form)
    assert variant.min_bytes(shape, 2) == 2 * (read + output.numel()) + narrow


def test_one_rank_for_each_layer_counts_their_mean():
    build = BuildContext(embed_dim=32, num_heads=4, max_seq_len=LENGTH, num_layers=2)
    linformer = variants["linformer"]
    least = []
    for rank in (8, 16, (8, 16)):
        shape = build.shape(BATCH, LENGTH, config=make_config(linformer.config, {"proj_len": rank}, "linformer"))
        least.append(linformer.min_bytes(shape, 4))
    assert least[2] == (least[0] + least[1]) / 2
    assert least[1] - least[0] == 2 * LENGTH * 8 * 4
