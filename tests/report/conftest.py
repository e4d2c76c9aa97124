"""One small results folder, analysed and written once for all tests that only read it."""

from pathlib import Path

import pytest

from attn_zoo.report.analysis.analyse import Analysis, analyse
from attn_zoo.report.pages.write import write_analysis
from tests.report.synthetic import scaling, trained, write_run, zoo

LENGTHS = [512, 1024, 2048, 4096]


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory) -> Path:
    records = [*zoo(lengths=LENGTHS), *trained()]
    reason = "no causal form: each compressed key mixes all positions"
    records += [scaling("linformer", n, is_causal=True, status="unsupported", reason=reason) for n in LENGTHS]
    return write_run(tmp_path_factory.mktemp("results") / "run", records)


@pytest.fixture(scope="session")
def analysis(run_dir) -> Analysis:
    return analyse([run_dir])


@pytest.fixture(scope="session")
def written(analysis, tmp_path_factory) -> tuple[Path, list[Path]]:
    out = tmp_path_factory.mktemp("report")
    return out, write_analysis(analysis, out)
