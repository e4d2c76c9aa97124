"""BigBird: the definition, the random blocks, both modes, what is refused, and what it claims to cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer, describe
from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.masks import alibi_slopes
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.conformance import measure_complexity
from attn_zoo.registry import variants
from attn_zoo.variants.bigbird import BigBirdAttention, BigBirdConfig, bigbird_flops, bigbird_mask

BATCH, HEADS, DIM = 2, 2, 8
SMALL: dict[str, Any] = {"block_size": 8, "num_global_blocks": 2, "num_random_blocks": 2}
LENGTHS = [1, 63, 64, 65, 100, 200, 513]


def make(is_causal: bool = False, *, build: dict[str, Any] | None = None, **options: Any) -> AbstractAttention:
    sizes: dict[str, Any] = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 1024, **(build or {})}
    torch.manual_seed(0)
    return (
        build_attention("bigbird", BuildContext(is_causal=is_causal, **sizes), **{**SMALL, **options}).double().eval()
    )


def draw(length: int, *, num_kv_heads: int = HEADS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(BATCH, heads, length, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, num_kv_heads, num_kv_heads)
    )
    return query, key, value


def end_padding(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, length - length // 3 :] = True
    mask[1] = True
    return mask


def by_the_definition(
    module: AbstractAttention, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None
) -> Tensor:
    """Write the paper's attention out, query by query and key by key, given the random blocks."""
    config, build, length = module.config, module.build, query.shape[2]
    extra, size, reach = config.num_extra_tokens, config.block_size, config.num_window_blocks // 2
    layout = config.layout(
        length, is_causal=build.is_causal, num_heads=HEADS, seed=build.seed, layer_index=build.layer_index
    )
    drawn, counts = layout.draw()
    output = torch.zeros_like(query)
    extras = dict(module.named_parameters())
    for entry in range(BATCH):
        if padding is not None and padding[entry].all():
            continue
        for head in range(HEADS):
            for at in range(length):
                place = at + extra
                own = place // size
                keys, values, biases = [], [], []
                for other in range(length + extra):
                    block = other // size
                    row = own - layout.num_leading
                    is_seen = (
                        abs(own - block) <= reach
                        or block < config.num_global_blocks
                        or own < config.num_global_blocks
                        or (row >= 0 and block in drawn[head, row, : counts[row]])
                    )
                    if build.is_causal and other > place:
                        is_seen = False
                    if padding is not None and other >= extra and padding[entry, other - extra]:
                        is_seen = False
                    if is_seen:
                        is_extra = other < extra
                        keys.append(extras["extra_key"][head, other] if is_extra else key[entry, head, other - extra])
                        values.append(
                            extras["extra_value"][head, other] if is_extra else value[entry, head, other - extra]
                        )
                        biases.append(abs(place - other))
                if keys:
                    scores = torch.stack([query[entry, head, at] @ k / math.sqrt(DIM) for k in keys])
                    if build.position == "alibi":
                        scores = scores - alibi_slopes(HEADS)[head].double() * torch.tensor(biases)
                    output[entry, head, at] = scores.softmax(0) @ torch.stack(values)
    return output


@pytest.mark.parametrize("length", [1, 9, 24, 45])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"mode": "etc"}, {"num_window_blocks": 1, "num_global_blocks": 0}])
@pytest.mark.parametrize("has_padding", [False, True])
def test_reference_is_the_definition(length: int, is_causal: bool, options: dict[str, Any], has_padding: bool):
    module = make(is_causal, **{"num_global_blocks": 1, "num_random_blocks": 1, **options})
    inputs, padding = draw(length), end_padding(length) if has_padding else None
    with torch.no_grad():
        expected = by_the_definition(module, *inputs, padding)
        torch.testing.assert_close(module.reference(*inputs, key_padding_mask=padding), expected, rtol=0, atol=1e-13)


