"""How a workspace in bytes becomes tiles: rows of a block times vocabulary columns of a tile.

The choice depends on the head and the workspace, never on the number of rows, so that a row is computed in the same
tiles, and with the same bits, in every batch.

Legend: H hidden size, V vocabulary, r LoRA rank.
"""

import math
from typing import NamedTuple

import torch

from .head import ROW_MULTIPLE, Head, round_up

DEFAULT_WORKSPACE_BYTES = {"cpu": 20 * 2**20}
DEFAULT_WORKSPACE_BYTES_GPU = 256 * 2**20


class TileSize(NamedTuple):
    """Rows of a block and columns of a tile."""

    rows: int
    columns: int

    def row_blocks(self, rows: int) -> list[tuple[int, int]]:
        """Bounds of the fewest equal blocks of at most `self.rows` rows."""
        count = max(1, math.ceil(rows / self.rows))
        step = round_up(math.ceil(rows / count), ROW_MULTIPLE)
        return [(r, min(r + step, rows)) for r in range(0, rows, step)] if rows else []

    def column_tiles(self, vocabulary: int) -> list[tuple[int, int]]:
        """Bounds of the vocabulary's tiles."""
        return [(c, min(c + self.columns, vocabulary)) for c in range(0, vocabulary, self.columns)]


MAX_TILE = {"cpu": TileSize(1024, 1024)}
"""Larger tiles gain nothing. On a CPU 4 MiB are small enough for the elementwise work to stay in the cache, and large
enough for two threads."""
MAX_TILE_GPU = TileSize(2**20, 4096)


def max_tile(device: torch.device) -> TileSize:
    """The largest tile that is used on a device."""
    return MAX_TILE.get(device.type, MAX_TILE_GPU)


def default_workspace(device: torch.device) -> int:
    """Bytes of the default workspace."""
    return DEFAULT_WORKSPACE_BYTES.get(device.type, DEFAULT_WORKSPACE_BYTES_GPU)


def choose_tile_size(
    vocabulary: int, depth: int, workspace: int, itemsize: int, copies: int, largest: TileSize
) -> TileSize:
    """The largest tiles whose scratch fits `workspace` bytes; at least 16 x 16.

    `depth` is H + r. A quarter of the workspace holds the `copies` of weight tiles, if there are any. The rest is for
    the rows: a tile, two tiles of the same size for elementwise work, and three `[rows, H + r]`. A larger workspace
    never has fewer rows or fewer columns.
    """
    widest = min(largest.columns, round_up(vocabulary, ROW_MULTIPLE))
    bytes_per_column = itemsize * max(3 * ROW_MULTIPLE, copies * depth)
    columns = widest
    while columns > ROW_MULTIPLE and columns * bytes_per_column > workspace // 4:
        columns = max(ROW_MULTIPLE, round_up(columns // 2, ROW_MULTIPLE))
    bytes_for_rows = workspace - (workspace // 4 if copies else 0)
    rows = bytes_for_rows // (itemsize * 3 * (widest + depth) * ROW_MULTIPLE) * ROW_MULTIPLE
    return TileSize(min(max(rows, ROW_MULTIPLE), largest.rows), columns)


def weight_copies(head: Head) -> int:
    """Weight tiles in scratch: two while converted to the products' dtype, one float32 sum of a 16-bit gradient."""
    return 2 * (head.weight.dtype != head.operand) + (head.weight.dtype != head.accumulate)


def tile_size(head: Head, workspace: int) -> TileSize:
    """The tiles of a head in a workspace of that many bytes."""
    copies, largest = weight_copies(head), max_tile(head.weight.device)
    return choose_tile_size(head.weight.shape[0], head.depth, workspace, head.accumulate.itemsize, copies, largest)


def scratch_bytes(head: Head, rows: int, workspace: int) -> int:
    """Bound on the scratch of a call with that many rows, forward and backward."""
    size = tile_size(head, workspace)
    tallest = min(size.rows, round_up(rows, ROW_MULTIPLE))
    numbers = tallest * 3 * (size.columns + head.depth) + weight_copies(head) * size.columns * head.depth
    return numbers * head.accumulate.itemsize


class Tiling(NamedTuple):
    """The row blocks and vocabulary tiles of a call, as (first, one past the last)."""

    rows: list[tuple[int, int]]
    columns: list[tuple[int, int]]

    @classmethod
    def of(cls, head: Head, workspace: int, rows: int) -> "Tiling":
        """The tiling of a call with that many rows."""
        size = tile_size(head, workspace)
        return cls(size.row_blocks(rows), size.column_tiles(head.weight.shape[0]))

    @property
    def tallest(self) -> int:
        """Rows of the largest block, padding included."""
        return max((round_up(stop - start, ROW_MULTIPLE) for start, stop in self.rows), default=0)

    @property
    def widest(self) -> int:
        """Columns of the largest tile, padding included."""
        return max(round_up(stop - start, ROW_MULTIPLE) for start, stop in self.columns)
