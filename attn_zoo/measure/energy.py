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


def _package() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml  # type: ignore[no-any-return]


def _nvml() -> ModuleType | None:
    """Return NVML's module, initialised (which may be done again and again), or None."""
    if (nvml := _package()) is None:
        return None
    try:
        nvml.nvmlInit()
    except Exception:  # the module has one error class per version; none of them may stop a measurement
        return None
    return nvml


def _read(query: Callable[[], Any]) -> Any | None:
    """Return what NVML says, or None where this GPU or this user may not ask."""
    try:
        return query()
    except Exception:
        return None


@dataclass(frozen=True, slots=True)
class _Gpu:
    """NVML and its handles for torch's device; a slice of a card (MIG) has the clocks of the card.

    Args:
        nvml: the module.
        card: handle of the card.
        own: of the device itself: the card, or a slice of it; None for a slice that is not known.
    """

    nvml: Any
    card: Any
    own: Any

    @property
    def is_slice(self) -> bool:
        """Whether others may compute on the same card, whose counter then counts their energy too."""
        return self.own is not self.card


def _connect(device: torch.device | str) -> _Gpu | None:
    """Return NVML and its handles, or None. By UUID: NVML and torch number the devices differently."""
    nvml = _nvml()
    if nvml is None or torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    uuid = torch.cuda.get_device_properties(device).uuid
    if (card := _read(lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))) is not None:
        is_cut = _read(lambda: nvml.nvmlDeviceGetMigMode(card)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
        return _Gpu(nvml, card, None if is_cut else card)
    if (own := _read(lambda: nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))) is None:
        return None
    return _Gpu(nvml, _read(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(own)), own)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None."""
    nvml = _nvml()
    version = None if nvml is None else _read(nvml.nvmlSystemGetDriverVersion)
    return version.decode() if isinstance(version, bytes) else version


def power_limit_w(device: torch.device | str) -> float | None:
    """Return the watts that `device` is held to, of a slice those of its card; None where NVML does not tell."""
    if (gpu := _connect(device)) is None:
        return None
    return _read(lambda: gpu.nvml.nvmlDeviceGetEnforcedPowerLimit(gpu.card) / 1e3)


def _throttle_bits(nvml: Any, handle: Any) -> int:
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        query = getattr(nvml, name, None)  # renamed in NVML 12
        bits = None if query is None else _read(partial(query, handle))
        if bits is not None:
            return int(bits)
    return 0


def clocks(device: torch.device | str) -> Clocks | None:
    """Return clocks, temperature, power and throttling of `device` now, or None where NVML cannot be read.

    Of a slice of a card they are those of the card.
    """
    gpu = _connect(device)
    if gpu is None:
        return None
    nvml, card = gpu.nvml, gpu.card
    bits = _throttle_bits(nvml, card)
    return Clocks(
        sm_mhz=_read(lambda: float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM))),
        temperature_c=_read(lambda: float(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU))),
        power_w=_read(lambda: 1e-3 * nvml.nvmlDeviceGetPowerUsage(card)),
        throttles=tuple(name for bit, name in _THROTTLES.items() if bits & bit),
    )


def num_other_processes(device: torch.device | str) -> int | None:
    """Return how many processes compute on `device` beside this one and the one that started it; None without NVML.

    In a container NVML may know processes by other numbers; then two of those listed are taken to be these.
    """
    gpu = _connect(device)
    if gpu is None or gpu.own is None:
        return None
    running = _read(lambda: gpu.nvml.nvmlDeviceGetComputeRunningProcesses(gpu.own))
    if running is None:
        return None
    numbers = {process.pid for process in running}
    if os.getpid() in numbers:
        return len(numbers - {os.getpid(), os.getppid()})
    is_ours_hidden: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return max(0, len(numbers) - 1 - is_ours_hidden)


def _counter_mj(gpu: _Gpu) -> int | None:
    return None if gpu.is_slice else _read(lambda: gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(gpu.card))


def why_no_energy(device: torch.device | str) -> str:
    """Return why the energy of what runs on `device` cannot be counted; empty where it can."""
    if torch.device(device).type != "cuda":
        return "only that of GPUs is counted"
    if _package() is None:
        return "it is read by nvidia-ml-py: pip install 'attn-zoo[gpu]'"
    if (gpu := _connect(device)) is None:
        return "NVML cannot be read"
    if gpu.is_slice:
        return "the counter is of the whole card, and this is a slice of it"
    return "" if _counter_mj(gpu) is not None else "the card has no counter that can be read"


def energy_of_call(
    call: Callable[[], object],
    *,
    device: torch.device | str,
    window_s: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> float | None:
    """Return the joules of one call, idling included, from NVML's counter, or None where it cannot be read.

    A slice of a card has none: the counter is of all of them.

    They are the median of `NUM_WINDOWS` windows of at least `window_s`, in which the call, which is warm, is repeated;
    the lengths of these differ by a third of the counter's slowest period, so that errors at the edges do not repeat.
    """
    gpu = _connect(device)
    if gpu is None:
        return None

    def repeat(count: int) -> None:
        for _ in range(count):
            call()
        torch.cuda.synchronize(device)  # else the host would queue calls long past the window

    started = clock()
    repeat(1)
    per_batch = max(1, int(BATCH_S / max(clock() - started, 1e-6)))
    joules: list[float] = []
    for window in range(NUM_WINDOWS):
        before, started, num_calls = _counter_mj(gpu), clock(), 0
        while num_calls == 0 or clock() - started < window_s + PHASE_S * window:
            repeat(per_batch)
            num_calls += per_batch
        after = _counter_mj(gpu)
        if before is None or after is None or after <= before:
            return None
        joules.append(1e-3 * (after - before) / num_calls)
    return statistics.median(joules)
