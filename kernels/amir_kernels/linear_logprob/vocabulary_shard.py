"""A vocabulary split over the ranks of a process group: each holds consecutive rows of the head, in rank order.

Every rank must call with the same rows, targets and upstream gradients. Partial statistics are gathered and merged in
rank order, not reduced, so that the order of summation never depends on the number of rows.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._backend import refuse_capture
from .rows import RowStats


class VocabularyShard(NamedTuple):
    """The part of the vocabulary that this rank holds."""

    group: "dist.ProcessGroup | None"
    """None: this rank holds the whole vocabulary"""
    first: int
    rows: int
    vocabulary: int
    """of all ranks together"""

    @classmethod
    def of(cls, group_name: str, weight: Tensor) -> "VocabularyShard":
        """Gathers the number of rows of every rank; synchronizes the ranks."""
        rows = weight.shape[0]
        if not group_name:
            return cls(None, 0, rows, rows)
        refuse_capture("linear_logprob with a process_group", weight)
        from torch.distributed.distributed_c10d import _resolve_process_group

        group = _resolve_process_group(group_name)  # type: ignore[arg-type]
        own = torch.tensor([rows], device=weight.device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own, group=group)
        sizes = [int(size) for size in gathered]
        return cls(group, sum(sizes[: dist.get_rank(group)]), rows, sum(sizes))

    def local(self, target: Tensor) -> Tensor:
        """Targets among this rank's rows; -1 where another rank holds them."""
        if self.group is None:
            return target
        own_rows = (target >= self.first) & (target < self.first + self.rows)
        return torch.where(own_rows, target - self.first, -1)

    def merge(self, stats: RowStats) -> RowStats:
        """Statistics over all ranks' columns. A target's logit is 0 on every rank but its own."""
        if self.group is None:
            return stats
        own = torch.stack([value for value in stats if value is not None])
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, own, group=self.group)
        shift = torch.stack([part[0] for part in gathered]).amax(0)
        total, weighted, target_logit = (torch.zeros_like(shift) for _ in range(3))
        for part in gathered:
            rescale = torch.exp(part[0] - shift)
            total += rescale * part[1]
            target_logit += part[-1]
            if stats.weighted is not None:
                weighted += rescale * (part[2] + (part[0] - shift) * part[1])
        return RowStats(shift, total, None if stats.weighted is None else weighted, target_logit)

    def sum(self, partial: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The sum over ranks of a gradient that each formed from its own columns."""
        if partial is None or self.group is None:
            return partial
        dist.all_reduce(partial, group=self.group)
        return partial.to(dtype)
