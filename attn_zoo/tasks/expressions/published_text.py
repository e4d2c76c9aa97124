"""The published text form of ListOps, read and written.

Files `basic_{train,val,test}.tsv` of Long Range Arena: columns Source and Target, tab-separated, CRLF line ends. Each
operator is applied to its arguments one at a time, and at last to the closing bracket: `[MAX 2 9 ]` is
`( ( ( [MAX 2 ) 9 ) ] )`. The parentheses say nothing that the brackets do not, and are no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attn_zoo.errors import ConfigError
from attn_zoo.tasks.abstract_task import Split
from attn_zoo.tasks.expressions.grammar import CLOSE, DIGIT, OPERATORS, is_operator
from attn_zoo.tasks.expressions.partial_reading import tree_values
from attn_zoo.whole_files import whole_file

HEADER = "Source\tTarget"

_WORDS = {CLOSE: "]", **{DIGIT + digit: str(digit) for digit in range(10)}, **{i: w for w, i in OPERATORS.items()}}
_ROWS = 2_048  # evaluated at once
_LETTERS = b"abcd"  # one byte for each operator while reading
_IDS = np.zeros(256, np.uint8)
for _word_id, _word in _WORDS.items():
    _IDS[_LETTERS[list(OPERATORS).index(_word)] if _word in OPERATORS else ord(_word)] = _word_id


def words_of(tokens: Iterable[int]) -> list[str]:
    """Return the word of each token; padding has none."""
    return [_WORDS.get(int(token), "") for token in tokens]


def show_tokens(tokens: Iterable[int]) -> str:
    """Return the tokens as words: `[MAX 2 9 ]`."""
    return " ".join(_WORDS[int(token)] for token in tokens)


def source_text(tokens: Iterable[int]) -> str:
    """Return the published form of one tree.

    >>> source_text([OPERATORS["[MAX"], DIGIT + 2, DIGIT + 9, CLOSE])
    '( ( ( [MAX 2 ) 9 ) ] )'
    """
    frames: list[list[str]] = [[]]  # name and finished arguments of each open operator
    for token in tokens:
        word = _WORDS[int(token)]
        if word.startswith("["):
            frames.append([word])
            continue
        done = word
        if word == "]":
            name, *arguments = frames.pop()
            done = "".join(["( " * (len(arguments) + 1), name, *(f" {argument} )" for argument in arguments), " ] )"])
        frames[-1].append(done)
    return " ".join(frames[0])


def tokens_of(source: bytes) -> NDArray[np.uint8]:
    """Return the token ids of one published `Source`.

    Raises:
        ValueError: a symbol is not one of the 15, brackets do not match, or an operator has no argument.
    """
    for letter, name in zip(_LETTERS, OPERATORS, strict=True):
        if letter in source:
            raise ValueError(f"unexpected symbol {chr(letter)!r}")
        source = source.replace(name.encode(), bytes([letter]))
    symbols = np.frombuffer(source.translate(None, b"() "), np.uint8)
    tokens: NDArray[np.uint8] = _IDS[symbols]
    if not tokens.all():
        raise ValueError(f"unexpected symbol {chr(symbols[tokens == 0][0])!r}")
    opened = np.cumsum(np.where(tokens == CLOSE, -1, is_operator(tokens)))
    if not len(tokens) or opened[-1] != 0 or opened[:-1].min(initial=1) < 1:
        raise ValueError("expected one expression whose brackets match")
    if (is_operator(tokens[:-1]) & (tokens[1:] == CLOSE)).any():
        raise ValueError("expected an argument after each operator")
    return tokens


def _digit(target: bytes) -> int:
    if len(target) != 1 or not target.isdigit():
        raise ValueError(f"expected a digit as target; got {target[:20]!r}")
    return int(target)


def read_tsv(path: Path) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint8]]:
    """Return token ids of each row and the values.

    Raises:
        ConfigError: the file is missing, has no rows, is not of the published form, or gives an expression a value that
            it does not have; names the line.
    """
    if not path.is_file():
        raise ConfigError(str(path), [("", "expected a ListOps file of Long Range Arena; there is none")])
    rows, values = [], []
    with path.open("rb") as file:
        if file.readline().strip() != HEADER.encode():
            raise ConfigError(str(path), [("line 1", f"expected the header {HEADER!r}")])
        for number, line in enumerate(file, start=2):
            source, _, target = line.rstrip(b"\r\n").partition(b"\t")
            try:
                rows.append(tokens_of(source))
                values.append(_digit(target))
            except ValueError as error:
                raise ConfigError(str(path), [(f"line {number}", str(error))]) from None
    if not rows:
        raise ConfigError(str(path), [("line 2", "expected an expression; the file ends after its header")])
    for first in range(0, len(rows), _ROWS):
        true = tree_values(np.concatenate(rows[first : first + _ROWS]))
        for row in np.flatnonzero(true != values[first : first + _ROWS])[:1] + first:
            problem = f"expected the target {true[row - first]}, the value of the expression; got {values[row]}"
            raise ConfigError(str(path), [(f"line {row + 2}", problem)])
    return rows, np.array(values, np.uint8)


def write_tsv(path: Path, rows: Iterable[Iterable[int]], values: Iterable[int]) -> None:
    """Write trees in the published form."""
    with path.open("w", encoding="ascii", newline="") as file:
        file.write(f"{HEADER}\r\n")
        file.writelines(f"{source_text(row)}\t{int(value)}\r\n" for row, value in zip(rows, values, strict=True))


def export_tsv(split: Split, out: Path) -> list[Path]:
    """Write a split in the published form.

    Args:
        split: of whole trees.
        out: file to write.

    Returns:
        The file.

    Raises:
        FolderError: the file exists or cannot be written; no trace is left.
    """
    with whole_file(out) as temporary:
        rows = (split.example(index).tokens.tolist() for index in range(len(split)))
        write_tsv(temporary, rows, split.labels.tolist())
    return [out]
