"""A cell, and whether and how it will be run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_zoo.records import Cell

__all__ = ["PlannedCell", "Refusal"]

Refusal = tuple[str, str]
"""Capability that is missing, and the sentence that says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCell:
    """A cell and how it will be run.

    Args:
        cell: what is measured.
        refusal: why it will not run, or None.
        isolation: a process of its own, or one shared with the shorter lengths of its lane.
        timeout_s: seconds it may take.
        budget_s: seconds of sampling.
        has_energy: measure energy too.
        has_count: count FLOPs too. One length checks the formula, and the counter takes seconds to load, so isolated
            cells leave it to the shortest of their lane.
        keep_weights: store what was trained.
        estimate_s: rough seconds, set-up included; None where nothing is known (training).
        estimate_bytes: rough bytes at the peak; None likewise.
    """

    cell: Cell
    refusal: Refusal | None = None
    isolation: Literal["cell", "lane"] = "cell"
    timeout_s: float = 600.0
    budget_s: float = 1.0
    has_energy: bool = False
    has_count: bool = True
    keep_weights: bool = False
    estimate_s: float | None = None
    estimate_bytes: int | None = None
