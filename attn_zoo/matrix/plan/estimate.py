"""Rough forecasts of time and memory, from claimed costs and assumed rates: enough to warn and to order by."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import mean

from attn_zoo.matrix.costs import DTYPE_BYTES, shape_of
from attn_zoo.matrix.limits import num_cores
from attn_zoo.records import PASSES, Cell, Record
from attn_zoo.registry import VariantConfig, variants

__all__ = [
    "Estimate",
    "TrainingTimes",
    "assumed_rate",
    "attention_flops",
    "estimate",
    "rough_seconds",
    "scaled_seconds",
]

# Assumed, deliberately low: floating-point operations per second that attention reaches in float32, of one thread on a
# CPU. Two cores of a server reached 7.5e10 each where products reached 1.2e11; an older laptop has less than half.
_RATE = {"cpu": 3e10, "cuda": 2e13}
_HALF_GAIN = {"cpu": 0.5, "cuda": 8.0}  # 16-bit types are emulated on many CPUs
_START_S = {"cell": 2.0, "lane": 0.5, "interleaved": 1.5}
_CALLS = 5  # warm-up, the fewest samples, memory, counted FLOPs


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of the whole cell and bytes at the peak; None where nothing is known."""

    seconds: float | None = None
    num_bytes: int | None = None


def estimate(cell: Cell, config: VariantConfig, budget_s: float, isolation: str) -> Estimate:
    """Return the rough cost of one scaling cell.

    Time: formula (or B H L^p D with the claimed exponent p) over an assumed rate. Memory: inputs, output and their
    gradients, plus B H L^m of scores where the claimed exponent m is above 1.

    Args:
        cell: a scaling cell.
        config: its variant's options.
        budget_s: seconds of sampling.
        isolation: `"cell"`, `"lane"` or `"interleaved"`.
    """
    variant = variants[cell.variant]
    assert cell.batch_size is not None and cell.num_heads is not None  # noqa: PT018  a scaling cell has all sizes
    assert cell.seq_len is not None and cell.head_dim is not None and cell.pass_ is not None  # noqa: PT018
    rows = float(cell.batch_size * cell.num_heads)
    claim = variant.complexity
    try:
        flops = attention_flops(cell, config) * PASSES[cell.pass_].num_forwards(claim.ratio(shape_of(cell, config)))
    except Exception:  # somebody else's formula must not stop a plan; the worker will report it
        return Estimate()
    has_grads = PASSES[cell.pass_].backwards > 0
    tensors = 4 * rows * cell.seq_len * cell.head_dim * (2 if has_grads else 1)
    scores = rows * cell.seq_len**claim.memory_exponent if claim.memory_exponent > 1 else 0.0
    num_bytes = (tensors + scores * (3 if has_grads else 2)) * DTYPE_BYTES[cell.dtype]
    return Estimate(rough_seconds(flops, cell, budget_s, isolation), int(num_bytes))


def attention_flops(cell: Cell, config: VariantConfig) -> float:
    """Return the FLOPs of one forward of the variant alone, by its formula or its claimed exponent.

    Args:
        cell: a scaling cell.
        config: its variant's options.
    """
    shape, claim = shape_of(cell, config), variants[cell.variant].complexity
    if (flops := variants[cell.variant].flops(shape)) is not None:
        return float(flops)
    rows = float(shape.batch_size * shape.num_heads)
    return 4 * rows * float(shape.query_len**claim.time_exponent) * shape.head_dim


def rough_seconds(flops: float, cell: Cell, budget_s: float, isolation: str) -> float:
    """Return the rough seconds of a cell, set-up included.

    Args:
        flops: of one call.
        cell: gives device and dtype.
        budget_s: seconds of sampling.
        isolation: `"cell"`, `"lane"` or `"interleaved"`.
    """
    rate = assumed_rate(cell.device, cell.threads) * (_HALF_GAIN[cell.device] if DTYPE_BYTES[cell.dtype] == 2 else 1.0)
    call_s = flops / rate
    return _START_S[isolation] + max(budget_s, 3 * call_s) + _CALLS * call_s


def assumed_rate(device: str, threads: int | None = None) -> float:
    """Return the floating-point operations per second in float32 that forecasts assume.

    Args:
        device: `"cpu"` or `"cuda"`.
        threads: of the CPU; None means all that this process may use.
    """
    return _RATE[device] * ((threads or num_cores()) if device == "cpu" else 1)


def scaled_seconds(known_s: float, known_len: int, seq_len: int, exponent: float) -> float:
    """Return what a cell will take if a shorter one of its lane took `known_s`: grown by the claimed exponent."""
    growth: float = (seq_len / known_len) ** max(exponent, 1.0)
    return known_s * growth


class TrainingTimes:
    """What trainings took, to forecast others by: the same training with another seed, or else ever less similar ones.

    Args:
        records: of this run and earlier ones; only finished trainings count.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._seconds: dict[str, list[float]] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Take note of a record."""
        if record.status == "ok" and record.score is not None:
            for likeness in self._likenesses(record.cell):
                self._seconds.setdefault(likeness, []).append(record.duration_s)

    def forecast_s(self, cell: Cell) -> float:
        """Return the mean of the most similar trainings, or 0 where nothing is known."""
        known = (self._seconds[likeness] for likeness in self._likenesses(cell) if likeness in self._seconds)
        return mean(next(known, [0.0]))

    @staticmethod
    def _likenesses(cell: Cell) -> Iterator[str]:
        """Yield what must be equal, most first: all but the seed, all but the trial too, task and protocol alone."""
        place = [cell.task, cell.level, cell.protocol, cell.device]
        fixed = {name: value for name, value in cell.overrides.items() if name not in cell.grid}
        for extra in ([cell.label, cell.dtype, cell.overrides], [cell.label, cell.dtype, fixed], []):
            yield json.dumps([*place, *extra], sort_keys=True)
