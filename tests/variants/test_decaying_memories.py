"""What variants with a decaying memory share: chunks, padding, decoding, digits, cost, one graph, a training.

Their equations are in the tests of each.
"""

from __future__ import annotations

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
from tests.exactness import assert_one_graph
from tests.training.toy_task import cell, toy_task

BATCH, HEADS, EMBED = 2, 3, 12
NAMES = {
    "retention": {"value_factor": 2},
    "gated_deltanet": {"value_factor": 2},
    "gated_linear_attention": {"value_factor": 2, "gate_rank": 3},
    "mamba2": {"state_dim": 5},
}

pytestmark = pytest.mark.parametrize("name", NAMES)


def make(name: str, *, build: dict[str, Any] | None = None, **options: Any) -> Any:
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": HEADS, "max_seq_len": 4096, "is_causal": True}
    torch.manual_seed(0)
    mixer = build_mixer(name, BuildContext(**{**sizes, **(build or {})}), **{**NAMES[name], **options})
    return mixer.double().eval()


def draw(length: int, embed_dim: int = EMBED) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(BATCH, length, embed_dim, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 64, 65, 128, 129, 300])
@pytest.mark.parametrize("has_padding", [False, True])
def test_the_chunkwise_form_equals_the_recurrence_with_gradients(name: str, length: int, has_padding: bool):
    mixer, mask = make(name), None
    if has_padding:
        mask = torch.zeros(BATCH, length, dtype=torch.bool)
        mask[0, [0, length // 2, length - 1]] = True
        mask[1] = True
    weights, results = draw(length).flip(0), []
    for run in (mixer, mixer.reference):
        hidden = draw(length).requires_grad_()
        output = run(hidden, key_padding_mask=mask)
        results.append([output, *torch.autograd.grad(output, [hidden, *mixer.parameters()], weights)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk_len", [1, 5, 16, 256])
def test_the_chunk_does_not_matter(name: str, chunk_len: int):
    hidden = draw(90)
    torch.testing.assert_close(make(name, chunk_len=chunk_len)(hidden), make(name)(hidden), rtol=0, atol=1e-11)


def test_gradients_agree_with_finite_differences(name: str):
    assert torch.autograd.gradcheck(make(name, chunk_len=3), (draw(7).requires_grad_(),))


def test_the_recurrent_form_goes_on_from_a_prefill(name: str):
    mixer, hidden = make(name, chunk_len=4), draw(20)
    expected = mixer(hidden)
    output, state = mixer.prefill(hidden[:, :2])  # shorter than the convolution
    rows, sizes = [output], [state_bytes(state)]
    for i in range(2, 15):
        row, state = mixer.step(hidden[:, i : i + 1], state)
        rows.append(row)
        sizes.append(state_bytes(state))
    output, state = mixer.prefill(hidden[:, 15:], state)
    torch.testing.assert_close(torch.cat([*rows, output], 1), expected, rtol=0, atol=1e-11)
    assert len({*sizes, state_bytes(state)}) == 1
    claim = variants[name].complexity.state_bytes
    assert claim is not None
    shape = mixer.build.shape(BATCH, 1, 20, mixer.config, "mixer")
    assert claim(shape, 8) == sizes[0]
    assert claim(shape, 2) == state_bytes(mixer.bfloat16().init_state(BATCH))  # memories in float32 at least
    with pytest.raises(ValueError, match="one new position"):
        mixer.step(hidden, state)


def test_padding_in_front_changes_nothing(name: str):
    mixer, hidden, count = make(name, chunk_len=4), draw(10), 6
    longer = torch.cat([draw(count), hidden], dim=1)
    mask = torch.zeros(BATCH, 10 + count, dtype=torch.bool)
    mask[:, :count] = True
    output = mixer(longer, key_padding_mask=mask)
    torch.testing.assert_close(output[:, count:], mixer(hidden), rtol=0, atol=1e-10)
    assert output[:, :count].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_memories_keep_their_digits_in_half_precision(name: str, dtype: torch.dtype):
    exact = make(name, build={"embed_dim": 48, "num_heads": 6})
    exact.load_state_dict({key: value.to(dtype).double() for key, value in exact.state_dict().items()})
    hidden = (draw(3000, 48) + 1.0).to(dtype)
    with torch.no_grad():
        expected = exact(hidden.double())
        output = exact.to(dtype)(hidden).double()
    error = (output - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error[:, -100:].mean() < 8 * torch.finfo(dtype).eps


def test_cost_is_what_runs_in_both_directions(name: str):
    mixer, variant = make(name, chunk_len=16), variants[name]
    hidden = draw(200).requires_grad_()
    shape = mixer.build.shape(BATCH, 200, config=mixer.config, form="mixer")
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
    assert paths == [f"{name}.chunked"]


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
def test_refusals(name: str, build: dict[str, Any], capability: str):
    with pytest.raises(UnsupportedError) as caught:
        make(name, build=build)
    assert caught.value.capability == capability


@pytest.mark.parametrize("size", ["chunk_len", "conv_len", "gate_rank", "value_factor", "state_dim", "expand"])
def test_impossible_sizes(name: str, size: str):
    options: dict[str, Any] = {size: 0}
    if size in variants[name].config.__dataclass_fields__:
        with pytest.raises(ConfigError, match=f"{size}: expected at least 1"):
            make(name, **options)
    with pytest.raises(UnsupportedError, match="build_mixer"):
        build_attention(name, BuildContext(embed_dim=EMBED, num_heads=2, max_seq_len=64, is_causal=True))


def test_one_graph_for_the_compiler_with_gradients(name: str):
    mixer: AbstractMixer = make(name, chunk_len=32)
    hidden, found = draw(50).requires_grad_(), []
    for run in (mixer, torch.compile(mixer, backend="aot_eager", fullgraph=True)):
        output = run(hidden)
        found.append([output, *torch.autograd.grad(output.sin().sum(), [hidden, *mixer.parameters()])])
    for plain, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, plain)


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_for_the_compiler_whatever_the_length(name: str):
    """Of as many chunks, each a part of the graph of its own. To differentiate for any length takes long."""
    assert_one_graph(make(name, chunk_len=32), draw(70), draw(90))


def test_it_learns_a_language(name: str):
    with toy_task():
        result = run_training(cell("language", variant=name, num_layers=2))
    assert (result.status, result.reason) == ("ok", "")
    assert result.kernels == (f"{name}.chunked",)
    score = result.score
    assert score is not None
    assert score.train_flops
    assert score.curve[-1]["train_loss"] < 0.5 * score.curve[0]["train_loss"]
