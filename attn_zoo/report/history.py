"""The time of variants over the commits of a repository that keeps its results: one point for each commit.

Points are joined only where machine, versions and protocol are the same: a new driver is no progress.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.packed_run import commits
from attn_zoo.records import Cell
from attn_zoo.report.analysis.grouping import varying
from attn_zoo.report.analysis.observations import distinct_labels, read_results
from attn_zoo.report.analysis.timed_cells import setting_of, side_of, timed_cells
from attn_zoo.report.figures.axes import draw_curve, set_ticks, value_axis
from attn_zoo.report.figures.labels import EndLabel, draw_end_labels, label_room, labels_height
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import MARK, MUTED, SOLID, make_looks, plain, styled
from attn_zoo.report.tables.table import (
    BRACKETS,
    MARK_REMARKS,
    Column,
    Remark,
    Table,
    plain_rows,
    text_column,
    time_column,
)
from attn_zoo.report.wording import (
    PANEL_FIELDS,
    PASS_TITLES,
    doubt_counts,
    doubt_words,
    marks_of,
    setting_words,
    worth_a_mark,
)
from attn_zoo.units import capital, human_length, human_ms

_ERA = ("environment", "protocol_version")
_SETTING = ("seq_len", "overrides", *(name for name in PANEL_FIELDS if name not in _ERA))
"""What all times of one curve have in common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Times over commits.

    Args:
        frame: one row for each variant at each commit that measured it, oldest first, all of the setting that most
            have. `era` counts machines, versions and protocols: only times of one era may be compared.
        title: what was timed.
    """

    frame: pd.DataFrame
    title: str

    def table(self) -> Table:
        """Return one row for each commit and variant, for people."""
        rows = plain_rows(self.frame)
        shown = worth_a_mark(self.frame["doubts"])
        return Table(
            name="history",
            title=self.title,
            notes=(
                "Median.",
                BRACKETS,
                doubt_words(self.frame["num_processes"]),
                *MARK_REMARKS,
                Remark("Times of other eras (machine, versions, protocol) do not compare.", heading="era"),
            ),
            columns=(
                Column(heading="commit", show=lambda row: str(row["commit"])[:9], align="left", priority=0),
                text_column("date", priority=2),
                text_column("variant", "label", priority=0),
                time_column("time", priority=0),
                Column(heading="era", show=lambda row: str(row["era"]), priority=1),
                text_column("subject", priority=3),
            ),
            rows=tuple({**row, "marks": marks_of(row["doubts"], shown)} for row in rows),
        )

    def page(self) -> Page:
        """Return the figure: time against commits, with intervals; a curve ends where its machine does."""
        order = list(dict.fromkeys(self.frame["commit"]))
        eras = {commit: set(rows["era"]) for commit, rows in self.frame.groupby("commit", sort=False)}
        turns = [index for index, (one, two) in enumerate(pairwise(order), 1) if not eras[one] & eras[two]]
        curves = {
            str(label): [
                (1 + order.index(row["commit"]), row["median_ms"], row["low_ms"], row["high_ms"], row["era"])
                for row in rows.to_dict(orient="records")
            ]
            for label, rows in self.frame.groupby("label", sort=True)
        }
        exact, controls = (set(self.frame["label"][self.frame[kind]]) for kind in ("is_exact", "is_control"))
        looks = make_looks(curves, exact, controls)
        ends = [
            EndLabel(plain(name), (), looks[name].colour, curve[-1][0], curve[-1][1]) for name, curve in curves.items()
        ]
        note = "Median and 95 % interval at each commit that changed the records."
        if turns:
            note += " Dashed: another machine, other versions or another protocol; points beyond it do not compare."
        if any(len(own) > 1 for own in eras.values()):
            note += " A folder of several machines, versions or protocols: only points that are joined compare."
        if doubts := doubt_counts(list(self.frame["doubts"]), ()):
            note += f" {capital(doubts)}."
        with styled():
            page = Page(self.title, note)
            (axes,) = page.panels(height=labels_height(ends, 3.2), right=0.2 + label_room(ends), below=0.75)
            for name, curve in curves.items():
                look = looks[name]
                for era in dict.fromkeys(point[4] for point in curve):
                    points = [(x, y) for x, y, _, _, own in curve if own == era]
                    draw_curve(axes, points, look, SOLID)
                for x, _, low, high, _ in curve:
                    axes.plot([x, x], [low, high], color=look.colour, lw=1.2, zorder=2)
            for index in turns:
                axes.axvline(index + 0.5, color=MUTED, lw=1.0, ls=MARK, zorder=1)
            value_axis(
                axes, [value for curve in curves.values() for point in curve for value in point[1:4]], human_ms, 10
            )
            axes.set_xlim(0.6, len(order) + 0.4)
            step = math.ceil(len(order) / 4)  # names of more commits would overlap
            set_ticks(axes.xaxis, range(1, len(order) + 1, step), lambda place: order[round(place) - 1][:7])
            axes.set_xlabel("commit, oldest first")
            draw_end_labels(axes, ends)
        said = (f"{name}: {', '.join(human_ms(point[1]) for point in curve)}" for name, curve in curves.items())
        return page.describe(said)


def history(
    folder: str | Path,
    *,
    variants: Iterable[str] | str = (),
    pass_: str | None = None,
    seq_len: int | None = None,
    most: int = 30,
) -> History:
    """Return the times of a results folder over the commits that changed its records.

    Args:
        folder: of the git repository here, as seen from here.
        variants: labels; by default all.
        pass_: by default the most frequent.
        seq_len: by default the longest that most variants have.
        most: commits, the latest.

    Raises:
        ConfigError: no commit of it holds times.
        UnknownNameError: no commit timed such a variant, pass or length.
    """
    here = os.path.relpath(folder)
    log = commits(here, most)
    rows: list[dict[str, Any]] = []
    cells: list[Cell] = []
    for commit in log:
        try:
            results = read_results([f"{commit.digest}:{here}"])
        except ConfigError:
            continue  # of a commit that took the folder away, or of a folder that a newer version wrote
        for one in timed_cells(results, set()).values():
            if one.is_timed:
                row: dict[str, Any] = {
                    "commit": commit.digest,
                    "date": commit.date[:10],
                    "subject": commit.subject,
                    "label": "",  # of a mechanism; which there are, all commits together say
                }
                row |= setting_of(one.cell, _SETTING) | side_of(one)
                row |= {"protocol_version": one.cell.protocol_version, "environment": one.record.environment}
                claim = results.claim(one.cell.variant)
                rows.append(row | {"is_exact": claim.is_exact, "is_control": claim.is_control})
                cells.append(one.cell)
    if not rows:
        why = "there is no commit of it in a git repository here"
        if log:
            why = f"none of its {len(log)} commits holds times"
        raise ConfigError("history", [("", f"{here}: {why}")])
    for row, label in zip(rows, distinct_labels(cells, has_versions=False), strict=True):
        row["label"] = label
    place = {commit.digest: index for index, commit in enumerate(log)}
    rows.sort(key=lambda row: (place[row["commit"]], row["label"]))
    rows = _chosen(rows, "pass", pass_)
    wanted = {variants} if isinstance(variants, str) else set(variants)
    labels = sorted({row["label"] for row in rows})
    for name in sorted(wanted - set(labels)):
        raise UnknownNameError("variant", name, labels, f"the commits timed {', '.join(labels)}")
    rows = [row for row in rows if not wanted or row["label"] in wanted]
    rows = _chosen(rows, "seq_len", seq_len)
    apart = varying(_SETTING, rows) - {"dtype"}
    settings = Counter(tuple(row[name] for name in _SETTING) for row in rows)
    setting = max(settings, key=lambda one: (settings[one], str(one)))
    rows = [row for row in rows if tuple(row[name] for name in _SETTING) == setting]
    eras = list(dict.fromkeys(tuple(row[name] for name in _ERA) for row in rows))
    for row in rows:
        row["era"] = eras.index(tuple(row[name] for name in _ERA)) + 1
    said = dict(zip(_SETTING, setting, strict=True))
    length = f", {human_length(said['seq_len'])} tokens" if said["seq_len"] else ""
    how = ", ".join(str(word) for word in (said["dtype"], said["device"], *setting_words(said, apart)) if word)
    title = f"{PASS_TITLES.get(said['pass'], 'time')}{length}, {how}, over commits"
    return History(frame=pd.DataFrame(rows), title=capital(title))


def _chosen(rows: Sequence[dict[str, Any]], field: Literal["pass", "seq_len"], wanted: Any) -> list[dict[str, Any]]:
    """Return the rows with the value asked for; else the most frequent pass, or the longest length that most have."""
    counts = Counter(row[field] for row in rows)
    if wanted is None and field == "seq_len":
        most = max(counts.values())
        wanted = max((one for one in counts if 2 * counts[one] > most), key=lambda one: one or 0)
    elif wanted is None:
        wanted = max(counts, key=lambda one: counts[one])
    elif wanted not in counts:
        what, known = field.replace("seq_len", "length"), [str(one) for one in counts]
        raise UnknownNameError(what, str(wanted), known, f"there are {', '.join(known)}")
    return [row for row in rows if row[field] == wanted]
