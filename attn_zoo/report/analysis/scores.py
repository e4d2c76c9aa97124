"""Training results over seeds: mean with interval, where it stands beside the floors, difference to the baseline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np

from attn_zoo.records import Record
from attn_zoo.report.analysis.floor import TWO_SIDED, Standing, judge, ranked_marks, size_error, size_interval
from attn_zoo.report.analysis.grouping import grouped, varying
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.observations import NOT_RUN, Results
from attn_zoo.report.analysis.training_runs import (
    Setting,
    TrainingRun,
    Trial,
    by_seed,
    group_training_runs,
    make_trials,
    repeated_seeds,
    unequal_trials,
)
from attn_zoo.report.measurements import COSTS
from attn_zoo.statistics.paired import mean_interval, paired_interval
from attn_zoo.units import MINUS, slug, unique_name

LEAST_SEEDS = 3
"""In common, below which no difference is called settled."""

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
            single answers were not kept. Where an example has several scored items, they count as one answer: items
            of one example are not independent.
    """

    mean: float
    low: float | None
    high: float | None
    num_paired: int
    size_error: float | None = None

    @property
    def half(self) -> float | None:
        """How far it may be off by the draw of seeds and the choice of test examples together, in 19 of 20 cases.

        Of several seeds; None without an interval. Seeds share their test set, so that their spread does not see which
        examples it has, and the errors of both add up: beyond each of the two for itself are, of models that are
        equally good, 9 % with five seeds and 12 % with ten, where both errors are equal. The root of their squares'
        sum is cautious, for what the same weights get wrong by chance is in both.
        """
        if self.low is None or self.high is None:
            return None
        over_seeds = max(self.mean - self.low, self.high - self.mean)  # the wider: the other may end at a bound
        return math.hypot(over_seeds, TWO_SIDED * (self.size_error or 0.0))

    @property
    def is_settled(self) -> bool:
        """Whether it is more than chance in seeds (three at least) and in the choice of test examples together."""
        return self.num_paired >= LEAST_SEEDS and self.half is not None and abs(self.mean) > self.half


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelScore:
    """Scores of one label from one start, with the selected trial; means over seeds.

    Args:
        label: of the mechanism.
        start: empty for random weights, else what was learned before.
        name: label, and the start where it is not random.
        trial: the selected one; `num_trials` of them were tried.
        mean: on test, or None where no run finished.
        low: lower end of the 95 % t-interval of the mean; None below two seeds.
        high: upper end.
        ends: of what figures draw: that interval, or of one seed the one from the size of the test set alone.
        size_error: standard error that comes from the size of the test set alone, or None.
        standing: beside chance and floors.
        difference: to the baseline with the same start, or None.
        params_excess: parameters over those of the baseline, minus one.
        costs: see `attn_zoo.report.measurements.COSTS`, by name.
    """

    label: str
    start: str
    name: str
    trial: Trial
    num_trials: int
    mean: float | None
    low: float | None
    high: float | None
    ends: tuple[float, float] | None
    size_error: float | None
    standing: Standing | None
    difference: Difference | None
    params_excess: float | None
    costs: Mapping[str, float | None]

    @property
    def runs(self) -> tuple[TrainingRun, ...]:
        """Every seed of the trial, failed ones included."""
        return self.trial.runs

    @property
    def values(self) -> dict[int, float]:
        """Test scores by seed; only runs that finished."""
        return {run.seed: run.score.value for run in self.runs if run.score}

    @property
    def failed_seeds(self) -> frozenset[int]:
        """Seeds that were run and gave no score."""
        return frozenset(run.seed for run in self.runs if run.record.status != NOT_RUN).difference(self.values)

    @property
    def records(self) -> tuple[Record, ...]:
        """Of every seed."""
        return tuple(run.record for run in self.runs)

    @property
    def is_shared(self) -> bool:
        """Whether a run shared its device with others, so that times mean little."""
        return any(run.record.num_jobs > 1 for run in self.runs if run.score)

    @property
    def other_size(self) -> str:
        """By how much its parameters differ from the baseline's, in words; empty where that is a tenth or less."""
        excess = self.params_excess or 0.0
        if abs(excess) <= PARAMS_TOLERANCE + 1e-9:
            return ""
        return f"{'+' if excess > 0 else MINUS}{100 * abs(excess):.0f} %"

    @property
    def sized_name(self) -> str:
        """Its name, with that behind it."""
        return f"{self.name} (params {self.other_size})" if self.other_size else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyGroup:
    """Scores that may be compared: the same task, level, protocol and data.

    Args:
        setting: what they share.
        title: task and level, for people, with what tells the group from others of them.
        task_title: task and level alone.
        how: protocol, what was changed in it, dtype and device.
        name: for file names.
        metric: of all scores.
        chance: what guessing scores, or None where no run finished.
        floors: what trivial models score, by name.
        marks: these and chance, the best last.
        references: what further models score that need no attention; no row is judged by them.
        scores: ordered by label, from scratch first.
        trials: what was tuned, by label and start; one trial each where nothing was.
        baseline: label of the exact variant that differences refer to, or empty.
        num_examples: in the test set.
        num_machines: that the runs were made on.
        warnings: what makes the comparison doubtful.
    """

    setting: Setting
    title: str
    task_title: str
    how: str
    name: str
    metric: Metric
    chance: float | None
    floors: Mapping[str, float]
    marks: dict[str, float]
    references: Mapping[str, float]
    scores: tuple[LabelScore, ...]
    trials: Mapping[tuple[str, str], tuple[Trial, ...]]
    baseline: str
    num_examples: int | None
    num_machines: int
    warnings: tuple[str, ...]

    @property
    def heading(self) -> str:
        """Return task, level and protocol: what titles of tables end with. Their notes have the rest of the setting."""
        protocol = self.setting.protocol
        return self.title if f"protocol {protocol}" in self.title else f"{self.title}, {protocol}"

    @property
    def ranked(self) -> list[LabelScore]:
        """Scores, best first, those without any last."""
        return sorted(self.scores, key=lambda score: (self.metric.order(score.mean), score.name))

    @property
    def means(self) -> dict[str, float]:
        """The mean scores that there are, by name, best first."""
        return {score.name: score.mean for score in self.ranked if score.mean is not None}

    @property
    def starts(self) -> tuple[str, ...]:
        """What models had learned before, random weights first."""
        return tuple(sorted({score.start for score in self.scores}))

    @property
    def best_mark(self) -> tuple[str, float] | None:
        """Name and score of the best of chance and floors; None where neither is known."""
        return next(reversed(self.marks.items()), None)

    @property
    def is_shared(self) -> bool:
        """Whether any of the runs shared its device, so that times mean little."""
        return any(score.is_shared for score in self.scores)

    def words_of(self, start: str) -> str:
        """Say what the weights were before training: random, learned before, or those of models with a mechanism."""
        return start or self.setting.exchange or "scratch"

    def find(self, label: str, start: str = "") -> LabelScore | None:
        """Return the score of one label."""
        return next((score for score in self.scores if (score.label, score.start) == (label, start)), None)


