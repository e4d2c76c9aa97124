"""Rates and shares of the roofline: wide for people, and one long table with everything."""

from __future__ import annotations

from functools import partial
from typing import Any

from attn_zoo.report.analysis.analyse import Analysis, PanelAnalysis
from attn_zoo.report.analysis.efficiency import CONVENTIONS, Efficiency
from attn_zoo.report.tables.table import Column, Row, Table, number_column, text_column
from attn_zoo.report.units import human_bandwidth, human_flops, human_length, human_ms, percent
from attn_zoo.report.wording import ceilings_words

__all__ = ["efficiency_table", "rate_table"]


def rate_table(one: PanelAnalysis) -> Table | None:
    """Return variants down, lengths across: useful FLOP/s and its share of the roofline; None without ceilings."""
    ceilings = one.panel.ceilings
    if not one.efficiency or ceilings is None:
        return None
    lengths = sorted({row.seq_len for rows in one.efficiency.values() for row in rows})
    rows: list[Row] = [
        {"variant": label, **{str(length): None for length in lengths}, **{str(row.seq_len): row for row in found}}
        for label, found in one.efficiency.items()
    ]
    columns = [
        Column(
            heading=human_length(length),
            show=partial(_cell, key=str(length)),
            brief=partial(_share, key=str(length)),
            sort=partial(_rate, key=str(length)),
            priority=1 + rank / (len(lengths) + 1),
        )
        for rank, length in enumerate(lengths)
    ]
    return Table(
        name=f"rates-{one.panel.name}",
        title=f"Useful FLOP/s and share of the roof, {one.panel.title}",
        note=(
            f"Roof, measured before the run: {ceilings_words(ceilings)}. What counts: below the table Efficiency. "
            f"{one.panel.subtitle}."
        ),
        columns=(text_column("variant", "variant", priority=0), *columns),
        rows=tuple(rows),
    )


def _cell(row: Row, key: str) -> str:
    found: Efficiency | None = row[key]
    return "" if found is None else f"{human_flops(found.flops_per_s)}/s, {_share(row, key)}"


def _share(row: Row, key: str) -> str:
    found: Efficiency | None = row[key]
    return "" if found is None else percent(found.roof_frac) + (" (!)" if found.doubt else "")


def _rate(row: Row, key: str) -> float | None:
    found: Efficiency | None = row[key]
    return None if found is None else found.flops_per_s


def _conventions(*panels: PanelAnalysis) -> str:
    ratios: dict[float, list[str]] = {}
    for one in panels:
        for label, rows in one.efficiency.items():
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
    panels = [one for one in analysis.panels if one.efficiency]
    if not panels:
        return None
    rows = [
        _long_row(one, found)
        for one in panels
        for label in sorted(one.efficiency)
        for found in one.efficiency[label][-1 if is_brief else 0 :]
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
        note=note,
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
    )


def _long_row(one: PanelAnalysis, found: Efficiency) -> dict[str, Any]:
    ceilings = one.panel.ceilings
    assert ceilings is not None  # without it there is no row
    return {
        "variant": found.label,
        "pass": one.panel.title,
        "settings": one.panel.subtitle,
        "seq_len": found.seq_len,
        "median_ms": found.median_ms,
        "flops": found.flops,
        "min_bytes": found.num_bytes,
        "flops_per_byte": found.intensity,
        "flops_per_s": found.flops_per_s,
        "bytes_per_s": found.bytes_per_s,
        "roof_frac": found.roof_frac,
        "mfu": found.mfu,
        "realised": found.realised,
        "backward_ratio": found.backward_ratio,
        "ceiling_flops_per_s": ceilings.matmul_flops_per_s,
        "ceiling_bytes_per_s": ceilings.copy_bytes_per_s,
        "doubt": found.doubt,
    }
