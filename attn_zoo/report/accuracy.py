"""Training results over seeds: mean with interval, floors, and the difference to the exact baseline paired by seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import pandas as pd

from attn_zoo.report.load import Results
from attn_zoo.report.units import slug
from attn_zoo.statistics import mean_interval, paired_difference

__all__ = ["AccuracyGroup", "LabelScore", "make_accuracy_groups"]

GROUP_FIELDS = ("task", "level", "protocol", "overrides", "data_digest", "dtype", "device", "protocol_version")
"""What must agree before two scores may stand in one table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelScore:
    """Scores of one label over seeds.

    Args:
        values: by seed; only runs that finished.
        mean: over seeds, or None where no run finished.
        low: lower end of the 95 % t-interval of the mean; None below two seeds.
        high: upper end.
        difference: mean over common seeds of (this minus baseline), or None without a baseline.
        difference_low: lower end of its 95 % interval: over seeds, or over test examples where only one seed is common.
        difference_high: upper end.
        num_paired: common seeds.
        failures: statuses of the runs that gave no score, with their reasons.
        tokens_per_s: mean training throughput.
        num_params: trainable parameters.
    """

    label: str
    values: dict[int, float]
    mean: float | None
    low: float | None
    high: float | None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    num_paired: int = 0
    failures: tuple[tuple[str, str], ...] = ()
    tokens_per_s: float | None = None
    train_s: float | None = None
    num_params: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyGroup:
    """Scores that may be compared: the same task, level, protocol and data.

    Args:
        title: task and level, for people.
        setting: protocol, what was changed in it, dtype and device.
        name: for file names.
        chance: what guessing scores, or None where no run finished.
        floors: what trivial models score, by name.
        scores: ordered by label.
        baseline: label of the exact variant that differences refer to, or empty.
        num_examples: in the test set.
    """

    title: str
    setting: str
    name: str
    metric: str
    chance: float | None
    floors: dict[str, float] = field(default_factory=dict)
    scores: tuple[LabelScore, ...] = ()
    baseline: str = ""
    num_examples: int | None = None


def make_accuracy_groups(results: Results) -> list[AccuracyGroup]:
    """Return one group for each task, level, protocol and data set, in a stable order."""
    rows = results.frame[results.frame["kind"] == "accuracy"]
    groups = []
    taken: dict[str, int] = {}
    for key, group in rows.groupby(list(GROUP_FIELDS), dropna=False, sort=True):
        setting = dict(zip(GROUP_FIELDS, key, strict=True))
        name = slug(str(setting["task"]), str(setting["level"]), str(setting["protocol"]))
        taken[name] = taken.get(name, 0) + 1
        suffix = f"-{taken[name]}" if taken[name] > 1 else ""
        changes = json.loads(str(setting["overrides"])) if setting["overrides"] else {}
        title = ", ".join(str(setting[part]) for part in ("task", "level") if setting[part])
        how = ", ".join(
            [
                f"protocol {setting['protocol']}",
                *(f"{option}={value}" for option, value in changes.items()),
                str(setting["dtype"]),
                str(setting["device"]).upper(),
            ]
        )
        groups.append(_group(group, results, title, how, name + suffix))
    return groups


def _group(rows: pd.DataFrame, results: Results, title: str, setting: str, name: str) -> AccuracyGroup:
    good = rows[(rows["status"] == "ok") & rows["value"].notna()]
    labels = sorted(set(rows["label"]))
    values = {label: _by_seed(good[good["label"] == label]) for label in labels}
    baseline = _baseline(rows, values, results)
    by_label = {label: rows[rows["label"] == label] for label in labels}
    scores = tuple(_label_score(label, by_label, values, baseline) for label in labels)
    floors: dict[str, list[float]] = {}
    for text in good["floors"]:
        for floor, value in json.loads(text or "{}").items():
            floors.setdefault(floor, []).append(value)
    chances = good["chance"].dropna()
    examples = good["num_examples"].dropna()
    return AccuracyGroup(
        title=title,
        setting=setting,
        name=name,
        metric=str(good["metric"].iloc[0]) if len(good) else "score",
        chance=float(chances.mean()) if len(chances) else None,
        floors={floor: fmean(all_values) for floor, all_values in sorted(floors.items())},
        scores=scores,
        baseline=baseline,
        num_examples=int(examples.max()) if len(examples) else None,
    )


def _by_seed(rows: pd.DataFrame) -> dict[int, float]:
    return {int(seed): float(value) for seed, value in zip(rows["seed"], rows["value"], strict=True)}


def _baseline(rows: pd.DataFrame, values: dict[str, dict[int, float]], results: Results) -> str:
    """Return the exact label with most seeds (the first by name among equals)."""
    variants = dict(zip(rows["label"], rows["variant"], strict=True))
    claims = {label: results.claim(str(variants[label])) for label in values}
    exact = [label for label, claim in claims.items() if claim is not None and claim.is_exact and values[label]]
    return max(exact, key=lambda label: len(values[label])) if exact else ""


def _label_score(
    label: str, by_label: dict[str, pd.DataFrame], values: dict[str, dict[int, float]], baseline: str
) -> LabelScore:
    own, rows = values[label], by_label[label]
    mean, low, high = _mean(list(own.values()))
    differences: list[float] = []
    if baseline and label != baseline:
        differences = [own[seed] - values[baseline][seed] for seed in sorted(own) if seed in values[baseline]]
    difference, difference_low, difference_high = _mean(differences)
    if len(differences) == 1:
        difference_low, difference_high = _over_examples(rows, by_label[baseline])
    failed = rows[rows["status"] != "ok"]
    good = rows[rows["status"] == "ok"]
    speeds, times, params = (good[name].dropna() for name in ("tokens_per_s", "train_s", "num_params"))
    return LabelScore(
        label=label,
        values=own,
        mean=mean,
        low=low,
        high=high,
        difference=difference,
        difference_low=difference_low,
        difference_high=difference_high,
        num_paired=len(differences),
        failures=tuple(zip(failed["status"], failed["reason"], strict=True)),
        tokens_per_s=float(speeds.mean()) if len(speeds) else None,
        train_s=float(times.mean()) if len(times) else None,
        num_params=int(params.max()) if len(params) else None,
    )


def _over_examples(rows: pd.DataFrame, baseline: pd.DataFrame) -> tuple[float | None, float | None]:
    """Return the interval of the difference over test examples, for the one seed that both have."""
    own, other = (dict(zip(frame["seed"], frame["correct"], strict=True)) for frame in (rows, baseline))
    seed = next((seed for seed in own if own[seed] and other.get(seed)), None)
    if seed is None or len(own[seed]) != len(other[seed]):
        return None, None
    found = paired_difference(own[seed], other[seed])
    return found.low, found.high


def _mean(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    if not values:
        return None, None, None
    low, high = mean_interval(values) or (None, None)
    return fmean(values), low, high
