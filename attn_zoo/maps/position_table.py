"""What is added to embeddings for each position, and how alike positions are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import normalize

from attn_zoo.errors import ConfigError, UnsupportedError, counted
from attn_zoo.maps.find import find_weights
from attn_zoo.model.initialise import initialise
from attn_zoo.model.positions import Embedding
from attn_zoo.report.figures.heat import Shades, draw_colour_bar, draw_squares, signed_number, weight_shades
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import INK, MUTED, styled
from attn_zoo.training.weights import load_trained

AddedPosition = Literal["sinusoidal", "learned"]
Table = NDArray[np.float32]

PANEL = 3.4
MAX_LIMIT_QUANTILE = 0.999

MAX_SIZE = 8192
"""Positions, of which each two are compared, and features, of a table that no model has."""


def position_table(kind: AddedPosition, length: int, dim: int) -> Table:
    """Return what a model adds before training, `[length, dim]`; learned positions as our models draw them, seed 0.

    Raises:
        ConfigError: a size is not positive, or beyond `MAX_SIZE`.
    """
    for name, size in (("--len", length), ("--dim", dim)):
        if not 1 <= size <= MAX_SIZE:
            raise ConfigError(name, [("", f"expected 1 to {MAX_SIZE}; got {size}")])
    embedding = Embedding(1, dim, length, position=kind, resid_dropout_p=0.0)
    initialise(embedding, 0)
    return _added(embedding)


def _added(embedding: Embedding) -> Table:
    added = embedding.sinusoidal if embedding.learned is None else embedding.learned.weight
    assert added is not None
    table: Table = added.detach().float().cpu().numpy()
    return table


def cosine_similarity(table: Table) -> Table:
    """Return the cosine of the angle between each two rows of `[P, E]`, `[P, P]`; 0 where a row is zero."""
    unit = normalize(torch.from_numpy(table), dim=1)
    similarity: Table = (unit @ unit.T).numpy()
    return similarity


def position_map(
    folder: Path | None = None,
    pattern: str | None = None,
    *,
    kind: AddedPosition = "sinusoidal",
    length: int = 128,
    dim: int = 64,
    data_dir: Path | None = None,
) -> Figure:
    """Return the figure of the positions of a trained model, or, without a folder, of a kind as a model starts with it.

    Raises:
        ConfigError: no weights are kept, or a size is not positive or beyond `MAX_SIZE`.
        UnknownNameError: no cell matches.
        UnsupportedError: the model adds no positions.
    """
    if folder is None:
        how = "computed, never trained" if kind == "sinusoidal" else "as a model starts, before training"
        return draw_positions(position_table(kind, length, dim), title=f"{kind.capitalize()} positions", how=how)
    trained = load_trained(find_weights(folder, pattern), data_dir)
    table, how = _table_of(trained.model), trained.cell.id
    if table is None:
        raise UnsupportedError(
            "positions", f"{how}: position = {trained.config.position!r} adds nothing to embeddings; there is no table"
        )
    return draw_positions(table, title=f"{trained.config.position.capitalize()} positions after training", how=how)


def _table_of(model: nn.Module) -> Table | None:
    """Return the positions of the first stack that adds any."""
    for module in model.modules():
        if isinstance(module, Embedding) and (module.learned is not None or module.sinusoidal is not None):
            return _added(module)
    return None


def draw_positions(table: Table, *, title: str, how: str) -> Figure:
    """Return the figure of a table `[P, E]`: values by position and feature, and how alike each two positions are."""
    length, dim = table.shape
    note = (
        f"{how}; {counted(length, 'position')}, {counted(dim, 'feature')}. Left: what is added to the embedding at "
        "each position. Right: cosine of the angle between what two positions get."
    )
    limit = float(np.quantile(np.abs(table), MAX_LIMIT_QUANTILE))
    values, cosines = weight_shades(table, limit), weight_shades(np.array([-1.0, 1.0], dtype=np.float32))
    with styled():
        page = Page(title, note, width=10.6)
        left, right = page.panels(2, height=PANEL, columns=2, left=0.72, right=1.33, gap=1.75, above=0.25)
        draw_colour_bar(page, left, values, signed_number, "value")
        draw_colour_bar(page, right, cosines, signed_number, "cosine")
        _draw_table(left, table, values, "feature", "added to the embedding")
        _draw_table(right, cosine_similarity(table), cosines, "position", "similarity of positions")
    return page.figure


def _draw_table(axes: Axes, values: Table, shades: Shades, across: str, title: str) -> None:
    draw_squares(axes, values, shades)
    axes.set_title(title, color=INK, pad=5)
    axes.set_xlabel(across, fontsize=9, color=MUTED)
    axes.set_ylabel("position", fontsize=9, color=MUTED)
    axes.tick_params(length=2, labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10], integer=True))
