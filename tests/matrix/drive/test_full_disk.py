"""A disk that is full while a matrix runs: one sentence, its own exit code, and the next run goes on."""

import resource
import sys
from pathlib import Path

import pytest

from attn_zoo.errors import AttnZooError
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.plan.expand import Plan
from attn_zoo.matrix.store.store import Store
from tests.matrix.conftest import TINY_TRAINING, prepare_process, training_plan
from tests.processes import start_process

LIMIT_BYTES = 60_000
"""Holds every record and every log, but no checkpoint of the model below."""


def plan() -> Plan:
    return training_plan(["fake_ok"], overrides={**TINY_TRAINING, "embed_dim": 64, "ffn_dim": 128})


def run_it(folder: Path, limit_bytes: int) -> int:
    """What the runner does."""
    prepare_process()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    try:
        return run(plan(), Store(folder)).exit_code
    except AttnZooError as error:
        sys.stderr.write(str(error))
        return error.exit_code


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_no_result(tmp_path):
    folder, errors = tmp_path / "run", tmp_path / "errors"
    process = start_process(run_it, folder, LIMIT_BYTES, errors=errors)
    process.join()
    said = errors.read_text()
    assert process.exitcode == 4, said
    assert "checkpoints/" in said
    assert "Traceback" not in said
    assert Store(folder).records() == []
    assert not list(folder.rglob("*.tmp"))
    summary = run(plan(), Store(folder))
    assert summary.counts == {"ok": 1}
