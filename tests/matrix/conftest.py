"""Small plans over misbehaving variants, and a fake environment where the real one does not matter."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from attn_zoo.matrix.cell.run_order import run_order
from attn_zoo.matrix.plan.expand import Plan, make_plan
from attn_zoo.matrix.plan.schema import parse_matrix
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.records import Cell, Environment, Record
from attn_zoo.registry import load_file, tasks, variants

VARIANT_FILE = str(Path(__file__).with_name("misbehaving.py"))
TRAINING_FILE = str(Path(__file__).with_name("training_subjects.py"))
BUDGET_S = 0.02
"""Of samples, in every cell of these tests that does not ask for more: none asks how good its time is."""
TINY_TRAINING = {
    "num_layers": 1,
    "embed_dim": 8,
    "num_heads": 1,
    "ffn_dim": 8,
    "num_steps": 4,
    "warmup_steps": 1,
    "eval_every": 2,
    "batch_size": 8,
}

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else they wait for all other tests
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a token of the tests that is long enough",
}
"""For all tests of a process: Ray reads them once."""


def load_files():
    variants["full"]  # discover first, so that nothing is registered twice
    tasks["listops"]
    load_file(VARIANT_FILE, None)
    load_file(TRAINING_FILE, None)


def prepare_process():
    """Do in a process of its own what the fixtures do in ours."""
    load_files()
    mock.patch("attn_zoo.matrix.drive.run_plan.note_ceilings").start()


@pytest.fixture(scope="session", autouse=True)
def _misbehaving_variants():
    load_files()
    yield
    for registry in (variants, tasks):
        for name in [name for name in registry if name.startswith("fake_")]:
            registry.remove(name)


@pytest.fixture(autouse=True)
def _no_ceilings(monkeypatch):
    """Seconds that only the tests of ceilings need."""
    monkeypatch.setattr("attn_zoo.matrix.drive.run_plan.note_ceilings", lambda *_, **__: None)


def make_matrix(names: list[Any], **changes: Any):
    group = {
        "variants": names,
        "seq_len": [16, 1024],
        "num_heads": 1,
        "head_dim": 8,
        "device": "cpu",
        "threads": 1,
        "budget_s": BUDGET_S,
        "timeout_s": 120,
        **changes,
    }
    return parse_matrix({"name": "test", "scaling": [group]}, "test.toml")


def tiny_plan(names: list[Any], **changes: Any) -> Plan:
    return make_plan(make_matrix(names, **changes))


def training_plan(names: list[Any], **changes: Any) -> Plan:
    group = {
        "variants": names,
        "task": "fake_task",
        "overrides": TINY_TRAINING,
        "device": "cpu",
        "timeout_s": 120,
        **changes,
    }
    return make_plan(parse_matrix({"name": "test", "accuracy": [group]}, "test.toml"))


def run_cell(cell: Cell, *, has_count: bool = True, budget_s: float = BUDGET_S, **order: Any) -> Record:
    """Run one cell in this process."""
    (record,) = run_order(WorkOrder(cells=(cell,), has_count=(has_count,), budget_s=budget_s, **order))
    return record


def run_cells_in_turns(
    cells: Sequence[Cell],
    *,
    tell: Callable[[int], object] | None = None,
    budget_s: float = BUDGET_S,
    **order: Any,
) -> list[Record]:
    """Run cells in this process, timed in turns."""
    whole = WorkOrder(cells=tuple(cells), isolation="interleaved", budget_s=budget_s, **order)
    return run_order(whole, tell or (lambda _: None))


def environment(**changes: Any) -> Environment:
    base: dict[str, Any] = {
        "host": "0123456789ab",
        "platform": "Linux",
        "cpu": "Test",
        "num_cores": 2,
        "memory_bytes": 2**34,
        "threads": 2,
        "versions": {"torch": "2.13.0"},
    }
    return Environment(**{**base, **changes})
