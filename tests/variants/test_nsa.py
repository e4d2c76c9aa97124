"""Native sparse attention is the paper's three branches, chooses as it says, and decodes as it reads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_mixer
from attn_zoo.attention.masks import causal_keep, masked_softmax
from attn_zoo.kernels.trace import recording
from attn_zoo.registry import variants
from attn_zoo.variants import nsa
from attn_zoo.variants.nsa import Nsa, NsaConfig, importance, nsa_flops, selection_mask, visible_rows

BATCH, HEADS, DIM, WIDTH = 2, 4, 8, 12
OPTIONS: dict[str, Any] = {
    "compress_len": 8,
    "compress_stride": 4,
    "block_size": 16,
    "num_blocks": 5,
    "window_size": 10,
}
OTHERS: dict[str, Any] = {
    "compress_len": 6,
    "compress_stride": 2,
    "block_size": 8,
    "num_blocks": 3,
    "num_initial_blocks": 0,
    "num_local_blocks": 1,
    "window_size": 1,
}


def make(build: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **changes: Any) -> Nsa:
    sizes: dict[str, Any] = {"embed_dim": WIDTH, "num_heads": HEADS, "head_dim": DIM, "max_seq_len": 1024}
    torch.manual_seed(1)
    context = BuildContext(is_causal=True, **{**sizes, **(build or {})})
    mixer = build_mixer("nsa", context, **{**(options or OPTIONS), **changes}).double().eval()
    assert isinstance(mixer, Nsa)
    return mixer


def draw(length: int) -> Tensor:
    return torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(length), dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    """Entry 0 ends in padding and has a block of nothing else; every fifth key of entry 1 is padding."""
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, 3 * length // 4 :] = True
    mask[0, 16:32] = True
    mask[1, ::5] = True
    return mask


def by_the_definition(mixer: Nsa, hidden: Tensor, padding: Tensor | None) -> Tensor:
    """Write equations 5 to 12 out, query by query, with the indices of the paper, which begin at 1."""
    config, build, length = mixer.config, mixer.build, hidden.shape[1]
    size, stride, block_size = config.compress_len, config.compress_stride, config.block_size
    groups = build.num_kv_heads
    if padding is not None:
        hidden = hidden.masked_fill(padding[..., None], 0.0)
    heads = torch.zeros(BATCH, length, HEADS, DIM, dtype=torch.float64)
    for entry in range(BATCH):
        real = [padding is None or not bool(padding[entry, j]) for j in range(length)]
        queries = mixer.query_proj(hidden[entry]).view(length, HEADS, DIM)
        keys = mixer.key_proj(hidden[entry]).view(length, 3, groups, DIM)
        values = mixer.value_proj(hidden[entry]).view(length, 3, groups, DIM)
        gates = mixer.gate_proj(hidden[entry]).sigmoid().view(length, 3, HEADS)
        for group in range(groups):
            compressed = []  # key, value, and whether there is something in it, of blocks i = 1, 2, ..
            for start in range(0, length - size + 1, stride):
                rows = slice(start, start + size)
                phi = [
                    part.out_proj(silu(part.hidden_proj((x[rows, 0, group] + part.places).flatten())))
                    for part, x in ((mixer.compress_keys, keys), (mixer.compress_values, values))
                ]
                compressed.append((*phi, any(real[rows])))
            members = range(group * HEADS // groups, (group + 1) * HEADS // groups)
            for t in range(length):
                seen = [i for i, each in enumerate(compressed) if i * stride + size - 1 <= t and each[2]]
                own = t // block_size
                likings = dict.fromkeys(range(length // block_size + 1), 0.0)
                for head in members:
                    if not seen:
                        continue
                    scores = torch.stack([compressed[i][0] for i in seen]) @ queries[t, head] / math.sqrt(DIM)
                    weights = dict(zip(seen, scores.softmax(0), strict=True))
                    heads[entry, t, head] += gates[t, 0, head] * sum(w * compressed[i][1] for i, w in weights.items())
                    for j in likings:  # equation 9, of p indexed from 1
                        for m in range(block_size // stride):
                            for n in range(size // stride):
                                index = block_size // stride * (j + 1) - m - n
                                likings[j] += float(weights.get(index - 1, 0.0))
                first, last = config.num_initial_blocks, own - config.num_local_blocks + 1
                fixed = {j for j in range(own + 1) if j < first or j >= last}
                choices = [j for j in range(first, last) if any(real[j * block_size : (j + 1) * block_size])]
                choices.sort(key=lambda j: -likings[j])
                chosen = fixed | set(choices[: config.num_blocks - config.num_fixed])
                for branch, keep in (
                    (1, [j for j in range(t + 1) if j // block_size in chosen and real[j]]),
                    (2, [j for j in range(t + 1) if t - j < config.window_size and real[j]]),
                ):
                    for head in members:
                        if keep:
                            scores = keys[keep, branch, group] @ queries[t, head] / math.sqrt(DIM)
                            output = scores.softmax(0) @ values[keep, branch, group]
                            heads[entry, t, head] += gates[t, branch, head] * output
    mixed: Tensor = mixer.out_proj(heads.flatten(2))
    return mixed


@pytest.mark.parametrize("length", [1, 8, 45, 96])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize(("options", "num_kv_heads"), [(OPTIONS, 4), (OPTIONS, 2), (OTHERS, 1)])
def test_both_paths_are_the_definition(length: int, has_padding: bool, options: dict[str, Any], num_kv_heads: int):
    mixer, hidden = make({"num_kv_heads": num_kv_heads}, options), draw(length)
    padding = padding_for(length) if has_padding else None
    with torch.no_grad():
        expected = by_the_definition(mixer, hidden, padding)
        actual = mixer(hidden, key_padding_mask=padding), mixer.reference(hidden, key_padding_mask=padding)
    for output in actual:
        if padding is not None:
            output, expected = (x.masked_fill(padding[..., None], 0.0) for x in (output, expected))
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("position", ["none", "rotary"])
def test_gradients_are_those_of_the_reference_under_the_same_routing(has_padding: bool, position: str):
    mixer, hidden = make({"num_kv_heads": 2, "position": position}), draw(150).requires_grad_()
    padding = padding_for(150) if has_padding else None
    weights = draw(150).flip(1)
    if padding is not None:
        weights = weights.masked_fill(padding[..., None], 0.0)
    routing = mixer.route(hidden, key_padding_mask=padding)
    learned = [hidden, *mixer.parameters()]
    actual, expected = (
        torch.autograd.grad((output * weights).sum(), learned)
        for output in (
            mixer(hidden, key_padding_mask=padding),
            mixer.reference(hidden, key_padding_mask=padding, routing=routing),
        )
    )
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_importance_is_a_share_of_weight_for_tokens_in_common():
    """1, 2, 2, 2, 1 for the paper's sizes, and what overlaps by more tokens counts more whatever the sizes."""
    weights = torch.eye(23)
    paper = importance(weights[:, :23], 6, NsaConfig())
    assert paper[:, 1].tolist()[3:8] == [1.0, 2.0, 2.0, 2.0, 1.0]
    for options in (OPTIONS, OTHERS, {**OPTIONS, "compress_len": 16}):
        config = NsaConfig(**options)
        num_rows = config.num_compressed(6 * config.block_size)
        found = importance(torch.eye(num_rows), 6, config)
        for row in range(num_rows):
            tokens = set(range(row * config.compress_stride, row * config.compress_stride + config.compress_len))
            for block in range(6):
                common = tokens & set(range(block * config.block_size, (block + 1) * config.block_size))
                assert found[row, block] * config.compress_stride == len(common)


