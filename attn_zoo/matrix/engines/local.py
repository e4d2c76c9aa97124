"""The default engine: worker processes on this machine, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from attn_zoo.matrix.plan import PlannedCell
from attn_zoo.matrix.supervise import Control, Settings, run_lane
from attn_zoo.records import Record

__all__ = ["LocalEngine"]


class LocalEngine:
    """Runs lanes one after another: two cells at once would measure each other."""

    is_remote = False

    def run(
        self,
        lanes: Sequence[tuple[Sequence[PlannedCell], Sequence[Record]]],
        settings: Settings,
        control: Control,
    ) -> None:
        """Run all lanes.

        Args:
            lanes: cells to run, ascending, and the records their lane has already.
            settings: of the run.
            control: asked before each cell and told after it.
        """
        for items, prior in lanes:
            if control.is_over():
                return
            run_lane(items, settings, control, prior)
