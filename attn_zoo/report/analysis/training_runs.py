"""Training runs: sorted into groups whose scores may be compared, and which trial of a tuned label counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from attn_zoo.errors import counted
from attn_zoo.records import Cell, Record, Score
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.observations import Observation, Results
from attn_zoo.report.wording import outcome

PRETRAINING = "pretrain"
"""The setting that says what is learned before, and what the names of all others of self-pretraining begin with. Runs
that differ in those only stand side by side, whether a matrix sets them or tries several: none is tuned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What must agree before two scores may stand in one table.

    Args:
        task: with `level` and the digest of its data.
        protocol: with `overrides` (as JSON; neither tuned ones nor those of self-pretraining) and its version.
        replaces: mechanism of the trained models in whose place the variants were put; empty where these were trained.
        adapt_steps: updates that the models made afterwards.
        tuned: names of the settings that the matrix tuned, none of self-pretraining: tuned and untuned results are not
            mixed.
    """

    task: str
    level: str
    protocol: str
    overrides: str
    tuned: tuple[str, ...]
    is_causal: bool
    dtype: str
    device: str
    threads: int | None
    data_parallel: int
    data_digest: str
    replaces: str = ""
    adapt_steps: int = 0
    protocol_version: int

    @property
    def changes(self) -> dict[str, Any]:
        """Overrides by name."""
        return dict(json.loads(self.overrides))

    @property
    def training_version(self) -> int:
        """How these models were trained; hundreds count how a mechanism was replaced in them (`records`)."""
        return self.protocol_version % 100

    @property
    def exchange(self) -> str:
        """Say in whose place the variants are, and after how many updates; empty where models train with them."""
        if not self.replaces:
            return ""
        later = f", after {self.adapt_steps:,} updates" if self.adapt_steps else ""
        return f"in place of {self.replaces}{later}"

    def words(self, names: Container[str]) -> list[str]:
        """Return what is to be said of those of `names` that say anything."""
        words = {
            "protocol": [f"protocol {self.protocol}"],
            "overrides": [f"{option}={value}" for option, value in self.changes.items()],
            "dtype": [self.dtype],
            "device": [self.device.upper()],
            "data_parallel": [f"{self.data_parallel} processes"] if self.data_parallel > 1 else [],
            "threads": [counted(self.threads, "thread")] if self.threads else [],
            "protocol_version": [f"training version {self.training_version}"],
            "tuned": [f"tuned: {', '.join(self.tuned)}"] if self.tuned else [],
            "data_digest": [f"data {self.data_digest[:6] or 'unknown'}"],
            "replaces": [self.exchange] if self.exchange else [],
        }
        return [word for name, own in words.items() if name in names for word in own]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun(Observation):
    """One training run.

    Args:
        start: what the weights were before training: empty for random ones, else what was learned before.
        trial: values of the tuned settings, as JSON; `{}` where nothing was tuned.
    """

    start: str
    trial: str

    @property
    def seed(self) -> int:
        """Of initialisation and data order."""
        return self.cell.seed

    @property
    def score(self) -> Score | None:
        """What it scored, or None where it did not finish."""
        return self.record.score if self.record.status == "ok" else None


def group_training_runs(results: Results) -> list[tuple[Setting, list[TrainingRun]]]:
    """Return all training runs, by setting in a stable order; of a cell that occurs twice, the last."""
    every = [one for one in (*results.observations, *results.left) if one.is_training]
    last = {one.cell.key: one for one in every}
    by_setting = grouped((one for one in every if last[one.cell.key] is one), lambda one: _setting(one.cell))
    order = sorted(by_setting, key=lambda setting: tuple(str(getattr(setting, name)) for name in setting.__slots__))
    return [(setting, _runs(by_setting[setting])) for setting in order]


def _parts(cell: Cell) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the overrides of a cell in three: tuned, of self-pretraining, and the rest."""
    before = {name: value for name, value in cell.overrides.items() if name.startswith(PRETRAINING)}
    other = {name: value for name, value in cell.overrides.items() if name not in before}
    tuned = {name: value for name, value in other.items() if name in cell.grid}
    return tuned, before, {name: value for name, value in other.items() if name not in tuned}


def _setting(cell: Cell) -> Setting:
    return Setting(
        task=str(cell.task),
        level=cell.level or "",
        protocol=cell.protocol or "",
        overrides=json.dumps(_parts(cell)[2], sort_keys=True),
        tuned=tuple(sorted(name for name in cell.grid if not name.startswith(PRETRAINING))),
        is_causal=cell.is_causal,
        dtype=cell.dtype,
        device=cell.device,
        threads=cell.threads,
        data_parallel=cell.data_parallel,
        protocol_version=cell.protocol_version,
        data_digest=cell.data_digest,
        replaces=cell.replaces,
        adapt_steps=cell.adapt_steps,
    )


def _runs(members: Sequence[Observation]) -> list[TrainingRun]:
    runs = [
        TrainingRun(
            record=one.record,
            run=one.run,
            environment=one.environment,
            label=one.label,
            start=start,
            trial=json.dumps(_parts(one.cell)[0], sort_keys=True),
        )
        for one, start in zip(members, _starts([one.record for one in members]), strict=True)
    ]
    return sorted(runs, key=lambda run: (run.label, run.start, run.trial, run.seed))


