"""Timed cells in this process: one, or several of one length that are timed in turns, as peers are compared.

Each is built, passes its gate and is warmed up; then samples are taken in rounds; then each is weighed by itself. They
share their inputs, so that memory does not grow with their number: each adds its parameters and, in the backward alone,
its graph.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from attn_zoo.discovery.global_state import settings_kept
from attn_zoo.errors import AttnZooError
from attn_zoo.kernels.compiled_code import allow_compilations
from attn_zoo.kernels.trace import recording
from attn_zoo.matrix.cell.conditions import Conditions
from attn_zoo.matrix.cell.outcomes import failure_record
from attn_zoo.matrix.cell.workload import AbstractWorkload
from attn_zoo.matrix.claimed_costs import Claims
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.measure.capture import num_failed
from attn_zoo.measure.ceilings import exceeds_physical
from attn_zoo.measure.energy import energy_of_call, why_no_energy
from attn_zoo.measure.stopwatch import AbstractStopwatch, stopwatch_for, with_device_time, with_host_time
from attn_zoo.measure.timing import Sampling, sample_in_turns
from attn_zoo.metadata import LINEAR_BACKWARD_RATIO
from attn_zoo.records import PASSES, Cell, Memory, Record, Timing
from attn_zoo.registry import capabilities_of

Energy = tuple[float | None, str]
"""Joules of a call, or why there are none."""

MakeWorkload = Callable[[Cell, Sequence[Tensor] | None], AbstractWorkload]
"""Builds what a cell times, from inputs to share or from new ones."""

ONCE_MORE_BELOW_MS = 2_000.0
"""The output is checked again and FLOPs are counted, by one more forward each, where that is cheap."""

ONCE_PHASES = ("gate", "probe", "energy", "memory", "count")
"""What a repeat of a cell goes without, but for a look at its first and last output, which is part of the probe."""

RETAKES = 2
"""How often disturbed samples are thrown away and taken again; the last ones stay, flagged."""

RETAKEN_S = (0.05, 5.0)
"""Seconds of samples that are taken again: fewer are over before a neighbour is gone, more are too dear."""


def _refuse_uncompiled() -> None:
    """Let what torch would run as it is written, because it has compiled too many forms of it, be an error.

    An error is better than the time of something else. Where nothing has loaded the compiler, nothing is compiled yet.
    """
    if "torch._dynamo" in sys.modules:
        allow_compilations()


@contextmanager
def in_phase(phases: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of the block to a phase, in seconds."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        phases[name] = phases.get(name, 0.0) + time.perf_counter() - begin


@dataclass
class Trial:
    """One timed cell on its way to a record: `prepare`, samples of `sampling`, `end_timing`, `weigh`, `finish`.

    One of an order that `is_repeat` takes times only: another process of this run has put this very cell through the
    gate and weighed it. The output of the first call is checked all the same.

    Attributes:
        phases: seconds by what they were spent on.
    """

    record: Record
    make_workload: MakeWorkload
    order: WorkOrder
    has_count: bool
    phases: dict[str, float] = field(default_factory=dict)
    _work: AbstractWorkload | None = None
    _sampling: Sampling | None = None
    _timing: Timing | None = None
    _claims: Claims | None = None
    _memory: Memory | None = None
    _energy: Energy = (None, "")
    _counted: int | None = None
    _checks: tuple[str, ...] = ()
    _kernels: tuple[str, ...] = ()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time of the block to a phase."""
        return in_phase(self.phases, name)

    @property
    def sampling(self) -> Sampling:
        """The samples, after `prepare`."""
        assert self._sampling is not None
        return self._sampling

    @property
    def inputs(self) -> Sequence[Tensor]:
        """What the call is given, after `prepare`."""
        assert self._work is not None
        return self._work.inputs

    def prepare(self, inputs: Sequence[Tensor] | None, make_stopwatch: Callable[[str], AbstractStopwatch]) -> None:
        """Build and check the variant, make the first call, check its output, and warm up.

        Raises:
            GateError: the variant is not right, so nothing was timed.
            UnsupportedError: it cannot do what the cell asks.
        """
        cell = self.record.cell
        with self.phase("build"):
            self._work = work = self.make_workload(cell, inputs)
        _refuse_uncompiled()
        if not self.order.is_repeat:
            with self.phase("gate"):
                self._checks = work.gate()
            _refuse_uncompiled()
        with self.phase("timing"), recording() as kernels:
            call, setup = work.make_call()
            watch = make_stopwatch(cell.device)
            self._sampling = Sampling(call, setup=setup, budget_s=self.order.budget_s, stopwatch=watch)
            output = self._sampling.begin()
        # Nothing of this is timed: the first call is reported apart. What it is compared with may run other kernels.
        with self.phase("probe"):
            self._checks += work.check(output, is_repeat=self.order.is_repeat)
        del output
        with self.phase("timing"), recording() as more_kernels:
            work.settle()
            self._sampling.warm_up()
        self._kernels = tuple(dict.fromkeys([*kernels, *more_kernels]))

    def end_timing(self) -> None:
        """Keep what the samples say, and let go of the timed call, which may hold a graph."""
        self._timing = self.sampling.timing()
        self._release()

    def weigh(self) -> None:
        """Check the output once more, and measure the host's time, memory and what else was asked for.

        Raises:
            AttnZooError: the work cannot have been done in the time it took.
            GateError: calls came to do something else than the first one, which was checked.
        """
        cell, work, timing = self.record.cell, self._work, self._timing
        assert work is not None
        assert timing is not None
        self._claims = work.claims()
        _refuse_impossible(cell, self._claims, timing.median_ms)
        is_quick = timing.median_ms < ONCE_MORE_BELOW_MS
        if is_quick:
            with self.phase("probe"):
                self._checks += work.check_again()
        if self.order.is_repeat:
            return
        with self.phase("timing"):  # no graph of these leaves is alive any more, in a bundle of no member either
            self._timing = with_host_time(timing, work.make_call, cell.device)
            work.release()
        if self.order.has_energy:  # before memory, for which a training step gives up the CUDA graphs that were timed
            with self.phase("energy"):
                self._energy = _energy_of(work, cell.device)
        with self.phase("memory"):
            self._memory = work.memory()
        if self.has_count and is_quick:
            with self.phase("count"):
                self._counted = work.counted_flops()

    def finish(self, conditions: Conditions) -> Record:
        """Return the record, after the device's time: a capture that fails may leave memory in disorder.

        Raises:
            AttnZooError: the device cannot have done the work in the time it took.
        """
        cell, work, timing, claims = self.record.cell, self._work, self._timing, self._claims
        assert work is not None
        assert timing is not None
        assert claims is not None
        if timing.timer == "cuda_event":
            timing = self._replayed(work, timing)
        if timing.graph_ms is not None:
            _refuse_impossible(cell, claims, timing.graph_ms)
        return replace(
            self.record,
            kernels=self._kernels,
            is_simulated=capabilities_of(cell.variant, cell.options).is_simulated,
            gate=self._checks,
            timing=replace(timing, flags=(*timing.flags, *conditions.flags)),
            clocks_mhz=conditions.clocks_mhz,
            energy_joules=self._energy[0],
            energy_reason=self._energy[1],
            memory=self._memory,
            counted_flops=self._counted,
            num_params=sum(item.numel() for item in work.module.parameters()),
            **asdict(claims),
        )

    def _replayed(self, work: AbstractWorkload, timing: Timing) -> Timing:
        """Return the timing with the device's time, and with what disturbed that."""
        device = self.record.cell.device
        why_not = work.why_not_captured or ("a capture before failed in this process" if num_failed() else "")
        with Conditions(device) as conditions, self.phase("timing"):
            timing = with_device_time(timing, work.make_call, device, why_not)
            work.release()
        return timing if timing.graph_ms is None else replace(timing, graph_flags=conditions.flags)

    def drop(self) -> None:
        """Let go of everything."""
        self._release()
        self._work = None

    def _release(self) -> None:
        self._sampling = None
        if self._work is not None:
            self._work.release()


