"""Mega: its equations number by number, both directions and functions, chunks, hard decays, digits, state, cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.decode import state_bytes
from attn_zoo.kernels.long_convolution import transform_size, two_levels
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_operations
from attn_zoo.measure.memory import memory_of_pass
from attn_zoo.registry import variants
from attn_zoo.variants.mega import LAPLACE_MEAN, Average, MegaConfig, gather, respond
from tests.exactness import assert_one_graph, assert_transforms_as_autograd

BATCH, EMBED = 2, 4
SMALL: dict[str, Any] = {"chunk_len": 5, "ema_dim": 3, "query_dim": 6}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"attention_function": "laplace"},
    {"chunk_len": 0, "value_factor": 1},
    {"chunk_len": 0, "attention_function": "laplace", "ema_dim": 1},
    {"chunk_len": 1},
)


def make(is_causal: bool = True, *, build: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a mixer in float64 whose small weights are larger: of a new one all scores are about alike."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": 1, "max_seq_len": 320, "is_causal": is_causal}
    mixer: Any = build_mixer("mega", BuildContext(**{**sizes, **(build or {})}), **{**SMALL, **options})
    mixer = mixer.double().eval()
    with torch.no_grad():
        for weight in (mixer.kappa, mixer.mu, mixer.distance_bias):
            weight.normal_()
    return mixer


def draw(length: int, embed_dim: int = EMBED, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(length + seed)
    return torch.randn(BATCH, length, embed_dim, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2, length - 1]] = True
    mask[1] = True
    return mask


def averaged(mixer: Any, direction: int, feature: int, tokens: list[float]) -> list[float]:
    """Write the recurrence of one feature out: eta^T h after every token."""
    size, outputs = mixer.config.ema_dim, []
    alpha, delta = (getattr(mixer, name)[direction, feature].sigmoid().tolist() for name in ("alpha", "delta"))
    beta, eta = (getattr(mixer, name)[direction, feature].tolist() for name in ("beta", "eta"))
    memories = [0.0] * size
    for token in tokens:
        memories = [alpha[n] * beta[n] * token + (1 - alpha[n] * delta[n]) * memories[n] for n in range(size)]
        outputs.append(sum(eta[n] * memories[n] for n in range(size)) / math.sqrt(size))
    return outputs


def weights_of(mixer: Any, at: int, query: Tensor, keys: Tensor, is_padding: Tensor) -> list[float]:
    """Return the weight of every key for the query at a position."""
    chunk_len = mixer.config.chunk_len
    reach = chunk_len or mixer.build.max_seq_len
    seen = [
        j
        for j in range(len(keys))
        if not is_padding[j]
        and (not chunk_len or j // chunk_len == at // chunk_len)
        and (j <= at or not mixer.build.is_causal)
    ]
    weights = [0.0] * len(keys)
    if not seen:
        return weights
    is_softmax = mixer.config.attention_function == "softmax"
    tau = math.sqrt(len(query)) if is_softmax else len(seen)
    scores = {
        j: sum(a * b for a, b in zip(query.tolist(), keys[j].tolist(), strict=True)) / tau
        + mixer.distance_bias[j - at + reach - 1].item()
        for j in seen
    }
    for j, score in scores.items():
        if is_softmax:
            weights[j] = math.exp(score) / sum(math.exp(other) for other in scores.values())
        else:
            weights[j] = 0.5 * (1 + math.erf((score - math.sqrt(0.5)) / (math.sqrt(0.25 / math.pi) * math.sqrt(2))))
    return weights


@torch.no_grad()
def by_the_definition(mixer: Any, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Average every feature of every entry, and let its positions attend one by one."""
    output = torch.zeros_like(hidden)
    query_dim, value_dim = mixer.config.query_dim, mixer.value_proj.out_features
    for entry, tokens in enumerate(hidden):
        is_padding = torch.zeros(len(tokens), dtype=torch.bool) if mask is None else mask[entry]
        rows = tokens.masked_fill(is_padding[:, None], 0.0)
        mean = rows * mixer.omega
        for feature in range(rows.shape[1]):
            given = rows[:, feature].tolist()
            mean[:, feature] += torch.tensor(averaged(mixer, 0, feature, given), dtype=rows.dtype)
            if not mixer.build.is_causal:
                later = averaged(mixer, 1, feature, given[::-1])[::-1]
                mean[:, feature] += torch.tensor(later, dtype=rows.dtype)
        made = mixer.mean_proj(silu(mean))
        update, shared = made[:, :EMBED].sigmoid(), silu(made[:, EMBED : EMBED + query_dim])
        reset = silu(made[:, EMBED + query_dim : EMBED + query_dim + value_dim])
        # What keys have in common adds the same to all scores of a query, and softmax does not see it.
        shifts = [*mixer.mu, torch.full((query_dim,), 0.7)]
        queries, keys = (shared * mixer.kappa[i] + shifts[i] for i in range(2))
        values = silu(mixer.value_proj(rows))
        weights = [weights_of(mixer, i, queries[i], keys, is_padding) for i in range(len(rows))]
        attended = torch.tensor(weights, dtype=rows.dtype) @ values
        new = silu(made[:, -EMBED:] + mixer.out_proj(reset * attended))
        output[entry] = update * new + (1 - update) * rows
    return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_both_paths_are_the_definition(is_causal: bool, length: int, has_padding: bool, options: dict[str, Any]):
    mixer, hidden = make(is_causal, **options), draw(length)
    mask = padding_for(length) if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "chunk_len"), [(1, 5), (63, 16), (64, 16), (65, 16), (100, 300), (90, 7), (90, 0)])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("function", ["softmax", "laplace"])
