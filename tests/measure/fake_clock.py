"""A clock that moves only when told to, so that tests of timing are exact and the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat

from attn_zoo.measure.stopwatch import HostStopwatch


class FakeClock:
    """Wall and processor time in nanoseconds."""

    def __init__(self) -> None:
        self.wall_ns = 0
        self.cpu_ns = 0

    def spend(self, milliseconds: float, cpu_frac: float = 1.0) -> None:
        self.wall_ns += round(1e6 * milliseconds)
        self.cpu_ns += round(1e6 * milliseconds * cpu_frac)

    def stopwatch(self) -> HostStopwatch:
        return HostStopwatch(clock=lambda: self.wall_ns, cpu_clock=lambda: self.cpu_ns)


class FakeCall:
    """Takes the given times, in milliseconds, one per call; the last one forever. Counts its calls."""

    def __init__(self, clock: FakeClock, times_ms: Iterable[float], cpu_frac: float = 1.0) -> None:
        times = list(times_ms)
        self._times = chain(times, repeat(times[-1]))
        self._clock = clock
        self._cpu_frac = cpu_frac
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        self._clock.spend(next(self._times), self._cpu_frac)
