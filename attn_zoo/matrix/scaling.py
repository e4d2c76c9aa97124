"""A scaling cell in this process: build, check, then time and weigh one call."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_zoo.conformance import gate
from attn_zoo.errors import AttnZooError
from attn_zoo.kernels.trace import recording
from attn_zoo.matrix.conditions import Conditions
from attn_zoo.matrix.workload import Workload, make_workload
from attn_zoo.measure.ceilings import exceeds_physical
from attn_zoo.measure.energy import Energy, energy_of_call
from attn_zoo.measure.flops import count_flops
from attn_zoo.measure.memory import memory_of_pass
from attn_zoo.measure.passes import clear_grads, make_pass, time_pass
from attn_zoo.records import Cell, Record
from attn_zoo.registry import variants

__all__ = ["measure_scaling"]

COUNT_BELOW_MS = 2_000.0
"""FLOPs are counted by one more forward, where that is cheap; the formula needs none."""


def measure_scaling(record: Record, budget_s: float, *, has_energy: bool = False, has_count: bool = True) -> Record:
    """Return the record with everything that was measured.

    Args:
        record: of the cell, otherwise empty.
        budget_s: seconds of sampling.
        has_energy: also measure energy, where the device tells.
        has_count: also count FLOPs, where that is cheap.

    Raises:
        GateError: the variant is not right, so nothing was timed.
        UnsupportedError: it cannot do what the cell asks.
    """
    cell = record.cell
    if cell.threads is not None:
        torch.set_num_threads(cell.threads)
    work = make_workload(cell)
    variant = variants[cell.variant]
    checks = gate(
        cell.variant,
        cell.options,
        work.build,
        dtype=cell.dtype,
        device=cell.device,
        seq_len=work.shape.seq_len,
        form=cell.scope,
    )
    with recording() as kernels, Conditions(cell.device) as conditions:
        timing = time_pass(work.forward, work.leaves, work.pass_, device=cell.device, budget_s=budget_s)
    formula = variant.complexity.flops
    flops = formula(work.shape) if formula else None
    _refuse_impossible(cell, flops, timing.median_ms)
    memory = memory_of_pass(work.forward, work.leaves, work.pass_, device=cell.device)
    energy = _energy(work, cell.device) if has_energy else None
    return replace(
        record,
        kernels=tuple(kernels),
        is_simulated=variant.capabilities.is_simulated,
        gate=checks,
        timing=replace(timing, flags=(*timing.flags, *conditions.flags)),
        clocks_mhz=conditions.clocks_mhz,
        energy_joules=energy.joules if energy else None,
        memory=memory,
        flops=flops,
        counted_flops=_counted_flops(work) if has_count and timing.median_ms < COUNT_BELOW_MS else None,
        num_params=sum(item.numel() for item in work.module.parameters()),
    )


def _refuse_impossible(cell: Cell, flops: int | None, median_ms: float) -> None:
    """Raise `AttnZooError` if the work cannot have been done in that time: then the timing or the formula is wrong."""
    if flops is None or cell.device != "cuda" or median_ms <= 0:
        return
    # Each matrix product of the forward has two in the backward.
    forwards = {"infer": 1, "fwd": 1, "bwd": 2, "fwd_bwd": 3}[cell.pass_ or "fwd"]
    name = torch.cuda.get_device_name()
    if problem := exceeds_physical(name, cell.dtype, median_ms / 1e3, flops=float(flops * forwards)):
        raise AttnZooError(f"rejected: {problem}")


def _counted_flops(work: Workload) -> int | None:
    """Count one forward without a graph, so that the count needs no more memory than the timing did."""
    leaves = [leaf for leaf in work.leaves if leaf.requires_grad]
    try:
        for leaf in leaves:
            leaf.requires_grad_(False)
        with torch.no_grad():
            return count_flops(work.forward)
    finally:
        for leaf in leaves:
            leaf.requires_grad_(True)


def _energy(work: Workload, device: str) -> Energy | None:
    call, setup = make_pass(work.forward, work.leaves, work.pass_)

    def whole() -> None:
        if setup is not None:
            setup()
        call()

    try:
        return energy_of_call(whole, device=device)
    finally:
        clear_grads(work.leaves)
