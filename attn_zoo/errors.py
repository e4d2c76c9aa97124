"""The errors a user can meet. Each says what was expected, what was given, and the nearest match."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Sequence
from typing import Literal

_MEANT = {"gpu": "cuda", "nvidia": "cuda"}
"""Names by which a user calls what has another one here, and nothing that looks alike."""


def near_matches(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of the `known` names that look like `name`, or that it means, best first.

    >>> near_matches("GPU", ["cpu", "cuda"])
    ['cuda']
    """
    by_folded = {candidate.casefold(): candidate for candidate in known}
    meant = _MEANT.get(name.casefold())
    if meant in by_folded:
        return [by_folded[meant]]
    return [by_folded[match] for match in difflib.get_close_matches(name.casefold(), list(by_folded), count)]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, or an empty string."""
    near = near_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return how many there are of something, in words.

    >>> counted(1, "cell"), counted(20_000, "cell"), counted(0, "process", "processes")
    ('1 cell', '20,000 cells', '0 processes')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


MOST_LETTERS = 2_000
"""Of a message of somebody's exception: a line of millions fills a terminal and every record."""


def message_of(error: object, most: int | None = MOST_LETTERS) -> str:
    """Return the text of an exception of others, which goes into files: cut, what is no Unicode written out.

    Args:
        error: the exception, or what it says.
        most: letters; None for all.

    >>> message_of(ValueError("x" * 5_000))[-25:]
    'xxxxx ... (5,000 letters)'
    """
    try:
        text = str(error).encode("utf-8", "backslashreplace").decode()
    except Exception as failure:
        text = f"(its message cannot be had: {type(failure).__name__})"
    return text if most is None or len(text) <= most else f"{text[:most]} ... ({len(text):,} letters)"


def first_line(error: object) -> str:
    """Return the first line of `message_of`."""
    lines = message_of(error).strip().splitlines()
    return lines[0] if lines else "(no message)"


OVERFLOW_SIGNS = ("Storage size calculation overflowed", "numel: integer multiplication overflow")
"""One of them is in what torch says of a tensor whose size 64 bits cannot count: no memory holds it."""
_HOST_SIGNS = (
    *("DefaultCPUAllocator", "not enough memory", "std::bad_alloc", "Cannot allocate memory"),
    *OVERFLOW_SIGNS,
)
DEVICE_MEMORY_SIGNS = (
    *("CUDA out of memory", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    *("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "cuLaunchKernel: error 2 "),
)
"""One of them is in what a library says that found no memory on a device."""


def memory_lacked_by(error: BaseException) -> Literal["device", "host"] | None:
    """Return whose memory was not enough by what an exception is or says, or None if that is not what it says.

    >>> memory_lacked_by(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."))
    'host'
    >>> memory_lacked_by(RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904, 2]"))
    'host'
    """
    text = message_of(error, None)
    if type(error).__name__ == "OutOfMemoryError" or any(sign in text for sign in DEVICE_MEMORY_SIGNS):  # torch's
        return "device"
    is_host = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return "host" if is_host or (isinstance(error, RuntimeError) and any(s in text for s in _HOST_SIGNS)) else None


class AttnZooError(Exception):
    """Base of every error this package raises on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 2

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are rebuilt from their message alone, which is not what our constructors take; workers send errors
        # between processes.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class UnsupportedError(AttnZooError):
    """A variant, task or machine cannot do what was asked. Raised before any work is done, never worked around.

    Attributes:
        capability: the field of `Capabilities` (or the resource) that is missing, such as `"causal"`.
        reason: one sentence for people.
    """

    def __init__(self, capability: str, reason: str) -> None:
        super().__init__(reason)
        self.capability = capability
        self.reason = reason


class UnknownNameError(AttnZooError):
    """A name is not registered. The message carries the nearest matches and where to see them all.

    Attributes:
        kind: what the name should have been, such as `"variant"`.
        name: what was given.
        matches: the nearest known names, best first.
    """

    def __init__(self, kind: str, name: str, known: Sequence[str], see: str = "") -> None:
        self.kind = kind
        self.name = name
        self.matches = near_matches(name, known)
        hint = f"  ({see})" if see else ""
        super().__init__(f"unknown {kind} {name!r}{suggestion(name, known)}{hint}")


class ConfigError(AttnZooError):
    """Configuration is wrong: every problem at once, each with the path of its key.

    Attributes:
        source: the file or object that was read; empty where the sentence names it.
        problems: pairs of key path (may be empty) and sentence.
    """

    def __init__(self, source: str, problems: Sequence[tuple[str, str]]) -> None:
        self.source = source
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            message = ": ".join(part for part in (source, *self.problems[0]) if part)
        else:
            lines = [f"  {path}: {text}" if path else f"  {text}" for path, text in self.problems]
            message = "\n".join([f"{source}: {len(self.problems)} problems", *lines])
        super().__init__(message)


class GateError(AttnZooError):
    """A variant, or what was compiled of it, failed its correctness gate, so nothing was timed or trained.

    Attributes:
        check: name of the failed check.
    """

    exit_code = 1

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


class StoreError(AttnZooError):
    """Results cannot be read or written, in the middle of the work. Nothing that was already stored is lost."""

    exit_code = 4


class FolderError(StoreError):
    """A folder cannot be used at all. Found out before anything is done, so it is a mistake in the call."""

    exit_code = 2
