"""The log of a cell: short, never through a link, and never why a cell fails."""

import subprocess
import sys
import threading
import time

import pytest

from attn_zoo.errors import StoreError
from attn_zoo.matrix.cell import log
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.store.store import Store
from tests.matrix.conftest import tiny_plan


def test_a_log_keeps_how_it_began_and_how_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "MAX_BYTES", 10_000)
    monkeypatch.setattr(log, "_TAIL_BYTES", 100)
    path = tmp_path / "a.log"
    path.write_bytes(b"first\n" + b"x" * 50_000 + b"\nlast\n")
    log.keep_short(path)
    content = path.read_bytes()
    assert len(content) < 10_300
    assert content.startswith(b"first\n")
    assert content.endswith(b"\nlast\n")
    assert b"was cut here" in content
    log.keep_short(path)
    assert path.read_bytes() == content
    log.keep_short(tmp_path / "absent.log")


def test_a_variant_that_prints_without_end_fills_no_disk(tmp_path):
    store, sizes, is_over = Store(tmp_path / "run"), [0], threading.Event()

    def watch():
        while not is_over.is_set():
            sizes.extend(path.stat().st_size for path in store.logs.glob("*.log"))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run(tiny_plan(["fake_chatty"], seq_len=[1024], timeout_s=60), store)
    is_over.set()
    watcher.join()
    (record,) = store.records()
    assert record.status == "ok", record.reason
    assert max(sizes) > log.MAX_BYTES, "it did print"
    assert (store.logs / f"{record.cell.key}.log").stat().st_size <= 2 * log.MAX_BYTES


def test_a_log_that_is_a_link_is_not_written(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    link = tmp_path / "a.log"
    link.symlink_to(target)
    with pytest.raises(StoreError, match=r"a\.log: cannot be written"):
        log.open_log(link)
    log.keep_short(link)
    assert target.read_text() == "mine"


def test_printing_to_a_full_disk_is_no_failure():
    code = """
import os
from attn_zoo.matrix.cell.log import be_patient
be_patient()
full = os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1)
print("lost", "\\udcff", flush=True)
os.write(2, b"went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "went on")
