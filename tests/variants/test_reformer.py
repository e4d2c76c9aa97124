"""Reformer: the appendix' equations term by term, hashes, duplicates, what the future may decide, padding, cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_operations
from attn_zoo.measure.memory import SavedTensors
from attn_zoo.metadata import Request
from attn_zoo.model import Classifier, ModelConfig
from attn_zoo.registry import variants
from attn_zoo.variants import reformer
from attn_zoo.variants.reformer import EPS, Reformer, ReformerConfig
from tests.exactness import assert_exact, assert_one_graph

BATCH, HEADS, DIM, EMBED = 2, 2, 3, 5
SMALL: dict[str, Any] = {"chunk_len": 4, "num_rounds": 3}
FEW_BUCKETS: dict[str, Any] = {"chunk_len": 3, "num_rounds": 2, "num_buckets": 4}


def make(*, build: dict[str, Any] | None = None, dtype: torch.dtype = torch.float64, **options: Any) -> Reformer:
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": HEADS, "head_dim": DIM, "max_seq_len": 64}
    torch.manual_seed(0)
    module = build_mixer("reformer", BuildContext(**(sizes | (build or {}))), **(SMALL | options)).to(dtype).eval()
    assert isinstance(module, Reformer)
    return module


def draw(length: int, embed_dim: int = EMBED, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(length + 1000 * seed)
    return torch.randn(BATCH, length, embed_dim, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    """Entry 0 ends in padding, every third token of entry 1 is padding."""
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, length - length // 3 :] = True
    mask[1, 2::3] = True
    return mask


def hashed(query: Tensor, rotation: Tensor, num_buckets: int) -> list[int]:
    """Return argmax([x R; -x R]) of each row of `[n, D]`."""
    rotated = (query @ rotation[:, : num_buckets // 2]).tolist()
    both = [[*row, *(-number for number in row)] for row in rotated]
    return [row.index(max(row)) for row in both]


def chunk_places(query: Tensor, rotation: Tensor, config: ReformerConfig) -> list[tuple[int, int]]:
    """Return the bucket and the chunk of each row: sorted by bucket, then position, and cut."""
    num_buckets = config.num_buckets or 2 * math.ceil(len(query) / config.chunk_len)
    buckets = hashed(query, rotation, num_buckets)
    order = sorted(range(len(query)), key=lambda i: (buckets[i], i))
    return [(buckets[i], order.index(i) // config.chunk_len) for i in range(len(query))]


def attend(query: Tensor, value: Tensor, mixer: Reformer) -> Tensor:
    """Write equations 12 to 16 out for the tokens of one head, `[n, D]`, pair by pair."""
    config, count = mixer.config, len(query)
    key = torch.stack([row / math.sqrt(float(row @ row) + EPS * DIM) for row in query])
    scores = (query @ key.mT).tolist()
    rounds = [chunk_places(query, rotation, config) for rotation in mixer.rotations.to(query.dtype)]

    def is_seen(places: list[tuple[int, int]], i: int, j: int) -> bool:
        is_near = places[i][1] - 1 <= places[j][1] <= places[i][1]
        return is_near and places[i][0] == places[j][0] and (j <= i or not mixer.build.is_causal)

    rows = []
    for i in range(count):
        results, totals = [], []
        for places in rounds:
            terms = {}
            for j in (j for j in range(count) if is_seen(places, i, j)):
                times = sum(is_seen(other, i, j) for other in rounds)  # N_ij
                terms[j] = scores[i][j] - (1e5 if i == j else math.log(times))
            highest = max(terms.values())
            totals.append(highest + math.log(sum(math.exp(term - highest) for term in terms.values())))
            results.append(sum(math.exp(term - totals[-1]) * value[j] for j, term in terms.items()))
        shares = torch.tensor(totals, dtype=query.dtype).softmax(0)
        rows.append(sum(share * result for share, result in zip(shares, results, strict=True)))
    return torch.stack(rows)


@torch.no_grad()
def by_the_definition(mixer: Reformer, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Attend among the tokens that are not padding; zeros at the others."""
    output = torch.zeros_like(hidden)
    for entry, rows in enumerate(hidden):
        real = torch.ones(len(rows), dtype=torch.bool) if mask is None else ~mask[entry]
        query, value = mixer.query_proj(rows[real]), mixer.value_proj(rows[real])
        parts = [slice(head * DIM, (head + 1) * DIM) for head in range(HEADS)]
        heads = [attend(query[:, part], value[:, part], mixer) for part in parts]
        output[entry, real] = mixer.out_proj(torch.cat(heads, dim=-1))
    return output


