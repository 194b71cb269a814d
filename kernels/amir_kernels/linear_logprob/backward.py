"""The backward of the head for both backends: which gradients, from which rows, in which order.

Each tile of logits is formed again and turned into its gradients, with m, S as in the forward:

    dL/dz_v = e^(z_v - m) (a + b (z_v - m)) + g_logprob 1[v = target]
    a = (g_lse - g_logprob + g_entropy (log S - entropy)) / S,   b = -g_entropy / S

then dL/dx_v = dL/dz_v (1 - tanh^2) logit_scale / temperature for x = hidden @ weight.T + bias, which the products turn
into the gradients.

Legend: n live rows, R rows of a block, H hidden size, V vocabulary, C columns of a tile, r LoRA rank.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .head import Head, Ranges, RowBlock, Rows, add_product, pad_rows


class Slopes(NamedTuple):
    """What turns a row's logits into their gradients, `[n]` each; all but `shift` times logit_scale / temperature."""

    shift: Tensor
    """m"""
    a: Tensor
    b: Tensor | None
    at_target: Tensor
    """dL/dz_target, by itself: 1 - p is formed without the cancellation that p near 1 would bring"""

    def of(self, rows: slice, padded: int) -> "Slopes":
        """Some rows, and after them rows that give zeros."""
        b = None if self.b is None else pad_rows(self.b[rows], padded, 0.0)
        shift, a = pad_rows(self.shift[rows], padded, math.inf), pad_rows(self.a[rows], padded, 0.0)
        return Slopes(shift, a, b, pad_rows(self.at_target[rows], padded, 0.0))

    def over(self, unit: Tensor) -> "Slopes":
        return Slopes(self.shift, self.a / unit, None if self.b is None else self.b / unit, self.at_target / unit)


def row_slopes(
    head: Head,
    temperature: Tensor | float,
    logprob: Tensor,
    shift: Tensor,
    total: Tensor,
    entropy: Tensor | None,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
) -> Slopes:
    factor = head.logit_scale / temperature
    a, b = torch.zeros_like(grad_logprob) if grad_lse is None else grad_lse, None
    at_target = -torch.expm1(logprob) * grad_logprob
    if grad_entropy is not None and entropy is not None:
        log_total = total.log()
        a = a + grad_entropy * (log_total - entropy)
        b = -grad_entropy / total * factor
        at_target = at_target - torch.exp(logprob) * grad_entropy * (logprob + log_total)
    at_target = at_target + torch.exp(logprob) * a
    return Slopes(shift, (a - grad_logprob) / total * factor, b, at_target * factor)


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool
    lora_a: bool
    lora_b: bool


class _ColumnGrad:
    """A gradient `[V, k]` that gathers dlogits.T @ right over the row blocks, in float32 whatever its own dtype."""

    def __init__(self, like: Tensor, head: Head, columns: int) -> None:
        self.grad = torch.zeros_like(like, memory_format=torch.contiguous_format)
        self.matrix = self.grad.view(like.shape[0], -1)
        self.exact = like.dtype == head.accumulate
        if not self.exact:
            self._room = torch.empty(columns, self.matrix.shape[1], dtype=head.accumulate, device=like.device)

    def add(
        self, dlogits: Tensor, right: Tensor, start: int, stop: int, first: bool, last: bool, unit: Tensor | None
    ) -> None:
        """`first` and `last` say whether this is the first or last row block that this column tile sees."""
        total = self.matrix[start:stop] if self.exact else self._room[: stop - start]
        if first and not self.exact:
            total.zero_()
        add_product(total, dlogits.T, right)
        if last:
            if unit is not None:
                total.mul_(unit)
            if not self.exact:
                self.matrix[start:stop] = total


FormDlogits = Callable[[RowBlock, Slopes, Tensor, int, int], Tensor]


