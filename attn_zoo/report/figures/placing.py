"""Where a name can stand beside its point without covering another name, another point or the frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box", "Spot", "place_names"]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlap(self, other: Box) -> float:
        """Return the area that both cover."""
        width = min(self.x1, other.x1) - max(self.x0, other.x0)
        height = min(self.y1, other.y1) - max(self.y0, other.y0)
        return max(0.0, width) * max(0.0, height)

    def outside(self, frame: Box) -> float:
        """Return the area that lies beyond `frame`."""
        return (self.x1 - self.x0) * (self.y1 - self.y0) - self.overlap(frame)


@dataclass(frozen=True, slots=True)
class Spot:
    """A point with the radius of its mark and the size of its name, in pixels."""

    x: float
    y: float
    radius: float
    width: float
    height: float

    @property
    def box(self) -> Box:
        """Square around the mark."""
        return Box(self.x - self.radius, self.y - self.radius, self.x + self.radius, self.y + self.radius)


_ANGLES = [math.radians(angle) for angle in (0, 90, 180, 270, 45, 135, 315, 225, 20, 340, 160, 200, 65, 115, 245, 295)]
_GAPS = (4.0, 14.0, 28.0, 44.0, 62.0, 82.0, 104.0, 130.0)


def place_names(spots: Sequence[Spot], frame: Box, taken: Sequence[Box] = ()) -> list[Box]:
    """Return a box for the name of each spot: the nearest one that covers nothing, or else the least.

    Args:
        spots: in any order; the most crowded get their place first.
        frame: names stay inside.
        taken: what they must not cover either.
    """
    order = sorted(range(len(spots)), key=lambda index: (-_crowd(spots, index), index))
    marks = [spot.box for spot in spots]
    found: dict[int, Box] = {}
    for index in order:
        names = [*found.values(), *taken]
        best, least = None, math.inf
        for box, distance in _candidates(spots[index]):
            cost = sum(box.overlap(name) for name in names) * 4 + sum(box.overlap(mark) for mark in marks)
            cost += 8 * box.outside(frame) + 0.02 * distance
            if cost < least:
                best, least = box, cost
        assert best is not None
        found[index] = best
    return [found[index] for index in range(len(spots))]


def _crowd(spots: Sequence[Spot], index: int) -> float:
    own = spots[index]
    return sum(
        1 / (1 + math.hypot(other.x - own.x, other.y - own.y)) for place, other in enumerate(spots) if place != index
    )


def _candidates(spot: Spot) -> list[tuple[Box, float]]:
    found = []
    for gap in _GAPS:
        for angle in _ANGLES:
            x = spot.x + math.cos(angle) * (spot.radius + gap)
            y = spot.y + math.sin(angle) * (spot.radius + gap)
            # The box touches the circle of this radius with the side or corner that faces the point.
            left = x - spot.width * (1 - math.cos(angle)) / 2
            bottom = y - spot.height * (1 - math.sin(angle)) / 2
            found.append((Box(left, bottom, left + spot.width, bottom + spot.height), gap))
    return found
