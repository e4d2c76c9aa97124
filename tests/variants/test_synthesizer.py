"""Synthesizer: every kind of scores by the definition, token by token; gradients, masks, decoding, cost, options."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.measure.flop_count import count_operations
from attn_zoo.registry import variants
from attn_zoo.variants.synthesizer import Synthesizer

BATCH, HEADS, DIM, EMBED, LONGEST = 2, 2, 3, 5, 20

KINDS: list[dict[str, Any]] = [
    {},
    {"is_fixed": True},
    {"scores": ("factorized_random",), "rank": 4},
    {"scores": ("dense",)},
    {"scores": ("factorized_dense",), "tile_len": 3},
    {"scores": ("factorized_dense",), "tile_len": 64},
    {"scores": ("random", "dot_product")},
    {"scores": ("dot_product", "dense", "factorized_random"), "is_fixed": True},
]
NAMES = [" ".join([*kind.get("scores", ("random",)), *(["fixed"] if kind.get("is_fixed") else [])]) for kind in KINDS]


def make(options: dict[str, Any] | None = None, **build: Any) -> Synthesizer:
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": HEADS, "head_dim": DIM, "max_seq_len": LONGEST, **build}
    torch.manual_seed(0)
    mixer = build_mixer("synthesizer", BuildContext(**sizes), **(options or {})).double().eval()
    assert isinstance(mixer, Synthesizer)
    if len(mixer.config.scores) > 1:  # shares that differ
        torch.nn.init.normal_(mixer.mixture)
    return mixer


def draw(length: int, embed_dim: int = EMBED) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(BATCH, length, embed_dim, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2, length - 1]] = True
    return mask


def score(mixer: Synthesizer, kind: str, tokens: Tensor, head: int, i: int, j: int) -> Tensor:
    """Write out the score of query i and key j of one sequence `[L, E]`."""
    part, found = slice(head * DIM, (head + 1) * DIM), torch.zeros(())
    if kind == "random":
        found = mixer.random[head, i, j]
    if kind == "factorized_random":
        found = (mixer.random_rows[head, i] * mixer.random_columns[head, j]).sum()
    if kind == "dense":
        inner = mixer.dense_proj(tokens[i])[part].clamp(min=0)
        found = mixer.dense.weight[head, j] @ inner + mixer.dense.bias[head, j]
    if kind == "factorized_dense":
        inner, (tile, place) = mixer.factor_proj(tokens[i])[part].clamp(min=0), divmod(j, mixer.config.tile_len)
        a = mixer.tiles.weight[head, tile] @ inner + mixer.tiles.bias[head, tile]
        b = mixer.in_tile.weight[head, place] @ inner + mixer.in_tile.bias[head, place]
        found = a * b
    if kind == "dot_product":
        assert mixer.key_proj is not None
        found = mixer.query_proj(tokens[i])[part] @ mixer.key_proj(tokens[j])[part] / DIM**0.5
    return found


def mixed_score(mixer: Synthesizer, tokens: Tensor, head: int, i: int, j: int) -> Tensor:
    kinds, shares = mixer.config.scores, [1.0]
    if len(kinds) > 1:
        powers = [math.exp(float(x)) for x in mixer.mixture]
        shares = [power / sum(powers) for power in powers]
    total = torch.zeros((), dtype=torch.float64)
    for share, kind in zip(shares, kinds, strict=True):
        total = total + share * score(mixer, kind, tokens, head, i, j)
    return total


def by_the_definition(mixer: Synthesizer, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Write section 3 out for each sequence, position and head."""
    is_causal, outputs = mixer.build.is_causal, []
    for entry, tokens in enumerate(hidden):
        rows = []
        for i in range(len(tokens)):
            keys = [j for j in range(i + 1 if is_causal else len(tokens)) if mask is None or not mask[entry, j]]
            heads = []
            for head in range(HEADS):
                part = slice(head * DIM, (head + 1) * DIM)
                total: Any = torch.zeros(DIM, dtype=torch.float64)
                powers = [torch.exp(mixed_score(mixer, tokens, head, i, j)) for j in keys]
                for j, power in zip(keys, powers, strict=True):
                    total = total + power / sum(powers) * mixer.value_proj(tokens[j])[part]
                heads.append(total)
            rows.append(mixer.out_proj(torch.cat(heads)))
        outputs.append(torch.stack(rows))
    return torch.stack(outputs)


