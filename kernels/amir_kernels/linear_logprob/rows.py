"""The rows of a call: which are computed, the blocks that they are computed in, and their statistics.

Legend: n selected rows, R rows of a block, H hidden size, r LoRA rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .head import ROW_MULTIPLE, Head, product, round_up

MIN_SHIFT = -1e30
"""Start of the running maximum. Finite, so that a tile of -inf gives e^(-inf - m) = 0 and no NaN."""


class RowBlock(NamedTuple):
    """Some selected rows, padded to a multiple of 16 with rows that give zeros."""

    positions: Tensor
    """int64, among the call's rows; padding rows have none"""
    hidden: Tensor
    """[R, H], in the products' dtype"""
    low_rank: Tensor
    """scaling * hidden @ a.T `[R, r]`, float32: too small a product to be worth rounding for; r = 0 without LoRA"""
    target: Tensor
    temperature: Tensor | float

    @property
    def padded(self) -> int:
        """R"""
        return self.hidden.shape[0]

    @property
    def real(self) -> slice:
        """The rows that are not padding."""
        return slice(0, self.positions.shape[0])


class RowSelection(NamedTuple):
    """The rows of a call that are computed, with what belongs to each."""

    hidden: Tensor
    """`[..., H]`, of all rows of the call; so are `target` and a temperature per row"""
    target: Tensor
    temperature: Tensor | float
    positions: Tensor
    """int64 `[n]`, among the call's rows"""

    @property
    def num_rows(self) -> int:
        """n"""
        return self.positions.shape[0]

    def block(self, head: Head, first: int, last: int) -> RowBlock:
        """The selected rows from `first` to before `last`."""
        positions, temperature = self.positions[first:last], self.temperature
        rows = round_up(positions.shape[0], ROW_MULTIPLE)
        hidden = torch.zeros(rows, self.hidden.shape[-1], dtype=head.operand, device=self.hidden.device)
        hidden[: positions.shape[0]] = head.operands(gather_rows(self.hidden, positions))
        rank = head.lora.a.shape[0] if head.lora else 0
        low_rank = torch.empty(rows, rank, dtype=head.accumulate, device=self.hidden.device)
        if head.lora:
            product(hidden.to(head.accumulate), head.lora.a.to(head.accumulate).T, low_rank)
            low_rank.mul_(head.lora.scaling)
        if isinstance(temperature, Tensor):
            temperature = pad_rows(temperature.reshape(-1)[positions].to(head.accumulate), rows, 1.0)
        target = pad_rows(self.target.reshape(-1)[positions], rows, -1)
        return RowBlock(positions, hidden, low_rank, target, temperature)


def gather_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of `[..., H]` by flat position, without the flattened copy that a non-contiguous tensor would need."""
    if tensor.dim() == 2:
        return tensor.index_select(0, index)
    return tensor[torch.unravel_index(index, tensor.shape[:-1])]


def pad_rows(values: Tensor, rows: int, fill: float) -> Tensor:
    """`values` followed by as many `fill` as make `rows`."""
    out = values.new_full((rows,), fill)
    out[: values.shape[0]] = values
    return out


# ---- statistics ----------------------------------------------------------------------------------------------------


class RowStats(NamedTuple):
    """Statistics of rows over the columns seen so far."""

    shift: Tensor
    """m"""
    total: Tensor
    """S, summed in float64: beside the 1 of a nearly certain token other terms would round to nothing"""
    weighted: Tensor | None
    """sum e^(z - m) (z - m); None where no entropy is requested"""
    target_logit: Tensor
    """z_target"""

    def select(self, rows: slice) -> "RowStats":
        """The statistics of some rows after all columns, in the dtype of the results."""
        weighted = None if self.weighted is None else self.weighted[rows]
        return RowStats(self.shift[rows], self.total[rows].to(self.shift.dtype), weighted, self.target_logit[rows])

    def store(self, rows: slice, block: "RowStats") -> None:
        """Copies the statistics of a block, without its padding, to `rows` here."""
        for own, value in zip(self, block, strict=True):
            if own is not None and value is not None:
                own[rows] = value[: rows.stop - rows.start]

    @property
    def logprob(self) -> Tensor:
        """z_target - m - log S, after all columns."""
        return self.target_logit - self.shift - self.total.log()


def empty_stats(rows: int, like: Tensor, dtype: torch.dtype, with_entropy: bool) -> RowStats:
    """Statistics of rows before any column."""
    weighted, target_logit = (torch.zeros(rows, dtype=dtype, device=like.device) for _ in range(2))
    total = torch.zeros_like(target_logit, dtype=dtype if like.device.type == "mps" else torch.float64)
    return RowStats(torch.full_like(target_logit, MIN_SHIFT), total, weighted if with_entropy else None, target_logit)
