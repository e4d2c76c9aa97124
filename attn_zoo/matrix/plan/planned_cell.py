"""A cell, and whether and how it will be run."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from attn_zoo.records import Cell, Json

Refusal = tuple[str, str]
"""Capability that is missing, and the sentence that says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCell(Json):
    """A cell and how it will be run.

    Args:
        cell: what is measured.
        refusal: why it will not run, or None.
        isolation: a process of its own; one shared with the shorter lengths of its lane and with the lane's other
            passes; or one in which it is timed in turns with other variants.
        repeats: processes in which it is timed; between them the run goes over all other cells of the matrix, so that
            they are far apart in time.
        repeat: which of them this is, from 0.
        timeout_s: seconds one repeat may take.
        budget_s: seconds of sampling in each process.
        has_energy: measure energy too.
        has_count: count FLOPs too. One length and pass checks the formula, and the counter takes up to a second to
            load, so isolated cells leave it to the first that differs in length and pass only; but for kinds that have
            no formula.
        keep_weights: store what was trained.
        estimate_s: rough seconds of all repeats, set-up included; None where nothing is known.
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
    def lane(self) -> str:
        """Equal for cells that run one after another under one supervisor, and may share a process."""
        if self.isolation == "interleaved":
            return self.cell.together
        if self.isolation == "cell":
            return self.cell.curve
        # Where nothing is timed, what a process ran before cannot matter; a model in which mechanisms are exchanged is
        # trained by the first of the cells that need it.
        also: tuple[str, ...] = ("inputs", "seed") if self.cell.inputs else ()
        if self.cell.replaces:
            also = ("variant", "label", "options", "variant_digest", "adapt_steps")
        return hashlib.sha256(self.cell.all_but("seq_len", "pass_", *also).encode()).hexdigest()[:20]

    @property
    def process(self) -> Hashable:
        """Equal for cells that one process may run, but for its repeats: the starts of a run are as many."""
        return self.lane if self.isolation == "lane" else self.bundle

    @property
    def bundle(self) -> tuple[str, int | None, int]:
        """Equal for cells that run at once: those that are timed in turns, otherwise each cell by itself."""
        key = self.cell.together if self.isolation == "interleaved" else self.cell.key
        return key, self.cell.seq_len, self.repeat
