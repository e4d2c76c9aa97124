"""Energy, clocks and neighbours of an NVIDIA GPU through NVML. Everything is None where NVML cannot be read.

The energy counter moves every 20 to 100 ms and the power sensor of recent GPUs looks only part of the time
(arXiv 2312.02741), so a window must last seconds and be repeated at shifted phases. Settings are never changed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

BATCH_S = 0.02
"""Calls queued between two looks at the clock take about this long."""

NUM_WINDOWS = 3
PHASE_S = 0.033
"""Each window is longer than the one before by a third of the counter's slowest period."""

_THROTTLES = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}
"""Bits of NVML's clock event reasons that mean the GPU runs slower than it could. Idling is none of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clocks:
    """State of the GPU at one moment; None where NVML does not tell."""

    sm_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    throttles: tuple[str, ...]


def _nvml() -> ModuleType | None:
    """Return NVML's module, initialised (which may be done again and again), or None."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except Exception:  # the module has one error class per version; none of them may stop a measurement
        return None
    return pynvml  # type: ignore[no-any-return]


def _read(query: Callable[[], Any]) -> Any | None:
    """Return what NVML says, or None where this GPU or this user may not ask."""
    try:
        return query()
    except Exception:
        return None


def _connect(device: torch.device | str) -> tuple[Any, Any] | None:
    """Return NVML and its handle for torch's device. By its UUID: the two number the devices differently."""
    nvml = _nvml()
    if nvml is None or torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    handle = _read(lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
    return None if handle is None else (nvml, handle)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None."""
    nvml = _nvml()
    version = None if nvml is None else _read(nvml.nvmlSystemGetDriverVersion)
    return version.decode() if isinstance(version, bytes) else version


def _power_w(nvml: Any, handle: Any) -> float | None:
    milliwatts = _read(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    return None if milliwatts is None else 1e-3 * milliwatts


def _throttle_bits(nvml: Any, handle: Any) -> int:
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        query = getattr(nvml, name, None)  # renamed in NVML 12
        bits = None if query is None else _read(partial(query, handle))
        if bits is not None:
            return int(bits)
    return 0


def clocks(device: torch.device | str) -> Clocks | None:
    """Return clocks, temperature, power and throttling of `device` now, or None where NVML cannot be read."""
    connection = _connect(device)
    if connection is None:
        return None
    nvml, handle = connection
    bits = _throttle_bits(nvml, handle)
    return Clocks(
        sm_mhz=_read(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        temperature_c=_read(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        power_w=_power_w(nvml, handle),
        throttles=tuple(name for bit, name in _THROTTLES.items() if bits & bit),
    )


def num_other_processes(device: torch.device | str) -> int | None:
    """Return how many processes compute on `device` beside this one and the one that started it; None without NVML.

    In a container NVML may know processes by other numbers; then two of those listed are taken to be these.
    """
    connection = _connect(device)
    if connection is None:
        return None
    nvml, handle = connection
    running = _read(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if running is None:
        return None
    numbers = {process.pid for process in running}
    if os.getpid() in numbers:
        return len(numbers - {os.getpid(), os.getppid()})
    is_ours_hidden: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return max(0, len(numbers) - 1 - is_ours_hidden)


def _counter_mj(nvml: Any, handle: Any) -> int | None:
    return _read(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))


def can_count_energy(device: torch.device | str) -> bool:
    """Tell whether the energy counter of `device` can be read."""
    connection = _connect(device)
    return connection is not None and _counter_mj(*connection) is not None


def energy_of_call(
    call: Callable[[], object],
    *,
    device: torch.device | str,
    window_s: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> float | None:
    """Return the joules of one call, idling included, from NVML's counter, or None where it cannot be read.

    They are the median of `NUM_WINDOWS` windows of at least `window_s`, in which the call, which is warm, is repeated;
    the lengths of these differ by a third of the counter's slowest period, so that errors at the edges do not repeat.
    """
    connection = _connect(device)
    if connection is None:
        return None
    nvml, handle = connection

    def repeat(count: int) -> None:
        for _ in range(count):
            call()
        torch.cuda.synchronize(device)  # else the host would queue calls long past the window

    started = clock()
    repeat(1)
    per_batch = max(1, int(BATCH_S / max(clock() - started, 1e-6)))
    joules: list[float] = []
    for window in range(NUM_WINDOWS):
        before, started, num_calls = _counter_mj(nvml, handle), clock(), 0
        while num_calls == 0 or clock() - started < window_s + PHASE_S * window:
            repeat(per_batch)
            num_calls += per_batch
        after = _counter_mj(nvml, handle)
        if before is None or after is None or after <= before:
            return None
        joules.append(1e-3 * (after - before) / num_calls)
    return statistics.median(joules)
