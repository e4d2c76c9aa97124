"""What `pip install` brings: the matrices by name, run from an empty folder."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
BUILD = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return a folder with what the wheel of this tree installs."""
    folder: Path = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, *BUILD, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_the_matrices_of_the_repository_once(site):
    shipped = {path.name: path.read_bytes() for path in (site / "attn_zoo" / "matrices").iterdir()}
    own = {path.name: path.read_bytes() for path in (ROOT / "benchmarks").glob("*.toml")}
    needs_files = {name for name in own if name.startswith("peers-")}
    assert shipped == {name: text for name, text in own.items() if name not in needs_files}
    assert not (ROOT / "attn_zoo" / "matrices").exists()
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"attn_zoo"}


def test_every_dependency_is_pinned_to_a_version_that_will_do():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    asked = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    wanted = {canonicalize_name(each.name): each.specifier for each in map(Requirement, asked)}
    assert set(wanted) - set(pins) == {"trackio"}, "whose own dependencies exclude ours"
    assert [name for name, versions in wanted.items() if name in pins and pins[name] not in versions] == []


def test_every_matrix_has_its_file_s_name():
    for path in (ROOT / "benchmarks").glob("*.toml"):
        assert tomllib.loads(path.read_text())["name"] == path.stem


PROGRAM = """
import json, sys
from attn_zoo import cli

for arguments in json.loads(sys.argv[1]):
    sys.argv = ["attn-zoo", *arguments]
    try:
        cli.main()
    except SystemExit as stop:
        if stop.code:
            raise
"""


@pytest.mark.slow
def test_a_matrix_runs_by_its_name_from_an_empty_folder(site, tmp_path):
    """One process for all commands, most of which is loading torch, and a cell that is not timed, which needs one."""
    matrix, cell = "approximation-cpu", "performer/approximation/diffuse/L512/*/seed0"
    commands = [["list", "matrices"], ["run", matrix, "--only", cell], ["report", f"runs/{matrix}"]]
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search("^quick ", done.stdout, re.MULTILINE)
    assert f"1 ok  (1 new) in runs/{matrix}" in done.stdout
    environments = json.loads((tmp_path / "runs" / matrix / "run.json").read_text())["environments"]
    assert len(environments) == 1
    assert (tmp_path / "runs" / matrix / "report.html").is_file()