@pytest.mark.parametrize("length", [1, 2, 4, 7, 30])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("options", [{}, FEW_BUCKETS, {"chunk_len": 40, "num_rounds": 1}], ids=str)
def test_both_paths_are_the_definition(length: int, is_causal: bool, has_padding: bool, options: dict[str, Any]):
    mixer, hidden = make(build={"is_causal": is_causal}, **options), draw(length)
    mask = padding_for(length) if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-10)


def test_autocast_changes_no_bucket():
    mixer = make(build={"max_seq_len": 400}, dtype=torch.float32)
    query = torch.randn(1, HEADS, 400, DIM)
    expected = reformer.choose_buckets(query, mixer.rotations, mixer.config, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reformer.choose_buckets(query, mixer.rotations, mixer.config, None), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"chunk_len": 16}, {"chunk_len": 12, "num_buckets": 6}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_the_reference_under_the_same_routing(
    dtype: torch.dtype, options: dict[str, Any], is_causal: bool
):
    sizes = {"embed_dim": 24, "num_heads": 2, "head_dim": 16, "max_seq_len": 301, "is_causal": is_causal}
    module, exact_module = (make(build=sizes, dtype=each, **options) for each in (dtype, torch.float64))
    exact_module.load_state_dict(module.state_dict())
    hidden, mask = draw(301, 24).to(dtype), padding_for(301)
    routing = module.route(hidden, key_padding_mask=mask)
    upstream = torch.randn(BATCH, 301, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upstream = upstream.masked_fill(mask[..., None], 0.0)
    results = []
    for kind in ("fast", "plain", "exact"):
        used = exact_module if kind == "exact" else module
        leaf = (hidden.double() if kind == "exact" else hidden.clone()).requires_grad_()
        given = {} if kind == "fast" else {"routing": routing}
        run = used if kind == "fast" else used.reference
        output = run(leaf, key_padding_mask=mask, **given)
        leaves = [leaf, *used.parameters()]
        results.append([output, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))])
    names = ["output", "hidden", *dict(module.named_parameters())]
    for name, fast, plain, exact in zip(names, *results, strict=True):
        assert fast.isfinite().all()
        assert_exact(fast, plain, exact, name)


@pytest.mark.parametrize(("is_causal", "has_padding"), [(False, True), (True, False)])
def test_gradients_of_both_orders_agree_with_finite_differences(is_causal: bool, has_padding: bool):
    mixer, mask = make(build={"is_causal": is_causal}, num_rounds=2), padding_for(7) if has_padding else None

    def run(hidden: Tensor) -> Tensor:
        return mixer(hidden, key_padding_mask=mask)

    leaf = draw(7).requires_grad_()
    assert torch.autograd.gradcheck(run, leaf)
    assert torch.autograd.gradgradcheck(run, leaf)


def test_a_hash_knows_directions_only():
    mixer, hidden = make(), draw(30)
    buckets = mixer.route(hidden)
    assert buckets.shape == (BATCH, HEADS, 3, 30)
    assert set(buckets.unique().tolist()) <= set(range(16)), "2 * 30 / 4, rounded up to whole chunks"
    assert torch.equal(mixer.route(7.0 * hidden), buckets)
    assert torch.equal(mixer.route(-hidden), (buckets + 8) % 16)
    assert (buckets[:, :, 1:] != buckets[:, :, :-1]).any(), "rounds have rotations of their own"


def test_hashes_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch):
    mixer, hidden, mask = make(), draw(31), padding_for(31)
    whole = mixer.route(hidden, key_padding_mask=mask)
    monkeypatch.setattr(reformer, "_MOST_PRODUCTS", 7 * 3 * 8)
    assert torch.equal(mixer.route(hidden, key_padding_mask=mask), whole)


