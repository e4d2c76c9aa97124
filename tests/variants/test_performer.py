"""Performer: its estimate term by term and in the mean, the rows it draws, the chunked causal form, its state."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.decode import state_bytes
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_flops
from attn_zoo.variants import performer
from attn_zoo.variants.performer import CHUNK_LEN, Performer, draw_rows, performer_flops

BATCH, HEADS, DIM, FEATURES = 2, 2, 4, 6


def make(is_causal: bool = False, *, build: dict[str, Any] | None = None, **options: Any) -> Performer:
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 4096, **(build or {})}
    context = BuildContext(is_causal=is_causal, **sizes)
    module = build_attention("performer", context, **({"num_features": FEATURES} | options)).double().eval()
    assert isinstance(module, Performer)
    return module


def draw(length: int, key_len: int | None = None, num_kv_heads: int = HEADS, dim: int = DIM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    key_len = length if key_len is None else key_len
    sizes = ((HEADS, length), (num_kv_heads, key_len), (num_kv_heads, key_len))
    return [torch.randn(BATCH, *size, dim, generator=generator, dtype=torch.float64) for size in sizes]


def padding_for(key_len: int) -> Tensor:
    mask = torch.zeros(BATCH, key_len, dtype=torch.bool)
    mask[0, key_len // 2 :] = True
    mask[0, 0] = key_len > 2
    mask[1] = True
    return mask


def weight_of(module: Performer, query: list[float], key: list[float]) -> float:
    """Write equations 5 and 7 out, feature by feature, for one query and one key."""
    scale = DIM**-0.25
    total = 0.0
    for row in module.rows.double().tolist():
        q, k = (scale * sum(w * x for w, x in zip(row, each, strict=True)) for each in (query, key))
        if module.config.kernel == "relu":
            total += (max(q, 0.0) + 1e-3) * (max(k, 0.0) + 1e-3)
        else:
            q, k = (p - scale**2 * sum(x * x for x in each) / 2 for p, each in ((q, query), (k, key)))
            total += math.exp(q) * math.exp(k)
    return total


def by_the_definition(module: Performer, inputs: list[Tensor], padding: Tensor | None) -> Tensor:
    query, key, value = inputs
    output, offset = torch.zeros_like(query), key.shape[2] - query.shape[2]
    groups = HEADS // key.shape[1]
    for entry in range(BATCH):
        for head in range(HEADS):
            for i in range(query.shape[2]):
                total, weighted = 0.0, torch.zeros(DIM, dtype=torch.float64)
                for j in range(key.shape[2]):
                    if (module.build.is_causal and j > i + offset) or (padding is not None and padding[entry, j]):
                        continue
                    pair = query[entry, head, i].tolist(), key[entry, head // groups, j].tolist()
                    weight = weight_of(module, *pair)
                    total += weight
                    weighted += weight * value[entry, head // groups, j]
                if total:
                    output[entry, head, i] = weighted / total
    return output


@pytest.mark.parametrize(("length", "key_len"), [(1, 1), (5, 9), (9, 5)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_both_paths_are_the_definition(
    length: int, key_len: int, is_causal: bool, has_padding: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(performer, "CHUNK_LEN", 3)
    is_cross = length != key_len and not is_causal
    module = make(is_causal, build={"is_cross": is_cross, "num_kv_heads": 1}, kernel=kernel)
    inputs, padding = draw(length, key_len, 1), padding_for(key_len) if has_padding else None
    expected = by_the_definition(module, inputs, padding)
    for run in (module, module.reference):
        torch.testing.assert_close(run(*inputs, key_padding_mask=padding), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_the_definition(kernel: str, is_causal: bool):
    length = 2 * CHUNK_LEN + 3
    module, padding = make(is_causal, kernel=kernel), padding_for(length)
    upstream = torch.randn(BATCH, HEADS, length, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for run in (module, module.reference):
        leaves = [x.requires_grad_() for x in draw(length)]
        results.append(torch.autograd.grad(run(*leaves, key_padding_mask=padding), leaves, upstream))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11)
    if kernel == "softmax":  # relu has corners
        short = tuple(x[:1, :, :5].clone().requires_grad_() for x in draw(5))
        assert torch.autograd.gradcheck(lambda *x: module(*x), short)


def test_the_mean_weight_is_that_of_softmax():
    """Equation 5: the expectation of a product of features is exp(q k / sqrt(D))."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, generator=generator, dtype=torch.float64) * 8**-0.25 / 2.5
    rows = torch.cat([draw_rows(4096, 8, seed) for seed in range(16)])
    features = [(rows @ x - x.square().sum() / 2).exp() for x in (query, key)]
    found = features[0] * features[1]
    error = found.std() / len(rows) ** 0.5
    assert abs(found.mean() - (query @ key).exp()) < 4 * error
    assert error < 0.02 < abs((query @ key).exp() - 1.0)


def test_rows_are_orthogonal_in_blocks_and_as_long_as_normal_draws():
    rows = draw_rows(3 * 16 - 5, 16, 7)
    assert rows.shape == (43, 16)
    for start in (0, 16, 32):
        block = rows[start : start + 16]
        products = block @ block.mT
        torch.testing.assert_close(products, torch.diag(products.diagonal()), rtol=0, atol=1e-12)
    many = torch.cat([draw_rows(64, 16, seed) for seed in range(100)])
    assert many.square().sum(-1).mean() == pytest.approx(16, rel=0.03)
    assert many.square().sum(-1).std() == pytest.approx(32**0.5, rel=0.05), "chi-squared of 16 degrees"
    assert many.mean(0).abs().max() < 5 / 6400**0.5
    assert torch.equal(draw_rows(43, 16, 7), rows)
    assert not torch.equal(draw_rows(43, 16, 8), rows)


