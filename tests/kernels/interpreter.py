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
    products would multiply as integers. And what takes more than half of the time is left out: patching the language
    anew at each call of a function, where once is enough; working out anew what follows from a type, for each tensor;
    and looking for overflow in every sum of integers, which the compiler does not do either.
    """
    from triton.language import core
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
        return interpreter.TensorHandle(data, core.float32)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    patch, done = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if function.__module__ not in done:
            done.add(function.__module__)
            patch(function)
            monkeypatch.setattr(core.tensor, "__index__", lambda self: int(self.handle.data.item()))
        return interpreter._LangPatchScope()  # with nothing to restore

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    in_numpy, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def dtype_of(of: Any) -> Any:
        name = of.scalar.name
        if name not in dtypes:
            dtypes[name] = in_numpy(of.scalar)
        return dtypes[name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", dtype_of)
    make_type, types = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self)
        vars(self).update(types[key])

    monkeypatch.setattr(core.block_type, "__init__", block_type)
    make_tensor, sizes = core.tensor.__init__, dict[str, Any]()

    def tensor(self: Any, handle: Any, of: Any) -> None:
        if of.name not in sizes:
            make_tensor(self, handle, of)
            sizes[of.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, of, of.scalar
        self.shape, self.numel = sizes[of.name]

    monkeypatch.setattr(core.tensor, "__init__", tensor)


def run_interpreted(path: Path, *options: str) -> None:
    """Run the tests of a file, which skip themselves elsewhere, under the interpreter; all must pass.

    Args:
        path: of the file.
        options: of pytest, such as further files and those that pick tests.
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
