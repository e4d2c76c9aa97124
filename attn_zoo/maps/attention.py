"""Which positions the heads of a trained model look at, for one input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from attn_zoo.attention.effective import attention_call, weight_columns
from attn_zoo.errors import ConfigError
from attn_zoo.maps.capture import MapInput, MixerCall, capture_calls, input_of_example, input_of_text
from attn_zoo.maps.find import find_weights
from attn_zoo.maps.head_panels import Pool, PooledWeights, draw_heads, make_bins, pool_weights
from attn_zoo.report.units import shorten
from attn_zoo.training.weights import Trained, load_trained

MAX_SQUARES = 96
"""Squares of a panel along one side; longer inputs are binned."""


def attention_map(
    folder: Path,
    pattern: str | None = None,
    *,
    example: int = 0,
    text: str | None = None,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    pool: Pool = "max",
    of_other: bool = False,
    data_dir: Path | None = None,
) -> Figure:
    """Return the figure of the weights that each head gives to each position.

    Args:
        folder: results folder of a run that kept its weights.
        pattern: which cell, by id or key; None where there is one.
        example: number of an example of the task's test split.
        text: an input of your own instead.
        layers: numbers of the layers to show, from 1; none means all.
        heads: numbers of the heads to show, from 1; none means all.
        pool: what a square of several pairs shows: the weight furthest from zero, or the mean.
        of_other: of a pair of inputs, the second one.
        data_dir: where tasks find local data.

    Raises:
        ConfigError: no weights are kept, or there is no such example, layer or head.
        UnknownNameError: no cell matches, or the text has a symbol that the task has not.
        UnsupportedError: the mechanism has no heads, or is not linear in the values.
    """
    trained = load_trained(find_weights(folder, pattern), data_dir)
    given = input_of_text(trained, text) if text is not None else input_of_example(trained, example)
    pooled = head_weights(capture_calls(trained, given, of_other=of_other), layers, heads, pool)
    title = f"Attention weights of {trained.cell.label or trained.cell.variant}"
    return draw_heads(pooled, title=title, note=_note(trained, given, pooled, pool, of_other=of_other))


def head_weights(
    calls: Sequence[MixerCall], layers: Sequence[int], heads: Sequence[int], pool: Pool
) -> list[PooledWeights]:
    """Return the effective weights of the chosen layers and heads, in squares.

    Raises:
        ConfigError: there is no such layer or head.
        UnsupportedError: a mechanism has no weights to show.
    """
    known = sorted({call.layer for call in calls})
    _expect("--layer", layers, known)
    pooled = []
    for call in calls:
        if layers and call.layer not in layers:
            continue
        attention = attention_call(
            call.mixer, call.hidden, context=call.context, key_padding_mask=call.key_padding_mask
        )
        numbers = range(1, call.mixer.build.num_heads + 1)
        _expect("--head", heads, numbers)
        chosen = tuple(head for head in numbers if not heads or head in heads)
        index = torch.tensor([head - 1 for head in chosen])
        rows, columns = (make_bins(symbols, MAX_SQUARES) for symbols in (call.rows, call.columns))
        pieces = (piece[:, index] for piece in weight_columns(attention))
        pooled.append(PooledWeights(call.name, pool_weights(pieces, rows, columns, pool), rows, columns, chosen))
    return pooled


def _answer(trained: Trained, given: MapInput) -> str:
    """Return what a classifier says about the input."""
    if given.batch.labels.ndim != 1:
        return ""
    with torch.no_grad():
        outputs = trained.objective.outputs(trained.model, given.batch)
        answer = int(trained.objective.predictions(trained.model, outputs, given.batch, is_test=False)[0])
    return f"The model says class {answer}" + (f"; right is {given.label}." if given.label is not None else ".")


def _expect(option: str, chosen: Sequence[int], known: Sequence[int]) -> None:
    for number in chosen:
        if number not in known:
            raise ConfigError(option, [("", f"expected {known[0]} to {known[-1]}; got {number}")])


def _note(trained: Trained, given: MapInput, pooled: Sequence[PooledWeights], pool: Pool, *, of_other: bool) -> str:
    symbols = given.other_symbols if of_other else given.symbols
    joined = ("" if all(len(symbol) == 1 for symbol in symbols) else " ").join(symbols)
    lines = [f"{trained.cell.id}; {given.words}{' (second input)' if of_other else ''}: {shorten(joined, 160)}"]
    if answer := _answer(trained, given):
        lines.append(answer)
    is_signed = any(float(layer.values.min()) < 0 for layer in pooled)
    colours = "blue adds, red takes away" if is_signed else "white is zero"
    lines.append(f"Each row is a query and shows how much it takes from each key; {colours}.")
    widths = {(layer.rows.width, layer.columns.width) for layer in pooled if layer.rows.width * layer.columns.width > 1}
    if widths:
        sizes = " and ".join(f"{rows} \u00d7 {columns}" for rows, columns in sorted(widths))
        kind = "the weight furthest from zero" if pool == "max" else "the mean weight"
        lines[-1] += f" A square stands for {sizes} positions and shows {kind} among them."
    return "\n".join(lines)
