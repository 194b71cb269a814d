"""Per-token log-probabilities, entropy and log-sum-exp of a language model's head, without its logits.

`N` rows (tokens), `H` hidden size, `V` vocabulary, `r` LoRA rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .policy_loss import Objective, PolicyLoss

Lora = tuple[Tensor, Tensor, float]


class LogprobEntropy(NamedTuple):
    """What `linear_logprob_entropy` returns, each shaped like `target`, in nats."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: Lora | None = None,
    ignore_index: int = -100,
    process_group: ProcessGroup | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Log-probability of each target token under a language model's head."""
    raise NotImplementedError("linear_logprob")


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: Lora | None = None,
    ignore_index: int = -100,
    process_group: ProcessGroup | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
    entropy_grad: bool = True,
) -> LogprobEntropy:
    """Log-probability, entropy and log-sum-exp of each row, from one sweep over the vocabulary."""
    raise NotImplementedError("linear_logprob_entropy")


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    objective: str | Objective = "grpo",
    importance_weight: Tensor | None = None,
    num_tokens: int | float | Tensor | None = None,
    num_sequences: int | float | Tensor | None = None,
    preference_weights: Tensor | None = None,
    normalize: str = "mean",
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: Lora | None = None,
    ignore_index: int = -100,
    process_group: ProcessGroup | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> PolicyLoss:
    """Policy loss straight from hidden states."""
    raise NotImplementedError("linear_policy_loss")


def workspace_of(
    hidden: Tensor,
    weight: Tensor,
    *,
    lora: Lora | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> int:
    """Bytes of scratch that a call with these tensors would hold at its peak."""
    raise NotImplementedError("workspace_of")