def test_chunks_equal_dense_weights_with_gradients(
    is_causal: bool, length: int, chunk_len: int, has_padding: bool, function: str
):
    mixer = make(is_causal, chunk_len=chunk_len, attention_function=function)
    mask = padding_for(length) if has_padding else None
    weights, results = draw(length, seed=1), []
    for run in (mixer, mixer.reference):
        hidden = draw(length).requires_grad_()
        output = run(hidden, key_padding_mask=mask)
        leaves = [hidden, *mixer.parameters()]  # of one token no decay is read
        results.append([output, *torch.autograd.grad(output, leaves, weights, materialize_grads=True)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("function", ["softmax", "laplace"])
def test_gradients_agree_with_finite_differences_twice(is_causal: bool, function: str):
    mixer = make(is_causal, chunk_len=3, ema_dim=2, query_dim=2, value_factor=1, attention_function=function)
    names = "alpha", "delta", "beta", "eta", "omega", "kappa", "mu", "distance_bias"

    def run(hidden: Tensor, *weights: Tensor) -> Tensor:
        given = dict(zip(names, weights, strict=True))
        found: Tensor = torch.func.functional_call(mixer, given, (hidden,))
        return found

    leaves = [draw(4)[:1], *(getattr(mixer, name).detach().clone() for name in names)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("function", ["softmax", "laplace"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_an_entry_of_padding_only_gives_nothing_and_poison_goes_nowhere(is_causal: bool, function: str):
    mixer = make(is_causal, attention_function=function)
    hidden, mask = draw(9).requires_grad_(), padding_for(9)
    output = mixer(hidden.masked_fill(mask[..., None], torch.nan), key_padding_mask=mask)
    assert output.isfinite().all()
    output.sum().backward()
    assert hidden.grad is not None
    assert torch.equal((hidden.grad == 0).all(-1), mask)
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("function", ["softmax", "laplace"])
@pytest.mark.parametrize("is_in_front", [False, True])
def test_padding_around_a_sequence_changes_nothing(is_causal: bool, function: str, is_in_front: bool):
    """In front there are whole chunks of it: others begin elsewhere."""
    mixer, hidden, extra = make(is_causal, attention_function=function), draw(23), draw(40, seed=2)
    mask = torch.zeros(BATCH, 63, dtype=torch.bool)
    own = slice(40, None) if is_in_front else slice(23)
    mask[:] = True
    mask[:, own] = False
    longer = torch.cat([extra, hidden] if is_in_front else [hidden, extra], dim=1)
    torch.testing.assert_close(mixer(longer, key_padding_mask=mask)[:, own], mixer(hidden), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_len", [5, 0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_average_reaches_beyond_the_chunk_that_attends(is_causal: bool, chunk_len: int):
    hidden, mixer, at = draw(17).requires_grad_(), make(is_causal, chunk_len=chunk_len), 12
    for has_average in (True, False):
        if not has_average:
            torch.nn.init.zeros_(mixer.eta)
        (gradient,) = torch.autograd.grad(mixer(hidden)[0, at].sum(), hidden)
        reach = range(10, 15) if chunk_len and not has_average else range(17)
        seen = [position in reach and (position <= at or not is_causal) for position in range(17)]
        assert (gradient[0].abs().amax(-1) > 1e-13).tolist() == seen


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 200])
def test_kernels_and_memories_are_sums_of_powers(length: int):
    torch.manual_seed(length)
    average = Average(-torch.rand(2, 3, 4).double(), torch.randn(2, 3, 4).double())
    blocks, places = average.tables(length, torch.float64)
    powers = torch.stack([(at * average.log_decay).exp() for at in range(length)])  # [L, 2, E, N]
    expected = torch.einsum("den, lden -> del", average.weight, powers)
    torch.testing.assert_close(respond(average.weight, blocks, places, length), expected, rtol=0, atol=1e-12)
    memories = torch.randn(BATCH, 3, 4).double()
    expected = torch.einsum("ben, len -> bel", memories, powers[:, 0])
    torch.testing.assert_close(respond(memories, blocks[:1], places[:1], length), expected, rtol=0, atol=1e-12)
    tokens = torch.randn(BATCH, 3, length).double()
    expected = torch.einsum("bel, len -> ben", tokens.flip(-1), powers[:, 1])
    torch.testing.assert_close(gather(tokens, blocks[1], places[1]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("alpha", "delta", "decay"),
    [(60.0, 60.0, 0.0), (20.0, 20.0, 0.0), (-20.0, 0.0, 1.0), (0.0, -20.0, 1.0), (-60.0, -60.0, 1.0)],
)
def test_decays_to_nothing_and_to_none(alpha: float, delta: float, decay: float, is_causal: bool, dtype: torch.dtype):
    """In float32 a sigmoid of 20 is 1, whose memory is nothing after a step; one of -20 takes 10^8 steps to decay."""
    mixer, results = make(is_causal).to(dtype), []
    with torch.no_grad():
        mixer.alpha.fill_(alpha)
        mixer.delta.fill_(delta)
        mixer.eta.div_(mixer.alpha.sigmoid())  # as much of a token as ever
    assert mixer._average().decay(1, dtype).sub(decay).abs().max() < 1e-8
    for run in (mixer, mixer.reference):
        hidden = draw(250).to(dtype).requires_grad_()
        output = run(hidden)
        gradients = torch.autograd.grad(output.sin().sum(), [hidden, *mixer.parameters()])
        results.append([output, *gradients])
    for fast, slow in zip(*results, strict=True):
        assert fast.isfinite().all()
        allowed = (1e-4 if dtype == torch.float32 else 1e-11) * slow.abs().max() + 1e-300
        assert (fast - slow).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", ["softmax", "laplace"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_averages_keep_their_digits_in_narrow_types(is_causal: bool, function: str, dtype: torch.dtype):
    sizes = {"embed_dim": 32, "max_seq_len": 4096}
    exact = make(is_causal, build=sizes, chunk_len=300, ema_dim=16, query_dim=16, attention_function=function)
    with torch.no_grad():
        exact.alpha.sub_(6.0)  # memories of hundreds of tokens
        exact.eta.mul_(20.0)
    exact.load_state_dict({key: value.to(dtype).double() for key, value in exact.state_dict().items()})
    hidden = (draw(1500, 32) + 0.1).to(dtype)
    with torch.no_grad():
        expected = exact(hidden.double())
        output = exact.to(dtype)(hidden)
    assert output.dtype == dtype
    error = (output.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 16 * torch.finfo(dtype).eps


def test_autocast_leaves_the_average_alone():
    mixer, hidden = make(chunk_len=16).float(), draw(100).float()
    tokens, average = hidden.mT.contiguous(), mixer._average()
    blocks, places = average.tables(100, torch.float32)
    state = mixer.prefill(hidden)[1]
    runs = (
        lambda: respond(average.weight, blocks, places, 100),
        lambda: gather(tokens, blocks[0], places[0]),
        lambda: mixer.prefill(hidden, state)[1].memory,
        lambda: mixer.step(hidden[:, :1], state)[1].memory,
    )
    outside = [run() for run in runs]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(run(), expected) for run, expected in zip(runs, outside, strict=True))
        start = mixer.init_state(BATCH)
        assert (start.key.dtype, start.memory.dtype) == (torch.bfloat16, torch.float32)
        for after in (mixer.prefill(hidden, start)[1], mixer.step(hidden[:, :1], start)[1]):
            assert (after.key.dtype, after.value.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("function", ["softmax", "laplace"])
@pytest.mark.parametrize("pieces", [[1, 17, 2, 6], [5, 5, 11], [30], [3]])
def test_decoding_goes_on_from_a_prefill_with_a_state_that_does_not_grow(pieces: list[int], function: str):
    mixer, hidden = make(attention_function=function), draw(40)
    expected = mixer(hidden)
    state = mixer.init_state(BATCH)
    rows, sizes = list[Tensor](), [state_bytes(state)]
    for length in pieces:
        at = sum(row.shape[1] for row in rows)
        output, state = mixer.prefill(hidden[:, at : at + length], state)
        rows.append(output)
        sizes.append(state_bytes(state))
    for at in range(sum(pieces), 40):
        row, state = mixer.step(hidden[:, at : at + 1], state)
        rows.append(row)
        sizes.append(state_bytes(state))
    torch.testing.assert_close(torch.cat(rows, 1), expected, rtol=0, atol=1e-12)
    claim = variants["mega"].complexity.state_bytes
    assert claim is not None
    shape = mixer.build.shape(BATCH, 1, 40, mixer.config, "mixer")
    assert set(sizes) == {claim(shape, 8)} == {8 * BATCH * (EMBED * 3 + 5 * (6 + 2 * EMBED))}
    step = variants["mega"].complexity.step_bytes
    assert step is not None
    filled = [step(mixer.build.shape(BATCH, 1, length, mixer.config, "mixer"), 8) for length in (4, 5, 7)]
    assert filled == [8 * BATCH * (EMBED * 3 + count * (6 + 2 * EMBED)) for count in (4, 0, 2)]
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in (state.key, state.value))  # no view keeps a prompt
    narrow = mixer.bfloat16().init_state(BATCH)
    assert (narrow.memory.dtype, narrow.key.dtype) == (torch.float32, torch.bfloat16)
    assert state_bytes(narrow) == claim(shape, 2)


def test_a_state_is_the_same_however_its_tokens_came():
    mixer, hidden = make(), draw(13)
    stepped = mixer.init_state(BATCH)
    for at in range(13):
        _, stepped = mixer.step(hidden[:, at : at + 1], stepped)
    read = mixer.prefill(hidden)[1]
    for name in ("memory", "key", "value"):
        torch.testing.assert_close(getattr(stepped, name), getattr(read, name), rtol=0, atol=1e-12)
    assert stepped.position == read.position == 13
    assert not read.key[:, 3:].any()
    with pytest.raises(ValueError, match="one new position"):
        mixer.step(hidden, read)


def test_what_cannot_be_decoded_says_why():
    with pytest.raises(UnsupportedError, match="later tokens"):
        make(False).init_state(1)
    with pytest.raises(UnsupportedError, match="without chunks"):
        make(True, chunk_len=0).prefill(draw(5))


def test_gradients_pass_through_a_state():
    mixer, results = make(), []
    for end in (20, 7):
        hidden = draw(20).requires_grad_()
        output, state = mixer.prefill(hidden[:, :end])
        if end < 20:
            last, state = mixer.prefill(hidden[:, end:-1], state)
            row, state = mixer.step(hidden[:, -1:], state)
            output = torch.cat([output, last, row], dim=1)
        loss = output.sin().sum() + state.memory.sin().sum() + state.key.sum()
        results.append([loss, *torch.autograd.grad(loss, [hidden, *mixer.parameters()])])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "chunk_len"), [(200, 64), (256, 64), (40, 64), (100, 0)])
def test_cost_is_what_runs_in_both_directions(is_causal: bool, length: int, chunk_len: int):
    options = {"chunk_len": chunk_len, "ema_dim": 6, "query_dim": 10}
    mixer, variant = make(is_causal, build={"embed_dim": 24, "max_seq_len": 256}, **options), variants["mega"]
    hidden = draw(length, 24).requires_grad_()
    shape = mixer.build.shape(BATCH, length, config=mixer.config, form="mixer")
    forward = count_operations(lambda: mixer(hidden))
    both = count_operations(lambda: mixer(hidden).sum().backward())
    claim, ratio = variant.flops(shape), variant.backward_ratio(shape)
    assert forward is not None
    assert both is not None
    assert claim is not None
    assert ratio is not None
    assert forward.products == pytest.approx(claim, abs=3)  # each transform is rounded
    assert both.products == pytest.approx((1 + ratio) * claim, abs=9)
    size, (count, places), in_chunk = transform_size(length), two_levels(length), min(chunk_len or length, length)
    rows = BATCH * -(-length // in_chunk) * in_chunk
    by_hand = 2.5 * (2 * BATCH + 1) * 24 * size * math.log2(size) + 2 * (2 - is_causal) * 24 * count * places * 6
    by_hand += 2 * rows * in_chunk * (10 + 48)
    projections = 2 * BATCH * length * 24 * (48 + (24 + 10 + 48 + 24) + 48)
    assert claim == pytest.approx(by_hand + projections, abs=1)
    unread = 0  # biases of distances that no chunk of this length has
    if (left := (chunk_len or 256) - in_chunk) > 0:
        unread = left * (2 - is_causal)
    num_weights = sum(x.numel() for x in mixer.parameters())
    assert (num_weights - unread) * 4 == variant.min_bytes(shape, 4) - shape.io_bytes(4)
    with recording() as paths:
        mixer(hidden)
    assert paths == [f"mega.{'one' if is_causal else 'two'}_way"]


def test_claims_know_whether_there_are_chunks():
    variant = variants["mega"]
    exponents = [
        (claim.time_exponent, claim.memory_exponent, "L^2" in claim.time)
        for claim in (variant.complexity_of(MegaConfig(chunk_len=size)) for size in (128, 0))
    ]
    assert exponents == [(1, 1, False), (2, 2, True)]


@pytest.mark.parametrize("way", ["one", "two", "prefill"])
def test_no_memory_of_every_position_and_no_weight_between_chunks_is_made(way: str):
    """Those alone would be 64 and 128 numbers for each number of a sequence; all that is made and kept is less."""
    length, embed_dim = 2048, 16
    mixer = make(way != "two", build={"embed_dim": embed_dim, "max_seq_len": length}, chunk_len=8, ema_dim=64).float()
    hidden = draw(length, embed_dim).float()[:1].requires_grad_()

    def run() -> Tensor:
        output: Tensor = mixer.prefill(hidden)[0] if way == "prefill" else mixer(hidden)
        return output

    memory = memory_of_pass(run, [hidden, *mixer.parameters()], "fwd_bwd")
    assert memory.extra_bytes is not None
    assert memory.extra_bytes < 4 * embed_dim * length * 64


def test_a_new_model_starts_as_the_authors():
    torch.manual_seed(0)
    build = BuildContext(embed_dim=500, num_heads=1, max_seq_len=8)
    mixer: Any = build_mixer("mega", build, ema_dim=5, query_dim=400, chunk_len=1000)
    for weight, mean, spread in (
        (mixer.alpha, 0.0, 0.2),
        (mixer.delta, 0.0, 0.2),
        (mixer.beta[..., ::2], 1.0, 0.02),
        (mixer.beta[..., 1::2], -1.0, 0.02),
        (mixer.eta, 0.0, 1.0),
        (mixer.omega, 0.0, 1.0),
        (mixer.kappa, 0.0, 0.02),
        (mixer.distance_bias, 0.0, 0.02),
    ):
        assert weight.mean().item() == pytest.approx(mean, abs=0.15 * spread)
        assert weight.std().item() == pytest.approx(spread, rel=0.1)
    assert not mixer.mu.any()
    assert (mixer.alpha.shape, mixer.distance_bias.shape) == ((2, 500, 5), (1999,))


def test_the_laplace_function_meets_the_squared_rectifier_at_its_mean():
    """There both are 1 / 2, and so steep as the square is."""
    mixer = make(False, attention_function="laplace", chunk_len=0)
    bias = torch.tensor([[LAPLACE_MEAN]], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, 6, dtype=torch.float64)
    weight = mixer._weigh(zero, zero, bias, None)
    (slope,) = torch.autograd.grad(weight.sum(), bias)
    assert weight.item() == pytest.approx(LAPLACE_MEAN**2)
    assert slope.item() == pytest.approx(2 * LAPLACE_MEAN)


def test_dropout_drops_weights_in_training_forwards_alone():
    mixer, hidden = make(build={"dropout_p": 0.5}), draw(12)
    assert torch.equal(mixer(hidden), make()(hidden))
    mixer.train()
    torch.manual_seed(1)
    outputs = torch.stack([mixer(hidden) for _ in range(2)])
    assert not torch.allclose(*outputs)
    step = torch.stack([mixer.step(hidden[:, :1], mixer.init_state(BATCH))[0] for _ in range(2)])
    assert torch.equal(*step)
    assert torch.equal(mixer.prefill(hidden)[0], mixer.eval().prefill(hidden)[0])


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_causal": False, "is_cross": True}, "cross_attention"),
        ({"embed_dim": 8, "num_heads": 4, "num_kv_heads": 2}, "grouped_query"),
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
        ({"chunk_len": -1}, "chunk_len: expected at least 0"),
        ({"ema_dim": 0}, "ema_dim: expected at least 1"),
        ({"query_dim": 0}, "query_dim: expected at least 1"),
        ({"value_factor": 0}, "value_factor: expected at least 1"),
        ({"attention_function": "relu2"}, "expected one of softmax, laplace"),
    ],
)
def test_impossible_options(options: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        make(**options)


def test_there_is_no_form_over_heads_and_heads_do_not_matter():
    with pytest.raises(UnsupportedError, match="build_mixer"):
        build_attention("mega", BuildContext(embed_dim=EMBED, num_heads=1, max_seq_len=64))
    hidden = draw(10, 12)
    one, four = (make(build={"embed_dim": 12, "num_heads": heads}) for heads in (1, 4))
    assert torch.equal(one(hidden), four(hidden))


def test_an_empty_batch_is_read_and_decoded():
    mixer = make(False)
    leaf = torch.empty(0, 7, EMBED, dtype=torch.float64, requires_grad=True)
    mixer(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape
    assert (mixer.alpha.grad == 0).all()
    mixer = make(True)
    output, state = mixer.prefill(leaf.detach(), mixer.init_state(0))
    assert output.shape == leaf.shape
    assert mixer.step(output[:, :1], state)[1].memory.shape == (0, EMBED, 3)


def test_it_is_built_on_a_device_without_numbers():
    with torch.device("meta"):
        mixer = make(False)
    assert all(parameter.is_meta for parameter in mixer.parameters())
    mixer.load_state_dict(make(False).state_dict(), assign=True)
    assert torch.equal(mixer(draw(9)), make(False)(draw(9)))


def test_one_graph_for_the_compiler_with_gradients():
    mixer, hidden, results = make(chunk_len=16), draw(50).requires_grad_(), []
    for run in (mixer, torch.compile(mixer, backend="aot_eager", fullgraph=True)):
        output = run(hidden, key_padding_mask=padding_for(50))
        results.append([output, *torch.autograd.grad(output.sin().sum(), [hidden, *mixer.parameters()])])
    for plain, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, plain)


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_graph_for_the_compiler_whatever_the_length(is_causal: bool):
    assert_one_graph(make(is_causal, chunk_len=16), draw(50), draw(60))


@pytest.mark.parametrize("is_causal", [False, True])
def test_transforms_of_functions_agree_with_autograd(is_causal: bool):
    assert_transforms_as_autograd(make(is_causal), torch.stack([draw(13), draw(13, seed=1)]))
