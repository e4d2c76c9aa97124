"""How a plan spreads over a cluster: the real dispatcher, simulated machines, simulated time.

    python benchmarks/simulate_cluster.py                              # 1000 cells over 50 machines with one GPU each
    python benchmarks/simulate_cluster.py --matrix scaling-gpu         # a shipped matrix, by its estimates
    python benchmarks/simulate_cluster.py --cells 100000 --lose 5      # five machines go while it runs

Cells take what the plan estimates, give or take a fifth; an agent takes 5 s to start, a lost machine is noticed after
10 s. Real are the decisions, the messages and what they cost the driver. Prints the time of the run beside the best
possible, and messages, their bytes, the driver's processor time and its memory.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_zoo.matrix.drive.engines.dispatch import Cluster, Dispatcher, Event, Machine, Place
from attn_zoo.matrix.drive.run_plan import lanes_of
from attn_zoo.matrix.drive.worker_pool import Control, Settings
from attn_zoo.matrix.plan.expand import make_plan
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.matrix.plan.schema import load_matrix, parse_matrix
from attn_zoo.records import Environment, Record, Timing

START_S, NOTICE_S = 5.0, 10.0


class SimulatedCluster(Cluster):
    """Machines in simulated time.

    Args:
        machines: all of them.
        environments: of each machine, by its id; one for all others.
        losses: (seconds, id of a machine): when it goes.
        seed: of the times that cells take.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        environments: Mapping[str, Environment] | None = None,
        losses: Sequence[tuple[float, str]] = (),
        seed: int = 0,
    ) -> None:
        self._all = {machine.id: machine for machine in machines}
        self._environments = environments or {}
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, int, Event]] = []  # time, order, agent
        self._order = itertools.count()
        self._agents: dict[int, tuple[Machine, Place, bool]] = {}  # the last: it has begun
        self._losses = sorted(losses, reverse=True)
        self._stopping: set[int] = set()
        self.now = self.busy_s = self.own_s = 0.0
        self.num_messages = self.num_bytes = 0
        self.began: list[tuple[str, int, str, float]] = []
        """Key, repeat, machine and time of every cell that was begun."""
        self.wishes: list[Sequence[tuple[float, float]]] = []

    def machines(self) -> list[Machine]:
        return list(self._all.values())

    def _say(self, agent: int, at: float, event: Event) -> None:
        heapq.heappush(self._events, (at, next(self._order), agent, event))

    def start(self, machine: Machine, place: Place) -> int:
        agent = next(self._order)
        self._agents[agent] = machine, place, False
        self._admit()
        return agent

    def _admit(self) -> None:
        """Begin agents whose machine has room."""
        for agent, (machine, place, has_begun) in self._agents.items():
            if has_begun or machine.id not in self._all:
                continue
            shares = [
                place.share(machine) for other, place, begun in self._agents.values() if begun and other == machine
            ]
            cpus, gpus = place.share(machine)
            room = 1e-6 + machine.num_cpus, 1e-6 + machine.num_gpus
            if cpus + sum(each[0] for each in shares) <= room[0] and gpus + sum(each[1] for each in shares) <= room[1]:
                self._agents[agent] = machine, place, True
                environment = self._environments.get(machine.id, ENVIRONMENT)
                ready = {"event": "ready", "problem": "", "environment": environment.to_dict()}
                self._say(agent, self.now + START_S, ready)

    def give(self, agent: int, turn: Mapping[str, Any]) -> None:
        began = time.process_time()
        self.num_messages += 1
        self.num_bytes += len(json.dumps({**turn, "checkpoints": {}}))
        at = self.now
        machine, _, _ = self._agents[agent]
        environment = self._environments.get(machine.id, ENVIRONMENT).digest
        for data in itertools.chain(*turn["lanes"]):
            item = PlannedCell.from_dict(data)
            started = {"event": "started", "key": item.cell.key, "repeat": item.repeat}
            self._say(agent, at, started)
            seconds = (item.estimate_s or 60.0) / item.repeats * self._random.uniform(0.8, 1.2)
            at += seconds
            record = Record(
                cell=item.cell, status="ok", environment=environment, duration_s=seconds, timing=some_timing(seconds)
            )
            answer = {"event": "record", "record": record.to_dict(), "repeat": item.repeat, "weights": {}, "log": None}
            self._say(agent, at, answer)
        self._say(agent, at, {"event": "done"})
        self.own_s += time.process_time() - began

    def events(self, wait_s: float) -> Iterator[tuple[int, Event]]:
        end = self.now + wait_s
        if not self._agents or (self._events and self._events[0][0] > end):
            end = min([at for at, *_ in self._events[:1]] + [at for at, _ in self._losses[-1:]] or [end + wait_s])
        while self._losses and self._losses[-1][0] <= end:
            at, lost = self._losses.pop()
            self._all.pop(lost, None)
            for agent in [agent for agent, (machine, *_) in self._agents.items() if machine.id == lost]:
                self._events = [event for event in self._events if event[2] != agent or event[0] <= at]
                heapq.heapify(self._events)
                self._say(agent, at + NOTICE_S, {"event": "lost", "reason": "simulated"})
        while self._events and self._events[0][0] <= end:
            self.now, _, agent, event = heapq.heappop(self._events)
            if agent not in self._agents:
                continue
            if agent in self._stopping and event["event"] == "started":
                self._events = [other for other in self._events if other[2] != agent]
                heapq.heapify(self._events)
                event = {"event": "done"}
            self._note(agent, event)
            yield agent, event
        self.now = max(self.now, end)

    def _note(self, agent: int, event: Event) -> None:
        began = time.process_time()
        self.num_messages += 1
        self.num_bytes += len(json.dumps(event))
        if event["event"] == "started":
            self.began.append((event["key"], event["repeat"], self._agents[agent][0].id, self.now))
        elif event["event"] == "record":
            self.busy_s += event["record"].get("duration_s", 0.0)
        self.own_s += time.process_time() - began

    def stop(self, agent: int) -> None:
        self._stopping.add(agent)

    def end(self, agent: int) -> None:
        self._agents.pop(agent, None)
        self._admit()

    def wish(self, shares: Sequence[tuple[float, float]]) -> None:
        self.wishes.append(shares)

    def can_grow(self) -> bool:
        return False