def _refuse_impossible(cell: Cell, claims: Claims, median_ms: float) -> None:
    """Raise `AttnZooError` if the work cannot have been done in that time: then the timing or the formula is wrong."""
    if claims.flops is None or cell.device != "cuda" or median_ms <= 0:
        return
    ratio = LINEAR_BACKWARD_RATIO if claims.backward_ratio is None else claims.backward_ratio
    pass_, share, name = PASSES[cell.pass_ or "fwd"], cell.least_pairs_frac, torch.cuda.get_device_name()
    flops = claims.flops * share * pass_.num_forwards(ratio)
    num_bytes = (claims.min_bytes or 0) * share * pass_.num_forwards(1.0)  # a backward moves more than a forward
    if problem := exceeds_physical(name, cell.dtype, median_ms / 1e3, flops=flops, num_bytes=num_bytes):
        raise AttnZooError(f"rejected: {problem}")


def _energy_of(work: AbstractWorkload, device: str) -> Energy:
    """Return the joules of one call.

    Setup runs between the calls that are counted. What it does now and then is counted by itself, as often as it
    comes: E(call) = E(setup and call) - E(begin again) / calls between.
    """
    if reason := why_no_energy(device):
        return None, reason
    again = work.begin_again()
    begun = 0.0 if again is None else energy_of_call(again[0], device=device)  # before a call holds a state too
    call, setup = work.make_call()

    def whole() -> None:
        if setup is not None:
            setup()
        call()

    try:
        joules = energy_of_call(whole, device=device)
    finally:
        work.release()
    if joules is None or begun is None:
        return None, "the counter stood still"
    joules -= 0.0 if again is None else begun / again[1]
    return (joules, "") if joules > 0 else (None, "what comes between two calls took all that was counted")