def test_heads_of_a_group_choose_together_and_groups_apart():
    routing = make({"num_kv_heads": 2}).route(draw(160))
    assert routing.shape == (BATCH, 2, 160, 2)
    assert (routing[:, 0, 100:] != routing[:, 1, 100:]).any()
    assert (routing[:, :, :63] < 0).any(-1).all()  # the third block is the first to choose from, and there is one
    last = routing[:, :, 144:]
    assert (last >= 1).all()
    assert (last <= 7).all()
    assert (last[..., 0] != last[..., 1]).all()


def test_a_routing_that_is_given_decides():
    mixer, hidden = make(), draw(160)
    routing = mixer.route(hidden)
    other = torch.where(routing < 0, routing, torch.tensor([3, -1]))
    keep = selection_mask(other, 160, mixer.config)
    assert int(keep[0, 0, 159].sum()) == 4 * 16  # the first, the two last, and the third
    output = mixer.reference(hidden, routing=other)
    assert torch.equal(output[:, :48], mixer.reference(hidden)[:, :48])
    assert not torch.allclose(output[:, 140:], mixer.reference(hidden)[:, 140:])


def test_enough_blocks_and_a_long_window_are_full_attention():
    mixer, hidden = make(num_blocks=9, window_size=120), draw(120)
    with torch.no_grad():
        heads = mixer._heads(hidden)
        keys, values = heads.keys, heads.values
        exact = [
            masked_softmax(heads.query @ keys[branch].mT * DIM**-0.5, causal_keep(120, 120)) @ values[branch]
            for branch in (1, 2)
        ]
        compressed = mixer.compress_keys(keys[0]), mixer.compress_values(values[0])
        keep = visible_rows(torch.arange(120), 29, mixer.config)
        first = masked_softmax(heads.query @ compressed[0].mT * DIM**-0.5, keep) @ compressed[1]
        expected = mixer._merge((first, exact[0], exact[1]), heads.gates)
        torch.testing.assert_close(mixer(hidden), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", [7, 8, 9, 11, 12, 13, 40])
def test_compressed_rows_are_seen_from_their_last_token_on(length: int):
    """The folding into d heads under a causal flag, at every remainder of the stride."""
    mixer = make()
    num_rows = mixer.config.num_compressed(length)
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(1, HEADS, length, DIM, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 1, HEADS, num_rows, DIM, generator=generator, dtype=torch.float64)
    keep = visible_rows(torch.arange(length), num_rows, mixer.config)
    assert [int(seen) for seen in keep.sum(-1)] == [mixer.config.num_compressed(t + 1) for t in range(length)]
    expected = masked_softmax(query @ keys.mT * DIM**-0.5, keep) @ values
    actual = mixer._attend_compressed(query, keys, values, None, 0.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)


def test_rotary_positions_turn_selection_and_window_by_distance_alone():
    """A prompt is read alike at once and in steps; what is compared is turned, and what is compressed is not."""
    mixer, plain, hidden = make({"position": "rotary"}), make(), draw(70)
    turned, bare = mixer._heads(hidden, 5), plain._heads(hidden)
    assert torch.equal(turned.query, bare.query)
    assert torch.equal(turned.keys[0], bare.keys[0])
    assert torch.equal(turned.values, bare.values)
    assert not torch.allclose(turned.turned, bare.turned)
    shifted = mixer._heads(hidden, 31)
    for branch in (1, 2):
        one, other = (x.turned @ x.keys[branch].mT for x in (turned, shifted))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [OPTIONS, OTHERS])