ENVIRONMENT = Environment(host="simulated", platform="", cpu="", num_cores=16, memory_bytes=2**37, threads=16)


def some_timing(seconds: float) -> Timing:
    samples = tuple(1e3 * seconds / 60 * (1 + 0.001 * index) for index in range(60))
    middle = samples[30]
    summary: dict[str, Any] = dict.fromkeys(("median_ms", "q1_ms", "q3_ms", "low_ms", "high_ms"), middle)
    return Timing(samples_ms=samples, **summary, first_ms=middle, num_warmup=3, inner_loops=1, timer="cuda_event")


def many_cells(count: int) -> list[PlannedCell]:
    """Return about so many timings on a GPU, of 24 lengths, three passes and three variants with many labels."""
    cells: list[PlannedCell] = []
    lengths = [256 * step for step in range(1, 25)]
    labels = range(max(1, round(count / (24 * 3 * 3))))
    for first in labels[::50]:  # a matrix has at most 20 000 cells
        some = labels[first : first + 50]
        entries = [{"name": name, "label": f"{name}{n}"} for n in some for name in ("full", "linformer", "bigbird")]
        group = {"variants": entries, "seq_len": lengths, "passes": ["fwd", "bwd", "fwd_bwd"], "device": "cuda"}
        matrix = parse_matrix({"name": "simulated", "scaling": [group]}, "simulated")
        cells += make_plan(matrix, is_remote=True).cells
    return cells


class _Count(Control):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def finished(self, record: Record) -> None:
        self.seconds.append(record.duration_s)


def main() -> None:
    """Simulate, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--matrix", help="a shipped matrix instead")
    parser.add_argument("--machines", type=int, default=50)
    parser.add_argument("--gpus", type=int, default=1, help="of each machine")
    parser.add_argument("--lose", type=int, default=0, help="machines that go while it runs")
    options = parser.parse_args()
    if options.matrix:
        cells: Sequence[PlannedCell] = make_plan(load_matrix(options.matrix), is_remote=True).cells
    else:
        cells = many_cells(options.cells)
    machines = [Machine(str(n), f"machine {n}", 16.0, float(options.gpus)) for n in range(options.machines)]
    losses = [(60.0 * (n + 1), str(n)) for n in range(options.lose)]
    cluster, control = SimulatedCluster(machines, losses=losses), _Count()
    lanes = lanes_of(cells)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    dispatcher = Dispatcher(cluster, lanes, Settings(logs=Path()), control, clock=lambda: cluster.now)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.reset_peak()
    dispatcher.run()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    again, timed = SimulatedCluster(machines, losses=losses), _Count()
    began = time.process_time()
    Dispatcher(again, lanes, Settings(logs=Path()), timed, clock=lambda: again.now).run()
    driver_s = time.process_time() - began - again.own_s
    count, num_gpus = len(timed.seconds), options.machines * options.gpus
    best_s = max([cluster.busy_s / num_gpus, *control.seconds])
    print(f"{count} cells, {num_gpus} GPUs: {cluster.busy_s / 3600:.2f} h of work in {cluster.now / 3600:.3f} h")
    print(f"  best possible {best_s / 3600:.3f} h; speed-up {cluster.busy_s / cluster.now:.1f}")
    print(f"  begun twice or more: {len(cluster.began) - count} cells")
    print(f"  messages: {cluster.num_messages / count:.1f} a cell, {cluster.num_bytes / count / 1000:.1f} kB a cell")
    print(f"  driver: {1e3 * driver_s / count:.2f} ms of a processor a cell")
    print(f"  its memory: {held / 2**20:.1f} MiB for what waits, at most {(peak - held) / 2**20:.1f} MiB beside that")


if __name__ == "__main__":
    main()
