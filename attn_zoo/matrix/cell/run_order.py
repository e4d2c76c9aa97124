"""Run one bundle of cells in this process: an order in, one record for each of its cells out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch

from attn_zoo.discovery.global_state import all_digits
from attn_zoo.discovery.own_files import KNOWN_PROGRAMS
from attn_zoo.errors import AttnZooError, ConfigError
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.limits import limit_memory
from attn_zoo.matrix.plan.source_digest import imported_packages
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.records import Cell, Record, Status
from attn_zoo.registry import load_file, variants


def run_order(
    order: WorkOrder, tell: Callable[[int], object] = lambda _: None, room_bytes: int | None = None
) -> list[Record]:
    """Run a bundle of registered variants in this process; arguments and result as in `AbstractKind.run`."""
    if (threads := order.cells[0].threads) is not None:  # the same for all
        torch.set_num_threads(threads)
    return kind_of(order.cells[0]).run(order, _empty_records(order), tell, room_bytes)


def _empty_records(order: WorkOrder, status: Status = "ok", reason: str = "") -> list[Record]:
    common: dict[str, Any] = {
        "status": status,
        "reason": reason,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": order.environment,
        "isolation": order.isolation,
        "bundle": order.bundle,
        "attempt": order.attempt,
    }
    return [Record(cell=cell, packages=_packages(cell), **common) for cell in order.cells]


def _packages(cell: Cell) -> dict[str, str]:
    if cell.variant not in variants:  # its file could not be loaded, which the record says
        return {}
    return imported_packages(variants[cell.variant], kind_of(cell).rooms, cell.device)


def answer(order: WorkOrder, tell: Callable[[int], object]) -> list[Record]:
    """Run a bundle in a process of its own: memory limited, files loaded, sources compared, all digits of float32."""
    KNOWN_PROGRAMS.update(order.programs)
    room = limit_memory() if order.cells[0].device == "cpu" else None
    try:
        for path in order.variant_files:
            load_file(path, None)  # this process is the isolation: no need to try the import in another one first
        for cell in order.cells:
            if kind_of(cell).source_digest(cell) != cell.variant_digest:
                problem = "its source, or a package that it imports, was changed while the matrix ran; run again"
                raise ConfigError(cell.variant, [("", problem)])
    except AttnZooError as error:
        return _empty_records(order, status="error", reason=str(error))
    with all_digits():
        return run_order(order, tell, room)
