"""The backward of the head for both backends: which gradients, from which rows, in which order.

Each tile of raw logits x = hidden @ weight.T + bias is recomputed, or was kept, and becomes its gradient. With z the
logits after scale, cap and temperature, and m, S as in the forward,

    dL/dz_v = e^(z_v - m) (a + b (z_v - m)) + g_logprob 1[v = target]
    a = (g_lse - g_logprob + g_entropy (log S - entropy)) / S,   b = -g_entropy / S
    dL/dx_v = dL/dz_v (1 - tanh^2) logit_scale / temperature

Products with hidden, weight and the LoRA factors turn dL/dx into the gradients.

Legend: n selected rows, R rows of a block, H hidden size, V vocabulary, r LoRA rank.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .head import Head, PerInput, add_product
from .rows import RowBlock, RowSelection, RowStats, pad_rows
from .tiling import Tiling

LOSS_SCALE_HEADROOM = 12
"""Float16 dlogits are scaled so that their largest coefficient lies between 2^12 and 2^13, 8 times below overflow."""


# ---- from upstream gradients to dlogits ----------------------------------------------------------------------------


class RowCoefficients(NamedTuple):
    """What turns a row's logits into their gradients, `[n]` each; all but `shift` include logit_scale / temperature."""

    shift: Tensor
    """m"""
    a: Tensor
    b: Tensor | None
    at_target: Tensor
    """dL/dz_target, by itself: 1 - p is formed without the cancellation that p near 1 would bring"""

    def select(self, rows: slice, padded: int) -> "RowCoefficients":
        """Some rows, followed by padding rows that give zeros."""
        b = None if self.b is None else pad_rows(self.b[rows], padded, 0.0)
        shift, a = pad_rows(self.shift[rows], padded, math.inf), pad_rows(self.a[rows], padded, 0.0)
        return RowCoefficients(shift, a, b, pad_rows(self.at_target[rows], padded, 0.0))

    def scaled(self, loss_scale: Tensor) -> "RowCoefficients":
        """The coefficients of dlogits that are `loss_scale` times as large."""
        b = None if self.b is None else self.b * loss_scale
        return RowCoefficients(self.shift, self.a * loss_scale, b, self.at_target * loss_scale)


def row_coefficients(
    head: Head,
    temperature: Tensor | float,
    logprob: Tensor,
    shift: Tensor,
    total: Tensor,
    entropy: Tensor | None,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
) -> RowCoefficients:
    """The coefficients of rows from their statistics and upstream gradients, `[n]` each."""
    factor = head.logit_scale / temperature
    a, b = torch.zeros_like(grad_logprob) if grad_lse is None else grad_lse, None
    at_target = -torch.expm1(logprob) * grad_logprob
    if grad_entropy is not None and entropy is not None:
        log_total = total.log()
        a = a + grad_entropy * (log_total - entropy)
        b = -grad_entropy / total * factor
        at_target = at_target - torch.exp(logprob) * grad_entropy * (logprob + log_total)
    at_target = at_target + torch.exp(logprob) * a
    return RowCoefficients(shift, (a - grad_logprob) / total * factor, b, at_target * factor)


LossGrad = Callable[[Tensor, Tensor], Tensor]
"""(positions `[n]`, their log-probs `[n]`) -> d loss / d logprob `[n]`"""


def coefficients_from_loss(
    head: Head, block: RowBlock, stats: RowStats, loss_grad: LossGrad
) -> tuple[Tensor, RowCoefficients]:
    """The log-probs `[n]` of a block's real rows, and the coefficients `[R]` that the loss gives them."""
    stats, temperature = stats.select(block.real), block.temperature
    logprob = stats.logprob
    grad = loss_grad(block.positions, logprob)
    temperature = temperature[block.real] if isinstance(temperature, Tensor) else temperature
    coefficients = row_coefficients(head, temperature, logprob, stats.shift, stats.total, None, grad, None, None)
    return logprob, coefficients.select(block.real, block.padded)


def loss_scale_for(largest: Tensor) -> Tensor:
    """The power of two by which float16 dlogits are multiplied, so that small gradients do not underflow.

    `largest` bounds them. The gradients are divided by it after their sums, which changes no bit.
    """
    return torch.exp2(LOSS_SCALE_HEADROOM - torch.floor(torch.log2(largest.clamp(min=1e-30))))


FormDlogits = Callable[[RowBlock, RowCoefficients, Tensor, int, int], Tensor]
"""(a block, its coefficients, the weight tile in the products' dtype, first column, last column + 1) -> dL/dx"""


