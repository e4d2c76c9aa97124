"""Data that several processes want are made once, and nobody waits for a process that waits for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_zoo.tasks.sources.tensor_cache import cached_tensors


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path))
    return tmp_path


def test_who_waits_finds_what_the_other_made(folder):
    made: list[str] = []
    is_making, may_end = threading.Event(), threading.Event()

    def slowly() -> dict[str, Tensor]:
        made.append("slowly")
        is_making.set()
        assert may_end.wait(20)
        return {"x": torch.arange(3)}

    def again() -> dict[str, Tensor]:
        made.append("again")
        return {"x": torch.arange(3)}

    threads = [threading.Thread(target=cached_tensors, args=("data", slowly))]
    threads[0].start()
    assert is_making.wait(20)
    threads.append(threading.Thread(target=cached_tensors, args=("data", again)))
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive(), "it waits"
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert made == ["slowly"]
    assert [path.name for path in folder.iterdir()] == ["data.safetensors"]


@pytest.mark.timeout(20)
def test_a_process_that_the_maker_started_does_not_wait_for_it(folder, monkeypatch):
    """One that draws begins a script without a main guard anew and comes to the same data: both waited for ever."""

    def with_help() -> dict[str, Tensor]:
        monkeypatch.setattr(os, "getppid", os.getpid)  # as in a process that this one started
        found = cached_tensors("data", lambda: {"x": torch.arange(3)})
        assert (folder / ".data.safetensors.lock").exists(), "others go on waiting"
        return found

    assert cached_tensors("data", with_help)["x"].tolist() == [0, 1, 2]
    assert [path.name for path in folder.iterdir()] == ["data.safetensors"]
