"""Groups of rows, passed as a size or as ids in any order, and used as consecutive segments of sorted rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check_int64, check_shape

ROUNDING = 4 * 2.0**-23
"""Two rewards differ if their gap exceeds this times max(1, |r_i|, |r_j|): more than float32 rounding of a sum."""


class Segments(NamedTuple):
    """The bounds of each row's group, for rows sorted by group (stable, so that ties keep their order)."""

    order: Tensor | None
    """int64 `[B]`: the original index of each sorted row; None if the rows are sorted already"""
    start: Tensor
    """int64 `[B]`: first sorted row of this row's group"""
    end: Tensor
    """int64 `[B]`: one past the last"""

    def sort(self, values: Tensor) -> Tensor:
        """Values in sorted order, contiguous, as the kernels read them."""
        return values.contiguous() if self.order is None else values[self.order]

    def unsort(self, values: Tensor) -> Tensor:
        """Values of sorted rows in the original order."""
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(0, self.order, values)


def check_rewards(rewards: Tensor) -> None:
    """Refuses all but tensors of real numbers, integers and bools included."""
    if not isinstance(rewards, Tensor) or rewards.is_complex():
        kind = rewards.dtype if isinstance(rewards, Tensor) else type(rewards).__name__
        raise TypeError(f"rewards must be a tensor of real numbers, got {kind}; torch.as_tensor makes one of a list")


def check_group(group: int | Tensor, rows: int) -> None:
    """Refuses all but a size that divides the rows, and int64 ids, one per row."""
    if isinstance(group, Tensor):
        check_int64("group", group)
        check_shape(
            "group", group, (rows,), "one group id per row; for equal consecutive groups pass their size as an int"
        )
    elif not isinstance(group, int) or isinstance(group, bool):
        raise TypeError(
            f"group must be an int, the rows of each group, or an int64 tensor of group ids, got {type(group).__name__}"
        )
    elif group < 1 or rows % group:
        raise ValueError(f"group={group} must be at least 1 and divide the {rows} rows; unequal groups need ids [B]")


def segments(group: int | Tensor, rows: int, device: torch.device) -> Segments:
    """The segments of checked groups. Does not synchronize the device."""
    if isinstance(group, Tensor):
        ids, order = torch.sort(group, stable=True)
        return Segments(order, torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True))
    start = torch.arange(rows, device=device) // group * group
    return Segments(None, start, start + group)
