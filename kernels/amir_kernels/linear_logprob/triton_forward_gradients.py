"""Gradients formed in the forward by the Triton kernels: a row block's logits wait in the workspace for its slopes.

The kernel that takes the statistics also stores the raw logits, float32 `[R, V]`. As soon as a block's log-probs are
known, an elementwise kernel turns tile by tile into dlogits, and the products follow: 4 N H V flops instead of 6, 6
instead of 8 with a trained head. The statistics come from the same operations in the same order: the same bits.

Each block reads the whole head, and adds to the whole of its gradient, so that a block of few rows is bound by memory:
with too few the second product is cheaper. Neither that choice nor any tile depends on N.

Legend: N rows, n live rows, R rows of a block, H hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from .backward import BlockSweep, Slopes, Wanted
from .forward_gradients import LossSlope, block_slopes
from .head import Head, Ranges, RowBlock, Rows, blocks_of, round_up
from .triton_backend import block_stats, kept_dlogits, room_for_logits
from .triton_tiles import LARGEST_TILE, SPLIT_COLUMNS

LEAST_ROWS, LEAST_ROWS_CONVERTED, LEAST_ROWS_FLOAT32 = 256, 1024, 128
"""A GPU does about 300 flops of 16-bit products in the time of a byte from memory. A forward block does 2 R H V flops
for 2 H V bytes of head: bound by memory below 300 rows, and below 200 slower than the product that it saves. Converting
a float32 head moves 6 H V bytes more, adding to a float32 gradient 8 H V. Float32 products are 15 times slower."""
LEAST_HIDDEN = 1024
"""The product that is saved does 2 H flops a logit; writing and reading this moves 6 bytes more. Not for float32."""


def kept_rows(head: Head, workspace: int, room: int, weight_gradient: bool) -> int:
    """Rows of a block whose logits fit `room` bytes; 0 where forming them again is cheaper.

    Whole row tiles. The rest of a sweep, by the tiles of `workspace`, fits beside them.
    """
    (vocabulary, hidden_size), columns = head.weight.shape, blocks_of(head, workspace).columns
    width = columns * (head.compute.itemsize + head.operand.itemsize * (head.compute != head.operand))
    splits = vocabulary // SPLIT_COLUMNS + 1
    per_row = 4 * round_up(vocabulary, LARGEST_TILE[1]) + width + 12 * (head.depth + splits) + 64
    beside = 2 * (head.weight.dtype != head.operand) * columns * head.depth * head.operand.itemsize
    rows = max(room - beside, 0) // per_row // LARGEST_TILE[0] * LARGEST_TILE[0]
    if head.compute == torch.float32:
        least = LEAST_ROWS_FLOAT32
    elif hidden_size < LEAST_HIDDEN:
        return 0
    else:
        converted = weight_gradient or head.weight.dtype != head.compute
        least = LEAST_ROWS_CONVERTED if converted else LEAST_ROWS
    return rows if rows >= least else 0


class KeptSweep(BlockSweep):
    """A sweep over rows whose slopes follow from their own log-probs, which it keeps in `logprob`."""

    def __init__(
        self,
        head: Head,
        rows: Rows,
        wanted: Wanted,
        workspace: int,
        room: int,
        loss_slope: LossSlope,
        unit: Tensor | None = None,
    ) -> None:
        """`unit` divides the dlogits as they are stored, and the sums are multiplied by it."""
        blocks = blocks_of(head, workspace)._replace(rows=kept_rows(head, workspace, room, wanted.weight))
        ranges = Ranges(blocks.rows_of(rows.positions.shape[0]), blocks.columns_of(head.weight.shape[0]))
        self.logprob = torch.zeros(rows.positions.shape[0], dtype=head.accumulate, device=rows.hidden.device)
        self._loss_slope = loss_slope
        self._kept = room_for_logits(head, ranges.tallest)
        arguments = (head, rows, unit, wanted, ranges, not any(wanted[1:]))
        super().__init__(*arguments, slopes_of=self._measure, form=kept_dlogits(head, ranges, self._kept))

    def _measure(self, block: RowBlock, rows: slice) -> Slopes:
        """Keeps the block's logits and log-probs."""
        stats = block_stats(self.head, block, with_entropy=False, kept=self._kept)
        self.logprob[rows], slopes = block_slopes(self.head, block, stats, self._loss_slope)
        return slopes if self.unit is None else slopes.over(self.unit)


def kept_slope(head: Head, rows: Rows, workspace: int) -> tuple[Tensor, Tensor]:
    """The log-probs `[n]` of the rows, and their gradients to hidden, float32 `[..., H]` and 0 at the other rows.

    In float16 the dlogits are formed in units of 2^-12 of the largest that they can be: they do not underflow.
    """
    hidden, _, temperature, positions = rows
    unit = None
    if head.compute == torch.float16 and positions.shape[0]:
        coldest = temperature.reshape(-1)[positions].amin() if isinstance(temperature, Tensor) else temperature
        largest = hidden.new_full((), abs(head.logit_scale), dtype=torch.float32) / coldest
        unit = torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-30))) - 12)
    wanted = Wanted(True, False, False, False, False)
    sweep = KeptSweep(head, rows, wanted, workspace, workspace, lambda _, logprob: torch.ones_like(logprob), unit)
    grads = sweep.run()
    return sweep.logprob, hidden.new_zeros(0) if grads.hidden is None else grads.hidden
