"""A trained head under a loss local to a token: a block's logits wait in the workspace for its log-probs' slopes.

One product forms the logits, kept as e^(z - m) with the m of their tile's time; the loss gives d loss / d logprob of
the block's rows, which turns them into the logits' gradients where they stand, and the products follow: 6 N H V flops
instead of 8. A block's products run tile by tile with the next block's logits, which take the tile's room, so that
each row of the head is read once for both.

Legend: n rows, R rows of a block, H hidden size, V vocabulary, r LoRA rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._linear_backward import HeadGrads, Slopes, Sweep, Wanted, row_slopes
from ._linear_head import ROW_MULTIPLE, Blocks, Head, Ranges, RowBlock, blocks_of, limits_of, round_up, weight_copies
from ._linear_torch import Owned, RowStats, SlopeStats, Tiles, fold_slope, owners

LossSlope = Callable[[Tensor, Tensor], Tensor]
"""(positions [n], their log-probs [n]) -> d loss / d logprob [n]"""

DEFAULT_ROOM_BYTES = {"cpu": 160 * 2**20}
DEFAULT_ROOM_BYTES_GPU = 256 * 2**20
"""The workspace by default: 144 rows of a vocabulary of 262,144 on a CPU, where the head's gradient is 671 MB."""


def default_room(device: torch.device) -> int:
    return DEFAULT_ROOM_BYTES.get(device.type, DEFAULT_ROOM_BYTES_GPU)


def formed_ranges(head: Head, workspace: int, room: int, rows: int) -> Ranges:
    """As many rows as `room` bytes hold the logits of, at least 16. The tiles are those of `workspace`: same bits."""
    blocks, vocabulary = blocks_of(head, workspace), head.weight.shape[0]
    columns, itemsize = blocks.columns_of(vocabulary), head.accumulate.itemsize
    per_row = itemsize * (round_up(vocabulary, ROW_MULTIPLE) + 2 * (blocks.columns + len(columns)) + 5 * head.depth)
    beside = weight_copies(head) * blocks.columns * head.depth * itemsize
    tall = max(room - beside, 0) // (per_row * ROW_MULTIPLE) * ROW_MULTIPLE
    tall = min(max(tall, ROW_MULTIPLE), limits_of(head.weight.device).formed_rows)
    return Ranges(Blocks(tall, blocks.columns).rows_of(rows), columns)


def block_slopes(head: Head, block: RowBlock, stats: RowStats, loss_slope: LossSlope) -> tuple[Tensor, Slopes]:
    """The log-probs `[n]` of a block's real rows, and the slopes `[R]` that the loss gives them."""
    real = slice(0, block.positions.shape[0])
    stats, heat = stats.of(real), block.temperature
    logprob = stats.picked - stats.shift - stats.total.log()
    grad = loss_slope(block.positions, logprob)
    heat = heat[real] if isinstance(heat, Tensor) else heat
    slopes = row_slopes(head, heat, logprob, stats.shift, stats.total, None, grad, None, None)
    return logprob, slopes.of(real, block.padded)


class _FormedBlock:
    """A row block on its way: first its logits are folded tile by tile, then its gradients follow from its slopes."""

    def __init__(self, head: Head, block: RowBlock, columns: list[tuple[int, int]]) -> None:
        self.block = block
        self.owned = owners(block.target, columns)
        self.folded = SlopeStats.empty(block, head.accumulate)
        self.shifts: list[Tensor] = []
        """m after each tile"""
        self.total = torch.zeros(block.hidden.shape, dtype=head.accumulate, device=block.hidden.device)
        self.low_rank = torch.zeros_like(block.low_rank)
        self.factors = self.at_target = self.folded.cap_slope

    def take_slopes(self, slopes: Slopes) -> None:
        """dL/dx is e^(z - m_tile) (1 - tanh^2) times e^(m_tile - m) a, and has its own value at the target."""
        self.factors = torch.exp(torch.stack(self.shifts) - self.folded.stats.shift).mul_(slopes.a)
        self.at_target = slopes.at_target * self.folded.cap_slope


class FormedSweep(Sweep):
    """A sweep over the rows whose slopes follow from each block's own log-probs, which it keeps in `logprob`."""

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        target: Tensor,
        temperature: Tensor | float,
        index: Tensor,
        wanted: Wanted,
        workspace: int,
        room: int,
        loss_slope: LossSlope,
    ) -> None:
        ranges = formed_ranges(head, workspace, room, index.shape[0])
        self._loss_slope = loss_slope
        self._tiles = Tiles(head, ranges)
        self.logprob = torch.zeros(index.shape[0], dtype=head.accumulate, device=hidden.device)
        self._logits = self.logprob.new_empty(ranges.tallest * round_up(head.weight.shape[0], ROW_MULTIPLE))
        super().__init__(head, hidden, target, temperature, index, None, wanted, ranges, False)

    def run(self) -> HeadGrads:
        before: _FormedBlock | None = None
        for rows in (*self.ranges.rows, None):
            block = None
            if rows is not None:
                block = _FormedBlock(self.head, self.row_block(*rows), self.ranges.columns)
            for number, (start, stop) in enumerate(self.ranges.columns if before or block else ()):
                weight = self.operands(start, stop)
                if before:
                    self._use(before, weight, number, start, stop)
                if block:
                    self._fold(block, weight, block.owned[number], start, stop)
            if before:
                self.store_rows(before.block, before.total, before.low_rank)
            if block and rows:
                self.logprob[slice(*rows)], slopes = block_slopes(
                    self.head, block.block, block.folded.stats, self._loss_slope
                )
                block.take_slopes(slopes)
            before = block
        return self.grads()

    def _tile(self, block: RowBlock, start: int, stop: int) -> Tensor:
        """Each tile is contiguous: the products are slower into rows that lie a whole vocabulary apart."""
        width, at = round_up(stop - start, ROW_MULTIPLE), self.ranges.tallest * start
        return self._logits[at : at + block.padded * width].view(block.padded, width)

    def _fold(self, block: _FormedBlock, weight: Tensor, owned: Owned, start: int, stop: int) -> None:
        tile = self._tiles.logits(block.block, weight, start, stop, self._tile(block.block, start, stop))
        fold_slope(self._tiles, block.block, tile, stop - start, owned, block.folded)
        block.shifts.append(block.folded.stats.shift.clone())

    def _use(self, block: _FormedBlock, weight: Tensor, number: int, start: int, stop: int) -> None:
        tile, owned = self._tile(block.block, start, stop), block.owned[number]
        tile.mul_(block.factors[number][:, None])
        if owned:
            tile[owned] = block.at_target[owned[0]]
        dlogits = tile[:, : stop - start].to(self.head.operand)
        self.add_rows(block.total, block.low_rank, dlogits, weight, start, stop)
        self.add_columns(block.block, dlogits, start, stop, first=False, last=False)


class FormedLoss(torch.autograd.Function):
    """A loss whose gradients to `leaves` are known already; one backward scales and hands them over."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: HeadGrads, *leaves: Tensor | None) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "linear_policy_loss formed its gradients in the forward and has handed them over already"
            )
        grads, ctx.grads = ctx.grads, None
        return None, None, *(None if grad is None else grad.mul_(upstream.to(grad.dtype)) for grad in grads)
