"""Tuning: which of the trials of one label counts. The choice looks at validation only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.training_runs import TrainingRun

__all__ = ["Trial", "make_trials", "unequal_trials"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """All seeds of one label with one choice of the tuned settings.

    Args:
        values: of the tuned settings, by name.
        runs: every seed, failed ones included.
        validation: mean over the seeds that finished, or None where none did.
        is_selected: the one whose test score is reported.
    """

    values: Mapping[str, Any]
    runs: tuple[TrainingRun, ...]
    validation: float | None
    is_selected: bool = False

    @property
    def words(self) -> str:
        """Return the values, such as `base_lr=0.001`."""
        return ", ".join(f"{name}={value}" for name, value in sorted(self.values.items()))

    @property
    def scored(self) -> tuple[TrainingRun, ...]:
        """Seeds that finished."""
        return tuple(run for run in self.runs if run.score)


def make_trials(runs: Sequence[TrainingRun], metric: Metric) -> tuple[Trial, ...]:
    """Return the trials of one label, one of them selected: the best mean validation among those with most seeds.

    A trial of which a seed failed does not win over one of which none did, because its mean leaves out its failure.
    """
    by_values: dict[str, list[TrainingRun]] = {}
    for run in runs:
        by_values.setdefault(run.trial, []).append(run)
    found = []
    for values, members in sorted(by_values.items(), key=lambda item: _order(json.loads(item[0]))):
        validations = [run.score.validation for run in members if run.score]
        found.append((json.loads(values), tuple(members), fmean(validations) if validations else None))
    most = max(sum(run.score is not None for run in members) for _, members, _ in found)
    able = [
        (metric.order(validation), place)
        for place, (_, members, validation) in enumerate(found)
        if sum(run.score is not None for run in members) == most
    ]
    best = min(able)[1]
    return tuple(
        Trial(values=values, runs=members, validation=validation, is_selected=place == best)
        for place, (values, members, validation) in enumerate(found)
    )


def _order(values: Mapping[str, Any]) -> list[tuple[str, bool, float, str]]:
    """Return a key that sorts numbers by size and everything else by its text."""
    return [
        (name, not isinstance(value, int | float), value if isinstance(value, int | float) else 0.0, str(value))
        for name, value in sorted(values.items())
    ]


def unequal_trials(title: str, trials: Mapping[str, Sequence[Trial]]) -> str:
    """Return a warning where not every label got the same trials, or an empty string.

    Args:
        title: of the group.
        trials: by label, those that could run at all.
    """
    counts = {name: len(found) for name, found in trials.items()}
    if not counts:
        return ""
    choices = {name: {json.dumps(dict(trial.values), sort_keys=True) for trial in trials[name]} for name in counts}
    if len({frozenset(found) for found in choices.values()}) == 1:
        return ""
    most = max(counts.values())
    fewer = [f"{name} {count}" for name, count in counts.items() if count < most]
    if not fewer:
        return f"{title}: tuned with different trials for different variants, so the comparison is not fair"
    return (
        f"{title}: tuned with unequal numbers of trials (most {most}; {', '.join(fewer)}), so the comparison favours "
        "those with more"
    )
