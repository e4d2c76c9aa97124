"""Real processes that tests may kill, forked from one that has loaded torch already, which is most of a start."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "attn_zoo.matrix.cell.trial",
        "attn_zoo.training",
        "tests.matrix.conftest",
        "torch._dynamo",  # the first optimiser of a process loads it for a second
    ]
)


def start_process(work: Callable[..., object], *arguments: object, errors: Path) -> BaseProcess:
    """Start a process that leads a session of its own and ends with what `work` returns as its exit code.

    It has our variables and threads, though the process that it is forked from may be older than these.

    Args:
        work: a function at the top of a module.
        arguments: of it.
        errors: file for what it writes to standard error.
    """
    ours = dict(os.environ), torch.get_num_threads()
    process = _CONTEXT.Process(target=_main, args=(work, arguments, errors, *ours))
    process.start()
    return process


def _main(
    work: Callable[..., int | None],
    arguments: tuple[object, ...],
    errors: Path,
    variables: dict[str, str],
    threads: int,
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(threads)
    os.setsid()
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(work(*arguments))


def wait_for(condition: Callable[..., object], limit_s: float = 150.0) -> None:
    """Return when the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def is_gone(process: psutil.Process) -> bool:
    """Tell whether a process has ended."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