# ---- from dlogits to gradients -------------------------------------------------------------------------------------


class _ColumnGrad:
    """A gradient `[V, k]` that sums dlogits.T @ right over the row blocks, in float32 whatever its own dtype."""

    def __init__(self, like: Tensor, head: Head, columns: int) -> None:
        self.grad = torch.zeros_like(like, memory_format=torch.contiguous_format)
        self.matrix = self.grad.view(like.shape[0], -1)
        self.exact = like.dtype == head.accumulate
        """whether sums can be formed in the gradient itself"""
        if not self.exact:
            self._scratch = torch.empty(columns, self.matrix.shape[1], dtype=head.accumulate, device=like.device)

    def add(
        self,
        dlogits: Tensor,
        right: Tensor,
        start: int,
        stop: int,
        first: bool,
        last: bool,
        loss_scale: Tensor | None,
    ) -> None:
        """`first` and `last` say whether this is the first or the last row block for this column tile."""
        total = self.matrix[start:stop] if self.exact else self._scratch[: stop - start]
        if first and not self.exact:
            total.zero_()
        add_product(total, dlogits.T, right)
        if last:
            if loss_scale is not None:
                total.div_(loss_scale)
            if not self.exact:
                self.matrix[start:stop] = total


class GradientSums:
    """Sums the gradients that are needed from the dlogits of row blocks and column tiles, in any order of them."""

    def __init__(
        self,
        head: Head,
        rows: RowSelection,
        loss_scale: Tensor | None,
        needs_grad: PerInput[bool],
        tiling: Tiling,
        partial: bool,
    ) -> None:
        """`partial`: the gradients of hidden and lora_a stay in float32, to be summed over vocabulary shards."""
        self.head, self.rows, self.loss_scale = head, rows, loss_scale
        self.needs_grad, self.tiling, self.partial = needs_grad, tiling, partial
        self.grad_hidden = self.grad_a = None
        if needs_grad.hidden:
            dtype = head.accumulate if partial else rows.hidden.dtype
            self.grad_hidden = torch.zeros(rows.hidden.shape, dtype=dtype, device=rows.hidden.device)
        if needs_grad.lora_a and head.lora:
            self.grad_a = torch.zeros_like(head.lora.a, dtype=head.accumulate)
        columns = (head.weight, head.bias, head.lora and head.lora.b)
        self.column_grads = [
            _ColumnGrad(tensor, head, self.tiling.widest) if needed and tensor is not None else None
            for tensor, needed in zip(columns, (needs_grad.weight, needs_grad.bias, needs_grad.lora_b), strict=True)
        ]

    def grads(self) -> PerInput[Tensor | None]:
        """The sums, each in its input's dtype; None where no gradient is needed."""
        grad_a = self.grad_a
        if grad_a is not None and self.head.lora:
            grad_a = grad_a if self.loss_scale is None else grad_a / self.loss_scale
            grad_a = grad_a if self.partial else grad_a.to(self.head.lora.a.dtype)
        weight, bias, grad_b = (grad.grad if grad else None for grad in self.column_grads)
        return PerInput(self.grad_hidden, weight, bias, grad_a, grad_b)

    def operands(self, start: int, stop: int) -> Tensor:
        """A weight tile in the products' dtype."""
        return self.head.operands(self.head.weight[start:stop])

    def add_to_rows(
        self, total: Tensor, low_rank: Tensor, dlogits: Tensor, weight: Tensor, start: int, stop: int
    ) -> None:
        """Adds a tile to a block's sums over the vocabulary, `total` `[R, H]` and `low_rank` `[R, r]`."""
        if self.needs_grad.hidden:
            add_product(total, dlogits, weight)
        if self.head.lora and (self.needs_grad.hidden or self.needs_grad.lora_a):
            add_product(low_rank, dlogits, self.head.operands(self.head.lora.b[start:stop]))

    def add_to_columns(self, block: RowBlock, dlogits: Tensor, start: int, stop: int, first: bool, last: bool) -> None:
        """Adds a tile to the sums over the rows: the gradients of weight, bias and lora_b."""
        weight, bias, lora_b = self.column_grads
        if weight:
            weight.add(dlogits, block.hidden, start, stop, first, last, self.loss_scale)
        if bias:
            bias.add(dlogits, block.hidden.new_ones(block.padded, 1), start, stop, first, last, self.loss_scale)
        if lora_b:
            lora_b.add(dlogits, block.low_rank.to(self.head.operand), start, stop, first, last, self.loss_scale)

    def store_rows(self, block: RowBlock, total: Tensor, low_rank: Tensor) -> None:
        """Turns a block's finished sums over the vocabulary into gradients of hidden and lora_a."""
        if self.head.lora:
            low_rank = (low_rank * self.head.lora.scaling).to(self.head.operand)
            if self.needs_grad.hidden:
                add_product(total, low_rank, self.head.operands(self.head.lora.a))
            if self.grad_a is not None:
                add_product(self.grad_a, low_rank.T, block.hidden)
        if self.grad_hidden is not None:
            if self.loss_scale is not None:
                total.div_(self.loss_scale)
            rows = total[block.real].to(self.grad_hidden.dtype)
            flat = self.grad_hidden.view(self.rows.target.numel(), block.hidden.shape[-1])
            flat.index_copy_(0, block.positions, rows)


