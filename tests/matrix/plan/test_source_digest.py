"""What is timed decides whether records are stale: every source that the measured code imports, and no other."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import FrameType

import pytest

import attn_zoo
from attn_zoo.discovery.own_files import program_digest
from attn_zoo.matrix.cell.workload import Call
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.kinds.kind import AbstractKind
from attn_zoo.matrix.kinds.timed import TimedKind
from attn_zoo.matrix.plan import source_digest as module
from attn_zoo.matrix.plan.expand import make_plan
from attn_zoo.matrix.plan.schema import parse_matrix
from attn_zoo.matrix.plan.source_digest import (
    CALL_ROOMS,
    TRAINING_ROOMS,
    imported_packages,
    source_digest,
    source_files,
)
from attn_zoo.registry import variants
from attn_zoo.training import run_training
from tests.matrix.conftest import make_matrix, tiny_plan, training_plan

PACKAGE = Path(attn_zoo.__path__[0])


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A copy of the package that may be edited."""
    copy = tmp_path / "attn_zoo"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(attn_zoo, "__path__", [str(copy)])
    return Path(copy)


def digests(source: Path, provider: str = "attn_zoo", device: str = "cpu") -> list[str]:
    """Return the digests of a call and of a training, as another process would find them."""
    for kept in (module._digest, module._packages, module._distributions):
        kept.cache_clear()
    variant = replace(variants["full"], source=str(source), provider=provider)
    return [source_digest(variant, rooms, device) for rooms in (CALL_ROOMS, TRAINING_ROOMS)]


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\nEDITED = 1\n")


def test_an_edit_makes_stale_what_runs_the_edited_code(package):
    """One edit after another, each beside the digests before it: they are what takes time."""
    source = package / "variants" / "full.py"
    before = digests(source)
    for name, is_stale in {
        "variants/full.py": [True, True],
        "attention/masks.py": [True, True],
        "attention/contract.py": [True, True],
        "kernels/exact/sdpa.py": [True, True],
        "variants/linformer.py": [False, False],
        "kernels/compress/compression.py": [False, False],
        "model/stacks.py": [False, True],
        "training/loop.py": [False, True],
        "tasks/abstract_task.py": [False, True],
        "units.py": [False, False],
        "matrix/drive/run_plan.py": [False, False],
    }.items():
        edit(package / name)
        after = digests(source)
        assert [old != new for old, new in zip(before, after, strict=True)] == is_stale, name
        before = after


PROGRAM = """
import sys

class Program:
    def run(self, x=f"{LIMIT:>{LIMIT}}# {{no}} comment"):
        text = '''{x}

        # of the text
        {self}'''
        return (text, 1 + 2)
"""


def digest_of(path: Path, text: str) -> str:
    path.write_text(text)
    return program_digest(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import sys", "import sys  # to tell"),
        ("import sys", "'''What it does.\n\nAt length.'''\n\n# first of all\nimport sys"),
        ("    def run", "    r'About it.'\n    # Runs.\n\n    def run"),
        ("        text =", "        '''Run.'''\n\n        text ="),
        ("(text, 1 + 2)", "(text, 1 + 2)\n\n\n'''Of what.'''"),
        ("(text, 1 + 2)\n", "(text, 1 + 2)"),
        ("\nimport sys", "\ufeffimport sys  # with the mark that some editors write"),
    ],
)
def test_comments_docstrings_and_empty_lines_make_nothing_stale(tmp_path, old, new):
    assert PROGRAM.count(old) == 1
    assert digest_of(tmp_path / "a.py", PROGRAM.replace(old, new)) == digest_of(tmp_path / "a.py", PROGRAM)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# of the text", "# of a text"),
        ("# of the text", "# of the text  "),
        ("{x}\n\n", "{x}\n"),
        ("{{no}} comment", "{{not}} comment"),
        ("(text, 1 + 2)", "(text, 1 - 2)"),
        ("        return", "    return"),
        ("\nimport sys", "\ufeffimport syz"),
        ("        return", "        f'{print()}'\n        return"),
        ("        return", "        rf'{print()}'\n        return"),
        ("        return", "        'a'.join(x)\n        return"),
    ],
)
def test_whatever_a_file_does_differently_makes_stale(tmp_path, old, new):
    assert PROGRAM.count(old) == 1
    assert digest_of(tmp_path / "a.py", PROGRAM.replace(old, new)) != digest_of(tmp_path / "a.py", PROGRAM)


