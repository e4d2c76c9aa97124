"""Every file of the pytest-benchmark suite collects and runs at a short length, and says what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "benchmarks").glob("test_*.py"))

# What to run of each file: enough to go through all of its code. Compiled kernels take a minute and are left out.
SELECTED = {
    "test_variants.py": ("full", 2),
    "test_peers_attention.py": ("linformer", 2),
    "test_peers_exact.py": ("torch", 12),
}


def test_every_file_is_run_here():
    assert {path.name for path in FILES} == SELECTED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_runs(path, tmp_path):
    expression, least = SELECTED[path.name]
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "pytest", str(path), "-k", expression, "--seq-lens", "64", "-q", "-p", "no:xdist"]
    # Told that it is a worker of pytest-xdist, pytest-benchmark measures nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["GOMP_SPINCOUNT"] = "0"  # other tests use the cores too
    command = [*command, f"--benchmark-json={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads(out.read_text())["benchmarks"]
    assert len(found) >= least, done.stdout[-3000:]
    for each in found:
        assert "64 tokens" in each["group"]
        assert each["extra_info"]["seq_len"] == 64
        assert {"device", "batch_size"} <= each["extra_info"].keys()
        assert each["extra_info"].keys() & {"variant", "peer"}
        assert len(each["stats"]["data"]) == each["stats"]["rounds"] > 1