def test_reference_is_the_definition_with_alibi():
    module = make(build={"position": "alibi"}, num_global_blocks=1, num_random_blocks=1)
    inputs = draw(45)
    torch.testing.assert_close(module.reference(*inputs), by_the_definition(module, *inputs, None), rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mode", ["itc", "etc"])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fast_path_is_the_reference(length: int, is_causal: bool, mode: str, has_padding: bool, dtype: torch.dtype):
    module = make(is_causal, mode=mode).to(dtype)
    padding = end_padding(length) if has_padding else None
    weights = torch.randn(BATCH, HEADS, length, DIM, generator=torch.Generator().manual_seed(4))

    def run(name: str, given: torch.dtype) -> list[Tensor]:
        module.to(dtype).to(given)
        leaves = [x.to(dtype).to(given).requires_grad_() for x in draw(length)]
        output = getattr(module, name)(*leaves, key_padding_mask=padding)
        leaves += list(module.parameters())
        return [output.detach(), *torch.autograd.grad(output, leaves, weights.to(dtype).to(given))]

    truth = run("reference", torch.float64)
    results = {name: run(name, dtype) for name in ("forward", "reference")}
    # A gradient may be zero as a difference of large terms (queries that see one key), so all share one scale.
    largest = max(float(grad.abs().max()) for grad in truth[1:])
    scales = [float(truth[0].abs().max()), *[largest] * len(truth[1:])]
    for found, rough, wanted, scale in zip(results["forward"], results["reference"], truth, scales, strict=True):
        assert found.isfinite().all()
        error, plain_error = (float((x.double() - wanted).abs().max()) for x in (found, rough))
        # PyTorch's fused backward in float32 is up to four times as far off as products and softmax (see the engine's
        # tests); sums of L terms in another order, otherwise.
        terms = 8 * (1 + length**0.5) if dtype != torch.bfloat16 else 2
        assert error <= 2 * plain_error + terms * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [100, 33, 7])
def test_equals_full_attention_when_blocks_cover_everything(is_causal: bool, length: int):
    inputs = draw(length)
    expected = softmax_attention(*inputs, is_causal=is_causal)
    covering: tuple[dict[str, Any], ...] = ({"num_random_blocks": 13}, {"num_window_blocks": 27}, {"block_size": 128})
    for options in covering:
        torch.testing.assert_close(make(is_causal, **options)(*inputs), expected, rtol=0, atol=1e-13)
    if length == 100:
        assert (make(is_causal)(*inputs) - expected).abs().max() > 1e-3


def test_default_options_are_exact_for_short_sequences():
    module = build_attention("bigbird", BuildContext(embed_dim=16, num_heads=2, max_seq_len=512)).double()
    inputs = draw(400)  # 7 blocks: 2 global, and at least 4 of the other 5 in window or random
    torch.testing.assert_close(module(*inputs), softmax_attention(*inputs), rtol=0, atol=1e-13)


def test_etc_is_itc_over_a_sequence_that_starts_with_the_extra_tokens():
    etc = make(mode="etc")
    itc = make()
    query, key, value = draw(150)
    extra = list(etc.parameters())
    assert all(x.shape == (HEADS, 16, DIM) for x in extra)
    longer = [torch.cat([x.expand(BATCH, -1, -1, -1), y], 2) for x, y in zip(extra, (key, value), strict=True)]
    padded_query = torch.cat([query.new_zeros(BATCH, HEADS, 16, DIM), query], 2)
    torch.testing.assert_close(etc(query, key, value), itc(padded_query, *longer)[:, :, 16:])
    assert {name for name, _ in etc.named_parameters()} == {"extra_key", "extra_value"}


def test_extra_tokens_do_not_revive_a_wholly_padded_entry():
    output = make(mode="etc")(*draw(40), key_padding_mask=end_padding(40))
    assert output[1].abs().max() == 0
    assert output[0].abs().min() > 0


