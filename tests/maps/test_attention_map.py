"""Maps of attention: what is captured is what the model used, binning is right, figures say what they show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

from attn_zoo.attention.effective import attention_call, effective_weights
from attn_zoo.attention.oracle import attention_weights
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.maps import attention as attention_module
from attn_zoo.maps.attention import MixerCall, attention_map, capture_calls, head_weights, input_of_example
from attn_zoo.maps.find import find_weights
from attn_zoo.maps.head_panels import Bins, PooledWeights, draw_heads, make_bins, pool_weights
from attn_zoo.report.figures.heat import weight_shades
from attn_zoo.report.figures.svg import format_of, save_figure
from attn_zoo.training.weights import load_trained


def calls_of(zoo: Path, pattern: str, **options: Any) -> list[MixerCall]:
    trained = load_trained(find_weights(zoo, pattern))
    return capture_calls(trained, input_of_example(trained, 0), **options)


def words_of(figure: Figure) -> str:
    return " ".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))


def test_each_layer_is_captured_once(zoo: Path):
    first, second = calls_of(zoo, "full/*/plain/*")
    assert (first.name, second.name) == ("layer 1", "layer 2")
    assert first.rows == first.columns
    assert first.hidden.shape[1] >= len(first.rows)
    assert not first.mixer._forward_pre_hooks  # hooks are gone


def test_the_vector_in_front_has_a_name(zoo: Path):
    call = calls_of(zoo, "full/*/other/*")[0]
    assert call.rows[0] == "CLS"
    assert "CLS" not in call.rows[1:]


def test_both_sequences_of_a_pair(zoo: Path):
    trained = load_trained(find_weights(zoo, "full/*/pair/*"))
    given = input_of_example(trained, 0)
    for of_other, symbols in ((False, given.symbols), (True, given.other_symbols)):
        calls = capture_calls(trained, given, of_other=of_other)
        assert [call.name for call in calls] == ["layer 1", "layer 2"]
        assert all(call.rows == symbols for call in calls)
    with pytest.raises(ConfigError, match="no second input"):
        calls_of(zoo, "full/*/plain/*", of_other=True)


def test_source_and_target(zoo: Path):
    trained = load_trained(find_weights(zoo, "full/*/seq2seq/*"))
    given = input_of_example(trained, 0)
    found = {call.name: (call.rows, call.columns) for call in capture_calls(trained, given)}
    source, target = given.symbols, given.other_symbols
    assert found["encoder layer 1"] == (source, source)
    assert found["decoder layer 2"] == (target, target)
    assert found["decoder layer 2, across"] == (target, source)
    assert len(found) == 6


@pytest.mark.parametrize("kind", ["plain", "tokens", "language", "pair", "seq2seq", "other"])
def test_weights_are_those_of_the_softmax_inside(zoo: Path, kind: str):
    for call in calls_of(zoo, f"full/*/{kind}/*"):
        (found,) = head_weights([call], (), (), "max")
        heads = attention_call(call.mixer, call.hidden, context=call.context, key_padding_mask=call.key_padding_mask)
        expected = attention_weights(
            heads.query, heads.key, is_causal=call.mixer.build.is_causal, key_padding_mask=call.key_padding_mask
        )[0, :, : len(call.rows), : len(call.columns)]
        np.testing.assert_allclose(found.values, expected.numpy(), atol=1e-6)
        np.testing.assert_allclose(found.values.sum(-1), 1.0, atol=1e-5)


def test_layers_and_heads_are_chosen_by_number(zoo: Path):
    calls = calls_of(zoo, "full/*/plain/*")
    (found,) = head_weights(calls, [2], [1], "max")
    assert (found.name, found.heads, found.values.shape[0]) == ("layer 2", (1,), 1)
    np.testing.assert_array_equal(found.values[0], head_weights(calls, [2], (), "max")[0].values[0])
    with pytest.raises(ConfigError, match="--layer: expected 1 to 2; got 3"):
        head_weights(calls, [3], (), "max")
    with pytest.raises(ConfigError, match="--head: expected 1 to 2; got 0"):
        head_weights(calls, (), [0], "max")


def test_mixers_without_heads_are_refused(zoo: Path):
    with pytest.raises(UnsupportedError, match="global_pooling: it mixes hidden states without heads"):
        attention_map(zoo, "global_pooling/*")


def pieces(weights: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    yield from weights[None].split(width, -1)


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_squares_are_means_or_extremes_of_their_pairs(pool: Any):
    weights = torch.randn(2, 13, 17, generator=torch.Generator().manual_seed(0))
    rows, columns = make_bins(("q",) * 11, 4), make_bins(("k",) * 15, 5)  # the rest is padding
    assert (rows.width, rows.num_bins, columns.width, columns.num_bins) == (3, 4, 3, 5)
    found = pool_weights(pieces(weights, 4), rows, columns, pool)
    for row in range(4):
        for column in range(5):
            block = weights[:, 3 * row : min(3 * row + 3, 11), 3 * column : min(3 * column + 3, 15)].flatten(1)
            extreme = block.gather(1, block.abs().argmax(1, keepdim=True))[:, 0]
            expected = extreme if pool == "max" else block.mean(1)
            np.testing.assert_allclose(found[:, row, column], expected.numpy(), atol=1e-6)


def test_short_inputs_are_not_binned():
    axis = make_bins(("a", "b"), 96)
    assert (axis.width, axis.num_bins) == (1, 2)


def test_colours_tell_signs_apart():
    positive, signed = np.array([0.0, 0.5], np.float32), np.array([-0.1, 0.5], np.float32)
    one, two = weight_shades(positive), weight_shades(signed)
    assert (one.norm.vmin, one.norm.vmax) == (0.0, 0.5)
    assert (two.norm.vmin, two.norm.vmax) == (-0.5, 0.5)
    assert one.colours.name != two.colours.name
    assert weight_shades(np.array([-1e-9, 0.5], np.float32)).norm.vmin == 0.0  # rounding is no sign
    assert not weight_shades(signed).is_clipped
    assert weight_shades(signed, 0.2).is_clipped
    assert weight_shades(np.zeros(3, np.float32)).norm.vmax == 1.0


def test_the_figure_says_what_it_shows(zoo: Path):
    words = words_of(attention_map(zoo, "full/*/plain/*", example=2))
    for part in ("Attention weights of full", "test example 2", "The model says class", "layer 2, head 2", "weight"):
        assert part in words
    assert "square" not in words
    words = words_of(attention_map(zoo, "linformer/*", text="1 2 3"))
    assert "weight (signed)" in words
    assert "red takes away" in words
    assert "right is" not in words  # nobody knows the label of a text


def test_binning_is_stated(zoo: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_module, "MAX_SQUARES", 4)
    for pool, kind in (("max", "the weight furthest from zero"), ("mean", "the mean weight")):
        words = words_of(attention_map(zoo, "full/*/language/*", pool=pool))  # type: ignore[arg-type]
        assert "A square stands for" in words
        assert kind in words
        assert "position" in words


@pytest.mark.parametrize(("length", "num_heads"), [(1, 1), (3, 2), (40, 8), (96, 4), (700, 2)])
def test_labels_fit_into_the_figure(length: int, num_heads: int):
    symbols = tuple(f"w{index}$x" for index in range(length))  # a dollar must not start mathematics
    axis = make_bins(symbols, 96)
    values = np.random.default_rng(0).random((num_heads, axis.num_bins, axis.num_bins)).astype(np.float32)
    layers = [PooledWeights(f"layer {n}", values, axis, axis, tuple(range(1, num_heads + 1))) for n in (1, 2)]
    figure = draw_heads(layers, title="title", note="a line\nand another")
    figure.canvas.draw()
    width, height = figure.get_size_inches() * figure.dpi
    assert width <= 1600
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 2 * num_heads
    boxes = [axes.get_window_extent() for axes in panels]
    for box, axes in zip(boxes, panels, strict=True):
        tight = axes.get_tightbbox()
        assert tight is not None
        assert tight.x0 >= 0
        assert tight.y0 >= 0
        assert tight.x1 <= width + 1
        assert tight.y1 <= height + 1
        assert not any(other is not box and box.overlaps(other) for other in boxes)
    below = [axes.get_tightbbox().y0 for axes in panels[:num_heads]]  # type: ignore[union-attr]
    assert min(below) > max(axes.title.get_window_extent().y1 for axes in panels[num_heads:]) - 2


def test_figures_are_written_by_suffix(zoo: Path, tmp_path: Path):
    figure = attention_map(zoo, "full/*/plain/*", layers=[1], heads=[1])
    for name, start in (("a.png", b"\x89PNG"), ("b.svg", b"<?xml")):
        save_figure(figure, tmp_path / "new" / name)
        content = (tmp_path / "new" / name).read_bytes()
        assert content.startswith(start)
        save_figure(figure, tmp_path / name)
        assert (tmp_path / name).read_bytes() == content
    with pytest.raises(ConfigError, match=r"expected a name that ends in \.png or \.svg; got 'a\.pdf'"):
        format_of(tmp_path / "a.pdf")


def test_axis_counts_the_last_short_bin():
    assert Bins(("a",) * 7, 3).num_bins == 3


def test_effective_weights_of_a_trained_compression_predict_the_mixer(zoo: Path):
    call = calls_of(zoo, "linformer/*")[1]
    heads = attention_call(call.mixer, call.hidden, key_padding_mask=call.key_padding_mask)
    found = effective_weights(heads)
    assert found.weights.shape[-1] == call.hidden.shape[1]
    assert (found.weights < 0).any()
