"""The language model's head: per-token log-probabilities, entropies and policy losses without its logits."""

from .linear_policy_loss import linear_policy_loss
from .op import LogprobEntropy, linear_logprob, linear_logprob_entropy, workspace_of

__all__ = ["LogprobEntropy", "linear_logprob", "linear_logprob_entropy", "linear_policy_loss", "workspace_of"]
