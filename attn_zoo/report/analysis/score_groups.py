"""Training results over seeds: mean with interval, where it stands beside the floors, difference to the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from attn_zoo.report.analysis.label_score import LabelScore, make_label_score
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.observations import Results
from attn_zoo.report.analysis.training_runs import Setting, Training, group_trainings
from attn_zoo.report.analysis.trials import Trial, make_trials, unequal_trials
from attn_zoo.report.units import slug

__all__ = ["AccuracyGroup", "make_accuracy_groups"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyGroup:
    """Scores that may be compared: the same task, level, protocol and data.

    Args:
        setting: what they share.
        title: task and level, for people.
        how: protocol, what was changed in it, dtype and device.
        name: for file names.
        metric: of all scores.
        chance: what guessing scores, or None where no run finished.
        floors: what trivial models score, by name.
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
    how: str
    name: str
    metric: Metric
    chance: float | None
    floors: Mapping[str, float] = field(default_factory=dict)
    references: Mapping[str, float] = field(default_factory=dict)
    scores: tuple[LabelScore, ...] = ()
    trials: Mapping[tuple[str, str], tuple[Trial, ...]] = field(default_factory=dict)
    baseline: str = ""
    num_examples: int | None = None
    num_machines: int = 1
    warnings: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """Return task, level and protocol: what titles of tables end with. Their notes have the rest of the setting."""
        return f"{self.title}, {self.setting.protocol}"

    @property
    def ranked(self) -> list[LabelScore]:
        """Scores, best first, those without any last."""
        return sorted(self.scores, key=lambda score: (self.metric.order(score.mean), score.name))

    @property
    def starts(self) -> tuple[str, ...]:
        """What models had learned before, random weights first."""
        return tuple(sorted({score.start for score in self.scores}))

    @property
    def marks(self) -> dict[str, float]:
        """Chance and floors by name, worst first."""
        found = dict(self.floors) | ({"chance": self.chance} if self.chance is not None else {})
        return dict(sorted(found.items(), key=lambda mark: self.metric.order(mark[1]), reverse=True))

    @property
    def is_shared(self) -> bool:
        """Whether any of the runs shared its device, so that times mean little."""
        return any(score.is_shared for score in self.scores)

    def find(self, label: str, start: str = "") -> LabelScore | None:
        """Return the score of one label."""
        return next((score for score in self.scores if (score.label, score.start) == (label, start)), None)


def make_accuracy_groups(results: Results) -> list[AccuracyGroup]:
    """Return one group for each task, level, protocol and data set, in a stable order."""
    groups = []
    taken: dict[str, int] = {}
    for setting, runs in group_trainings(results):
        parts = (setting.task, setting.level, setting.protocol, "causal" if setting.is_causal else "")
        name = slug(*(part for part in parts if part))
        taken[name] = taken.get(name, 0) + 1
        suffix = f"-{taken[name]}" if taken[name] > 1 else ""
        groups.append(_group(setting, runs, results, name + suffix))
    return groups


def _title(setting: Setting) -> str:
    details = ", ".join([part for part in (setting.level,) if part] + ["causal"] * setting.is_causal)
    return f"{setting.task} ({details})" if details else setting.task


def _how(setting: Setting) -> str:
    tuned = [f"tuned: {', '.join(setting.tuned)}"] if setting.tuned else []
    changes = [f"{option}={value}" for option, value in setting.changes.items()]
    threads = [f"{setting.threads} thread{'s' if setting.threads != 1 else ''}"] if setting.threads else []
    machine = [setting.dtype, setting.device.upper(), *threads]
    return ", ".join([f"protocol {setting.protocol}", *changes, *tuned, *machine])


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the runs that have it."""
    values: dict[str, list[float]] = {}
    for one in found:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(values[name]) for name in sorted(values)}


def _group(setting: Setting, runs: list[Training], results: Results, name: str) -> AccuracyGroup:
    scored = [run for run in runs if run.is_scored]
    metric = Metric(scored[0].metric if scored else next((run.metric for run in runs if run.metric), "score"))
    members: dict[tuple[str, str], list[Training]] = {}
    for run in runs:
        members.setdefault((run.label, run.start), []).append(run)
    trials = {key: make_trials(found, metric) for key, found in members.items()}
    chosen = {key: next(trial for trial in found if trial.is_selected).runs for key, found in trials.items()}
    chances = [run.chance for run in scored if run.chance is not None]
    chance = fmean(chances) if chances else None
    means = _means([run.floors for run in scored])
    baseline = _baseline(chosen, results)
    title = _title(setting)
    ran = {key: found for key, found in trials.items() if any(run.status != "unsupported" for run in members[key])}
    has_kinds = len({start for _, start in trials if start}) > 1
    warning = unequal_trials(title, {_name(key, has_kinds=has_kinds): found for key, found in ran.items()})
    return AccuracyGroup(
        setting=setting,
        title=title,
        how=_how(setting),
        name=name,
        metric=metric,
        chance=chance,
        floors=means,
        references=_means([run.references for run in scored]),
        scores=tuple(
            make_label_score(
                key,
                chosen[key],
                chosen.get((baseline, key[1]), ()) if baseline != key[0] else (),
                metric=metric,
                chance=chance,
                floors=means,
                num_trials=len(trials[key]),
                reference_params=_params(chosen.get((baseline, key[1]), ())),
                name=_name(key, has_kinds=has_kinds),
                trial=next(trial for trial in trials[key] if trial.is_selected).words,
            )
            for key in sorted(trials)
        ),
        trials=trials,
        baseline=baseline,
        num_examples=max((run.num_examples for run in scored if run.num_examples), default=None),
        num_machines=len({run.environment for run in scored}),
        warnings=(warning,) if warning else (),
    )


def _name(key: tuple[str, str], *, has_kinds: bool) -> str:
    label, start = key
    return f"{label} (self-pretrained{f', {start}' if has_kinds else ''})" if start else label


def _params(runs: tuple[Training, ...]) -> int | None:
    return max((run.num_params for run in runs if run.num_params), default=None)


def _baseline(chosen: Mapping[tuple[str, str], tuple[Training, ...]], results: Results) -> str:
    """Return the exact label with most seeds (the first by name among equals)."""
    seeds: dict[str, int] = {}
    for (label, _), runs in sorted(chosen.items()):
        claim = results.claim(runs[0].variant)
        if claim is not None and claim.is_exact:
            seeds[label] = seeds.get(label, 0) + sum(run.is_scored for run in runs)
    able = [label for label, count in seeds.items() if count]
    return max(able, key=lambda label: seeds[label]) if able else ""
