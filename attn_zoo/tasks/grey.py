"""Pictures as sequences: colours to grey levels as TensorFlow does it, smaller, and as text for people."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["block_picture", "grey_levels", "halved"]

_SHADES = " ░▒▓█"
_WEIGHTS = np.array([0.2989, 0.5870, 0.1140], np.float32)


def grey_levels(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return grey levels 0..255 `[..., rows, columns]` of colours `[..., rows, columns, 3]`.

    0.2989 red + 0.5870 green + 0.1140 blue of colours scaled to [0, 1], times 255.5, cut to an integer, in float32:
    `tf.image.rgb_to_grayscale`, on which Long Range Arena's Image rests. Pillow's "L" has other weights and rounds; on
    CIFAR-10 one pixel in five differs, by one level.

    >>> grey_levels(np.array([[[255, 255, 255], [255, 0, 0]]], np.uint8)).tolist()
    [[255, 76]]
    """
    scaled = pictures.astype(np.float32) * np.float32(1.0 / 255.0)
    grey = scaled[..., 0] * _WEIGHTS[0] + scaled[..., 1] * _WEIGHTS[1] + scaled[..., 2] * _WEIGHTS[2]
    levels: NDArray[np.uint8] = (grey * np.float32(255.5)).astype(np.uint8)
    return levels


def halved(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the mean of each square of four pixels, halves rounded up, `[..., rows / 2, columns / 2]`.

    >>> halved(np.array([[0, 1], [1, 0]], np.uint8)).tolist()
    [[1]]
    """
    *front, rows, columns = pictures.shape
    squares = pictures.reshape(*front, rows // 2, 2, columns // 2, 2).astype(np.uint16)
    means: NDArray[np.uint8] = ((squares.sum((-3, -1)) + 2) // 4).astype(np.uint8)
    return means


def block_picture(levels: NDArray[np.integer]) -> str:
    """Return grey levels `[rows, columns]` as text, two block characters for each pixel.

    >>> block_picture(np.array([[255, 64]]))
    '██░░'
    """
    shades = levels.astype(np.int64) * len(_SHADES) // 256
    return "\n".join("".join(_SHADES[shade] * 2 for shade in row) for row in shades)