@pytest.mark.parametrize("length", [5, 16, 96, 101, 150])
def test_flops_count_visible_pairs_scores_and_phi(length: int, options: dict[str, Any]):
    mixer = make({"num_kv_heads": 2}, options)
    config = mixer.config
    rows = config.num_compressed(length)
    seen = int(visible_rows(torch.arange(length), rows, config).sum())
    selected = float(selection_mask(mixer.route(draw(length)), length, config).sum()) / (BATCH * 2)
    window = sum(min(t + 1, config.window_size) for t in range(length))
    scored = seen if length > config.block_size * config.num_fixed else 0
    phi = sum(weight.numel() for name, weight in mixer.compress_keys.named_parameters() if name.endswith("weight"))
    shape = mixer.build.shape(3, length, config=config, form="mixer")
    wanted = HEADS * DIM * (4 * (seen + selected + window) + 2 * scored) + 2 * 2 * 2 * rows * phi
    assert nsa_flops(shape) == 3 * wanted


@pytest.mark.parametrize("position", ["none", "rotary"])
@pytest.mark.parametrize("options", [OPTIONS, OTHERS])
def test_decoding_chooses_as_the_forward_does(options: dict[str, Any], position: str):
    mixer, hidden = make({"num_kv_heads": 2, "position": position}, options), draw(110)
    with torch.no_grad():
        expected = mixer(hidden)
        output, state = mixer.prefill(hidden[:, :37])
        outputs = [output]
        for part in (slice(37, 38), slice(38, 60), slice(60, 61), slice(61, 110)):  # at once from a state, too
            output, state = mixer.prefill(hidden[:, part], state)
            outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=0, atol=1e-13)
    assert state.selected.length == 110
    assert state.compressed.length == mixer.config.num_compressed(110)
    assert state.pending_keys.shape[2] == 110 - state.compressed.length * mixer.config.compress_stride


