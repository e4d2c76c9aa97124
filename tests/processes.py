"""Real processes that tests may kill, forked from one that has loaded torch already, which is most of a start."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["attn_zoo.matrix.cell.trial", "attn_zoo.training", "tests.matrix.conftest"])


def start_process(work: Callable[..., object], *arguments: object, errors: Path) -> BaseProcess:
    """Start a process that leads a session of its own and ends with what `work` returns as its exit code.

    Args:
        work: a function at the top of a module.
        arguments: of it.
        errors: file for what it writes to standard error.
    """
    process = _CONTEXT.Process(target=_main, args=(work, arguments, errors))
    process.start()
    return process


def _main(work: Callable[..., int | None], arguments: tuple[object, ...], errors: Path) -> None:
    os.setsid()
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(work(*arguments))
