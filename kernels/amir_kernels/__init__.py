"""Fused ops for GRPO-family training: log-probs without logits, group advantages, all-pairs preference, policy losses.

Needs torch, and triton where there is a GPU that it serves. `amir_kernels.reference` holds each function again in plain
torch.
"""

from . import reference as reference
from .amir_loss import AmirLoss, amir_loss
from .group_advantage import group_advantage, pass_at_k_advantage
from .linear_logprob import (
    LogprobEntropy,
    linear_logprob,
    linear_logprob_entropy,
    linear_policy_loss,
    workspace_of,
)
from .objective import OBJECTIVES, Objective
from .policy_loss import PolicyLoss, policy_loss
from .preference_loss import PairLogits, PreferenceLoss, pair_logits, preference_loss, preference_weights
from .sequence_logprob import sequence_logprob
from .support import Support, supports

__version__ = "0.1.0"

__all__ = [
    "OBJECTIVES",
    "AmirLoss",
    "LogprobEntropy",
    "Objective",
    "PairLogits",
    "PolicyLoss",
    "PreferenceLoss",
    "Support",
    "amir_loss",
    "group_advantage",
    "linear_logprob",
    "linear_logprob_entropy",
    "linear_policy_loss",
    "pair_logits",
    "pass_at_k_advantage",
    "policy_loss",
    "preference_loss",
    "preference_weights",
    "sequence_logprob",
    "supports",
    "workspace_of",
]
