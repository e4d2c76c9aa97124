"""Where a score stands beside what needs no attention at all: chance and the trivial models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from attn_zoo.report.analysis.metric import Metric

CHANCE = "chance"
TWO_SIDED = 1.96
"""Standard errors on either side of a 95 % interval."""
FAR = 3.0
"""Times the range of the scores that a mark may lie beyond them and still be drawn."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A score against the best floor.

    Args:
        floor: name of the best of chance and the trivial models.
        value: what it scores.
        gain: by how much the score is better; negative where it is worse.
        verdict: `beaten` only where the gain exceeds the uncertainty of the score; `not settled` for a smaller one;
            `unknown` for a gain of which nothing says how certain it is; else `not beaten`.
    """

    floor: str
    value: float
    gain: float
    verdict: Literal["beaten", "not settled", "unknown", "not beaten"]

    @property
    def words(self) -> str:
        """Return the verdict as the end of a sentence."""
        verb = {"not beaten": "does not beat", "not settled": "does not clearly beat"}.get(self.verdict, "beats")
        return f"{verb} {floor_words(self.floor)}{', uncertain: one run' if self.verdict == 'unknown' else ''}"

    @property
    def brief(self) -> str:
        """Return the verdict as it stands in a table."""
        said = {"not settled": "not clearly beaten", "unknown": "beaten, uncertain"}
        return f"{said.get(self.verdict, self.verdict)}: {self.floor}"


def floor_words(name: str) -> str:
    """Return the name of a floor in a sentence.

    >>> floor_words("root_operator"), floor_words("chance")
    ('the root-operator floor', 'chance')
    """
    return CHANCE if name == CHANCE else f"the {name.replace('_', '-')} floor"


def size_error(value: float, num_examples: float | None, metric: Metric) -> float | None:
    """Return the standard error of a score that comes from the size of the test set alone.

    For a fraction of N examples it is sqrt(p (1 - p) / N), also where an example has several scored items: as if all of
    one were right or wrong together, which is cautious. Of examples with unequal numbers of items N is the smaller
    number of equal ones that settle as much (`records.Score.num_effective`). None for metrics that are no fractions.
    """
    if not num_examples or metric.is_lower_better or not 0.0 <= value <= 1.0:
        return None
    return float((value * (1.0 - value) / num_examples) ** 0.5)


def size_interval(value: float, num_examples: float | None, metric: Metric) -> tuple[float, float] | None:
    """Return the ends of the 95 % interval that comes from the size of the test set alone; None as `size_error`.

    It is Wilson's (1927, "Probable inference, the law of succession, and statistical inference"): two standard errors
    to either side have no width where all answers are right, and hold a true 99.9 % of 1,000 in 63 of 100 cases.
    """
    if not num_examples or (error := size_error(value, num_examples, metric)) is None:
        return None
    prior = TWO_SIDED**2 / num_examples
    middle = (value + prior / 2) / (1 + prior)
    half = TWO_SIDED * (error**2 + prior / (4 * num_examples)) ** 0.5 / (1 + prior)
    return middle - half, middle + half


def ranked_marks(floors: Mapping[str, float], chance: float | None, metric: Metric) -> dict[str, float]:
    """Return floors, and chance where it is known, by name, the best last: of equal ones the first by name."""
    marks = dict(floors) | ({CHANCE: chance} if chance is not None else {})
    return dict(sorted(sorted(marks.items()), key=lambda mark: metric.order(mark[1]))[::-1])


def judge(
    value: float,
    low: float | None,
    high: float | None,
    num_examples: float | None,
    marks: Mapping[str, float],
    metric: Metric,
) -> Standing | None:
    """Return where a mean score with its interval over seeds stands, or None where neither chance nor a floor is known.

    The last of the marks is the best of what chance and trivial models score. Seeds share their test set, so their
    spread does not see which examples it has, and both errors add up: of scores that are in truth those of the mark
    at most 2.5 % beat it, but 4 % with five seeds and 6 % with ten if each error had to be exceeded for itself.
    """
    if not marks:
        return None
    *_, (best, mark) = marks.items()
    gain = metric.gain(value, mark)
    if gain <= 0:
        return Standing(best, mark, gain, "not beaten")
    # Were it no better than the mark, its error would be that of the mark: that of all answers right is none at all.
    errors = [error for each in (value, mark) if (error := size_error(each, num_examples, metric)) is not None]
    halves = [TWO_SIDED * max(errors)] if errors else []
    if low is not None and high is not None:
        halves.append((high - low) / 2)
    if not halves:
        return Standing(best, mark, gain, "unknown")
    return Standing(best, mark, gain, "beaten" if gain > math.hypot(*halves) else "not settled")


def near_marks(
    values: Sequence[float], marks: Mapping[str, float], metric: Metric
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the marks that a figure of `values` has room for, and those so far off that they would flatten it.

    The best of them always has room.
    """
    if not marks:
        return {}, {}
    best = metric.best(marks.values())
    low, high = min([*values, best]), max([*values, best])
    reach = FAR * ((high - low) or 0.1 * abs(high))
    near = {name: value for name, value in marks.items() if low - reach <= value <= high + reach}
    return near, {name: value for name, value in marks.items() if name not in near}
