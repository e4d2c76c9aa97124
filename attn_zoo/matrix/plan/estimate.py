"""Rough forecasts of time and memory, from claimed costs and assumed rates: enough to warn and to order by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attn_zoo.matrix.claimed_costs import DTYPE_BYTES, call_shape, config_of, forward_flops
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.measure.environment import num_cores
from attn_zoo.records import PASSES, Cell
from attn_zoo.registry import variants

if TYPE_CHECKING:
    from attn_zoo.tasks import TaskSpec
    from attn_zoo.training.protocol import Protocol

# Assumed, deliberately low: floating-point operations per second that attention reaches in float32, of one thread on a
# CPU. Two cores of a server reached 7.5e10 each where products reached 1.2e11; an older laptop has less than half.
_RATE = {"cpu": 3e10, "cuda": 2e13}
_HALF_GAIN = {"cpu": 0.5, "cuda": 8.0}  # 16-bit types are emulated on many CPUs
# Of these rates in the small models of trainings, where norms, activations and copies count: a thread was seen at 6 to
# 57 GFLOP/s, mostly at 15 to 25. With it published trainings took 0.4 to 3.6 times as long as foretold.
_TRAINING_SHARE = 0.7
_LEAST_STEP_S = 2e-3  # of a training, however small
_PROCESS_BYTES = 450 * 2**20  # of one that has loaded torch; on a CPU a training's peak is that of its process
START_S = 2.0
"""Of a process: until it has loaded torch and begins its first cell."""

ENERGY_S = 6.5
"""Of a cell whose energy is counted, once: three windows of two seconds, with calls to their ends."""

CALLS, REPEATED_CALLS = 8, 3
"""In a cell of long calls: the first one and two samples, which each repeat takes; checks and memory, once for all."""


COMPILE_S = 60.0
"""Of a model that is compiled first."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Rough cost of a cell.

    Args:
        seconds: of a repeat, on average, in a process that has begun.
        num_bytes: at the peak.
        shared_s: in addition, of what a process does once for all the cells that it runs.
    """

    seconds: float
    num_bytes: int
    shared_s: float = 0.0


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


def step_estimate(item: PlannedCell, protocol: Protocol) -> tuple[float, int]:
    """Return the FLOPs of one training step and the bytes at its peak.

    They are those of the attention in every layer and of the linear maps around it.

    Args:
        item: of a cell with B and L; all else that decides the sizes of a model is the protocol's.
        protocol: with which it trains.
    """
    cell = replace(
        item.cell,
        scope="model",
        pass_="step",  # noqa: S106 - no password
        num_heads=protocol.num_heads,
        num_kv_heads=protocol.num_heads,
        head_dim=protocol.head_dim or protocol.embed_dim // protocol.num_heads,
    )
    shape = call_shape(cell)
    tokens, embed_dim, ffn_dim = shape.batch_size * shape.query_len, protocol.embed_dim, protocol.ffn_dim
    num_forwards = PASSES["step"].num_forwards(variants[cell.variant].complexity_of(config_of(cell)).ratio(shape))
    flops = protocol.num_layers * (forward_flops(cell, shape) + 4 * tokens * embed_dim * ffn_dim) * num_forwards
    saved = tokens * (8 * embed_dim + 2 * ffn_dim) * DTYPE_BYTES[cell.dtype]
    return flops, protocol.num_layers * (call_estimate(replace(item, cell=cell)).num_bytes + saved)


def training_estimate(item: PlannedCell, protocol: Protocol, spec: TaskSpec, num_steps: int) -> Estimate:
    """Return the rough cost of training the variant of a cell on a task, as if all inputs were as long as the longest.

    Evaluations are left out: only the data say of how many examples they are.
    """
    lengths = [length for length in (spec.max_seq_len, spec.other_max_seq_len) if length]
    cells = [replace(item.cell, batch_size=protocol.batch_size, seq_len=length) for length in lengths]
    parts = [step_estimate(replace(item, cell=cell), protocol) for cell in cells]
    flops, num_bytes = map(sum, zip(*parts, strict=True))
    is_on_cpu = item.cell.device == "cpu"
    num_ranks = 1 if is_on_cpu and item.cell.threads is None else item.cell.data_parallel  # they would share the cores
    step_s = max(call_seconds(flops, item.cell) / _TRAINING_SHARE / num_ranks, _LEAST_STEP_S)
    is_compiled = not is_on_cpu if protocol.compile is None else protocol.compile
    num_bytes += _PROCESS_BYTES if is_on_cpu else 0
    return Estimate(num_steps * step_s + (COMPILE_S if is_compiled else 0.0), num_bytes)


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
