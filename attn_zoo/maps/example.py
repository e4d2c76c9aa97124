"""The input that a map is drawn for: an example of a task's test split, or a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_zoo.errors import ConfigError, UnknownNameError, UnsupportedError
from attn_zoo.tasks import AbstractTask, Split
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training.batches import Batch
from attn_zoo.training.weights import Trained

__all__ = ["MapInput", "encode_text", "input_of_example", "input_of_text"]

SPACE = "\u2423"
"""What tasks over characters call the space, so that it can be seen."""

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
        found = next((name for name in names if name in known), None)
        if found is not None:
            pieces.append(found)
            continue
        for byte in character.encode():
            hexadecimal = (rf"\x{byte:02x}", f"{byte:02x}")
            pieces.append(next((name for name in hexadecimal if name in known), character))
    return pieces
