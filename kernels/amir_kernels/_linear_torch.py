"""The head in torch: statistics of each row over tiles of the vocabulary, and the tiles of dlogits for the backward.

With z the `[N, V]` logits after scale, soft cap and temperature, the forward keeps per row
m = max z, S = sum e^(z - m), sum e^(z - m) (z - m) and z_target, updated tile by tile.

Legend: n live rows, R rows of a block, V vocabulary.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._linear_backward import FormDlogits, Slopes
from ._linear_head import ROW_MULTIPLE, Head, Ranges, RowBlock, add_product, product, round_up, row_block

DEEPEST = {torch.float32: -87.0, torch.float64: -708.0}
"""z - m is clamped here: e^(z - m) stays a normal number, 1e-38 where the sum is 1 or more. Results that underflow make
a CPU's exp 20 times slower, and -inf times 0 cannot arise."""
LOWEST = -1e30
"""Start of the running maximum. Finite, so that a tile of -inf gives e^(-inf - m) = 0 and no NaN."""


class Tiles:
    """Scratch, and the logits tiles formed in it. A tile is `[R, C rounded up to 16s]`, -inf past V."""

    def __init__(self, head: Head, ranges: Ranges) -> None:
        self.head = head
        self.pass_rows = min(ranges.pass_rows, ranges.tallest)
        self._size = ranges.tallest * ranges.widest
        self._tile: Tensor | None = None
        self._spare = torch.empty(2, self.pass_rows * ranges.widest, dtype=head.accumulate, device=head.weight.device)

    def tile(self, block: RowBlock, start: int, stop: int) -> Tensor:
        """Room for a tile; the same for every tile, allocated for the first."""
        width = round_up(stop - start, ROW_MULTIPLE)
        if self._tile is None:
            self._tile = self._spare.new_empty(self._size)
        return self._tile[: block.padded * width].view(block.padded, width)

    def logits(self, block: RowBlock, weight: Tensor, start: int, stop: int, tile: Tensor) -> Tensor:
        """logit-scale, cap and temperature still to come: hidden @ weight.T + low_rank @ b.T + bias, in `tile`."""
        head, products = self.head, tile[:, : stop - start]
        product(block.hidden, weight.T, products)
        if head.lora:
            add_product(products, block.low_rank, head.lora.b[start:stop].to(head.accumulate).T)
        if head.bias is not None:
            products.add_(head.bias[start:stop].to(head.accumulate))
        return tile

    def passes(self, tile: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, slice]]:
        """Parts of a tile that fit the cache, each with two spares of its shape and the slice of its rows."""
        for start in range(0, tile.shape[0], self.pass_rows):
            rows = slice(start, min(start + self.pass_rows, tile.shape[0]))
            part = tile[rows]
            yield part, *self._spare[:, : part.numel()].view(2, *part.shape), rows

    def finish_logits(self, part: Tensor, slope: Tensor, block: RowBlock, rows: slice, valid: int) -> None:
        """Scale, cap and temperature, in place; under a cap, `slope` receives its derivative 1 - tanh^2."""
        head = self.head
        if head.logit_scale != 1.0:
            part.mul_(head.logit_scale)
        if head.softcap is not None:
            part.div_(head.softcap).tanh_()
            torch.mul(part, part, out=slope).neg_().add_(1.0)
            part.mul_(head.softcap)
        if isinstance(block.temperature, Tensor):
            part.div_(block.temperature[rows, None])
        elif block.temperature != 1.0:
            part.div_(block.temperature)
        if valid < part.shape[1]:
            part[:, valid:] = -math.inf


# ---- forward -------------------------------------------------------------------------------------------------------


class RowStats(NamedTuple):
    """Statistics of rows over the columns seen so far."""

    shift: Tensor
    """m"""
    total: Tensor
    """S"""
    weighted: Tensor | None
    """sum e^(z - m) (z - m)"""
    picked: Tensor
    """z_target"""

    def of(self, rows: slice) -> "RowStats":
        weighted = None if self.weighted is None else self.weighted[rows]
        return RowStats(self.shift[rows], self.total[rows], weighted, self.picked[rows])

    def take(self, rows: slice, other: "RowStats") -> None:
        """Copies the first of `other`'s rows to `rows` here."""
        for own, value in zip(self, other, strict=True):
            if own is not None and value is not None:
                own[rows] = value[: rows.stop - rows.start]


