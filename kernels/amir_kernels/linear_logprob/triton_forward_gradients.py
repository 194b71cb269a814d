"""Gradients formed in the forward, on the Triton backend: a block's logits are kept until its coefficients are known.

The kernel that computes the statistics also stores the raw logits, float32 `[R, V]`. As soon as a block's log-probs are
known, an elementwise kernel turns the kept logits into dlogits, tile by tile, and the products follow: 4 n H V flops
instead of 6, 6 instead of 8 with a trained head. The statistics come from the same operations in the same order, so
they are the same bits as without kept logits.

Each block reads the whole head, and adds to the whole of its gradient, so that a block of few rows is bound by memory:
with too few, computing the logits a second time is cheaper. Neither that choice nor any tile depends on N.

Legend: N rows, n selected rows, R rows of a block, H hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from .backward import LossGrad, RowCoefficients, TileSweep, coefficients_from_loss, loss_scale_for
from .head import Head, PerInput, round_up
from .rows import RowBlock, RowSelection
from .tiling import Tiling, tile_size
from .triton_backend import block_stats, empty_kept_logits, kept_dlogits
from .triton_tiles import LARGEST_TILE, SPLIT_COLUMNS

MIN_ROWS, MIN_ROWS_CONVERTED, MIN_ROWS_FLOAT32 = 256, 1024, 128
"""A GPU does about 300 flops of 16-bit products in the time of a byte from memory. A forward block does 2 R H V flops
for 2 H V bytes of head: it is bound by memory below 300 rows, and below 200 slower than the product that it saves.
Converting a float32 head moves 6 H V bytes more, adding to a float32 gradient 8 H V. Float32 products are 15 times
slower."""
MIN_HIDDEN = 1024
"""The product that is saved does 2 H flops a logit; writing and reading the kept logit moves 6 bytes more. Does not
apply to float32."""


def kept_rows(head: Head, workspace: int, logits_workspace: int, weight_gradient: bool) -> int:
    """Rows of a block whose logits fit `logits_workspace` bytes; 0 where computing them again is cheaper.

    The number is a multiple of the row tile. The rest of a sweep, in the tiles of `workspace`, fits beside them.
    """
    (vocabulary, hidden_size), columns = head.weight.shape, tile_size(head, workspace).columns
    width = columns * (head.compute.itemsize + head.operand.itemsize * (head.compute != head.operand))
    splits = vocabulary // SPLIT_COLUMNS + 1
    per_row = 4 * round_up(vocabulary, LARGEST_TILE[1]) + width + 12 * (head.depth + splits) + 64
    beside = 2 * (head.weight.dtype != head.operand) * columns * head.depth * head.operand.itemsize
    rows = max(logits_workspace - beside, 0) // per_row // LARGEST_TILE[0] * LARGEST_TILE[0]
    if head.compute == torch.float32:
        least = MIN_ROWS_FLOAT32
    elif hidden_size < MIN_HIDDEN:
        return 0
    else:
        converted = weight_gradient or head.weight.dtype != head.compute
        least = MIN_ROWS_CONVERTED if converted else MIN_ROWS
    return rows if rows >= least else 0


class TritonForwardGradients(TileSweep):
    """The gradients of a loss that is known from each block's log-probs, which are then in `logprob` `[n]`."""

    def __init__(
        self,
        head: Head,
        rows: RowSelection,
        needs_grad: PerInput[bool],
        workspace: int,
        logits_workspace: int,
        loss_grad: LossGrad,
        loss_scale: Tensor | None = None,
    ) -> None:
        """`loss_scale` multiplies the dlogits as they are stored, and the sums are divided by it."""
        height = kept_rows(head, workspace, logits_workspace, needs_grad.weight)
        size = tile_size(head, workspace)._replace(rows=height)
        tiling = Tiling(size.row_blocks(rows.num_rows), size.column_tiles(head.weight.shape[0]))
        self.logprob = torch.zeros(rows.num_rows, dtype=head.accumulate, device=rows.hidden.device)
        self._loss_grad = loss_grad
        self._kept_logits = empty_kept_logits(head, tiling.tallest)
        form = kept_dlogits(head, tiling, self._kept_logits)
        arguments = (head, rows, loss_scale, needs_grad, tiling, not any(needs_grad[1:]))
        super().__init__(*arguments, block_coefficients=self._compute_coefficients, form=form)

    def _compute_coefficients(self, block: RowBlock, rows: slice) -> RowCoefficients:
        """Stores the block's logits and log-probs."""
        stats = block_stats(self.head, block, with_entropy=False, kept_logits=self._kept_logits)
        self.logprob[rows], coefficients = coefficients_from_loss(self.head, block, stats, self._loss_grad)
        return coefficients if self.loss_scale is None else coefficients.scaled(self.loss_scale)


def triton_hidden_grad(head: Head, rows: RowSelection, workspace: int) -> tuple[Tensor, Tensor]:
    """The log-probs `[n]` of the rows, and their gradients to hidden, float32 `[..., H]` and 0 at the other rows.

    Float16 dlogits are scaled by the largest value that they can have, so that they do not underflow.
    """
    hidden, _, temperature, positions = rows
    loss_scale = None
    if head.compute == torch.float16 and rows.num_rows:
        lowest = temperature.reshape(-1)[positions].amin() if isinstance(temperature, Tensor) else temperature
        loss_scale = loss_scale_for(hidden.new_full((), abs(head.logit_scale), dtype=torch.float32) / lowest)
    hidden_only = PerInput(True, False, False, False, False)
    sweep = TritonForwardGradients(
        head, rows, hidden_only, workspace, workspace, lambda _, logprob: torch.ones_like(logprob), loss_scale
    )
    grads = sweep.run()
    return sweep.logprob, hidden.new_zeros(0) if grads.hidden is None else grads.hidden
