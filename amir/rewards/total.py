"""The weighted sum of a completion's scores. Torch is imported for the first sum, so that rewards start without it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config import RewardSettings

if TYPE_CHECKING:
    from torch import Tensor


def total_reward(scores: "Tensor", rewards: Sequence[RewardSettings]) -> "Tensor":
    """Sum of weight times score, float32 `[B]`, of `scores` `[B, F]`. NaN scores are left out; NaN if all are NaN."""
    import torch

    from amir_kernels.group_advantage import weighted_sum

    weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float64, device=scores.device)
    return weighted_sum(scores.double(), weights).float()
