"""Runs on a node of a cluster: takes cells from the driver a turn at a time and says at once what becomes of them.

Everything that goes in or out is plain data. Nothing is written but below a temporary folder: the driver alone writes
results, and gets checkpoints of trainings as they are saved, so that these go on elsewhere if the node is lost.
"""

from __future__ import annotations

import hashlib
import queue
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import attn_zoo
from attn_zoo.matrix.drive.engines.descendants import Keeper
from attn_zoo.matrix.drive.machine_ceilings import measure_subjects, subjects_of
from attn_zoo.matrix.drive.supervise import run_lane
from attn_zoo.matrix.drive.worker_pool import Control, Settings, WorkerPool
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.measure.environment import num_cores
from attn_zoo.records import Record

MAX_LOG_BYTES = 2**20
"""Of the log of a cell, from its end."""

SHIPPING_FRAC = 0.05
"""Of a training's time, that reading its checkpoints for the driver may take."""


def package_digest() -> str:
    """Return a digest of this package's sources."""
    root, digest = Path(attn_zoo.__path__[0]), hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.cpp")]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class _Reporter(Control):
    """Stands in for the driver: passes on what happens, and hears from it that no further cell may begin."""

    def __init__(self, events: queue.SimpleQueue[dict[str, Any]], logs: Path, checkpoints: Path, weights: Path) -> None:
        self._events, self._logs, self._checkpoints, self._weights = events, logs, checkpoints, weights
        self._running: list[PlannedCell] = []
        self._shipped: dict[Path, int] = {}  # time of change, by file
        self._next_look = 0.0
        self.is_stopping = False

    def is_over(self) -> bool:
        return self.is_stopping

    def may_start(self, *bundle: PlannedCell) -> bool:  # noqa: ARG002
        return not self.is_stopping

    def started(self, item: PlannedCell) -> None:
        self._running.append(item)
        self._events.put({"event": "started", "key": item.cell.key, "repeat": item.repeat})

    def should_stop(self) -> bool:
        if (began := time.monotonic()) >= self._next_look:
            self._ship_checkpoints()
            now = time.monotonic()
            self._next_look = now + (now - began) / SHIPPING_FRAC
        return False

    def finished(self, record: Record) -> None:
        key = record.cell.key
        self._ship_checkpoints()
        repeat = next((item.repeat for item in self._running if item.cell.key == key), 0)
        self._running = [item for item in self._running if item.cell.key != key]
        weights = {path.name: path.read_bytes() for path in self._weights.glob(f"{key}.*")}
        for name in weights:
            (self._weights / name).unlink()
        event = {"event": "record", "record": record.to_dict(), "repeat": repeat, "weights": weights}
        self._events.put({**event, "log": self._take_log(key)})

    def _take_log(self, key: str) -> bytes | None:
        path = self._logs / f"{key}.log"
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
                return file.read()
        except OSError:
            return None  # that of the first of its bundle has all

    def know(self, checkpoints: Mapping[str, Mapping[str, bytes]]) -> None:
        """Store checkpoints that the driver has."""
        for key, files in checkpoints.items():
            for name, content in files.items():
                path = self._checkpoints / Path(key).name / Path(name).name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                self._shipped[path] = path.stat().st_mtime_ns

    def _ship_checkpoints(self) -> None:
        """Send what was saved since the last time; None for what is gone."""
        found: dict[Path, int] = {}
        for path in self._checkpoints.glob("*/[!.]*.safetensors"):
            with suppress(FileNotFoundError):  # its training ends at this moment
                found[path] = path.stat().st_mtime_ns
        for path in {**found, **self._shipped}:
            if found.get(path) != self._shipped.get(path):
                content = None
                with suppress(FileNotFoundError):
                    content = path.read_bytes()
                self._events.put(
                    {"event": "checkpoint", "key": path.parent.name, "name": path.name, "content": content}
                )
        self._shipped = found


