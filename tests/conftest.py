"""What all tests share. How long a random example may take says something about the machine, not about the code."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings

from attn_zoo import cli
from attn_zoo.kernels.gpu_replays import replays_on
from attn_zoo.matrix.cell import conditions
from attn_zoo.registry import Registry, tasks, variants

# Examples that failed are kept in the checkout, where that can be written.
_place: dict[str, Any] = {} if os.access(Path.cwd(), os.W_OK) else {"database": None}
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], **_place)
settings.load_profile("any machine")


def _keep_what_is_freed() -> None:
    """Have the GNU C library keep freed memory, as in processes that measure (`MEASURING_VARIABLES`).

    Else every large tensor is memory touched for the first time, which may take longer than to compute it. It is said
    here and not in the environment, which is recorded and which other processes inherit.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX in malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


_keep_what_is_freed()

# Beside each of several workers torch's compiler would start a process for each core and wait for them at the end: on a
# card two of twelve workers did so when all tests had passed (torch 2.11, for up to five minutes).
# And a timed cell would wait for them to leave the card, four times two seconds.
if torch.cuda.is_available() and "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    conditions.SETTLING_S = 0.0

# Calls on a card are replayed as in a run: compiled before the workers start, which then find it.
if torch.cuda.is_available() and "PYTEST_XDIST_WORKER" not in os.environ and (_replays := replays_on("cuda")):
    _replays.prepare_run(print)

# A shell has what it starts in the background ignore Ctrl-C, and so do the runs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def keep_only(registry: Registry[Any], names: Iterable[str]) -> None:
    """Have a registry forget everything but `names`."""
    for name in set(registry.names) - set(names):
        registry.remove(name)


@pytest.fixture
def registry_kept() -> Iterator[None]:
    """Forget in the end which variants and tasks a test registers."""
    before = tuple(variants), tuple(tasks)
    yield
    keep_only(variants, before[0])
    keep_only(tasks, before[1])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from looking through torch and all tests, which stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _what_is_frozen_stays_so() -> Iterator[None]:
    """Let no timing in this process thaw all that is loaded (`quiet_collector`).

    Else every collection by hand from then on, some for each cell, would look through all of it: half a second and more
    each time. What thawing is for is tested by `tests.measure.test_timing`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attn_zoo.measure.timing.gc", SimpleNamespace(**{**vars(gc), "unfreeze": lambda: None}))
        yield


def pytest_unconfigure() -> None:
    """Let what is frozen be taken apart: extension modules report what is left at the end."""
    gc.unfreeze()


@pytest.hookimpl(trylast=True)  # when others have taken out what is not asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and begin with what is slow."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords have the names of folders, too
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if (num_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        items[:] = _slow_first(items, num_workers)


def _slow_first(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Return the tests so that half of several workers begin with files that have slow ones, the others without.

    Each gets an equal part of the list, and who is done takes over the end of another's. A slow one there would run
    when the others have nothing left. It mostly waits for processes of its own: not all workers should at once.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    paths, num_first = [path for path, _ in slow.most_common()], num_workers // 2
    rest = iter([item for item in items if item.path not in slow])
    ordered: list[pytest.Item] = []
    for worker in range(num_workers):
        own = paths[worker::num_first] if worker < num_first else []
        part = [item for path in own for item in items if item.path == path]
        size = (len(items) - len(ordered)) // (num_workers - worker)
        ordered += [*part, *islice(rest, max(0, size - len(part)))]
    return [*ordered, *rest]


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Answer]


@pytest.fixture
def call(capsys, monkeypatch) -> Call:
    """Run `attn-zoo ARGUMENTS` in this process."""

    def run(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["attn-zoo", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run
