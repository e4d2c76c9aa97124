"""How the compression is cut on a GPU: every multiprocessor has work, nothing is larger than the chip."""

import math

import pytest

from attn_zoo.kernels.compress.triton_tiles import (
    HOPPER_SHARED_BYTES,
    MIN_SPLIT,
    forward_tiles,
    matrix_tiles,
    num_splits,
    token_tiles,
)

RANKS = [1, 12, 64, 100, 128, 256, 300, 1024]
COLUMNS = [1, 16, 64, 96, 128, 1024, 4096]


@pytest.mark.parametrize("tiles", [1, 2, 7, 8, 16, 31, 64, 88, 100, 131, 132, 133, 200, 1000])
@pytest.mark.parametrize("length", [1, 100, 512, 4096, 65_536, 1_048_576])
def test_splits_keep_the_device_busy(tiles: int, length: int):
    splits = num_splits(tiles, length, 132)
    assert 1 <= splits <= max(1, length // MIN_SPLIT)
    if length >= 65_536:
        waves = math.ceil(tiles * splits / 132)
        assert tiles * splits / (132 * waves) >= 2 / 3
    if tiles >= 132 * 8:
        assert splits == 1  # there are programs enough


def test_short_sequences_are_not_split_below_what_pays():
    assert num_splits(1, 2 * MIN_SPLIT - 1) == 1
    assert num_splits(1, 64 * MIN_SPLIT) == 64


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("shared_bytes", [HOPPER_SHARED_BYTES, 99 * 1024])
def test_tiles_fit_the_chip(rank: int, columns: int, item_bytes: int, shared_bytes: int):
    sizing = (rank, columns, item_bytes, shared_bytes)
    forward, matrix = forward_tiles(*sizing), matrix_tiles(*sizing)
    tokens = [token_tiles(*sizing, is_summed=is_summed) for is_summed in (False, True)]
    for tiles, sums, step in (
        (forward, forward.rank * forward.columns, forward.positions * (forward.rank + forward.columns)),
        (matrix, matrix.rank * matrix.positions, matrix.columns * (matrix.rank + matrix.positions)),
        *((x, x.columns * x.positions, x.rank * x.positions) for x in tokens),
    ):
        for side in (tiles.rank, tiles.columns, tiles.positions):
            assert side >= 16
            assert side.bit_count() == 1
        assert sums <= 128 * 32 * tiles.warps  # float32 sums of one thread: half its 255 registers
        assert tiles.stages >= 1
        assert tiles.residents * tiles.stages * step * item_bytes <= shared_bytes


def test_every_token_is_read_once_where_the_rank_fits():
    assert forward_tiles(256, 1024, 2).rank == 256
    assert matrix_tiles(256, 1024, 2).rank == 256
    assert token_tiles(256, 1024, 2).rank == 256  # grad is held
    assert token_tiles(256, 1024, 2, is_summed=True).rank < 256
