"""Linformer against an independent implementation of the paper in NumPy, and the promises of each option."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attn_zoo.attention import (
    AbstractAttention,
    BuildContext,
    build_attention,
    build_mixer,
)
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.kernels.exact.row_chunks import CHUNK_SCORES
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_operations
from attn_zoo.registry import variants
from attn_zoo.variants.linformer import LinformerAttention, LinformerConfig, linformer_flops

N, K = 128, 10
BUILD = BuildContext(embed_dim=12, num_heads=3, max_seq_len=N, is_cross=True)
SHARINGS = ["none", "headwise", "key_value", "layerwise"]
SHORTS = ["slice", "slice_renormalise", "interpolate"]
WINDOWS = [{"projection": "mean_pool"}, {"projection": "conv"}, {"projection": "conv", "sharing": "none"}]
EVERY = [{"sharing": sharing, "short": short} for sharing in SHARINGS for short in SHORTS] + WINDOWS


def make(build: BuildContext = BUILD, **options: Any) -> LinformerAttention:
    torch.manual_seed(0)
    attention = build_attention("linformer", build, **{"proj_len": K, **options}).double()
    assert isinstance(attention, LinformerAttention)
    return attention


def heads(length: int, *, num_heads: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_heads, length, 4, generator=generator, dtype=torch.float64).requires_grad_()


def padding(length: int) -> Tensor:
    """Padding at the end of one sequence and in the middle of the other."""
    mask = torch.zeros(2, length, dtype=torch.bool)
    mask[0, max(1, 2 * length // 3) :] = True
    mask[1, length // 4 : length // 2] = True
    return mask


def paper_matrix(weight: np.ndarray | None, options: dict[str, Any], valid: np.ndarray, rank: int = K) -> np.ndarray:
    """Return E `[S, k]` of one head and sequence, written from the documented rules, one column at a time."""
    length, count = len(valid), int(valid.sum())
    if options.get("projection", "linear") != "linear":
        width = math.ceil(N / rank)
        matrix = np.zeros((length, math.ceil(length / width)))
        for column in range(matrix.shape[1]):
            members = [j for j in range(column * width, min(length, (column + 1) * width)) if valid[j]]
            for j in members:
                matrix[j, column] = 1 / len(members) if weight is None else weight[j - column * width]
        return matrix
    assert weight is not None  # only pooling has none
    short = options.get("short", "slice")
    matrix = weight[:length]
    if short == "interpolate":
        where = (np.cumsum(valid) - 1 + 0.5) * N / max(count, 1) - 0.5
        columns = [np.interp(where, np.arange(N), weight[:, m]) for m in range(weight.shape[1])]
        matrix = np.stack(columns, axis=1) * N / max(count, 1)
    elif short == "slice_renormalise":
        matrix = matrix * math.sqrt(N / max(count, 1))
    return np.asarray(matrix * valid[:, None])


def paper(attention: LinformerAttention, tensors: tuple[Tensor, ...], mask: Tensor | None, options: Any) -> np.ndarray:
    """Return softmax(Q (E^T K)^T / sqrt(D)) F^T V by loops over sequences and heads."""
    query, key, value = (x.detach().numpy() for x in tensors)
    out = np.zeros_like(query)
    key_len, group = key.shape[2], query.shape[1] // key.shape[1]
    for b in range(query.shape[0]):
        valid = np.ones(key_len, dtype=bool) if mask is None else ~mask[b].numpy()
        if not valid.any():
            continue
        for h in range(query.shape[1]):
            matrices = []
            for weight in attention.weights:
                array = None if weight is None else weight.detach().numpy()[h // group % weight.shape[0]]
                matrices.append(paper_matrix(array, options, valid, attention.proj_len))
            e, f = matrices
            scores = (
                query[b, h] @ (e.T @ np.where(valid[:, None], key[b, h // group], 0.0)).T / math.sqrt(query.shape[3])
            )
            if options.get("projection", "linear") != "linear":
                scores[:, ~(e != 0).any(0)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[b, h] = weights @ (f.T @ np.where(valid[:, None], value[b, h // group], 0.0))
    return out


@pytest.mark.parametrize("options", EVERY, ids=str)
@pytest.mark.parametrize("length", [1, 63, 100, N])
@pytest.mark.parametrize("is_padded", [False, True])
def test_fast_path_and_reference_equal_the_paper(options: dict[str, Any], length: int, is_padded: bool):
    attention = make(**options)
    tensors = (heads(17), heads(length, seed=1), heads(length, seed=2))
    mask = padding(length) if is_padded else None
    expected = paper(attention, tensors, mask, options)
    for compute in (attention, attention.reference):
        np.testing.assert_allclose(compute(*tensors, key_padding_mask=mask).detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_gradients_equal_those_of_the_reference(options: dict[str, Any]):
    attention = make(**options)
    tensors = (heads(17), heads(100, seed=1), heads(100, seed=2))
    leaves, mask = (*tensors, *attention.parameters()), padding(100)
    upstream = torch.randn(2, 3, 17, 4, dtype=torch.float64)
    got, want = (
        torch.autograd.grad(compute(*tensors, key_padding_mask=mask), leaves, upstream)
        for compute in (attention, attention.reference)
    )
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_grouped_key_value_heads_equal_the_paper(sharing: str):
    build = replace(BUILD, num_heads=6, num_kv_heads=2, embed_dim=24)
    attention = make(build, sharing=sharing)
    tensors = (heads(9, num_heads=6), heads(50, num_heads=2, seed=1), heads(50, num_heads=2, seed=2))
    np.testing.assert_allclose(
        attention(*tensors).detach(), paper(attention, tensors, None, {"sharing": sharing}), rtol=0, atol=1e-12
    )


def test_identity_matrices_give_full_attention():
    attention = make(proj_len=N)
    for weight in attention.parameters():
        weight.data.copy_(torch.eye(N))
    tensors = (heads(20), heads(N, seed=1), heads(N, seed=2))
    torch.testing.assert_close(attention(*tensors), softmax_attention(*tensors), rtol=1e-12, atol=1e-12)


def test_pooling_of_single_positions_is_full_attention_at_any_length_and_padding():
    attention = make(projection="mean_pool", proj_len=N)
    tensors, mask = (heads(20), heads(70, seed=1), heads(70, seed=2)), padding(70)
    expected = softmax_attention(*tensors, key_padding_mask=mask)
    torch.testing.assert_close(attention(*tensors, key_padding_mask=mask), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"sharing": "none"}, {"compress_key": [3, N, K], "compress_value": [3, N, K]}),
        ({"sharing": "headwise"}, {"compress_key": [1, N, K], "compress_value": [1, N, K]}),
        ({"sharing": "key_value"}, {"compress_key": [1, N, K]}),
        ({"sharing": "layerwise"}, {"compress_key": [1, N, K]}),
        ({"projection": "conv"}, {"compress_key": [1, 13], "compress_value": [1, 13]}),
        ({"projection": "conv", "sharing": "none"}, {"compress_key": [3, 13], "compress_value": [3, 13]}),
        ({"projection": "mean_pool"}, {}),
    ],
    ids=str,
)
def test_sharing_decides_the_parameters(options: dict[str, Any], shapes: dict[str, list[int]]):
    assert {name: list(value.shape) for name, value in make(**options).named_parameters()} == shapes


def test_layerwise_sharing_is_one_matrix_for_all_layers():
    build = replace(BUILD, num_layers=3)
    first, second, third = (make(build.at_layer(i), sharing="layerwise") for i in range(3))
    assert first.compress_key is second.compress_key is third.compress_key
    other_model = make(replace(build, shared={}), sharing="layerwise")
    assert other_model.compress_key is not first.compress_key
    own = [make(build.at_layer(i), sharing="key_value").compress_key for i in range(2)]
    assert own[0] is not own[1]


def test_each_layer_has_its_own_rank():
    build = replace(BUILD, num_layers=3)
    for layer, rank in enumerate((40, 20, 10)):
        attention = make(build.at_layer(layer), proj_len=(40, 20, 10))
        assert [list(weight.shape) for weight in attention.parameters()] == [[1, N, rank]] * 2
        tensors = (heads(5), heads(N, seed=1), heads(N, seed=2))
        np.testing.assert_allclose(attention(*tensors).detach(), paper(attention, tensors, None, {}), atol=1e-12)


def test_no_more_rows_are_made_than_positions():
    assert make(proj_len=1000).proj_len == N


@pytest.mark.parametrize("options", EVERY, ids=str)
@pytest.mark.parametrize("key_len", [6, 65, N])
def test_claims_know_the_length_that_matrices_and_windows_are_made_for(options: dict[str, Any], key_len: int):
    """A matrix has 10 columns where there are 6 tokens; a window has 13 positions."""
    attention, variant = make(**options), variants["linformer"]
    mixer: Any = build_mixer("linformer", BUILD, **{"proj_len": K, **options})
    projected = heads(40), heads(key_len, seed=1), heads(key_len, seed=2)
    hidden, context = torch.randn(2, 40, 12), torch.randn(2, key_len, 12)
    shape = BUILD.shape(2, 40, key_len, attention.config)
    for of_form, call in (
        (shape, lambda: attention(*projected)),
        (replace(shape, form="mixer"), lambda: mixer(hidden, context=context)),
    ):
        counted = count_operations(call)
        assert counted is not None
        assert counted.products == pytest.approx(variant.flops(of_form), rel=0.01)
    is_filter = options.get("projection") == "conv"
    num_read = sum((weight if is_filter else weight[:, :key_len]).numel() for weight in attention.parameters())
    assert variant.min_bytes(shape, 4) == shape.io_bytes(4) + 4 * num_read


def test_initial_matrices_keep_the_variance_of_the_tokens():
    build = replace(BUILD, max_seq_len=2048)
    for options, expected in (({"proj_len": 256}, 2048 / (2048 + 256)), ({"projection": "conv", "proj_len": 8}, 1.0)):
        attention = make(build, **options)
        tokens = torch.randn(64, 1, 2048, 4, dtype=torch.float64)
        compressed, _ = attention.compress(tokens, tokens, None)
        # A convolution has 256 weights only, so its own sample variance scatters by sqrt(2 / 256) * 0.63 or 6 %.
        assert compressed.var().item() == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("options", EVERY, ids=str)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e6])
def test_padding_never_matters(options: dict[str, Any], garbage: float):
    attention, mask = make(**options), padding(60)
    query, key, value = heads(17), heads(60, seed=1), heads(60, seed=2)
    expected = attention(query, key, value, key_padding_mask=mask)
    dirty = [x.detach().masked_fill(mask[:, None, :, None], garbage).requires_grad_() for x in (key, value)]
    out = attention(query, *dirty, key_padding_mask=mask)
    assert torch.equal(out, expected)
    for gradient in torch.autograd.grad(out.sum(), (query, *dirty, *attention.parameters())):
        assert gradient.isfinite().all()
    longer = torch.full((2, 3, 30, 4), garbage, dtype=torch.float64)
    mask = torch.cat([mask, torch.ones(2, 30, dtype=torch.bool)], 1)
    stretched = attention(query, *(torch.cat([x, longer], 2) for x in dirty), key_padding_mask=mask)
    torch.testing.assert_close(stretched, expected, rtol=1e-12, atol=1e-12)
    assert variants["linformer"].capabilities.is_padding_invariant


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_a_sequence_of_padding_only_gives_zeros_and_finite_gradients(options: dict[str, Any]):
    attention, mask = make(**options), padding(60)
    mask[0] = True
    tensors = (heads(17), heads(60, seed=1), heads(60, seed=2))
    for compute in (attention, attention.reference):
        out = compute(*tensors, key_padding_mask=mask)
        assert not out[0].any()
        gradients = torch.autograd.grad(out.square().sum(), (*tensors, *attention.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)
    alone = attention(*(x[1:] for x in tensors), key_padding_mask=mask[1:])
    torch.testing.assert_close(attention(*tensors, key_padding_mask=mask)[1:], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "capability", "reason"),
    [
        ({"is_causal": True}, "causal", "each compressed key mixes all positions"),
        ({"position": "alibi"}, "positions", "a compressed key has none"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(change: dict[str, Any], capability: str, reason: str):
    with pytest.raises(UnsupportedError, match=reason) as caught:
        build_mixer("linformer", replace(BUILD, is_cross=False, **change))
    assert caught.value.capability == capability


def test_decoding_and_longer_sequences_are_refused():
    attention = make(replace(BUILD, is_cross=False))
    with pytest.raises(UnsupportedError, match="a new position changes every compressed key"):
        attention.init_state(1)
    with pytest.raises(ValueError, match=f"at most max_seq_len = {N}"):
        attention(*[torch.zeros(1, 3, N + 1, 4, dtype=torch.float64)] * 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proj_len": 0}, "proj_len: expected at least 1"),
        ({"proj_len": ()}, "proj_len: expected at least 1"),
        ({"proj_len": (8, 4)}, "proj_len: expected one rank for each of 3 layers; got 2"),
        ({"proj_len": (8, 4, 2), "sharing": "layerwise"}, "proj_len: all layers share one matrix"),
        ({"proj_len": "256"}, "proj_len"),
        ({"sharing": "headwise", "projection": "mean_pool", "short": "interpolate"}, "short: windows of mean_pool"),
        ({"projection": "conv", "short": "slice_renormalise"}, "short: windows of conv"),
        ({"projection": "mean_pool", "sharing": "none"}, "sharing: mean_pool has no weights"),
        ({"sharing": "head"}, "sharing"),
        ({"rank": 5}, "unknown option 'rank'"),
    ],
    ids=str,
)
def test_impossible_options_are_explained(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_attention("linformer", replace(BUILD, num_layers=3), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_padded", [False, True])
def test_working_precision_errs_at_most_twice_as_much_as_the_plain_computation(dtype: torch.dtype, is_padded: bool):
    build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=4096)
    torch.manual_seed(0)
    attention: AbstractAttention = build_attention("linformer", build, proj_len=32).to(dtype)
    truth = build_attention("linformer", build, proj_len=32).double()
    truth.load_state_dict(attention.state_dict())
    tensors = [torch.randn(2, 2, 3000, 16).to(dtype).requires_grad_() for _ in range(3)]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    mask, upstream = padding(3000) if is_padded else None, torch.randn(2, 2, 3000, 16).to(dtype)

    def run(module: AbstractAttention, compute: Any, inputs: list[Tensor], weigh: Tensor) -> tuple[Tensor, ...]:
        out = compute(*inputs, key_padding_mask=mask)
        return (out, *torch.autograd.grad(out, (*inputs, *module.parameters()), weigh))

    exact = run(truth, truth.reference, wide, upstream.double())
    fast, plain = (run(attention, compute, tensors, upstream) for compute in (attention, attention.reference))
    for mine, theirs, right in zip(fast, plain, exact, strict=True):
        error, allowed = ((x.double() - right).abs().max().item() for x in (mine, theirs))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * right.abs().max().item()


def test_dropout_drops_weights_in_training_only():
    attention = make(replace(BUILD, dropout_p=0.4), projection="mean_pool")
    tensors = (heads(500 // 4), heads(N, seed=1), torch.ones(2, 3, N, 4, dtype=torch.float64))
    attention.eval()
    torch.testing.assert_close(attention(*tensors), torch.ones(2, 3, 125, 4, dtype=torch.float64))
    attention.train()
    sums = attention(*tensors)  # of the weights that are left, scaled up
    assert sums.std() > 0.1
    assert sums.mean().item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_scores_are_never_stored(dropout_p: float):
    length, rank = 4096, 64
    build = BuildContext(embed_dim=4, num_heads=2, max_seq_len=length, dropout_p=dropout_p)
    attention = build_attention("linformer", build, proj_len=rank)
    sizes = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    inputs = [torch.randn(16, 2, length, 2, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attention(*inputs).sum().backward()
    # Dropout computes scores, a bounded number at a time, and again in the backward pass.
    allowed = CHUNK_SCORES if dropout_p else max(inputs[0].numel(), length * rank)
    assert max(sizes) <= allowed < 16 * 2 * length * rank


@pytest.mark.parametrize("options", [{}, {"sharing": "none"}, {"projection": "conv"}], ids=str)
def test_formula_counts_the_operations_that_run(options: dict[str, Any]):
    build = BuildContext(embed_dim=24, num_heads=6, num_kv_heads=3, max_seq_len=N)
    attention = make(build, **options)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        rows = [compressed.shape[2] for compressed in attention.compress(heads(N), heads(N), None)]
    products = 2 * (2 * 6 * N * 4) * sum(rows)  # the fused kernel is not counted by torch
    assert linformer_flops(build.shape(2, N, config=attention.config)) == counter.get_total_flops() + products


def test_paths_are_noted_and_claims_are_there():
    with recording() as paths:
        make()(heads(4), heads(20), heads(20))
    assert paths == ["compress.chunked", "sdpa.flash"]
    variant = variants["linformer"]
    assert (variant.complexity.time_exponent, variant.complexity.memory_exponent) == (1, 1)
    assert LinformerConfig().proj_len == 256


def test_under_autocast_the_mixer_computes_in_its_type(monkeypatch):
    """A norm hands on float32; on a GPU compression and attention would take slower kernels for it."""
    seen: list[Tensor] = []

    def attend(_self, *tensors):
        seen.extend(tensors[:3])
        return tensors[0]

    monkeypatch.setattr(LinformerAttention, "attend", attend)
    mixer = build_mixer("linformer", BuildContext(embed_dim=32, num_heads=2, max_seq_len=64), proj_len=8)
    with torch.autocast("cpu", torch.bfloat16):
        mixer(torch.randn(2, 64, 32))
    assert {x.dtype for x in seen} == {torch.bfloat16}


def test_gradients_of_functions_agree_with_autograd():
    mixer = build_mixer("linformer", BuildContext(embed_dim=12, num_heads=3, max_seq_len=1024), proj_len=64)
    hidden = torch.randn(2, 1024, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def loss(hidden: Tensor) -> Tensor:
        output: Tensor = mixer(hidden)
        return output.sin().sum()

    torch.testing.assert_close(torch.func.grad(loss)(hidden.detach()), *torch.autograd.grad(loss(hidden), hidden))
