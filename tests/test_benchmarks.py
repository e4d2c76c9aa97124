"""Every file of the pytest-benchmark suite collects and runs at a short length, and says what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[dict[str, Any]]:
    """Return what one call of pytest measured, over all files: each start takes longer than what is selected."""
    out = tmp_path_factory.mktemp("benchmarks") / "bench.json"
    selected = " or ".join(f"({name} and {expression})" for name, (expression, _) in SELECTED.items())
    command = [sys.executable, "-m", "pytest", *map(str, FILES), "-k", selected, "--seq-lens", "64", "-q"]
    # Told that it is a worker of pytest-xdist, pytest-benchmark measures nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["GOMP_SPINCOUNT"] = "0"  # other tests use the cores too
    command = [*command, "-p", "no:xdist", f"--benchmark-json={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())["benchmarks"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTED)
def test_a_file_runs(name, measured):
    expression, least = SELECTED[name]
    found = [each for each in measured if each["fullname"].partition("::")[0].endswith(f"/{name}")]
    assert len(found) >= least
    for each in found:
        assert expression in each["fullname"]
        assert "64 tokens" in each["group"]
        assert each["extra_info"]["seq_len"] == 64
        assert {"device", "batch_size"} <= each["extra_info"].keys()
        assert each["extra_info"].keys() & {"variant", "peer"}
        assert len(each["stats"]["data"]) == each["stats"]["rounds"] > 1
