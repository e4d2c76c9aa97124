"""Local Parquet files as tables of `datasets`, and what every labelled table must have.

Tables are read by PyArrow straight from the file, into memory: the network is not touched, and nothing is cached.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attn_zoo.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import datasets

_LABEL = "label"


def read_parquet(name: str, paths: Mapping[str, Path]) -> dict[str, datasets.Dataset]:
    """Return each file as a table, in the order of its rows, with the features that its metadata describe.

    Raises:
        UnsupportedError: `datasets` is not installed.
        ConfigError: a file is missing, cut short, or not Parquet; names it.
    """
    try:
        import datasets
        import pyarrow as arrow
        import pyarrow.parquet
    except ImportError:
        raise UnsupportedError("datasets", f"{name}: reading Parquet needs pip install 'attn-zoo[lra]'") from None
    tables = {}
    for key, path in paths.items():
        try:
            # Python's file says in words why it cannot be opened. Arrow reads its own: one of its threads that holds a
            # file of Python's aborts the process, or hangs, where that ends just then:
            # github.com/apache/arrow/issues/50482.
            with path.open("rb"), arrow.OSFile(os.fsencode(path)) as file:
                tables[key] = datasets.Dataset(arrow.parquet.ParquetFile(file).read())
        except (OSError, ValueError, TypeError, KeyError, AttributeError, arrow.ArrowException) as error:
            if isinstance(error, OSError) and error.strerror:
                problem = f"cannot be read: {error.strerror}"
            else:
                problem = f"cannot be read as Parquet, is it cut short? ({str(error).strip().partition(chr(10))[0]})"
            raise ConfigError(name, [(str(path), problem)]) from None
    return tables


def picture_bytes(table: datasets.Dataset, column: str) -> Iterator[bytes | None]:
    """Yield the encoded picture of each row, None where the table holds none; a `path` beside it is never looked at."""
    import datasets
    from pyarrow import compute

    pictures = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    for chunk in pictures.data.column(column).chunks:
        for stored in compute.struct_field(chunk, "bytes"):
            yield stored.as_py()


def texts_of(name: str, path: Path, table: datasets.Dataset, column: str) -> list[str]:
    """Return the texts of all rows.

    Raises:
        ConfigError: a text is missing or not UTF-8; names the row.
    """
    texts: list[str] = []
    for chunk in table.data.column(column).chunks:
        for stored in chunk:
            try:
                text = stored.as_py()
            except UnicodeDecodeError as error:
                raise ConfigError(name, [(str(path), f"row {len(texts)}: {error}")]) from None
            if text is None:
                raise ConfigError(name, [(str(path), f"row {len(texts)} has no text")])
            texts.append(text)
    return texts


def require_columns(name: str, path: Path, table: datasets.Dataset, columns: dict[str, str]) -> None:
    """Raise `ConfigError` unless the table has columns of the wanted kind: `Value('string')`, `Image(`.

    A string with 64-bit offsets, as Polars and pandas 3 write it, is a string.
    """
    problems = []
    for column, kind in columns.items():
        if column not in table.column_names:
            problems.append((str(path), f"expected a column {column!r}; it has {', '.join(table.column_names)}"))
        elif not repr(table.features[column]).replace("'large_string'", "'string'").startswith(kind):
            got = f"expected {kind.rstrip('(')} in column {column!r}; got {table.features[column]!r}"
            problems.append((str(path), got))
    if problems:
        raise ConfigError(name, problems)


def class_labels(name: str, path: Path, table: datasets.Dataset, classes: tuple[str, ...]) -> NDArray[np.uint8]:
    """Return the column `label`, `[N]`.

    Plain integers are taken as they are; a column that names its classes must name them as expected, in this order.

    Raises:
        ConfigError: the column is missing or of another type, it has other classes, a label is out of range, or there
            are no rows.
    """
    if _LABEL not in table.column_names:
        raise ConfigError(name, [(str(path), f"expected a column {_LABEL!r}; it has {', '.join(table.column_names)}")])
    feature = table.features[_LABEL]
    named = getattr(feature, "names", None)  # only class labels have them
    if named is not None and tuple(named) != classes:
        got = ", ".join(str(each) for each in named)
        raise ConfigError(name, [(str(path), f"expected the classes {', '.join(classes)}; got {got}")])
    if not re.fullmatch(r"u?int\d+", str(getattr(feature, "dtype", ""))):  # lists and tables in a column have none
        raise ConfigError(name, [(str(path), f"expected integers in column {_LABEL!r}; got {feature!r}")])
    values = table[_LABEL][:]
    if not values:
        raise ConfigError(name, [(str(path), "the table has no rows")])
    wrong = [(row, value) for row, value in enumerate(values) if value is None or not 0 <= value < len(classes)]
    if wrong:
        row, value = wrong[0]
        hint = "; -1 marks rows without a label, as in the unsupervised part" if value == -1 else ""
        text = (
            f"expected labels from 0 to {len(classes) - 1}; got {value} in {len(wrong)} rows, first in row {row}{hint}"
        )
        raise ConfigError(name, [(str(path), text)])
    return np.array(values, np.uint8)
