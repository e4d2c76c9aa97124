"""How a plan and the records of a folder compare: done, left, stale; and the summary of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attn_zoo.matrix.plan.expand import Plan, PlannedCell
from attn_zoo.matrix.status_sets import ANSWERS
from attn_zoo.records import Record

__all__ = ["Standing", "Summary", "standing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a plan and the records of a folder compare.

    Args:
        done: cells with a record.
        left: cells without.
        stale: records whose source or data changed since: kept, but not part of the plan any more.
        other: records of other matrices.
        begun: repeats that cells of `left` have already, by key.
    """

    done: tuple[Record, ...]
    left: tuple[PlannedCell, ...]
    stale: tuple[Record, ...]
    other: tuple[Record, ...]
    begun: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run did.

    Args:
        counts: cells of the plan by status, records of earlier runs included.
        new: how many of them are new.
        left: cells without a record.
        num_parts: repeats that cells of `left` have already.
        stopped: why it ended early: `"interrupted"`, `"time limit"`, or None.
        folder: where the records are.
    """

    counts: dict[str, int] = field(default_factory=dict)
    new: int = 0
    left: tuple[PlannedCell, ...] = ()
    num_parts: int = 0
    stopped: str | None = None
    folder: Path = Path()

    @property
    def exit_code(self) -> int:
        """0 if every cell with a record is ok or unsupported, 1 if one failed, 130 after Ctrl-C."""
        if self.stopped == "interrupted":
            return 130
        return int(any(status not in ANSWERS for status in self.counts))


def standing(plan: Plan, records: Sequence[Record], parts: Mapping[str, int] | None = None) -> Standing:
    """Compare a plan with records; nothing is run.

    Args:
        plan: of all cells.
        records: of the folder.
        parts: how many repeats cells have that are not done, by key.
    """
    by_key = {record.cell.key: record for record in records}
    planned = {item.cell.key for item in plan.cells}
    ids = {item.cell.id for item in plan.cells}
    outside = [record for key, record in by_key.items() if key not in planned]
    return Standing(
        done=tuple(by_key[item.cell.key] for item in plan.cells if item.cell.key in by_key),
        left=tuple(item for item in plan.cells if item.cell.key not in by_key),
        stale=tuple(record for record in outside if record.cell.id in ids),
        other=tuple(record for record in outside if record.cell.id not in ids),
        begun={key: count for key, count in (parts or {}).items() if key in planned and key not in by_key},
    )
