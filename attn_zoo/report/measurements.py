"""The numbers that records hold, as tables show them: to show a new one, add an entry here.

Exports need no entry: their columns follow from the fields of records (`attn_zoo.report.export`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from attn_zoo.records import Record
from attn_zoo.units import human_bytes, human_flops, human_joules, human_ms, human_s


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number of a record.

    Args:
        name: of the column in files, with its unit.
        part: of the record that holds it.
        heading: above its column.
        show: a value, for people.
        priority: of its column, see `attn_zoo.report.tables.table.Column`.
        tables: of calls that show it; where no record knows it, they leave it out.
        field: its name in the record; empty where that is `name`.
        pool: what several trainings give together.
        is_of_time: means little where cells shared a device.
    """

    name: str
    part: Literal["record", "timing", "memory", "score"]
    heading: str
    show: Callable[[float], str]
    priority: float = 1
    tables: tuple[Literal["scaling", "steps"], ...] = ()
    field: str = ""
    pool: Literal["mean", "most"] = "mean"
    is_of_time: bool = False

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
    Measurement("host_ms", "timing", "host", human_ms, 5, ("scaling", "steps")),
    Measurement("graph_ms", "timing", "from a graph", human_ms, 4, ("scaling",)),
    Measurement("peak_bytes", "memory", "peak memory", human_bytes, 1, ("scaling", "steps")),
    Measurement("extra_bytes", "memory", "extra memory", human_bytes, 5, ("scaling",)),
    Measurement("saved_bytes", "memory", "saved", human_bytes, 2, ("scaling", "steps")),
    Measurement("state_bytes", "memory", "state", human_bytes, 2, ("scaling",)),
    Measurement("first_ms", "timing", "first step", human_ms, 4, ("steps",)),
    Measurement("energy_joules", "record", "energy", human_joules, 3, ("scaling", "steps")),
)
"""Of one call or training step, beside its time."""

COSTS: tuple[Measurement, ...] = (
    Measurement("num_params", "score", "parameters", "{:,.0f}".format, pool="most"),
    Measurement("train_flops", "score", "compute", human_flops, 1.5),
    Measurement("train_s", "score", "time", human_s, is_of_time=True),
    Measurement("compile_s", "score", "compiling", human_s, 2.7, is_of_time=True),
    Measurement("eval_s", "score", "evaluating", human_s, 2.8, is_of_time=True),
    Measurement("eval_compile_s", "score", "compiling for it", human_s, 2.9, is_of_time=True),
    Measurement("pretrain_flops", "score", "pretraining", human_flops, 2.5),
    Measurement("pretrain_s", "score", "its time", human_s, 2.6, is_of_time=True),
    Measurement("tokens_per_s", "score", "tokens/s", "{:,.0f}".format, 2, is_of_time=True),
    Measurement("train_peak_bytes", "score", "memory", human_bytes, 1.2, field="peak_bytes", pool="most"),
    Measurement("padding_frac", "score", "padding", lambda value: f"{100 * value:.0f} %", 2.2),
)
"""Of one training run: what its score cost."""


def token_rates(record: Record) -> dict[str, float]:
    """Return tokens per second with the interval, of what `Cell.num_tokens` knows; else nothing."""
    num_tokens, timing = record.cell.num_tokens, record.timing
    if num_tokens is None or timing is None:
        return {}
    ends = {"tokens_per_s": timing.median_ms, "tokens_per_s_low": timing.high_ms, "tokens_per_s_high": timing.low_ms}
    return {name: 1e3 * num_tokens / value_ms for name, value_ms in ends.items() if value_ms > 0}
