"""The weighted sum of what a run's reward functions gave."""

from collections.abc import Sequence

import torch
from torch import Tensor

from amir_kernels.group_advantage import weighted_sum

from ..config import RewardSettings


def total_reward(scores: Tensor, rewards: Sequence[RewardSettings]) -> Tensor:
    """Sum over functions of weight times score, float32 `[B]`; a NaN score is left out, NaN where all are. `[B, F]`."""
    weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float64, device=scores.device)
    return weighted_sum(scores.double(), weights).float()
