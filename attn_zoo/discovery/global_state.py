"""What a process has one of: settings of torch, and random generators. Read, compared and put back.

A variant that changes one of these changes what is measured after it, its own timing and that of its rivals.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import attention

from attn_zoo.errors import GateError

TORCH_GENERATOR = "torch's random generator"


@dataclass(frozen=True, slots=True)
class _Setting:
    """One of a process; `is_shown` where its value says anything to a reader."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    is_shown: bool = True


_BACKENDS: Any = torch.backends


def _attribute(owner: Any, name: str, words: str) -> _Setting:
    return _Setting(words, partial(getattr, owner, name), partial(setattr, owner, name))


def _read_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to name one where backends were set apart; they are settings of their own here
        return "set apart for each backend"


def _write_precision(value: str) -> None:
    if value in {"highest", "high", "medium"}:
        torch.set_float32_matmul_precision(value)


def _read_autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _write_autocast(device: str, value: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device, value[0])
    torch.set_autocast_dtype(device, value[1])


def _read_flash() -> str | None:
    """Return what stands in for torch's flash attention in its dispatcher, or None; older ones know no other."""
    found: str | None = getattr(attention, "current_flash_attention_impl", lambda: None)()
    return found


def _write_flash(value: str | None) -> None:
    if value is None:
        attention.restore_flash_attention_impl(_raise_warn=False)
    else:
        attention.activate_flash_attention_impl(value)


def _read_numpy() -> tuple[Any, ...]:
    name, keys, *others = np.random.get_state()  # noqa: NPY002 - the global generator is what is looked at
    return (name, np.asarray(keys).tobytes(), *others)


def _write_numpy(value: tuple[Any, ...]) -> None:
    name, keys, *others = value
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *others))  # noqa: NPY002


def _read_generators() -> tuple[bytes, ...]:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]  # type: ignore[no-untyped-call]
    return tuple(state.numpy().tobytes() for state in states)


def _write_generators(value: tuple[bytes, ...]) -> None:
    states = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in value]
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])


_INHERITED = ("OMP_", "GOMP_", "MKL_", "OPENBLAS_", "KMP_", "CUDA_", "PYTORCH_")
"""How names of variables begin that decide how the processes are measured which this one starts."""


def _read_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}


def _write_variables(value: dict[str, str]) -> None:
    for name in _read_variables().keys() - value.keys():
        del os.environ[name]
    os.environ.update(value)


def _read_handlers() -> dict[str, Any]:
    return {name: signal.getsignal(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP")}


def _write_handlers(value: dict[str, Any]) -> None:
    for name, handler in value.items():
        signal.signal(getattr(signal, name), handler)


_SETTINGS = (
    _Setting("the environment's variables of libraries", _read_variables, _write_variables),
    *(
        (_Setting("the processors to run on", partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)),)
        if hasattr(os, "sched_getaffinity")
        else ()
    ),
    _Setting("the working directory", os.getcwd, os.chdir),
    _Setting("handlers of signals", _read_handlers, _write_handlers),
    _Setting(
        "the default device",
        torch.get_default_device,
        lambda value: torch.set_default_device(None if value.type == "cpu" else value),
    ),
    _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("the mode of gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting(
        "anomaly detection",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    *(
        _Setting(f"autocast on {device}", partial(_read_autocast, device), partial(_write_autocast, device))
        for device in ("cpu", "cuda")
    ),
    _Setting(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory", "filling of uninitialised memory"),
    _Setting(
        "flushing of denormal numbers",
        lambda: float(torch.full((), 1e-310, dtype=torch.float64, device="cpu").mul(1.0)) == 0.0,
        torch.set_flush_denormal,
    ),
    _Setting("the precision of matrix products", _read_precision, _write_precision),
    _attribute(_BACKENDS.cuda.matmul, "fp32_precision", "the precision of matrix products on CUDA"),
    _attribute(_BACKENDS.mkldnn.matmul, "fp32_precision", "the precision of matrix products of oneDNN"),
    _attribute(_BACKENDS.cudnn.conv, "fp32_precision", "the precision of convolutions of cuDNN"),
    _attribute(_BACKENDS.cudnn.rnn, "fp32_precision", "the precision of recurrent layers of cuDNN"),
    *(_attribute(_BACKENDS.cudnn, name, f"cuDNN's {name}") for name in ("enabled", "benchmark", "deterministic")),
    _attribute(_BACKENDS.mkldnn, "enabled", "the use of oneDNN"),
    *(
        _Setting(
            f"the switch of {name} attention",
            getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ),
    _Setting("torch's flash attention", _read_flash, _write_flash),
    _Setting("garbage collection", gc.isenabled, lambda is_on: (gc.enable if is_on else gc.disable)()),
    _Setting("Python's random generator", random.getstate, random.setstate, is_shown=False),
    _Setting("NumPy's random generator", _read_numpy, _write_numpy, is_shown=False),
    _Setting(TORCH_GENERATOR, _read_generators, _write_generators, is_shown=False),
)

State = dict[str, Any]
"""Values by the name of the setting."""


def read_state(*, has_generators: bool = True) -> State:
    """Return what the process is set to now; `has_generators`, random generators too, which take longest to read."""
    return {setting.name: setting.read() for setting in _SETTINGS if has_generators or setting.is_shown}


def changes(before: State) -> dict[str, str]:
    """Return what is set differently now, by name: how, such as `"1 to 4"`; empty where a value says nothing."""
    found = {}
    for setting in _SETTINGS:
        if setting.name in before and (value := setting.read()) != before[setting.name]:
            found[setting.name] = f"{_show(before[setting.name])} to {_show(value)}" if setting.is_shown else ""
    return found


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={getattr(each, '__name__', each)}" for name, each in value.items()) or "none"
    parts = value if isinstance(value, tuple) else (value,)
    return ", ".join(str(part).removeprefix("torch.") for part in parts)


@contextmanager
def restored(*, has_generators: bool = True) -> Iterator[State]:
    """Give the state, and put back at the end of the block whatever was changed within, so that no fault spreads."""
    before = read_state(has_generators=has_generators)
    try:
        yield before
    finally:
        for setting in _SETTINGS:
            if setting.name in before and setting.read() != before[setting.name]:
                setting.write(before[setting.name])


@contextmanager
def settings_kept() -> Iterator[None]:
    """Put back what the block changes of the settings, and raise `GateError` for it; random draws are no settings.

    For calls that are timed: at their length nothing has been checked before. Takes a tenth of a millisecond.
    """
    with restored(has_generators=False) as before:
        cause = None
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # perhaps because of the change
            cause = error
        for name, how in changes(before).items():
            raise GateError("global_state", f"a call changes {name}: {how}") from cause
        if cause is not None:
            raise cause


@contextmanager
def all_digits() -> Iterator[None]:
    """Let cuDNN round nothing of float32 in the block, as torch lets products of matrices round nothing.

    Its convolutions and recurrent layers take TF32's ten bits by torch's default, so on a GPU a mechanism made of them
    would compute in another precision than all others, and be off from its own equations by more than rounding.
    """
    try:
        before = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # somebody has set convolutions and recurrent layers apart
        yield
        return
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