@pytest.mark.parametrize("text", ["x = (", "  x\n y", "# coding: none\n", "x = '''"])
def test_of_what_is_no_program_every_edit_counts(tmp_path, text):
    assert digest_of(tmp_path / "a.py", text) != digest_of(tmp_path / "a.py", f"{text}# edited")


def test_a_program_has_the_same_digest_in_all_versions_of_python(tmp_path):
    """They cut an f-string into different tokens, and one folder may have results of several versions."""
    assert digest_of(tmp_path / "a.py", PROGRAM) == "770928204b39aa6c"


def test_what_needs_triton_decides_nothing_on_a_cpu(package):
    source = package / "variants" / "bigbird.py"
    before = {device: digests(source, device=device) for device in ("cpu", "cuda")}
    for name, is_run in {
        "kernels/blocks/triton/launch.py": False,
        "kernels/blocks/triton/forward.py": False,
        "kernels/replay.py": False,
        "kernels/replay.cpp": False,
        "kernels/blocks/block_attention.py": True,
        "kernels/cached_launch.py": True,
    }.items():
        edit(package / name)
        after = {device: digests(source, device=device) for device in ("cpu", "cuda")}
        assert not set(after["cuda"]) & set(before["cuda"]), name
        assert (after["cpu"] != before["cpu"]) is is_run, name
        before = after


def test_a_plain_file_counts_with_all_that_lies_beside_it(tmp_path):
    """Also with what needs Triton: it may have another way on a CPU."""
    source = tmp_path / "mine" / "plug_in.py"
    source.parent.mkdir()
    source.write_text("import beside\n")
    (source.parent / "beside.py").write_text("try:\n    import triton\nexcept ImportError:\n    triton = None\n")
    assert "beside.py" in source_files(source, CALL_ROOMS, "cpu", is_plain=True)


def test_a_plain_file_counts_with_what_lies_beside_it_and_with_what_calls_it(package, tmp_path):
    source = tmp_path / "mine" / "plug_in.py"
    source.parent.mkdir()
    source.write_text("from typing import TYPE_CHECKING\nimport beside\nif TYPE_CHECKING:\n    import unrelated\n")
    for name in ("beside", "unrelated"):
        (source.parent / f"{name}.py").write_text("x = 1\n")
    before = digests(source, "plug_in.py")
    edit(source.parent / "unrelated.py")
    assert digests(source, "plug_in.py") == before
    edit(source.parent / "beside.py")
    beside = digests(source, "plug_in.py")
    assert not set(beside) & set(before)
    edit(package / "attention" / "contract.py")
    assert not set(digests(source, "plug_in.py")) & set(beside), (
        "it imports nothing of ours, and is called all the same"
    )


def test_what_python_finds_elsewhere_or_cannot_find_is_not_beside_a_plain_file(tmp_path):
    source = tmp_path / "mine" / "plug_in.py"
    source.parent.mkdir()
    source.write_text("import random, pytest, attn_zoo\ntry:\n    from .. import above\nexcept ImportError: ...\n")
    for name in ("mine/random", "mine/pytest", "mine/attn_zoo", "above"):
        (tmp_path / f"{name}.py").write_text("")
    files = source_files(source, CALL_ROOMS, "cpu", is_plain=True)
    assert {name for name in files if "/" not in name} == {"plug_in.py"}


def test_a_compiled_module_beside_a_plain_file_counts(tmp_path):
    source = tmp_path / "plug_in.py"
    source.write_text("import fast\n")
    compiled = tmp_path / f"fast{EXTENSION_SUFFIXES[0]}"
    before = []
    for content in (b"\x7fELF one", b"\x7fELF two"):
        compiled.write_bytes(content)
        before.append(digests(source, source.name))
    assert not set(before[0]) & set(before[1])


