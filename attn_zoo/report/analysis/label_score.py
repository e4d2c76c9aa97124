"""The scores of one label: over seeds, beside the floors, against the baseline, with what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from attn_zoo.report.analysis.floor import TWO_SIDED, Standing, judge, margin, size_error
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.training_runs import Training
from attn_zoo.statistics import mean_interval, paired_difference

__all__ = ["Difference", "LabelScore", "make_label_score", "mean_with_interval", "pair"]

PARAMS_TOLERANCE = 0.1
"""Share by which parameters may differ from the baseline's before it is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One label minus another on the same test set, paired by seed. Positive is more, not necessarily better.

    Args:
        mean: over the seeds that both have.
        low: lower end of the 95 % interval: over seeds, or over test items where only one seed is common.
        high: upper end.
        num_paired: common seeds.
        size_error: standard error that comes from the size of the test set, pairs of answers compared; None where
            single answers were not kept.
    """

    mean: float
    low: float | None
    high: float | None
    num_paired: int
    size_error: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it is more than chance in seeds (three at least) and in the choice of test examples."""
        if self.num_paired < 3 or self.low is None or self.high is None or self.low <= 0.0 <= self.high:
            return False
        return self.size_error is None or abs(self.mean) > TWO_SIDED * self.size_error


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelScore:
    """Scores of one label from one start, with the selected trial; means over seeds.

    Args:
        label: what figures call it.
        start: empty for random weights, else what was learned before.
        name: label, and the start where it is not random.
        runs: of the selected trial, failed ones included.
        trial: its tuned values in words; `num_trials` of them were tried.
        mean: on test, or None where no run finished.
        low: lower end of the 95 % t-interval of the mean; None below two seeds.
        high: upper end.
        size_error: standard error that comes from the size of the test set alone, or None.
        standing: beside chance and floors.
        difference: to the baseline with the same start, or None.
        params_excess: parameters over those of the baseline, minus one.
        is_shared: a run shared its device with others, so times mean little.
    """

    label: str
    start: str
    name: str
    runs: tuple[Training, ...]
    trial: str
    num_trials: int
    mean: float | None
    low: float | None
    high: float | None
    validation: float | None
    size_error: float | None
    standing: Standing | None
    difference: Difference | None
    tokens_per_s: float | None
    train_s: float | None
    train_flops: float | None
    pretrain_s: float | None
    pretrain_flops: float | None
    train_peak_bytes: float | None
    padding_frac: float | None
    num_params: int | None
    params_excess: float | None
    is_shared: bool

    @property
    def values(self) -> dict[int, float]:
        """Test scores by seed; only runs that finished."""
        return {run.seed: run.value for run in self.runs if run.is_scored and run.value is not None}

    @property
    def failures(self) -> tuple[tuple[str, str], ...]:
        """Statuses of the runs that gave no score, with their reasons."""
        return tuple((run.status, run.reason) for run in self.runs if not run.is_scored)

    @property
    def total_s(self) -> float | None:
        """Seconds of training, self-pretraining included."""
        return None if self.train_s is None else self.train_s + (self.pretrain_s or 0.0)

    @property
    def total_flops(self) -> float | None:
        """FLOPs of training, self-pretraining included; None where one of the two is not known."""
        if self.train_flops is None or (self.start and self.pretrain_flops is None):
            return None
        return self.train_flops + (self.pretrain_flops or 0.0)

    @property
    def uncertainty(self) -> float | None:
        """Half the width of the wider interval of the mean: over seeds, or from the size of the test set."""
        return margin(self.low, self.high, self.size_error)

    @property
    def has_other_size(self) -> bool:
        """Whether its parameters are more than a tenth away from the baseline's."""
        return self.params_excess is not None and abs(self.params_excess) > PARAMS_TOLERANCE + 1e-9


def make_label_score(
    key: tuple[str, str],
    runs: tuple[Training, ...],
    baseline: Sequence[Training],
    *,
    metric: Metric,
    chance: float | None,
    floors: Mapping[str, float],
    num_trials: int,
    reference_params: int | None,
    name: str,
    trial: str,
) -> LabelScore:
    """Return the score of `key` (label and start) from the runs of its selected trial.

    Args:
        key: label and start.
        runs: all seeds.
        baseline: runs of the exact label to compare with; empty for itself.
        metric: of the scores.
        chance: what guessing scores.
        floors: what trivial models score.
        num_trials: that were tried.
        reference_params: parameters of the baseline.
        name: label and start in words.
        trial: tuned values of the selected one.
    """
    scored = [run for run in runs if run.is_scored]
    mean, low, high = mean_with_interval([run.value for run in scored if run.value is not None])
    num_examples = max((run.num_examples for run in scored if run.num_examples), default=None)
    error = None if mean is None else size_error(mean, num_examples, metric)
    params = max((run.num_params for run in scored if run.num_params), default=None)
    return LabelScore(
        label=key[0],
        start=key[1],
        name=name,
        runs=runs,
        trial=trial,
        num_trials=num_trials,
        mean=mean,
        low=low,
        high=high,
        validation=_mean(run.validation for run in scored),
        size_error=error,
        standing=None if mean is None else judge(mean, margin(low, high, error), chance, floors, metric),
        difference=pair(scored, baseline),
        tokens_per_s=_mean(run.tokens_per_s for run in scored),
        train_s=_mean(run.train_s for run in scored),
        train_flops=_mean(run.train_flops for run in scored),
        pretrain_s=_mean(run.pretrain_s for run in scored),
        pretrain_flops=_mean(run.pretrain_flops for run in scored),
        train_peak_bytes=max((run.train_peak_bytes for run in scored if run.train_peak_bytes), default=None),
        padding_frac=_mean(run.padding_frac for run in scored),
        num_params=params,
        params_excess=params / reference_params - 1.0 if params and reference_params else None,
        is_shared=any(run.num_jobs > 1 for run in scored),
    )


def pair(runs: Sequence[Training], others: Sequence[Training]) -> Difference | None:
    """Return `runs` minus `others`, paired by seed, or None without a common seed that finished."""
    own, other = ({run.seed: run for run in found if run.is_scored} for found in (runs, others))
    seeds = sorted(set(own) & set(other))
    differences = [(own[seed].value or 0.0) - (other[seed].value or 0.0) for seed in seeds]
    mean, low, high = mean_with_interval(differences)
    if mean is None:
        return None
    marks = [(own[seed].correct, other[seed].correct) for seed in seeds]
    error = None
    if all(first and len(first) == len(second) == len(marks[0][0]) for first, second in marks):
        gaps = np.mean([_digits(first) - _digits(second) for first, second in marks], axis=0)
        error = float(gaps.std(ddof=1) / len(gaps) ** 0.5) if len(gaps) > 1 else None
        if len(seeds) == 1:
            found = paired_difference(*marks[0])
            low, high = found.low, found.high
    return Difference(mean=mean, low=low, high=high, num_paired=len(seeds), size_error=error)


def _digits(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.float64) - ord("0")


def mean_with_interval(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return mean and 95 % t-interval: nothing for no value, no interval for one."""
    if not values:
        return None, None, None
    low, high = mean_interval(values) or (None, None)
    return fmean(values), low, high


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
