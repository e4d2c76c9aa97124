"""Group scaling rows into panels (one figure each) and series (one curve each)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from attn_zoo.folder import Claim
from attn_zoo.records import Ceilings
from attn_zoo.report.analysis.observations import Results
from attn_zoo.report.wording import PANEL_FIELDS, PASS_TITLES, panel_name, panel_subtitle, panel_title
from attn_zoo.statistics import time_summary

__all__ = ["Failure", "Panel", "Point", "Series", "fastest_exact", "make_panels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measured length of one series. Bytes are None where they were not measured.

    Args:
        first_ms: of the first call, compilation included.
        num_tokens: that one training step learns from; None for what is no step.
        is_compiled: a training step through `torch.compile`.
    """

    seq_len: int
    samples_ms: tuple[float, ...]
    process_sizes: tuple[int, ...]
    median_ms: float
    low_ms: float
    high_ms: float
    q1_ms: float
    q3_ms: float
    peak_bytes: int | None
    extra_bytes: int | None
    saved_bytes: int | None
    flops: int | None
    min_bytes: int | None
    backward_ratio: float | None
    graph_ms: float | None
    first_ms: float | None
    num_tokens: float | None
    is_compiled: bool
    kernel: str
    flags: str

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of a training step, padding excluded; None for what is no step."""
        return self._rate(self.median_ms)

    @property
    def tokens_per_s_low(self) -> float | None:
        """Lower end of its 95 % interval: of the longest time."""
        return self._rate(self.high_ms)

    @property
    def tokens_per_s_high(self) -> float | None:
        """Upper end."""
        return self._rate(self.low_ms)

    def _rate(self, value_ms: float) -> float | None:
        return None if self.num_tokens is None or value_ms <= 0 else 1e3 * self.num_tokens / value_ms

    @property
    def num_processes(self) -> int:
        """In how many processes the samples were taken."""
        return max(1, len(self.process_sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One length that gave no measurement, and why."""

    seq_len: int
    status: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One record of a cell that was timed in turns with others: not pooled, because its samples are of their rounds."""

    label: str
    seq_len: int
    bundle: str
    samples_ms: tuple[float, ...]
    process_sizes: tuple[int, ...]
    median_ms: float
    low_ms: float
    high_ms: float
    kernel: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve: a label over lengths, ascending."""

    label: str
    variant: str
    points: tuple[Point, ...]
    failures: tuple[Failure, ...]
    claim: Claim | None
    is_simulated: bool

    @property
    def lengths(self) -> list[int]:
        """Measured lengths in tokens."""
        return [point.seq_len for point in self.points]

    @property
    def is_exact(self) -> bool:
        """Whether the variant claims to equal softmax attention."""
        return self.claim is not None and self.claim.is_exact


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Series that differ in nothing but the mechanism.

    Args:
        title: what is timed, such as `"forward + backward"`.
        subtitle: everything else that all series share.
        name: for file names; unique among the panels of one report.
        series: ordered by label.
        baseline: at each length the fastest exact series, or None where the run has none.
        pass_: what is timed, as recorded.
        ceilings: of the machine, or None where the run has not measured them.
        turns: what was timed in turns, record by record.
    """

    title: str
    subtitle: str
    name: str
    series: tuple[Series, ...]
    baseline: Series | None
    pass_: str = ""
    ceilings: Ceilings | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """All lengths, measured or failed, ascending."""
        measured = {point.seq_len for series in self.series for point in series.points}
        return sorted(measured | {failure.seq_len for series in self.series for failure in series.failures})


def make_panels(results: Results) -> list[Panel]:
    """Return the panels of all scaling rows, in a stable order."""
    frame = results.frame
    rows = frame[(frame["kind"] == "scaling") & frame["seq_len"].notna()]
    groups = list(rows.groupby(list(PANEL_FIELDS), dropna=False, sort=True))
    order = list(PASS_TITLES)
    groups.sort(key=lambda item: (str(item[0][1]), order.index(item[0][3]) if item[0][3] in order else len(order)))
    settings = [dict(zip(PANEL_FIELDS, key, strict=True)) for key, _ in groups]
    varying = {name for name in PANEL_FIELDS if len({str(setting[name]) for setting in settings}) > 1}
    panels: list[Panel] = []
    names: set[str] = set()
    for setting, (_, group) in zip(settings, groups, strict=True):
        name = _unique(panel_name(setting, varying), names)
        panels.append(_panel(setting, group, name, results, varying))
    return panels


def _panel(setting: dict[str, Any], rows: pd.DataFrame, name: str, results: Results, varying: set[str]) -> Panel:
    series = []
    for label, group in rows.groupby("label", sort=True):
        points, failures = [], []
        for seq_len, same in group.groupby("seq_len", sort=True):
            good = same[(same["status"] == "ok") & same["median_ms"].notna()]
            if len(good):
                points.append(_point(int(str(seq_len)), good))
            else:
                last = same.iloc[-1]
                failures.append(Failure(seq_len=int(str(seq_len)), status=last["status"], reason=last["reason"]))
        variant = str(group["variant"].iloc[0])
        series.append(
            Series(
                label=str(label),
                variant=variant,
                points=tuple(points),
                failures=tuple(failures),
                claim=_claim(variant, setting, results),
                is_simulated=bool(group["is_simulated"].any()),
            )
        )
    return Panel(
        title=panel_title(setting, varying),
        subtitle=panel_subtitle(setting, results, varying),
        name=name,
        series=tuple(series),
        baseline=fastest_exact(series),
        pass_=str(setting["pass"]),
        ceilings=_ceilings(setting, results),
        turns=_turns(rows),
    )


def _claim(variant: str, setting: dict[str, Any], results: Results) -> Claim | None:
    """Return what the variant claims; of a whole model only what it computes, not how the mechanism alone grows."""
    claim = results.claim(variant)
    if claim is None or setting["scope"] != "model":
        return claim
    return replace(claim, time_exponent=None, memory_exponent=None)


def _turns(rows: pd.DataFrame) -> tuple[Turn, ...]:
    good = rows[(rows["status"] == "ok") & (rows["bundle"] != "") & rows["median_ms"].notna()]
    return tuple(
        Turn(
            label=str(row["label"]),
            seq_len=int(row["seq_len"]),
            bundle=str(row["bundle"]),
            samples_ms=tuple(float(sample) for sample in row["samples_ms"]),
            process_sizes=tuple(row["process_sizes"]),
            median_ms=float(row["median_ms"]),
            low_ms=float(row["low_ms"]),
            high_ms=float(row["high_ms"]),
            kernel=str(row["kernel"]),
        )
        for _, row in good.iterrows()
    )


def _ceilings(setting: dict[str, Any], results: Results) -> Ceilings | None:
    threads = None if pd.isna(setting["threads"]) else int(setting["threads"])
    return results.ceilings(str(setting["environment"]), str(setting["device"]), str(setting["dtype"]), threads)


def _point(seq_len: int, rows: pd.DataFrame) -> Point:
    """Return the one row as it was recorded, or several (seeds, repeated runs) with their samples pooled.

    Samples of two rows are those of two processes.
    """
    first = rows.iloc[0]
    samples = tuple(float(sample) for row in rows["samples_ms"] for sample in row)
    sizes = tuple(
        size
        for own, row in zip(rows["process_sizes"], rows["samples_ms"], strict=True)
        for size in (own or ([len(row)] if row else []))
    )
    if len(rows) == 1 or not samples:
        summary = {f"{name}_ms": float(first[f"{name}_ms"]) for name in ("median", "q1", "q3", "low", "high")}
    else:
        summary = time_summary(samples, sizes)
    return Point(
        seq_len=seq_len,
        samples_ms=samples or (summary["median_ms"],),
        process_sizes=sizes,
        **summary,
        peak_bytes=_largest(rows["peak_bytes"]),
        extra_bytes=_largest(rows["extra_bytes"]),
        saved_bytes=_largest(rows["saved_bytes"]),
        flops=_largest(rows["flops"]),
        min_bytes=_largest(rows["min_bytes"]),
        backward_ratio=_mean(rows["backward_ratio"]),
        graph_ms=_mean(rows["graph_ms"]),
        first_ms=_mean(rows["first_ms"]),
        num_tokens=_mean(rows["num_tokens"]),
        is_compiled=json.loads(first["overrides"]).get("compile") is True,
        kernel=str(first["kernel"]),
        flags=" + ".join(sorted({flag for flag in rows["flags"] if flag})),
    )


def _largest(column: pd.Series[Any]) -> int | None:
    known = column.dropna()
    return int(known.max()) if len(known) else None


def _mean(column: pd.Series[Any]) -> float | None:
    known = column.dropna()
    return float(known.mean()) if len(known) else None


def fastest_exact(series: Sequence[Series]) -> Series | None:
    """Return a series made of the fastest exact point at each length, named after its members; None without any."""
    exact = [one for one in series if one.is_exact and one.points and not one.is_simulated]
    if not exact:
        return None
    best: dict[int, tuple[Point, str]] = {}
    for one in exact:
        for point in one.points:
            if point.seq_len not in best or point.median_ms < best[point.seq_len][0].median_ms:
                best[point.seq_len] = (point, one.label)
    used = list(dict.fromkeys(label for _, label in (best[length] for length in sorted(best))))
    return Series(
        label=" / ".join(used),
        variant=exact[0].variant,
        points=tuple(best[length][0] for length in sorted(best)),
        failures=(),
        claim=exact[0].claim,
        is_simulated=False,
    )


def _unique(name: str, taken: set[str]) -> str:
    candidate, count = name, 2
    while candidate in taken:
        candidate, count = f"{name}-{count}", count + 1
    taken.add(candidate)
    return candidate
