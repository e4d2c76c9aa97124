"""LARA: its equations term by term, its segments, what its samples estimate and how well, its numerics, its costs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_flops
from attn_zoo.variants.lara import LEAST_SHARE, Lara, Projection, landmarks, lara_bytes, lara_flops, segments

BATCH, HEADS, DIM = 2, 2, 4
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"query_weight": 0.0},
    {"landmarks": "pooled", "query_weight": 3.0},
    {"samples": "drawn"},
    {"samples": "drawn", "landmarks": "pooled", "query_weight": 0.0},
)


def make(*, build: dict[str, Any] | None = None, **options: Any) -> Lara:
    """Return a module whose weights are not where they start, in float64."""
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 4096, **(build or {})}
    module = build_attention("lara", BuildContext(**sizes), **({"num_landmarks": 4} | options)).double().eval()
    assert isinstance(module, Lara)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.5)
    return module


def draw(length: int, num_kv_heads: int = HEADS, dim: int = DIM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    heads = (HEADS, num_kv_heads, num_kv_heads)
    return [torch.randn(BATCH, count, length, dim, generator=generator, dtype=torch.float64) for count in heads]


def padding_for(length: int) -> Tensor:
    """Return a mask with gaps, which leaves the second sequence whole."""
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, length - length // 3 :] = True
    mask[0, 1:2] = length > 4
    return mask


def mark(projection: Any, token: Tensor) -> Tensor:
    """Return LN(W x + b) of one token, or the token where there is no W."""
    if not isinstance(projection, Projection):
        return token
    row = projection.linear.weight @ token + projection.linear.bias
    row = (row - row.mean()) / (row.var(correction=0) + projection.norm.eps).sqrt()
    return row * projection.norm.weight + projection.norm.bias


def in_segments(tokens: list[Tensor], count: int) -> list[Tensor]:
    """Return the means of `count` runs, the last ones longer by one, or the tokens where these are fewer."""
    if len(tokens) <= count:
        return tokens
    width, longer = divmod(len(tokens), count)
    widths = [width] * (count - longer) + [width + 1] * longer
    starts = [sum(widths[:at]) for at in range(count)]
    return [torch.stack(tokens[s : s + w]).mean(0) for s, w in zip(starts, widths, strict=True)]


def density(sample: Tensor, centre: Tensor) -> float:
    return math.exp(-float((sample - centre).square().sum()) / 2)


def xi(token: Tensor, sample: Tensor) -> float:
    return math.exp(float(sample @ token) - float(token.square().sum()) / 2)


def by_the_definition(module: Lara, inputs: list[Tensor], padding: Tensor | None) -> Tensor:
    """Write the equations out, sample by sample and pair by pair, over the tokens that are no padding."""
    query, key, value = inputs
    output, config, scale = torch.zeros_like(query), module.config, DIM**-0.25
    nowhere = torch.zeros(DIM, dtype=torch.float64)
    for entry in range(BATCH):
        kept = [i for i in range(query.shape[2]) if padding is None or not padding[entry, i]]
        for head in range(HEADS):
            group = head // (HEADS // key.shape[1])
            q, k, v = query[entry, head], key[entry, group], value[entry, group]
            q_marks, k_marks = (
                [scale * each for each in in_segments([mark(projection, x[i]) for i in kept], config.num_landmarks)]
                for projection, x in ((module.query_mark, q), (module.key_mark, k))
            )
            centres = [one + other for one, other in zip(q_marks, k_marks, strict=True)]
            samples = centres
            if module.noise is not None:
                samples = [centre + module.noise[head, c] for c, centre in enumerate(centres)]
            q, k, number = scale * q, scale * k, range(len(samples))
            near = {(n, c): math.exp(float(q[n] @ q_marks[c])) for n in kept for c in number}
            t = {(n, c): near[n, c] / sum(near[i, c] for i in kept) for n in kept for c in number}
            for n in kept:
                mean, total, weighted = sum(t[n, c] for c in number) / len(number), 0.0, nowhere
                for c, w in enumerate(samples):
                    share = density(w, centres[c]) / sum(density(w, centre) for centre in centres)
                    share = max(share + config.query_weight * (t[n, c] - mean), LEAST_SHARE)
                    weight = share * xi(q[n], w) * density(w, nowhere) / density(w, centres[c])
                    for m in kept:
                        total += weight * xi(k[m], w)
                        weighted = weighted + weight * xi(k[m], w) * v[m]
                output[entry, head, n] = weighted / total
    return output


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("length", [1, 3, 4, 11])
@pytest.mark.parametrize("has_padding", [False, True])
@torch.no_grad()
def test_both_paths_are_the_definition(options: dict[str, Any], length: int, has_padding: bool):
    num_kv_heads = 1 if length == 4 else HEADS
    module = make(build={"num_kv_heads": num_kv_heads}, **options)
    inputs, padding = draw(length, num_kv_heads), padding_for(length) if has_padding else None
    expected = by_the_definition(module, inputs, padding)
    for run in (module, module.reference):
        output = run(*inputs, key_padding_mask=padding)
        assert output.isfinite().all()
        if padding is not None:  # a padded query is nobody's
            output = output.masked_fill(padding[:, None, :, None], 0.0)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("length", [2, 30, 75])
@pytest.mark.parametrize("has_padding", [False, True])
def test_gradients_of_both_paths_agree(options: dict[str, Any], length: int, has_padding: bool):
    module, padding = make(num_landmarks=7, **options), padding_for(length) if has_padding else None
    leaves = [*(x.requires_grad_() for x in draw(length)), *module.parameters()]
    upstream = torch.randn(BATCH, HEADS, length, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for run in (module, module.reference):
        output = run(*leaves[:3], key_padding_mask=padding)
        results.append([output, *torch.autograd.grad(output, leaves, upstream)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_agree_with_finite_differences(options: dict[str, Any]):
    module, padding = make(num_landmarks=3, **options), padding_for(6)[:1]
    short = tuple(x[:1, :, :6].clone().requires_grad_() for x in draw(6))
    assert torch.autograd.gradcheck(lambda *x: module(*x, key_padding_mask=padding), short, fast_mode=True)


@pytest.mark.parametrize(("length", "count"), [(1, 1), (3, 5), (12, 4), (13, 4), (15, 4), (64, 63)])
def test_segments_are_runs_of_like_length_whatever_the_padding(length: int, count: int):
    at = torch.randperm(2 * length, generator=torch.Generator().manual_seed(length))[:length].sort().values
    padding = torch.ones(1, 2 * length, dtype=torch.bool)
    padding[0, at] = False
    places = segments(padding, count)[0]
    assert not places[padding[0]].any()
    assert (places[at].sum(1) == 1).all(), "each token is in one"
    place = places[at].int().argmax(1)
    assert (place.diff() >= 0).all(), "in order"
    sizes = places.sum(0)
    assert int((sizes > 0).sum()) == min(length, count)
    assert int(sizes.max()) - int(sizes[sizes > 0].min()) <= 1
    tokens = torch.randn(1, 2, length, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scattered = torch.zeros(1, 2, 2 * length, 3, dtype=torch.float64)
    scattered[:, :, at] = tokens
    found = landmarks(scattered, count, places[None])
    expected = landmarks(tokens, min(count, length), None)
    torch.testing.assert_close(found[:, :, : expected.shape[2]], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS)
def test_padding_anywhere_changes_nothing(options: dict[str, Any]):
    module, inputs = make(**options), draw(10)
    expected = module(*inputs)
    for length, start in ((11, 1), (25, 0), (25, 9)):
        longer = [torch.full((BATCH, HEADS, length, DIM), float("nan"), dtype=torch.float64) for _ in inputs]
        for whole, part in zip(longer, inputs, strict=True):
            whole[:, :, start : start + 10] = part
        padding = torch.ones(BATCH, length, dtype=torch.bool)
        padding[:, start : start + 10] = False
        output = module(*longer, key_padding_mask=padding)
        assert output.isfinite().all()
        torch.testing.assert_close(output[:, :, start : start + 10], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_sequence_of_padding_only_is_zero_with_finite_gradients(options: dict[str, Any]):
    module = make(**options).float()
    leaves = [x.float().requires_grad_() for x in draw(10)]
    padding = torch.zeros(BATCH, 10, dtype=torch.bool)
    padding[1] = True
    for run in (module, module.reference):
        output = run(*leaves, key_padding_mask=padding)
        assert torch.equal(output[1], torch.zeros_like(output[1]))
        torch.testing.assert_close(output[:1], run(*(x[:1] for x in leaves)), rtol=0, atol=1e-5)
        grads = torch.autograd.grad(output.square().sum(), [*leaves, *module.parameters()])
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("query_weight", [0.0, 1.0])
@torch.no_grad()
def test_sums_over_samples_have_the_mean_of_exact_sums(query_weight: float):
    """Many heads see the same tokens, each with draws of its own: both sums of the quotient are without bias."""
    num_heads, length, dim = 8192, 5, 2
    build = {"num_heads": num_heads, "embed_dim": num_heads * dim}
    module = make(build=build, num_landmarks=2, landmarks="pooled", samples="drawn", query_weight=query_weight)
    generator = torch.Generator().manual_seed(3)
    query, key, value = torch.randn(3, length, dim, generator=generator, dtype=torch.float64)
    query, key = 0.6 * query, 0.6 * key
    queries, keys, values = (x.expand(1, num_heads, -1, -1) for x in (query, key, value))
    weights, summaries = module._sums(queries, keys, values, None)
    samples = (weights - query.square().sum(-1, keepdim=True) / 2 / dim**0.5).exp()  # [1, H, L, C]
    exact = (query @ key.mT / dim**0.5).exp()
    for found, expected in (
        (samples.sum(-1)[0], exact.sum(-1)),
        ((samples @ summaries)[0], exact @ value),
    ):
        error = found.std(0) / num_heads**0.5
        assert ((found.mean(0) - expected).abs() < 4 * error).all()
        assert (error < 0.015 * exact.sum(-1).max()).all()
    assert (exact.sum(-1) - length).abs().max() > 0.3, "far from weights that are all alike"


@torch.no_grad()
def test_more_drawn_samples_come_nearer_to_softmax_attention():
    length = 512
    query, key, value = (x[:1] for x in draw(length))
    inputs = query / 2, key / 2, value
    expected = softmax_attention(*inputs)

    def error(count: int) -> float:
        options: dict[str, Any] = {"num_landmarks": count, "landmarks": "pooled", "samples": "drawn"}
        outputs = [make(build={"seed": seed}, **options)(*inputs) for seed in range(6)]
        return float(torch.stack([output - expected for output in outputs]).square().mean().sqrt())

    errors = [error(count) for count in (4, 32, length)]
    assert errors[0] > 1.7 * errors[1] > 1.7 * 1.7 * errors[2], errors
    assert errors[2] < float((value.mean(2, keepdim=True) - expected).square().mean().sqrt()) / 2


@torch.no_grad()
def test_samples_at_the_means_come_nearer_with_their_number():
    inputs = draw(96, dim=16)
    expected = softmax_attention(*inputs)

    def error(count: int) -> float:
        module = make(build={"embed_dim": 16 * HEADS}, num_landmarks=count, landmarks="pooled")
        return float((module(*inputs) - expected).norm() / expected.norm())

    errors = [error(count) for count in (2, 12, 96)]
    assert errors[0] > 1.02 * errors[1] > 1.05 * errors[2], errors
    no_attention = float((inputs[2].mean(2, keepdim=True) - expected).norm() / expected.norm())
    assert errors[2] < no_attention


def test_layers_and_seeds_differ_and_draws_are_stored_with_the_weights():
    noises = []
    for build in ({}, {"layer_index": 1}, {"seed": 1}, {}):
        noise = make(build=build, samples="drawn", landmarks="pooled").noise
        assert noise is not None
        noises.append(noise)
    first, other, second, again = noises
    assert first.shape == (HEADS, 4, DIM)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, second)
    assert list(make(samples="drawn", landmarks="pooled").state_dict()) == ["noise"]
    assert not make(landmarks="pooled").state_dict()
    assert len(make().state_dict()) == len(list(make().parameters())) == 8


def test_nothing_is_drawn_in_a_call():
    for samples in ("mean", "drawn"):
        module, inputs = make(samples=samples).train(), draw(9)
        before = torch.random.get_rng_state()
        assert torch.equal(module(*inputs), module(*inputs))
        assert torch.equal(module(*inputs), module.eval()(*inputs))
        assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("samples", ["mean", "drawn"])
@pytest.mark.parametrize("landmarks_of", ["pooled", "projected"])
def test_a_row_is_a_mean_of_values_whatever_the_size_of_queries_and_keys(size: float, samples: str, landmarks_of: str):
    """Nearly all of xi is then far below the smallest number of float32, or far above the largest."""
    module = make(build={"embed_dim": HEADS * 64}, num_landmarks=8, samples=samples, landmarks=landmarks_of).float()
    query, key, value = (x.float() for x in draw(50, dim=64))
    padding = padding_for(50)
    leaves = [(size * query).requires_grad_(), (size * key).requires_grad_(), torch.ones_like(value).requires_grad_()]
    for run in (module, module.reference):
        output = run(*leaves, key_padding_mask=padding)
        torch.testing.assert_close(output, torch.ones_like(output), rtol=0, atol=1e-5)
        grads = torch.autograd.grad(output.sum(), [*leaves, *module.parameters()])
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_float32_and_16_bits_are_as_good_as_their_inputs(options: dict[str, Any]):
    module, inputs = make(build={"embed_dim": HEADS * 16}, num_landmarks=6, **options), draw(80, dim=16)
    expected = module(*inputs)
    found = module.float()(*(x.float() for x in inputs))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    for dtype in (torch.bfloat16, torch.float16):
        rough = [x.to(dtype) for x in inputs]
        narrow = module.to(dtype)
        found = narrow(*rough)
        assert found.dtype == dtype
        same = narrow.double()(*(x.double() for x in rough))  # all is summed in float32, and rounded once
        torch.testing.assert_close(found.double(), same, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_autocast_does_not_reach_its_sums():
    module, inputs = make().float(), [x.float() for x in draw(40)]
    for run in (module, module.reference):
        expected = run(*inputs)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(run(*inputs), expected)


def test_one_graph_for_the_compiler_with_gradients_and_padding():
    module, padding = make(samples="drawn").train(), padding_for(30)
    leaves, found = [*(x.requires_grad_() for x in draw(30)), *module.parameters()], []
    compiled: Any = torch.compile(module, backend="aot_eager", fullgraph=True)
    for run in (module, compiled):
        output = run(*leaves[:3], key_padding_mask=padding)
        found.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    for plain, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, plain)


@pytest.mark.parametrize("options", [*OPTIONS, {"num_landmarks": 100}, {"num_landmarks": 7}])
@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
def test_costs_are_what_runs_and_what_is_read(options: dict[str, Any], num_kv_heads: int):
    module, inputs = make(build={"num_kv_heads": num_kv_heads}, **options), draw(60, num_kv_heads)
    shape = module.build.shape(BATCH, 60, config=module.config)
    assert count_flops(partial(module, *inputs)) == lara_flops(shape)
    tensors = [*inputs, module(*inputs), *module.parameters()]
    read = sum(x.numel() for x in tensors)
    if module.noise is not None:
        read += module.noise[:, :60].numel()
    assert lara_bytes(shape, 2) == 2 * read


def test_which_path_ran():
    with recording() as paths:
        make()(*draw(13))
    assert paths == ["lara"]


def test_refusals():
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_landmarks": 0}, "num_landmarks: expected at least 1"),
        ({"query_weight": -0.5}, "query_weight: expected a finite number, at least 0"),
        ({"query_weight": math.inf}, "query_weight: expected a finite number"),
        ({"query_weight": math.nan}, "query_weight: expected a finite number"),
        ({"samples": "many"}, "samples"),
        ({"landmarks": "grid"}, "landmarks"),
    )
    for options, words in wrong:
        with pytest.raises(ConfigError, match=words):
            make(**options)
    impossible: tuple[tuple[dict[str, Any], str], ...] = (
        ({"is_causal": True}, "sums up all keys"),
        ({"is_cross": True}, "of one sequence"),
        ({"dropout_p": 0.1}, "never computed"),
        ({"position": "alibi"}, "does not split into a factor"),
    )
    for build, words in impossible:
        with pytest.raises(UnsupportedError, match=words):
            make(build=build)
    with pytest.raises(UnsupportedError, match="changes the landmarks"):
        make().init_state(1)


def test_mixer_trains_in_bfloat16():
    mixer = build_mixer("lara", BuildContext(embed_dim=8, num_heads=2, max_seq_len=80), num_landmarks=8)
    output = mixer.bfloat16()(torch.randn(1, 80, 8).bfloat16())
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
