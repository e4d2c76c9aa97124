"""Run Triton kernels on the CPU: `TRITON_INTERPRET=1` is read when triton is imported, so in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["IS_INTERPRETING", "mend_interpreter", "run_interpreted"]

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend the interpreter of triton 3.6.

    A scalar bounds a loop: it is held as an array of one, which NumPy 2.4 refuses. A function that a kernel calls is
    patched anew at each call, which takes a third of the time; once is enough.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    done = set()

    def call(self: Any, *given: Any, **named: Any) -> Any:
        if self.fn.__module__ not in done:
            done.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*given, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


def run_interpreted(path: Path) -> None:
    """Run the tests of one file, which skip themselves elsewhere, under the interpreter; all must pass."""
    pytest.importorskip("triton", reason="triton is not installed, so neither is its interpreter")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:xdist", "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
