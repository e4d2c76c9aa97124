"""Rates and shares of the roofline: wide for people, and one long table with everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from attn_zoo.records import is_one_token
from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.contradictions import flops_ratios
from attn_zoo.report.analysis.efficiency import Efficiency
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.analysis.series import shown_doubts
from attn_zoo.report.tables.table import MARK_REMARKS, Column, Remark, Table, number_column, text_column
from attn_zoo.report.tables.time_tables import pass_columns
from attn_zoo.report.wording import ceilings_words, marks_of
from attn_zoo.units import human_bandwidth, human_flop_rate, human_flops, human_length, human_ms, percent

_OF_CALLS = (
    "Useful FLOPs, by formula, a multiply-add being two, padding included; a backward counts as {ratios} forwards. "
    "Fewest bytes: inputs and the mechanism's own weights read and output written once; a backward twice that (inputs, "
    "output and its gradient read, gradients of the inputs written)."
)
_OF_DECODING = (
    "Of a decoded token: FLOPs as counted, a multiply-add being two; fewest bytes: weights and what it must read of "
    "its state read once, its inputs read and its output written once."
)
_SHARE = (
    "Share of the roof: FLOPs / product rate or bytes / copy rate, whichever is longer, over the median time{alone}."
)


def _conventions(panels: Sequence[Panel]) -> str:
    """Say what counts. The ratio of a layer varies with the length: its projections have another one."""
    whole = [panel for panel in panels if not is_one_token(panel.pass_)]
    rows = (row for panel in whole for own in panel.efficiency.values() for row in own)
    by_label = grouped(rows, lambda row: row.label).items()
    ratios = {label: sorted(row.backward_ratio or 0.0 for row in own) for label, own in by_label}

    def ends(label: str) -> str:
        return " to ".join(dict.fromkeys(f"{end:.3g}" for end in (ratios[label][0], ratios[label][-1])))

    by_ratio = grouped(sorted(ratios, key=lambda label: (ratios[label][0], label)), ends)
    words = " or ".join(f"{ratio} ({', '.join(labels)})" for ratio, labels in by_ratio.items())
    has_device = any(point.device_ms for panel in panels for point in panel.points)
    alone = " (of the GPU alone, where that was measured)" if has_device else ""
    said = [_OF_CALLS.format(ratios=words)] if whole else []
    said += [_OF_DECODING] if len(whole) < len(panels) else []
    return " ".join([*said, _SHARE.format(alone=alone)])


def efficiency_table(analysis: Analysis, *, is_brief: bool = False) -> Table | None:
    """Return measured lengths, or if brief the longest of each variant, with their rates; None without ceilings."""
    panels = [panel for panel in analysis.panels if panel.efficiency]
    if not panels:
        return None
    shown = shown_doubts(point for panel in panels for point in panel.points)
    rows = [
        _long_row(panel, point, shown)
        for panel in panels
        for label in _by_share(panel)
        for point in panel.efficiency[label][-1 if is_brief else 0 :]
    ]
    roofs = dict.fromkeys(ceilings_words(panel.ceilings) for panel in panels if panel.ceilings is not None)
    return Table(
        name="efficiency-longest" if is_brief else "efficiency",
        title="Efficiency at the longest length" if is_brief else "Efficiency",
        notes=(
            _conventions(panels),
            Remark(
                "Realised: the measured speed-up over exact attention as a share of the one that the FLOPs promise.",
                heading="realised",
            ),
            Remark("MFU: share of the maker's product rate, dense, in the same dtype.", heading="MFU"),
            *MARK_REMARKS,
            f"Roof, measured beside the run: {'; '.join(roofs)}.",
            *analysis.caveats,
        ),
        columns=(
            text_column("variant", priority=0),
            *pass_columns(panels),
            number_column("length", "seq_len", human_length, priority=0),
            number_column("time", "time_ms", human_ms, priority=1, marks="marks"),
            number_column("FLOPs", "flops", human_flops, priority=5),
            number_column("FLOP/s", "flops_per_s", human_flop_rate, priority=1),
            number_column("bytes/s", "bytes_per_s", human_bandwidth, priority=2),
            number_column("of the roof", "roof_frac", percent, priority=0),
            number_column("MFU", "mfu", percent, priority=2),
            number_column("realised", "realised", percent, priority=1, marks="realised_marks"),
            text_column("above the roof", "doubt", priority=6),
        ),
        rows=tuple(rows),
        is_view=is_brief,
    )


def _by_share(panel: Panel) -> list[str]:
    """Return the labels with the largest share of the roof first; who is not judged comes last."""
    return sorted(
        panel.efficiency, key=lambda label: (label not in panel.judged, -panel.efficiency[label][-1].roof_frac)
    )


def _long_row(panel: Panel, point: Efficiency, shown: frozenset[str]) -> dict[str, Any]:
    ceilings = panel.ceilings
    assert ceilings is not None  # without it there is no row
    return {
        "variant": point.label,
        "pass": panel.title,
        "settings": panel.subtitle,
        "marks": marks_of(point.doubts, shown),
        **{name: getattr(point, name) for name in _NUMBERS},
        "ceiling_flops_per_s": ceilings.matmul_flops_per_s,
        "ceiling_bytes_per_s": ceilings.copy_bytes_per_s,
        "realised_marks": marks_of(point.realised_doubts, shown) if point.realised is not None else "",
        "doubt": point.doubt,
    }


_NUMBERS = (
    *("seq_len", "median_ms", "time_ms", "is_waiting"),
    *("flops", "min_bytes", "flops_per_byte", "flops_per_s", "bytes_per_s", "roof_frac"),
    *("mfu", "realised", "backward_ratio"),
)


def flops_table(analysis: Analysis) -> Table | None:
    """Return where formula and count of FLOPs differ by more than 1 %; None where they nowhere do."""
    rows = [asdict(one) for one in flops_ratios(analysis.results.observations)]
    if not rows:
        return None
    return Table(
        name="flops",
        title="FLOPs by formula over those counted",
        notes=(
            (
                "Only where they differ by more than 1 %. A formula says what is useful and a count what ran, fused "
                "causal attention counted as dense: below 1 is what a mask hides."
            ),
            Remark("(!): above 1 more is claimed than ran.", sign="(!)"),
        ),
        columns=(
            text_column("variant", priority=0),
            text_column("of", "setting", priority=1),
            Column(
                heading="formula / count",
                show=lambda row: f"{row['ratios']}{' (!)' if row['is_too_many'] else ''}",
                sort=lambda row: row["most"],
                priority=0,
            ),
            text_column("lengths", priority=2),
        ),
        rows=tuple(rows),
    )
