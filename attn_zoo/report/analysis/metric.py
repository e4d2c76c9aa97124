"""A metric in words and in order: how a score is written, and which of two is the better one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from attn_zoo.records import LOWER_IS_BETTER
from attn_zoo.units import MINUS, capital

End = TypeVar("End", float, float | None)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, by the name that is stored.

    >>> Metric("accuracy").show(0.3456), Metric("bits_per_byte").words
    ('34.6 %', 'bits per byte')
    >>> Metric("bits_per_byte").best([2.1, 1.9])
    1.9
    """

    name: str

    @property
    def is_lower_better(self) -> bool:
        """Whether a smaller value is the better one."""
        return self.name in LOWER_IS_BETTER

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest score there can be."""
        return (0.0, math.inf) if self.is_lower_better else (0.0, 1.0)

    def inside(self, value: End) -> End:
        """Return the end of an interval, not beyond what a score can be: a t-interval of few seeds knows no bounds."""
        return None if value is None else min(max(value, self.bounds[0]), self.bounds[1])

    @property
    def words(self) -> str:
        """Return the name for people."""
        return self.name.replace("_", " ")

    @property
    def title(self) -> str:
        """Return the name at the start of a line, and its direction where it is not the usual one."""
        return capital(self.axis)

    @property
    def axis(self) -> str:
        """Return the name as an axis is labelled."""
        return f"{self.words} (lower is better)" if self.is_lower_better else self.words

    def show(self, value: float) -> str:
        """Return a score: percent with one decimal for fractions, three decimals for everything else."""
        return self.end(value) + ("" if self.is_lower_better else " %")

    def tick(self, value: float) -> str:
        """Return a score as short as it can be said, for an axis."""
        return f"{value:g}" if self.is_lower_better else f"{100 * value:g} %"

    def end(self, value: float) -> str:
        """Return a score without its unit: the end of an interval whose middle has it, or a difference in `unit`."""
        return f"{value:.3f}" if self.is_lower_better else f"{100 * value:.1f}"

    def number(self, value: float) -> str:
        """Return a score on two or three digits, for a crowded place."""
        return f"{value:.2f}" if self.is_lower_better else f"{100 * value:.0f}"

    def signed(self, value: float) -> str:
        """Return a difference of two scores with its sign, in `unit`."""
        return f"{'+' if value >= 0 else MINUS}{self.end(abs(value))}"

    @property
    def unit(self) -> str:
        """What differences are given in: percentage points for fractions."""
        return self.words if self.is_lower_better else "points"

    def gain(self, value: float, over: float) -> float:
        """Return by how much `value` is better than `over`: negative where it is worse."""
        return over - value if self.is_lower_better else value - over

    def order(self, value: float | None) -> tuple[bool, float]:
        """Return a key that sorts the best first and what is missing last."""
        if value is None:
            return True, 0.0
        return False, value if self.is_lower_better else -value

    def best(self, values: Iterable[float]) -> float:
        """Return the best of at least one value."""
        return min(values, key=self.order)
