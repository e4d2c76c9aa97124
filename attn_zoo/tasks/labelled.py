"""What every labelled table must have, checked before a row is used; and splits drawn from it class by class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attn_zoo.errors import ConfigError
from attn_zoo.tasks.generated.draws import Draws, Ints

if TYPE_CHECKING:
    import datasets

__all__ = ["class_labels", "per_class", "require_columns", "shuffled"]

_LABEL = "label"


def require_columns(name: str, path: Path, table: datasets.Dataset, columns: dict[str, str]) -> None:
    """Raise `ConfigError` unless the table has columns of the wanted kind.

    Args:
        name: of the data, for messages.
        path: of the file the table was read from.
        table: as `read_parquet` returned it.
        columns: type of value by column, as the table's own description begins: `Value('string')`, `Image(`.
    """
    problems = []
    for column, kind in columns.items():
        if column not in table.column_names:
            problems.append((str(path), f"expected a column {column!r}; it has {', '.join(table.column_names)}"))
        elif not repr(table.features[column]).startswith(kind):
            got = f"expected {kind.rstrip('(')} in column {column!r}; got {table.features[column]!r}"
            problems.append((str(path), got))
    if problems:
        raise ConfigError(name, problems)


def class_labels(name: str, path: Path, table: datasets.Dataset, classes: tuple[str, ...]) -> NDArray[np.uint8]:
    """Return the column `label`, `[N]`.

    Plain integers are taken as they are; a column that names its classes must name them as expected, in this order.

    Args:
        name: of the data, for messages.
        path: of the file the table was read from.
        table: as `read_parquet` returned it.
        classes: names of the classes.

    Raises:
        ConfigError: the column is missing or of another type, it has other classes, or a label is out of range.
    """
    if _LABEL not in table.column_names:
        raise ConfigError(name, [(str(path), f"expected a column {_LABEL!r}; it has {', '.join(table.column_names)}")])
    feature = table.features[_LABEL]
    named = getattr(feature, "names", None)  # only class labels have them
    if named is not None and tuple(named) != classes:
        raise ConfigError(name, [(str(path), f"expected the classes {', '.join(classes)}; got {', '.join(named)}")])
    if "int" not in str(feature.dtype):
        raise ConfigError(name, [(str(path), f"expected integers in column {_LABEL!r}; got {feature!r}")])
    values = table[_LABEL][:]
    wrong = [(row, value) for row, value in enumerate(values) if value is None or not 0 <= value < len(classes)]
    if wrong:
        row, value = wrong[0]
        hint = "; -1 marks rows without a label, as in the unsupervised part" if value == -1 else ""
        text = (
            f"expected labels from 0 to {len(classes) - 1}; got {value} in {len(wrong)} rows, first in row {row}{hint}"
        )
        raise ConfigError(name, [(str(path), text)])
    return np.array(values, np.uint8)


def shuffled(count: int, seed: int, *stream: int) -> Ints:
    """Return 0 .. count - 1 in a random order that is the same on every machine."""
    return np.argsort(Draws(seed, *stream).uniform(count), kind="stable").astype(np.int64)


def per_class(rows: Ints, labels: NDArray[np.integer], counts: dict[int, int]) -> Ints:
    """Return the first `counts[c]` of the rows of each class c, in the order of `rows`.

    Args:
        rows: indices into `labels`.
        labels: class of every row.
        counts: by class; more than there are takes all.

    >>> per_class(np.array([3, 0, 2, 1]), np.array([0, 1, 0, 1]), {0: 1, 1: 1}).tolist()
    [3, 0]
    """
    mine = labels[rows]
    keep = np.zeros(len(rows), bool)
    for label, count in counts.items():
        keep[np.flatnonzero(mine == label)[:count]] = True
    return rows[keep]
