"""Splits as files for other programs: JSON Lines for sequences, PNG pictures with a table for images.

A task calls one of these in its `export`, or writes its own published form. Nothing is overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_zoo.whole_files import whole_file, whole_folder

if TYPE_CHECKING:
    from torch import Tensor

    from attn_zoo.tasks.abstract_task import Split

__all__ = ["export_images", "export_jsonl"]

_IMAGES_PER_FOLDER = 10_000  # file managers and some file systems slow down beyond


def _row(split: Split, index: int, group_axes: Sequence[str]) -> dict[str, Any]:
    """Return one example as plain data, without padding."""
    length = int(split.lengths[index])
    row: dict[str, Any] = {
        "tokens": split.tokens[index, :length].tolist(),
        "length": length,
        "label": _label(split, index),
    }
    if split.other_tokens is not None and split.other_lengths is not None:
        row["other_tokens"] = split.other_tokens[index, : int(split.other_lengths[index])].tolist()
    if split.groups is not None:
        row["groups"] = dict(zip(group_axes, split.groups[index].tolist(), strict=True))
    return row


def _label(split: Split, index: int) -> Any:
    """Return the class, or a label for each position: of the target, where there is one, else of the input."""
    label: Tensor = split.labels[index]
    if label.ndim == 0:
        return label.item()
    lengths = split.lengths if split.other_lengths is None else split.other_lengths
    return label[: int(lengths[index])].tolist()


def export_jsonl(split: Split, out: Path, *, group_axes: Sequence[str] = ()) -> list[Path]:
    """Write one JSON object per example: `tokens`, `length`, `label`, and where there are any `other_tokens`, `groups`.

    Sequences come without padding. A label of -100 is not scored.

    Args:
        split: what to write.
        out: file to write.
        group_axes: names of the columns of `split.groups`.

    Returns:
        The file.

    Raises:
        FolderError: the file exists or cannot be written; no trace is left.
    """
    with whole_file(out) as temporary, temporary.open("w", encoding="ascii", newline="\n") as file:
        for index in range(len(split)):
            file.write(json.dumps(_row(split, index, group_axes), separators=(",", ":")) + "\n")
    return [out]


def export_images(split: Split, out: Path, shape: tuple[int, int]) -> list[Path]:
    """Write each example as an 8-bit grey PNG, and `index.tsv` with the columns `file` and `label`.

    Args:
        split: rows of grey levels, row-major, one token per pixel.
        out: folder to make. Pictures lie in `images/0`, `images/1`, ... of it.
        shape: rows and columns of the pictures.

    Returns:
        The table and the folder of the pictures.

    Raises:
        ValueError: rows do not have one token per pixel, or a token is no grey level.
        FolderError: the folder exists or cannot be written; no trace is left.
    """
    import numpy as np
    from PIL import Image

    height, width = shape
    pixels = split.tokens
    if pixels.shape[1] != height * width or not bool((split.lengths == height * width).all()):
        raise ValueError(f"expected {height} x {width} = {height * width} tokens in each row; got {pixels.shape[1]}")
    if len(split) and not 0 <= int(pixels.min()) <= int(pixels.max()) <= 255:
        raise ValueError("expected tokens from 0 to 255, the grey levels")
    with whole_folder(out) as folder, (folder / "index.tsv").open("w", encoding="ascii", newline="\n") as index:
        index.write("file\tlabel\n")
        for number in range(len(split)):
            name = f"images/{number // _IMAGES_PER_FOLDER}/{number:06d}.png"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            picture = pixels[number].numpy().astype(np.uint8).reshape(height, width)
            Image.fromarray(picture).save(folder / name)
            index.write(f"{name}\t{int(split.labels[number])}\n")
    return [out / "index.tsv", out / "images"]