def test_of_packages_that_a_file_imports_the_versions_count(tmp_path, monkeypatch):
    source = tmp_path / "mine" / "plug_in.py"
    source.parent.mkdir()
    source.write_text("import os, torch, attn_zoo\ndef call():\n    from strange.deep import fast\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    variant = replace(variants["full"], source=str(source), provider=source.name)
    before = digests(source, source.name)
    assert imported_packages(variant, CALL_ROOMS, "cpu") == {}, "not installed, or recorded with every environment"
    installed = tmp_path / "site" / "Strange_Project.dist-info"
    installed.mkdir(parents=True)
    (installed / "top_level.txt").write_text("strange\n")
    found = []
    for version in ("1.0", "1.1"):
        (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Strange-Project\nVersion: {version}\n")
        found.append(digests(source, source.name))
        assert imported_packages(variant, CALL_ROOMS, "cpu") == {"Strange-Project": version}
    assert not set(found[0]) & set(found[1])
    assert not set(found[0]) & set(before)
    assert imported_packages(variants["full"], CALL_ROOMS, "cpu") == {}


@pytest.mark.parametrize("is_editable", [None, True, False], ids=["on the path only", "editable", "installed"])
def test_of_a_package_that_is_used_from_its_source_the_files_count(tmp_path, monkeypatch, is_editable):
    """Its version stays while it is edited, and a run that is gone on with would keep what the old one measured."""
    source, tree = tmp_path / "mine" / "plug_in.py", tmp_path / "tree"
    (tree / "kernels_of_mine").mkdir(parents=True)
    source.parent.mkdir()
    source.write_text("import beside\n")
    (source.parent / "beside.py").write_text("from kernels_of_mine import fast\n")
    for name in ("__init__", "fast", "unused"):
        (tree / "kernels_of_mine" / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tree)
    if is_editable is not None:
        (info := tmp_path / "site" / "Kernels.dist-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / "site")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Kernels\nVersion: 1.0\n")
        (info / "top_level.txt").write_text("kernels_of_mine\n")
        (info / "direct_url.json").write_text(json.dumps({"url": "file:///", "dir_info": {"editable": is_editable}}))
    variant = replace(variants["full"], source=str(source), provider=source.name)
    found = []
    for name in ("fast", "unused"):
        found += [(digests(source, source.name), imported_packages(variant, CALL_ROOMS, "cpu"))]
        edit(tree / "kernels_of_mine" / f"{name}.py")
    found += [(digests(source, source.name), imported_packages(variant, CALL_ROOMS, "cpu"))]
    before, fast, unused = found
    assert fast == unused
    assert (set(before[0]) & set(fast[0]) == set()) is (is_editable is not False)
    ((name, version),) = before[1].items()
    assert name == ("kernels_of_mine" if is_editable is None else "Kernels")
    code = r"source \w{12}"
    assert re.fullmatch({None: code, True: f"1.0, {code}", False: "1.0"}[is_editable], version)


def test_a_module_of_another_package_counts_with_that_package(tmp_path):
    folder = tmp_path / "theirs"
    (folder / "zoo").mkdir(parents=True)
    for name in ("__init__", "zoo/__init__", "kernels", "unused"):
        (folder / f"{name}.py").write_text("")
    source = folder / "zoo" / "variant.py"
    source.write_text("from ..kernels import fast\nimport theirs.absent, stranger\n")
    (tmp_path / "stranger.py").write_text("")
    files = source_files(source, CALL_ROOMS, "cpu")
    own = {name for name in files if not name.startswith("attn_zoo/")}
    assert own == {"theirs/zoo/variant.py", "theirs/kernels.py", "theirs/__init__.py"}


def test_imports_count_wherever_a_statement_may_stand(tmp_path):
    source = tmp_path / "plug_in.py"
    source.write_text(
        """
class A:
    def f(self):
        for _ in ():
            import a
        else:
            import b
        while x:
            async def g(): import c
        with x:
            import d
        try:
            import e
        except OSError:
            import f
        except ValueError: pass
        else:
            import g
        finally:
            import h
        match x:
            case 1:
                import i
            case _ if x:
                import j
        if x: pass
        elif y: import k
        else: import l
        return (lambda: 1) if x else [y for y in x]
"""
    )
    for letter in "abcdefghijkl":
        (tmp_path / f"{letter}.py").touch()
    files = source_files(source, CALL_ROOMS, "cpu", is_plain=True)
    assert {name for name in files if "/" not in name} == {"plug_in.py", *(f"{letter}.py" for letter in "abcdefghijkl")}


def test_names_of_sources_are_the_same_on_every_machine():
    for rooms in (CALL_ROOMS, TRAINING_ROOMS):
        files = source_files(Path(variants["full"].source), rooms, "cuda")
        assert {name.split("/")[1] for name in files} == set(rooms)
        assert all(path == PACKAGE.parent / name for name, path in files.items())


def executed(work: Callable[[], object]) -> set[Path]:
    """Return the files of this package of which a function runs, also in a backward."""
    files: set[Path] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return files


# Asked once, when something is built or first called; nothing that is timed or scored is computed there.
ASKED_ONCE = {"discovery", "errors.py", "metadata.py", "registry.py"}
# How it is measured, which the versions of the protocols cover, and how what was measured is written down.
MEASURING = {"folder.py", "kernels/trace.py", "records.py", "whole_files.py", "matrix", "measure", "statistics"}


def uncovered(kind: AbstractKind, name: str, files: set[Path]) -> set[str]:
    """Return which of the files the digest of a variant's cells of this kind does not cover."""
    variant = variants[name]
    covered = source_files(
        Path(variant.source), kind.rooms, "cpu", is_plain=variant.provider == Path(variant.source).name
    )
    names = {path.relative_to(PACKAGE).as_posix() for path in files - set(covered.values())}
    return {name for name in names if not {name, name.partition("/")[0]} & (ASKED_ONCE | MEASURING)}


@pytest.mark.parametrize("name", attn_zoo.list_variants())
def test_whatever_runs_in_a_timed_call_is_in_the_digest(name):
    can = variants[name].capabilities
    # Of forward and backward, whose calls begin with all that a forward alone does.
    group = {
        "passes": ["fwd_bwd"],
        "is_causal": [False] * can.bidirectional + [True] * bool(can.causal),
        "seq_len": [96],
    }
    group |= {"has_padding": [False, can.key_padding_mask], "dropout_p": [0.0, 0.1] if can.attention_dropout else [0.0]}
    group |= {"scope": ["mixer"] if variants[name].attention is None else ["attention", "mixer"]}
    cells = [item.cell for item in make_plan(make_matrix([name], **group)).cells if item.refusal is None]
    assert len(cells) >= 2
    for cell in cells:
        kind = kind_of(cell)
        assert isinstance(kind, TimedKind)
        call, setup = kind.workload(cell, None).make_call()

        def timed(call: Call = call, setup: Call | None = setup) -> None:
            for step in (setup, call, setup, call):
                if step is not None:
                    step()

        files = executed(timed)
        assert Path(variants[name].source) in files
        assert not uncovered(kind, name, files), cell.id


def test_whatever_runs_in_a_training_step_is_in_the_digest():
    (item,) = make_plan(
        parse_matrix({"name": "test", "step": [{"variants": ["full"], "seq_len": 16, "device": "cpu"}]}, "test.toml")
    ).cells
    kind = kind_of(item.cell)
    assert isinstance(kind, TimedKind)
    call, _ = kind.workload(item.cell, None).make_call()
    files = executed(call)
    assert {PACKAGE / "training" / "updates.py", PACKAGE / "model" / "stacks.py"} <= files
    assert not uncovered(kind, item.cell.variant, files)


def test_whatever_runs_in_a_training_is_in_the_digest():
    (item,) = training_plan(["full"]).cells
    files = executed(lambda: run_training(item.cell))
    assert {PACKAGE / "training" / "loop.py", PACKAGE / "tasks" / "abstract_task.py"} <= files
    assert not uncovered(kind_of(item.cell), "full", files)


def test_each_kind_of_cell_has_the_digest_of_what_it_runs():
    (call, *_) = tiny_plan(["fake_ok"]).cells
    (training,) = training_plan(["fake_train_ok"]).cells
    assert call.cell.variant_digest == source_digest(variants["fake_ok"], CALL_ROOMS, "cpu") != ""
    assert training.cell.variant_digest == source_digest(variants["fake_train_ok"], TRAINING_ROOMS, "cpu") != ""
