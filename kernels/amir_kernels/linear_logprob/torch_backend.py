"""The head in torch: statistics of each row over tiles of the vocabulary, and the tiles of dlogits for the backward.

With z the `[N, V]` logits after scale, soft cap and temperature, the forward keeps per row
m = max z, S = sum e^(z - m), sum e^(z - m) (z - m) and z_target, updated tile by tile.

Legend: n live rows, R rows of a block, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .backward import FormDlogits, Slopes
from .head import ROW_MULTIPLE, Head, Ranges, RowBlock, Rows, add_product, product, round_up

DEEPEST = {torch.float32: -87.0, torch.float64: -708.0}
"""z - m is clamped here: e^(z - m) stays a normal number, 1e-38 where the sum is 1 or more. Results that underflow make
a CPU's exp 20 times slower, and -inf times 0 cannot arise."""
LOWEST = -1e30
"""Start of the running maximum. Finite, so that a tile of -inf gives e^(-inf - m) = 0 and no NaN."""


Owned = tuple[Tensor, Tensor] | None
"""The rows of a block whose targets lie in a tile, and their columns there; None where no row's does."""


def owners(target: Tensor, columns: list[tuple[int, int]]) -> list[Owned]:
    """For each tile the rows it owns. Waits for the device."""
    in_order, rows = target.sort(stable=True)
    starts = torch.tensor([start for start, _ in columns] + [columns[-1][1]], device=target.device)
    cuts = torch.searchsorted(in_order, starts).tolist()
    spans = zip(columns, cuts, cuts[1:], strict=False)
    return [(rows[a:b], in_order[a:b] - start) if a < b else None for (start, _), a, b in spans]


class Tiles:
    """Scratch, and the logits tiles formed in it. A tile is `[R, C rounded up to 16s]`, -inf past V."""

    def __init__(self, head: Head, ranges: Ranges) -> None:
        self.head = head
        self._size = ranges.tallest * ranges.widest
        self._rooms: dict[str, Tensor] = {}

    def room(self, name: str, rows: int, width: int) -> Tensor:
        """`[rows, width]` of the scratch of that name, which is allocated when it is first asked for."""
        if name not in self._rooms:
            self._rooms[name] = torch.empty(self._size, dtype=self.head.accumulate, device=self.head.weight.device)
        return self._rooms[name][: rows * width].view(rows, width)

    def tile(self, block: RowBlock, start: int, stop: int) -> Tensor:
        """Room for a tile; the same for every tile."""
        return self.room("tile", block.padded, round_up(stop - start, ROW_MULTIPLE))

    def logits(self, block: RowBlock, weight: Tensor, start: int, stop: int, tile: Tensor) -> Tensor:
        """logit-scale, cap and temperature still to come: hidden @ weight.T + low_rank @ b.T + bias, in `tile`."""
        head, products = self.head, tile[:, : stop - start]
        product(block.hidden, weight.T, products)
        if head.lora:
            add_product(products, block.low_rank, head.lora.b[start:stop].to(head.accumulate).T)
        if head.bias is not None:
            products.add_(head.bias[start:stop].to(head.accumulate))
        return tile

    def finish_logits(self, tile: Tensor, block: RowBlock, valid: int) -> Tensor | None:
        """Scale, cap and temperature, in place. Returns the cap's derivative 1 - tanh^2 where there is a cap."""
        head, slope = self.head, None
        if head.logit_scale != 1.0:
            tile.mul_(head.logit_scale)
        if head.softcap is not None:
            tile.div_(head.softcap).tanh_()
            slope = self.room("slope", *tile.shape).fill_(1.0).addcmul_(tile, tile, value=-1)  # t^2 is not rounded
            tile.mul_(head.softcap)
        if isinstance(block.temperature, Tensor):
            tile.div_(block.temperature[:, None])
        elif block.temperature != 1.0:
            tile.div_(block.temperature)
        if valid < tile.shape[1]:
            tile[:, valid:] = -math.inf
        return slope


# ---- forward -------------------------------------------------------------------------------------------------------


class RowStats(NamedTuple):
    """Statistics of rows over the columns seen so far."""

    shift: Tensor
    """m"""
    total: Tensor
    """S, summed in float64: beside the 1 of a nearly certain token other terms would round to nothing"""
    weighted: Tensor | None
    """sum e^(z - m) (z - m)"""
    picked: Tensor
    """z_target"""

    def of(self, rows: slice) -> "RowStats":
        """Of some rows, after all columns."""
        weighted = None if self.weighted is None else self.weighted[rows]
        return RowStats(self.shift[rows], self.total[rows].to(self.shift.dtype), weighted, self.picked[rows])

    def take(self, rows: slice, other: "RowStats") -> None:
        """Copies the first of `other`'s rows to `rows` here."""
        for own, value in zip(self, other, strict=True):
            if own is not None and value is not None:
                own[rows] = value[: rows.stop - rows.start]


