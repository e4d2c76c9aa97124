"""How sensitive each variant is to the learning rate: validation against the rate, where it was tuned."""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attn_zoo.report.analysis.scores import AccuracyGroup
from attn_zoo.report.analysis.trials import Trial
from attn_zoo.report.figures.curves import Picture
from attn_zoo.report.figures.labels import EndLabel, draw_labels, label_width
from attn_zoo.report.figures.panels import make_panels_figure
from attn_zoo.report.figures.style import MUTED, Look, plain, styled
from attn_zoo.report.wording import outcome

__all__ = ["tuning_picture"]

RATE = "base_lr"


def tuning_picture(group: AccuracyGroup, look_of: Mapping[str, Look]) -> Picture | None:
    """Return validation against the learning rate; None where fewer than two rates were tried.

    Of several trials with one rate the best on validation counts. A rate at which no seed finished is marked at the
    lower edge.
    """
    if RATE not in group.setting.tuned:
        return None
    curves = {key: _best_by_rate(trials, group) for key, trials in group.trials.items()}
    rates = sorted({rate for curve in curves.values() for rate in curve})
    values = [trial.validation for curve in curves.values() for trial in curve.values() if trial.validation is not None]
    if len(rates) < 2 or not values:
        return None
    metric = group.metric
    title = f"Sensitivity to the learning rate: {group.title}"
    others = [name for name in group.setting.tuned if name != RATE]
    said = f"{group.how}; ringed: selected" + (f"; best over {', '.join(others)} at each rate" if others else "")
    worst = max(values) if metric.is_lower_better else min(values)
    best = metric.best(values)
    edge = worst + 0.12 * ((worst - best) or 0.02 * abs(best))
    labels: list[EndLabel] = []
    lost: list[str] = []
    lost_keys: list[tuple[str, str]] = []
    num_lost = sum(any(trial.validation is None for trial in curve.values()) for curve in curves.values())
    with styled():
        names = {(score.label, score.start): score.name for score in group.scores}
        height = max(3.0, 0.4 * len(curves))
        figure, (axes,) = make_panels_figure(title, said, [], count=1, columns=1, height=height)
        axes.set_xscale("log")
        for key, curve in curves.items():
            look = look_of[key[0]]
            points = [(rate, trial.validation) for rate, trial in sorted(curve.items()) if trial.validation is not None]
            failed = [rate for rate, trial in curve.items() if trial.validation is None]
            # Side by side, or those of several variants at one rate would be one cross.
            aside = math.exp(0.02 * math.log(rates[-1] / rates[0]) * (len(lost_keys) - (num_lost - 1) / 2))
            axes.plot(
                [rate * aside for rate in failed], [edge] * len(failed), marker="x", ms=6, mew=1.8, lw=0,
                color=look.colour, zorder=4,
            )  # fmt: skip
            lost_keys += [key] if failed else []
            lost += [outcome(run.record.status).word for rate in failed for run in curve[rate].runs]
            if not points:
                continue
            style = (0, (2, 1)) if key[1] else "-"
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=look.colour, lw=1.9, ls=style, marker=look.marker, ms=5.5, mec="white", mew=0.7)
            for rate, trial in curve.items():
                if trial.is_selected and trial.validation is not None:
                    axes.plot([rate], [trial.validation], marker="o", ms=12, mfc="none", mec=look.colour, mew=1.5)
            name = plain(names[key], 30)
            labels.append(EndLabel(name, f"{len(group.trials[key])} trials", look.colour, x[-1], y[-1]))
        box, room = axes.get_position(), label_width(figure, labels) + 0.36
        axes.set_position((box.x0, box.y0, box.width - room / figure.get_figwidth(), box.height))
        axes.xaxis.set_major_locator(FixedLocator(rates))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: metric.tick(value)))
        axes.set_xlabel("learning rate (base_lr)", fontsize=9.5)
        axes.set_ylabel(f"validation {metric.axis}", fontsize=9.5)
        if lost:
            axes.axhline(edge, color=MUTED, lw=0.6, zorder=1)
            axes.annotate(
                f"no score: {', '.join(sorted(set(lost)))}",
                xy=(0, edge),
                xycoords=("axes fraction", "data"),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=8,
                color=MUTED,
            )
        axes.set_ylim(axes.get_ylim())  # labels need final limits
        draw_labels(axes, labels)
    said_all = "; ".join(
        f"{names[key]}: "
        + ", ".join(
            f"{rate:g} {'no score' if trial.validation is None else metric.show(trial.validation)}"
            for rate, trial in sorted(curve.items())
        )
        for key, curve in curves.items()
    )
    return Picture(f"tuning-{group.name}", title, f"{title}, {said}. {said_all}.", figure)


def _best_by_rate(trials: tuple[Trial, ...], group: AccuracyGroup) -> dict[float, Trial]:
    found: dict[float, Trial] = {}
    for trial in trials:
        rate = trial.values.get(RATE)
        if not isinstance(rate, int | float):
            continue
        before = found.get(float(rate))
        order = group.metric.order
        if (
            before is None
            or trial.is_selected
            or (not before.is_selected and order(trial.validation) < order(before.validation))
        ):
            found[float(rate)] = trial
    return found