def test_layers_differ_and_rows_are_stored_with_the_weights():
    first, second = (make(build={"layer_index": layer}) for layer in (0, 1))
    assert not torch.equal(first.rows, second.rows)
    assert list(first.state_dict()) == ["rows"]
    assert not list(first.parameters())


def test_more_rows_come_nearer_to_softmax_attention():
    query, key, value = draw(50)
    inputs = query / 2, key / 2, value
    expected = softmax_attention(*inputs)

    def error(count: int) -> float:
        outputs = [make(build={"seed": seed}, num_features=count)(*inputs) for seed in range(8)]
        return float(torch.stack([output - expected for output in outputs]).square().mean().sqrt())

    errors = [error(count) for count in (16, 256, 4096)]
    assert errors[0] > 3 * errors[1] > 9 * errors[2], "a quarter each, as 1 / sqrt(m)"
    relu = make(num_features=4096, kernel="relu")(*inputs)
    assert (relu - expected).square().mean().sqrt() > 3 * errors[2], "another attention, not an estimate"


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dim", [4, 64, 256])
def test_no_feature_overflows_and_a_query_may_be_of_any_size(size: float, dim: int):
    """A query's factor cancels; what a key may reach at most is the square of the longest row."""
    module = make(build={"embed_dim": HEADS * dim}, num_features=32).float()
    query, key, value = (x.float() for x in draw(20, dim=dim))
    longest = module.rows[module.rows.square().sum(-1).argmax()] * dim**0.25
    key[0, 0, 0] = longest  # the key that its feature is largest at
    leaves = [(size * query).requires_grad_(), key.requires_grad_(), value.requires_grad_()]
    output = module(*leaves)
    assert output.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), leaves))
    assert (output.abs().amax(2) <= value.abs().amax(2) * 1.001).all(), "a mean of values"


@pytest.mark.parametrize("size", [6.0, 30.0])
def test_a_row_is_a_mean_of_values_however_large_queries_and_keys_are(size: float):
    """Features of such keys are below the smallest number of float32, as those of the padding are."""
    module = make(build={"embed_dim": HEADS * 64}, num_features=256).float()
    query, key, value = (x.float() for x in draw(100, dim=64))
    padding = padding_for(100)
    leaves = [size * query, size * key, torch.ones_like(value)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    for run in (module, module.reference):
        output = run(*leaves, key_padding_mask=padding)
        expected = (~padding.all(1)).float()[:, None, None, None].expand_as(output)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), leaves))


def test_decode_state_does_not_grow_and_is_wide():
    module, inputs = make(True, build={"num_kv_heads": 1}), draw(9, num_kv_heads=1)
    state = module.init_state(BATCH, dtype=torch.float64)
    expected, sizes = module(*inputs), []
    for i in range(9):
        query, key, value = (x[:, :, i : i + 1] for x in inputs)
        row, state = module.step(query, key, value, state)
        torch.testing.assert_close(row[:, :, 0], expected[:, :, i], rtol=0, atol=1e-13)
        sizes.append(state_bytes(state))
    assert set(sizes) == {BATCH * FEATURES * (DIM + 1) * 8}
    read, _ = module.prefill(*inputs)
    torch.testing.assert_close(read, expected, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="one new position"):
        module.step(inputs[0], key, value, state)
    with pytest.raises(UnsupportedError, match="later tokens"):
        make().init_state(1)


def test_dropout_drops_keys_for_all_queries_alike():
    module = make(build={"dropout_p": 0.5}).train()
    query, key, _ = draw(6)
    identity = torch.eye(6, DIM, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)
    dropped = module(query, key, identity) == 0  # feature d shows the weight of key d
    assert dropped.any()
    assert not dropped.all()
    assert torch.equal(dropped.all(2), dropped.any(2))


@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
def test_flops_are_those_of_the_products_that_run(num_kv_heads: int):
    for is_causal in (False, True):
        module = make(is_causal, build={"num_kv_heads": num_kv_heads})
        shape = module.build.shape(BATCH, 2 * CHUNK_LEN, config=module.config)
        counted = count_flops(partial(module, *draw(2 * CHUNK_LEN, num_kv_heads=num_kv_heads)))
        assert counted == performer_flops(shape)


def test_which_path_ran():
    for is_causal, name in ((False, "performer.sum"), (True, "performer.chunked")):
        with recording() as paths:
            make(is_causal)(*draw(3))
        assert paths == [name]


def test_refusals():
    with pytest.raises(UnsupportedError, match="does not split into a factor"):
        make(build={"position": "alibi"})
    with pytest.raises(ConfigError, match="num_features: expected at least 1"):
        make(num_features=0)


def test_mixer_trains_in_bfloat16():
    mixer = build_mixer("performer", BuildContext(embed_dim=8, num_heads=2, max_seq_len=80, is_causal=True))
    output = mixer.bfloat16()(torch.randn(1, 80, 8).bfloat16())
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