def test_a_routing_that_is_given_decides():
    mixer, hidden = make(chunk_len=3, num_rounds=1), draw(12)
    one_bucket = torch.zeros_like(mixer.route(hidden))
    at = torch.arange(12)
    chunk = at // 3
    keep = (chunk[:, None] - chunk >= 0) & (chunk[:, None] - chunk <= 1) & (at[:, None] != at)
    query, value = (p(hidden).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for p in (mixer.query_proj, mixer.value_proj))
    scores = query @ torch.nn.functional.normalize(query, dim=-1).mT
    weights = scores.masked_fill(~keep, float("-inf")).softmax(-1)
    expected = mixer.out_proj((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixer.reference(hidden, routing=one_bucket), expected, rtol=0, atol=1e-5)
    assert (mixer.reference(hidden) - expected).abs().max() > 1e-2


def test_a_pair_that_all_rounds_see_counts_once():
    """Rounds that repeat the first change nothing."""
    once, often, hidden = make(num_rounds=1), make(num_rounds=4), draw(30)
    often.load_state_dict(once.state_dict() | {"rotations": once.rotations.expand(4, -1, -1)})
    torch.testing.assert_close(often(hidden), once(hidden), rtol=0, atol=1e-12)


@torch.no_grad()
def test_more_rounds_come_nearer_to_attention_over_all_others():
    """One chunk and many hashes of two buckets, so that every two tokens meet."""
    hidden = draw(16)
    errors = []
    for count in (1, 4, 200):
        mixer = make(chunk_len=16, num_buckets=2, num_rounds=count)
        query, value = (
            p(hidden).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for p in (mixer.query_proj, mixer.value_proj)
        )
        scores = query @ (query / (query.square().sum(-1, keepdim=True) + EPS * DIM).sqrt()).mT
        weights = scores.masked_fill(torch.eye(16, dtype=torch.bool), float("-inf")).softmax(-1)
        full = mixer.out_proj((weights @ value).transpose(1, 2).flatten(2))
        errors.append(float((mixer(hidden) - full).norm() / full.norm()))
    assert errors[0] > 2 * errors[1] > 1e3 * errors[2]
    assert errors[2] < 1e-12


def test_a_token_without_another_sees_itself():
    mixer = make(build={"is_causal": True})
    hidden = draw(20)
    own = mixer.out_proj(mixer.value_proj(hidden))
    torch.testing.assert_close(mixer(hidden)[:, 0], own[:, 0], rtol=0, atol=1e-14)
    torch.testing.assert_close(make()(hidden[:, :1]), own[:, :1], rtol=0, atol=1e-14)
    assert (mixer(hidden)[:, 10:] - own[:, 10:]).abs().amax(-1).min() > 1e-6


def test_the_future_is_not_seen_but_moves_chunks():
    mixer, hidden = make(build={"is_causal": True}), draw(40)
    leaf = hidden.clone().requires_grad_()
    (grad,) = torch.autograd.grad(mixer(leaf)[:, :20].square().sum(), leaf)
    assert torch.equal(grad[:, 20:], torch.zeros_like(grad[:, 20:]))
    assert (grad[:, :20] != 0).any(-1).all()
    changed = torch.cat([hidden[:, :20], draw(40, seed=1)[:, 20:]], dim=1)
    assert torch.equal(mixer.route(changed)[..., :20], mixer.route(hidden)[..., :20])
    assert (mixer(changed)[:, :20] - mixer(hidden)[:, :20]).abs().max() > 1e-3, "else it could be causal=True"
    refusal = variants["reformer"].capabilities.why_not(Request(is_causal=True, is_autoregressive=True))
    assert refusal is not None
    assert "sees the future" in refusal


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{}, FEW_BUCKETS], ids=str)
def test_a_padded_sequence_is_as_it_is_alone(is_causal: bool, options: dict[str, Any]):
    """With garbage in the padding, and padded more or less; one of nothing else is zero and harms no other."""
    mixer, hidden = make(build={"is_causal": is_causal}, **options), draw(40)
    alone = [mixer(hidden[:1, :9]), mixer(hidden[1:, :25])]
    for length in (25, 40):
        batch = torch.full((3, length, EMBED), math.nan, dtype=torch.float64)
        batch[0, :9], batch[1, :25] = hidden[0, :9], hidden[1, :25]
        mask = torch.arange(length) >= torch.tensor([9, 25, 0])[:, None]
        output = mixer(batch, key_padding_mask=mask)
        for entry, expected in enumerate(alone):
            torch.testing.assert_close(output[entry : entry + 1, : expected.shape[1]], expected, rtol=0, atol=1e-14)
        assert torch.equal(output.masked_fill(~mask[..., None], 0.0), torch.zeros_like(output))


