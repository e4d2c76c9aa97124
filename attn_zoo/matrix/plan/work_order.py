"""What a worker process is told to do: one bundle of cells, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from attn_zoo.records import Cell, Json


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOrder(Json):
    """One bundle of cells.

    Args:
        cells: one, or several that differ in the variant only and are timed in turns.
        isolation: see `PlannedCell`.
        budget_s: seconds of sampling for each.
        has_energy: measure energy too.
        has_count: for each cell, whether to count FLOPs; all of them if empty.
        is_repeat: take times only: another process has checked and weighed these very cells.
        environment: digest that the records carry.
        bundle: id that the records carry.
        seed: of the order in which turns are taken.
        attempt: 1 for the first.
        variant_files: plain files to load first.
        data_dir: where tasks find local data.
        checkpoint_dir: where a training may go on from.
        weights_dir: where to store what was trained, or None.
        log: file for what is printed.
        verdicts: of the gate, as far as other processes of the run know them.
        programs: likewise `KNOWN_PROGRAMS`.
    """

    cells: tuple[Cell, ...]
    isolation: Literal["cell", "lane", "interleaved"] = "cell"
    budget_s: float = 1.0
    has_energy: bool = False
    has_count: tuple[bool, ...] = ()
    is_repeat: bool = False
    environment: str = ""
    bundle: str = ""
    seed: int = 0
    attempt: int = 1
    variant_files: tuple[str, ...] = ()
    data_dir: str | None = None
    checkpoint_dir: str | None = None
    weights_dir: str | None = None
    log: str = ""
    verdicts: dict[str, Any] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)
