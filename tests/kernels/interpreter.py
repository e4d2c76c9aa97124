"""Run Triton kernels on the CPU: `TRITON_INTERPRET=1` is read when triton is imported, so in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend the interpreter of triton 3.6.

    A scalar bounds a loop: it is held as an array of one, which NumPy 2.4 refuses. bfloat16 is kept as 16 bits, which
    products would multiply as integers. And two things that take more than half of the time are left out: patching a
    function anew at each call of a kernel, where once is enough, and looking for overflow in every sum of integers,
    which the compiler does not do either.
    """
    import triton
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    monkeypatch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return multiply(self, *(widened(x) for x in (left, right)), *rest)

    def widened(handle: Any) -> Any:
        if handle.dtype.name != "bf16":
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, triton.language.float32)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
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


def run_interpreted(path: Path, *options: str) -> None:
    """Run the tests of one file, which skip themselves elsewhere, under the interpreter; all must pass.

    Args:
        path: of the file.
        options: of pytest, such as those that pick tests.
    """
    pytest.importorskip("triton", reason="triton is not installed, so neither is its interpreter")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:xdist", *options],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
