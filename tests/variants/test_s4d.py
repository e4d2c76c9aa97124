"""S4D: its recurrence number by number, both directions, its kernel and memories at any length, digits, state, cost."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.decode import state_bytes
from attn_zoo.kernels.long_convolution import convolve, transform_size
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_operations
from attn_zoo.measure.memory import memory_of_pass
from attn_zoo.registry import variants
from attn_zoo.training import run_training
from attn_zoo.variants.s4d import StateSpace, gather, respond
from tests.exactness import assert_one_graph, assert_transforms_as_autograd
from tests.training.toy_task import cell, toy_task

BATCH, EMBED = 2, 3


def make(is_causal: bool = True, *, build: dict[str, Any] | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": 1, "max_seq_len": 4096, "is_causal": is_causal}
    return build_mixer("s4d", BuildContext(**{**sizes, **(build or {})}), **{"state_dim": 6, **options}).double().eval()


def test_frequencies_are_of_the_default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        mixer: Any = build_mixer("s4d", BuildContext(embed_dim=EMBED, num_heads=1, max_seq_len=8), state_dim=6)
    finally:
        torch.set_default_dtype(before)
    assert {parameter.dtype for parameter in mixer.parameters()} == {torch.float64}
    assert mixer.frequency.tolist() == [0.0, math.pi, 2 * math.pi] * EMBED


def draw(length: int, embed_dim: int = EMBED, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(length + seed)
    return torch.randn(BATCH, length, embed_dim, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2, length - 1]] = True
    mask[1] = True
    return mask


def space_for(num_features: int, num_pairs: int, rate: float, step: float) -> StateSpace:
    """Return frequencies pi n of memories that all decay alike, and W = 1."""
    n = torch.arange(num_pairs, dtype=torch.float64).expand(num_features, -1)
    weight = torch.ones(1, num_features, num_pairs, dtype=torch.complex128)
    return StateSpace(torch.full_like(n, -step * rate), step * n / 2, weight)


def read_so_far(mixer: Any, direction: int, feature: int, tokens: list[float]) -> list[float]:
    """Write the recurrence of one feature out: y without D u, after every token."""
    num_pairs = mixer.config.state_dim // 2
    step = math.exp(mixer.log_step[feature].item())
    memories, outputs = [0j] * num_pairs, []
    for token in tokens:
        total = 0j
        for n in range(num_pairs):
            at = feature * num_pairs + n
            matrix = complex(-math.exp(mixer.log_rate[at].item()), mixer.frequency[at].item())
            memories[n] = cmath.exp(step * matrix) * memories[n] + (cmath.exp(step * matrix) - 1) / matrix * token
            total += complex(*mixer.readout[direction, feature, n].tolist()) * memories[n]
        outputs.append(2 * total.real)
    return outputs


@torch.no_grad()
def by_the_definition(mixer: Any, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Read every feature of every entry from the start, and without a causal mask from the end, one position behind."""
    output = torch.zeros_like(hidden)
    for entry, tokens in enumerate(hidden):
        is_padding = torch.zeros(len(tokens), dtype=torch.bool) if mask is None else mask[entry]
        rows = tokens.masked_fill(is_padding[:, None], 0.0)
        read = torch.zeros_like(rows)
        for feature in range(rows.shape[1]):
            given = rows[:, feature].tolist()
            read[:, feature] = torch.tensor(read_so_far(mixer, 0, feature, given), dtype=rows.dtype)
            if not mixer.build.is_causal:
                later = read_so_far(mixer, 1, feature, given[::-1])[::-1]
                read[:-1, feature] += torch.tensor(later[1:], dtype=rows.dtype)
        value, gate = mixer.out_proj(gelu(read + mixer.skip * rows)).chunk(2, dim=-1)
        output[entry] = (value * gate.sigmoid()).masked_fill(is_padding[:, None], 0.0)
    return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 19])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("options", [{}, {"state_dim": 2, "min_step": 0.5, "max_step": 4.0}])
def test_both_paths_are_the_definition(is_causal: bool, length: int, has_padding: bool, options: dict[str, Any]):
    mixer, hidden = make(is_causal, **options), draw(length)
    mask = padding_for(length) if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("has_padding", [False, True])
