"""What code decides a variant's result: its own file and the kernels it imports. Edits make its records stale."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

import attn_zoo.kernels
from attn_zoo.registry import Variant

__all__ = ["source_digest"]

_KERNELS = "attn_zoo.kernels"


def _imports(path: Path) -> set[str]:
    """Return the names of the kernel modules that the file imports, read from its text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # What is imported may be a module (`from attn_zoo.kernels import sdpa`) or lie in one.
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return {name.removeprefix(f"{_KERNELS}.") for name in found if name.startswith(f"{_KERNELS}.")}


@cache
def _digest(source: Path) -> str:
    folder = Path(attn_zoo.kernels.__path__[0])
    files, waiting = {source}, [source]
    while waiting:
        for name in _imports(waiting.pop()):
            path = folder.joinpath(*name.split(".")).with_suffix(".py")
            if path.is_file() and path not in files:
                files.add(path)
                waiting.append(path)
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def source_digest(variant: Variant) -> str:
    """Return 16 hexadecimal digits that change when the variant's file, or a kernel file it imports, changes.

    Read once per process: what is imported does not change under a running process either.
    """
    return _digest(Path(variant.source)) if variant.source else variant.digest
