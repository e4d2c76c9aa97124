"""How the compression is cut into tiles and splits on a GPU: plain arithmetic, one rule for every length.

The three products (`triton_kernels`) have one small side, the rank k, which a tile should hold whole, so that tokens
are read once, and one long side, the positions, which is split until every multiprocessor has work.
"""

from __future__ import annotations

from dataclasses import dataclass

HOPPER_PROCESSORS = 132
HOPPER_SHARED_BYTES = 227 * 1024
MAX_RANK = 256  # of a tile of 16-bit numbers; 256 x 128 float32 sums fill half of the registers
MAX_COLUMNS = 128
MAX_PLAIN = 64  # tiles of float32 run on plain multiply-adds, which take both operands from registers
MIN_SPLIT = 256  # positions; shorter sums cost more to start and to add up than they save
SPLIT_COST = 256  # positions whose loads take as long as writing and reading again one partial tile
MAX_WAVES = 3
PROCESSOR_SUMS = 256 * 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sides of the tiles of one kernel, powers of two of at least 16, as matrix units ask.

    Args:
        rank: compressed rows.
        columns: (head, channel) columns.
        positions: of the sequence.
        warps: of one program, 32 threads each.
        stages: tiles in flight between memory and the multiprocessor.
        residents: programs that share a multiprocessor.
    """

    rank: int
    columns: int
    positions: int
    warps: int
    stages: int
    residents: int = 1

    @property
    def options(self) -> dict[str, int]:
        """Arguments of a kernel's launch."""
        sides = {"tile_k": self.rank, "tile_x": self.columns, "tile_s": self.positions}
        return {**sides, "num_warps": self.warps, "num_stages": self.stages}


def num_splits(tiles: int, length: int, slots: int = HOPPER_PROCESSORS) -> int:
    """Return how many parts the positions are split into.

    With n parts a launch takes ceil(tiles n / slots) waves of programs, and each program sums ceil(length / n)
    positions and pays for its partial tile as for `SPLIT_COST` more. Of the n that fill one, two or three waves best,
    the cheapest is taken, the smallest if equal; no part is shorter than `MIN_SPLIT`.

    Args:
        tiles: output tiles of all batches, heads and sources: programs without a split.
        length: positions.
        slots: programs that run at a time.

    >>> num_splits(tiles=16, length=65536)  # keys and values, 16 heads of 64, k = 256
    8
    >>> num_splits(tiles=16, length=2048), num_splits(tiles=16, length=512), num_splits(tiles=1000, length=65536)
    (8, 1, 1)
    """
    most = max(1, length // MIN_SPLIT)
    best, lowest = 1, -(-tiles // slots) * length
    for wave in range(1, MAX_WAVES + 1):
        count = min(most, max(1, wave * slots // tiles))
        cost = -(-tiles * count // slots) * (-(-length // count) + (SPLIT_COST if count > 1 else 0))
        if cost < lowest:
            best, lowest = count, cost
    return best


def _side(size: int, most: int) -> int:
    """Return the power of two that holds `size`, from 16 to `most`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def _share(sums: int, stage_bytes: int, shared_bytes: int, most_stages: int) -> tuple[int, int]:
    """Return stages in flight, and programs that share a multiprocessor: half its registers hold sums."""
    residents = max(1, min(4, PROCESSOR_SUMS // sums, shared_bytes // (2 * stage_bytes)))
    return max(1, min(most_stages, shared_bytes // (residents * stage_bytes))), residents


def forward_tiles(rank: int, columns: int, item_bytes: int, shared_bytes: int = HOPPER_SHARED_BYTES) -> Tiles:
    """Return the tiles of E^T tokens: `[rank, columns]` of sums, `positions` at a time."""
    is_plain = item_bytes > 2
    k = _side(rank, MAX_PLAIN if is_plain else MAX_RANK)
    x = _side(columns, MAX_PLAIN if is_plain else MAX_COLUMNS)
    step = 32 if is_plain else 64
    return Tiles(
        k, x, step, 8 if k * x > 128 * 128 else 4, *_share(k * x, step * (k + x) * item_bytes, shared_bytes, 4)
    )


def token_tiles(
    rank: int, columns: int, item_bytes: int, shared_bytes: int = HOPPER_SHARED_BYTES, *, is_summed: bool = False
) -> Tiles:
    """Return the tiles of E grad: `[positions, columns]`.

    Where the whole `[rank, columns]` of grad fits beside three stages of E it is held (`rank` of the tile covers the
    rank), and each program walks over positions. Else, and where two such products are summed, it is read in steps.
    """
    is_plain = item_bytes > 2
    x = _side(columns, MAX_PLAIN if is_plain else MAX_COLUMNS)
    k = _side(rank, MAX_RANK)
    fixed, stage = (k + 64) * x * item_bytes, 64 * k * item_bytes  # grad and a tile of the result; a tile of E
    stages = min(4, (shared_bytes - fixed) // stage)
    if not is_plain and not is_summed and rank <= MAX_RANK and stages >= 3:
        return Tiles(k, x, 64, 4, stages, max(1, min(4, shared_bytes // (fixed + stages * stage))))
    if is_plain:
        k, s, warps = _side(rank, 32), MAX_PLAIN, 4
    else:
        k, x, warps = _side(rank, 64), _side(columns, 2 * MAX_COLUMNS), 8
        s = min(256, PROCESSOR_SUMS // x)
    return Tiles(k, x, s, warps, *_share(s * x, k * (s + x) * item_bytes, shared_bytes, 3))


def matrix_tiles(rank: int, columns: int, item_bytes: int, shared_bytes: int = HOPPER_SHARED_BYTES) -> Tiles:
    """Return the tiles of tokens grad^T: `[positions, rank]` of sums, `columns` at a time."""
    is_plain = item_bytes > 2
    k = _side(rank, MAX_PLAIN if is_plain else MAX_RANK)
    x = _side(columns, 32 if is_plain else 64)
    s = MAX_PLAIN if is_plain else 128
    return Tiles(k, x, s, 8 if k * s > 128 * 128 else 4, *_share(s * k, x * (k + s) * item_bytes, shared_bytes, 4))
