"""Linear attention: the equations term by term, the chunked causal form, its memory, its state, what it refuses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.decode import state_bytes
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_flops
from attn_zoo.variants import linear_attention
from attn_zoo.variants.linear_attention import CHUNK_LEN, feature_map, linear_attention_flops

BATCH, HEADS, DIM = 2, 2, 4


def make(is_causal: bool = False, *, build: dict[str, Any] | None = None, **options: Any) -> AbstractAttention:
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 4096, **(build or {})}
    return build_attention("linear_attention", BuildContext(is_causal=is_causal, **sizes), **options).double().eval()


def draw(length: int, key_len: int | None = None, num_kv_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    key_len = length if key_len is None else key_len
    query, key, value = (
        torch.randn(BATCH, heads, tokens, DIM, generator=generator, dtype=torch.float64)
        for heads, tokens in ((HEADS, length), (num_kv_heads, key_len), (num_kv_heads, key_len))
    )
    return query, key, value


def padding_for(key_len: int) -> Tensor:
    mask = torch.zeros(BATCH, key_len, dtype=torch.bool)
    mask[0, key_len // 2 :] = True
    mask[0, 0] = key_len > 2
    mask[1] = True
    return mask


def phi(x: float) -> float:
    return x + 1.0 if x > 0 else math.exp(x)


def by_the_definition(inputs: tuple[Tensor, ...], is_causal: bool, padding: Tensor | None) -> Tensor:
    """Write equation 4 out, query by query, key by key, feature by feature."""
    query, key, value = inputs
    output, offset = torch.zeros_like(query), key.shape[2] - query.shape[2]
    groups = HEADS // key.shape[1]
    for entry in range(BATCH):
        for head in range(HEADS):
            for i in range(query.shape[2]):
                total, weighted = 1e-6, torch.zeros(DIM, dtype=torch.float64)
                for j in range(key.shape[2]):
                    if (is_causal and j > i + offset) or (padding is not None and padding[entry, j]):
                        continue
                    pairs = zip(query[entry, head, i].tolist(), key[entry, head // groups, j].tolist(), strict=True)
                    weight = sum(phi(q) * phi(k) for q, k in pairs)
                    total += weight
                    weighted += weight * value[entry, head // groups, j]
                output[entry, head, i] = weighted / total
    return output


@pytest.mark.parametrize(("length", "key_len"), [(1, 1), (7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
def test_both_paths_are_the_definition(
    length: int, key_len: int, is_causal: bool, has_padding: bool, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(linear_attention, "CHUNK_LEN", 3)
    is_cross = length != key_len and not is_causal
    module = make(is_causal, build={"is_cross": is_cross, "num_kv_heads": num_kv_heads})
    inputs, padding = draw(length, key_len, num_kv_heads), padding_for(key_len) if has_padding else None
    expected = by_the_definition(inputs, is_causal, padding)
    for run in (module, module.reference):
        torch.testing.assert_close(run(*inputs, key_padding_mask=padding), expected, rtol=0, atol=1e-13)


def test_the_reference_reads_many_tokens_in_float16():
    inputs = [torch.full((1, HEADS, 2000, DIM), 3.0, dtype=torch.float16) for _ in range(3)]  # weights of 64
    output = make().reference(*inputs)
    assert output.dtype == torch.float16
    torch.testing.assert_close(output, inputs[2])


@pytest.mark.parametrize("length", [1, CHUNK_LEN - 1, CHUNK_LEN, CHUNK_LEN + 1, 3 * CHUNK_LEN, 200])
@pytest.mark.parametrize("past", [0, 5, 70, -3])
@pytest.mark.parametrize("has_padding", [False, True])
def test_chunked_causal_form_equals_the_dense_one_with_gradients(length: int, past: int, has_padding: bool):
    key_len = max(1, length + past)
    module, padding = make(True), padding_for(key_len) if has_padding else None
    weights = torch.randn(BATCH, HEADS, length, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for run in (module, module.reference):
        leaves = [x.requires_grad_() for x in draw(length, key_len)]
        output = run(*leaves, key_padding_mask=padding)
        results.append([output, *torch.autograd.grad(output, leaves, weights)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11)


def test_gradients_agree_with_finite_differences():
    module = make(True)
    leaves = tuple(x[:1, :, :5].clone().requires_grad_() for x in draw(5))
    assert torch.autograd.gradcheck(lambda *x: module(*x), leaves)


def test_feature_map_is_positive_and_smooth_at_zero():
    x = torch.linspace(-20, 20, 41, dtype=torch.float64, requires_grad=True)
    features = feature_map(x)
    torch.testing.assert_close(features, torch.tensor([phi(value) for value in x.tolist()], dtype=torch.float64))
    (slope,) = torch.autograd.grad(features.sum(), x)
    assert features.min() > 0
    assert slope[20] == 1.0


def test_it_is_not_softmax_attention():
    inputs = draw(50)
    difference = (make()(*inputs) - softmax_attention(*inputs)).abs().max()
    assert difference > 0.05
    assert type(make().config).budgets(50) == ()


class _Largest(TorchDispatchMode):
    """Remember how many numbers the largest tensor has that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_flatten(result)[0] if isinstance(x, Tensor))])
        return result


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tensor_grows_faster_than_the_length(is_causal: bool):
    module, largest = make(is_causal), {}
    for length in (1024, 2048):
        leaves = [x.requires_grad_() for x in draw(length)]
        with _Largest() as watch:
            module(*leaves).sum().backward()
        largest[length] = watch.numel
    assert largest[2048] == 2 * largest[1024]
    assert largest[2048] <= BATCH * HEADS * 2048 * max(DIM, CHUNK_LEN)


def test_decode_state_does_not_grow_and_is_wide():
    module, inputs = make(True, build={"num_kv_heads": 1}), draw(9, num_kv_heads=1)
    state = module.init_state(BATCH, dtype=torch.float64)
    expected, sizes = module(*inputs), []
    for i in range(9):
        query, key, value = (x[:, :, i : i + 1] for x in inputs)
        row, state = module.step(query, key, value, state)
        torch.testing.assert_close(row[:, :, 0], expected[:, :, i], rtol=0, atol=1e-13)
        sizes.append(state_bytes(state))
    assert set(sizes) == {BATCH * 1 * DIM * (DIM + 1) * 8}
    assert state_bytes(module.init_state(1, dtype=torch.bfloat16)) == DIM * (DIM + 1) * 4
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


def test_flops_are_those_of_the_products_that_run():
    for is_causal in (False, True):
        module = make(is_causal)
        shape = module.build.shape(BATCH, 2 * CHUNK_LEN, config=module.config)
        counted = count_flops(partial(module, *draw(2 * CHUNK_LEN)))
        assert counted == linear_attention_flops(shape)  # the empty past of the causal form counts as nothing


def test_which_path_ran():
    for is_causal, name in ((False, "linear.sum"), (True, "linear.chunked")):
        with recording() as paths:
            make(is_causal)(*draw(3))
        assert paths == [name]


def test_refusals():
    with pytest.raises(UnsupportedError, match="no exponentials of scores"):
        make(build={"position": "alibi"})
    with pytest.raises(ConfigError, match="eps: expected more than 0"):
        make(eps=0.0)


def test_mixer_trains_in_bfloat16():
    mixer = build_mixer("linear_attention", BuildContext(embed_dim=8, num_heads=2, max_seq_len=80, is_causal=True))
    output = mixer.bfloat16()(torch.randn(1, 80, 8).bfloat16())
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