class _Ledger:
    """Tells which member is at work, and charges the time between two rounds to the one that had it."""

    def __init__(self, trials: Sequence[Trial], tell: Callable[[int], object]) -> None:
        self._trials, self._tell = trials, tell
        self._index: int | None = None
        self._since = 0.0

    def at(self, index: int | None, *, has_phases: bool = False) -> None:
        """Go on with another member, or with none; one with phases keeps its own accounts."""
        now = time.perf_counter()
        if self._index is not None:
            phases = self._trials[self._index].phases
            phases["timing"] = phases.get("timing", 0.0) + now - self._since
        self._index, self._since = None if has_phases else index, now
        if index is not None:
            self._tell(index)


def measure_bundle(
    order: WorkOrder,
    trials: Sequence[Trial],
    *,
    tell: Callable[[int], object],
    room_bytes: int | None,
) -> list[Record]:
    """Measure cells and return their records. Every exception but Ctrl-C becomes a status of its own cell.

    Where an error has left the device unusable, only the records of failures are returned: for the others another
    process must begin anew.
    """
    device = order.cells[0].device  # the same for all
    ledger = _Ledger(trials, tell)
    failures: dict[int, Record] = {}
    done: dict[int, Record] = {}
    is_usable = True

    def living() -> list[int]:
        return [index for index in range(len(trials)) if index not in failures]

    def failed(index: int, error: BaseException) -> None:
        failures[index] = failure_record(trials[index].record, error, room_bytes)
        trials[index].drop()

    def guarded(step: Callable[[int], object], index: int) -> None:
        nonlocal is_usable
        ledger.at(index, has_phases=True)
        try:
            with settings_kept():
                step(index)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a variant may even call sys.exit
            failed(index, error)
        if index in failures:  # outside the block above, whose traceback keeps tensors alive
            is_usable = is_usable and _tidy(device)

    make_stopwatch = cache(stopwatch_for)  # one for all: it may hold a buffer that empties the cache
    inputs: Sequence[Tensor] | None = None

    def prepare(index: int) -> None:
        nonlocal inputs
        trials[index].prepare(inputs, make_stopwatch)
        inputs = trials[index].inputs

    for index in range(len(trials)):
        if is_usable:
            guarded(prepare, index)
    prepared = living() if is_usable else []
    for retakes_left in range(RETAKES, -1, -1):
        with Conditions(device) as conditions:
            sample_in_turns(
                [trials[index].sampling for index in prepared],
                seed=order.seed,
                at=lambda position: ledger.at(prepared[position]),
                failed=lambda position, error: failed(prepared[position], error),
                around=settings_kept,
            )
            ledger.at(None)
        if len(living()) != len(prepared):  # one that failed has let go of its samples
            break
        is_worth_it = RETAKEN_S[0] <= sum(trials[index].sampling.spent_s for index in prepared) <= RETAKEN_S[1]
        if not (retakes_left and is_worth_it):
            break
        if not (conditions.may_pass or any(trials[index].sampling.is_waiting for index in prepared)):
            break
        for index in prepared:
            trials[index].sampling.discard()
    is_usable = is_usable and (len(living()) == len(prepared) or _tidy(device))

    def finish(index: int) -> None:
        done[index] = trials[index].finish(conditions)
        trials[index].drop()

    # All graphs of autograd go before anything is weighed, and all is weighed before a call is captured.
    for step in (lambda index: trials[index].end_timing(), lambda index: trials[index].weigh(), finish):
        for index in living():
            if is_usable:
                guarded(step, index)
    ended = {**done, **failures} if is_usable else failures
    phases = {index: trials[index].phases for index in sorted(ended)}
    return [replace(ended[index], duration_s=round(sum(own.values()), 4), phases=own) for index, own in phases.items()]


def _tidy(device: str) -> bool:
    """Free what a failure left behind; return whether the device still works."""
    gc.collect()
    if device == "cpu" or not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
