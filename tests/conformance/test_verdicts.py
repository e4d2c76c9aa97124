"""Verdicts of the gate travel between processes of one run, to the same subject only, and a no is a no."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.conformance import gate, verdicts
from attn_zoo.errors import GateError
from attn_zoo.registry import variants
from tests.conformance.broken import Broken, Softmax, registered

ROOT = Path(__file__).parents[2]
BUILD = BuildContext(embed_dim=32, num_heads=2, max_seq_len=2048)


class Counts(Softmax):
    num_calls: ClassVar[int] = 0
    is_wrong: ClassVar[bool] = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        Counts.num_calls += 1
        output = super().attend(query, key, value, mask)
        return output * float("nan") if Counts.is_wrong else output


@pytest.fixture(autouse=True)
def _no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(Counts, "num_calls", 0)
    monkeypatch.setattr(Counts, "is_wrong", False)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a process that has just started."""
    monkeypatch.setattr(verdicts, "_verdicts", {})


def travelled() -> dict[str, Any]:
    """Return what this process knows, as another one receives it."""
    data: dict[str, Any] = json.loads(json.dumps(verdicts.known()))
    return data


def test_another_process_does_not_check_again_what_held(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered(Broken(cls=Counts, check="")) as name:
        first = gate(name, {}, BUILD, seq_len=1024)
        sent, calls = travelled(), Counts.num_calls
        forget(monkeypatch)
        verdicts.learn(sent)
        assert gate(name, {}, BUILD, seq_len=2048) == first
        assert Counts.num_calls == calls > 0


def test_what_failed_in_one_process_fails_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered(Broken(cls=Counts, check="")) as name:
        monkeypatch.setattr(Counts, "is_wrong", True)
        with pytest.raises(GateError) as first:
            gate(name, {}, BUILD, seq_len=1024)
        sent = travelled()
        forget(monkeypatch)
        verdicts.learn(sent)
        monkeypatch.setattr(Counts, "is_wrong", False)  # as luck may have it
        with pytest.raises(GateError) as again:
            gate(name, {}, BUILD, seq_len=2048)
    assert (again.value.check, str(again.value)) == (first.value.check, str(first.value))


def test_anything_that_the_gate_depends_on_is_another_subject() -> None:
    def asked_again(**changes: Any) -> bool:
        before = Counts.num_calls
        gate(name, {}, **{"build": BUILD, "seq_len": 2048, **changes})
        return Counts.num_calls > before

    with registered(Broken(cls=Counts, check="")) as name:
        assert asked_again()
        assert not asked_again()
        assert not asked_again(seq_len=1000), "longer than any length of the gate"
        assert asked_again(dtype="float64")
        assert asked_again(seq_len=100)
        assert asked_again(build=BuildContext(embed_dim=64, num_heads=4, max_seq_len=2048))
        assert asked_again(build=BuildContext(embed_dim=32, num_heads=2, max_seq_len=2048, seed=1))
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(threads + 1)
            assert asked_again()
        finally:
            torch.set_num_threads(threads)


def test_code_in_no_file_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered(Broken(cls=Counts, check="")) as name, monkeypatch.context() as patch:
        patch.setitem(variants._entries, name, replace(variants[name], source="<a cell of a notebook>", digest=""))
        gate(name, {}, BUILD, seq_len=1024)
        monkeypatch.setattr(Counts, "is_wrong", True)
        with pytest.raises(GateError):
            gate(name, {}, BUILD, seq_len=1024)


def test_other_options_are_another_subject_and_keys_are_the_same_in_every_process() -> None:
    options: list[dict[str, Any]] = [{"proj_len": 16}, {"proj_len": 32}]
    build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=64)
    for each in options:
        before = len(verdicts.known())
        gate("linformer", each, build, seq_len=64)
        assert len(verdicts.known()) > before
    code = (
        "import json, torch; from attn_zoo.attention import BuildContext; "
        "from attn_zoo.conformance import gate, verdicts; "
        f"torch.set_num_threads({torch.get_num_threads()}); "
        "build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=64); "
        f"[gate('linformer', each, build, seq_len=64) for each in {options!r}]; print(json.dumps(verdicts.known()))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert json.loads(output) == travelled()