def test_grouped_heads_share_keys_and_values():
    module = make(build={"num_kv_heads": 1})
    query, key, value = draw(100, num_kv_heads=1)
    expected = make()(query, key.expand(-1, HEADS, -1, -1), value.expand(-1, HEADS, -1, -1))
    torch.testing.assert_close(module(query, key, value), expected)


def test_same_blocks_in_training_and_evaluation_and_no_global_randomness():
    module, inputs = make(), draw(200)
    state = torch.random.get_rng_state()
    in_evaluation = module.eval()(*inputs)
    assert torch.equal(module.train()(*inputs), in_evaluation)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_seed_and_layer_choose_the_blocks():
    inputs = draw(200)
    outputs = [make(build=build)(*inputs) for build in ({}, {"seed": 1}, {"layer_index": 1})]
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[0], make()(*inputs))


def test_permutation_loads_every_block_alike():
    config = BigBirdConfig(block_size=8, num_random_blocks=3, random="permutation")
    layout = config.layout(8 * 40, num_heads=HEADS)
    drawn, counts = layout.draw()
    assert (counts == 3).all()
    for head in drawn:
        loads = torch.bincount(head.flatten(), minlength=40)
        assert loads.tolist() == [0, 0] + [3] * 38
    uniform = BigBirdConfig(block_size=8, num_random_blocks=3).layout(8 * 40, num_heads=HEADS).draw()[0]
    assert torch.bincount(uniform[0].flatten(), minlength=40)[2:].max() > 3


