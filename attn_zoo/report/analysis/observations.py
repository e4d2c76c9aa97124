"""Records of several results folders read together, each with the label that tables and figures show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from statistics import geometric_mean, median

from attn_zoo.errors import ConfigError, counted
from attn_zoo.folder import Choose, Claim, Run
from attn_zoo.records import Ceilings, Cell, Environment, Record, Status
from attn_zoo.report.sources import read_source
from attn_zoo.statistics.medians import time_summary
from attn_zoo.units import unique_name

NOT_RUN: Status = "cancelled"
"""Of a planned cell that has no record; its reason is why the run ended. Never stored, so that the next run takes the
cell up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One record as the report sees it.

    Args:
        record: as stored.
        run: name of the run it belongs to; no two runs of one report share one.
        environment: digest of the machine it ran (or would have run) on.
        label: of the mechanism; no two mechanisms of one report share one.
    """

    record: Record
    run: str
    environment: str
    label: str

    @property
    def cell(self) -> Cell:
        """What was asked for."""
        return self.record.cell

    @property
    def is_training(self) -> bool:
        """Whether it is a training run."""
        return self.cell.task is not None

    @property
    def is_timing(self) -> bool:
        """Whether it is a call or step to be timed."""
        return not (self.is_training or self.cell.inputs)

    @property
    def is_timed(self) -> bool:
        """Whether it is a call or step that was measured."""
        return self.record.status == "ok" and self.record.timing is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Several runs read together.

    Args:
        observations: one for each record, in the order of the runs; those of one cell are pooled where they are shown.
        left: one for each planned cell that has none; see `NOT_RUN`.
        runs: the folders, in the order given.
        warnings: of all of them.
    """

    observations: tuple[Observation, ...]
    left: tuple[Observation, ...]
    runs: tuple[Run, ...]
    warnings: tuple[str, ...] = ()

    def claim(self, variant: str) -> Claim:
        """Return the claim of `variant` from the first run that stored one; nothing is claimed of an unknown one."""
        return next((run.claims[variant] for run in self.runs if variant in run.claims), Claim())

    def ceilings(self, environment: str, device: str, dtype: str, threads: int | None) -> Ceilings | None:
        """Return what a machine could do, the fastest of all runs."""
        subject = environment, device, dtype, threads
        every = [one for run in self.runs for one in run.ceilings if one.subject == subject]
        return reduce(Ceilings.or_faster, every) if every else None

    @property
    def environments(self) -> dict[str, Environment]:
        """All machines by digest."""
        return {digest: environment for run in self.runs for digest, environment in run.environments.items()}


def read_results(dirs: Iterable[str | Path] | str | Path, choose: Choose | None = None) -> Results:
    """Read all `dirs` (results folders or what else `read_source` reads; a string or a path is one).

    Of very many records in one of them those that `choose` wants are read; see `attn_zoo.folder.read_run`.

    Raises:
        ConfigError: none was given, or one holds no results.
    """
    paths = [Path(entry) for entry in ([dirs] if isinstance(dirs, str | Path) else dirs)]
    if not paths:
        raise ConfigError("report", [("", "expected at least one results folder; got none")])
    unique = list({path.resolve(): path for path in paths}.values())
    runs = _named_apart(unique, [read_source(path, choose) for path in unique])
    pairs, copies = _without_copies((run, record) for run in runs for record in (*run.records, *run.begun))
    known = {record.cell.key for _, record in pairs}
    pairs += [
        (run, Record(cell=cell, status=NOT_RUN, reason=run.stopped))
        for run in runs
        for cell in run.left
        if cell.key not in known and run.is_wanted(cell)
    ]
    usual = {id(run): _usual_environment(run) for run in runs}
    every = [
        Observation(
            record=_with_current_summary(record),
            run=run.name,
            environment=record.environment or usual[id(run)],
            label=label,
        )
        for (run, record), label in zip(pairs, distinct_labels([record.cell for _, record in pairs]), strict=True)
    ]
    observations = tuple(one for one in every if one.record.status != NOT_RUN)
    warnings = [warning for run in runs for warning in run.warnings]
    places: dict[tuple[bool, str, str], set[int]] = {}
    for (run, _), one in zip(pairs, every, strict=True):
        if one.record.status != NOT_RUN:  # times of two machines are apart, a score is that of any
            cell = one.is_timing, one.cell.key, one.environment if one.is_timing else ""
            places.setdefault(cell, set()).add(id(run))
    for is_timing, becomes in ((True, "their samples are pooled"), (False, "of these the last counts")):
        repeated = sum(len(where) > 1 for (kind, *_), where in places.items() if kind is is_timing)
        if repeated:
            warnings.append(f"in more than one folder: {counted(repeated, 'cell')}; {becomes}")
    if copies:
        warnings.append(f"the same record in more than one folder: {counted(copies, 'cell')}; it counts once")
    left = tuple(one for one in every if one.record.status == NOT_RUN)
    return Results(observations=observations, left=left, runs=runs, warnings=tuple(warnings))


