"""Retention: the equations term by term, its three forms, padding, positions that go on, cost, a training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention import AbstractMixer
from attn_zoo.attention.decode import state_bytes
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_operations
from attn_zoo.registry import variants
from attn_zoo.training import run_training
from attn_zoo.variants.retention import NORM_EPS
from tests.training.toy_task import cell, toy_task

BATCH, HEADS, DIM, EMBED = 2, 3, 4, 12


def make(*, build: dict[str, Any] | None = None, **options: Any) -> Any:
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": HEADS, "max_seq_len": 4096, "is_causal": True}
    torch.manual_seed(0)
    return build_mixer("retention", BuildContext(**{**sizes, **(build or {})}), **options).double().eval()


def draw(length: int, embed_dim: int = EMBED) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(BATCH, length, embed_dim, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2, length - 1]] = True
    mask[1] = True
    return mask


def turned(vector: list[float], position: int) -> list[complex]:
    """Return the pairs (x_i, x_{i + D/2}) as complex numbers, turned by e^{i n theta_i}."""
    half = len(vector) // 2
    return [
        complex(vector[i], vector[i + half]) * complex(math.cos(a), math.sin(a))
        for i in range(half)
        for a in [position * 10_000 ** (-i / half)]
    ]


def by_the_definition(mixer: Any, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Write equations 5 and 8 out, query by query, key by key."""
    output = torch.zeros_like(hidden)
    for entry in range(BATCH):
        for n, row in enumerate(hidden[entry]):
            if mask is not None and mask[entry, n]:
                continue
            heads = []
            for head in range(HEADS):
                gamma = 1 - 2 ** (-5 - head)
                mine = slice(head * DIM, (head + 1) * DIM)
                query = turned(mixer.query_proj(row)[mine].tolist(), n)
                total = torch.zeros(DIM * mixer.config.value_factor, dtype=torch.float64)
                for m in range(n + 1):
                    if mask is not None and mask[entry, m]:
                        continue
                    key = turned(mixer.key_proj(hidden[entry, m])[mine].tolist(), m)
                    score = sum((q * k.conjugate()).real for q, k in zip(query, key, strict=True)) / math.sqrt(DIM)
                    value = mixer.value_proj(hidden[entry, m]).view(HEADS, -1)[head]
                    total += gamma ** (n - m) * score * value
                spread = total - total.mean()
                heads.append(spread / (spread.square().mean() + NORM_EPS).sqrt())
            gate = mixer.gate_proj(row)
            output[entry, n] = mixer.out_proj(gate * torch.sigmoid(gate) * torch.cat(heads))
    return output


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("value_factor", [1, 2])
def test_both_paths_are_the_definition(length: int, has_padding: bool, value_factor: int):
    mixer, hidden = make(chunk_len=4, value_factor=value_factor), draw(length)
    mask = padding_for(length) if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("has_padding", [False, True])
