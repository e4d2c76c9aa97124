"""Files and folders are whole or absent, whatever fails on the way and whenever."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap

import pytest

from attn_zoo.errors import FolderError
from attn_zoo.whole_files import whole_file, whole_folder, write_whole


@pytest.mark.parametrize("step", ["tempfile.mkstemp", "os.fsync", "pathlib.Path.chmod", "pathlib.Path.replace"])
@pytest.mark.parametrize("how", ["fails", "dies"])
def test_at_every_step_of_a_write_the_file_is_the_old_or_the_new_one(step, how, tmp_path):
    path = tmp_path / "record.json"
    path.write_text("old")
    code = f"""
        import errno, os, pathlib, tempfile
        from attn_zoo.errors import StoreError
        from attn_zoo.whole_files import write_whole
        def broken(*args, **kwargs):
            if {how == "dies"}:
                os.kill(os.getpid(), 9)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        {step} = broken
        try:
            write_whole(pathlib.Path({str(path)!r}), "new")
        except StoreError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert path.read_text() == "old"
    if how == "dies":
        assert done.returncode == -9
    else:
        assert "cannot be written: No space left on device" in done.stdout
        assert [item.name for item in tmp_path.iterdir()] == ["record.json"], "a temporary file was left behind"


@pytest.mark.parametrize("manager", [whole_file, whole_folder])
def test_a_failure_on_the_way_leaves_nothing(manager, tmp_path):
    with pytest.raises(KeyboardInterrupt), manager(tmp_path / "out"):
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("manager", [whole_file, whole_folder])
def test_a_full_disk_is_one_sentence(manager, tmp_path):
    expected = pytest.raises(FolderError, match="No space left on device; nothing of it was left behind")
    with expected as caught, manager(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.exit_code == 4, "no mistake in the call"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("manager", [whole_file, whole_folder])
def test_a_disk_that_is_full_from_the_start_is_no_mistake_in_the_call(manager, tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("mkstemp", "mkdtemp"):
        monkeypatch.setattr(f"attn_zoo.whole_files.tempfile.{name}", refuse)
    with pytest.raises(FolderError, match="out: No space left on device") as caught, manager(tmp_path / "out"):
        pass
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("manager", [whole_file, whole_folder])
def test_a_place_that_cannot_be_written_is_one_sentence(manager, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FolderError, match="cannot be written"), manager(tmp_path / "file" / "out"):
        pass


@pytest.mark.parametrize("name", ["folder", "file/inside"])
def test_something_else_in_the_way_is_a_mistake_in_the_call(name, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot be written"):
        write_whole(tmp_path / name, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    """Nor a device, which root may replace: the machine would be without it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(FolderError, match="pipe: cannot be written: a device or a pipe"):
        write_whole(path, "text")
    with pytest.raises(FolderError, match="a device or a pipe"), whole_file(path, replace=True):
        pass
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_may_be_replaced_where_that_is_asked_for(tmp_path):
    (tmp_path / "out").write_text("old")
    with whole_file(tmp_path / "out", replace=True) as temporary:
        temporary.write_text("new")
        assert (tmp_path / "out").read_text() == "old"
    assert (tmp_path / "out").read_text() == "new"
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o644
