"""Share the cells of a plan out to the machines of a cluster, and take what they answer.

Cells are handed out a minute at a time to agents that ask for nothing else: one for each device that is timed on, more
where trainings share one. So the driver holds what is under way and no more, however long the plan. A lane is cut by
length and repeat. As long as there are lanes enough, a longer sequence waits for the shorter ones, which may show that
it is hopeless; only an agent that would be idle otherwise does not wait. All of a lane is measured in one environment.

An agent that is lost had one cell open in each bundle, which somebody else begins anew; what it had finished is here
already. Nothing in this module knows how agents are reached.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from attn_zoo.errors import StoreError, UnsupportedError, counted
from attn_zoo.matrix.drive.machine_ceilings import subjects_of
from attn_zoo.matrix.drive.supervise import Lane, beside
from attn_zoo.matrix.drive.worker_pool import Control, Settings
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.records import STOPPERS, Ceilings, Environment, Record
from attn_zoo.whole_files import write_whole

TURN_S = 60.0
"""Rough seconds of work that an agent is given at once: long beside what a message costs, short beside a run."""

MAX_LOST = 2
"""A cell that was lost with its machine so often is left for another run."""

MAX_FAILURES = 3
"""Agents that may fail to start on a machine, one after another, before it is left out."""

SUSPECT_S = 60.0
"""How long a machine that lost an agent is avoided: one that is gone stands in the list of nodes for a while."""

PATIENCE_S = 600.0
"""How long to wait for a machine that a cell could run on; a cluster that grows by itself needs minutes."""

_TICK_S, _LOOK_S = 0.2, 2.0

Event = dict[str, Any]
"""What an agent says; `event` names it: ready, started, record, checkpoint, ceilings, done, lost."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of the cluster, what it offers, and whether timings may run on it."""

    id: str
    name: str
    num_cpus: float
    num_gpus: float = 0.0
    may_time: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """What a cell occupies: a timing all of its device, a training a share, or several devices of one machine.

    The processors of a machine are divided among the cells that it can hold: on the CPU, a timing has them all.

    Args:
        device: `"cpu"` or `"cuda"`.
        is_timed: of the kind of the cell.
        jobs: cells on one device at once.
        num_devices: that a cell has to itself.
    """

    device: str
    is_timed: bool
    jobs: int = 1
    num_devices: int = 1

    def room(self, machine: Machine) -> int:
        """Return how many such cells the machine holds at once."""
        if machine.num_cpus <= 0 or (self.is_timed and not machine.may_time):
            return 0
        return self.jobs * (int(machine.num_gpus) // self.num_devices if self.device == "cuda" else 1)

    def share(self, machine: Machine) -> tuple[float, float]:
        """Return (processors, GPUs) of the machine that each of them has."""
        num_cpus = machine.num_cpus / self.room(machine)
        return float(int(num_cpus)) if num_cpus > 1 else num_cpus, self.num_gpus

    def needs(self) -> str:
        """Return what machine could run it, in words."""
        if self.device == "cuda":
            return f"node with {self.num_devices} GPUs" if self.num_devices > 1 else "node with a GPU"
        return "node for timings" if self.is_timed else "node with processors"

    @property
    def num_gpus(self) -> float:
        """GPUs that each of them has."""
        return self.num_devices / self.jobs if self.device == "cuda" else 0.0


class Cluster(Protocol):
    """Reaches agents. What `start` returns names one in all else."""

    def machines(self) -> list[Machine]:
        """Return those that are alive."""

    def start(self, machine: Machine, place: Place) -> Any:
        """Start an agent there, as soon as there is room; it says ready."""

    def give(self, agent: Any, turn: Mapping[str, Any]) -> None:
        """Hand an agent cells; it says what becomes of them, and done."""

    def events(self, wait_s: float) -> Iterable[tuple[Any, Event]]:
        """Return what agents said, after `wait_s` at most."""

    def stop(self, agent: Any) -> None:
        """Ask an agent to begin no further cell."""

    def end(self, agent: Any) -> None:
        """End an agent and all that it runs, at once."""

    def wish(self, shares: Sequence[tuple[float, float]]) -> None:
        """Say which (processors, GPUs) could be used at once, to a cluster that grows by itself."""

    def can_grow(self) -> bool:
        """Tell whether it grows by itself."""


@dataclass(eq=False, slots=True)
class _Chain:
    """One repeat of a lane, in pieces that may run on different machines."""

    order: int
    lane: str
    place: Place
    pieces: deque[list[PlannedCell]]
    num_turns: int = 0
    """Under way."""

    def seconds(self) -> float:
        return sum(map(_seconds, self.pieces))


@dataclass(eq=False, slots=True)
class _Agent:
    machine: Machine
    place: Place
    environment: str = ""
    pieces: list[tuple[_Chain, list[PlannedCell]]] = field(default_factory=list)
    open: dict[tuple[str, int], PlannedCell] = field(default_factory=dict)  # by key and the repeat that it was told
    begun: set[tuple[str, int]] = field(default_factory=set)  # likewise
    ceilings: set[tuple[str, str, str, int | None]] = field(default_factory=set)  # that it is to measure
    is_stopping: bool = False

    @property
    def is_idle(self) -> bool:
        return bool(self.environment) and not self.pieces


def _seconds(piece: Sequence[PlannedCell]) -> float:
    """Return the rough seconds of a piece; infinity where nothing is known."""
    known = [item.estimate_s / item.repeats for item in piece if item.estimate_s is not None]
    return sum(known) if len(known) == len(piece) else float("inf")


class Dispatcher:
    """Runs lanes on a cluster; `control` belongs to the driver: nobody else writes."""

    def __init__(
        self,
        cluster: Cluster,
        lanes: Iterable[Lane],
        settings: Settings,
        control: Control,
        *,
        jobs: int = 1,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._cluster, self._settings, self._control = cluster, settings, control
        self._clock, self._patience_s = clock, patience_s
        self._agents: dict[Any, _Agent] = {}
        self._chains: dict[str, list[_Chain]] = {}
        self._ready: dict[tuple[Place, str], list[tuple[int, _Chain]]] = {}  # heaps, by place and environment
        self._waiting: Counter[tuple[Place, str]] = Counter()  # pieces that nobody has, likewise
        self._left_s: dict[Place, float] = defaultdict(float)
        self._pins: dict[str, str] = {}  # environment by lane; absent where any will do
        self._stoppers: dict[str, Record] = {}
        self._num_lost: Counter[tuple[str, int]] = Counter()  # by key and repeat
        self._num_memory: Counter[tuple[str, int]] = Counter()  # likewise, where memory was the reason
        self._checked: set[str] = set()  # keys of cells of which one repeat is here: others need take times only
        self._num_given_up = 0
        self._environments: dict[str, str] = {}  # digest by machine
        self._lost_at: dict[str, float] = {}  # when an agent was lost, by machine
        self._failures: Counter[str] = Counter()
        self._left_out: dict[str, str] = {}  # why, by machine
        self._ceilings = set(settings.ceilings)
        self._machines: list[Machine] = []
        self._looked: float | None = None
        self._alone_since: float | None = None
        self._said: set[str] = set()
        self._wishes: list[tuple[float, float]] = []
        self._num_chains = 0
        for items, prior in lanes:
            self._add(items, prior, jobs)

    def _add(self, items: Sequence[PlannedCell], prior: Sequence[Record], jobs: int) -> None:
        """Make a chain of what waits for each other: cells that are timed in turns, otherwise those of one curve."""
        first = items[0]
        is_timed = kind_of(first.cell).is_timed
        num_devices = first.cell.data_parallel
        place = Place(first.cell.device, is_timed, 1 if is_timed or num_devices > 1 else jobs, num_devices)
        for record in prior:
            self._note_stopper(record)
            self._checked.add(record.cell.key)
            if is_timed and record.environment:
                self._pins.setdefault(first.lane, record.environment)
        curves: dict[str, list[PlannedCell]] = {}
        for item in items:
            curves.setdefault("" if item.isolation == "interleaved" else item.cell.curve, []).append(item)
        for curve in curves.values():
            pieces = deque(list(piece) for _, piece in itertools.groupby(curve, key=lambda item: item.cell.seq_len))
            chain = _Chain(self._num_chains, first.lane, place, pieces)
            self._num_chains += 1
            self._chains.setdefault(chain.lane, []).append(chain)
            for piece in pieces:
                self._count(chain, piece, 1)
            self._push(chain)

    def _pin(self, chain: _Chain) -> str:
        return self._pins.get(chain.lane, "")

    def _count(self, chain: _Chain, piece: Sequence[PlannedCell], sign: int) -> None:
        self._waiting[chain.place, self._pin(chain)] += sign
        if (seconds := _seconds(piece)) < float("inf"):
            self._left_s[chain.place] += sign * seconds

    def _push(self, chain: _Chain) -> None:
        heapq.heappush(self._ready.setdefault((chain.place, self._pin(chain)), []), (chain.order, chain))

    def _repin(self, lane: str, environment: str) -> None:
        """Have the rest of a lane wait for machines of this environment; of any, if empty."""
        chains = [(chain, len(chain.pieces)) for chain in self._chains[lane]]
        for chain, count in chains:
            self._waiting[chain.place, self._pin(chain)] -= count
        self._pins[lane] = environment
        for chain, count in chains:
            self._waiting[chain.place, environment] += count

    def run(self) -> None:
        """Run until nothing is left that can be run, or `control` ends it.

        Raises:
            UnsupportedError: no machine can be used.
        """
        try:
            while self._has_work():
                is_over = self._control.is_over()
                if not is_over:
                    self._hire()
                    self._hand_out()
                self._dismiss(is_over)
                for handle, event in self._cluster.events(_TICK_S):
                    self._take(handle, event)
                if self._control.should_stop():
                    return
        finally:
            for handle in self._agents:
                self._cluster.end(handle)
            self._wish([])
        if self._num_given_up:
            self._control.say(
                f"lost {MAX_LOST} times with their machine, and without a record: "
                f"{counted(self._num_given_up, 'cell')}; the same command runs them again"
            )

    def _has_work(self) -> bool:
        return any(agent.pieces for agent in self._agents.values()) or (
            not self._control.is_over() and any(self._waiting.values())
        )

    # Machines and agents

    def _hire(self) -> None:
        """Start agents where there is room and work for them."""
        now = self._clock()
        if self._looked is not None and now - self._looked < _LOOK_S:
            return
        self._looked, self._machines = now, self._cluster.machines()
        usable = [machine for machine in self._machines if machine.id not in self._left_out]
        if self._machines and not usable:
            raise UnsupportedError("ray", "; ".join(dict.fromkeys(self._left_out.values())))
        never = -float("inf")
        sound = [machine for machine in usable if now - self._lost_at.get(machine.id, never) > SUSPECT_S]
        usable = sound or usable
        held = Counter((agent.machine.id, agent.place) for agent in self._agents.values())
        free = Counter(agent.place for agent in self._agents.values() if not agent.pieces)
        wishes: list[tuple[float, float]] = []
        for place in sorted({place for place, _ in self._waiting}, key=lambda place: not place.is_timed):
            num_wanted = self._num_waiting(place) - free[place]
            seats = sorted(
                (number, index, machine)
                for index, machine in enumerate(usable)
                for number in range(held[machine.id, place], place.room(machine))
                if self._suits(place, machine)
            )
            for _, _, machine in seats[: max(0, num_wanted)]:
                self._agents[self._cluster.start(machine, place)] = _Agent(machine, place)
            if num_wanted > len(seats):
                largest = max((place.share(machine) for machine in usable if place.room(machine)), default=None)
                shares = [largest or (1.0, place.num_gpus)]
                wishes += shares * min(num_wanted - len(seats) + sum(held.values()), 1000)
        self._wish(wishes)
        self._watch_waiting(now, usable)

    def _wish(self, wishes: list[tuple[float, float]]) -> None:
        if wishes != self._wishes:  # a cluster remembers what it was asked for
            self._wishes = wishes
            self._cluster.wish(wishes)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._control.say(text)

    def _num_waiting(self, place: Place) -> int:
        return sum(count for (other, _), count in self._waiting.items() if other == place)

    def _suits(self, place: Place, machine: Machine) -> bool:
        """Tell whether there is work for an agent there, as far as the machine's environment is known."""
        environment = self._environments.get(machine.id)
        if environment is None:
            return True
        return self._waiting[place, ""] + self._waiting[place, environment] > 0

    def _watch_waiting(self, now: float, usable: Sequence[Machine]) -> None:
        """Say what is waited for; give up what no machine can run, unless the cluster may get one by itself."""
        places = {place for (place, _), count in self._waiting.items() if count}
        needed = {place.needs() for place in places if not any(map(place.room, usable))}
        need = " or a ".join(sorted(needed))
        can_grow = bool(need) and self._cluster.can_grow()
        if need:
            limit = "the cluster was asked to grow" if can_grow else f"there is none; {self._patience_s:g} s at most"
            self._say_once(f"waiting for a {need}: {limit}")
        if any(agent.environment for agent in self._agents.values()):
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = now
        if self._agents:  # started, but others have the machines
            if now - self._alone_since > 30:
                names = ", ".join(sorted({agent.machine.name for agent in self._agents.values()})[:5])
                self._say_once(f"waiting for {names}: no room there, or slow to start")
            return
        if self._unpin(usable) or can_grow:
            self._alone_since = now
            return
        if now - self._alone_since > self._patience_s:
            none = f"no {need} came within {self._patience_s:g} s, and the cluster does not grow by itself"
            raise UnsupportedError(
                "ray", f"{none}: no record of {counted(sum(self._waiting.values()), 'piece')} of work"
            )

    def _unpin(self, usable: Sequence[Machine]) -> bool:
        """Let lanes go on anywhere whose environment no machine has any more; tell whether there are such."""
        if not all(machine.id in self._environments for machine in usable):
            return False
        is_changed = False
        for place, environment in [key for key, count in self._waiting.items() if count and key[1]]:
            here = {self._environments[machine.id] for machine in usable if place.room(machine)}
            if not here or environment in here:
                continue
            for chains in self._chains.values():
                if self._pin(chains[0]) == environment:
                    self._repin(chains[0].lane, "")
                    for chain in chains:
                        if chain.pieces:  # nobody is at it: there is no agent
                            self._push(chain)
            is_changed = True
        return is_changed

    def _dismiss(self, is_over: bool) -> None:
        """End agents for whom nothing is left; when the run is over, ask the others to begin nothing more."""
        for handle, agent in list(self._agents.items()):
            if agent.pieces:
                if is_over and not agent.is_stopping:
                    agent.is_stopping = True
                    self._cluster.stop(handle)
                continue
            places = ["", agent.environment] if agent.environment else [pin for _, pin in self._waiting]
            if is_over or not any(self._waiting[agent.place, pin] for pin in places):
                del self._agents[handle]
                self._cluster.end(handle)

    # Work

    def _hand_out(self) -> None:
        for handle, agent in self._agents.items():
            if agent.is_idle and self._waiting[agent.place, ""] + self._waiting[agent.place, agent.environment]:
                self._fill(agent)
                if agent.pieces:
                    self._cluster.give(handle, self._turn(agent))

    def _fill(self, agent: _Agent) -> None:
        """Give an agent pieces for a turn: less towards the end, so that all agents end together."""
        place = agent.place
        num_agents = sum(other.place == place for other in self._agents.values())
        target_s = min(TURN_S, self._left_s[place] / (2 * num_agents))
        seconds = 0.0
        while (chain := self._next_chain(agent)) is not None:
            is_begun, has_others = False, chain.num_turns > 0
            if place.is_timed and self._pin(chain) != agent.environment:
                self._repin(chain.lane, agent.environment)
            while chain.pieces and (not agent.pieces or (seconds < target_s and not has_others)):
                planned = chain.pieces.popleft()
                self._count(chain, planned, -1)
                piece = [item for item in planned if self._control.is_wanted(item)]
                if piece and self._control.may_start(*piece):
                    agent.pieces.append((chain, piece))
                    keys = [item.cell.key for item in piece]  # timed in turns they are checked together, too
                    is_first = not any(key in self._checked or (key, 0) in agent.open for key in keys)
                    for key, item in zip(keys, piece, strict=True):
                        agent.open[key, 0 if is_first else item.repeat] = item
                    seconds += _seconds(piece)
                    is_begun = True
            chain.num_turns += is_begun
            if chain.pieces and not chain.num_turns:
                self._push(chain)
            if agent.pieces and seconds >= target_s:
                return

    def _next_chain(self, agent: _Agent) -> _Chain | None:
        """Return the first chain of which nothing is under way; for who has nothing at all, the longest of the others.

        It is taken out of the chains that are ready.
        """
        heads = []
        for pin in dict.fromkeys(("", agent.environment)):
            heap = self._ready.get((agent.place, pin), [])
            while heap:
                _, chain = heap[0]
                if chain.pieces and not chain.num_turns and self._pin(chain) in ("", agent.environment):
                    heads.append((chain.order, pin, heap))
                    break
                heapq.heappop(heap)
                if chain.pieces and not chain.num_turns:
                    self._push(chain)  # another repeat of its lane began elsewhere
        if heads:
            _, _, heap = min(heads)
            return heapq.heappop(heap)[1]
        if agent.pieces:
            return None
        begun = {
            chain.order: chain
            for other in self._agents.values()
            for chain, _ in other.pieces
            if chain.pieces and chain.place == agent.place and self._pin(chain) in ("", agent.environment)
        }
        return max(begun.values(), key=_Chain.seconds, default=None)

    def _turn(self, agent: _Agent) -> dict[str, Any]:
        """Return what the agent is told: plain data, so that no class need be equal on both sides."""
        told = {(key, item.repeat): replace(item, repeat=repeat) for (key, repeat), item in agent.open.items()}
        lanes = [
            [told[item.cell.key, item.repeat] for _, piece in group for item in piece]
            for _, group in itertools.groupby(agent.pieces, key=lambda pair: pair[0].order)
        ]
        items = list(itertools.chain(*lanes))
        curves = dict.fromkeys(item.cell.curve for item in items) if self._stoppers else {}
        known = [subject for subject in self._ceilings if subject[0] == agent.environment]
        if agent.place.is_timed:
            agent.ceilings = {(agent.environment, *subject) for subject in subjects_of(items)} - self._ceilings
            self._ceilings |= agent.ceilings
        checkpoints: dict[str, dict[str, bytes]] = {}
        if self._settings.checkpoints and not agent.place.is_timed:
            for item in items:
                folder = self._settings.checkpoints / item.cell.key
                files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
                if files:
                    checkpoints[item.cell.key] = files
        return {
            "lanes": [[item.to_dict() for item in lane] for lane in lanes],
            "prior": [self._stoppers[curve].to_dict() for curve in curves if curve in self._stoppers],
            "ceilings": known,
            "checkpoints": checkpoints,
        }

    def _note_stopper(self, record: Record) -> None:
        if record.status not in STOPPERS or record.cell.seq_len is None:
            return
        before = self._stoppers.get(record.cell.curve)
        if before is None or (before.cell.seq_len or 0) > record.cell.seq_len:
            self._stoppers[record.cell.curve] = record

    # Answers

    def _take(self, handle: Any, event: Event) -> None:
        agent = self._agents.get(handle)
        if agent is None:  # ended by us
            return
        name = event["event"]
        if name == "record":
            try:
                record = Record.from_dict(event["record"])
            except StoreError as error:
                self._lose(handle, agent, f"it gave an answer that is no record ({error})")
                return
            if record.status == "cancelled":
                self._lose(handle, agent, record.reason)
            else:
                self._take_record(agent, record, event)
        elif name == "started":
            place = event["key"], event["repeat"]
            agent.begun.add(place)
            if place in agent.open:
                self._control.started(agent.open[place])
        elif name == "checkpoint":
            self._take_checkpoint(event)
        elif name == "ceilings":
            agent.ceilings = set()
            self._control.measured([Ceilings.from_dict(data, "ceilings") for data in event["ceilings"]])
        elif name == "ready":
            self._take_ready(handle, agent, event)
        elif name == "done":
            if not agent.is_stopping:
                self._note_lost(agent.open.values())  # it has no reason to leave any
            self._return(agent)
        else:
            self._lose(handle, agent, event["reason"], was_memory=event.get("was_memory", False))

    def _take_ready(self, handle: Any, agent: _Agent, event: Event) -> None:
        self._failures[agent.machine.id] = 0
        problem = event["problem"]
        if not problem:
            environment = Environment.from_dict(event["environment"])
            problem = self._control.moved_to(environment)
        if problem:
            del self._agents[handle]
            self._cluster.end(handle)
            self._leave_out(agent.machine, problem)
            return
        agent.environment = self._environments[agent.machine.id] = environment.digest

    def _take_record(self, agent: _Agent, record: Record, event: Event) -> None:
        item = agent.open.pop((record.cell.key, event["repeat"]), None)
        if item is None:
            return  # it was not asked
        if item.repeats > 1:
            self._checked.add(record.cell.key)
        if (num_lost := self._num_lost.pop((item.cell.key, item.repeat), 0)) > 0:
            record = replace(record, attempt=record.attempt + num_lost)
        self._note_stopper(record)
        if event["log"] is not None:
            with suppress(OSError):
                (self._settings.logs / f"{record.cell.key}.log").write_bytes(event["log"])
        if self._settings.weights:
            for name, content in event["weights"].items():
                write_whole(self._settings.weights / Path(name).name, content)
        self._control.finished(beside(record, agent.place.jobs))

    def _take_checkpoint(self, event: Event) -> None:
        if self._settings.checkpoints is None:
            return
        path = self._settings.checkpoints / Path(event["key"]).name / Path(event["name"]).name
        if event["content"] is None:
            path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()
        else:
            write_whole(path, event["content"])

    def _lose(self, handle: Any, agent: _Agent, reason: str, *, was_memory: bool = False) -> None:
        del self._agents[handle]
        self._cluster.end(handle)
        if not agent.environment:
            self._failures[agent.machine.id] += 1
            if self._failures[agent.machine.id] >= MAX_FAILURES:
                self._leave_out(agent.machine, reason)
            return
        self._lost_at[agent.machine.id] = self._clock()
        self._ceilings -= agent.ceilings  # another will
        lost = [agent.open[place] for place in agent.begun & agent.open.keys()]
        self._control.say(f"lost {agent.machine.name} with {counted(len(lost), 'cell')} under way: {reason}")
        self._note_lost(lost)
        if was_memory and len(lost) == 1:
            self._take_memory_loss(agent, lost[0])
        self._return(agent)

    def _take_memory_loss(self, agent: _Agent, item: PlannedCell) -> None:
        """Blame a cell whose machine ran out of memory whenever it ran; once may have been the doing of another."""
        place = item.cell.key, item.repeat
        self._num_memory[place] += 1
        if self._num_memory[place] < MAX_LOST:
            return
        agent.open = {told: other for told, other in agent.open.items() if other is not item}
        reason = f"the cluster ended its machine's agents for memory, {MAX_LOST} times of {MAX_LOST}"
        record = Record(
            cell=item.cell,
            status="oom_host",
            reason=reason,
            environment=agent.environment,
            isolation=item.isolation,
            attempt=MAX_LOST,
        )
        self._note_stopper(record)
        self._control.finished(beside(record, agent.place.jobs))

    def _note_lost(self, items: Iterable[PlannedCell]) -> None:
        self._num_lost.update((item.cell.key, item.repeat) for item in items)

    def _leave_out(self, machine: Machine, reason: str) -> None:
        self._left_out[machine.id] = f"{machine.name}: {reason}"
        self._control.say(f"{machine.name} is left out: {reason}")

    def _return(self, agent: _Agent) -> None:
        """End an agent's turn: what it did not finish is to be done by somebody, but for what was lost too often."""
        pieces, agent.pieces = agent.pieces, []
        is_open = {(item.cell.key, item.repeat) for item in agent.open.values()}
        for chain in {chain.order: chain for chain, _ in pieces}.values():
            chain.num_turns -= 1
        for chain, piece in reversed(pieces):
            left = []
            for item in piece:
                place = item.cell.key, item.repeat
                if place not in is_open:
                    continue
                if self._num_lost[place] < MAX_LOST:
                    left.append(item)
                else:
                    self._num_given_up += 1
            if left:
                chain.pieces.appendleft(left)
                self._count(chain, left, 1)
        for chain in {chain.order: chain for chain, _ in pieces}.values():
            if chain.pieces and not chain.num_turns:
                self._push(chain)
        agent.open, agent.begun = {}, set()
