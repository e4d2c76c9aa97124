"""What a Python file does and imports, read from its text, and which of that lies beside it: both are one program.

A plain file belongs to no package, and Python would look for its neighbours only where it was started beside them.
What Python has itself, and what is installed, comes first: a `random.py` beside a file is nothing that it can import.
"""

from __future__ import annotations

import ast
import hashlib
import io
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any

SUFFIXES = (".py", *EXTENSION_SUFFIXES)

KNOWN_PROGRAMS: dict[str, str] = {}
"""What `program_digest` found, by the digest of the text. A process that is given another's need not find it anew."""

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


@cache
def _imported(text: bytes) -> tuple[frozenset[tuple[int, str]], frozenset[tuple[int, str]]]:
    """Return all imports of a file, and those that are made when it is imported itself."""
    try:
        waiting: list[tuple[Any, bool]] = [(ast.parse(text), True)]
    except (SyntaxError, ValueError):  # whoever imports it will say so
        return frozenset(), frozenset()
    every, at_once = set[tuple[int, str]](), set[tuple[int, str]]()
    while waiting:
        node, is_at_once = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            waiting += [(each, is_at_once) for each in node.orelse]
            continue
        names = set[tuple[int, str]]()
        if isinstance(node, ast.Import):
            names = {(0, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            stem = f"{node.module}." if node.module else ""
            names = {(node.level, f"{stem}{alias.name}") for alias in node.names}
        every |= names
        at_once |= names if is_at_once else set()
        is_at_once = is_at_once and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):  # an import is a statement in one of these
            waiting += [(each, is_at_once) for each in getattr(node, block, ())]
    return frozenset(every), frozenset(at_once)


def imported_names(path: Path, *, is_at_once: bool = False) -> frozenset[tuple[int, str]]:
    """Return (level, name) of what a file imports; level 0 is absolute. Each name may be a module or lie in one.

    Where `is_at_once`, only what is imported when the file itself is, and not inside functions.
    """
    return _imported(path.read_bytes())[is_at_once] if path.suffix == ".py" else frozenset()


def modules_at(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files that importing `a.b.c` below a folder runs: packages on the way, then the module."""
    for part in parts:
        if not folder.is_dir():  # the rest is a name within a module
            return
        files = [folder / part / "__init__.py", *(folder / f"{part}{suffix}" for suffix in SUFFIXES)]
        yield from [path for path in files if path.is_file()][:1]
        folder = folder / part


@cache
def is_elsewhere(name: str) -> bool:
    """Tell whether a module of this name is this package, Python's own or installed."""
    sites = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    return name == "attn_zoo" or name in sys.stdlib_module_names or PathFinder.find_spec(name, sites) is not None


def own_files(source: Path, folder: Path | None = None) -> dict[str, Path]:
    """Return a plain file and what it imports from beside it, by their names from `folder` on, by default its own."""
    folder = folder or source.parent
    found = {source.name: source}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        for level, name in imported_names(path):
            parts = name.split(".")
            if level == 0 and is_elsewhere(parts[0]):
                continue
            above = path.parents[level - 1] if level else folder
            for file in modules_at(above, parts):
                if file not in found.values() and file.is_relative_to(folder):
                    found[file.relative_to(folder).as_posix()] = file
                    waiting.append(file)
    return found


def _statements(text: bytes) -> Iterator[str]:
    """Yield the rows of each statement up to their last token, alike in all versions of Python; not lone strings."""
    tokens = tokenize.tokenize(io.BytesIO(text).readline)
    rows = text.decode(next(tokens).string).removeprefix("\ufeff").split("\n")
    words: list[str] = []
    ends: dict[int, int | None] = {}
    for token in tokens:
        if token.type == tokenize.NEWLINE:
            # One that begins with f is computed; as a token of its own it has no type before Python 3.12.
            if len(words) != 1 or words[0].lstrip("rRuUbB")[:1] not in ("'", '"'):
                yield "\n".join(rows[row - 1][:end] for row, end in ends.items())
            words, ends = [], {}
        elif token.type not in _LAYOUT:
            words.append(token.string)
            ends |= dict.fromkeys(range(token.start[0], token.end[0]))  # of a string of several rows
            ends[token.end[0]] = token.end[1]


def program_digest(path: Path) -> str:
    """Return 16 hexadecimal digits that change with what a file does, not with comments, docstrings or empty lines."""
    text = path.read_bytes()
    whole = hashlib.sha256(text).hexdigest()[:32]
    if path.suffix != ".py":
        return whole[:16]
    if whole not in KNOWN_PROGRAMS:
        try:
            program = "\0".join(_statements(text)).encode()
        except (SyntaxError, ValueError, tokenize.TokenError):  # whoever imports it will say so
            program = text
        KNOWN_PROGRAMS[whole] = hashlib.sha256(program).hexdigest()[:16]
    return KNOWN_PROGRAMS[whole]


def own_digest(source: Path) -> str:
    """Return 16 hexadecimal digits that change when one of the `own_files` does."""
    digest = hashlib.sha256()
    for name, path in sorted(own_files(source).items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
