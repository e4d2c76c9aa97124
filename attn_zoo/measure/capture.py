"""Captures of CUDA graphs. One that fails tells what failed, and leaves behind as little as it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_num_failed = 0


def num_failed() -> int:
    """Return how many captures, or replays of one, failed in this process.

    Up to torch 2.12 its allocator then believes for ever that one goes on: it gives no memory back, and what runs out
    of memory later is not tried again with what is cached. So nothing else should be measured here. And graphs that
    were captured before follow a state of the generator that is not the generator's any more.
    """
    return _num_failed


def note_failure() -> None:
    """Count a replay that failed: what it broke, the next cell of this process would meet."""
    global _num_failed  # noqa: PLW0603 - of the process
    _num_failed += 1


@contextmanager
def capturing(graph: Any, stream: Any, *, pool: Any = None, cuda: Any = torch.cuda) -> Iterator[None]:
    """Capture what runs inside, on `stream`, into `graph`. What is raised inside is raised, not what follows from it.

    The current stream of before is restored afterwards. `pool` is of another graph, to share its memory.
    """
    # A capture that fails leaves the generator believing that it goes on, and later random numbers would fail.
    generator = cuda.default_generators[cuda.current_device()]
    before = generator.clone_state()
    error: Exception | None = None
    try:
        with cuda.stream(stream), cuda.graph(graph, pool=pool, stream=stream):  # which, failing, leaves its stream on
            try:
                yield
            except Exception as inner:
                error = inner
                raise
    except Exception as last:  # to end a capture that was broken off raises too, and says nothing of why
        note_failure()
        generator.graphsafe_set_state(before)
        if error is not None and error is not last:
            raise error from None
        raise