class HeadGrads(NamedTuple):
    """None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None


class Sweep:
    """What a backward gathers: the gradients wanted, from the dlogits of row blocks and column tiles in any order."""

    def __init__(
        self,
        head: Head,
        rows: Rows,
        unit: Tensor | None,
        wanted: Wanted,
        ranges: Ranges,
        partial: bool,
    ) -> None:
        self.head, self.rows, self.unit = head, rows, unit
        self.wanted, self.ranges, self.partial = wanted, ranges, partial
        self.grad_hidden = self.grad_a = None
        if wanted.hidden:
            dtype = head.accumulate if partial else rows.hidden.dtype
            self.grad_hidden = torch.zeros(rows.hidden.shape, dtype=dtype, device=rows.hidden.device)
        if wanted.lora_a and head.lora:
            self.grad_a = torch.zeros_like(head.lora.a, dtype=head.accumulate)
        columns = (head.weight, head.bias, head.lora and head.lora.b)
        self.column_grads = [
            _ColumnGrad(tensor, head, self.ranges.widest) if want and tensor is not None else None
            for tensor, want in zip(columns, (wanted.weight, wanted.bias, wanted.lora_b), strict=True)
        ]

    def grads(self) -> HeadGrads:
        """What was gathered, in each input's dtype."""
        grad_a = self.grad_a
        if grad_a is not None and self.head.lora:
            grad_a = grad_a if self.unit is None else grad_a * self.unit
            grad_a = grad_a if self.partial else grad_a.to(self.head.lora.a.dtype)
        weight, bias, grad_b = (grad.grad if grad else None for grad in self.column_grads)
        return HeadGrads(self.grad_hidden, weight, bias, grad_a, grad_b)

    def operands(self, start: int, stop: int) -> Tensor:
        return self.head.operands(self.head.weight[start:stop])

    def add_rows(self, total: Tensor, low_rank: Tensor, dlogits: Tensor, weight: Tensor, start: int, stop: int) -> None:
        if self.wanted.hidden:
            add_product(total, dlogits, weight)
        if self.head.lora and (self.wanted.hidden or self.wanted.lora_a):
            add_product(low_rank, dlogits, self.head.operands(self.head.lora.b[start:stop]))

    def add_columns(self, block: RowBlock, dlogits: Tensor, start: int, stop: int, first: bool, last: bool) -> None:
        of_weight, of_bias, of_b = self.column_grads
        if of_weight:
            of_weight.add(dlogits, block.hidden, start, stop, first, last, self.unit)
        if of_bias:
            of_bias.add(dlogits, block.hidden.new_ones(block.padded, 1), start, stop, first, last, self.unit)
        if of_b:
            of_b.add(dlogits, block.low_rank.to(self.head.operand), start, stop, first, last, self.unit)

    def store_rows(self, block: RowBlock, total: Tensor, low_rank: Tensor) -> None:
        if self.head.lora:
            low_rank = (low_rank * self.head.lora.scaling).to(self.head.operand)
            if self.wanted.hidden:
                add_product(total, low_rank, self.head.operands(self.head.lora.a))
            if self.grad_a is not None:
                add_product(self.grad_a, low_rank.T, block.hidden)
        if self.grad_hidden is not None:
            if self.unit is not None:
                total.mul_(self.unit)
            rows = total[: block.positions.shape[0]].to(self.grad_hidden.dtype)
            self.grad_hidden.view(self.rows.target.numel(), block.hidden.shape[-1]).index_copy_(
                0, block.positions, rows
            )


SlopesOf = Callable[[RowBlock, slice], Slopes]
"""(a block, its rows among the n live ones) -> their slopes, padded"""


class BlockSweep(Sweep):
    """A sweep whose dlogits are formed tile by tile, block after block or in the other order."""

    def __init__(self, *arguments: Any, slopes_of: SlopesOf, form: FormDlogits) -> None:
        super().__init__(*arguments)
        self._slopes_of, self._form = slopes_of, form

    def run(self) -> HeadGrads:
        """One sweep, or two where 16-bit column gradients could not be summed in the workspace beside the rows' own."""
        together = all(grad.exact for grad in self.column_grads if grad) or len(self.ranges.rows) == 1
        if self.wanted.hidden or self.wanted.lora_a or together:
            self._rows_outside(with_columns=together)
        if not together:
            self._columns_outside()
        return self.grads()

    def _block(self, first: int, last: int) -> tuple[RowBlock, Slopes]:
        block = self.rows.block(self.head, first, last)
        return block, self._slopes_of(block, slice(first, last))

    def _rows_outside(self, with_columns: bool) -> None:
        for first, last in self.ranges.rows:
            block, slopes = self._block(first, last)
            total = torch.zeros(block.hidden.shape, dtype=self.head.accumulate, device=block.hidden.device)
            low_rank = torch.zeros_like(block.low_rank)
            for start, stop in self.ranges.columns:
                weight = self.operands(start, stop)
                dlogits = self._form(block, slopes, weight, start, stop)
                self.add_rows(total, low_rank, dlogits, weight, start, stop)
                if with_columns:
                    self.add_columns(block, dlogits, start, stop, first == 0, last == self.rows.positions.shape[0])
            self.store_rows(block, total, low_rank)

    def _columns_outside(self) -> None:
        for start, stop in self.ranges.columns:
            weight = self.operands(start, stop)
            for first, last in self.ranges.rows:
                block, slopes = self._block(first, last)
                dlogits = self._form(block, slopes, weight, start, stop)
                self.add_columns(block, dlogits, start, stop, first == 0, last == self.rows.positions.shape[0])


def head_grads(
    head: Head,
    rows: Rows,
    slopes: Slopes,
    wanted: Wanted,
    workspace: int,
    make_form: Callable[[Head, Ranges], FormDlogits],
    half_tiles: bool,
    partial: bool,
) -> HeadGrads:
    """Gradients from these rows, each in its input's dtype; all other rows give zeros.

    Those of hidden and lora a stay in float32 where they are `partial`, to be summed over shards of the vocabulary.

    With `half_tiles` the dlogits are stored in float16: they are then formed in units of a power of two near their
    largest slope, so that small upstream gradients do not underflow, and the sums are multiplied back.
    """
    unit = None
    if half_tiles and rows.positions.shape[0]:
        largest = torch.stack([value.abs().max() for value in slopes[1:] if value is not None]).max()
        unit = torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-30))) - 12)
        slopes = slopes.over(unit)
    ranges = Ranges.of(head, workspace, rows.positions.shape[0])
    arguments = (head, rows, unit, wanted, ranges, partial)

    def slopes_of(block: RowBlock, part: slice) -> Slopes:
        return slopes.of(part, block.padded)

    return BlockSweep(*arguments, slopes_of=slopes_of, form=make_form(head, ranges)).run()
