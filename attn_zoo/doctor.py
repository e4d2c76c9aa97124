"""`attn-zoo doctor`: what works on this machine and, where something does not, why. Everything is really tried.

Some kernels are compiled at their first call, which takes a minute or more on a fresh machine. So the answer has a time
limit: a call is interrupted when half of what is left has passed, and its kernel is not tried for other variants.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import FrameType

import psutil
import torch
from torch.nn.attention import SDPBackend

from attn_zoo.attention import BuildContext, build_attention, build_mixer
from attn_zoo.console import out, print_failures, print_json, print_table, tell
from attn_zoo.errors import AttnZooError, counted
from attn_zoo.kernels.gpu_replays import replays_on
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.energy import clocks, why_no_energy
from attn_zoo.measure.environment import capture_environment, cudnn_version
from attn_zoo.registry import tasks, variants

_PACKAGES = {
    "torch": "everything",
    "datasets": "tasks that read external data (extra lra)",
    "xformers": "one more exact kernel, on GPUs (extra xformers)",
    "ray": "runs on a cluster (extra ray)",
    "triton": "compiled kernels on GPUs",
    "nvidia-ml-py": "energy and clocks of GPUs (extra gpu)",
}


LIMIT_S = 14.0
"""Seconds from the start of the process within which kernels are tried; the rest of the answer takes less than one."""


class _TooLong(BaseException):
    """Raised in a call that takes too long; not an `Exception`, which compilers catch and wrap."""


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise `_TooLong` in the block after so many seconds, where the system can do that."""
    is_possible = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not is_possible or math.isinf(seconds):
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def diagnose_packages() -> list[tuple[str, str, str]]:
    """Return (package, version or "absent", what it is for)."""
    rows = []
    for name, purpose in _PACKAGES.items():
        try:
            rows.append((name, version(name), purpose))
        except PackageNotFoundError:
            rows.append((name, "absent", purpose))
    return rows


def diagnose_backends(
    device: str,
    left_s: Callable[[], float] = lambda: math.inf,
    say: Callable[[str], object] = lambda _: None,
) -> list[tuple[str, str, str]]:
    """Return (variant, backend, the path that ran or why none did), each tried on a small call, forward only.

    The call is causal, or of hidden states, where a variant has no other form.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    build = BuildContext(embed_dim=128, num_heads=2, max_seq_len=128)
    heads = torch.randn(1, 2, 128, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    rows = []
    slow: dict[str, str] = {}
    if left_s() > 0:
        # What some paths load when they are called. An import that is interrupted leaves half a module behind, and
        # every later path would fail on that.
        import_module("torch._inductor.compile_fx")
    for name, backend in [(each, backend) for each in variants for backend in variants[each].backends]:
        limit_s = left_s() / 2
        if backend in slow or limit_s <= 0.0:
            why = f"{slow[backend]} took too long" if backend in slow else "no time was left"
            rows.append((name, backend, f"not tried: {why} (--wait waits)"))
            continue
        say(f"trying {name} {backend} on {device}")
        try:
            with _interrupted_after(limit_s):
                has_heads = variants[name].attention is not None
                inputs = (heads, heads, heads) if has_heads else (heads.transpose(1, 2).flatten(2),)
                context = replace(build, is_causal=not variants[name].capabilities.bidirectional)
                make = build_attention if has_heads else build_mixer
                module = make(name, context, backend=backend).to(device, dtype).eval()
                with torch.no_grad(), recording() as paths:
                    module(*inputs)
            rows.append((name, backend, "works: " + ", ".join(paths)))
        except AttnZooError as error:
            rows.append((name, backend, f"no: {error}"))
        except Exception as error:  # whatever else a kernel or a compiler raises is an answer too
            said = str(error).strip().partition("\n")[0]
            rows.append((name, backend, f"fails: {type(error).__name__}: {said}"))
        except _TooLong:
            slow[backend] = name
            rows.append((name, backend, f"not known: still at it after {limit_s:.0f} s (--wait waits)"))
    return rows


def diagnose_device(device: str) -> list[tuple[str, str]]:
    """Return (question, answer) for what a reader of timings should know of the device.

    Which kernel torch itself would take for exact attention is asked for heads stored first, `[B, H, L, D]`, and for
    tokens stored first, as projections leave them: they need not be the same.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = torch.zeros(1, 8, 1024, 64, device=device, dtype=dtype)
    tokens = torch.zeros(1, 1024, 8, 64, device=device, dtype=dtype).transpose(1, 2)
    rows = [
        (f"torch's choice, {name}", SDPBackend(torch._fused_sdp_choice(x, x, x)).name.lower())
        for name, x in (("heads first", heads), ("tokens first", tokens))
    ]
    if device != "cuda":
        return rows
    state = clocks(device)
    no_energy = why_no_energy(device)
    power = "not readable" if state is None else f"{state.power_w} W, {state.sm_mhz} MHz, {state.temperature_c} C"
    return [
        *rows,
        ("cuDNN", cudnn_version() or "none"),
        ("power, clock, temperature now", power),
        ("energy counter", f"not readable: {no_energy}" if no_energy else "readable"),
        ("calls replayed without Python", _replays()),
    ]


def _replays() -> str:
    replays = replays_on("cuda")
    reason = "triton is not installed" if replays is None else replays.prepare(compiles=False)
    return "yes" if reason is None else f"no: {reason}"


def print_diagnosis(*, as_json: bool, waits: bool) -> None:
    """Try everything and print what works, for people or as JSON; for as long as it takes, or for `LIMIT_S`."""
    deadline = math.inf if waits else psutil.Process().create_time() + LIMIT_S
    environment = capture_environment()
    packages = diagnose_packages()
    devices = [*(["cuda"] if torch.cuda.is_available() else []), "cpu"]  # the time may not last for both
    backends = {device: diagnose_backends(device, lambda: deadline - time.time(), tell) for device in devices}
    answers = {device: diagnose_device(device) for device in devices}
    failures = [*variants.failures, *tasks.failures]
    if as_json:
        answer = {
            "environment": environment.to_dict(),
            "packages": packages,
            "devices": answers,
            "backends": backends,
            "failures": failures,
        }
        print_json(answer)
        return
    gpu = environment.gpu or "no GPU that torch can use"
    cores = counted(environment.num_cores, "core")
    out.print(f"{environment.cpu}, {cores}, {environment.memory_bytes / 2**30:.0f} GiB; {gpu}")
    print_table("\nPackages", ("package", "version", "for"), packages)
    for device, rows in backends.items():
        print_table(f"\nThe device {device}", ("question", "answer"), answers[device])
        print_table(f"\nKernels on {device}", ("variant", "backend", "result"), rows)
    print_failures(failures)