BlockCoefficients = Callable[[RowBlock, slice], RowCoefficients]
"""(a block, its rows among the n selected ones) -> their coefficients, padded"""


class TileSweep(GradientSums):
    """Gradient sums whose dlogits are formed one tile at a time, blocks outside and tiles inside or the reverse."""

    def __init__(self, *arguments: Any, block_coefficients: BlockCoefficients, form: FormDlogits) -> None:
        super().__init__(*arguments)
        self._block_coefficients, self._form = block_coefficients, form

    def run(self) -> PerInput[Tensor | None]:
        """One sweep; two where 16-bit column gradients do not fit the workspace beside the rows' own sums."""
        one_sweep = all(grad.exact for grad in self.column_grads if grad) or len(self.tiling.rows) == 1
        if self.needs_grad.hidden or self.needs_grad.lora_a or one_sweep:
            self._sweep_rows(with_columns=one_sweep)
        if not one_sweep:
            self._sweep_columns()
        return self.grads()

    def _block(self, first: int, last: int) -> tuple[RowBlock, RowCoefficients]:
        block = self.rows.block(self.head, first, last)
        return block, self._block_coefficients(block, slice(first, last))

    def _sweep_rows(self, with_columns: bool) -> None:
        for first, last in self.tiling.rows:
            block, coefficients = self._block(first, last)
            total = torch.zeros(block.hidden.shape, dtype=self.head.accumulate, device=block.hidden.device)
            low_rank = torch.zeros_like(block.low_rank)
            for start, stop in self.tiling.columns:
                weight = self.operands(start, stop)
                dlogits = self._form(block, coefficients, weight, start, stop)
                self.add_to_rows(total, low_rank, dlogits, weight, start, stop)
                if with_columns:
                    self.add_to_columns(block, dlogits, start, stop, first == 0, last == self.rows.num_rows)
            self.store_rows(block, total, low_rank)

    def _sweep_columns(self) -> None:
        for start, stop in self.tiling.columns:
            weight = self.operands(start, stop)
            for first, last in self.tiling.rows:
                block, coefficients = self._block(first, last)
                dlogits = self._form(block, coefficients, weight, start, stop)
                self.add_to_columns(block, dlogits, start, stop, first == 0, last == self.rows.num_rows)


def head_grads(
    head: Head,
    rows: RowSelection,
    coefficients: RowCoefficients,
    needs_grad: PerInput[bool],
    workspace: int,
    dlogits_former: Callable[[Head, Tiling], FormDlogits],
    float16_dlogits: bool,
    partial: bool,
) -> PerInput[Tensor | None]:
    """The gradients from these rows, each in its input's dtype; all other rows contribute zeros.

    `float16_dlogits`: they are stored in float16, and scaled against underflow. `partial`: see `GradientSums`.
    """
    loss_scale = None
    if float16_dlogits and rows.num_rows:
        largest = torch.stack([value.abs().max() for value in coefficients[1:] if value is not None]).max()
        loss_scale = loss_scale_for(largest)
        coefficients = coefficients.scaled(loss_scale)
    tiling = Tiling.of(head, workspace, rows.num_rows)

    def block_coefficients(block: RowBlock, part: slice) -> RowCoefficients:
        return coefficients.select(part, block.padded)

    arguments = (head, rows, loss_scale, needs_grad, tiling, partial)
    sweep = TileSweep(*arguments, block_coefficients=block_coefficients, form=dlogits_former(head, tiling))
    return sweep.run()
