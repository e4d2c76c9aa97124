"""The source of what was typed in a notebook, at a prompt or in a script: what one class needs of it, as a file.

A worker process loads a variant from a file. Of all that was typed, the file gets the statements that bind a name which
the class needs, and those that these need in turn, in the order in which they were typed.
"""

from __future__ import annotations

import ast
import builtins
import codeop
import hashlib
import json
import linecache
import subprocess
import symtable
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from attn_zoo.discovery.import_trial import ask_python, trial_environment
from attn_zoo.discovery.own_files import own_digest, own_files
from attn_zoo.discovery.plain_files import import_file
from attn_zoo.errors import ConfigError

_BUILT_IN = frozenset(dir(builtins)) | {"__name__"}


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement at the top of a cell.

    Args:
        cell: that it stands in.
        node: its tree.
        binds: names that it gives a value.
        needs: names that others must bind.
        continues: names whose value before it counts too: it gives them another one under a condition only, or changes
            what they stand for (`table["a"] = 1`, `names.append("a")`).
    """

    cell: str
    node: ast.stmt
    binds: frozenset[str]
    needs: frozenset[str]
    continues: frozenset[str]

    @property
    def decorators(self) -> list[ast.expr]:
        return getattr(self.node, "decorator_list", [])

    @property
    def first_line(self) -> int:
        return min([self.node.lineno, *(decorator.lineno for decorator in self.decorators)])

    @property
    def text(self) -> str:
        if not self.decorators:  # others may stand on its line, and count by themselves
            return ast.get_source_segment(self.cell, self.node) or ""
        return "\n".join(self.cell.split("\n")[self.first_line - 1 : self.node.end_lineno])  # a form feed ends no line

    @property
    def text_unregistered(self) -> str:
        """The text without decorators that register: another variant, which the class only builds upon."""
        if not self.decorators:
            return self.text
        calls = [one.func if isinstance(one, ast.Call) else one for one in self.decorators]
        names = [ast.unparse(call).rpartition(".")[2] for call in calls]
        kept = [one for one, name in zip(self.decorators, names, strict=True) if not name.startswith("register_")]
        lines = [f"@{ast.get_source_segment(self.cell, one)}" for one in kept]
        return "\n".join([*lines, *self.cell.split("\n")[self.node.lineno - 1 : self.node.end_lineno]])


def _statements(cell: str) -> Iterator[_Statement]:
    """Yield the statements of a cell; a cell that does not parse has none."""
    try:
        body = ast.parse(cell).body
    except (SyntaxError, ValueError):
        return
    for node in body:
        table, binds = _table_of(node), _bound_by(node)
        needs = {one.get_name() for one in table.get_symbols() if one.is_referenced()}
        inner = list(table.get_children())
        for scope in inner:  # grows as it goes
            needs |= {one.get_name() for one in scope.get_symbols() if one.is_global() and one.is_referenced()}
            inner += scope.get_children()
        # The table leaves annotations out, which dataclasses read.
        annotations = (getattr(part, name, None) for part in ast.walk(node) for name in ("annotation", "returns"))
        for annotation in annotations:
            if isinstance(annotation, ast.AST):
                needs |= {part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)}
        continues = (binds - _surely_bound([node])) | _changed(node)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            needs -= binds  # itself
        elif isinstance(node, ast.Match) or hasattr(node, "body"):
            # What it reads it may have bound itself, as a loop its variable.
            continues |= needs & binds
            needs -= binds
        yield _Statement(cell, node, frozenset(binds), frozenset(needs - _BUILT_IN), frozenset(continues))


def _table_of(node: ast.stmt) -> symtable.SymbolTable:
    return symtable.symtable(ast.unparse(node), "cell", "exec")


def _bound_by(node: ast.stmt) -> set[str]:
    """Return the names that a statement gives a value, in some case at least."""
    names = {one.get_name() for one in _table_of(node).get_symbols() if one.is_assigned() or one.is_imported()}
    if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
        names |= {key for key in dir(sys.modules.get(node.module or "")) if key[0] != "_"}
    return names


def _surely_bound(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements give a value which does not depend on the one before, whatever happens."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.If):
            names |= _surely_bound(node.body) & _surely_bound(node.orelse)
        elif isinstance(node, ast.Try | ast.TryStar):
            ways = [[*node.body, *node.orelse], *(handler.body for handler in node.handlers)]
            names |= set.intersection(*map(_surely_bound, ways)) | _surely_bound(node.finalbody)
        elif isinstance(node, ast.With):
            names |= _surely_bound(node.body)
        elif not isinstance(node, ast.AugAssign | ast.For | ast.While | ast.Match):
            names |= _bound_by(node)
    return names


def _changed(node: ast.AST) -> set[str]:
    """Return the names whose objects a statement changes: it sets a part of them, or calls a method for its effect."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return set()  # it does so when it is called
    part: ast.AST | None = None
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        part = node
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        part = node.value.func
    while isinstance(part, ast.Attribute | ast.Subscript):
        part = part.value
    inner = (_changed(child) for child in ast.iter_child_nodes(node))
    return set().union({part.id} if isinstance(part, ast.Name) else (), *inner)