def make_accuracy_groups(results: Results) -> list[AccuracyGroup]:
    """Return one group for each task, level, protocol and data set, in a stable order."""
    groups = []
    names: set[str] = set()
    every = group_training_runs(results)
    alike = grouped((setting for setting, _ in every), _kind_of)
    for setting, runs in every:
        name = slug(
            *(setting.task, setting.level, setting.protocol, "causal" if setting.is_causal else "", setting.exchange)
        )
        others = [asdict(one) for one in alike[_kind_of(setting)]]
        apart = varying(Setting.__slots__, others) | {"replaces"}  # a title says it always
        groups.append(_group(setting, runs, results, unique_name(name, names), apart))
    return groups


def _kind_of(setting: Setting) -> tuple[str, bool]:
    """Return what groups must have in common for a title to tell them apart: a replacement says always that it is."""
    return _task_title(setting), bool(setting.replaces)


def _task_title(setting: Setting, apart: Container[str] = ()) -> str:
    """Return task and level, with those settings that tell the group from others of them."""
    said = [setting.level, "causal" if setting.is_causal else "", *setting.words(apart)]
    details = ", ".join(filter(None, said))
    return f"{setting.task} ({details})" if details else setting.task


_HOW = ("protocol", "overrides", "tuned", "dtype", "device", "data_parallel", "threads")


