"""Compare two runs: times, memory and errors cell by cell, scores task by task, with intervals, and what got worse.

A verdict is about the second run. `slower` and `faster` need intervals that exclude 1, several processes on both sides
and a machine that nobody disturbed; what is not known is said to be unknown. By simulation (`tests/report/
test_compare_noise.py`) a run of three processes that vary by 2 % is told from one that is 10 % slower in 19 of 20
cells, and unchanged code gets a false verdict in one of a hundred, of five processes in two (`BY_CHANCE`).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from attn_zoo.errors import ConfigError, UnknownNameError, counted
from attn_zoo.records import Cell, Environment
from attn_zoo.report.analysis.approximation_errors import ErrorGroup, make_error_groups
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.observations import Observation, read_results
from attn_zoo.report.analysis.scores import AccuracyGroup, make_accuracy_groups
from attn_zoo.report.analysis.timed_cells import MATCH, SIDE, setting_of, side_of, timed_cells
from attn_zoo.report.compare_seeds import ERROR_MATCH, SCORE_MATCH, compare_errors, compare_scores, is_within
from attn_zoo.report.tables.comparison_tables import (
    RATIO,
    SAME_WITHIN,
    errors_table,
    scores_table,
    settings_apart,
    times_table,
)
from attn_zoo.report.tables.table import Row, Table, escape_markdown, interval_values, plain_rows
from attn_zoo.report.tables.table import to_markdown as table_markdown
from attn_zoo.report.wording import DISTURBANCES
from attn_zoo.statistics.medians import Ratio, process_spread, ratio_of_runs
from attn_zoo.units import human_number, percent

ALLOWED = ("environment", "protocol", "flagged")
"""What is compared only where that is asked for: other machines or software, other ways to measure or to train, rows
that something else disturbed."""

LIMIT = 0.10
"""`same` is a ratio of which a change by more than this share is excluded."""

BY_CHANCE = 0.02
"""Share of unchanged cells called slower or faster: of five processes each, by simulation; of three a third of that."""

_SHOWN = ("label", "seq_len", "pass", "dtype", "device", "scope", "is_causal", "has_padding", "batch_size", "num_heads")
_RATIOS = ("ratio", "ratio_low", "ratio_high", "memory_ratio")
_COUNTS = ("seq_len", "batch_size", "num_heads", "num_kv_heads", "head_dim", "threads")
_ALONE = ("only in a", "only in b")
_ONE_PROCESS = "apart, but of one process, so that nobody can say"
_TOO_WIDE = "too uncertain to say"
_MOST_CHARACTERS = 60_000  # of 65 536 that a comment on a pull request may have


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What two runs have in common, and what only one of them has.

    Args:
        times: one row for each timed cell. `ratio` is the time of b over that of a, with the ends of its 95 % interval;
            `memory_ratio` that of the peak bytes, which do not vary. `verdict` is `faster` or `slower` where the
            interval excludes 1; `same` where it excludes a change by more than the limit; `cannot say` otherwise, with
            the reason in `why`. `failed in b` measured in a only, because b tried and failed. `only in a` and `only in
            b` are cells that the other side did not try. `doubts_a` and `doubts_b` name what makes a time doubtful.
        scores: one row for each variant of each task that a side has trained; see `difference` (b minus a, paired by
            seed) and `verdict`: `better` or `worse` where that is settled; `same` where a difference by more than the
            limit is excluded; `cannot say` otherwise, and below three common seeds.
            Means are over the common seeds, where there are any. `num_lost` is how many seeds with a score of a b tried
            and failed at; what it lost is worse, whatever the others say.
        errors: likewise for each error beside exact attention: `ratio` is b's over a's, paired by seed.
        limit: share by which b may be slower, larger or worse.
        warnings: what could not be read of either, and is in no row.
    """

    times: pd.DataFrame
    scores: tuple[dict[str, Any], ...]
    errors: tuple[dict[str, Any], ...] = ()
    limit: float = LIMIT
    warnings: tuple[str, ...] = ()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows as plain data, times first; what is not known is None."""
        return [*plain_rows(self.times), *self.errors, *self.scores]

    @property
    def worse(self) -> list[str]:
        """What b does worse by more than the limit whatever the noise was, one sentence each, and what it lost."""
        said = []
        for rows in (plain_rows(self.times), self.errors, self.scores):
            for row, setting in zip(rows, settings_apart(rows), strict=True):
                name = _cell_name(row) + (f" ({setting})" if setting else "")
                said += [f"{name}: {words}" for words in _losses(row, self.limit)]
        return said

    @property
    def is_worse(self) -> bool:
        """Whether b does anything worse, however little, takes clearly more memory, or lost what a has."""
        return any(
            row["verdict"] in {"slower", "worse", "failed in b"}
            or row.get("num_lost")
            or (row.get("memory_ratio") or 0.0) > 1 + SAME_WITHIN
            for row in self.rows
        )

    def tables(self, most: int | None = None) -> list[Table]:
        """Return what both runs have, for people: times, errors and scores.

        Of more than `most` rows a table has those that differ most, the worst first.

        Raises:
            ConfigError: they have nothing in common; the message names what differs.
        """
        timed = plain_rows(self.times[~self.times["verdict"].isin(_ALONE)])
        erring, scored = ([row for row in rows if row["verdict"] not in _ALONE] for rows in (self.errors, self.scores))
        if not (timed or erring or scored):
            raise ConfigError("compare", [("", self._why_nothing())])
        every = (times_table, timed), (errors_table, erring), (scores_table, scored)
        return [_worst(table, rows, most) for table, rows in every if rows]

    def _why_nothing(self) -> str:
        every = (plain_rows(self.times), MATCH), (self.errors, ERROR_MATCH), (self.scores, SCORE_MATCH)
        why = next((text for rows, names in every if (text := _why_apart(rows, names))), "")
        examples = [_example([row for rows, _ in every for row in rows if row["verdict"] == alone]) for alone in _ALONE]
        text = f"expected two runs with cells in common; the first has {examples[0]}, the second {examples[1]}"
        return f"{text}{f': they differ in {why}' if why else ''}"

    @property
    def agreement(self) -> str:
        """In how many cells the two runs agree, and how much that says; empty where no time was measured."""
        if self.times.empty:
            return ""
        counts = Counter(self.times["verdict"])
        common = len(self.times) - sum(counts[alone] for alone in _ALONE)
        said = f"{counts['same']} of {counted(common, 'timed cell')} {'agrees' if common == 1 else 'agree'}"
        by_chance = min(round(BY_CHANCE * self.times["ratio"].notna().sum()), counts["slower"] + counts["faster"])
        factor = ((self.times["ratio_high"] / self.times["ratio_low"]) ** 0.5).median()
        if not math.isnan(factor):
            said += f", with ratios known to a factor of {factor:.2f} either way (median)"
        unknown = Counter(self.times["why"][self.times["verdict"] == "cannot say"])
        others = [
            f"{count} {words}"
            for count, words in (
                (counts["slower"], "slower in the second"),
                (counts["faster"], "faster in the second"),
                (by_chance, "of these at most by chance"),
                *((count, why) for why, count in unknown.most_common()),
                (counts["failed in b"], "failed in the second"),
                (counts["failed in a"], "failed in the first"),
                (counts["only in a"], "only in the first"),
                (counts["only in b"], "only in the second"),
            )
            if count
        ]
        why = _why_apart(plain_rows(self.times), ("protocol", "protocol_version"))
        return "; ".join([said, *others]) + (f": they differ in {why}" if why else "")

    def markdown(self, worst: int = 10) -> str:
        """Return a comment for a pull request: what is worse, so many most different cells, and all of them, folded.

        Raises:
            ConfigError: as `tables`.
        """
        found = self.worse
        much = percent(self.limit)
        head = f"{len(found)} worse by more than {much}" if found else f"Nothing is worse by more than {much}"
        lines = [f"## {head}", "", *(f"- {escape_markdown(text)}" for text in found[:worst])]
        lines += [f"- and {len(found) - worst} more"] * (len(found) > worst)
        lines += ["", escape_markdown(self.agreement), ""]  # right below an item it would be a part of that
        lines += [f"- warning: {escape_markdown(text)}" for text in self.warnings[:worst]] + [""] * bool(self.warnings)
        for table in self.tables():
            rows = sorted(table.rows, key=_severity)
            differing = tuple(row for row in rows if row["verdict"] != "same")[:worst]
            if len(differing) == len(rows):
                lines += [table_markdown(replace(table, rows=differing))]
                continue
            if differing:
                lines += [table_markdown(replace(table, rows=differing, notes=()))]
            room = _MOST_CHARACTERS - sum(map(len, lines))
            least = 4 * len(table.columns) + 2  # of a row: to draw more rows than can fit takes longest
            while len(rows) > 1 and (
                least * len(rows) > room or len(table_markdown(replace(table, rows=tuple(rows)))) > room
            ):
                rows = rows[: len(rows) * 3 // 4]
            full = table_markdown(replace(table, rows=tuple(rows)))
            cut = f" ({len(rows)} of them shown)" if len(rows) < len(table.rows) else ""
            every = f"All {counted(len(table.rows), 'cell')}{cut}"
            lines += [f"<details><summary>{every}</summary>", "", full, "</details>", ""]
        return "\n".join(lines)


def _worst(table: Callable[[Sequence[Row]], Table], rows: Sequence[Row], most: int | None) -> Table:
    if most is None or len(rows) <= most:
        return table(rows)
    found = table(sorted(rows, key=_severity)[:most])
    said = f"The {most:,} that differ most of {len(rows):,} cells; --json has all."
    return replace(found, notes=(said, *found.notes))


def _cell_name(row: Row) -> str:
    """Return which cell a row is of, but for its setting."""
    if "task" in row:
        return f"{row['label']} on {row['task']}"
    what = f"on {row['inputs']} inputs" if "inputs" in row else row["pass"]
    return " ".join(filter(None, (row["label"], what, f"L{row['seq_len']}" if row["seq_len"] else "")))


def _losses(row: Row, limit: float) -> Iterator[str]:
    """Yield what b does worse in a cell by more than a limit, and what it lost."""
    of = "a score" if "task" in row else "an error" if "inputs" in row else "a time"
    number = of.partition(" ")[2]
    if row["verdict"] == "failed in b":
        yield row.get("why") or f"no {number} any more"
    elif row.get("num_lost"):
        yield f"{counted(row['num_lost'], 'seed')} failed that had {of}"
    if row["verdict"] in {"slower", "worse"} and (row.get("ratio_low") or 0.0) > 1 + limit:
        yield f"{RATIO.show(row)} times the {number}"
    if (row.get("memory_ratio") or 0.0) > 1 + limit:
        yield f"{human_number(row['memory_ratio'])} times the memory"
    if row["verdict"] == "worse" and (row.get("loss_low") or 0.0) > limit:
        metric = Metric(row["metric"])
        before, after = (metric.show(row[f"score_{end}"]) for end in "ab")
        yield f"{after} after {before}"


def _severity(row: Row) -> tuple[int, float]:
    """Return a key that sorts losses, the largest first, before gains, the largest first."""
    if row.get("num_lost"):
        return 0, -math.inf
    order = ("failed in b", "slower", "worse", "cannot say", "failed in a", "better", "faster", "same")
    size = row.get("ratio_low") or row.get("loss_low") or 0.0
    is_larger = (row.get("memory_ratio") or 0.0) > 1 + SAME_WITHIN
    place = 1 if is_larger and row["verdict"] in {"same", "cannot say"} else order.index(row["verdict"])
    return place, size if row["verdict"] in {"better", "faster"} else -size


def compare(a: str | Path, b: str | Path, *, allow: Iterable[str] | str = (), limit: float | None = None) -> Comparison:
    """Compare the run in b with the reference in a: time and memory of each cell, and scores, with verdicts about b.

    Args:
        a: results folder, packed run, export, `REV:FOLDER` of a git repository, or JSON of pytest-benchmark.
        b: likewise.
        allow: what to compare all the same: `"environment"`, `"protocol"`, `"flagged"`.
        limit: share by which b may be worse; by default a tenth.

    Raises:
        ConfigError: nothing of the kind, or the environments differ and that was not allowed.
        UnknownNameError: no such thing to allow.
        ValueError: the limit is negative.
    """
    limit = LIMIT if limit is None else limit
    if limit < 0:
        raise ValueError(f"limit: expected at least 0, a share; got {limit:g}")
    allowed = {allow} if isinstance(allow, str) else set(allow)
    for word in sorted(allowed - set(ALLOWED)):
        raise UnknownNameError("allowance", word, ALLOWED, f"there are {', '.join(ALLOWED)}")
    sides = _read(a, allowed), _read(b, allowed)
    differences = _environment_differences(*sides)
    if differences and "environment" not in allowed:
        text = f"the two runs differ in environment ({differences}); allow that to compare anyway (--allow environment)"
        raise ConfigError("compare", [("", text)])
    first, second = sides
    return Comparison(
        times=_compare_times(first, second, allowed, limit),
        scores=tuple(compare_scores(first.groups, second.groups, allowed, limit)),
        errors=tuple(compare_errors(first.errors, second.errors, allowed, limit)),
        limit=limit,
        warnings=tuple(dict.fromkeys((*first.warnings, *second.warnings))),
    )


@dataclass(frozen=True, slots=True)
class _Timed:
    """What became of a cell: of its record no more than is compared, for two large runs are in memory together.

    Args:
        cell: the cell.
        label: of its mechanism.
        failure: status and reason; empty where it was measured.
        said: what a row says of it; see `SIDE`.
        samples: in milliseconds, of all processes; the median where there are none.
        sizes: how many of them each process took, where several did.
        flags: of its timing.
    """

    cell: Cell
    label: str
    failure: str
    said: Mapping[str, Any]
    samples: array[float]
    sizes: tuple[int, ...]
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Side:
    """One of two runs.

    Args:
        used: digests of the machines that its cells are of.
        environments: machines by digest.
        groups: what it trained.
        errors: what it compared with exact attention.
        cells: what it timed or failed at, by what must agree before two times may be compared.
        spread: how much its processes differ in the middle of its cells; 0 where each has one process.
        warnings: what could not be read.
    """

    used: frozenset[str]
    environments: Mapping[str, Environment]
    groups: Sequence[AccuracyGroup]
    errors: Sequence[ErrorGroup]
    cells: Mapping[tuple[Any, ...], _Timed]
    spread: float
    warnings: tuple[str, ...]


def _read(source: str | Path, allowed: set[str]) -> _Side:
    results = read_results([source])
    cells = {key: _timed(one) for key, one in timed_cells(results, allowed).items()}
    spreads = [process_spread(one.samples, one.sizes) for one in cells.values() if len(one.sizes) > 1]
    return _Side(
        used=frozenset(one.environment for one in results.observations) - {""},
        environments=results.environments,
        groups=make_accuracy_groups(results),
        errors=make_error_groups(results),
        cells=cells,
        spread=median(spread for spread in spreads if spread is not None) if spreads else 0.0,
        warnings=results.warnings,
    )


def _timed(one: Observation) -> _Timed:
    record, timing = one.record, one.record.timing if one.is_timed else None
    return _Timed(
        cell=one.cell,
        label=one.label,
        failure="" if timing else f"{record.status}{f': {record.reason}' if record.reason else ''}",
        said=side_of(one),
        samples=array("d", timing.samples_ms or (timing.median_ms,) if timing else ()),
        sizes=timing.process_sizes if timing else (),
        flags=timing.flags if timing else (),
    )


def _compare_times(a: _Side, b: _Side, allowed: set[str], limit: float) -> pd.DataFrame:
    rows = []
    for key in dict.fromkeys([*a.cells, *b.cells]):
        first, second = a.cells.get(key), b.cells.get(key)
        known = second or first
        assert known is not None
        if not any(cell is not None and not cell.failure for cell in (first, second)):
            continue
        ratio, verdict, why = _judge(first, second, "flagged" in allowed, limit, (b.spread, a.spread))
        sides = [cell.said if cell else dict.fromkeys(SIDE) for cell in (first, second)]
        row = setting_of(known.cell) | {"label": known.label, "verdict": verdict, "why": why}
        row |= interval_values("ratio", *((ratio.value, ratio.low, ratio.high) if ratio else (None, None, None)))
        before, after = (side["peak_bytes"] for side in sides)
        row["memory_ratio"] = after / before if before and after else None
        rows.append(row | {f"{name}_{end}": side[name] for end, side in zip("ab", sides, strict=True) for name in side})
    numbers = ("median_ms_a", "median_ms_b", "ratio", "ratio_low", "ratio_high", "memory_ratio", "verdict", "why")
    columns = [*_SHOWN, *numbers, *(f"{name}_{end}" for name in SIDE[1:] for end in "ab")]
    frame = pd.DataFrame(rows, columns=[*columns, *(name for name in MATCH if name not in _SHOWN)])
    # What None would make objects or floats of.
    frame = frame.astype({**dict.fromkeys(_RATIOS, "float64"), **dict.fromkeys(_COUNTS, "Int64")})
    return frame.sort_values(list(_SHOWN), ignore_index=True)


def _judge(
    first: _Timed | None, second: _Timed | None, allows_flagged: bool, limit: float, least_spread: tuple[float, float]
) -> tuple[Ratio | None, str, str]:
    """Return ratio of times, verdict about the second, and why there is none."""
    if first is None or second is None:
        return None, "only in a" if second is None else "only in b", ""
    if first.failure or second.failure:
        return None, f"failed in {'a' if first.failure else 'b'}", first.failure or second.failure
    if first.samples == second.samples:  # a run beside itself: not a doubt, but the same measurement
        return Ratio(value=1.0, low=1.0, high=1.0, num_pairs=0), "same", ""
    ratio = ratio_of_runs(
        second.samples, first.samples, sizes_a=second.sizes, sizes_b=first.sizes, least_spread=least_spread
    )
    disturbances = dict.fromkeys(
        flag.replace("_", " ") for flag in (*first.flags, *second.flags) if flag in DISTURBANCES
    )
    if disturbances and not allows_flagged:
        return ratio, "cannot say", f"disturbed ({', '.join(disturbances)})"
    ends, is_open = (ratio.low, ratio.high), ratio.low <= 1.0 <= ratio.high
    if is_within(*ends, SAME_WITHIN) or (is_open and is_within(*ends, limit)):
        return ratio, "same", ""
    if is_open:
        return ratio, "cannot say", _TOO_WIDE
    if min(len(first.sizes), len(second.sizes)) < 2:
        return ratio, "cannot say", _ONE_PROCESS
    return ratio, "slower" if ratio.low > 1.0 else "faster", ""


def _why_apart(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the fields of which no value occurs on both sides, with their values; else those of the nearest pair."""
    sides = [[row for row in rows if row["verdict"] == alone] for alone in _ALONE]
    if not all(sides):
        return ""

    def differing(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[str]:
        said = []
        for name in names:
            own, other = ({str(row[name]) for row in side} for side in (first, second))
            if not own & other:
                shown = (", ".join(sorted(values)[:3]) or "none" for values in (own, other))
                said.append(f"{name} ({' against '.join(shown)})")
        return said

    found = differing(*sides)
    if not found:
        pairs = ([one] for one in sides[0][:50])
        found = min((differing(one, [two]) for one in pairs for two in sides[1][:50]), key=len)
    return ", ".join(found[:4])


def _example(rows: Sequence[Row]) -> str:
    if not rows:
        return "none that was measured"
    row = rows[0]
    how = f"by {row['protocol']}" if "task" in row else row["dtype"]
    where = f" on {row['device']}" if "pass" in row else ""
    return f"{len(rows)}, such as {_cell_name(row)} {how}{where}"


def _environment_differences(a: _Side, b: _Side) -> str:
    """Return the names of the fields that differ; empty where both have cells of one machine, or one has none."""
    if a.used & b.used or not (a.used and b.used):
        return ""
    known = [[side.environments[digest] for digest in sorted(side.used & {*side.environments})] for side in (a, b)]
    if not all(known):
        return "not described in run.json"
    own, other = (environments[0].deciding() for environments in known)
    return ", ".join(name for name in own if own[name] != other[name])
