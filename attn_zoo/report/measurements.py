"""The numbers that records hold, as tables show them: to show a new one, add an entry here.

Exports need no entry: their columns follow from the fields of records (`attn_zoo.report.export`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from attn_zoo.records import Record
from attn_zoo.report.units import human_bytes, human_flops, human_ms, human_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One number of a record.

    Args:
        name: of the column in files, with its unit.
        part: of the record that holds it.
        field: its name there; empty where that is `name`.
        heading: above its column.
        show: a value, for people.
        priority: of its column, see `attn_zoo.report.tables.table.Column`.
        pool: what several records give together.
        is_of_time: means little where cells shared a device.
        tables: of calls that show it; where no record knows it, they leave it out.
    """

    name: str
    part: Literal["record", "timing", "memory", "score"]
    field: str = ""
    heading: str
    show: Callable[[float], str]
    priority: float = 1
    pool: Literal["mean", "most"] = "mean"
    is_of_time: bool = False
    tables: tuple[Literal["scaling", "steps"], ...] = ()

    def read(self, record: Record) -> float | None:
        """Return the value of a record, or None where it was not measured."""
        part = record if self.part == "record" else getattr(record, self.part)
        value: float | None = getattr(part, self.field or self.name, None)
        return value

    def pooled(self, records: Iterable[Record]) -> float | None:
        """Return the value of several records together, or None where none of them knows it."""
        known = [value for record in records if (value := self.read(record)) is not None]
        return None if not known else max(known) if self.pool == "most" else fmean(known)


CALLS: tuple[Measurement, ...] = (
    Measurement(name="host_ms", part="timing", heading="host", show=human_ms, priority=5, tables=("scaling",)),
    Measurement(name="graph_ms", part="timing", heading="from a graph", show=human_ms, priority=4, tables=("scaling",)),
    Measurement(
        name="peak_bytes",
        part="memory",
        heading="peak memory",
        show=human_bytes,
        pool="most",
        tables=("scaling", "steps"),
    ),
    Measurement(
        name="extra_bytes",
        part="memory",
        heading="extra memory",
        show=human_bytes,
        priority=5,
        pool="most",
        tables=("scaling",),
    ),
    Measurement(
        name="saved_bytes",
        part="memory",
        heading="saved",
        show=human_bytes,
        priority=2,
        pool="most",
        tables=("scaling", "steps"),
    ),
    Measurement(name="first_ms", part="timing", heading="first step", show=human_ms, priority=4, tables=("steps",)),
)
"""Of one call or training step, beside its time."""

COSTS: tuple[Measurement, ...] = (
    Measurement(name="num_params", part="score", heading="parameters", show="{:,.0f}".format, pool="most"),
    Measurement(name="train_flops", part="score", heading="compute", show=human_flops, priority=1.5),
    Measurement(name="train_s", part="score", heading="time", show=human_s, is_of_time=True),
    Measurement(name="compile_s", part="score", heading="compiling", show=human_s, priority=2.7, is_of_time=True),
    Measurement(name="eval_s", part="score", heading="evaluating", show=human_s, priority=2.8, is_of_time=True),
    Measurement(name="pretrain_flops", part="score", heading="pretraining", show=human_flops, priority=2.5),
    Measurement(name="pretrain_s", part="score", heading="its time", show=human_s, priority=2.6, is_of_time=True),
    Measurement(
        name="tokens_per_s", part="score", heading="tokens/s", show="{:,.0f}".format, priority=2, is_of_time=True
    ),
    Measurement(
        name="train_peak_bytes",
        part="score",
        field="peak_bytes",
        heading="memory",
        show=human_bytes,
        priority=1.2,
        pool="most",
    ),
    Measurement(
        name="padding_frac", part="score", heading="padding", show=lambda value: f"{100 * value:.0f} %", priority=2.2
    ),
)
"""Of one training run: what its score cost."""


def token_rates(record: Record) -> dict[str, float]:
    """Return tokens per second of a training step that was timed, padding excluded, with the interval; else nothing."""
    num_tokens, timing = record.cell.num_tokens, record.timing
    if num_tokens is None or timing is None:
        return {}
    ends = {"tokens_per_s": timing.median_ms, "tokens_per_s_low": timing.high_ms, "tokens_per_s_high": timing.low_ms}
    return {name: 1e3 * num_tokens / value_ms for name, value_ms in ends.items() if value_ms > 0}
