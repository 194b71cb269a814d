"""The weighted sum of a completion's scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from amir_kernels.group_advantage import weighted_sum

from ..config import RewardSettings


def total_reward(scores: Tensor, rewards: Sequence[RewardSettings]) -> Tensor:
    """Sum of weight times score, float32 `[B]`, of `scores` `[B, F]`. NaN scores are left out; NaN if all are NaN."""
    weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float64, device=scores.device)
    return weighted_sum(scores.double(), weights).float()