def _prompt_cells() -> list[str]:
    """Return the statements typed at Python's own prompt, which before 3.13 only its line editor remembers."""
    editor: Any = sys.modules.get("readline")
    count = editor.get_current_history_length() if editor else 0
    cells: list[str] = []
    is_open = False
    for line in (editor.get_history_item(number) for number in range(1, count + 1)):
        if is_open or line[:1].isspace():
            cells[-1:] = ["\n".join([*cells[-1:], line])]
        else:
            cells.append(line)
        try:
            is_open = codeop.compile_command(cells[-1] + "\n") is None
        except (SyntaxError, ValueError, OverflowError):
            is_open = False
    return cells


def _text_of(filename: str) -> str:
    if filename == "<stdin>":
        return next(reversed(_prompt_cells()), "")
    return "".join(linecache.getlines(filename))


def _is_script(filename: str) -> bool:
    return Path(filename).is_file() and filename not in getattr(linecache, "_ipython_cache", {})


def _typed(filename: str) -> list[_Statement]:
    """Return the statements of everything that was typed, oldest first, with that of `filename`."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if filename == "<stdin>":
        cells = _prompt_cells()
    elif _is_script(filename):
        cells = []
    elif shell is not None:
        cells = [text for text in shell.user_ns.get("In", []) if text]
    else:  # prompts put what is typed where tracebacks look for it: entries without a time, for there is no file
        cells = ["".join(entry[2]) for entry in list(linecache.cache.values()) if len(entry) == 4 and not entry[1]]
    own = _text_of(filename)
    if own.strip() not in {cell.strip() for cell in cells}:
        cells.append(own)
    return [statement for cell in cells for statement in _statements(cell)]


def _sliced(filename: str, root: str) -> str:
    """Return the text of the statements that `root`, a statement of the cell `filename`, needs, and its own.

    Raises:
        ConfigError: `root` is not there (any more), or one of them needs a name that none binds, or is of `__main__`.
    """
    statements = _typed(filename)
    same = [index for index, one in enumerate(statements) if one.text == root]
    if not same:
        raise ConfigError("source", [("", "the text that defines it is not known")])
    *earlier, last = same
    imported = {name for one in statements if isinstance(one.node, ast.Import | ast.ImportFrom) for name in one.binds}

    def gives(i: int, name: str) -> bool:
        """Whether a statement gives a name its value, or a part of it."""
        # What is set in a module is a setting of the process. What is called later may be of what was measured.
        is_change = name in statements[i].continues - imported
        return name in statements[i].binds or (is_change and (i < last or not isinstance(statements[i].node, ast.Expr)))

    kept: set[int] = set()
    itself, later = statements[last].binds, range(last + 1, len(statements))
    end = next((i for i in later if itself & (statements[i].binds - statements[i].continues)), len(statements))
    waiting = [last, *(i for i in range(last + 1, end) if any(gives(i, name) for name in itself))]
    while waiting:
        index = waiting.pop()
        if index in kept:
            continue
        kept.add(index)
        for name in statements[index].needs | statements[index].continues:
            binding = [i for i in range(len(statements)) if i not in (index, *earlier) and gives(i, name)]
            if not binding and name in statements[index].needs:
                raise ConfigError("source", [("", f"it needs {name!r}, which nothing that was typed binds")])
            # What a class body needs was bound before it; what a function needs may have been bound anew since.
            waiting += [i for i in binding if i < index][-1:] + binding[-1:]
    if any(_is_of_main(statements[i].node) for i in kept):
        reason = "what defines it stands under `if __name__ == ...`, which no other process runs: move it to the top"
        raise ConfigError("source", [("", reason)])
    futures = [one.text for one in statements if getattr(one.node, "module", None) == "__future__"]
    texts = [statements[i].text if i == last else statements[i].text_unregistered for i in sorted(kept)]
    return "\n\n".join([*futures[:1], *(text for text in texts if text not in futures)]) + "\n"


def _is_of_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(getattr(part, "id", "") == "__name__" for part in ast.walk(node.test))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that lives as long as this process."""
    return tempfile.TemporaryDirectory(prefix="attn_zoo_")


