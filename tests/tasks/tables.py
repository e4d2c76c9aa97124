"""Small Parquet files in the layout of the hub, written by the tests that read them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

NAMES = {"train": "train-00000-of-00001.parquet", "test": "test-00000-of-00001.parquet"}


def write_reviews(path: Path, texts: list[str], labels: list[int], *, text="text", names=("neg", "pos")) -> None:
    """Write texts and labels with the features that the hub's file carries."""
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=list(names)) if names else datasets.Value("int64")
    features = datasets.Features({text: datasets.Value("string"), "label": label})
    _write(datasets.Dataset.from_dict({text: texts, "label": labels}, features=features), path)


def png(pixels: np.ndarray) -> bytes:
    """Return a picture as the bytes of a PNG file."""
    picture = pytest.importorskip("PIL.Image").fromarray(pixels)
    out = io.BytesIO()
    picture.save(out, format="PNG")
    return out.getvalue()


def write_pictures(
    path: Path,
    pictures: Sequence[bytes | None],
    labels: list[int],
    names: tuple[str, ...],
    *,
    paths: Sequence[str | None] = (),
) -> None:
    """Write PNG files and labels with the features that the hub's file carries."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    paths = paths or [None] * len(pictures)
    rows = [{"bytes": picture, "path": at} for picture, at in zip(pictures, paths, strict=True)]
    table = datasets.Dataset.from_dict({"img": rows, "label": labels}, features=features)
    # As `Dataset.to_parquet` writes it, which would look for the pictures behind the paths.
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(table.data.table, path)


def _write(table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        table.to_parquet(file)
