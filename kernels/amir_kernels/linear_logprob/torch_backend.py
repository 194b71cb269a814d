"""The torch backend: statistics of each row over tiles of the vocabulary, and tiles of dlogits for the backward.

With z the `[N, V]` logits after scale, soft cap and temperature, the forward updates tile by tile, for each row,
m = max z, S = sum e^(z - m), sum e^(z - m) (z - m) and z_target.

Legend: n selected rows, R rows of a block, C columns of a tile, V vocabulary.
"""

import math

import torch
from torch import Tensor

from .backward import FormDlogits, RowCoefficients
from .head import ROW_MULTIPLE, Head, add_product, product, round_up
from .rows import RowBlock, RowSelection, RowStats, empty_stats
from .tiling import Tiling

MIN_EXPONENT = {torch.float32: -87.0, torch.float64: -708.0}
"""z - m is clamped here: e^(z - m) stays a normal number, 1e-38 where the sum is 1 or more. Results that underflow make
a CPU's exp 20 times slower, and -inf times 0 cannot arise."""


TargetPlaces = tuple[Tensor, Tensor] | None
"""The rows of a block whose targets lie in a tile, and their columns there; None where no row's target does."""


def locate_targets(target: Tensor, columns: list[tuple[int, int]]) -> list[TargetPlaces]:
    """The places of the targets `[R]` in each tile. Synchronizes the device."""
    in_order, rows = target.sort(stable=True)
    starts = torch.tensor([start for start, _ in columns] + [columns[-1][1]], device=target.device)
    bounds = torch.searchsorted(in_order, starts).tolist()
    spans = zip(columns, bounds, bounds[1:], strict=False)
    return [(rows[a:b], in_order[a:b] - start) if a < b else None for (start, _), a, b in spans]


class LogitTiles:
    """Forms tiles of logits in scratch. A tile is `[R, C rounded up to a multiple of 16]`, -inf past V."""

    def __init__(self, head: Head, tiling: Tiling) -> None:
        self.head = head
        self._size = tiling.tallest * tiling.widest
        self._scratch: dict[str, Tensor] = {}

    def scratch(self, name: str, rows: int, width: int) -> Tensor:
        """`[rows, width]` of the scratch of that name, which is allocated on first use and then reused."""
        if name not in self._scratch:
            self._scratch[name] = torch.empty(self._size, dtype=self.head.accumulate, device=self.head.weight.device)
        return self._scratch[name][: rows * width].view(rows, width)

    def tile(self, block: RowBlock, start: int, stop: int) -> Tensor:
        """Memory for a tile; the same for every tile."""
        return self.scratch("tile", block.padded, round_up(stop - start, ROW_MULTIPLE))

    def raw_logits(self, block: RowBlock, weight: Tensor, start: int, stop: int, tile: Tensor) -> Tensor:
        """hidden @ weight.T + low_rank @ b.T + bias in `tile`, before scale, cap and temperature."""
        head, products = self.head, tile[:, : stop - start]
        product(block.hidden, weight.T, products)
        if head.lora:
            add_product(products, block.low_rank, head.lora.b[start:stop].to(head.accumulate).T)
        if head.bias is not None:
            products.add_(head.bias[start:stop].to(head.accumulate))
        return tile

    def finish_logits(self, tile: Tensor, block: RowBlock, valid: int) -> Tensor | None:
        """Applies scale, cap and temperature in place. Returns the cap's derivative 1 - tanh^2 if there is a cap."""
        head, cap_grad = self.head, None
        if head.logit_scale != 1.0:
            tile.mul_(head.logit_scale)
        if head.softcap is not None:
            tile.div_(head.softcap).tanh_()
            # 1 - t * t in one rounding
            cap_grad = self.scratch("cap_grad", *tile.shape).fill_(1.0).addcmul_(tile, tile, value=-1)
            tile.mul_(head.softcap)
        if isinstance(block.temperature, Tensor):
            tile.div_(block.temperature[:, None])
        elif block.temperature != 1.0:
            tile.div_(block.temperature)
        if valid < tile.shape[1]:
            tile[:, valid:] = -math.inf
        return cap_grad


# ---- forward -------------------------------------------------------------------------------------------------------


