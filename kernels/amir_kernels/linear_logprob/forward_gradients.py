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

from .backward import HeadGrads, Slopes, Sweep, Wanted, row_slopes
from .head import (
    ROW_MULTIPLE,
    Blocks,
    Head,
    Ranges,
    RowBlock,
    Rows,
    blocks_of,
    limits_of,
    round_up,
    weight_copies,
)
from .torch_backend import Owned, RowStats, SlopeStats, Tiles, fold_slope, owners

LossSlope = Callable[[Tensor, Tensor], Tensor]
"""(positions [n], their log-probs [n]) -> d loss / d logprob [n]"""

DEFAULT_ROOM_BYTES = {"cpu": 176 * 2**20}
DEFAULT_ROOM_BYTES_GPU = 256 * 2**20
"""The workspace by default: on a CPU 144 rows of a vocabulary of 262,144 beside those lent; the gradient has 671 MB."""


def default_room(device: torch.device) -> int:
    return DEFAULT_ROOM_BYTES.get(device.type, DEFAULT_ROOM_BYTES_GPU)


def formed_ranges(head: Head, workspace: int, room: int, rows: int, lends: bool) -> tuple[Ranges, int]:
    """Row blocks, and the rows of the first one whose logits wait in the weight's gradient, which `lends` its memory.

    The other blocks have as many rows as the rest of `room` bytes holds the logits of, at least 16. The tiles are those
    of `workspace`: same bits.
    """
    blocks, vocabulary, itemsize = blocks_of(head, workspace), head.weight.shape[0], head.accumulate.itemsize
    columns, limits = blocks.columns_of(vocabulary), limits_of(head.weight.device)
    beside = itemsize * (2 * (blocks.columns + len(columns)) + 5 * head.depth)
    room = max(room - weight_copies(head) * blocks.columns * head.depth * itemsize, 0)
    lent = 0
    if lends:
        fit = min(head.weight.shape[1] * (b - a) // round_up(b - a, ROW_MULTIPLE) for a, b in columns)
        lent = min(fit, limits.rows, room // (4 * beside)) // ROW_MULTIPLE * ROW_MULTIPLE
    per_row = beside + itemsize * round_up(vocabulary, ROW_MULTIPLE)
    tall = max(room - lent * beside, 0) // (per_row * ROW_MULTIPLE) * ROW_MULTIPLE
    lent = min(lent, rows)
    kept = Blocks(min(max(tall, ROW_MULTIPLE), limits.formed_rows), blocks.columns).rows_of(rows - lent)
    first = [(0, lent)] if lent else []
    return Ranges(first + [(lent + a, lent + b) for a, b in kept], columns), lent


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
    """A row block on its way: first its logits are folded tile by tile, then its gradients follow from its slopes.

    They wait in `room`, `[V or more, rows]`, which is the weight's gradient where that is `lent`.
    """

    def __init__(self, head: Head, block: RowBlock, columns: list[tuple[int, int]], room: Tensor, lent: bool) -> None:
        self.block, self.room, self.lent = block, room, lent
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

    def tile(self, start: int, stop: int) -> Tensor:
        """Each tile is contiguous: the products are slower into rows that lie a whole vocabulary apart."""
        rows, width = self.block.padded, round_up(stop - start, ROW_MULTIPLE)
        return self.room[start:].view(-1)[: rows * width].view(rows, width)


class FormedSweep(Sweep):
    """A sweep over the rows whose slopes follow from each block's own log-probs, which it keeps in `logprob`."""

    def __init__(
        self,
        head: Head,
        rows: Rows,
        wanted: Wanted,
        workspace: int,
        room: int,
        loss_slope: LossSlope,
    ) -> None:
        ranges, self._lent = formed_ranges(head, workspace, room, rows.positions.shape[0], wanted.weight)
        self._loss_slope = loss_slope
        self._tiles = Tiles(head, ranges)
        self.logprob = torch.zeros(rows.positions.shape[0], dtype=head.accumulate, device=rows.hidden.device)
        tallest = ranges._replace(rows=[(a, b) for a, b in ranges.rows if a >= self._lent]).tallest
        self._logits = self.logprob.new_empty(round_up(head.weight.shape[0], ROW_MULTIPLE), tallest)
        super().__init__(head, rows, None, wanted, ranges, False)

    def run(self) -> HeadGrads:
        before: _FormedBlock | None = None
        for rows in (*self.ranges.rows, None):
            block = None
            if rows is not None:
                block = self._formed_block(*rows)
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

    def _formed_block(self, first: int, last: int) -> _FormedBlock:
        of_weight, lent = self.column_grads[0], last <= self._lent
        room = of_weight.matrix if of_weight and lent else self._logits
        return _FormedBlock(self.head, self.rows.block(self.head, first, last), self.ranges.columns, room, lent)

    def _fold(self, block: _FormedBlock, weight: Tensor, owned: Owned, start: int, stop: int) -> None:
        tile = self._tiles.logits(block.block, weight, start, stop, block.tile(start, stop))
        fold_slope(self._tiles, block.block, tile, stop - start, owned, block.folded)
        block.shifts.append(block.folded.stats.shift.clone())

    def _use(self, block: _FormedBlock, weight: Tensor, number: int, start: int, stop: int) -> None:
        kept, owned = block.tile(start, stop), block.owned[number]
        tile = self._tiles.tile(block.block, start, stop) if block.lent else kept
        torch.mul(kept, block.factors[number][:, None], out=tile)
        if owned:
            tile[owned] = block.at_target[owned[0]]
        if block.lent:
            block.room[start:stop] = 0.0
        dlogits = tile[:, : stop - start].to(self.head.operand)
        self.add_rows(block.total, block.low_rank, dlogits, weight, start, stop)
        self.add_columns(block.block, dlogits, start, stop, first=False, last=False)


def refuse_double_backward(*_: Any) -> None:
    raise RuntimeError("linear_policy_loss cannot be differentiated twice; amir_kernels.reference can")


class FormedLoss(torch.autograd.Function):
    """A loss whose gradients to `leaves` are known already; one backward scales and hands them over."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: HeadGrads, *leaves: Tensor | None) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what is handed over would count as constant
            refuse_double_backward()
        if ctx.grads is None:
            raise RuntimeError(
                "linear_policy_loss formed its gradients in the forward and has handed them over already"
            )
        grads, ctx.grads = ctx.grads, None
        return None, None, *(None if grad is None else grad.mul_(upstream.to(grad.dtype)) for grad in grads)