def test_the_chunkwise_form_equals_the_parallel_one_with_gradients(length: int, has_padding: bool):
    mixer, mask = make(), padding_for(length) if has_padding else None
    weights, results = draw(length).flip(0), []
    for run in (mixer, mixer.reference):
        hidden = draw(length).requires_grad_()
        output = run(hidden, key_padding_mask=mask)
        results.append([output, *torch.autograd.grad(output, [hidden, *mixer.parameters()], weights)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk_len", [1, 5, 64])
def test_the_chunk_does_not_matter(chunk_len: int):
    hidden = draw(50)
    torch.testing.assert_close(make(chunk_len=chunk_len)(hidden), make()(hidden), rtol=0, atol=1e-11)


def test_gradients_agree_with_finite_differences():
    mixer = make(chunk_len=3)
    assert torch.autograd.gradcheck(mixer, (draw(7).requires_grad_(),))


def test_the_recurrent_form_goes_on_from_a_prefill():
    mixer, hidden = make(chunk_len=4), draw(20)
    expected = mixer(hidden)
    output, state = mixer.prefill(hidden[:, :9])
    rows, sizes = [output], [state_bytes(state)]
    for i in range(9, 15):
        row, state = mixer.step(hidden[:, i : i + 1], state)
        rows.append(row)
        sizes.append(state_bytes(state))
    output, state = mixer.prefill(hidden[:, 15:], state)
    torch.testing.assert_close(torch.cat([*rows, output], 1), expected, rtol=0, atol=1e-11)
    assert state.position == 20
    assert {*sizes, state_bytes(state)} == {BATCH * HEADS * DIM * DIM * 8}
    claim = variants["retention"].complexity.state_bytes
    assert claim is not None
    shape = mixer.build.shape(BATCH, 1, 20, mixer.config, "mixer")
    assert claim(shape, 8) == sizes[0]
    assert claim(shape, 2) == sizes[0] // 2  # kept in float32 at least
    assert mixer.bfloat16().init_state(1).sums.dtype == torch.float32
    with pytest.raises(ValueError, match="one new position"):
        mixer.step(hidden, state)


def test_only_distances_matter_so_padding_in_front_changes_nothing():
    mixer, hidden, count = make(chunk_len=4), draw(10), 6
    longer = torch.cat([draw(count), hidden], dim=1)
    mask = torch.zeros(BATCH, 10 + count, dtype=torch.bool)
    mask[:, :count] = True
    output = mixer(longer, key_padding_mask=mask)
    torch.testing.assert_close(output[:, count:], mixer(hidden), rtol=0, atol=1e-10)
    assert output[:, :count].abs().max() == 0


def test_what_came_before_padding_decays_over_it():
    """A gap of padding counts as time: a token behind it sees the past as it would behind a gap of zeros."""
    mixer, hidden = make(chunk_len=4), draw(12)
    mask = torch.zeros(BATCH, 12, dtype=torch.bool)
    mask[:, 3:9] = True
    blanked = hidden.masked_fill(mask[..., None], 0.0)
    torch.testing.assert_close(mixer(hidden, key_padding_mask=mask), mixer(blanked), rtol=0, atol=1e-12)
    assert (mixer(hidden, key_padding_mask=mask) - mixer(hidden)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_sums_keep_their_digits_in_half_precision(dtype: torch.dtype):
    exact = make(build={"embed_dim": 48, "num_heads": 6})
    exact.load_state_dict({name: value.to(dtype).double() for name, value in exact.state_dict().items()})
    hidden = (draw(3000, 48) + 1.0).to(dtype)  # a mean: sums grow to 1 / (1 - gamma) terms
    with torch.no_grad():
        expected = exact(hidden.double())
        output = exact.to(dtype)(hidden).double()
    error = (output - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error[:, -100:].mean() < 4 * torch.finfo(dtype).eps


def test_cost_is_what_runs_in_both_directions():
    mixer, variant = make(chunk_len=16, value_factor=2), variants["retention"]
    hidden = draw(64).requires_grad_()
    shape = mixer.build.shape(BATCH, 64, config=mixer.config, form="mixer")
    forward = count_operations(lambda: mixer(hidden))
    both = count_operations(lambda: mixer(hidden).sum().backward())
    assert forward is not None
    assert both is not None
    assert forward.products == variant.flops(shape)
    ratio = variant.backward_ratio(shape)
    assert ratio is not None
    assert both.products == pytest.approx((1 + ratio) * forward.products, rel=0.01)
    assert sum(x.numel() for x in mixer.parameters()) * 4 == variant.min_bytes(shape, 4) - shape.io_bytes(4)
    with recording() as paths:
        mixer(hidden)
    assert paths == ["retention.chunked"]


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_causal": False}, "bidirectional"),
        ({"is_causal": False, "is_cross": True}, "bidirectional"),
        ({"num_kv_heads": 1}, "grouped_query"),
        ({"dropout_p": 0.1}, "attention_dropout"),
        ({"position": "rotary"}, "positions"),
    ],
)
def test_refusals(build: dict[str, Any], capability: str):
    with pytest.raises(UnsupportedError) as caught:
        make(build=build)
    assert caught.value.capability == capability


def test_impossible_sizes():
    with pytest.raises(ConfigError, match="chunk_len: expected at least 1"):
        make(chunk_len=0)
    with pytest.raises(ConfigError, match="head_dim: expected an even number"):
        make(build={"head_dim": 5})
    with pytest.raises(UnsupportedError, match="build_mixer"):
        build_attention("retention", BuildContext(embed_dim=EMBED, num_heads=2, max_seq_len=64, is_causal=True))


def test_one_graph_for_the_compiler_whatever_the_length():
    mixer: AbstractMixer = make(chunk_len=16)
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    for length in (50, 70):  # the second time for any length
        hidden = draw(length)
        torch.testing.assert_close(compiled(hidden), mixer(hidden))


def test_it_learns_a_language():
    with toy_task():
        result = run_training(cell("language", variant="retention", num_layers=2))
    assert (result.status, result.reason) == ("ok", "")
    assert result.kernels == ("retention.chunked",)
    score = result.score
    assert score is not None
    assert score.train_flops
    assert score.curve[-1]["train_loss"] < 0.5 * score.curve[0]["train_loss"]