def fold(tile: Tensor, places: TargetPlaces, stats: RowStats, tiles: LogitTiles) -> None:
    """Updates the rows' statistics with the columns of a tile.

    Afterwards the tile holds e^(z - m) with the new m, or nothing of use where the entropy is among the statistics.
    """
    if places:
        rows, columns = places
        stats.target_logit[rows] = tile[rows, columns]
    shift = torch.maximum(stats.shift, tile.amax(1))
    rescale = torch.exp(stats.shift - shift)
    tile.sub_(shift[:, None]).clamp_(min=MIN_EXPONENT[tile.dtype])
    if stats.weighted is None:
        exps = tile.exp_()
    else:
        exps = torch.exp(tile, out=tiles.scratch("exps", *tile.shape))
        rescaled = (stats.weighted + (stats.shift - shift) * stats.total) * rescale
        stats.weighted.copy_(rescaled + tile.mul_(exps).sum(1))
    sixteenths = exps.view(-1, ROW_MULTIPLE, exps.shape[1] // ROW_MULTIPLE)
    stats.total.mul_(rescale).add_(sixteenths.sum(1).sum(1, dtype=stats.total.dtype))
    stats.shift.copy_(shift)


def fold_with_cap_grad(
    tiles: LogitTiles,
    block: RowBlock,
    tile: Tensor,
    valid: int,
    places: TargetPlaces,
    stats: RowStats,
    cap_grad: Tensor,
) -> None:
    """`fold` of raw logits, which become e^(z - m) (1 - tanh^2), and 0 at the targets.

    `cap_grad` `[R]` gets 1 - tanh^2 at the targets that lie in the tile.
    """
    tile_cap_grad = tiles.finish_logits(tile, block, valid)
    fold(tile, places, stats, tiles)
    if places:
        tile[places] = 0.0
        if tile_cap_grad is not None:
            cap_grad[places[0]] = tile_cap_grad[places]
    if tile_cap_grad is not None:
        tile.mul_(tile_cap_grad)


def torch_row_stats(head: Head, rows: RowSelection, workspace: int, with_entropy: bool) -> RowStats:
    """Statistics `[n]` of the rows."""
    tiling = Tiling.of(head, workspace, rows.num_rows)
    tiles = LogitTiles(head, tiling)
    result = empty_stats(rows.num_rows, rows.hidden, head.accumulate, with_entropy)
    for first, last in tiling.rows:
        block = rows.block(head, first, last)
        stats = empty_stats(block.padded, rows.hidden, head.accumulate, with_entropy)
        for (start, stop), places in zip(tiling.columns, locate_targets(block.target, tiling.columns), strict=True):
            tile = tiles.tile(block, start, stop)
            tiles.raw_logits(block, head.operands(head.weight[start:stop]), start, stop, tile)
            tiles.finish_logits(tile, block, stop - start)
            fold(tile, places, stats, tiles)
        result.store(slice(first, last), stats)
    return result.select(slice(None))


# ---- backward ------------------------------------------------------------------------------------------------------


def turn_into_dlogits(
    tiles: LogitTiles, tile: Tensor, block: RowBlock, coefficients: RowCoefficients, start: int, stop: int
) -> Tensor:
    """dL/dx in the place of a tile of raw logits x; `backward.py` has the formula."""
    valid = stop - start
    cap_grad = tiles.finish_logits(tile, block, valid)
    tile.sub_(coefficients.shift[:, None]).clamp_(min=MIN_EXPONENT[tile.dtype])
    if coefficients.b is None:
        tile.exp_().mul_(coefficients.a[:, None])
    else:
        exps = torch.exp(tile, out=tiles.scratch("exps", *tile.shape))
        tile.mul_(coefficients.b[:, None]).add_(coefficients.a[:, None]).mul_(exps)
    in_tile = (block.target >= start) & (block.target < stop)
    column = (block.target - start).clamp_(0, valid - 1)[:, None]
    at_target = torch.where(in_tile, coefficients.at_target, tile.gather(1, column)[:, 0])
    tile.scatter_(1, column, at_target[:, None])
    if cap_grad is not None:
        tile.mul_(cap_grad)
    return tile[:, :valid].to(tiles.head.operand)


def torch_dlogits(head: Head, tiling: Tiling) -> FormDlogits:
    """Forms the tiles of dL/dx from recomputed logits."""
    tiles = LogitTiles(head, tiling)

    def form(block: RowBlock, coefficients: RowCoefficients, weight: Tensor, start: int, stop: int) -> Tensor:
        tile = tiles.raw_logits(block, weight, start, stop, tiles.tile(block, start, stop))
        return turn_into_dlogits(tiles, tile, block, coefficients, start, stop)

    return form