class NodeAgent:
    """Runs cells on its node for as long as the driver gives it some.

    Args:
        files: plain files by path below a folder, with their content.
        loaded: those of `files` that workers load first.
        data_dir: where tasks find local data, on this node.
        room: how many such agents the node holds at once: they share its processors.
        package: digest of the driver's sources.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        loaded: Sequence[str],
        data_dir: str | None,
        room: int,
        package: str,
    ) -> None:
        self._room, self._package = room, package
        self._folder = tempfile.TemporaryDirectory(prefix="attn-zoo-", ignore_cleanup_errors=True)
        self._keeper = Keeper(self._folder.name, self._folder.name)
        folder = Path(self._folder.name)
        for name, content in files.items():
            path = folder / "sources" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for name in ("logs", "checkpoints", "weights"):
            (folder / name).mkdir()
        self._settings = Settings(
            logs=folder / "logs",
            variant_files=tuple(str(folder / "sources" / name) for name in loaded),
            data_dir=Path(data_dir) if data_dir else None,
            checkpoints=folder / "checkpoints",
            weights=folder / "weights",
        )
        self._turns: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reporter = _Reporter(self._events, folder / "logs", folder / "checkpoints", folder / "weights")

    def hello(self) -> dict[str, Any]:
        """Say what this node is, and begin to take turns; `problem` says why it cannot be used."""
        if package_digest() != self._package:
            problem = f"it has other sources of attn-zoo (version {attn_zoo.__version__}) than the driver"
            return {"event": "ready", "problem": problem}
        import torch

        from attn_zoo.kernels.gpu_replays import replays_on
        from attn_zoo.measure.environment import capture_environment

        if torch.cuda.is_available() and (replays := replays_on("cuda")):
            replays.prepare_run(print)  # into the node's log
        environment = capture_environment()
        threads = None
        if self._room > 1:
            threads = min(max(1, num_cores() // self._room), environment.threads)
        self._settings = replace(self._settings, environment=environment.digest, threads=threads)
        # One thread for all turns: the kernel ends a worker when the thread that started it ends.
        threading.Thread(target=self._serve, daemon=True).start()
        return {"event": "ready", "problem": "", "environment": environment.to_dict()}

    def work(self, turn: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run lanes; yield an event for all that happens, at once."""
        self._turns.put(turn)
        while (event := self._events.get())["event"] != "failed":
            yield event
            if event["event"] == "done":
                return
        raise RuntimeError(event["reason"])

    def stop(self) -> None:
        """Begin no further cell."""
        self._reporter.is_stopping = True

    def close(self) -> None:
        """Remove what is on this node's disk."""
        self._folder.cleanup()
        self._keeper.close()

    def _serve(self) -> None:
        try:
            with WorkerPool(self._settings, self._reporter) as pool:
                while True:
                    self._run_turn(self._turns.get(), pool)
                    self._events.put({"event": "done"})
        except Exception as error:  # of the node, such as a full disk: the driver gives its work to another
            self._events.put({"event": "failed", "reason": f"{type(error).__name__}: {error}"})

    def _run_turn(self, turn: Mapping[str, Any], pool: WorkerPool) -> None:
        lanes = [[PlannedCell.from_dict(item) for item in lane] for lane in turn["lanes"]]
        items = [item for lane in lanes for item in lane]
        self._measure_ceilings(items, {tuple(subject[1:]) for subject in turn["ceilings"]})
        self._reporter.know(turn["checkpoints"])
        prior = [Record.from_dict(data) for data in turn["prior"]]
        pool.expect(items)
        for lane in lanes:
            if self._reporter.is_stopping:
                return
            run_lane(lane, pool, prior)

    def _measure_ceilings(self, items: Sequence[PlannedCell], known: set[tuple[Any, ...]]) -> None:
        missing = subjects_of(items) - known
        if not missing:
            return
        digest, over = self._settings.environment, self._reporter.is_over
        measured = [one.to_dict() for one in measure_subjects(missing, digest, lambda _: None, over)]
        self._events.put({"event": "ceilings", "ceilings": measured})