def empty_stats(rows: int, like: Tensor, dtype: torch.dtype, with_entropy: bool) -> RowStats:
    zeros = [torch.zeros(rows, dtype=dtype, device=like.device) for _ in range(3)]
    return RowStats(torch.full_like(zeros[0], LOWEST), zeros[0], zeros[1] if with_entropy else None, zeros[2])


def fold(part: Tensor, spare: Tensor, target: Tensor, start: int, stop: int, stats: RowStats) -> None:
    """Takes the columns [start, stop) of a few rows into their statistics.

    `part` becomes e^(z - m) with the new m, or scratch where the entropy is among them.
    """
    owned = (target >= start) & (target < stop)
    column = (target - start).clamp_(0, stop - start - 1)[:, None]
    stats.picked.copy_(torch.where(owned, part.gather(1, column)[:, 0], stats.picked))
    shift = torch.maximum(stats.shift, part.amax(1))
    fade = torch.exp(stats.shift - shift)
    part.sub_(shift[:, None]).clamp_(min=DEEPEST[part.dtype])
    if stats.weighted is None:
        exps = part.exp_()
    else:
        exps = torch.exp(part, out=spare)
        moved = (stats.weighted + (stats.shift - shift) * stats.total) * fade
        stats.weighted.copy_(moved + part.mul_(exps).sum(1))
    stats.total.mul_(fade).add_(exps.sum(1))
    stats.shift.copy_(shift)


def row_stats(
    head: Head,
    hidden: Tensor,
    target: Tensor,
    temperature: Tensor | float,
    index: Tensor,
    workspace: int,
    with_entropy: bool,
) -> RowStats:
    """Statistics `[n]` of the rows at `index`."""
    ranges = Ranges.of(head, workspace, index.shape[0])
    tiles = Tiles(head, ranges)
    result = empty_stats(index.shape[0], hidden, head.accumulate, with_entropy)
    for first, last in ranges.rows:
        block = row_block(head, hidden, target, temperature, index[first:last])
        stats = empty_stats(block.padded, hidden, head.accumulate, with_entropy)
        for start, stop in ranges.columns:
            tile = tiles.tile(block, start, stop)
            tiles.logits(block, head.operands(head.weight[start:stop]), start, stop, tile)
            for part, spare, slope, rows in tiles.passes(tile):
                tiles.finish_logits(part, slope, block, rows, stop - start)
                fold(part, spare, block.target[rows], start, stop, stats.of(rows))
        result.take(slice(first, last), stats)
    return result


# ---- backward ----------------------------------------------------------------------------------------------------


def turn_into_dlogits(tiles: Tiles, tile: Tensor, block: RowBlock, slopes: Slopes, start: int, stop: int) -> Tensor:
    """dL/dx in the place of a tile of x = hidden @ weight.T + bias."""
    valid = stop - start
    owned = (block.target >= start) & (block.target < stop)
    column = (block.target - start).clamp_(0, valid - 1)[:, None]
    for part, spare, slope, rows in tiles.passes(tile):
        tiles.finish_logits(part, slope, block, rows, valid)
        part.sub_(slopes.shift[rows, None]).clamp_(min=DEEPEST[part.dtype])
        if slopes.b is None:
            part.exp_().mul_(slopes.a[rows, None])
        else:
            exps = torch.exp(part, out=spare)
            part.mul_(slopes.b[rows, None]).add_(slopes.a[rows, None]).mul_(exps)
        at_target = torch.where(owned[rows], slopes.at_target[rows], part.gather(1, column[rows])[:, 0])
        part.scatter_(1, column[rows], at_target[:, None])
        if tiles.head.softcap is not None:
            part.mul_(slope)
    return tile[:, :valid].to(tiles.head.operand)


def torch_dlogits(head: Head, ranges: Ranges) -> FormDlogits:
    """Forms the tiles of dL/dx from the recomputed logits."""
    tiles = Tiles(head, ranges)

    def form(block: RowBlock, slopes: Slopes, weight: Tensor, start: int, stop: int) -> Tensor:
        tile = tiles.tile(block, start, stop)
        return turn_into_dlogits(tiles, tiles.logits(block, weight, start, stop, tile), block, slopes, start, stop)

    return form