def empty_stats(rows: int, like: Tensor, dtype: torch.dtype, with_entropy: bool) -> RowStats:
    weighted, picked = (torch.zeros(rows, dtype=dtype, device=like.device) for _ in range(2))
    total = torch.zeros_like(picked, dtype=dtype if like.device.type == "mps" else torch.float64)
    return RowStats(torch.full_like(picked, LOWEST), total, weighted if with_entropy else None, picked)


def fold(tile: Tensor, owned: Owned, stats: RowStats, tiles: Tiles) -> None:
    """Takes a tile's columns into the rows' statistics.

    The tile becomes e^(z - m) with the new m, or scratch where the entropy is among the statistics.
    """
    if owned:
        rows, columns = owned
        stats.picked[rows] = tile[rows, columns]
    shift = torch.maximum(stats.shift, tile.amax(1))
    fade = torch.exp(stats.shift - shift)
    tile.sub_(shift[:, None]).clamp_(min=DEEPEST[tile.dtype])
    if stats.weighted is None:
        exps = tile.exp_()
    else:
        exps = torch.exp(tile, out=tiles.room("exps", *tile.shape))
        moved = (stats.weighted + (stats.shift - shift) * stats.total) * fade
        stats.weighted.copy_(moved + tile.mul_(exps).sum(1))
    sixteenths = exps.view(-1, ROW_MULTIPLE, exps.shape[1] // ROW_MULTIPLE)
    stats.total.mul_(fade).add_(sixteenths.sum(1).sum(1, dtype=stats.total.dtype))
    stats.shift.copy_(shift)


def row_stats(head: Head, rows: Rows, workspace: int, with_entropy: bool) -> RowStats:
    """Statistics `[n]` of the rows."""
    ranges = Ranges.of(head, workspace, rows.positions.shape[0])
    tiles = Tiles(head, ranges)
    result = empty_stats(rows.positions.shape[0], rows.hidden, head.accumulate, with_entropy)
    for first, last in ranges.rows:
        block = rows.block(head, first, last)
        stats = empty_stats(block.padded, rows.hidden, head.accumulate, with_entropy)
        for (start, stop), owned in zip(ranges.columns, owners(block.target, ranges.columns), strict=True):
            tile = tiles.tile(block, start, stop)
            tiles.logits(block, head.operands(head.weight[start:stop]), start, stop, tile)
            tiles.finish_logits(tile, block, stop - start)
            fold(tile, owned, stats, tiles)
        result.take(slice(first, last), stats)
    return result.of(slice(None))


# ---- gradients formed in the forward -------------------------------------------------------------------------------


class SlopeStats(NamedTuple):
    """Statistics of a block's rows, and what a target's logit needs of the soft cap."""

    stats: RowStats
    cap_slope: Tensor
    """1 - tanh^2 at the target"""

    @classmethod
    def empty(cls, block: RowBlock, dtype: torch.dtype) -> "SlopeStats":
        stats = empty_stats(block.padded, block.hidden, dtype, with_entropy=False)
        return cls(stats, torch.ones_like(stats.shift))


def fold_slope(tiles: Tiles, block: RowBlock, tile: Tensor, valid: int, owned: Owned, into: SlopeStats) -> None:
    """Folds a tile of x = hidden @ weight.T + bias, which becomes e^(z - m) (1 - tanh^2), and 0 at the targets."""
    slope = tiles.finish_logits(tile, block, valid)
    fold(tile, owned, into.stats, tiles)
    if owned:
        tile[owned] = 0.0
        if slope is not None:
            into.cap_slope[owned[0]] = slope[owned]
    if slope is not None:
        tile.mul_(slope)


# ---- backward ----------------------------------------------------------------------------------------------------


def turn_into_dlogits(tiles: Tiles, tile: Tensor, block: RowBlock, slopes: Slopes, start: int, stop: int) -> Tensor:
    """dL/dx in the place of a tile of x = hidden @ weight.T + bias."""
    valid = stop - start
    slope = tiles.finish_logits(tile, block, valid)
    tile.sub_(slopes.shift[:, None]).clamp_(min=DEEPEST[tile.dtype])
    if slopes.b is None:
        tile.exp_().mul_(slopes.a[:, None])
    else:
        exps = torch.exp(tile, out=tiles.room("exps", *tile.shape))
        tile.mul_(slopes.b[:, None]).add_(slopes.a[:, None]).mul_(exps)
    owned = (block.target >= start) & (block.target < stop)
    column = (block.target - start).clamp_(0, valid - 1)[:, None]
    at_target = torch.where(owned, slopes.at_target, tile.gather(1, column)[:, 0])
    tile.scatter_(1, column, at_target[:, None])
    if slope is not None:
        tile.mul_(slope)
    return tile[:, :valid].to(tiles.head.operand)


def torch_dlogits(head: Head, ranges: Ranges) -> FormDlogits:
    """Forms the tiles of dL/dx from the recomputed logits."""
    tiles = Tiles(head, ranges)

    def form(block: RowBlock, slopes: Slopes, weight: Tensor, start: int, stop: int) -> Tensor:
        tile = tiles.tile(block, start, stop)
        return turn_into_dlogits(tiles, tiles.logits(block, weight, start, stop, tile), block, slopes, start, stop)

    return form
