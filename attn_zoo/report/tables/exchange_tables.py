"""What became of trained models when another mechanism took the place of their own: scores beside errors of heads."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from attn_zoo.records import EQUAL_WEIGHTS, Replacement
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore, mean_with_interval
from attn_zoo.report.tables.error_tables import MEAN, error_text
from attn_zoo.report.tables.score_tables import group_table, mean_values
from attn_zoo.report.tables.table import (
    BRACKETS,
    Remark,
    Table,
    interval_column,
    interval_values,
    number_column,
    text_column,
)
from attn_zoo.units import capital, human_number


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
    every = [each for score in group.scores for _, each in exchanges(score)]
    if not every:
        return None
    rows: list[dict[str, Any]] = []
    for score in group.ranked:
        found = exchanges(score)
        lost = mean_with_interval([value - each.trained_value for value, each in found])
        layers = list(zip(*([layer.error for layer in each.layers] for _, each in found), strict=False))
        rows.append(
            {
                "variant": score.name,
                **mean_values("score", score),
                **interval_values("difference", *lost),
                **interval_values("error", *head_error(score)),
                "by_layer": ", ".join(error_text(fmean(own)) for own in layers),
                "num_new_params": max((each.num_new_params for _, each in found), default=None),
                "failed": score.trial.failed,
            }
        )
    metric, own = group.metric, group.setting.replaces
    control = {
        "variant": MEAN,
        "score": group.floors[EQUAL_WEIGHTS],
        "error": fmean(each.mean_error for each in every),
    }
    rows.append(dict.fromkeys(rows[0]) | control)
    keys = [layer.num_effective_keys for each in every for layer in each.layers]
    spread = f"{human_number(min(keys))} to {human_number(max(keys))}"
    difference = f"vs as trained, {metric.unit}"
    return group_table(
        group,
        "exchange",
        "What it does to trained models",
        notes=(
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
            text_column("no score", "failed", priority=1.5),
        ),
        rows=rows,
    )
