"""What became of trained models when another mechanism took the place of their own: scores beside errors of heads."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from attn_zoo.records import EQUAL_WEIGHTS, Replacement
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore, mean_with_interval
from attn_zoo.report.tables.error_tables import MEAN, error_text
from attn_zoo.report.tables.table import (
    BRACKETS,
    Remark,
    Table,
    interval_column,
    interval_values,
    number_column,
    text_column,
)
from attn_zoo.report.units import capital, human_number


def exchanges(score: LabelScore) -> list[tuple[float, Replacement]]:
    """Return the score of each seed, with what is known of the exchange."""
    every = [(run.score, run.record.replacement) for run in score.runs]
    return [(own.value, found) for own, found in every if own is not None and found is not None]


def head_error(score: LabelScore) -> tuple[float | None, float | None, float | None]:
    """Return the mean error of heads over seeds, with the ends of its interval."""
    mean, low, high = mean_with_interval([found.error for _, found in exchanges(score)])
    return mean, None if low is None else max(low, 0.0), high


def exchange_table(group: AccuracyGroup) -> Table | None:
    """Return what each mechanism costs the models that it was put into; None where models were trained with theirs."""
    rows: list[dict[str, Any]] = []
    for score in group.ranked:
        found = exchanges(score)
        lost = mean_with_interval([value - each.trained_value for value, each in found])
        layers = list(zip(*([layer.error for layer in each.layers] for _, each in found), strict=False))
        rows.append(
            {
                "variant": score.name,
                **interval_values("score", score.mean, score.low, score.high),
                **interval_values("difference", *lost),
                **interval_values("error", *head_error(score)),
                "by_layer": ", ".join(error_text(fmean(own)) for own in layers),
                "num_new_params": max((each.num_new_params for _, each in found), default=None),
                "failed": score.failed,
            }
        )
    every = [each for score in group.scores for _, each in exchanges(score)]
    if not every:
        return None
    metric, own = group.metric, group.setting.replaces
    empty = dict.fromkeys(rows[0])
    rows.append(
        {
            **empty,
            "variant": MEAN,
            "score": group.floors[EQUAL_WEIGHTS],
            "error": fmean(each.mean_error for each in every),
        }
    )
    keys = [layer.num_effective_keys for each in every for layer in each.layers]
    spread = f"{human_number(min(keys))} to {human_number(max(keys))}" if keys else ""
    difference = f"vs as trained, {metric.unit}"
    return Table(
        name=f"exchange-{group.name}",
        title=f"What it does to trained models: {group.heading}",
        notes=(
            f"{capital(group.how)}.",
            f"Models were trained with {own}, and the mechanism put in its place between the same projections.",
            Remark(
                f"{difference}: what the same models score with {own} is subtracted, seed by seed.", heading=difference
            ),
            Remark(
                "Error of heads: norm of the difference from what the model's own mechanism gives, over the norm of "
                "that, on what each layer of the trained model makes of test examples; root of the mean square over "
                "layers; before any further update.",
                heading="error of heads",
            ),
            f"Own weights of a row spread over {spread} keys, medians by layer and model.",
            f"{capital(MEAN)}: every row of every head gets it, whatever queries and keys are.",
            BRACKETS,
        ),
        columns=(
            text_column("variant", priority=0),
            interval_column(metric.words, "score", metric.show, priority=0, show_end=metric.end),
            interval_column(difference, "difference", metric.signed, priority=1),
            interval_column("error of heads", "error", error_text, priority=0.5),
            text_column("by layer", "by_layer", priority=3),
            number_column("weights as drawn", "num_new_params", "{:,.0f}".format, priority=2),
            *([text_column("no score", "failed", priority=1.5)] if any(row["failed"] for row in rows) else []),
        ),
        rows=tuple(rows),
    )