@pytest.mark.parametrize("options", KINDS, ids=NAMES)
@pytest.mark.parametrize("length", [1, 7, 10])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_it_is_the_definition(options: dict[str, Any], length: int, is_causal: bool, has_padding: bool):
    mixer, hidden = make(options, is_causal=is_causal, max_seq_len=10), draw(length)
    mask = padding_for(length) if has_padding else None
    with torch.no_grad():
        expected = by_the_definition(mixer, hidden, mask)
        kept = slice(None) if mask is None else ~mask
        for run in (mixer, mixer.reference):
            torch.testing.assert_close(run(hidden, key_padding_mask=mask)[kept], expected[kept], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", KINDS, ids=NAMES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_agree_with_finite_differences(options: dict[str, Any], is_causal: bool):
    mixer, mask = make(options, is_causal=is_causal, max_seq_len=6), padding_for(5)
    weights = list(mixer.parameters())

    def run(hidden: Tensor, *_: Tensor) -> Tensor:
        return mixer(hidden, key_padding_mask=mask)[~mask]

    assert torch.autograd.gradcheck(run, (draw(5).requires_grad_(), *weights))


def test_dot_products_alone_are_softmax_attention():
    mixer, hidden = make({"scores": ("dot_product",)}), draw(11)
    assert mixer.key_proj is not None
    query, key, value = (
        projection(hidden).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        for projection in (mixer.query_proj, mixer.key_proj, mixer.value_proj)
    )
    expected = mixer.out_proj(softmax_attention(query, key, value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixer(hidden), expected, rtol=0, atol=1e-13)


def test_scores_of_positions_know_no_token_and_dense_scores_only_their_own():
    """Other values at one position change outputs by its weight alone: random weights stay, a dense row changes."""
    hidden = draw(8)
    changed = hidden.clone()
    changed[:, 3] += 1.0
    for options, expected in (({}, []), ({"scores": ("dense",)}, [3]), ({"scores": ("dot_product",)}, list(range(8)))):
        mixer = make(options)
        with torch.no_grad():  # values that are the same everywhere leave nothing but weights
            one, other = (mixer._scores(mixer.config.scores[0], x, mixer._read(x).key, 8) for x in (hidden, changed))
        rows = (one - other).abs().amax((0, 1, 3))
        assert [i for i in range(8) if rows[i] > 1e-9] == expected


def test_fixed_matrices_are_drawn_by_seed_and_layer_and_not_learned():
    options: dict[str, Any] = {"scores": ("random", "factorized_random"), "is_fixed": True}
    places: tuple[dict[str, Any], ...] = ({}, {}, {"seed": 1}, {"layer_index": 1})
    mixers = [make(options, **place) for place in places]
    matrices: list[Tensor] = [mixer.get_buffer("random") for mixer in mixers]
    assert torch.equal(matrices[0], matrices[1])
    assert not torch.equal(matrices[0], matrices[2])
    assert not torch.equal(matrices[0], matrices[3])
    assert {"random", "random_rows", "random_columns"} <= set(mixers[0].state_dict())
    assert not [name for name, _ in mixers[0].named_parameters() if name.startswith("random")]
    assert [name for name, _ in make().named_parameters() if name.startswith("random")] == ["random"]


@pytest.mark.parametrize("rank", [1, 8])
def test_products_of_factors_start_with_variance_one(rank: int):
    build = BuildContext(embed_dim=8, num_heads=8, max_seq_len=200)
    mixer = build_mixer("synthesizer", build, scores=("factorized_random",), rank=rank)
    assert isinstance(mixer, Synthesizer)
    products = mixer.random_rows @ mixer.random_columns.mT
    assert float(products.detach().var()) == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("options", KINDS, ids=NAMES)
def test_later_tokens_change_nothing_before_them(options: dict[str, Any]):
    mixer, hidden = make(options, is_causal=True), draw(9)
    changed = torch.cat([hidden[:, :5], 3.0 - hidden[:, 5:]], dim=1)
    torch.testing.assert_close(mixer(changed)[:, :5], mixer(hidden)[:, :5], rtol=0, atol=0)


@pytest.mark.parametrize("options", KINDS, ids=NAMES)
def test_padding_may_hold_anything(options: dict[str, Any]):
    mixer, hidden = make(options), draw(7)
    longer = torch.cat([hidden, torch.full((BATCH, 4, EMBED), float("nan"), dtype=torch.float64)], 1).requires_grad_()
    mask = torch.zeros(BATCH, 11, dtype=torch.bool)
    mask[:, 7:] = True
    padded = mixer(longer, key_padding_mask=mask)[:, :7]
    torch.testing.assert_close(padded, mixer(hidden), rtol=0, atol=1e-13)
    padded.square().sum().backward()
    assert longer.grad is not None
    assert torch.equal(longer.grad[:, 7:], torch.zeros(BATCH, 4, EMBED, dtype=torch.float64))
    assert all(x.grad is not None and x.grad.isfinite().all() for x in mixer.parameters())


@pytest.mark.parametrize("options", KINDS, ids=NAMES)
def test_a_sequence_that_is_cut_anywhere_is_the_causal_forward(options: dict[str, Any]):
    mixer, hidden = make(options, is_causal=True), draw(12)
    first, state = mixer.prefill(hidden[:, :5])
    second, state = mixer.step(hidden[:, 5:6], state)
    third, _ = mixer.prefill(hidden[:, 6:], state)
    torch.testing.assert_close(torch.cat([first, second, third], dim=1), mixer(hidden), rtol=0, atol=1e-13)


def test_decoding_ends_at_the_last_row_of_scores():
    mixer = make(is_causal=True)
    _, state = mixer.prefill(draw(LONGEST))
    with pytest.raises(ValueError, match=f"at most max_seq_len = {LONGEST} tokens; this makes {LONGEST + 1}"):
        mixer.step(draw(1), state)
    with pytest.raises(ValueError, match="one new position"):
        mixer.step(draw(2), state)


@pytest.mark.parametrize("options", KINDS, ids=NAMES)
@pytest.mark.parametrize("length", [64, 200])
def test_cost_is_what_runs_in_both_directions(options: dict[str, Any], length: int):
    mixer, variant = make(options, embed_dim=8, max_seq_len=length), variants["synthesizer"]
    hidden = draw(length, 8).requires_grad_()
    shape = mixer.build.shape(BATCH, length, config=mixer.config, form="mixer")
    forward, both = count_operations(lambda: mixer(hidden)), count_operations(lambda: mixer(hidden).sum().backward())
    assert forward is not None
    assert both is not None
    assert forward.products == variant.flops(shape)
    ratio = variant.backward_ratio(shape)
    assert ratio is not None
    assert both.products == pytest.approx((1 + ratio) * forward.products, rel=1e-12)
    read = sum(x.numel() for x in (*mixer.parameters(), *mixer.buffers()))
    assert variant.min_bytes(shape, 4) - shape.io_bytes(4) == 4 * read


def test_scores_without_tokens_are_made_once_for_a_batch():
    """The largest tensor of a call is one matrix of scores, whatever the batch."""
    mixer, length = make(max_seq_len=64), 64
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.append(out.untyped_storage().nbytes() // 8 if isinstance(out, Tensor) else 0)
            return out

    with torch.no_grad(), Sizes():
        mixer(torch.randn(8, length, EMBED, dtype=torch.float64))
    assert max(sizes) == HEADS * length**2


def test_dropout_acts_on_weights_of_each_sequence_for_itself():
    mixer = make(dropout_p=0.5).train()
    hidden = draw(9)[:1].expand(2, -1, -1)
    torch.manual_seed(0)
    one, two = mixer(hidden), mixer(hidden)
    assert not torch.equal(one, two)
    assert not torch.equal(one[0], one[1])
    assert torch.equal(mixer.eval()(hidden), make()(hidden))
    _, state = make(is_causal=True, dropout_p=0.5).train().prefill(hidden)
    assert state.value.shape[2] == 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", KINDS, ids=NAMES)
def test_sixteen_bits_come_near(options: dict[str, Any], dtype: torch.dtype):
    mixer, hidden = make(options).to(dtype), draw(LONGEST).to(dtype)
    short = mixer(hidden)
    assert short.dtype == dtype
    expected = mixer.double()(hidden.double())
    assert (short.double() - expected).abs().max() < 8 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_cross": True}, "cross_attention"),
        ({"num_kv_heads": 1}, "grouped_query"),
        ({"position": "rotary"}, "positions"),
    ],
)
def test_refusals(build: dict[str, Any], capability: str):
    with pytest.raises(UnsupportedError) as caught:
        make(**build)
    assert caught.value.capability == capability


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank: expected at least 1"),
        ({"tile_len": 0}, "tile_len: expected at least 1"),
        ({"scores": ()}, r"scores: expected one or more, each once; got \[\]"),
        ({"scores": ("dense", "dense")}, "scores: expected one or more, each once"),
        ({"scores": ("dens",)}, r"scores\.0: expected one of random, .*; got 'dens'; did you mean 'dense'\?"),
        ({"scores": ("dense",), "is_fixed": True}, "is_fixed: expected scores with matrices of positions"),
    ],
)
def test_impossible_options(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        make(options)


def test_it_needs_hidden_states_and_no_state_without_a_direction():
    with pytest.raises(UnsupportedError, match="build_mixer"):
        build_attention("synthesizer", BuildContext(embed_dim=EMBED, num_heads=1, max_seq_len=8))
    with pytest.raises(UnsupportedError, match="is_causal=True"):
        make().prefill(draw(3))


ALL_SCORES = ("random", "factorized_random", "dense", "factorized_dense", "dot_product")


@pytest.mark.parametrize(
    ("options", "is_causal"),
    [({}, True), ({"scores": ALL_SCORES, "tile_len": 3}, False), ({"scores": ALL_SCORES[:2], "is_fixed": True}, True)],
    ids=["one for all", "all", "fixed"],
)
def test_one_graph_for_the_compiler(options: dict[str, Any], is_causal: bool):
    """All kinds are parts of one graph; what is hidden is hidden in their sum, whatever the kind."""
    mixer, hidden = make(options, is_causal=is_causal), draw(16)
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    for mask in (None, padding_for(16)):
        kept = slice(None) if mask is None else ~mask
        found = []
        for run in (compiled, mixer):
            output = run(hidden, key_padding_mask=mask)[kept]
            found.append([output, *torch.autograd.grad(output.sin().sum(), list(mixer.parameters()))])
        for traced, plain in zip(*found, strict=True):
            torch.testing.assert_close(traced, plain)
