"""The same supervisor on a Ray cluster: each lane is one task, on a node that has its timing slot free.

Ray places lanes and repeats those whose node was lost. The worker process that measures is the local engine's; only the
driver writes records. Nodes offer a slot by `ray start --resources='{"timing_slot": 1}'`; a cluster that this engine
starts itself on one machine has one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_zoo.errors import UnsupportedError
from attn_zoo.matrix.drive.supervise import Control, Lane, run_lane
from attn_zoo.matrix.drive.worker_pool import Settings, WorkerPool
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.records import Environment, Record

SLOT = "timing_slot"
"""One per node: two cells on one node would measure each other."""

_TICK_S = 0.2


class _Collector(Control):
    """Stands in for the driver on the node: records are kept for the answer."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def finished(self, record: Record) -> None:
        self.records.append(record)


def _run_on_node(
    items: list[dict[str, Any]], prior: list[dict[str, Any]], variant_files: dict[str, str], data_dir: str | None
) -> dict[str, Any]:
    """Run one lane on this node; plain data in and out, so that no class need be equal on both sides."""
    from attn_zoo.measure.environment import capture_environment

    environment = capture_environment()
    collector = _Collector()
    with tempfile.TemporaryDirectory(prefix="attn-zoo-") as folder:
        files = []
        for name, text in variant_files.items():
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            files.append(str(path))
        settings = Settings(
            logs=Path(folder),
            environment=environment.digest,
            variant_files=tuple(files),
            data_dir=Path(data_dir) if data_dir else None,
            weights=Path(folder) / "weights",
        )
        cells = [PlannedCell.from_dict(item) for item in items]
        with WorkerPool(settings, collector.should_stop, collector.is_over, cells) as pool:
            run_lane(cells, pool, collector, [Record.from_dict(data) for data in prior])
        logs = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in Path(folder).glob("*.log")}
        weights = {path.name: path.read_bytes() for path in Path(folder).glob("weights/*")}
    return {
        "environment": environment.to_dict(),
        "records": [record.to_dict() for record in collector.records],
        "logs": logs,
        "weights": weights,
    }


class RayEngine:
    """Runs lanes on a Ray cluster.

    Args:
        address: of a running cluster; `"local"` starts one on this machine for the run.
        num_cpus: of a cluster started here.

    Raises:
        UnsupportedError: Ray is not installed.
    """

    is_remote = True
    jobs = 1

    def __init__(self, address: str = "local", num_cpus: int | None = None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless the user says so
        try:
            import ray
        except ImportError:
            raise UnsupportedError("ray", "the ray engine needs Ray: pip install 'attn-zoo[ray]'") from None
        self._ray: Any = ray
        self._address, self._num_cpus = address, num_cpus

    def _connect(self) -> None:
        if self._address == "local":
            # The path must be explicit: after an unclean stop Ray would look for the old cluster.
            self._ray.init(
                address="local",
                num_cpus=self._num_cpus,
                resources={SLOT: 1},
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
        else:
            self._ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
        if self._ray.cluster_resources().get(SLOT, 0) < 1:
            self._ray.shutdown()
            raise UnsupportedError("ray", f"no node offers a {SLOT}: start nodes with --resources='{{\"{SLOT}\": 1}}'")

    def run(self, lanes: Sequence[Lane], settings: Settings, control: Control) -> None:
        """Run all lanes; arguments as in `LocalEngine.run`. A lane's records arrive together, when it ends."""
        self._connect()
        try:
            remote = self._ray.remote(_run_on_node)
            files = {Path(path).name: Path(path).read_text(encoding="utf-8") for path in settings.variant_files}
            waiting: dict[Any, Sequence[PlannedCell]] = {}
            for items, prior in lanes:
                if not all(control.may_start(item) for item in items):
                    continue
                # One attempt more for a node that is lost; what a cell does to its own process never gets this far.
                options = {"max_retries": 1, "retry_exceptions": False, "num_cpus": 1, "resources": {SLOT: 1}}
                if items[0].cell.device == "cuda":
                    options["num_gpus"] = 1
                task = remote.options(**options).remote(
                    [item.to_dict() for item in items],
                    [record.to_dict() for record in prior],
                    files,
                    str(settings.data_dir) if settings.data_dir else None,
                )
                waiting[task] = items
            self._collect(waiting, settings, control)
        finally:
            self._ray.shutdown()

    def _collect(self, waiting: dict[Any, Sequence[PlannedCell]], settings: Settings, control: Control) -> None:
        while waiting:
            done, _ = self._ray.wait(list(waiting), num_returns=1, timeout=_TICK_S)
            if control.should_stop():
                for task in waiting:
                    self._ray.cancel(task, force=True)
                return
            for task in done:
                items = waiting.pop(task)
                try:
                    answer = self._ray.get(task)
                except self._ray.exceptions.RayError as error:
                    for item in {item.cell.key: item for item in items}.values():  # once, whatever its repeats
                        control.finished(_lost(item, error))
                    continue
                control.moved_to(Environment.from_dict(answer["environment"]))
                for key, text in answer["logs"].items():
                    (settings.logs / f"{key}.log").write_text(text, encoding="utf-8")
                if settings.weights and answer["weights"]:
                    settings.weights.mkdir(parents=True, exist_ok=True)
                    for name, content in answer["weights"].items():
                        (settings.weights / name).write_bytes(content)
                for data in answer["records"]:
                    control.finished(Record.from_dict(data))


def _lost(item: PlannedCell, error: BaseException) -> Record:
    lines = str(error).strip().splitlines()
    reason = f"lost with its node or supervisor: {type(error).__name__}: {lines[0] if lines else ''}"
    return Record(cell=item.cell, status="crashed", reason=reason, isolation=item.isolation)
