"""The scripts for Slurm: what they start on a node, with stand-ins for Slurm's own commands."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks" / "slurm"
STAND_INS = {
    "attn-zoo": 'echo "attn-zoo $*"',
    "ray": 'echo "ray $* token=${#RAY_AUTH_TOKEN}"',
    "scontrol": "printf 'node7\\nnode8\\n'",
    "srun": 'echo "srun $1 $2"; shift 2; exec "$@"',
}


@pytest.fixture
def submit(tmp_path):
    """Run a script as Slurm would on a node; return what it printed."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "RAY", "SHARDS"))}
        environment = {**clean, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["bash", str(SCRIPTS / name), "scaling-gpu", "runs/gpu", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_a_job_of_an_array_runs_its_shard_until_its_time_is_over(submit):
    job = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "16"}
    expected = "attn-zoo run scaling-gpu --out runs/gpu --shard 3/16"
    assert submit("array.sh", **job).stdout == f"{expected}\n"
    assert submit("array.sh", "--device", "cuda", **job).stdout == f"{expected} --device cuda\n"
    timed = submit("array.sh", **job, SLURM_JOB_END_TIME=str(int(time.time()) + 3630)).stdout
    assert timed == f"{expected} --time-limit 59\n"
    ending = submit("array.sh", **job, SLURM_JOB_END_TIME=str(int(time.time()) + 5)).stdout
    assert ending == f"{expected} --time-limit 0\n", "of a limit below nothing the command is wrong"
    few = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MAX": "5", "SHARDS": "16"}
    assert submit("array.sh", **few).stdout == "attn-zoo run scaling-gpu --out runs/gpu --shard 5/16\n"
    alone = submit("array.sh")
    assert alone.returncode != 0
    assert "submit it with --array=1-N" in alone.stderr


def test_an_allocation_runs_ray_on_all_nodes_and_the_driver_on_the_first(submit):
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    run = "attn-zoo run scaling-gpu --out runs/gpu --engine ray --address node7:6379 --jobs 2"
    assert submit("ray.sh", "--jobs", "2", **job).stdout.splitlines() == [
        "srun --nodes=2 --ntasks-per-node=1",
        f"ray symmetric-run --address node7:6379 --min-nodes 2 -- {run} token=64",
    ]
