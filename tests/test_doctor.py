"""What `attn-zoo doctor` tries, and for how long it waits."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from attn_zoo import doctor
from attn_zoo.attention import build_attention


@pytest.fixture
def built(monkeypatch):
    """Which (variant, backend) were tried, in order; a backend in `hangs` never answers, one in `fails` raises."""
    tried: list[tuple[str, str]] = []
    hangs: set[str] = set()
    fails: set[str] = set()

    def build(name, build, *, backend):
        tried.append((name, backend))
        if backend in hangs:
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # its time is over soon, however fast the machine is
            threading.Event().wait(300)
        if backend in fails:
            raise RuntimeError("no kernel image\nand more lines")
        return build_attention(name, build, backend="auto")

    monkeypatch.setattr(doctor, "build_attention", build)
    return tried, hangs, fails


def test_a_kernel_that_compiles_for_long_is_interrupted_and_not_tried_again(built):
    tried, hangs, fails = built
    hangs.add("flex")
    fails.add("math")
    told: list[str] = []
    found = doctor.diagnose_backends("cpu", lambda: 1000.0, told.append)
    rows = {(name, backend): text for name, backend, text in found}
    assert [backend for _, backend in tried].count("flex") == 1
    first = next(name for name, backend in tried if backend == "flex")
    assert rows[first, "flex"] == "not known: still at it after 500 s (--wait waits)"
    assert rows["full", "flex"] == f"not tried: {first} took too long (--wait waits)"
    assert rows["full", "math"] == "fails: RuntimeError: no kernel image"
    assert f"trying {first} flex on cpu" in told
    assert "trying full auto on cpu" in told


def test_a_variant_of_hidden_states_and_of_the_past_alone_is_tried_too(built):
    rows = {(name, backend): text for name, backend, text in doctor.diagnose_backends("cpu")}
    assert ("full", "auto") in built[0]
    assert rows["nsa", "gather"].startswith("works: ")


def test_nothing_is_tried_when_the_time_is_over(built):
    rows = doctor.diagnose_backends("cpu", lambda: -1.0)
    assert built[0] == []
    assert {text for *_, text in rows} == {"not tried: no time was left (--wait waits)"}


def test_the_limit_counts_from_the_start_of_the_process(built, monkeypatch, capsys):
    given: list[float] = []

    def diagnose(_device, left_s, _tell):
        given.append(left_s())
        return []

    monkeypatch.setattr(doctor, "diagnose_backends", diagnose)
    for waits in (True, False):
        doctor.print_diagnosis(as_json=True, waits=waits)
    capsys.readouterr()
    since_start = time.time() - psutil.Process().create_time()
    assert given[0] == math.inf
    assert given[1] <= doctor.LIMIT_S
    assert given[1] == pytest.approx(doctor.LIMIT_S - since_start, abs=60)


def test_an_interrupted_call_leaves_torch_s_compiler_whole():
    """Half of it imported, every later path that needs it would be said to fail."""
    script = (
        "from attn_zoo import doctor\n"
        "for variant, backend, text in doctor.diagnose_backends('cpu', lambda: 0.6):\n"
        "    assert 'AttributeError' not in text, (variant, backend, text)\n"
        "import torch\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