def _without_copies(pairs: Iterable[tuple[Run, Record]]) -> tuple[list[tuple[Run, Record]], int]:
    """Return the pairs with each record once, and how many were left out: a copy is not a further process."""
    seen: dict[str, list[Record]] = {}
    kept, copies = [], 0
    for run, record in pairs:
        same = seen.setdefault(record.cell.key, [])
        if record in same:
            copies += 1
        else:
            same.append(record)
            kept.append((run, record))
    return kept, copies


def _named_apart(paths: Sequence[Path], runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs, those of one name with their folder's folder before it: sentences tell runs apart by name."""
    counts, taken = Counter(run.name for run in runs), set[str]()
    names = [
        run.name if counts[run.name] == 1 else f"{path.resolve().parent.name}/{run.name}"
        for path, run in zip(paths, runs, strict=True)
    ]
    return tuple(replace(run, name=unique_name(name, taken)) for run, name in zip(runs, names, strict=True))


def _with_current_summary(record: Record) -> Record:
    """Return the record with the median that counts all processes alike.

    Records made before 2026-11-22 hold the median of all samples, which leans to the process that took most. Where the
    median is the one that is made today, so is the rest, which takes a hundred times as long to make.
    """
    timing = record.timing
    if timing is None or not timing.process_sizes:
        return record
    if min(timing.samples_ms) > 0 and math.isclose(geometric_mean(map(median, timing.by_process)), timing.median_ms):
        return record
    return replace(record, timing=replace(timing, **time_summary(timing.samples_ms, timing.process_sizes)))


def _usual_environment(run: Run) -> str:
    """Return the most common one of a run: cells that never started have none, and belong to it."""
    used = Counter(record.environment for record in run.records if record.environment)
    return max(sorted(used), key=used.__getitem__, default=next(iter(run.environments), ""))


def distinct_labels(cells: Sequence[Cell], *, has_versions: bool = True) -> list[str]:
    """Return labels of all cells that are shown together, longer where one label stands for several mechanisms.

    Other options make another mechanism; so does, where it `has_versions`, another source of the variant.
    """
    labels = _compiled_apart(cells)
    # A digest covers what its kind of cell runs, so only digests of one kind tell versions apart.
    kinds = [(label, cell.kind, cell.scope == "model") for label, cell in zip(labels, cells, strict=True)]
    versions: dict[tuple[str, str, bool], set[str]] = {}
    for kind, cell in zip(kinds, cells, strict=True):
        versions.setdefault(kind, set()).add(cell.variant_digest)
    sources = [
        cell.variant_digest[:6] or "unknown" if has_versions and len(versions[kind]) > 1 else ""
        for kind, cell in zip(kinds, cells, strict=True)
    ]
    mechanisms = [
        (cell.variant, str(sorted(cell.options.items())), source) for cell, source in zip(cells, sources, strict=True)
    ]
    known: dict[str, set[tuple[str, ...]]] = {}
    for label, mechanism in zip(labels, mechanisms, strict=True):
        known.setdefault(label, set()).add(mechanism)
    return [
        label if len(known[label]) == 1 else _longer(label, cell, source, known[label])
        for label, cell, source in zip(labels, cells, sources, strict=True)
    ]


def _compiled_apart(cells: Sequence[Cell]) -> list[str]:
    """Return labels; a training step that is compiled gets one of its own where that label is also timed eagerly."""
    labels = [cell.label or cell.variant for cell in cells]
    is_compiled = [cell.overrides.get("compile") is True for cell in cells]
    rows = list(zip(labels, [cell.scope == "model" for cell in cells], is_compiled, strict=True))
    eager = {label for label, is_step, is_fast in rows if is_step and not is_fast}
    return [
        f"{label} (compiled)" if is_step and is_fast and label in eager else label for label, is_step, is_fast in rows
    ]


def _longer(label: str, cell: Cell, source: str, mechanisms: set[tuple[str, ...]]) -> str:
    variants, options, _ = (set(column) for column in zip(*mechanisms, strict=True))
    extra = []
    if len(variants) > 1:
        extra.append(cell.variant)
    if len(options) > 1:
        extra.append(", ".join(f"{name}={value}" for name, value in sorted(cell.options.items())) or "defaults")
    if source:
        extra.append(f"source {source}")
    return f"{label} ({'; '.join(extra)})" if extra else label
