"""Promises about structure are tests: import arrows, where names may occur, what an import loads."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import attn_zoo
from attn_zoo.registry import tasks, variants

ROOT = Path(attn_zoo.__file__).parent
REPOSITORY = ROOT.parent
FILES = sorted(ROOT.rglob("*.py"))

# What each part may import of this package. Errors, metadata, units and the writer of whole files are for everybody.
WORDS = {"errors", "metadata", "units", "whole_files"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "metadata": {"errors"},
    "whole_files": {"errors"},
    "records": {"errors"},
    "folder": WORDS | {"records"},
    "packed_run": {"errors", "whole_files", "folder"},
    "statistics": {"errors", "records"},
    "discovery": WORDS | {""},
    "typed_code": WORDS | {"discovery"},
    "registry": WORDS | {"discovery", "typed_code", "attention"},  # attention for annotations only
    "kernels": WORDS,
    "attention": WORDS | {"registry", "typed_code", "kernels"},
    "variants": WORDS | {"registry", "attention", "kernels"},
    "model": WORDS | {"registry", "attention"},
    "tasks": WORDS | {"registry"},
    "training": WORDS | {"records", "statistics", "registry", "attention", "model", "tasks", "kernels", "measure"},
    "measure": WORDS | {"records", "statistics"},
    "conformance": WORDS | {"discovery", "registry", "attention", "kernels", "measure"},
    "matrix": WORDS
    | {"records", "statistics", "registry", "discovery", "attention", "kernels", "training", "tasks", "measure"}
    | {"conformance", "folder", "packed_run", "typed_code", ""},
    "report": WORDS | {"records", "folder", "packed_run", "statistics", ""},
    "maps": WORDS
    | {"records", "folder", "registry", "attention", "model", "tasks", "training", "report"},  # looks of figures
}
# The shell on top: imports what it likes.
TOP = {
    "api",
    "cli",
    "cli_data",
    "cli_maps",
    "cli_options",
    "cli_results",
    "console",
    "displays",
    "docs",
    "doctor",
    "scaffold",
    "__main__",
    "__init__",
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@dataclass
class Facts:
    """What a file says: its imports, which of them are for annotations only, and its strings without docstrings."""

    imports: list[ast.Import | ast.ImportFrom]
    annotations: set[int]
    strings: set[str]


@cache
def facts_of(path: Path) -> Facts:
    """Read a file once for all tests, and keep little of it: a tree is many objects."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return Facts(
        imports=[node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)],
        annotations={
            id(inner)
            for node in nodes
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
            if isinstance(inner, ast.Import | ast.ImportFrom)
        },
        strings={
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        },
    )


def imports_of(path: Path) -> set[tuple[str, str]]:
    """Return pairs (part, module) of this package's modules that a file imports, wherever the import stands."""
    found = set()
    for node in facts_of(path).imports:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.level == 0 and node.module:
            names = [node.module]
            if node.module == "attn_zoo":
                names = [f"attn_zoo.{alias.name}" for alias in node.names]
        for name in names:
            if name == "attn_zoo" or name.startswith("attn_zoo."):
                found.add((name.partition(".")[2].partition(".")[0], name))
    return found


def test_imports_follow_the_arrows():
    names = {*attn_zoo.__all__, "__version__"}
    wrong = {
        str(path.relative_to(ROOT)): module
        for path in FILES
        if (part := part_of(path)) not in TOP
        for other, module in imports_of(path)
        if other not in MAY_IMPORT[part] | {part} | names
    }
    assert wrong == {}


def test_imports_are_absolute():
    """The arrows are read from whole names: a relative import would pass unseen."""
    relative = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in facts_of(path).imports
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_variants_do_not_import_each_other():
    for path in (ROOT / "variants").glob("*.py"):
        assert not [module for part, module in imports_of(path) if part == "variants"], path.name


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


@cache
def _imported_modules() -> dict[str, frozenset[str]]:
    """Return for every module of this package which others it imports when it runs: annotations do not count."""
    known = {_module_of(path) for path in FILES}
    found = {}
    for path in FILES:
        facts, wanted = facts_of(path), set()
        for node in facts.imports:
            if id(node) in facts.annotations:
                continue
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif node.module:
                wanted |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        # `attn_zoo` itself loads its names when they are first asked for.
        found[_module_of(path)] = frozenset((wanted & known) - {_module_of(path), "attn_zoo"})
    return found


def test_there_is_no_import_circle():
    """Modules in the order of their imports: what is left over imports itself, through others."""
    left = {module: set(imports) for module, imports in _imported_modules().items()}
    while ready := [module for module, imports in left.items() if not imports]:
        for module in ready:
            del left[module]
        for imports in left.values():
            imports -= set(ready)
    assert left == {}


