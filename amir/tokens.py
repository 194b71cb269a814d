"""Completions and their prompts as padded tensors: the layout that scoring, losses and micro-batches share.

N prompts of padded length P; B completions of padded length C.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Completions and their prompts; a prompt is stored once for its group."""

    prompt_ids: Tensor  # int64 [N, P], left-padded
    prompt_mask: Tensor  # bool [N, P]
    prompt_index: Tensor  # int64 [B], the prompt of each completion
    completion_ids: Tensor  # int64 [B, C], right-padded
    completion_mask: Tensor  # bool [B, C]; the first EOS included, nothing after it

    def __len__(self) -> int:
        return len(self.completion_ids)

    @property
    def prompt_lengths(self) -> Tensor:
        """int64 `[N]`."""
        return self.prompt_mask.sum(1)

    @property
    def completion_lengths(self) -> Tensor:
        """int64 `[B]`."""
        return self.completion_mask.sum(1)

    def computed(self, *, packed: bool) -> int:
        """The number of tokens that the model computes to score these completions, whose last tokens are not inputs.

        Packed: each prompt once, followed by its completions. Otherwise each completion follows its own copy of the
        prompt, padded to the longest row.
        """
        continued = (self.completion_lengths - 1).clamp(min=0)
        if packed:
            return int(self.prompt_lengths.sum() + continued.sum())
        return len(self) * int((self.prompt_lengths[self.prompt_index] + continued).max())

    def rows(self, rows: Tensor) -> "Tokens":
        """The completions `rows` (int64) with their prompts, trimmed to the longest prompt and completion."""
        prompts, prompt_index = self.prompt_index[rows].unique(return_inverse=True)
        p = int(self.prompt_lengths[prompts].max())
        c = int(self.completion_lengths[rows].max())
        return Tokens(
            self.prompt_ids[prompts, -p:],
            self.prompt_mask[prompts, -p:],
            prompt_index,
            self.completion_ids[rows, :c],
            self.completion_mask[rows, :c],
        )


def pad_tokens(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device | str = "cpu",
) -> Tokens:
    """Lists of token ids as tensors. Every prompt has equally many completions, which are consecutive."""
    prompt_ids, prompt_mask = pad_left(prompts, pad_id)
    completion_ids = pad_right(completions, pad_id)
    lengths = torch.tensor([len(ids) for ids in completions])
    completion_mask = torch.arange(completion_ids.shape[1]) < lengths[:, None]
    prompt_index = torch.arange(len(prompts)).repeat_interleave(len(completions) // len(prompts))
    parts = (prompt_ids, prompt_mask, prompt_index, completion_ids, completion_mask)
    return Tokens(*(part.to(device) for part in parts))


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Left-padded ids, int64 `[N, P]`, and their mask, bool `[N, P]`, True at the tokens."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        ids[place, width - len(row) :] = torch.tensor(row)
        mask[place, width - len(row) :] = True
    return ids, mask


def pad_right(rows: Sequence[Sequence[float]], fill: float) -> Tensor:
    """Lists of numbers as `[B, C]`, right-padded with `fill` and in its dtype."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.tensor(fill).dtype)