@pytest.mark.parametrize("mode", ["itc", "etc"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("random", ["uniform", "permutation"])
@pytest.mark.parametrize("length", [8, 16, 64, 200, 512])
def test_flops_count_the_visible_pairs(mode: Any, is_causal: bool, random: Any, length: int):
    if is_causal and random == "permutation":
        return
    config = BigBirdConfig(**SMALL, mode=mode, random=random)
    build = BuildContext(embed_dim=HEADS * DIM, num_heads=HEADS, max_seq_len=1024, is_causal=is_causal)
    pairs = int(bigbird_mask(config.layout(length, is_causal=is_causal, num_heads=HEADS)).sum())
    assert bigbird_flops(build.shape(3, length, config=config)) == 4 * 3 * DIM * pairs


@pytest.mark.parametrize("random", ["uniform", "permutation"])
def test_flops_of_a_ragged_length_are_the_mean_over_seeds(random: Any):
    config = BigBirdConfig(**SMALL, random=random)
    seeds = 50
    pairs = [config.layout(203, num_heads=HEADS, seed=seed).pattern().num_pairs for seed in range(seeds)]
    build = BuildContext(embed_dim=HEADS * DIM, num_heads=HEADS, max_seq_len=1024)
    mean = sum(pairs) / seeds
    assert bigbird_flops(build.shape(1, 203, config=config)) == pytest.approx(4 * DIM * mean, rel=2e-3)
    assert max(pairs) - min(pairs) < 0.05 * mean


def test_claims():
    info = describe("bigbird")
    assert info.complexity.time_exponent == info.complexity.memory_exponent == 1
    assert info.reference.url == "https://arxiv.org/abs/2007.14062"
    assert [(option.name, option.default) for option in info.options] == [
        ("block_size", 64),
        ("num_window_blocks", 3),
        ("num_global_blocks", 2),
        ("num_random_blocks", 3),
        ("mode", "itc"),
        ("random", "uniform"),
        ("backend", "auto"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size: expected at least 1; got 0"),
        ({"num_window_blocks": 2}, "num_window_blocks: expected an odd number"),
        ({"num_random_blocks": -1}, "expected at least 0; got -1"),
        ({"mode": "etc", "num_global_blocks": 0}, "mode 'etc' is made of extra global blocks"),
        ({"mode": "itx"}, "expected one of itc, etc; got 'itx'"),
        ({"num_rand_blocks": 3}, "did you mean 'num_random_blocks'"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("is_causal", "build", "options", "capability"),
    [
        (True, {}, {"random": "permutation"}, "causal"),
        (False, {"is_cross": True}, {}, "cross_attention"),
        (False, {"position": "alibi"}, {"mode": "etc"}, "positions"),
        (False, {"dropout_p": 0.1}, {"backend": "flex"}, "attention_dropout"),
    ],
)
def test_impossible_requests_are_refused(
    is_causal: bool, build: dict[str, Any], options: dict[str, Any], capability: str
):
    with pytest.raises(UnsupportedError) as caught:
        make(is_causal, build=build, **options)
    assert caught.value.capability == capability


def test_calls_that_cannot_be_served_are_refused():
    module = make(True)
    query, key, value = draw(20)
    with pytest.raises(UnsupportedError, match="share none") as caught:
        module(query[:, :, 10:], key, value)
    assert caught.value.capability == "cross_attention"
    with pytest.raises(UnsupportedError, match="decoding changes") as caught:
        module.init_state(1)
    assert caught.value.capability == "decode"
    with pytest.raises(UnsupportedError, match="CUDA"):
        make(backend="flex")(*draw(20))
    with pytest.raises(UnsupportedError, match="CUDA"):  # dropout is no reason
        make(build={"dropout_p": 0.1}, backend="triton").train()(*draw(20))


def test_mixer_form_trains_with_dropout():
    build = BuildContext(embed_dim=16, num_heads=2, max_seq_len=128, dropout_p=0.2)
    mixer = build_mixer("bigbird", build, **SMALL, mode="etc")
    hidden = torch.randn(2, 100, 16)
    torch.manual_seed(1)
    first = mixer(hidden)
    first.square().mean().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in mixer.parameters() if p.dim() > 1
    )
    torch.manual_seed(1)
    assert torch.equal(mixer(hidden), first)
    assert not torch.equal(mixer(hidden), first)
    assert isinstance(make(), BigBirdAttention)


def longest_path(num_blocks: int, is_causal: bool) -> int:
    """Return the layers until windows and random blocks have brought to the last block all that they ever bring."""
    layout = BigBirdConfig(block_size=1).layout(num_blocks, is_causal=is_causal)
    drawn, counts = layout.draw()
    reached, front, num_layers = {num_blocks - 1}, {num_blocks - 1}, 0
    while front:
        seen: set[int] = set()
        for row in front:
            place = row - layout.num_leading
            others = drawn[0, place, : counts[place]].tolist() if place >= 0 else []
            last = row if is_causal else num_blocks - 1
            seen.update(block for block in (row - 1, row + 1, *others) if 0 <= block <= last)
        front = seen - reached
        reached |= front
        num_layers += bool(front)
    return num_layers


def test_windows_and_random_blocks_of_the_past_make_longer_paths_than_those_of_the_whole_sequence():
    growth = {
        is_causal: math.log(longest_path(4096, is_causal) / longest_path(64, is_causal), 64)
        for is_causal in (False, True)
    }
    assert growth[False] < 0.25 < 0.4 < growth[True] < 0.7, "log L, and about sqrt(L)"


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "2 (causal: sqrt(L))"),
        ({"mode": "etc"}, "log L (causal: sqrt(L))"),
        ({"num_global_blocks": 0}, "log L (causal: sqrt(L))"),
        ({"num_global_blocks": 0, "num_random_blocks": 0}, "L / C"),
        ({"num_random_blocks": 0}, "2 (causal: L / C)"),
        ({"num_random_blocks": 0, "num_window_blocks": 1}, "2 (causal: never)"),
        ({"mode": "etc", "num_random_blocks": 0, "num_window_blocks": 1}, "never"),
    ],
)
def test_paths_are_longer_where_no_token_of_the_sequence_sees_all(options: dict[str, Any], path: str):
    claim = variants["bigbird"].complexity_of(BigBirdConfig(**options))
    assert claim.max_path == path
    assert not any(row.max_path.is_contradicted for row in measure_complexity("bigbird", {**SMALL, **options}))