def test_dropout_draws_once_for_each_pair():
    """Of tokens that are unit vectors, under maps that do nothing, the output is the weights."""
    sizes = {"embed_dim": 24, "num_heads": 1, "head_dim": 24, "max_seq_len": 24}
    plain, dropping = (
        make(build=sizes | {"dropout_p": p}, chunk_len=6, num_rounds=4, num_buckets=2) for p in (0.0, 0.5)
    )
    for mixer in (plain, dropping):
        mixer.load_state_dict(plain.state_dict())
        for name in ("value_proj", "out_proj"):
            getattr(mixer, name).weight.data = torch.eye(24, dtype=torch.float64)
    tokens = torch.eye(24, dtype=torch.float64).expand(40, -1, -1)
    weights = plain(tokens)
    torch.testing.assert_close(weights.sum(-1), torch.ones(40, 24, dtype=torch.float64))
    torch.manual_seed(0)
    is_pair = (weights > 0) & (weights < 1)
    assert is_pair.sum() > 40 * 24 * 8
    ratio = (dropping.train()(tokens) / weights)[is_pair]
    is_kept = ratio > 1
    torch.testing.assert_close(ratio, 2.0 * is_kept.double())
    assert abs(float(is_kept.double().mean()) - 0.5) < 5 * 0.5 / len(ratio) ** 0.5
    assert torch.equal(dropping.eval()(tokens), weights)


@pytest.mark.parametrize("length", [5, 64, 100, 256])
@pytest.mark.parametrize("options", [{}, {"num_buckets": 6}, {"chunk_len": 32, "num_rounds": 1}], ids=str)
def test_cost_is_what_runs_in_both_directions(length: int, options: dict[str, Any]):
    mixer, variant = make(build={"max_seq_len": length}, **options), variants["reformer"]
    hidden = draw(length).requires_grad_()
    shape = mixer.build.shape(BATCH, length, config=mixer.config, form="mixer")
    forward = count_operations(lambda: mixer(hidden))
    both = count_operations(lambda: mixer(hidden).sum().backward())
    assert forward is not None
    assert both is not None
    assert forward.products == variant.flops(shape)
    ratio = variant.backward_ratio(shape)
    assert ratio is not None
    assert both.products == pytest.approx((1 + ratio) * forward.products, rel=1e-9)
    weights = sum(x.numel() for x in (*mixer.parameters(), *mixer.buffers()))
    assert variant.min_bytes(shape, 4) == shape.io_bytes(4) + 4 * weights
    with recording() as paths:
        mixer(hidden)
    assert paths == ["reformer.chunks"]


def test_what_is_kept_for_the_backward_grows_with_the_length():
    kept = []
    for length in (512, 1024):
        mixer = make(build={"max_seq_len": 1024}, chunk_len=16)
        with SavedTensors() as saved:
            output = mixer(draw(length).requires_grad_())
        kept.append(saved.num_bytes)
        del output
    assert kept[1] == pytest.approx(2 * kept[0], rel=0.01)


def test_the_claimed_exponent_follows_from_the_buckets():
    claims = variants["reformer"].complexity
    assert ReformerConfig().claim(claims).time_exponent == 2
    assert ReformerConfig(num_buckets=64).claim(claims).time_exponent == 1


