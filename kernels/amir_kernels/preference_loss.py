"""The all-pairs preference term of AMIR-GRPO."""

from typing import NamedTuple

from torch import Tensor


class PreferenceLoss(NamedTuple):
    """What `preference_loss` returns."""

    loss: Tensor
    pairs: Tensor
    accuracy: Tensor
    mean_logit: Tensor


class PairLogits(NamedTuple):
    """What `pair_logits` returns."""

    chosen: Tensor
    rejected: Tensor
    logit: Tensor


def sequence_logprob(
    logprobs: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None, normalize: str = "mean"
) -> Tensor:
    """Log-prob of each sequence."""
    raise NotImplementedError("sequence_logprob")


def preference_loss(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    *,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    reduction: str = "mean",
    num_pairs: int | Tensor | None = None,
    num_groups: int | Tensor | None = None,
    valid: Tensor | None = None,
    backend: str = "auto",
) -> PreferenceLoss:
    """The preference loss."""
    raise NotImplementedError("preference_loss")


def preference_weights(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    *,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    reduction: str = "mean",
    num_pairs: int | Tensor | None = None,
    num_groups: int | Tensor | None = None,
    valid: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Gradient of `preference_loss(...).loss` to the scores."""
    raise NotImplementedError("preference_weights")


def pair_logits(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    *,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    valid: Tensor | None = None,
) -> PairLogits:
    """The pairs and their logits."""
    raise NotImplementedError("pair_logits")
