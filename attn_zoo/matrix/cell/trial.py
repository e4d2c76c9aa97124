"""A timed cell in this process: build, check, time and weigh its work; step by step, so that cells can take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

import torch
from torch import Tensor

from attn_zoo.errors import AttnZooError
from attn_zoo.kernels.trace import recording
from attn_zoo.matrix.cell.conditions import Conditions
from attn_zoo.matrix.cell.workload import AbstractWorkload
from attn_zoo.matrix.claimed_costs import Claims
from attn_zoo.measure.ceilings import exceeds_physical
from attn_zoo.measure.energy import Energy, energy_of_call
from attn_zoo.measure.stopwatch import AbstractStopwatch, stopwatch_for, with_graph_time
from attn_zoo.measure.timing import Sampling
from attn_zoo.records import PASSES, Cell, Memory, Record, Timing
from attn_zoo.registry import capabilities_of

MakeWorkload = Callable[[Cell, Sequence[Tensor] | None], AbstractWorkload]
"""Builds what a cell times, from inputs to share or from new ones."""

COUNT_BELOW_MS = 2_000.0
"""FLOPs are counted by one more forward, where that is cheap; the formula needs none."""


class Trial:
    """One timed cell on its way to a record: `prepare`, then samples of `sampling`, then `finish`.

    Args:
        record: of the cell, otherwise empty.
        make_workload: builds what is timed.
        budget_s: seconds of sampling.
        has_energy: also measure energy, where the device tells.
        has_count: also count FLOPs, where that is cheap.
        is_repeat: take times only: another process of this run has put this very cell through the gate and weighed it.
            The output of the first call is checked all the same.

    Attributes:
        phases: seconds by what they were spent on.
    """

    def __init__(
        self,
        record: Record,
        make_workload: MakeWorkload,
        budget_s: float,
        *,
        has_energy: bool = False,
        has_count: bool = True,
        is_repeat: bool = False,
    ) -> None:
        self._record, self._cell, self._budget_s = record, record.cell, budget_s
        self._make_workload = make_workload
        self._has_energy, self._has_count, self._is_repeat = has_energy, has_count, is_repeat
        self.phases: dict[str, float] = {}
        self._work: AbstractWorkload | None = None
        self._sampling: Sampling | None = None
        self._timing: Timing | None = None
        self._checks: tuple[str, ...] = ()
        self._kernels: tuple[str, ...] = ()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begin

    @property
    def device(self) -> str:
        """Where it runs."""
        return self._cell.device

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

    def prepare(
        self,
        inputs: Sequence[Tensor] | None = None,
        make_stopwatch: Callable[[str], AbstractStopwatch] = stopwatch_for,
    ) -> None:
        """Build and check the variant, make the first call, check its output, and warm up.

        Args:
            inputs: to share with another cell that differs in the variant only.
            make_stopwatch: for the device.

        Raises:
            GateError: the variant is not right, so nothing was timed.
            UnsupportedError: it cannot do what the cell asks.
        """
        cell = self._cell
        if cell.threads is not None:
            torch.set_num_threads(cell.threads)
        with self.phase("build"):
            self._work = work = self._make_workload(cell, inputs)
        if not self._is_repeat:
            with self.phase("gate"):
                self._checks = work.gate()
        with recording() as kernels:
            with self.phase("timing"):
                call, setup = work.make_call()
                watch = make_stopwatch(cell.device)
                self._sampling = Sampling(call, setup=setup, budget_s=self._budget_s, stopwatch=watch)
                output = self._sampling.begin()
            with self.phase("gate"):  # nothing of this is timed yet: the first call is reported apart
                self._checks += work.check(output)
            del output
            with self.phase("timing"):
                work.settle()
                self._sampling.warm_up()
        self._kernels = tuple(kernels)

    def end_timing(self) -> None:
        """Keep what the samples say, and let go of the timed call, which may hold a graph."""
        self._timing = self.sampling.timing()
        self._release()

    def finish(self, conditions: Conditions) -> Record:
        """Return the record, after measuring memory and what else was asked for.

        Args:
            conditions: under which the samples were taken.

        Raises:
            AttnZooError: the work cannot have been done in the time it took.
        """
        cell, work, timing = self._cell, self._work, self._timing
        assert work is not None
        assert timing is not None
        claims = work.claims()
        _refuse_impossible(cell, claims, timing.median_ms)
        memory = energy = counted = None
        if not self._is_repeat:
            with self.phase("timing"):  # no graph of these leaves is alive any more, in a bundle of no member either
                timing = with_graph_time(timing, work.make_call, cell.device)
                work.release()
            memory, energy, counted = self._weigh(work, timing.median_ms)
        return replace(
            self._record,
            kernels=self._kernels,
            is_simulated=capabilities_of(cell.variant, cell.options).is_simulated,
            gate=self._checks,
            timing=replace(timing, flags=(*timing.flags, *conditions.flags)),
            clocks_mhz=conditions.clocks_mhz,
            energy_joules=energy.joules if energy else None,
            memory=memory,
            counted_flops=counted,
            num_params=work.num_params,
            **asdict(claims),
        )

    def _weigh(self, work: AbstractWorkload, median_ms: float) -> tuple[Memory, Energy | None, int | None]:
        cell, energy, counted = self._cell, None, None
        with self.phase("memory"):
            memory = work.memory()
        if self._has_energy:
            with self.phase("energy"):
                energy = _energy(work, cell.device)
        if self._has_count and median_ms < COUNT_BELOW_MS:
            with self.phase("count"):
                counted = work.counted_flops()
        return memory, energy, counted

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
    ratio = 2.0 if claims.backward_ratio is None else claims.backward_ratio  # two products for each of the forward
    flops = claims.flops * PASSES[cell.pass_ or "fwd"].num_forwards(ratio)
    name = torch.cuda.get_device_name()
    if problem := exceeds_physical(name, cell.dtype, median_ms / 1e3, flops=flops):
        raise AttnZooError(f"rejected: {problem}")


def _energy(work: AbstractWorkload, device: str) -> Energy | None:
    call, setup = work.make_call()

    def whole() -> None:
        if setup is not None:
            setup()
        call()

    try:
        return energy_of_call(whole, device=device)
    finally:
        work.release()
