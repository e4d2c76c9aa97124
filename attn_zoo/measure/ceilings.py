"""Limits of the machine: measured ceilings for the roofline, and data-sheet peaks that no true result exceeds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from attn_zoo.measure.stopwatch import stopwatch_for
from attn_zoo.measure.timing import Sampling
from attn_zoo.records import Ceilings

_MATMUL_DIM = {"cpu": 2048, "cuda": 8192}
_SMALLEST_DIM = 256
_COPY_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}

GUARDED_BYTES = 2**30
"""Of smaller transfers a cache may hold a part that matters: they are not held against the bandwidth of the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """From the maker's data sheet, dense.

    Args:
        flops_per_s: by dtype name; `"tf32"` is what float32 products reach that may round their inputs.
        bytes_per_s: of the memory.
    """

    flops_per_s: Mapping[str, float]
    bytes_per_s: float


def _peak(half: float, tf32: float, single: float, bytes_per_s: float) -> Peak:
    # On all of these the tensor cores do float64 at the rate at which the others do float32.
    rates = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": single, "float64": single}
    return Peak(flops_per_s=MappingProxyType(rates), bytes_per_s=bytes_per_s)


# The first name that occurs in the device's name, in whole words, counts, so the narrower ones come first.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    ("H200 NVL", _peak(835e12, 417e12, 60e12, 4.8e12)),
    ("H200", _peak(989.5e12, 494.7e12, 67e12, 4.8e12)),
    ("H100 PCIe", _peak(756e12, 378e12, 51e12, 2.0e12)),
    ("H100 NVL", _peak(835e12, 417e12, 60e12, 3.9e12)),
    ("H100", _peak(989.5e12, 494.7e12, 67e12, 3.35e12)),
    ("A100-PCIE-40GB", _peak(312e12, 156e12, 19.5e12, 1.555e12)),
    ("A100-SXM4-40GB", _peak(312e12, 156e12, 19.5e12, 1.555e12)),
    ("A100 80GB PCIe", _peak(312e12, 156e12, 19.5e12, 1.935e12)),
    ("A100", _peak(312e12, 156e12, 19.5e12, 2.039e12)),
)


_SLICE = re.compile(r"\bMIG\b|-\d+(C|Q|A|B|CME)\b")
"""In the names of parts of a card: "... MIG 1g.10gb", and profiles of virtual GPUs such as "H100-20C"."""


def peak_of(device_name: str | None) -> Peak | None:
    """Return the data-sheet peak of a GPU by the name its driver gives, or None for one we have no sheet of.

    A part of a card has none: the sheet is of the whole.
    """
    given = device_name or ""
    if _SLICE.search(given):
        return None
    return next((peak for name, peak in _PEAKS if re.search(rf"\b{name}\b", given)), None)


def _best_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the fastest sample: a ceiling is what the machine can do, not what it usually does."""
    watch = stopwatch_for(device, flush_cache=False)
    sampling = Sampling(call, stopwatch=watch, budget_s=budget_s, min_samples=3, min_sample_ms=0.0)
    return min(sampling.run().samples_ms) * 1e-3


def _matmul_rate(device: torch.device, dtype: torch.dtype, budget_s: float) -> float:
    """Return the rate of the largest product of which a few fit into the budget.

    Some dtypes have no fast product on some machines: float16 at 2048 takes a CPU a minute.
    """
    largest = _MATMUL_DIM[device.type]
    dim = min(_SMALLEST_DIM, largest)
    while True:
        left, right = (
            torch.randn(dim, dim, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)
            for seed in (0, 1)
        )
        product = torch.empty_like(left)
        multiply = partial(torch.mm, left, right, out=product)
        if dim == largest:
            break
        tried_s = _best_s(multiply, device, budget_s / 20)
        if 8 * tried_s > budget_s / 3:
            break
        dim = min(2 * dim, largest)
    return 2.0 * dim**3 / _best_s(multiply, device, budget_s)


def _copy_rate(device: torch.device, budget_s: float) -> float:
    num_bytes, block_bytes = _COPY_BYTES[device.type], 2**22
    block = torch.randn(block_bytes // 4, generator=torch.Generator(device).manual_seed(0), device=device)
    source = block.repeat(num_bytes // block_bytes)  # drawing all of it takes a CPU longer than copying it
    target = torch.empty_like(source)
    return 2.0 * num_bytes / _best_s(lambda: target.copy_(source), device, budget_s)


def measure_ceilings(
    device: torch.device | str = "cpu", dtypes: Sequence[str] = ("float32",), budget_s: float = 0.3
) -> tuple[Ceilings, ...]:
    """Measure a large matrix product in each dtype and one large copy, on random data, with the threads torch uses now.

    Zeros would flatter a GPU: fewer bits switch, so that it clocks higher.
    """
    device = torch.device(device)
    copied = _copy_rate(device, budget_s)
    peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    is_tf32 = {dtype: _rounds_to_tf32() if device.type == "cuda" and dtype == "float32" else None for dtype in dtypes}
    return tuple(
        Ceilings(
            device=device.type,
            dtype=dtype,
            matmul_flops_per_s=_matmul_rate(device, getattr(torch, dtype), budget_s),
            copy_bytes_per_s=copied,
            peak_flops_per_s=peak.flops_per_s.get("tf32" if is_tf32[dtype] else dtype) if peak else None,
            peak_bytes_per_s=peak.bytes_per_s if peak else None,
            is_tf32=is_tf32[dtype],
        )
        for dtype in dtypes
    )


def _rounds_to_tf32() -> bool:
    """Return whether float32 products on a GPU may round their inputs; the variable forbids whatever torch allows."""
    return os.environ.get("NVIDIA_TF32_OVERRIDE") != "0" and torch.get_float32_matmul_precision() != "highest"


def exceeds_physical(
    device_name: str | None, dtype: str, seconds: float, *, flops: float | None = None, num_bytes: float | None = None
) -> str | None:
    """Return one sentence if a measurement is faster than the hardware can be, and hence wrong; else None.

    Operations are those really done: for a sparse mechanism not those of the dense one. Float32 may be TF32 underneath.
    """
    peak = peak_of(device_name)
    if peak is None:
        return None
    limit = peak.flops_per_s.get("tf32" if dtype == "float32" else dtype)
    if flops is not None and limit is not None and flops > limit * seconds:
        return (
            f"{flops / seconds / 1e12:.0f} TFLOP/s is above the peak of {device_name} ({limit / 1e12:.0f} in {dtype})"
        )
    if num_bytes is not None and num_bytes >= GUARDED_BYTES and num_bytes > peak.bytes_per_s * seconds:
        rate = num_bytes / seconds / 1e12
        return f"{rate:.1f} TB/s is above the memory bandwidth of {device_name} ({peak.bytes_per_s / 1e12:.2f})"
    return None
