"""LSTM: the equations number by number, padding in both directions, its state, its cost, what it refuses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.decode import state_bytes
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_flops, count_operations
from attn_zoo.registry import variants
from attn_zoo.variants.lstm import _run_for_backward

BATCH, LENGTH, EMBED = 2, 7, 5


def make(is_causal: bool = False, *, options: dict[str, Any] | None = None, **build: Any) -> Any:
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": 1, "max_seq_len": 512, **build}
    torch.manual_seed(0)
    return build_mixer("lstm", BuildContext(is_causal=is_causal, **sizes), **(options or {})).double().eval()


def draw(length: int = LENGTH, embed_dim: int = EMBED) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(BATCH, length, embed_dim, generator=generator, dtype=torch.float64)


def padding(length: int = LENGTH) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, 3, length - 1]] = True
    mask[1] = True
    return mask


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def by_the_definition(lstm: Any, tokens: list[list[float]]) -> list[list[float]]:
    """Write the equations out, cell by cell, for one sequence; return h after every token."""
    width = lstm.hidden_size
    of_token, of_state = lstm.weight_ih_l0.tolist(), lstm.weight_hh_l0.tolist()
    bias = (lstm.bias_ih_l0 + lstm.bias_hh_l0).tolist()
    output, cell, outputs = [0.0] * width, [0.0] * width, []
    for token in tokens:
        gates = [
            bias[row]
            + sum(w * x for w, x in zip(of_token[row], token, strict=True))
            + sum(w * h for w, h in zip(of_state[row], output, strict=True))
            for row in range(4 * width)
        ]
        for n in range(width):
            write, forget, new, read = gates[n], gates[width + n], gates[2 * width + n], gates[3 * width + n]
            cell[n] = sigmoid(forget) * cell[n] + sigmoid(write) * math.tanh(new)
            output[n] = sigmoid(read) * math.tanh(cell[n])
        outputs.append(list(output))
    return outputs


def expected_of(mixer: Any, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Read unpadded tokens only, in each direction; a padded position has the state as it is there."""
    output = torch.zeros_like(hidden)
    for entry in range(len(hidden)):
        kept = [i for i in range(hidden.shape[1]) if mask is None or not bool(mask[entry, i])]
        first = 0
        for index, lstm in enumerate(mixer.directions):
            order = kept if index == 0 else kept[::-1]
            states = by_the_definition(lstm, [hidden[entry, i].tolist() for i in order])
            for i in range(hidden.shape[1]):
                num_read = sum(j <= i if index == 0 else j >= i for j in kept)
                if num_read:
                    value = torch.tensor(states[num_read - 1], dtype=torch.float64)
                    output[entry, i, first : first + lstm.hidden_size] = value
            first += lstm.hidden_size
    return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_both_paths_are_the_definition(is_causal: bool, has_padding: bool):
    mixer, hidden, mask = make(is_causal), draw(), padding() if has_padding else None
    expected = expected_of(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_entry_of_padding_only_gives_zeros_and_no_gradient_is_lost_to_it(is_causal: bool):
    mixer, hidden = make(is_causal), draw().requires_grad_()
    poisoned = hidden.masked_fill(padding()[..., None], float("nan"))
    output = mixer(poisoned, key_padding_mask=padding())
    assert output.isfinite().all()
    assert (output[1] == 0).all()
    output.sum().backward()
    assert hidden.grad is not None
    assert torch.equal((hidden.grad == 0).all(-1), padding())
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_gradients_agree_with_finite_differences(is_causal: bool, has_padding: bool):
    mixer, mask = make(is_causal), padding() if has_padding else None
    assert torch.autograd.gradcheck(lambda x: mixer(x, key_padding_mask=mask), (draw().requires_grad_(),))


def test_the_last_output_remembers_the_first_token_and_directions_see_one_side_each():
    hidden = draw().requires_grad_()
    two_way = make()
    (gradient,) = torch.autograd.grad(two_way(hidden)[0, 3].sum(), hidden)
    assert (gradient[0] != 0).all()
    ahead, back = (
        torch.autograd.grad(two_way(hidden)[0, 3, part].sum(), hidden)[0] for part in (slice(3), slice(3, 5))
    )
    assert (ahead[0, 4:] == 0).all()
    assert (back[0, :3] == 0).all()


def test_forget_gates_start_open():
    for value in (1.0, -2.0):
        for lstm in make(options={"forget_bias": value}).directions:
            forget = slice(lstm.hidden_size, 2 * lstm.hidden_size)
            assert ((lstm.bias_ih_l0 + lstm.bias_hh_l0)[forget] == value).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_of_narrow_types_are_the_same_function(dtype: torch.dtype):
    mixer, hidden = make(True, embed_dim=32), draw(100, 32)
    expected = mixer(hidden)
    output = mixer.to(dtype)(hidden.to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=60 * torch.finfo(dtype).eps)


def test_prefill_and_steps_equal_the_forward_and_keep_two_vectors():
    mixer, hidden = make(True), draw()
    expected, state = mixer(hidden), None
    output, state = mixer.prefill(hidden[:, :3], state)
    for i in range(3, LENGTH):
        row, state = mixer.step(hidden[:, i : i + 1], state)
        output = torch.cat([output, row], dim=1)
        assert state_bytes(state) == 2 * BATCH * EMBED * 8
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="one new position"):
        mixer.step(hidden, state)
    with pytest.raises(UnsupportedError, match="later tokens"):
        make().init_state(1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flops_and_bytes_are_those_that_run(is_causal: bool, dtype: torch.dtype):
    mixer = make(is_causal).to(dtype)  # fused in float32, a loop in float64
    shape = mixer.build.shape(BATCH, LENGTH, config=mixer.config, form="mixer")
    hidden = draw().to(dtype)
    claim = variants["lstm"].flops(shape)
    assert claim is not None
    assert count_flops(partial(mixer, hidden)) == claim
    widths = [5] if is_causal else [3, 2]
    assert claim == sum(2 * BATCH * LENGTH * 4 * width * (EMBED + width) for width in widths)
    num_params = sum(p.numel() for p in mixer.parameters())
    assert variants["lstm"].min_bytes(shape, 8) == (2 * hidden.numel() + num_params) * 8
    leaf = draw(200).to(dtype).requires_grad_()
    counted = count_operations(lambda: mixer(leaf).sum().backward())
    assert counted is not None
    whole = variants["lstm"].flops(mixer.build.shape(BATCH, 200, config=mixer.config, form="mixer"))
    assert whole is not None
    assert counted.products == pytest.approx(3 * whole, rel=0.01)  # no gradient passes to the state before all


def test_dropout_drops_outputs_and_keeps_their_mean():
    mixer = make(dropout_p=0.5).train()
    hidden = draw()[:1].expand(4000, -1, -1)
    torch.manual_seed(0)
    output = mixer(hidden)
    error = (output.mean(0) - mixer.eval()(hidden)[0]).abs()
    assert (error < 5 * output.std(0) / 4000**0.5).all()
    assert ((output == 0).double().mean() - 0.5).abs() < 0.01


def test_which_path_ran():
    for is_causal, name in ((False, "lstm.two_way"), (True, "lstm.one_way")):
        with recording() as paths:
            make(is_causal)(draw())
        assert paths == [name]


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_cross": True}, "cross_attention"),
        ({"num_heads": 5, "num_kv_heads": 1}, "grouped_query"),
        ({"position": "rotary"}, "positions"),
        ({"position": "alibi"}, "positions"),
    ],
)
def test_refusals(build: dict[str, Any], capability: str):
    with pytest.raises(UnsupportedError) as caught:
        make(**build)
    assert caught.value.capability == capability


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_autocast_needs_no_16_bit_instructions_of_the_cpu(is_causal: bool, dtype: torch.dtype):
    """Few processors have those of float16, and older ones none: left to itself, autocast ends in an error there."""
    mixer, hidden = make(is_causal).float(), draw(50).float()
    expected = mixer(hidden)
    with torch.autocast("cpu", dtype):
        found = mixer(hidden)
        outputs = [found]
        if is_causal:
            prompt, state = mixer.prefill(hidden[:, :30])
            last = [prompt]
            for position in range(30, 50):
                output, state = mixer.step(hidden[:, position : position + 1], state)
                last.append(output)
            outputs.append(torch.cat(last, dim=1))
    for output in outputs:
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
    (gradient,) = torch.autograd.grad(found.float().square().sum(), mixer.directions[0].weight_hh_l0)
    (wanted,) = torch.autograd.grad(expected.square().sum(), mixer.directions[0].weight_hh_l0)
    assert gradient.dtype == torch.float32
    assert (gradient - wanted).norm() <= 16 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("has_state", [False, True])
def test_what_a_gpu_calls_is_the_layer(has_state):
    """In evaluation mode too, in which cuDNN's layer has no backward."""
    (layer, *_), hidden = make(True).directions, draw(50).requires_grad_()
    first = draw(1).transpose(0, 1)
    state = (0.5 * first, 2.0 * first) if has_state else None
    parameters = [hidden, *layer.parameters()]
    sides = [run(hidden, state) for run in (layer, partial(_run_for_backward, layer))]
    for (ours, own_ends), (theirs, ends) in [sides]:
        assert torch.equal(ours, theirs)
        assert all(map(torch.equal, own_ends, ends))
    gradients = [torch.autograd.grad(outputs.square().sum(), parameters) for outputs, _ in sides]
    assert all(map(torch.equal, *gradients))


def test_one_feature_has_no_cell_for_the_second_direction():
    with pytest.raises(ConfigError, match="a cell for each direction"):
        make(embed_dim=1)
    assert make(True, embed_dim=1)(draw(embed_dim=1)).shape == (BATCH, LENGTH, 1)


def test_there_is_no_form_over_heads():
    with pytest.raises(UnsupportedError, match="build_mixer"):
        build_attention("lstm", BuildContext(embed_dim=EMBED, num_heads=1, max_seq_len=64))