def test_no_two_files_of_one_name():
    names = [path.name for path in FILES if path.name not in ("__init__.py", "__main__.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_most_modules_serve_more_than_one():
    """A helper with one user lives with its user. Variants, tasks, checks and kinds are entries of a list."""
    users: dict[str, set[str]] = {module: set() for module in _imported_modules()}
    for module, imports in _imported_modules().items():
        for imported in imports:
            users[imported].add(module)
    entries = ("attn_zoo.variants.", "attn_zoo.matrix.kinds.", "attn_zoo.conformance.")
    packages = {_module_of(path) for path in FILES if path.name == "__init__.py"}
    single = [
        module
        for module, by in users.items()
        if len(by) == 1 and module not in packages and not module.startswith(entries)
    ]
    assert len(single) / len(FILES) < 0.25, sorted(single)


def test_rooms_are_small():
    """Over about twenty files a room needs sub-rooms. Variants and tasks are lists, one entry a file."""
    rooms = {path.parent for path in FILES} - {ROOT / "variants", ROOT / "tasks"}
    crowded = {str(room): count for room in rooms if (count := len(list(room.glob("*.py")))) > 22}
    assert crowded == {}


def test_there_is_no_drawer_for_odds_and_ends():
    assert not [path for path in FILES if re.fullmatch(r"(utils?|helpers?|common|misc)\.py", path.name)]


def _own_file(name: str) -> Path:
    entry = variants[name].source if name in variants else inspect.getsourcefile(tasks[name])
    assert entry is not None
    return Path(entry)


@pytest.mark.parametrize("name", [*variants, *tasks])
def test_names_of_variants_and_tasks_stay_in_their_own_file(name):
    # A protocol's data table names the tasks it has settings for; the harness code never does.
    data = {ROOT / "training" / "protocol.py", ROOT / "training" / "protocols.py"}
    users = [path for path in FILES if name in facts_of(path).strings and path not in data | {_own_file(name)}]
    assert users == [], f"the harness must not know {name!r}"


def _loaded_by(code: str) -> set[str]:
    program = f"{code}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return {line.partition(".")[0] for line in done.stdout.splitlines()}


OPTIONAL = {"datasets", "xformers", "ray", "triton"}  # pynvml is loaded by torch itself where it is installed


def test_import_loads_neither_plotting_nor_optional_packages():
    loaded = _loaded_by("import attn_zoo; attn_zoo.list_variants()")
    assert not loaded & (OPTIONAL | {"pandas", "matplotlib"})


def test_report_does_not_load_torch():
    modules = [info.name for info in pkgutil.walk_packages([str(ROOT / "report")], "attn_zoo.report.")]
    loaded = _loaded_by("import " + ", ".join(["attn_zoo.report", *modules]))
    assert "pandas" in loaded
    assert not loaded & (OPTIONAL | {"torch"})


def _public_objects() -> list[tuple[str, object]]:
    """Return every module, and every class and function defined in one, whose name has no underscore in front."""
    found: list[tuple[str, object]] = []
    for info in pkgutil.walk_packages([str(ROOT)], "attn_zoo."):
        if info.name == "attn_zoo.__main__":
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            continue  # loaded on use only, where its package is
        found.append((info.name, module))
        for name, thing in vars(module).items():
            is_own = getattr(thing, "__module__", "") == info.name and (
                inspect.isclass(thing) or inspect.isroutine(thing)
            )
            if is_own and not name.startswith("_"):
                found.append((f"{info.name}.{name}", thing))
    return found


def test_modules_list_no_names():
    """An underscore says what is private; only a package's `__init__` lists what it offers."""
    assert [str(path) for path in FILES if path.name != "__init__.py" and "__all__" in path.read_text()] == []


def test_every_public_name_has_a_docstring():
    missing = []
    for name, thing in _public_objects():
        has_docs = inspect.ismodule(thing) or inspect.isclass(thing) or inspect.isroutine(thing)
        if has_docs and not inspect.getdoc(thing):
            missing.append(name)
        if inspect.isclass(thing) and thing.__module__.startswith("attn_zoo"):
            members = [(key, value) for key, value in vars(thing).items() if not key.startswith("_")]
            missing += [
                f"{name}.{key}"
                for key, value in members
                if inspect.isroutine(value) and not inspect.getdoc(getattr(thing, key))
            ]
    assert missing == []


FORBIDDEN = re.compile(r"\bimport pickle\b|\bpickle\.|allow_pickle=True|weights_only=False|(?<![\w.])eval\(|shell=True")


def test_nothing_loads_or_runs_foreign_code_unsafely():
    assert [str(path) for path in FILES if FORBIDDEN.search(path.read_text())] == []
