"""What else went on while a cell was timed: other work on the host, GPU clocks. Doubt becomes a flag on the timing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Self

import psutil

from attn_zoo.measure.energy import Clocks, clocks, num_other_processes

BUSY_FRAC = 0.10
"""Of all processors, taken by other processes."""

SLOW_CLOCK_FRAC = 0.75
"""A GPU clock that falls below this part of what it was has changed during the timing."""

SETTLING_S = 2.0
"""How long a process that has ended may take to leave the GPU, before it counts as another one there."""

STEP_S = 0.01
"""Processor times move in such steps: on each processor, and again in the sums that programs and the kernel took."""


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


@dataclass
class Conditions:
    """Watches the block it surrounds. Costs a few reads before and after, nothing in between.

    Attributes:
        clocks_mhz: of the GPU before and after.
        flags: what was found; see `attn_zoo.report.wording.FLAG_MARKS`.
    """

    device: str
    clocks_mhz: tuple[float, ...] = ()
    flags: tuple[str, ...] = ()
    _before: Clocks | None = field(default=None, repr=False)
    _others: int = 0
    _start_s: float = 0.0
    _own_s: float = 0.0
    _all_s: float = 0.0

    @property
    def may_pass(self) -> bool:
        """Whether something disturbed the block that a later one may be spared; a throttled GPU stays hot."""
        return bool(set(self.flags) - {"throttled"})

    def __enter__(self) -> Self:
        for _ in range(20):
            self._others = num_other_processes(self.device) or 0
            if self._others == 0:
                break
            time.sleep(SETTLING_S / 20)
        self._before = clocks(self.device)
        self._start_s, self._own_s, self._all_s = time.monotonic(), time.process_time(), _busy_s()
        return self

    def __exit__(self, *exc: object) -> None:
        wall_s = time.monotonic() - self._start_s
        others_s = (_busy_s() - self._all_s) - (time.process_time() - self._own_s)
        after = clocks(self.device)
        flags = []
        num_cpus = os.cpu_count() or 1
        if others_s > max(BUSY_FRAC * wall_s * num_cpus, STEP_S * (num_cpus + 2)):  # in a short block: what can be told
            flags.append("loaded_host")
        if self._before is not None and after is not None:
            flags += self._gpu_flags(self._before, after)
        self.flags = tuple(flags)

    def _gpu_flags(self, before: Clocks, after: Clocks) -> list[str]:
        flags = ["throttled"] if before.throttles or after.throttles else []
        if before.sm_mhz is not None and after.sm_mhz is not None:
            self.clocks_mhz = (before.sm_mhz, after.sm_mhz)
            # Up is a GPU that woke from idling, which warm-up is for; down is not.
            if after.sm_mhz < SLOW_CLOCK_FRAC * before.sm_mhz:
                flags.append("clock_changed")
        if max(self._others, num_other_processes(self.device) or 0) > 0:
            flags.append("other_gpu_process")
        return flags
