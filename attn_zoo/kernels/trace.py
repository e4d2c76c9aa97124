"""Which path really ran: each kernel notes its name, and whoever wants to know records.

A record made by the kernel as it runs cannot disagree with what ran, as a flag copied from the request can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_recorders: list[list[str]] = []


def note_path(name: str) -> None:
    """Note that the path `name` (such as `"sdpa.flash"`) runs now. Costs nothing while nothing records."""
    for recorder in _recorders:
        if name not in recorder:
            recorder.append(name)


# The compiler calls it once, while it traces, and compiles nothing of it. Else a compiled graph would depend on who
# records, and be recompiled in the middle of a timing. `torch.compiler.assume_constant_result` does no more than
# this, but loads the compiler, which takes seconds.
note_path._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def recording() -> Iterator[list[str]]:
    """Collect the names of the paths that run inside the block, in order of first use.

    >>> with recording() as paths:
    ...     note_path("sdpa.math")
    >>> paths
    ['sdpa.math']
    """
    paths: list[str] = []
    _recorders.append(paths)
    try:
        yield paths
    finally:
        _recorders[:] = [other for other in _recorders if other is not paths]