def _starts(records: Sequence[Record]) -> list[str]:
    """Return for each run what the model had learned before; its settings distinguish several ways of pretraining.

    A run that failed left no score to say so: it learned what finished ones did that asked for the same, or what it
    asked for where there is none.
    """
    before = [_parts(record.cell)[1] for record in records]
    keys = [json.dumps(settings, sort_keys=True) for settings in before]
    # None where nothing was asked for: then it is what the protocol says, which is the same for all.
    asked = [settings.get(PRETRAINING) for settings in before]
    learned = [record.score.pretrain if record.status == "ok" and record.score else None for record in records]
    known = {what: kind for what, kind in zip(asked, learned, strict=True) if kind is not None}
    kinds = [
        known.get(what, str(what or "")) if kind is None else kind for what, kind in zip(asked, learned, strict=True)
    ]
    ways = {kind: {key for key, other in zip(keys, kinds, strict=True) if other == kind} for kind in kinds}
    return [
        f"{kind}: {', '.join(f'{name}={value}' for name, value in sorted(settings.items()))}"
        if kind and len(ways[kind]) > 1
        else kind
        for kind, settings in zip(kinds, before, strict=True)
    ]


def by_seed(runs: Sequence[TrainingRun]) -> list[list[TrainingRun]]:
    """Return the runs of each label, start, trial and seed, the one that counts last: the latest that finished.

    There are several where cells differ only in what trains no other model, such as settings of a pretraining that did
    not take place. They are one seed: a repetition says nothing about chance.
    """
    same = grouped(runs, lambda run: (run.label, run.start, run.trial, run.seed))
    return [sorted(own, key=lambda run: (run.score is not None, run.record.started)) for own in same.values()]


def repeated_seeds(seeds: Sequence[Sequence[TrainingRun]], names: Mapping[tuple[str, str], str]) -> str:
    """Return a warning that names the seeds of which there is more than one cell; else nothing.

    Args:
        seeds: see `by_seed`.
        names: of each label and start.
    """
    repeated = grouped(
        (own[0] for own in seeds if len(own) > 1),
        lambda run: (names[run.label, run.start], _words(json.loads(run.trial))),
    )
    said = [
        " ".join([*filter(None, name), "seed" if len(own) == 1 else "seeds", ", ".join(str(run.seed) for run in own)])
        for name, own in repeated.items()
    ]
    rule = "more than one cell of one seed, of which the latest that finished counts"
    return f"{rule}: {'; '.join(said)}" if said else ""


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(values.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """All seeds of one label with one choice of the tuned settings.

    Args:
        values: of the tuned settings, by name.
        runs: every seed, failed ones included.
        is_selected: the one whose test score is reported.
    """

    values: Mapping[str, Any]
    runs: tuple[TrainingRun, ...]
    is_selected: bool = False

    @property
    def words(self) -> str:
        """Return the values, such as `base_lr=0.001`."""
        return _words(self.values)

    @property
    def scored(self) -> tuple[TrainingRun, ...]:
        """Seeds that finished."""
        return tuple(run for run in self.runs if run.score)

    @property
    def failures(self) -> tuple[str, ...]:
        """Statuses of the runs that gave no score."""
        return tuple(run.record.status for run in self.runs if not run.score)

    @property
    def failed(self) -> str:
        """What became of these, in words, such as `diverged 1 of 3`: all runs are counted."""
        counts = Counter(outcome(status).word for status in self.failures)
        return ", ".join(f"{word} {count} of {len(self.runs)}" for word, count in sorted(counts.items()))

    @property
    def validation(self) -> float | None:
        """Mean over the seeds that finished, or None where none did."""
        values = [run.score.validation for run in self.runs if run.score]
        return fmean(values) if values else None


def make_trials(runs: Sequence[TrainingRun], metric: Metric) -> tuple[Trial, ...]:
    """Return the trials of one label, one of them selected: the best mean validation among those with most seeds.

    A trial of which a seed failed does not win over one of which none did, because its mean leaves out its failure.
    """
    trials = [
        Trial(values=json.loads(text), runs=tuple(members))
        for text, members in grouped(runs, lambda run: run.trial).items()
    ]
    trials.sort(key=lambda trial: _order(trial.values))
    most = max(len(trial.scored) for trial in trials)
    able = [trial for trial in trials if len(trial.scored) == most]
    best = min(able, key=lambda trial: metric.order(trial.validation))
    return tuple(replace(trial, is_selected=trial is best) for trial in trials)


def _order(values: Mapping[str, Any]) -> list[tuple[str, bool, float, str]]:
    """Return a key that sorts numbers by size and everything else by its text."""
    return [
        (name, not isinstance(value, int | float), value if isinstance(value, int | float) else 0.0, str(value))
        for name, value in sorted(values.items())
    ]


def unequal_trials(trials: Mapping[str, Sequence[Trial]]) -> str:
    """Return a warning where not every label, of those that could run at all, got the same trials; else nothing."""
    choices = {name: {json.dumps(dict(trial.values), sort_keys=True) for trial in own} for name, own in trials.items()}
    if len(set(map(frozenset, choices.values()))) < 2:
        return ""
    most = max(len(own) for own in trials.values())
    fewer = [f"{name} {len(own)}" for name, own in trials.items() if len(own) < most]
    if not fewer:
        return "tuned with different trials for different variants, so the comparison is not fair"
    return (
        f"tuned with unequal numbers of trials (most {most}; {', '.join(fewer)}), so the comparison favours "
        "those with more"
    )