@dataclass(frozen=True, slots=True)
class _Written:
    """What a file was written from."""

    filename: str
    root: str
    folder: Path
    namespace: dict[str, Any]
    names: frozenset[str]
    values: dict[str, str]


_written: dict[str, _Written] = {}


def write_typed(owner: type, frame: FrameType, name: str) -> str:
    """Write what registers a class, and all it needs, to a file of its own; return the path.

    Beside it are copies of the modules that it imports from beside the notebook or script.

    Raises:
        ConfigError: its text, or that of something it needs, is not known: it came from `exec`, for instance.
    """
    while frame.f_back is not None and frame.f_globals.get("__name__", "builtins") != owner.__module__:
        frame = frame.f_back  # a helper of another module
    caller: FrameType | None = frame
    while caller is not None:
        # What a cell executes directly, by `exec` of a text, is a part of that cell.
        is_executed = frame.f_back is caller and not _text_of(frame.f_code.co_filename)
        is_top = caller.f_code.co_name.startswith("<")  # "<module>", in some versions of IPython "<cell line: 1>"
        if is_top and (caller.f_globals is frame.f_globals or is_executed):
            frame = caller
        caller = caller.f_back
    filename, line = frame.f_code.co_filename, frame.f_lineno
    around = [one for one in _statements(_text_of(filename)) if one.first_line <= line <= (one.node.end_lineno or 0)]
    root = around[-1].text if around else ""
    text = _sliced(filename, root)
    path = Path(_folder().name) / hashlib.sha256(text.encode()).hexdigest()[:12] / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    folder = Path(filename).resolve().parent if _is_script(filename) else Path.cwd()
    for copy, file in _copies(path, folder):
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    typed = [one for one in _statements(text) if not isinstance(one.node, ast.Import | ast.ImportFrom)]
    names, namespace = frozenset(name for one in typed for name in one.binds), frame.f_globals
    # While its decorators run, the name of the class is bound to the one that was typed before, or to none.
    itself = {owner.__name__: owner} if around and isinstance(around[-1].node, ast.ClassDef) else {}
    values = _values({**namespace, **itself}, names)
    _written[str(path)] = _Written(filename, root, folder, namespace, names, values)
    return str(path)


