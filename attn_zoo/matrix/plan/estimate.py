"""Rough forecasts of time and memory, from claimed costs and assumed rates: enough to warn and to order by."""

from __future__ import annotations

from dataclasses import dataclass

from attn_zoo.matrix.claimed_costs import DTYPE_BYTES, call_shape, config_of, forward_flops
from attn_zoo.measure.environment import num_cores
from attn_zoo.records import PASSES, Cell
from attn_zoo.registry import variants

# Assumed, deliberately low: floating-point operations per second that attention reaches in float32, of one thread on a
# CPU. Two cores of a server reached 7.5e10 each where products reached 1.2e11; an older laptop has less than half.
_RATE = {"cpu": 3e10, "cuda": 2e13}
_HALF_GAIN = {"cpu": 0.5, "cuda": 8.0}  # 16-bit types are emulated on many CPUs
_START_S = {"cell": 2.0, "lane": 0.5, "interleaved": 1.5}
CALLS = 8  # in a cell of long calls: of the gate, warm-up, three samples, memory, counted FLOPs


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of the whole cell and bytes at the peak; None where nothing is known."""

    seconds: float | None = None
    num_bytes: int | None = None


def call_estimate(cell: Cell, budget_s: float, isolation: str) -> Estimate:
    """Return the rough cost of timing one call of a cell's variant.

    Time: formula (or B H L^p D with the claimed exponent p) over an assumed rate. Memory: inputs, output and their
    gradients, plus B H L^m of scores where the claimed exponent m is above 1.

    Args:
        cell: with all its sizes.
        budget_s: seconds of sampling.
        isolation: `"cell"`, `"lane"` or `"interleaved"`.
    """
    shape, pass_ = call_shape(cell), PASSES[cell.pass_ or "fwd"]
    claim = variants[cell.variant].complexity_of(config_of(cell))
    try:
        flops = forward_flops(cell, shape) * pass_.num_forwards(claim.ratio(shape))
    except Exception:  # somebody else's formula must not stop a plan; the worker will report it
        return Estimate()
    has_grads = pass_.backwards > 0
    rows = float(shape.batch_size * shape.num_heads)
    tensors = 4 * rows * shape.query_len * shape.head_dim * (2 if has_grads else 1)
    scores = rows * shape.query_len**claim.memory_exponent if claim.memory_exponent > 1 else 0.0
    num_bytes = (tensors + scores * (3 if has_grads else 2)) * DTYPE_BYTES[cell.dtype]
    return Estimate(rough_seconds(flops, cell, budget_s, isolation), int(num_bytes))


def rough_seconds(flops: float, cell: Cell, budget_s: float, isolation: str) -> float:
    """Return the rough seconds of a cell, set-up included, where one call is `flops`; `budget_s` is that of samples."""
    rate = assumed_rate(cell.device, cell.threads) * (_HALF_GAIN[cell.device] if DTYPE_BYTES[cell.dtype] == 2 else 1.0)
    call_s = flops / rate
    return _START_S[isolation] + max(budget_s, 3 * call_s) + (CALLS - 3) * call_s


def assumed_rate(device: str, threads: int | None = None) -> float:
    """Return the floating-point operations per second in float32 that forecasts assume; None threads means all."""
    return _RATE[device] * ((threads or num_cores()) if device == "cpu" else 1)
