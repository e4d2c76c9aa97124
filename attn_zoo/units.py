"""Numbers and names for people: durations, bytes, lengths, ratios, and names made safe for terminals and figures."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass

TIMES = "\u00d7"  # multiplication sign
MINUS = "\u2212"  # as wide as a plus, which a hyphen is not


def human_number(value: float, digits: int = 3) -> str:
    """Return `value` with so many significant digits, without an exponent where it stays short.

    >>> human_number(0.123456), human_number(1234.5), human_number(20.0)
    ('0.123', '1234', '20')
    """
    if value < 0:
        return MINUS + human_number(-value, digits)
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if decimals > 6 or decimals < -5:
        return f"{value:.{digits - 1}e}"
    text = f"{value:.{max(decimals, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


_FULL = 0.9995
"""Share of a unit from which a value is given in it: three digits would be rounded up to it."""
_LEAST, _MOST = 0.01, 1e4
"""Of a unit that all numbers of a column have: no more zeros than one behind the point, no more than four digits."""


@dataclass(frozen=True, slots=True)
class Units:
    """How one kind of quantity is written: with the unit that suits a value.

    Args:
        steps: size and name of each unit, ascending.

    >>> human_ms(0.25), human_ms(12.3456), human_ms(2500), human_ms(90_000)
    ('250 µs', '12.3 ms', '2.5 s', '1.5 min')
    >>> human_ms.interval(12.31, 12.1, 12.6)
    '12.3 ms [12.1, 12.6]'
    >>> human_bytes(512), human_bytes(3 * 2**20), human_bytes(1.5 * 2**30)
    ('512 B', '3 MiB', '1.5 GiB')
    >>> human_flops(2.5e9), human_flops(3.21e15), human_bandwidth(14.9e9), human_bandwidth(4.8e12)
    ('2.5 GFLOP', '3.21 PFLOP', '14.9 GB/s', '4.8 TB/s')
    >>> human_rate.interval(15_284, 15_100, 15_600), human_rate.interval(850, 800, 900)
    ('15.3 k [15.1, 15.6]', '850 [800, 900]')
    """

    steps: tuple[tuple[float, str], ...]

    def __call__(self, value: float) -> str:
        """Return a value with its unit."""
        size, name = self._step(value)
        return f"{human_number(value / size)} {name}".strip()

    def interval(self, value: float, low: float, high: float) -> str:
        """Return a value and its interval, all in the unit of the value."""
        size, _ = self._step(value)
        return with_ends(self(value), low, high, lambda end: human_number(end / size))

    def fixed(self, values: Iterable[float | None], least: float = _LEAST) -> Units:
        """Return the one unit that suits all of these values best, for a column of them.

        Where they lie so far apart that any unit makes some of them hard to read, less than `least` of it or more than
        four digits, each keeps its own.

        >>> human_ms.fixed([0.149, None, 5720])(0.149), human_ms.fixed([])(0.149)
        ('0.149 ms', '149 µs')
        >>> human_bytes.fixed([2048, 2**28])(2**28)
        '256 MiB'
        """
        known = [abs(value) for value in values if value and math.isfinite(value)]
        if not known:
            return self
        size, name = self._step(math.sqrt(min(known)) * math.sqrt(max(known)))
        is_readable = min(known) >= least * size and max(known) < _MOST * size
        return Units(((size, name),)) if is_readable else self

    def _step(self, value: float) -> tuple[float, str]:
        return next((step for step in reversed(self.steps) if abs(value) >= _FULL * step[0]), self.steps[0])


human_ms = Units(((1e-6, "ns"), (1e-3, "µs"), (1.0, "ms"), (1e3, "s"), (6e4, "min"), (3.6e6, "h")))
"""Durations given in milliseconds."""
human_s = Units(tuple((size / 1e3, name) for size, name in human_ms.steps))
human_bytes = Units(((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB"), (2.0**40, "TiB")))
human_joules = Units(((1e-6, "µJ"), (1e-3, "mJ"), (1.0, "J"), (1e3, "kJ")))
human_flops = Units(
    tuple((10.0**power, f"{letter}FLOP") for power, letter in zip((6, 9, 12, 15, 18), "MGTPE", strict=True))
)
"""Floating-point operations."""
human_flop_rate = Units(tuple((size, f"{name}/s") for size, name in human_flops.steps))
human_bandwidth = Units(((1e6, "MB/s"), (1e9, "GB/s"), (1e12, "TB/s")))
"""Bytes per second, with decimal units, as makers of memory count."""

human_rate = Units(((1.0, ""), (1e3, "k"), (1e6, "M")))
"""Things per second."""


def human_count(value: int) -> str:
    """Return a number of things, in millions or thousand millions where there are so many.

    >>> human_count(262_144), human_count(536_870_912), human_count(2_147_483_648)
    ('262,144', '537 M', '2.15 G')
    """
    for letter, factor in (("G", 1e9), ("M", 1e6)):
        if value >= 0.9995 * factor:
            return f"{human_number(value / factor)} {letter}"
    return f"{value:,}"


def human_slope(value: float) -> str:
    r"""Return an exponent or a slope.

    >>> human_slope(1.994), human_slope(-0.001), human_slope(-0.26) == "\u22120.26"
    ('1.99', '0.00', True)
    """
    return f"{value:z.2f}".replace("-", MINUS)


def percent(frac: float) -> str:
    """Return a share.

    >>> percent(0.634), percent(0.0051), percent(1.02)
    ('63 %', '0.51 %', '102 %')
    """
    return f"{100 * frac:.0f} %" if frac >= 0.0995 else f"{human_number(100 * frac, 2)} %"


def human_length(tokens: float) -> str:
    """Return a sequence length the way people say it; what is not a round binary number keeps its digits.

    >>> human_length(512), human_length(4096), human_length(2**20), human_length(1000), human_length(2895.3)
    ('512', '4k', '1M', '1000', '2895')
    """
    whole = round(tokens)
    if whole >= 2**20 and whole % 2**20 == 0:
        return f"{whole // 2**20}M"
    if whole >= 1024 and whole % 1024 == 0:
        return f"{whole // 1024}k"
    return str(whole)


def ratio(value: float) -> str:
    r"""Return a factor.

    >>> ratio(1.234) == "1.23\u00d7"
    True
    """
    return f"{human_number(value)}{TIMES}"


def ratio_interval(value: float, low: float, high: float) -> str:
    """Return a factor with its interval."""
    return with_ends(ratio(value), low, high, human_number)


def with_ends(text: str, low: float | None, high: float | None, show: Callable[[float], str]) -> str:
    """Return a number with its interval behind it, where that is known.

    >>> with_ends("12 %", 0.11, 0.125, "{:.2f}".format), with_ends("12 %", None, None, str)
    ('12 % [0.11, 0.12]', '12 %')
    """
    return text if low is None or high is None else f"{text} [{show(low)}, {show(high)}]"


def capital(text: str) -> str:
    """Return `text` as the beginning of a sentence.

    >>> capital("protocol A"), capital("")
    ('Protocol A', '')
    """
    return text[:1].upper() + text[1:]


def clean(text: str) -> str:
    """Return `text` on one line without control, formatting and surrogate characters (terminal escapes included)."""
    if text.isprintable():  # most texts are, and this takes a fiftieth of looking at each character
        return " ".join(text.split())
    kept = (" " if character in "\t\n\r" else character for character in text)
    visible = "".join(character for character in kept if unicodedata.category(character) not in {"Cc", "Cf", "Cs"})
    return " ".join(visible.split())


def shorten(text: str, width: int) -> str:
    """Return `text` on at most `width` characters, with its middle left out.

    >>> shorten("a_very_long_name_of_a_variant", 12)
    'a_very…riant'
    """
    text = clean(text)
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


FEW = 3
"""Things named in one line."""
MOST_LINES = 200
"""Rows of a table on a terminal, of which there may be twenty thousand."""


def some(names: Iterable[str], most: int = FEW, joint: str = ", ") -> str:
    """Return the first names, and how many more there are.

    >>> some(["a", "b", "c"], 2), some(["a", "b"], 2, " or ")
    ('a, b and 1 more', 'a or b')
    """
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return joint.join(every[:most]) + more


def slug(*parts: str) -> str:
    """Return a file name stem of lower-case letters, digits, `-` and `_`.

    >>> slug("Time", "fwd+bwd", "CPU")
    'time-fwd-bwd-cpu'
    """
    joined = "-".join(part for part in parts if part).lower()
    return re.sub("[^a-z0-9_]+", "-", joined).strip("-")[:100] or "unnamed"


def unique_name(name: str, taken: set[str]) -> str:
    """Return `name`, with a number behind it if it is among those that are `taken`, and add it to these.

    >>> taken = {"time-fwd"}
    >>> unique_name("time-fwd", taken), unique_name("time-fwd", taken)
    ('time-fwd-2', 'time-fwd-3')
    """
    numbered = (f"{name}-{count}" for count in itertools.count(2))
    free = next(each for each in itertools.chain([name], numbered) if each not in taken)
    taken.add(free)
    return free
