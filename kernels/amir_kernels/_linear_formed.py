"""A trained head under a loss local to a token: a block's logits wait in the workspace for its log-probs' slopes.

One product forms the logits, the loss gives d loss / d logprob of the block's rows, the logits become their gradients
where they stand, and the products follow: 6 N H V flops instead of 8.

Legend: n rows, R rows of a block, H hidden size, V vocabulary, r LoRA rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._linear_backward import HeadGrads, Slopes, Sweep, Wanted, row_slopes
from ._linear_head import ROW_MULTIPLE, Blocks, Head, Ranges, RowBlock, blocks_of, round_up, row_block
from ._linear_torch import Tiles, empty_stats, fold, turn_into_dlogits

LossSlope = Callable[[Tensor, Tensor], Tensor]
"""(positions [n], their log-probs [n]) -> d loss / d logprob [n]"""


def formed_ranges(head: Head, workspace: int, rows: int) -> Ranges:
    """As many rows as leave room for all their logits, at least 16."""
    blocks = blocks_of(head, workspace)
    vocabulary, hidden_size = head.weight.shape
    depth = hidden_size + (head.lora.a.shape[0] if head.lora else 0)
    per_row = head.accumulate.itemsize * (round_up(vocabulary, ROW_MULTIPLE) + 3 * depth)
    tall = max((workspace - workspace // 4) // (per_row * ROW_MULTIPLE) * ROW_MULTIPLE, ROW_MULTIPLE)
    columns = blocks.columns_of(vocabulary)
    return Ranges(Blocks(tall, blocks.columns, blocks.pass_rows).rows_of(rows), columns, blocks.pass_rows)


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
        loss_slope: LossSlope,
    ) -> None:
        ranges = formed_ranges(head, workspace, index.shape[0])
        self._loss_slope = loss_slope
        self._tiles = Tiles(head, ranges)
        self.logprob = torch.zeros(index.shape[0], dtype=head.accumulate, device=hidden.device)
        self._logits = self.logprob.new_empty(ranges.tallest * round_up(head.weight.shape[0], ROW_MULTIPLE))
        none = Slopes(self.logprob, self.logprob, None, self.logprob)
        super().__init__(
            head, hidden, target, temperature, index, none, None, wanted, ranges, self._form_in_place, partial=False
        )

    def _tile(self, block: RowBlock, start: int, stop: int) -> Tensor:
        """Each tile is contiguous: the products are slower into rows that lie a whole vocabulary apart."""
        width = round_up(stop - start, ROW_MULTIPLE)
        return self._logits[block.padded * start :][: block.padded * width].view(block.padded, width)

    def _block(self, first: int, last: int) -> tuple[RowBlock, Slopes]:
        head, rows = self.head, slice(0, last - first)
        block = row_block(head, self.hidden, self.target, self.temperature, self.index[first:last])
        stats = empty_stats(block.padded, self.hidden, head.accumulate, with_entropy=False)
        for start, stop in self.ranges.columns:
            tile = self._tile(block, start, stop)
            self._tiles.logits(block, head.operands(head.weight[start:stop]), start, stop, tile)
            for part, spare, slope, some in self._tiles.passes(tile):
                spare.copy_(part)
                self._tiles.finish_logits(spare, slope, block, some, stop - start)
                fold(spare, slope, block.target[some], start, stop, stats.of(some))
        stats = stats.of(rows)
        logprob = stats.picked - stats.shift - stats.total.log()
        self.logprob[first:last] = logprob
        grad = self._loss_slope(block.positions, logprob)
        heat = block.temperature[rows] if isinstance(block.temperature, Tensor) else block.temperature
        slopes = row_slopes(head, heat, logprob, stats.shift, stats.total, None, grad, None, None)
        return block, slopes.of(rows, block.padded)

    def _form_in_place(self, block: RowBlock, slopes: Slopes, _: Tensor, start: int, stop: int) -> Tensor:
        return turn_into_dlogits(self._tiles, self._tile(block, start, stop), block, slopes, start, stop)


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