def _means(marks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the runs that have it."""
    names = sorted({name for own in marks for name in own})
    return {name: fmean(own[name] for own in marks if name in own) for name in names}


def _group(
    setting: Setting, every: Sequence[TrainingRun], results: Results, name: str, apart: Container[str]
) -> AccuracyGroup:
    seeds = by_seed(every)
    runs = [own[-1] for own in seeds]
    scores = [run.score for run in runs if run.score]
    metric = Metric(scores[0].metric if scores else "score")
    members = grouped(runs, lambda run: (run.label, run.start))
    trials = {key: make_trials(own, metric) for key, own in sorted(members.items())}
    chosen = {key: next(trial for trial in own if trial.is_selected) for key, own in trials.items()}
    baseline = setting.replaces if (setting.replaces, "") in chosen else _baseline(chosen, results)
    has_kinds = len({start for _, start in trials if start}) > 1
    names = {
        (label, start): f"{label} (self-pretrained{f', {start}' if has_kinds else ''})" if start else label
        for label, start in trials
    }
    ran = {names[key]: trials[key] for key in trials if any(run.record.status != "unsupported" for run in members[key])}
    title = _task_title(setting, apart)
    chance = fmean(score.chance for score in scores) if scores else None
    floors = _means([score.floors for score in scores])
    marks = ranked_marks(floors, chance, metric)
    return AccuracyGroup(
        setting=setting,
        title=title,
        task_title=_task_title(setting),
        how=", ".join(setting.words(_HOW)),
        name=name,
        metric=metric,
        chance=chance,
        floors=floors,
        marks=marks,
        references=_means([score.references for score in scores]),
        scores=tuple(
            _label_score(
                names[key],
                chosen[key],
                chosen.get((baseline, key[1])),
                num_trials=len(trials[key]),
                metric=metric,
                marks=marks,
            )
            for key in trials
        ),
        trials=trials,
        baseline=baseline,
        num_examples=max((score.num_examples for score in scores if score.num_examples), default=None),
        num_machines=len({run.environment for run in runs if run.score}),
        warnings=tuple(filter(None, (unequal_trials(ran), repeated_seeds(seeds, names)))),
    )


def _baseline(chosen: Mapping[tuple[str, str], Trial], results: Results) -> str:
    """Return the exact label with most seeds (the first by name among equals)."""
    seeds: Counter[str] = Counter()
    for (label, _), trial in chosen.items():
        if results.claim(trial.runs[0].cell.variant).is_exact:
            seeds[label] += len(trial.scored)
    return max((label for label in seeds if seeds[label]), key=seeds.__getitem__, default="")


def _label_score(
    name: str, trial: Trial, baseline: Trial | None, *, num_trials: int, metric: Metric, marks: Mapping[str, float]
) -> LabelScore:
    """Return the score of a label and start from its selected trial, beside that of the baseline with this start."""
    scores = [run.score for run in trial.runs if run.score]
    mean, low, high = mean_with_interval([score.value for score in scores])
    num_settling = max((score.num_settling for score in scores), default=None)
    error = None if mean is None else size_error(mean, num_settling, metric)
    ends = None if low is None or high is None else (low, high)
    if ends is None and mean is not None:
        ends = size_interval(mean, num_settling, metric)
    params, other_params = (
        max((run.score.num_params for run in own.runs if run.score), default=0) if own else 0
        for own in (trial, baseline)
    )
    return LabelScore(
        label=trial.runs[0].label,
        start=trial.runs[0].start,
        name=name,
        trial=trial,
        num_trials=num_trials,
        mean=mean,
        low=metric.inside(low),
        high=metric.inside(high),
        ends=ends and (metric.inside(ends[0]), metric.inside(ends[1])),
        size_error=error,
        standing=None if mean is None else judge(mean, low, high, num_settling, marks, metric),
        difference=pair(trial.runs, baseline.runs) if baseline and baseline is not trial else None,
        params_excess=params / other_params - 1.0 if params and other_params else None,
        costs={cost.name: cost.pooled(run.record for run in trial.scored) for cost in COSTS},
    )


def pair(runs: Sequence[TrainingRun], others: Sequence[TrainingRun]) -> Difference | None:
    """Return `runs` minus `others`, paired by seed, or None without a common seed that finished."""
    own, other = ({run.seed: run.score for run in side if run.score} for side in (runs, others))
    seeds = sorted(set(own) & set(other))
    mean, low, high = mean_with_interval([own[seed].value - other[seed].value for seed in seeds])
    if mean is None:
        return None
    marks = [(own[seed].correct, other[seed].correct) for seed in seeds]
    error = None
    if all(first and len(first) == len(second) == len(marks[0][0]) for first, second in marks):
        gaps = np.mean([_digits(first) - _digits(second) for first, second in marks], axis=0)
        count = min(len(gaps), own[seeds[0]].num_settling)
        error = float(gaps.std(ddof=1) / count**0.5) if count > 1 else None
        if len(seeds) == 1 and count == len(gaps):
            low, high = paired_interval(*marks[0])
        elif len(seeds) == 1 and error is not None:
            low, high = mean - TWO_SIDED * error, mean + TWO_SIDED * error
    least, most = Metric(own[seeds[0]].metric).bounds  # two seeds alone give intervals wider than two scores can differ
    low, high = (None if end is None else min(max(end, least - most), most - least) for end in (low, high))
    return Difference(mean=mean, low=low, high=high, num_paired=len(seeds), size_error=error)


def _digits(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.float64) - ord("0")


def mean_with_interval(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return mean and 95 % t-interval: nothing for no value, no interval for one."""
    if not values:
        return None, None, None
    low, high = mean_interval(values) or (None, None)
    return fmean(values), low, high
