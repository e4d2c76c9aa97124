"""Texts as bytes: id 0 is padding, id b + 1 is byte b, 257 ids, as in Long Range Arena.

No lower-casing, no cleaning, no marks for begin or end; a text that is too long keeps its first bytes, even where that
cuts a character. (The byte encoder of TensorFlow Datasets without extra tokens; S4 reads Unicode characters instead.)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from attn_zoo.tasks.abstract_task import TaskKind, TaskSpec

VOCAB_SIZE = 257
"""256 bytes and padding."""

_NEVER = 0xFF  # no UTF-8 text has this byte; without it every id fits into 8 bits, half of what 16 would take
_ID_OF_BYTE = bytes((byte + 1) % 256 for byte in range(256))
_SPACE, _PAD_SYMBOL = "\u2423", "pad"


def byte_spec(max_len: int, kind: TaskKind) -> TaskSpec:
    """Return what a model must know about a yes-or-no question on texts of at most `max_len` bytes, one or two."""
    return TaskSpec(
        vocab_size=VOCAB_SIZE,
        num_classes=2,
        max_seq_len=max_len,
        metric="accuracy",
        chance=0.5,
        kind=kind,
        other_max_seq_len=max_len if kind == "pair" else 0,
    )


class TextRows:
    """Texts collected one at a time as rows of ids of `max_len` bytes, so that a long file need not be held as text.

    A text without a byte becomes one space: no model can read nothing.
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self._rows, self._lengths = bytearray(), array("h")

    def add(self, text: bytes) -> None:
        """Append one text.

        Raises:
            ValueError: it holds the byte 0xFF, which no UTF-8 text has.
        """
        kept = text[: self.max_len] or b" "
        if _NEVER in kept:
            number = len(self._lengths)
            raise ValueError(f"text {number}: expected UTF-8; got the byte 0xff at {kept.index(_NEVER)}")
        self._rows += kept.translate(_ID_OF_BYTE).ljust(self.max_len, b"\0")
        self._lengths.append(len(kept))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return ids uint8 `[N, L]`, filled with 0 on the right up to the longest row, and lengths int16 `[N]`.

        Raises:
            ValueError: nothing was added.
        """
        if not self._lengths:
            raise ValueError("expected at least one text")
        whole = torch.frombuffer(self._rows, dtype=torch.uint8).view(-1, self.max_len)
        lengths = torch.tensor(self._lengths, dtype=torch.int16)
        return whole[:, : int(lengths.max())].contiguous(), lengths


def encode_texts(texts: Iterable[bytes], max_len: int) -> tuple[Tensor, Tensor]:
    """Return ids uint8 `[N, L]` and lengths int16 `[N]` of texts, as `TextRows` makes them.

    Raises:
        ValueError: there is none, or the byte 0xFF, which no UTF-8 text has, is in one.

    >>> tokens, lengths = encode_texts([b"abc", b"", b"a"], 2)
    >>> tokens.tolist(), lengths.tolist()
    ([[98, 99], [33, 0], [98, 0]], [2, 1, 1])
    """
    rows = TextRows(max_len)
    for text in texts:
        rows.add(text)
    return rows.tensors()


def text_of(tokens: Tensor) -> str:
    """Return the text of token ids without padding; what is not UTF-8, such as a cut character, shows as U+FFFD."""
    return bytes(token - 1 for token in tokens.tolist() if token).decode(errors="replace")


def byte_symbols(tokens: Tensor) -> list[str]:
    r"""Return a short name for each id: printable ASCII as itself, the space as an open box, other bytes as `\x0a`.

    >>> byte_symbols(torch.tensor([98, 33, 11, 0]))
    ['a', '␣', '\\x0a', 'pad']
    """
    return [_symbol(token - 1) for token in tokens.tolist()]


def _symbol(byte: int) -> str:
    if byte < 0:
        return _PAD_SYMBOL
    if byte == ord(" "):
        return _SPACE
    return chr(byte) if ord(" ") < byte < 0x7F else f"\\x{byte:02x}"
