"""Tables that a cache keeps and a CUDA graph reads: they must live as long as the graph.

A replay reads them by address and runs no Python, so no cache sees that they are used, and may give them up. Whoever
captures a graph that outlives the call collects what is held meanwhile, and keeps it as long as the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")
_holders: list[list[object]] = []


def held(thing: _T) -> _T:
    """Return what a cache had, or made, which a graph may read. Costs nothing while nobody captures."""
    for holder in _holders:
        holder.append(thing)
    return thing


@contextmanager
def holding() -> Iterator[list[object]]:
    """Collect what is `held` inside the block."""
    holder: list[object] = []
    _holders.append(holder)
    try:
        yield holder
    finally:
        _holders[:] = [other for other in _holders if other is not holder]
