"""Rates and shares of the roofline: wide for people, and one long table with everything."""

from __future__ import annotations

from typing import Any

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.efficiency import CONVENTIONS, Efficiency
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.tables.table import Table, number_column, text_column, wide_table
from attn_zoo.report.units import human_bandwidth, human_flops, human_length, human_ms, percent
from attn_zoo.report.wording import ceilings_words


def rate_table(panel: Panel) -> Table | None:
    """Return variants down, lengths across: useful FLOP/s and its share of the roofline; None without ceilings."""
    ceilings = panel.ceilings
    if not panel.efficiency or ceilings is None:
        return None
    return wide_table(
        f"rates-{panel.name}",
        f"Useful FLOP/s and share of the roof, {panel.title}",
        f"Roof, measured before the run: {ceilings_words(ceilings)}. What counts: below the table Efficiency. "
        f"{panel.subtitle}.",
        panel.efficiency,
        (_rate, _share, lambda point: float(point.flops_per_s)),
    )


def _rate(point: Efficiency) -> str:
    return f"{human_flops(point.flops_per_s)}/s, {_share(point)}"


def _share(point: Efficiency) -> str:
    return percent(point.roof_frac) + (" (!)" if point.doubt else "")


def _conventions(*panels: Panel) -> str:
    ratios: dict[float, list[str]] = {}
    for panel in panels:
        for label, rows in panel.efficiency.items():
            known = ratios.setdefault(rows[0].backward_ratio, [])
            if label not in known:
                known.append(label)
    words = " or ".join(f"{ratio:g} ({', '.join(labels)})" for ratio, labels in sorted(ratios.items()))
    return CONVENTIONS.format(ratios=words)


def efficiency_table(analysis: Analysis, *, is_brief: bool = False) -> Table | None:
    """Return the measured lengths with their rates; None where no run has measured ceilings.

    Args:
        analysis: of the runs.
        is_brief: the longest length of each variant only.
    """
    panels = [panel for panel in analysis.panels if panel.efficiency]
    if not panels:
        return None
    rows = [
        _long_row(panel, point)
        for panel in panels
        for label in sorted(panel.efficiency)
        for point in panel.efficiency[label][-1 if is_brief else 0 :]
    ]
    has_mfu = any(row["mfu"] is not None for row in rows)
    note = (
        f"{_conventions(*panels)} Realised: the measured speed-up over the fastest exact kernel as a share of the one "
        "that the FLOPs promise."
    )
    if has_mfu:
        note += " MFU: share of the maker's product rate, dense."
    return Table(
        name="efficiency-longest" if is_brief else "efficiency",
        title="Efficiency at the longest length" if is_brief else "Efficiency",
        note=f"{note} {analysis.caveats}".strip(),
        columns=(
            text_column("variant", "variant", priority=0),
            text_column("pass", "pass", priority=0 if len(panels) > 1 else 5),
            number_column("length", "seq_len", human_length, priority=0),
            number_column("time", "median_ms", human_ms, priority=1),
            number_column("FLOPs", "flops", human_flops, priority=5),
            number_column("FLOP/s", "flops_per_s", lambda value: f"{human_flops(value)}/s", priority=1),
            number_column("bytes/s", "bytes_per_s", human_bandwidth, priority=2),
            number_column("of the roof", "roof_frac", percent, priority=0),
            *([number_column("MFU", "mfu", percent, priority=2)] if has_mfu else []),
            number_column("realised", "realised", percent, priority=1),
            text_column("doubt", "doubt", priority=6),
        ),
        rows=tuple(rows),
        is_view=is_brief,
    )


def _long_row(panel: Panel, point: Efficiency) -> dict[str, Any]:
    ceilings = panel.ceilings
    assert ceilings is not None  # without it there is no row
    return {
        "variant": point.label,
        "pass": panel.title,
        "settings": panel.subtitle,
        **{name: getattr(point, name) for name in _NUMBERS},
        "ceiling_flops_per_s": ceilings.matmul_flops_per_s,
        "ceiling_bytes_per_s": ceilings.copy_bytes_per_s,
        "doubt": point.doubt,
    }


_NUMBERS = (
    *("seq_len", "median_ms", "flops", "min_bytes", "flops_per_byte", "flops_per_s", "bytes_per_s", "roof_frac"),
    *("mfu", "realised", "backward_ratio"),
)
