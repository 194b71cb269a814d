"""Policy losses of the GRPO family, built from parts, and the AMIR-GRPO loss on top of any of them."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A policy objective as a choice of parts."""

    ratio: str = "token"


OBJECTIVES: dict[str, Objective] = {}


class PolicyLoss(NamedTuple):
    """What `policy_loss` returns."""

    loss: Tensor
    metrics: dict[str, Tensor]


class AmirLoss(NamedTuple):
    """What `amir_loss` returns."""

    loss: Tensor
    policy: Tensor
    preference: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    objective: str | Objective = "grpo",
    importance_weight: Tensor | None = None,
    num_tokens: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
    entropy: Tensor | None = None,
) -> PolicyLoss:
    """The policy loss."""
    raise NotImplementedError("policy_loss")


def amir_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    objective: str | Objective = "grpo",
    lambda_reg: float = 0.01,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    ref_free: bool = False,
    normalize: str = "mean",
    preference_weights: Tensor | None = None,
    num_pairs: int | Tensor | None = None,
    importance_weight: Tensor | None = None,
    num_tokens: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
    entropy: Tensor | None = None,
) -> AmirLoss:
    """The AMIR-GRPO loss."""
    raise NotImplementedError("amir_loss")