def _copies(path: Path, folder: Path) -> list[tuple[Path, Path]]:
    """Return (copy, file) of what a file imports as if it lay in `folder`."""
    return [(path.parent / name, file) for name, file in own_files(path, folder).items() if file != path]


def is_typed(source: str) -> bool:
    """Tell whether `write_typed` wrote this file."""
    return source in _written


def has_changed(source: str) -> bool:
    """Tell whether a typed class, or something that it needs, was changed or typed anew since the class was."""
    if source not in _written:
        return False
    path, written = Path(source), _written[source]
    return _sliced(written.filename, written.root) != path.read_text(encoding="utf-8") or any(
        not copy.is_file() or copy.read_bytes() != file.read_bytes() for copy, file in _copies(path, written.folder)
    )


def _values(namespace: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the data among the values of names, and among the attributes of classes, as texts."""
    found = {name: namespace[name] for name in names if name in namespace}
    classes = {name: vars(value) for name, value in found.items() if isinstance(value, type)}
    found |= {f"{cls}.{name}": value for cls, own in classes.items() for name, value in own.items() if name[0] != "_"}
    return {name: text for name, value in found.items() if (text := _spelled(value))}


def _spelled(value: Any) -> str:
    """Return numbers, texts, tensors and what is made of them as text, equal in every process; else nothing."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            content = value.detach().cpu().flatten().view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError, TypeError):  # sparse, or without data
            return ""
        return f"{value.dtype}{list(value.shape)} {hashlib.sha256(content.tobytes()).hexdigest()[:12]}"
    if numpy is not None and isinstance(value, numpy.ndarray):
        return f"{value.dtype}{list(value.shape)} {hashlib.sha256(value.tobytes()).hexdigest()[:12]}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_spelled(key)}: {_spelled(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_spelled, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_spelled, value)))}}}"
    return ""


_TIMEOUT_S = 120.0


def require_same_values(source: str) -> None:
    """Compare what a typed file binds, loaded by another process, with what the same names were where it was typed.

    Whatever changes a value without its name (a function that was called, another name of the same object, a draw
    without a seed) is not in the file. What has changed since is only told: it may be what was kept of earlier calls.

    Raises:
        ConfigError: a value differs.
    """
    if source not in _written:
        return
    written = _written[source]
    here, now = written.values, _values(written.namespace, written.names)
    for name, text in here.items():
        if name in now and now[name] != text:
            was = f"{name} was {_short(text)} when the class was registered, and so it is measured"
            text = f"{Path(source).stem}: {was}; it is {_short(now[name])} now: run the cell again if that counts"
            warnings.warn(text, stacklevel=2)
    there = _values_elsewhere(source, own_digest(Path(source)), tuple(here)) if here else None
    if there is None:  # a worker will say why
        return
    for name, text in here.items():
        if (other := there.get(name, "absent")) != text:
            both = f"{name} was {_short(text)} where it was typed, and is {_short(other)} in another process"
            why = "which sees only statements that bind or change it by its name, and draws anew what has no seed"
            raise ConfigError(Path(source).stem, [("", f"{both}, {why}: bind it in one statement")])


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


@cache
def _values_elsewhere(source: str, digest: str, names: tuple[str, ...]) -> dict[str, str] | None:
    """Return values as another process has them that loads a file; None where it does not."""
    del digest  # of all that it loads
    program = "import sys; from attn_zoo.typed_code import tell_values; tell_values(*sys.argv[1:])"
    top = {name.partition(".")[0] for name in names}
    try:
        told = ask_python(["-c", program, source, *top], trial_environment(), _TIMEOUT_S)
        return dict(json.loads(told.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return None


def tell_values(source: str, *names: str) -> None:
    """Load a typed file and print the values of names, as JSON on the last line."""
    import_file(source, nullcontext, None)
    (module,) = [each for each in list(sys.modules.values()) if getattr(each, "__file__", None) == source]
    print(json.dumps(_values(vars(module), names)))  # noqa: T201
