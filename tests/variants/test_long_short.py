"""Long-short attention: its definition token by token, what padding may do, cost, the pattern, what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_mixer
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_operations
from attn_zoo.registry import variants
from attn_zoo.variants.long_short import LongShortConfig, long_short_mask, long_short_projection_bytes

BATCH, HEADS, DIM, EMBED = 2, 2, 3, 6
WINDOW, SUMMARIES = 4, 3


def make(**given: Any) -> Any:
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": HEADS, "max_seq_len": 512, **given}
    options = {name: sizes.pop(name) for name in ("window_size", "proj_len", "backend") if name in sizes}
    torch.manual_seed(0)
    mixer: Any = build_mixer(
        "long_short", BuildContext(**sizes), **{"window_size": WINDOW, "proj_len": SUMMARIES, **options}
    )
    with torch.no_grad():
        for norm in (mixer.local_norm, mixer.global_norm):  # a scale of 1 would hide that it is missing
            norm.weight += 0.3 * torch.randn_like(norm.weight)
            norm.bias += 0.3 * torch.randn_like(norm.bias)
    return mixer.double().eval()


def draw(length: int) -> Tensor:
    return torch.randn(BATCH, length, EMBED, generator=torch.Generator().manual_seed(length), dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    """Entry 0 has padding at its start, middle and end, entry 1 is all padding."""
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2, length - 1]] = True
    mask[1] = True
    return mask


def by_the_definition(mixer: Any, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Write segments, summaries and the common softmax out, query by query."""
    window, count = mixer.config.window_size, mixer.config.proj_len

    def norm(rows: Tensor, by: Any) -> Tensor:
        return layer_norm(rows, (HEADS * DIM,), by.weight, by.bias)

    outputs = []
    for entry, rows in enumerate(hidden):
        length = len(rows)
        real = [j for j in range(length) if mask is None or not mask[entry, j]]
        query = mixer.query_proj(rows)
        key, value = (norm(each(rows), mixer.local_norm) for each in (mixer.key_proj, mixer.value_proj))
        shares = mixer.share_proj(rows).view(length, HEADS, count)[real].softmax(0)  # of each head
        short_key, short_value = (
            norm(
                torch.cat([shares[:, h].T @ x[real, h * DIM : (h + 1) * DIM] for h in range(HEADS)], dim=-1),
                mixer.global_norm,
            )
            for x in (key, value)
        )
        mixed = torch.zeros(length, HEADS * DIM, dtype=rows.dtype)
        for i in range(length if real else 0):
            start = i // window * window
            seen = [j for j in real if start - window // 2 <= j < start + window + window // 2]
            keys, values = torch.cat([short_key, key[seen]]), torch.cat([short_value, value[seen]])
            for h in range(HEADS):
                part = slice(h * DIM, (h + 1) * DIM)
                weights = (keys[:, part] @ query[i, part] / math.sqrt(DIM)).softmax(0)
                mixed[i, part] = weights @ values[:, part]
        outputs.append(mixer.out_proj(mixed))
    return torch.stack(outputs)


@pytest.mark.parametrize("length", [1, 3, 16, 29])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("options", [{}, {"window_size": 8, "proj_len": 4}, {"window_size": 64}], ids=str)
def test_both_paths_are_the_definition(length: int, has_padding: bool, options: dict[str, int]):
    mixer, hidden = make(**options), draw(length)
    mask = padding_for(length) if has_padding else None
    expected = by_the_definition(mixer, hidden, mask)
    for run in (mixer, mixer.reference):
        torch.testing.assert_close(run(hidden, key_padding_mask=mask), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("has_padding", [False, True])
def test_gradients_agree_with_finite_differences(has_padding: bool):
    mixer, mask = make(), padding_for(11) if has_padding else None
    leaves = draw(11).requires_grad_(), mixer.share_proj.weight, mixer.global_norm.weight

    def run(hidden: Tensor, *_: Tensor) -> Tensor:
        output: Tensor = mixer(hidden, key_padding_mask=mask)
        return output

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("length", [0, 1, 8, 33, 131])
@pytest.mark.parametrize(("window_size", "proj_len"), [(2, 3), (8, 4), (12, 4), (64, 32), (8, 32)])
def test_the_table_is_the_mask_of_the_definition(length: int, window_size: int, proj_len: int):
    layout = LongShortConfig(window_size=window_size, proj_len=proj_len).layout(length)
    dense = layout.make("cpu").to_dense()[0, 0]
    assert dense[:, :proj_len].all()
    assert torch.equal(dense[:, proj_len:], long_short_mask(length, window_size))
    assert layout.mean_pairs == int(dense.sum())


def test_a_query_sees_two_windows_and_all_summaries():
    config = LongShortConfig()
    layout = config.layout(2**14)
    assert layout.mean_pairs / 2**14 == pytest.approx(2 * config.window_size + config.proj_len, rel=0.01)
    assert layout.block_size == 64, "what our kernels on a GPU compute fastest"


def test_a_token_far_away_is_heard_through_the_summaries_alone():
    mixer, hidden = make(), draw(40)
    changed = hidden.clone()
    changed[:, 39] += 1.0
    assert (mixer(changed)[:, 0] - mixer(hidden)[:, 0]).abs().max() > 1e-4
    with torch.no_grad():
        mixer.share_proj.weight.zero_()
        mixer.global_norm.weight.zero_()  # summaries that say the same of every sequence
    assert torch.equal(mixer(changed)[:, 0], mixer(hidden)[:, 0])


def test_cost_is_what_runs_in_both_directions():
    mixer, variant, length = make(window_size=32, proj_len=16), variants["long_short"], 256
    hidden = draw(length).requires_grad_()
    shape = mixer.build.shape(BATCH, length, config=mixer.config, form="mixer")
    with recording() as paths:
        forward = count_operations(lambda: mixer(hidden))
    both = count_operations(lambda: mixer(hidden).sum().backward())
    assert forward is not None
    assert both is not None
    assert paths == ["block_sparse.gather"]
    ratio = variant.backward_ratio(shape)
    assert ratio is not None
    # What a window at either end sees beyond it, half a window for each of its queries, is computed and hidden.
    beyond = 4 * BATCH * HEADS * DIM * mixer.config.window_size**2
    assert forward.products == variant.flops(shape) + beyond
    assert both.products == pytest.approx((1 + ratio) * forward.products, rel=0.01)
    projections = (mixer.query_proj, mixer.key_proj, mixer.value_proj, mixer.share_proj, mixer.out_proj)
    projected = sum(p.numel() for module in projections for p in module.parameters())
    assert long_short_projection_bytes(shape, 4) == 4 * projected
    assert variant.min_bytes(shape, 4) - shape.io_bytes(4) == 4 * sum(p.numel() for p in mixer.parameters())


def test_dropout_acts_and_evaluation_knows_none():
    mixer, hidden = make(dropout_p=0.5).train(), draw(9)
    torch.manual_seed(0)
    first = mixer(hidden)
    assert not torch.equal(first, mixer(hidden))
    assert torch.equal(mixer.eval()(hidden), make()(hidden))


def test_one_graph_for_the_compiler():
    mixer, hidden = make(), draw(16)
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden), mixer(hidden))


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_causal": True}, "causal"),
        ({"is_cross": True}, "cross_attention"),
        ({"num_kv_heads": 1}, "grouped_query"),
        ({"position": "rotary"}, "positions"),
        ({"dropout_p": 0.1, "backend": "flex"}, "attention_dropout"),
    ],
)
def test_refusals(build: dict[str, Any], capability: str):
    with pytest.raises(UnsupportedError) as caught:
        make(**build)
    assert caught.value.capability == capability


def test_impossible_options():
    for size in (0, 5):
        with pytest.raises(ConfigError, match=f"window_size: expected an even number, at least 2; got {size}"):
            make(window_size=size)
    with pytest.raises(ConfigError, match="proj_len: expected at least 1; got 0"):
        make(proj_len=0)
