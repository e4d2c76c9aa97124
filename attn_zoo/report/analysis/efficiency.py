"""How near each point comes to what the machine can do: rates, share of the roofline, realised share of a speed-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_zoo.records import PASSES, Ceilings, Record, is_one_token
from attn_zoo.report.analysis.series import Point, Series, joint_doubts
from attn_zoo.report.analysis.winners import SpeedUp
from attn_zoo.units import percent

_BACKWARD_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """One measured length of one variant beside the ceilings of its machine.

    Args:
        median_ms: of the call.
        device_ms: of the GPU alone, or None where that was not measured.
        is_waiting: `time_ms` is that of a call that waits for the host: the shares say little of the kernel.
        doubts: what makes `time_ms` doubtful.
        flops: useful ones of the pass; of a decoded token as counted, and None at lengths where they were not.
        min_bytes: that the pass must move at least.
        backward_ratio: FLOPs of the backward over those of the forward; None of a decoded token.
        roof_frac: time that the measured ceilings allow over the time it took.
        mfu: share of the product rate on the data sheet, or None where there is none.
        realised: measured speed-up over exact attention as a share of what the FLOPs promise; None for exact variants,
            without a baseline, and of a decoded token, whose time is that of its bytes.
        realised_doubts: what makes either of its two times doubtful.
        doubt: why the row cannot be right as it stands, or empty.
    """

    label: str
    seq_len: int
    median_ms: float
    device_ms: float | None
    is_waiting: bool
    doubts: tuple[str, ...]
    flops: float | None
    min_bytes: float
    backward_ratio: float | None
    roof_frac: float
    mfu: float | None
    realised: float | None
    realised_doubts: tuple[str, ...]
    doubt: str

    @property
    def time_ms(self) -> float:
        """Of the GPU alone where that was measured, else of the call."""
        return self.device_ms or self.median_ms

    @property
    def flops_per_s(self) -> float | None:
        """Useful operations per second."""
        return None if self.flops is None else self.flops / self.time_ms * 1e3

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that moved at least."""
        return self.min_bytes / self.time_ms * 1e3

    @property
    def flops_per_byte(self) -> float | None:
        """FLOP per byte."""
        return None if self.flops is None else self.flops / self.min_bytes


def efficiencies(
    every: Sequence[Series], speed_up: Callable[[Series, int], SpeedUp | None], pass_: str, ceilings: Ceilings | None
) -> dict[str, list[Efficiency]]:
    """Return the points of each series that has formulas, shortest first; nothing without measured ceilings.

    A variant that computes dense scores underneath has none either: its formula is not what ran.
    """
    if ceilings is None or pass_ not in PASSES:
        return {}
    by_label = {}
    for series in every:
        rows = [
            _row(series, point, speed_up(series, point.seq_len), pass_, ceilings)
            for point in series.points
            if not series.is_simulated
            and (point.record.min_bytes and point.median_ms > 0)
            and (is_one_token(pass_) or pass_flops(point.record, pass_))
        ]
        if rows:
            by_label[series.label] = rows
    return by_label


def pass_flops(record: Record, pass_: str) -> float | None:
    """Return the useful FLOPs of a pass by formula, of a decoded token as counted; None where they are not known."""
    if is_one_token(pass_):
        return record.counted_flops
    if record.flops is None or record.backward_ratio is None:
        return None
    return record.flops * PASSES[pass_].num_forwards(record.backward_ratio)


def _row(series: Series, point: Point, beside: SpeedUp | None, pass_: str, ceilings: Ceilings) -> Efficiency:
    flops = pass_flops(point.record, pass_)
    min_bytes = float(point.record.min_bytes or 0) * PASSES[pass_].num_forwards(_BACKWARD_BYTES)
    time_ms = point.device_ms or point.median_ms
    roof_frac = ceilings.floor_s(flops or 0.0, min_bytes) / (time_ms * 1e-3)
    peak = ceilings.sheet_flops_per_s
    promised = pass_flops(beside.exact.record, pass_) if beside is not None and not is_one_token(pass_) else None
    return Efficiency(
        label=series.label,
        seq_len=point.seq_len,
        median_ms=point.median_ms,
        device_ms=point.device_ms,
        is_waiting=point.is_waiting and point.device_ms is None,
        doubts=_doubts(point),
        flops=flops,
        min_bytes=min_bytes,
        backward_ratio=point.record.backward_ratio,
        roof_frac=roof_frac,
        mfu=flops / (time_ms * 1e-3) / peak if peak and flops else None,
        realised=_times_as_fast(beside) * flops / promised if beside is not None and flops and promised else None,
        realised_doubts=_doubts(beside.point, beside.exact) if beside is not None else (),
        doubt=_doubt(roof_frac, ceilings),
    )


def _times_as_fast(beside: SpeedUp) -> float:
    """Return how many times as fast it is: on the GPU alone where both are known, else as calls."""
    alone = beside.device_factor
    return beside.factor.value if alone is None else alone


def _doubts(*points: Point) -> tuple[str, ...]:
    """Return what makes times doubtful; where all are those of the GPU alone, they wait for no host."""
    return joint_doubts(points, of_device=all(point.device_ms for point in points))


def _doubt(roof_frac: float, ceilings: Ceilings) -> str:
    if roof_frac <= 1:
        return ""
    flags = f" ({', '.join(ceilings.flags).replace('_', ' ')} while it was measured)" if ceilings.flags else ""
    return f"{percent(roof_frac)} of the roof: the ceiling was measured too low{flags}, or its data stay in a cache"