@pytest.mark.parametrize("num_tokens", [7, 16, 40, 70, 130])
@pytest.mark.parametrize("options", [OPTIONS, OTHERS])
def test_a_step_reads_what_is_claimed_and_no_more(num_tokens: int, options: dict[str, Any]):
    """What it reads of the caches shows where it is not a number; compressed rows are read to choose by, too."""
    mixer = make({"num_heads": 1}, options)
    hidden = torch.randn(1, num_tokens + 1, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    num_read = 0
    with torch.no_grad():
        _, state = mixer.prefill(hidden[:, :-1])
        for cache, length in ((state.selected, num_tokens), (state.window, state.window.length)):
            for tensor in (cache.key, cache.value):
                for row in range(length):
                    kept = tensor[:, :, row].clone()
                    tensor[:, :, row] = math.nan
                    output, _ = mixer.step(hidden[:, -1:], state)
                    tensor[:, :, row] = kept
                    num_read += DIM * bool(output.isnan().any())
    num_read += 2 * state.compressed.keys.numel()
    shape = mixer.build.shape(1, num_tokens, config=mixer.config, form="mixer")
    of_state = variants["nsa"].complexity.step_bytes
    assert of_state is not None
    assert of_state(shape, 8) == 8 * num_read


def test_routing_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch):
    mixer, hidden = make({"num_kv_heads": 2}), draw(150)
    whole = mixer.route(hidden)
    monkeypatch.setattr(nsa, "_CPU_SCORES", 0)
    monkeypatch.setattr(nsa, "_MIN_ROWS", 7)
    assert torch.equal(mixer.route(hidden), whole)


def test_one_graph_with_the_same_numbers():
    mixer, hidden = make(), draw(100).requires_grad_()
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    learned = [hidden, *mixer.parameters()]
    results = []
    for run in (mixer, compiled):
        output = run(hidden)
        results.append((output, *torch.autograd.grad(output.square().sum(), learned)))
    torch.compiler.reset()
    for plain, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, plain, rtol=0, atol=1e-11)


def test_the_paths_and_refusals():
    with recording() as paths:
        make()(draw(96))
    assert sorted(set(paths)) == ["block_sparse.gather", "sdpa.flash"]
    with pytest.raises(UnsupportedError, match="no bidirectional form: compressed rows and the last blocks"):
        build_mixer("nsa", BuildContext(embed_dim=16, num_heads=2, max_seq_len=8))
    with pytest.raises(UnsupportedError, match="backend 'flex' has none"):
        make({"dropout_p": 0.1}, backend="flex")
    with pytest.raises(UnsupportedError, match="CUDA"):
        make(backend="triton")(draw(16))
    state = make({"max_seq_len": 8}).prefill(draw(8))[1]
    with pytest.raises(ValueError, match="at most max_seq_len = 8 tokens; this makes 9"):
        make({"max_seq_len": 8}).step(draw(1), state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compress_stride": 5}, "compress_len: expected a multiple of compress_stride; got 8 and 5"),
        ({"block_size": 18}, "block_size: expected a multiple of compress_stride; got 18 and 4"),
        ({"block_size": 4}, "block_size: expected at least compress_len = 8; got 4"),
        ({"num_blocks": 2}, "num_blocks: expected at least the 3 always taken; got 2"),
        ({"window_size": 0}, "window_size: expected at least 1; got 0"),
        ({"num_initial_blocks": -1}, "num_initial_blocks: expected at least 0; got -1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        make(**options)


def test_it_trains_with_dropout_in_each_branch():
    mixer, hidden = make({"dropout_p": 0.5}).train(), draw(100)
    mixer(hidden).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
    heads = mixer._heads(hidden)
    compressed = mixer.compress_keys(heads.keys[0]), mixer.compress_values(heads.values[0])
    for branch in range(3):
        gates = torch.zeros_like(heads.gates)
        gates[branch] = 1.0
        first, second = (mixer._attend(heads._replace(gates=gates), *compressed, None, 0.5) for _ in range(2))
        assert (first != second)[:, 60:].any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_follows_changes_no_choice_where_weights_are_sharp(dtype: torch.dtype):
    """Rows over two blocks credit both alike, and what underflows is zero: of equal ones `topk` may take any."""
    mixer = make({"max_seq_len": 1200}).to(dtype)
    hidden = 40 * torch.randn(1, 1200, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    whole = mixer.route(hidden)
    for length in (400, 807, 1111):
        found = mixer.route(hidden[:, :length])
        assert torch.equal(found, whole[:, :, :length, : found.shape[-1]])


def test_rotary_needs_pairs_of_features():
    build: dict[str, Any] = {"embed_dim": 12, "num_heads": 2, "head_dim": 3, "max_seq_len": 64, "is_causal": True}
    with pytest.raises(ConfigError, match="head_dim: expected an even number for rotary positions; got 3"):
        build_mixer("nsa", BuildContext(**build, position="rotary"))
    build_mixer("nsa", BuildContext(**build))
