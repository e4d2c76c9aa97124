"""Rough forecasts of time and memory, from claimed costs and assumed rates: enough to warn and to order by."""

from __future__ import annotations

from dataclasses import dataclass

from attn_zoo.matrix.claimed_costs import DTYPE_BYTES, call_shape, config_of, forward_flops
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.measure.environment import num_cores
from attn_zoo.records import PASSES, Cell
from attn_zoo.registry import variants

# Assumed, deliberately low: floating-point operations per second that attention reaches in float32, of one thread on a
# CPU. Two cores of a server reached 7.5e10 each where products reached 1.2e11; an older laptop has less than half.
_RATE = {"cpu": 3e10, "cuda": 2e13}
_HALF_GAIN = {"cpu": 0.5, "cuda": 8.0}  # 16-bit types are emulated on many CPUs
START_S = 2.0
"""Of a process: until it has loaded torch and begins its first cell."""

ENERGY_S = 6.5
"""Of a cell whose energy is counted, once: three windows of two seconds, with calls to their ends."""

CALLS, REPEATED_CALLS = 8, 3
"""In a cell of long calls: the first one and two samples, which each repeat takes; checks and memory, once for all."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a repeat, on average, in a process that has begun, and bytes at the peak."""

    seconds: float
    num_bytes: int


def call_estimate(item: PlannedCell) -> Estimate:
    """Return the rough cost of timing one call of a cell's variant.

    Time: formula (or B H L^p D with the claimed exponent p) over an assumed rate. Memory: inputs, output and their
    gradients, plus B H L^m of scores where the claimed exponent m is above 1, but no more than have FLOPs to use them.
    """
    cell = item.cell
    shape, pass_ = call_shape(cell), PASSES[cell.pass_ or "fwd"]
    claim = variants[cell.variant].complexity_of(config_of(cell))
    forward = forward_flops(cell, shape)
    flops = forward * pass_.num_forwards(claim.ratio(shape))
    has_grads = pass_.backwards > 0
    rows = float(shape.batch_size * shape.num_heads)
    tensors = 4 * rows * shape.query_len * shape.head_dim * (2 if has_grads else 1)
    scores = 0.0
    if claim.memory_exponent > 1:  # which says nothing of blocks: each score weighs one value at least
        scores = min(rows * shape.query_len**claim.memory_exponent, forward / (2 * shape.head_dim))
    num_bytes = (tensors + scores * (3 if has_grads else 2)) * DTYPE_BYTES[cell.dtype]
    return Estimate(rough_seconds(flops, item), int(num_bytes))


def rough_seconds(flops: float, item: PlannedCell) -> float:
    """Return the rough seconds of a repeat, on average, where one call is `flops`."""
    call_s = call_seconds(flops, item.cell)
    return max(item.budget_s, REPEATED_CALLS * call_s) + (CALLS - REPEATED_CALLS) / item.repeats * call_s


def call_seconds(flops: float, cell: Cell) -> float:
    """Return the rough seconds of one call of `flops`, in the type and on the device of a cell."""
    gain = _HALF_GAIN[cell.device] if DTYPE_BYTES[cell.dtype] == 2 else 1.0
    return flops / (assumed_rate(cell.device, cell.threads) * gain)


def assumed_rate(device: str, threads: int | None = None) -> float:
    """Return the floating-point operations per second in float32 that forecasts assume; None threads means all."""
    return _RATE[device] * ((threads or num_cores()) if device == "cpu" else 1)