def test_rotations_follow_from_seed_and_layer():
    first = make().rotations
    assert torch.equal(make().rotations, first)
    assert first.shape == (3, DIM, 16)
    assert not torch.equal(make(build={"seed": 1}).rotations, first)
    assert not torch.equal(make(build={"layer_index": 1}).rotations, first)
    assert torch.equal(make()(draw(30)), make()(draw(30)))
    assert not torch.equal(make(build={"seed": 1})(draw(30)), make()(draw(30)))
    assert "rotations" in make().state_dict()


@pytest.mark.parametrize(("is_causal", "has_padding"), [(False, True), (True, False)])
def test_one_graph_with_the_same_numbers(is_causal: bool, has_padding: bool):
    mixer = make(build={"is_causal": is_causal, "dropout_p": 0.2}, chunk_len=8, num_rounds=2).train()
    hidden, mask = draw(50).requires_grad_(), padding_for(50) if has_padding else None
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    found = []
    for run in (mixer, compiled):
        torch.manual_seed(1)
        output = run(hidden, key_padding_mask=mask)
        found.append((output, *torch.autograd.grad(output.square().sum(), [hidden, *mixer.parameters()])))
    torch.compiler.reset()
    for plain, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, plain, rtol=0, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
def test_transforms_of_functions_agree_with_autograd(is_causal: bool):
    mixer, entries = make(build={"is_causal": is_causal}), torch.stack([draw(13), draw(13, seed=1)])
    weights = {name: parameter.detach() for name, parameter in mixer.named_parameters()}

    def loss(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(mixer, weights, (hidden,))
        return output.sin().sum()

    gradients = torch.func.grad(loss, argnums=(0, 1))
    of_all = torch.func.vmap(gradients, in_dims=(None, 0))(weights, entries)
    for at, entry in enumerate(entries):
        leaf = entry.clone().requires_grad_()
        expected = torch.autograd.grad(mixer(leaf).sin().sum(), [*mixer.parameters(), leaf])
        of_weights, of_hidden = gradients(weights, entry)
        for gradient, each in zip([*of_weights.values(), of_hidden], expected, strict=True):
            torch.testing.assert_close(gradient, each, rtol=0, atol=1e-12)
        for gradient, each in zip([*of_all[0].values(), of_all[1]], expected, strict=True):
            torch.testing.assert_close(gradient[at], each, rtol=0, atol=1e-12)


@torch.no_grad()
def test_one_graph_for_several_lengths():
    """Of whole chunks; those of other lengths share another one. Its gradients are those of the test above."""
    assert_one_graph(make(chunk_len=8, num_rounds=2), draw(24), draw(40))
    torch.compiler.reset()


def test_all_parameters_of_a_model_learn():
    model = Classifier(ModelConfig(variant="reformer", options=SMALL, vocab_size=9, max_seq_len=20, num_layers=2), 3)
    tokens = torch.randint(1, 9, (2, 20), generator=torch.Generator().manual_seed(0))
    model(tokens).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_cross": True}, "cross_attention"),
        ({"num_kv_heads": 1}, "grouped_query"),
        ({"position": "rotary"}, "positions"),
        ({"position": "alibi"}, "positions"),
    ],
)
def test_refusals(build: dict[str, Any], capability: str):
    with pytest.raises(UnsupportedError) as caught:
        make(build=build)
    assert caught.value.capability == capability


def test_impossible_options():
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"chunk_len": 0}, "chunk_len: expected at least 1; got 0"),
        ({"num_rounds": 0}, "num_rounds: expected at least 1; got 0"),
        ({"num_buckets": 3}, "num_buckets: expected an even number, or 0 for 2 L / C; got 3"),
        ({"num_buckets": -2}, "num_buckets: expected an even number, or 0 for 2 L / C; got -2"),
    )
    for options, words in wrong:
        with pytest.raises(ConfigError, match=words):
            make(**options)
    with pytest.raises(UnsupportedError, match="borders of all chunks"):
        make(build={"is_causal": True}).init_state(1)
    with pytest.raises(UnsupportedError, match="build_mixer"):
        build_attention("reformer", BuildContext(embed_dim=EMBED, num_heads=1, max_seq_len=64))
