"""What Python gets to see: the results of a run and the checks of a variant, which a notebook shows as tables."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.units import clean, slug

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from attn_zoo.conformance import CheckResult
    from attn_zoo.matrix.drive.run_plan import Summary
    from attn_zoo.report.analysis.analyse import Analysis
    from attn_zoo.report.tables.table import Table


class Run:
    """The results of one or more folders, as tables, figures and sentences. Nothing is read before it is asked for.

    Args:
        folders: results folders.
        summary: what `run` did, where that made it.
    """

    def __init__(self, folders: Sequence[str | Path], summary: Summary | None = None) -> None:
        self.folders = tuple(Path(folder) for folder in folders)
        self.summary = summary

    @cached_property
    def analysis(self) -> Analysis:
        """Everything that is computed from the records: panels, fits, groups of trainings."""
        from attn_zoo.report.analysis.analyse import analyse

        is_all = not any(run.num_unread for run in self.brief.results.runs)
        return self.brief if is_all else analyse(self.folders)

    @cached_property
    def brief(self) -> Analysis:
        """What a report shows: the same, but of a folder with very many records those of a few panels only."""
        from attn_zoo.report.analysis.analyse import analyse

        return analyse(self.folders, is_brief=True)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per record, units in the names (`median_ms`, `peak_bytes`); what was not measured is empty."""
        from attn_zoo.report.export import flat_frame

        frame = flat_frame(self.analysis.results.observations)
        within = ["run", "kind", "label", "scope", "pass", "task", "level", "is_causal", "has_padding", "dtype"]
        return frame.sort_values([*within, "head_dim", "seq_len", "seed"], ignore_index=True)

    def best(self) -> pd.DataFrame:
        """Return the fastest variant at each length of each panel, beside the next one.

        `ratio` is how many times the fastest the next one takes, with its 95 % interval; `is_settled` is true where no
        other may be as fast. What computes dense scores underneath, or is a control, is not judged.
        """
        import pandas as pd

        from attn_zoo.report.analysis.winners import times_faster
        from attn_zoo.report.tables.table import interval_values

        rows = []
        for panel in self.analysis.panels:
            for one in panel.winners:
                (first, label), *others = one.rivals
                row: dict[str, Any] = {
                    "panel": panel.name,
                    "seq_len": one.seq_len,
                    "variant": label,
                    "median_ms": first.median_ms,
                }
                row |= {"low_ms": first.low_ms, "high_ms": first.high_ms}
                for second, other in others[:1]:
                    ratio = times_faster(second, first)
                    row |= {"next_variant": other, **interval_values("ratio", ratio.value, ratio.low, ratio.high)}
                rows.append(row | {"is_settled": len(one.labels) == 1})
        return pd.DataFrame(rows)

    def crossovers(self) -> pd.DataFrame:
        """Return from which length each variant is cheaper than exact attention, in time and in peak memory."""
        from attn_zoo.report.tables.growth_tables import crossover_table

        return _raw(crossover_table(self.analysis))

    def exponents(self) -> pd.DataFrame:
        """Return fitted and claimed exponents of the sequence length, of time and peak memory."""
        from attn_zoo.report.tables.growth_tables import exponent_table

        return _raw(exponent_table(self.analysis))

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of the report, all digits kept.

        Raises:
            UnknownNameError: the report of these results has no such table.
        """
        from attn_zoo.report.tables.all_tables import find_table

        return _raw(find_table(self.analysis, name))

    def plot(self, name: str = "time") -> Figure:
        """Return a figure of the report.

        Args:
            name: `"time"`, `"memory"`, `"speedup"`, `"roofline"`, `"accuracy"`, `"bubbles"`, `"learning"` ...: how the
                name of its file begins. Of several the first is taken, so `"time-fwd_bwd"` says more than `"time"`.

        Raises:
            UnknownNameError: there is no such figure.
            ConfigError: these results have nothing to draw in it.
        """
        from attn_zoo.report.figures.all_figures import draw_pictures, figure_names
        from attn_zoo.report.figures.svg import render

        picture = next(draw_pictures(self.analysis, name), None)
        if picture is None:
            names = figure_names(self.analysis)
            if any(each.startswith(name) for each in names):
                raise ConfigError("plot", [("", f"these results have nothing to draw for {name!r}")])
            kinds = list(dict.fromkeys(each.partition("-")[0] for each in names))
            raise UnknownNameError("figure", name, [*kinds, *names], f"there are {', '.join(kinds) or 'none'}")
        figure = picture.figure
        figure._repr_png_ = lambda: render(figure, "png")  # type: ignore[attr-defined] # for a notebook without pyplot
        return figure

    def report(self, path: str | Path | None = None, *, has_readme: bool = False) -> Path:
        """Write tables, figures and one self-contained page; return the path of the page.

        Args:
            path: folder to write into; by default the (first) results folder, or one here of the name of a packed run.
            has_readme: also write a README.md, which describes the results folder itself.

        Raises:
            ConfigError: a README is asked for anywhere but in the one results folder.
            StoreError: the folder cannot be written.
        """
        from attn_zoo.report.pages.write import require_place, write_analysis

        if has_readme and (len(self.folders) > 1 or path is not None or not self.folders[0].is_dir()):
            raise ConfigError("readme", [("", "expected one results folder and no other place: it describes that one")])
        first = self.folders[0]
        place = path or (first if first.is_dir() else Path(slug(first.stem)))
        require_place(place)
        return write_analysis(self.brief, place, has_readme=has_readme)[0]

    def __repr__(self) -> str:
        observations = self.analysis.results.observations
        counts = Counter(one.record.status for one in observations)
        said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no cell"
        return f"Run({', '.join(map(str, self.folders))}: {said})"

    def _repr_html_(self) -> str:
        from attn_zoo.report.pages.findings import completeness, findings, headline
        from attn_zoo.report.tables.front_table import front_table

        texts = [text for text in (headline(self.analysis), completeness(self.analysis)) if text]
        said = "".join(f"<li>{html.escape(clean(text))}</li>" for text in [*texts, *findings(self.analysis)])
        tables = [table for table in (front_table(self.analysis),) if table is not None]
        shown = "".join(
            f"<p><b>{html.escape(clean(table.title))}</b></p>"
            + html_table([column.heading for column in table.columns], table.texts())
            for table in tables
        )
        return f"<p><b>{html.escape(repr(self))}</b></p><ul>{said}</ul>{shown}"


class Checks(tuple["CheckResult", ...]):
    """What the checks found about one variant, in their order; a notebook shows them as a table.

    Attributes:
        variant: its name.
    """

    variant: str

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """Promises that are broken, each with the smallest call that shows it, and checks that could not be made."""
        return tuple(result for result in self if result.is_bad)

    @property
    def is_ok(self) -> bool:
        """Whether no promise is broken."""
        return not self.failed

    def __repr__(self) -> str:
        width = max((len(result.check) for result in self), default=0)
        return "\n".join(
            [*(f"{name:{width}}  {outcome}  {why}".rstrip() for name, outcome, why in self.rows()), str(self)]
        )

    def __str__(self) -> str:
        count = Counter(result.outcome for result in self)
        return (
            f"{self.variant}: {count['passed']} passed, {count['refused']} refused as declared, "
            f"{count['not_applicable']} not applicable, {len(self.failed)} failed"
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (check, outcome, why) of each result, in words."""
        words = {"refused": "refused as declared", "not_applicable": "not applicable"}
        return [
            (
                one.check,
                one.outcome.upper() if one.is_bad else words.get(one.outcome, one.outcome),
                "" if one.outcome == "passed" else one.message,
            )
            for one in self
        ]

    def _repr_html_(self) -> str:
        examples = [f"{one.check}: smallest example: {one.example}" for one in self.failed if one.example]
        notes = "".join(f"<p>{html.escape(text)}</p>" for text in [str(self), *examples])
        return html_table(["check", "outcome", "why"], self.rows()) + notes


def _raw(table: Table) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame([dict(row) for row in table.rows], columns=list(table.fields))


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for a notebook; nothing in a text can be taken for markup."""
    lines = [("th", headings), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) for tag, texts in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
