"""A cell, and whether and how it will be run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from attn_zoo.matrix.plan.estimate import Estimate
from attn_zoo.records import Cell

__all__ = ["PlannedCell", "Point", "Refusal"]

Refusal = tuple[str, str]
"""Capability that is missing, and the sentence that says so."""

Point = tuple[dict[str, Any], Cell, Refusal | None, Estimate]
"""What the axes of a group say of one cell, the cell, why it will not run, and what it will cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCell:
    """A cell and how it will be run.

    Args:
        cell: what is measured.
        refusal: why it will not run, or None.
        isolation: a process of its own; one shared with the shorter lengths of its lane and with the lane's other
            passes; or one in which it is timed in turns with other variants.
        repeats: processes in which it is timed: with others in turns one after the other, otherwise one in each round
            over the matrix.
        repeat: which of these rounds this is, from 0.
        timeout_s: seconds it may take.
        budget_s: seconds of sampling in each process.
        has_energy: measure energy too.
        has_count: count FLOPs too. One length and pass checks the formula, and the counter takes up to a second to
            load, so isolated cells leave it to the first of their kind.
        keep_weights: store what was trained.
        estimate_s: rough seconds, set-up included; None where nothing is known (training).
        estimate_bytes: rough bytes at the peak; None likewise.
    """

    cell: Cell
    refusal: Refusal | None = None
    isolation: Literal["cell", "lane", "interleaved"] = "cell"
    repeats: int = 1
    repeat: int = 0
    timeout_s: float = 600.0
    budget_s: float = 1.0
    has_energy: bool = False
    has_count: bool = True
    keep_weights: bool = False
    estimate_s: float | None = None
    estimate_bytes: int | None = None

    @property
    def num_rounds(self) -> int:
        """In how many rounds over the matrix it takes part."""
        return 1 if self.isolation == "interleaved" else self.repeats

    @property
    def num_processes(self) -> int:
        """In how many processes it runs in one round, one after the other."""
        return self.repeats // self.num_rounds

    @property
    def track(self) -> str:
        """Cells of one track run one after another, under one supervisor, and may share a process."""
        if self.isolation == "interleaved":
            return self.cell.together
        if self.isolation == "cell":
            return self.cell.lane
        data = {name: value for name, value in asdict(self.cell).items() if name not in {"seq_len", "pass_"}}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:20]

    @property
    def unit(self) -> tuple[str, int | None, int]:
        """Cells of one unit run at once: those that are timed in turns, otherwise each cell by itself."""
        if self.isolation == "interleaved":
            return self.cell.together, self.cell.seq_len, self.repeat
        return self.cell.key, self.cell.seq_len, self.repeat
