"""Sources that a results folder keeps: loaded where this user measured them, never where somebody else did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attn_zoo.matrix.store.kept_sources import keep_sources, load_kept
from attn_zoo.registry import variants
from attn_zoo.scaffold import new_variant
from tests.conftest import keep_only


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    before = tuple(variants)
    yield
    keep_only(variants, before)
    for name in [name for name in sys.modules if "kept" in name and "attn_zoo." not in name]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = new_variant("kept", tmp_path)
    keep_sources(tmp_path / "run", {str(path): ["kept"]})
    path.unlink()
    return tmp_path / "run"


def test_what_was_measured_here_is_loaded_again(folder):
    assert (folder / "sources" / "kept" / "kept.py").is_file()
    assert load_kept(folder) == []
    assert "kept" in variants
    assert load_kept(folder) == [], "what is registered stays"


def test_what_somebody_else_measured_is_not_run(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache of another user"))
    assert load_kept(folder) == [folder / "sources" / "kept" / "kept.py"]
    assert "kept" not in variants


def test_a_source_that_was_changed_since_is_not_run(folder, tmp_path):
    path = folder / "sources" / "kept" / "kept.py"
    path.write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\n" + path.read_text())
    assert load_kept(folder) == [path]
    assert not (tmp_path / "trace").exists()


def test_without_a_place_for_marks_the_source_is_kept_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "a file"))
    path = new_variant("kept", tmp_path)
    keep_sources(tmp_path / "run", {str(path): ["kept"]})
    assert load_kept(tmp_path / "run") == [tmp_path / "run" / "sources" / "kept" / "kept.py"]


def test_of_two_files_that_bring_one_name_the_latest_is_kept(folder, tmp_path):
    """Or the first by name would be loaded, and what it measured run again."""
    path = new_variant("kept", tmp_path)
    renamed = path.rename(tmp_path / "kept_anew.py")
    keep_sources(folder, {str(renamed): ["kept"]})
    load_kept(folder)
    assert Path(variants["kept"].source).name == "kept_anew.py"


def test_a_folder_without_sources_has_nothing_to_load(tmp_path):
    assert load_kept(tmp_path) == []


def test_what_a_file_imports_from_beside_it_is_kept_and_loaded_with_it(tmp_path):
    """And the file is told apart from it, which has no name of its own."""
    path = new_variant("kept", tmp_path)
    path.write_text("from a_kept_part.scale import SCALE\nimport kept_twice\n" + path.read_text())
    (tmp_path / "a_kept_part").mkdir()
    (tmp_path / "a_kept_part" / "scale.py").write_text("import kept_twice\nSCALE = 1.0\n")
    (tmp_path / "kept_twice.py").write_text("")
    (tmp_path / "unrelated.py").write_text("")
    for _ in range(2):
        keep_sources(tmp_path / "run", {str(path): ["kept"]})
    kept = tmp_path / "run" / "sources" / "kept"
    files = {file.relative_to(kept).as_posix() for file in kept.rglob("*") if file.is_file()}
    assert files == {"kept.py", "a_kept_part/scale.py", "kept_twice.py"}
    for file in (path, tmp_path / "kept_twice.py"):
        file.unlink()
    assert load_kept(tmp_path / "run") == []
    assert Path(variants["kept"].source) == kept / "kept.py"


def test_a_file_whose_neighbour_was_changed_since_is_not_run(tmp_path):
    path = new_variant("kept", tmp_path)
    path.write_text("import kept_part\n" + path.read_text())
    (tmp_path / "kept_part.py").write_text("")
    keep_sources(tmp_path / "run", {str(path): ["kept"]})
    kept = tmp_path / "run" / "sources" / "kept"
    (kept / "kept_part.py").write_text("raise SystemExit")
    assert load_kept(tmp_path / "run") == [kept / "kept.py"]
    assert "kept" not in variants
