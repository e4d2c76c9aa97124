"""Which positions the heads of a trained model look at, for one input.

The model reads an example or a text once; what each of its mixers is called with is captured, and shown as weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from attn_zoo.attention import AbstractMixer
from attn_zoo.attention.effective import attention_call, weight_columns
from attn_zoo.errors import ConfigError, UnknownNameError, UnsupportedError
from attn_zoo.maps.find import find_weights
from attn_zoo.maps.head_panels import Pool, PooledWeights, draw_heads, make_bins, pool_weights
from attn_zoo.tasks import AbstractTask, Split
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training.batches import Batch
from attn_zoo.training.weights import Trained, load_trained
from attn_zoo.units import shorten

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


SPACE = "\u2423"
"""Symbol of the space in tasks over characters, so that it can be seen."""

CLS = "CLS"
"""Name of the vector in front of all tokens."""
_LINE_END = ("\u21b5", r"\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class MapInput:
    """One input of a model, with names for its positions.

    Args:
        batch: of one example, as the model reads it.
        symbols: a name for each token of the input that is not padding.
        other_symbols: likewise for the second input or the target.
        words: which input this is, in words.
        label: the class that is right, where there is one and it is known.
    """

    batch: Batch
    symbols: tuple[str, ...]
    other_symbols: tuple[str, ...] = ()
    words: str = ""
    label: int | None = None


def _input(trained: Trained, split: Split, words: str, *, is_labelled: bool) -> MapInput:
    batch = trained.batcher.batch(trained.batcher.feed(split), torch.zeros(1, dtype=torch.long))
    example, task = split.example(0), trained.task
    other = () if example.other_tokens is None else tuple(task.symbols(example.other_tokens))
    return MapInput(
        batch=batch,
        symbols=tuple(task.symbols(example.tokens)),
        other_symbols=other,
        words=words,
        label=int(example.label) if is_labelled and example.label.ndim == 0 else None,
    )


def input_of_example(trained: Trained, index: int) -> MapInput:
    """Return an example of the test split.

    Raises:
        ConfigError: there are not so many.
    """
    split = trained.task.split("test")
    if not 0 <= index < len(split):
        raise ConfigError("--example", [("", f"expected 0 to {len(split) - 1}, an example of test; got {index}")])
    return _input(trained, split.select(torch.tensor([index])), f"test example {index}", is_labelled=True)


def input_of_text(trained: Trained, text: str) -> MapInput:
    """Return a text as the task of the model reads it.

    Raises:
        UnsupportedError: the task reads two sequences.
        ConfigError: the text is empty or too long.
        UnknownNameError: it has a symbol that the task has not.
    """
    spec = trained.task.spec
    if spec.other_max_seq_len:
        raise UnsupportedError("other_tokens", f"{trained.task.name} reads two sequences; choose an example instead")
    tokens = encode_text(trained.task, text)
    if not 0 < len(tokens) <= spec.max_seq_len:
        problem = f"expected 1 to {spec.max_seq_len} tokens, which {trained.task.name} has; got {len(tokens)}"
        raise ConfigError("--text", [("", problem)])
    is_pooled = spec.kind == "classification"
    labels = torch.zeros(1, dtype=torch.long) if is_pooled else torch.full((1, len(tokens)), IGNORED_LABEL)
    split = Split(tokens=tokens[None], lengths=torch.tensor([len(tokens)]), labels=labels)
    return _input(trained, split, "text of your own", is_labelled=False)


def encode_text(task: AbstractTask, text: str) -> Tensor:
    """Return the token ids `[L]` that a text has among the symbols of a task.

    A task with a symbol for the space reads characters (bytes beyond ASCII by their hexadecimal names); any other reads
    words between white space.

    Raises:
        UnknownNameError: a character or word is no symbol of the task.
    """
    known: dict[str, int] = {}
    for token, symbol in enumerate(task.symbols(torch.arange(task.spec.vocab_size))):
        known.setdefault(symbol, token)
    pieces = _characters(text, known) if SPACE in known else text.split()
    for piece in pieces:
        if piece not in known:
            raise UnknownNameError(f"symbol of {task.name}", piece, list(known))
    return torch.tensor([known[piece] for piece in pieces], dtype=torch.long)


def _characters(text: str, known: dict[str, int]) -> list[str]:
    pieces: list[str] = []
    for character in text:
        names = (SPACE,) if character == " " else _LINE_END if character == "\n" else (character,)
        symbol = next((name for name in names if name in known), None)
        if symbol is not None:
            pieces.append(symbol)
            continue
        for byte in character.encode():
            hexadecimal = (rf"\x{byte:02x}", f"{byte:02x}")
            pieces.append(next((name for name in hexadecimal if name in known), character))
    return pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerCall:
    """One call of one mixer.

    Args:
        mixer: the module.
        name: such as `layer 1` or `decoder layer 2, across`.
        layer: counted from 1.
        hidden: `[1, L, E]`.
        context: `[1, S, E]`, in cross-attention.
        key_padding_mask: bool `[1, S]`, or None.
        rows: names of the queries that are not padding.
        columns: names of the keys that are not padding.
    """

    mixer: AbstractMixer
    name: str
    layer: int
    hidden: Tensor
    context: Tensor | None
    key_padding_mask: Tensor | None
    rows: tuple[str, ...]
    columns: tuple[str, ...]


def capture_calls(trained: Trained, given: MapInput, *, of_other: bool = False) -> list[MixerCall]:
    """Run the model on one input and return the calls of its mixers, in their order; of a pair, those for one input.

    Raises:
        ConfigError: the second input of a task that has one only.
    """
    kind = trained.task.spec.kind
    if of_other and kind != "pair":
        raise ConfigError("--other", [("", f"{trained.task.name} has no second input that is read like the first")])
    recorded: list[tuple[str, AbstractMixer, Tensor, dict[str, Any]]] = []

    def record(path: str) -> Callable[[Any, Any, Any], None]:
        return lambda mixer, args, kwargs: recorded.append((path, mixer, args[0], kwargs))

    model = trained.model.eval()
    hooks = [
        module.register_forward_pre_hook(record(path), with_kwargs=True)
        for path, module in model.named_modules()
        if isinstance(module, AbstractMixer)
    ]
    try:
        with torch.no_grad():
            trained.objective.outputs(model, given.batch)
    finally:
        for hook in hooks:
            hook.remove()
    if kind == "pair":
        half = len(recorded) // 2  # the towers read one after the other
        recorded = recorded[half:] if of_other else recorded[:half]
    calls = []
    for path, mixer, hidden, kwargs in recorded:
        is_decoder = kind == "seq2seq" and "decoder" in path.split(".")
        is_other = is_decoder or of_other
        tokens = given.batch.other_tokens if is_other and given.batch.other_tokens is not None else given.batch.tokens
        extra = (CLS,) * (hidden.shape[1] - tokens.shape[1])
        rows = (*extra, *(given.other_symbols if is_other else given.symbols))
        context, layer = kwargs.get("context"), mixer.build.layer_index + 1
        name = f"layer {layer}"
        if kind == "seq2seq":
            name = f"{'decoder' if is_decoder else 'encoder'} {name}" + (", across" if context is not None else "")
        calls.append(
            MixerCall(
                mixer=mixer,
                name=name,
                layer=layer,
                hidden=hidden,
                context=context,
                key_padding_mask=kwargs.get("key_padding_mask"),
                rows=rows,
                columns=rows if context is None else given.symbols,
            )
        )
    return calls
