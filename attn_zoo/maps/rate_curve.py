"""The learning rate of a protocol, update by update."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from attn_zoo.errors import counted
from attn_zoo.registry import tasks
from attn_zoo.report.figures.axes import annotate
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import COLOURS, INK, styled
from attn_zoo.training.protocol import Protocol, learning_rate, resolve_protocol
from attn_zoo.units import human_number

if TYPE_CHECKING:
    from attn_zoo.tasks import AbstractTask

MAX_POINTS = 2_000


def protocol_rates(protocol: Protocol) -> dict[int, float]:
    """Return the learning rate by the number of the update, from 1 to the last, in this order.

    Of all updates, or of evenly spaced ones with warm-up's end among them.
    """
    stride = max(1, protocol.num_steps // MAX_POINTS)
    chosen = {*range(1, protocol.num_steps + 1, stride), protocol.num_steps}
    if 0 < protocol.warmup_steps <= protocol.num_steps:
        chosen.add(protocol.warmup_steps)
    return {
        step: learning_rate(
            protocol.schedule,
            step,
            base_lr=protocol.base_lr,
            warmup_steps=protocol.warmup_steps,
            num_steps=protocol.num_steps,
            embed_dim=protocol.embed_dim,
        )
        for step in sorted(chosen)
    }


def schedule_map(name: str, task: str | None = None) -> Figure:
    """Return the figure of the learning rate against the update, warm-up marked.

    Args:
        name: of a protocol.
        task: with the settings of this task, or none.

    Raises:
        UnknownNameError: no such protocol or task.
    """
    settings = None
    if task is not None:
        task_class: type[AbstractTask] = tasks[task]
        settings = task_class.settings.get(name)
    protocol = resolve_protocol(name, task_settings=settings)
    rates = protocol_rates(protocol)
    peak_step, peak = max(rates.items(), key=itemgetter(1))  # the first of equal ones
    of_task = f" for {task}" if task else ""
    note = (
        f"{counted(protocol.num_steps, 'update')} of batches of {protocol.batch_size}, {protocol.warmup_steps:,} of "
        f"them warm-up; schedule {protocol.schedule}, base rate {human_number(protocol.base_lr)}"
    )
    if task and not settings:
        note += f"; {task} sets nothing of its own"
    if protocol.pretrain:
        note += f". Pretraining goes before, {counted(protocol.pretrain_steps, 'update')} that are not drawn"
    with styled():
        page = Page(f"Learning rate of {name}{of_task}", note)
        (axes,) = page.panels(height=3.2, left=0.95, right=0.35)
        axes.set_xlim(0, protocol.num_steps * 1.01)
        axes.set_ylim(0, peak * 1.16)
        axes.plot(list(rates), list(rates.values()), color=COLOURS[0], lw=1.9, zorder=3)
        axes.plot([peak_step], [peak], marker="o", ms=5.5, mec="white", mfc=COLOURS[0], mew=0.8, zorder=4)
        words = f"highest: {human_number(peak)} at update {peak_step:,}"
        ha, across = ("left", 8) if peak_step < protocol.num_steps * 0.7 else ("right", -8)
        annotate(axes, words, (peak_step, peak), (across, 7), ha=ha, va="baseline", fontsize=8.5, color=INK)
        if protocol.warmup_steps:
            end = min(protocol.warmup_steps, protocol.num_steps)
            axes.axvspan(0, end, color=COLOURS[4], alpha=0.16, lw=0, zorder=0.5)
            is_wide = end > 0.12 * protocol.num_steps
            at, offset = ((0, peak * 1.16), (5, -13)) if is_wide else ((end, 0), (5, 6))
            annotate(axes, "warm-up", at, offset, va="baseline", fontsize=8.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("update")
        axes.set_ylabel("learning rate")
    return page.figure
