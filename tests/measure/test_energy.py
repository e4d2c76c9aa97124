"""NVML through a stand-in: known energy, and every way in which it can refuse."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_zoo.measure.energy import (
    clocks,
    driver_version,
    energy_of_call,
    num_other_processes,
    power_limit_w,
    why_no_energy,
)

UUID = "0000-1111"


class NVMLError(Exception):
    pass


class FakeNvml:
    """A GPU that idles at 70 W and draws 300 W while `now_s` advances."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_DEVICE_MIG_ENABLE = 1, 0, 1

    def __init__(self) -> None:
        self.now_s = 0.0
        self.kind = "GPU"  # of what the UUID is
        self.has_slices = False
        self.pids = [os.getpid()]
        self.refused: set[str] = set()

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.refused:
            raise NVMLError(name)
        return value

    def nvmlInit(self) -> None:
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"{self.kind}-{UUID}":
            raise NVMLError(uuid)
        return str(self._answer("handle", "card" if self.kind == "GPU" else "slice"))

    def nvmlDeviceGetMigMode(self, handle: str) -> Any:
        assert handle == "card"
        return self._answer("mode", [int(self.has_slices), 0])

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        assert handle == "slice"
        return str(self._answer("card", "card"))

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._answer("driver", b"580.1")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> Any:
        assert handle == "card"
        return self._answer("energy", round(1000 * 300 * self.now_s))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> Any:
        assert handle == "card"
        return self._answer("power", 70_000)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> Any:
        assert handle == "card"
        return self._answer("limit", 700_000)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> Any:
        assert handle == "card"
        return self._answer("clock", {self.NVML_CLOCK_SM: 1980}[kind])

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> Any:
        assert handle == "card"
        return self._answer("temperature", 45)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> Any:
        assert handle == "card"
        return self._answer("throttle", 0x1 | 0x4 | 0x40)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        assert handle == ("card" if self.kind == "GPU" else "slice")
        return self._answer("processes", [SimpleNamespace(pid=pid) for pid in self.pids])


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    return fake


def energy(nvml: FakeNvml, seconds: float = 0.01) -> float | None:
    def call() -> None:
        nvml.now_s += seconds

    return energy_of_call(call, device="cuda", window_s=0.5, clock=lambda: nvml.now_s)


def test_energy_of_a_call_is_power_times_time(nvml):
    assert energy(nvml, 0.01) == pytest.approx(3.0, rel=1e-3)
    assert nvml.now_s >= 3 * 0.5


def test_a_call_longer_than_the_window_is_made_once_per_window(nvml):
    assert energy(nvml, 4.0) == pytest.approx(1200.0)
    assert nvml.now_s == 4 * 4.0, "and once before, to see how long it takes"


def test_clocks_and_throttling(nvml):
    state = clocks("cuda")
    assert state is not None
    assert (state.sm_mhz, state.temperature_c, state.power_w) == (1980.0, 45.0, 70.0)
    assert state.throttles == ("power_cap", "hw_thermal")


def test_a_slice_has_the_clocks_of_the_card_its_own_processes_and_no_energy(nvml):
    nvml.kind, nvml.pids = "MIG", [os.getpid(), 7_777_777]
    state = clocks("cuda")
    assert state is not None
    assert (state.sm_mhz, state.power_w, state.throttles) == (1980.0, 70.0, ("power_cap", "hw_thermal"))
    assert num_other_processes("cuda") == 1
    assert why_no_energy("cuda") == "the counter is of the whole card, and this is a slice of it"
    assert energy(nvml) is None


def test_the_card_of_a_slice_that_is_not_known_tells_its_clocks_only(nvml):
    nvml.has_slices = True
    state = clocks("cuda")
    assert state is not None
    assert state.sm_mhz == 1980.0
    assert num_other_processes("cuda") is None
    assert "a slice" in why_no_energy("cuda")
    assert energy(nvml) is None


def test_the_power_that_a_card_is_held_to_is_that_of_its_slices_too(nvml):
    assert power_limit_w("cuda") == 700.0
    nvml.kind = "MIG"
    assert power_limit_w("cuda") == 700.0
    assert power_limit_w("cpu") is None
    nvml.refused = {"limit"}
    assert power_limit_w("cuda") is None


def test_what_nvml_refuses_is_none_and_the_rest_stays(nvml):
    assert why_no_energy("cuda") == ""
    nvml.refused = {"energy", "clock", "throttle", "processes", "driver"}
    assert why_no_energy("cuda") == "the card has no counter that can be read"
    assert energy(nvml) is None
    state = clocks("cuda")
    assert state is not None
    assert (state.sm_mhz, state.temperature_c, state.throttles) == (None, 45.0, ())
    assert num_other_processes("cuda") is None
    assert driver_version() is None


@pytest.mark.parametrize("broken", ["init", "handle"])
def test_no_connection_no_numbers(nvml, broken):
    nvml.refused = {broken}
    assert energy(nvml) is None
    assert why_no_energy("cuda") == "NVML cannot be read"
    assert clocks("cuda") is None
    assert num_other_processes("cuda") is None


def test_a_counter_that_stands_still_gives_no_energy(nvml):
    ticks = iter(range(10_000))
    assert energy_of_call(lambda: None, device="cuda", clock=lambda: float(next(ticks))) is None


def test_without_the_package_or_on_cpu_there_is_nothing(nvml, monkeypatch):
    assert clocks("cpu") is None
    assert why_no_energy("cpu") == "only that of GPUs is counted"
    assert energy_of_call(lambda: None, device="cpu") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import raises ImportError
    assert clocks("cuda") is None
    assert why_no_energy("cuda") == "it is read by nvidia-ml-py: pip install 'attn-zoo[gpu]'"
    assert driver_version() is None


def test_other_processes_are_counted_in_and_out_of_containers(nvml):
    assert num_other_processes("cuda") == 0
    nvml.pids = [os.getpid(), os.getppid()]  # which may use the GPU or not
    assert num_other_processes("cuda") == 0
    nvml.pids = [os.getpid(), 7_777_777]
    assert num_other_processes("cuda") == 1
    nvml.pids = [7_777_777, 8_888_888]  # a container: these two go by numbers that they do not know
    assert num_other_processes("cuda") == 0
    nvml.pids = [7_777_777, 8_888_888, 9_999_999]
    assert num_other_processes("cuda") == 1
    nvml.pids = []
    assert num_other_processes("cuda") == 0


def test_driver_version_may_be_bytes_or_text(nvml):
    assert driver_version() == "580.1"
    nvml.nvmlSystemGetDriverVersion = lambda: "590.2"
    assert driver_version() == "590.2"