def test_the_convolution_equals_the_recurrence_with_gradients(is_causal: bool, length: int, has_padding: bool):
    mixer, mask = make(is_causal), padding_for(length) if has_padding else None
    weights, results = draw(length, seed=1), []
    for run in (mixer, mixer.reference):
        hidden = draw(length).requires_grad_()
        output = run(hidden, key_padding_mask=mask)
        results.append([output, *torch.autograd.grad(output, [hidden, *mixer.parameters()], weights)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_agree_with_finite_differences_twice(is_causal: bool):
    mixer, names = make(is_causal, state_dim=2), ("log_step", "log_rate", "frequency", "readout", "skip")

    def run(hidden: Tensor, *weights: Tensor) -> Tensor:
        given = dict(zip(names, weights, strict=True))
        found: Tensor = torch.func.functional_call(mixer, given, (hidden,))
        return found

    leaves = [draw(5)[:1], *(getattr(mixer, name).detach().clone() for name in names)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_an_entry_of_padding_only_gives_zeros_and_poison_goes_nowhere():
    for mixer in (make(False), make(True)):
        hidden, mask = draw(9).requires_grad_(), padding_for(9)
        output = mixer(hidden.masked_fill(mask[..., None], torch.nan), key_padding_mask=mask)
        assert output.isfinite().all()
        assert (output.masked_select(mask[..., None]) == 0).all()
        output.sum().backward()
        assert hidden.grad is not None
        assert torch.equal((hidden.grad == 0).all(-1), mask)
        assert all(p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_in_front", [False, True])
def test_padding_around_a_sequence_changes_nothing(is_causal: bool, is_in_front: bool):
    mixer, hidden, extra = make(is_causal), draw(50), draw(90, seed=2)
    mask = torch.zeros(BATCH, 140, dtype=torch.bool)
    own = slice(90, None) if is_in_front else slice(50)
    mask[:, : 90 if is_in_front else None] = True
    mask[:, own] = False
    longer = torch.cat([extra, hidden] if is_in_front else [hidden, extra], dim=1)
    torch.testing.assert_close(mixer(longer, key_padding_mask=mask)[:, own], mixer(hidden), rtol=0, atol=1e-12)


def test_directions_see_one_side_each():
    hidden = draw(12).requires_grad_()
    for is_causal in (True, False):
        (gradient,) = torch.autograd.grad(make(is_causal)(hidden)[0, 5].sum(), hidden)
        is_seen = gradient[0].abs().amax(-1) > 1e-12
        assert is_seen.tolist() == [position <= 5 or not is_causal for position in range(12)]


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 200])
def test_kernels_and_memories_are_sums_of_powers(length: int):
    torch.manual_seed(length)
    space = StateSpace(-torch.rand(2, 3).double(), torch.randn(2, 3).double(), torch.ones(1, 2, 3))
    matrix = torch.complex(space.log_decay, 2 * math.pi * space.turns)
    powers = torch.stack([(at * matrix).exp() for at in range(length)])  # [L, E, N / 2]
    weight = torch.randn(4, 2, 3, dtype=torch.complex128)
    expected = 2 * torch.einsum("men, len -> mel", weight, powers).real
    tables = space.tables(length, torch.float64)
    torch.testing.assert_close(respond(weight, tables, length), expected, rtol=0, atol=1e-12)
    tokens = torch.randn(BATCH, 2, length).double()
    expected = torch.einsum("bel, len -> ben", tokens.flip(-1).to(torch.complex128), powers)
    torch.testing.assert_close(gather(tokens, tables), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rate", [1e-6, 0.5, 3000.0])
def test_long_kernels_keep_their_digits_in_float32(rate: float):
    """An angle of 100 000 turns has two digits behind the point in float32; a decay may underflow to nothing."""
    length, num_pairs = 65_536, 8
    kernels = []
    for dtype in (torch.float32, torch.float64):
        space = space_for(1, num_pairs, rate, 0.45)
        kernels.append(respond(space.weight, space.tables(length, dtype), length)[0, 0].double())
    assert kernels[0].isfinite().all()
    assert (kernels[0] - kernels[1]).abs().max() < 4 * 2 * num_pairs * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_memories_keep_their_digits_in_narrow_types(is_causal: bool, dtype: torch.dtype):
    exact = make(is_causal, build={"embed_dim": 32}, state_dim=64)
    exact.load_state_dict({key: value.to(dtype).double() for key, value in exact.state_dict().items()})
    hidden = (draw(3000, 32) + 1.0).to(dtype)
    with torch.no_grad():
        expected = exact(hidden.double())
        output = exact.to(dtype)(hidden)
    assert output.dtype == dtype
    error = (output.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 8 * torch.finfo(dtype).eps


def test_autocast_reaches_the_linear_layer_only():
    mixer, hidden = make().float(), draw(300).float()
    tokens, state = hidden.mT.contiguous(), mixer.prefill(hidden)[1]
    space = space_for(EMBED, 4, 0.5, 0.1)
    tables = space.tables(300, torch.float32)
    kernel = respond(space.weight, tables, 300)
    runs = (
        lambda: respond(space.weight, tables, 300),
        lambda: gather(tokens, tables),
        lambda: convolve(tokens, kernel),
        lambda: mixer.prefill(hidden, state)[1],
        lambda: mixer.step(hidden[:, :1], state)[1],
    )
    outside = [run() for run in runs]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(run(), expected) for run, expected in zip(runs, outside, strict=True))
        assert mixer(hidden).dtype == torch.bfloat16


def test_decoding_goes_on_from_a_prefill_with_a_state_that_does_not_grow():
    mixer, hidden = make(), draw(120)
    expected = mixer(hidden)
    pieces, state = [1, 40, 2, 50], mixer.init_state(BATCH)
    rows, sizes = list[Tensor](), list[tuple[int, int]]()
    for length in pieces:
        at = sum(row.shape[1] for row in rows)
        output, state = mixer.prefill(hidden[:, at : at + length], state)
        rows.append(output)
    for at in range(sum(pieces), 120):
        row, state = mixer.step(hidden[:, at : at + 1], state)
        rows.append(row)
        sizes.append((state_bytes(state), state.untyped_storage().nbytes()))
    torch.testing.assert_close(torch.cat(rows, 1), expected, rtol=0, atol=1e-12)
    assert state.shape == (BATCH, EMBED, 3, 2)
    claim = variants["s4d"].complexity.state_bytes
    assert claim is not None
    shape = mixer.build.shape(BATCH, 1, 120, mixer.config, "mixer")
    assert set(sizes) == {(claim(shape, 8), claim(shape, 8))}
    assert mixer.prefill(hidden)[1].untyped_storage().nbytes() == claim(shape, 8)
    narrow = mixer.bfloat16().init_state(BATCH)
    assert (narrow.dtype, state_bytes(narrow)) == (torch.float32, claim(shape, 2))
    with pytest.raises(ValueError, match="one new position"):
        mixer.step(hidden, state)
    for refused in (lambda: make(False).init_state(1), lambda: make(False).prefill(hidden)):
        with pytest.raises(UnsupportedError, match="later tokens"):
            refused()


def test_gradients_pass_through_a_state():
    mixer, results = make(), []
    for end in (20, 7):
        hidden = draw(20).requires_grad_()
        output, state = mixer.prefill(hidden[:, :end])
        if end < 20:
            last, state = mixer.prefill(hidden[:, end:-1], state)
            row, state = mixer.step(hidden[:, -1:], state)
            output = torch.cat([output, last, row], dim=1)
        loss = output.sin().sum() + state.sin().sum()
        results.append([loss, *torch.autograd.grad(loss, [hidden, *mixer.parameters()])])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [200, 256])
def test_cost_is_what_runs_in_both_directions(is_causal: bool, length: int):
    mixer, variant = make(is_causal, build={"embed_dim": 24}, state_dim=16), variants["s4d"]
    hidden = draw(length, 24).requires_grad_()
    shape = mixer.build.shape(BATCH, length, config=mixer.config, form="mixer")
    forward = count_operations(lambda: mixer(hidden))
    both = count_operations(lambda: mixer(hidden).sum().backward())
    assert forward is not None
    assert both is not None
    claim, ratio = variant.flops(shape), variant.backward_ratio(shape)
    assert claim is not None
    assert ratio is not None
    assert forward.products == pytest.approx(claim, abs=3)  # each transform is rounded
    assert both.products == pytest.approx((1 + ratio) * claim, abs=9)
    num_transforms, size = 2 * BATCH + 1, transform_size(length)
    assert size == 512 if length == 256 else size == 2 * 16 * 13
    by_hand = 2.5 * num_transforms * 24 * size * math.log2(size) + 2 * (2 - is_causal) * 24 * 16 * size // 2
    assert claim == pytest.approx(by_hand + 4 * BATCH * length * 24 * 24, abs=1)
    assert sum(x.numel() for x in mixer.parameters()) * 4 == variant.min_bytes(shape, 4) - shape.io_bytes(4)
    with recording() as paths:
        mixer(hidden)
    assert paths == [f"s4d.{'one' if is_causal else 'two'}_way"]


@pytest.mark.parametrize("way", ["one", "two", "prefill"])
def test_no_power_of_every_memory_at_every_position_is_made(way: str):
    """Those alone would be E N L numbers, 64 for each number of a sequence; all that is made and kept is less."""
    length, embed_dim, state_dim = 4096, 16, 64
    mixer = make(way != "two", build={"embed_dim": embed_dim}, state_dim=state_dim).float()
    hidden = draw(length, embed_dim).float()[:1].requires_grad_()
    state = mixer.prefill(hidden)[1].detach() if way == "prefill" else None

    def run() -> Tensor:
        output: Tensor = (
            mixer(hidden) if state is None else torch.cat([x.flatten() for x in mixer.prefill(hidden, state)])
        )
        return output

    memory = memory_of_pass(run, [hidden, *mixer.parameters()], "fwd_bwd")
    assert memory.extra_bytes is not None
    assert memory.extra_bytes < 4 * embed_dim * state_dim * length / 2


def test_a_new_model_starts_as_the_paper_says():
    mixer = make(False, build={"embed_dim": 4000}, state_dim=8)
    rate, frequency = mixer.log_rate.exp().view(4000, 4), mixer.frequency.view(4000, 4)
    torch.testing.assert_close(rate, torch.full_like(rate, 0.5), atol=1e-6, rtol=0)
    torch.testing.assert_close(frequency, (torch.arange(4) * math.pi).double().expand(4000, -1), atol=1e-5, rtol=0)
    step = mixer.log_step.detach() / math.log(10)  # even in its logarithm, from -3 to -1
    assert -3 <= step.min() < -2.99
    assert -1.01 < step.max() <= -1
    assert step.mean().item() == pytest.approx(-2, abs=0.05)
    assert mixer.readout.shape == (2, 4000, 4, 2)
    assert mixer.readout.var().item() == pytest.approx(0.5, rel=0.05)
    assert mixer.skip.var().item() == pytest.approx(1, rel=0.1)
    # Of lists no weight decay is asked, of matrices it is.
    assert {name for name, x in mixer.named_parameters() if x.ndim > 1} == {"readout", "out_proj.weight"}


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_causal": False, "is_cross": True}, "cross_attention"),
        ({"embed_dim": 8, "num_heads": 4, "num_kv_heads": 2}, "grouped_query"),
        ({"dropout_p": 0.1}, "attention_dropout"),
        ({"position": "rotary"}, "positions"),
        ({"position": "alibi"}, "positions"),
    ],
)
def test_refusals(build: dict[str, Any], capability: str):
    with pytest.raises(UnsupportedError) as caught:
        make(build=build)
    assert caught.value.capability == capability


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"state_dim": 0}, "state_dim: expected an even number"),
        ({"state_dim": 5}, "state_dim: expected an even number"),
        ({"min_step": 0.0}, "0 < min_step <= max_step"),
        ({"min_step": 0.2}, "0 < min_step <= max_step"),
        ({"max_step": math.inf}, "0 < min_step <= max_step"),
    ],
)
def test_impossible_options(options: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        make(**options)


def test_there_is_no_form_over_heads_and_heads_do_not_matter():
    with pytest.raises(UnsupportedError, match="build_mixer"):
        build_attention("s4d", BuildContext(embed_dim=EMBED, num_heads=1, max_seq_len=64))
    hidden = draw(10, 12)
    one, four = (make(build={"embed_dim": 12, "num_heads": heads}) for heads in (1, 4))
    assert torch.equal(one(hidden), four(hidden))


def test_an_empty_batch_is_read_and_decoded():
    mixer = make(False)
    leaf = torch.empty(0, 7, EMBED, dtype=torch.float64, requires_grad=True)
    mixer(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape
    assert (mixer.log_rate.grad == 0).all()
    mixer = make(True)
    output, state = mixer.prefill(leaf.detach(), mixer.init_state(0))
    assert output.shape == leaf.shape
    assert mixer.step(output[:, :1], state)[1].shape == (0, EMBED, 3, 2)


def test_it_is_built_on_a_device_without_numbers():
    with torch.device("meta"):
        mixer = make(False)
    assert all(parameter.is_meta for parameter in mixer.parameters())
    mixer.load_state_dict(make(False).state_dict(), assign=True)
    assert torch.equal(mixer(draw(9)), make(False)(draw(9)))


def test_one_graph_for_the_compiler_with_gradients():
    mixer, hidden, results = make(), draw(50).requires_grad_(), []
    for run in (mixer, torch.compile(mixer, backend="aot_eager", fullgraph=True)):
        output = run(hidden, key_padding_mask=padding_for(50))
        results.append([output, *torch.autograd.grad(output.sin().sum(), [hidden, *mixer.parameters()])])
    for plain, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, plain)


@pytest.mark.parametrize("is_causal", [False, True])
def test_transforms_of_functions_agree_with_autograd(is_causal: bool):
    assert_transforms_as_autograd(make(is_causal), torch.stack([draw(13), draw(13, seed=1)]))


@torch.no_grad()
def test_one_graph_for_the_compiler_whatever_the_length():
    assert_one_graph(make(False), draw(50), draw(60))


@pytest.mark.parametrize(("level", "most_left"), [("language", 0.5), ("plain", 0.8)])
def test_it_learns_in_both_directions(level: str, most_left: float):
    with toy_task():
        result = run_training(cell(level, variant="s4d", num_layers=2))
    assert (result.status, result.reason) == ("ok", "")
    assert result.kernels == (f"s4d.{'one' if level == 'language' else 'two'}_way",)
    score = result.score
    assert score is not None
    assert score.train_flops
    assert score.curve[-1]["train_loss"] < most_left * score.curve[0]["train_loss"]
