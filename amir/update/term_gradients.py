"""A diagnosis: the norm of each loss term's gradient with respect to the trained parameters.

The gradient of the policy term is that of the whole loss, in `.grad`, minus that of the pair term, which takes one more
backward of the model and two more gradients in memory. `.grad` does not change.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ..policy.policy import Policy


class TermGradients:
    """The pair term's gradient of the trained parameters, summed over this rank's micro-batches."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._of_pairs = [torch.zeros_like(parameter) for parameter in policy.trainable().values()]

    def add(self, logprobs: Tensor, from_pairs: Tensor) -> None:
        """Adds the gradient of a micro-batch; `from_pairs` is the pair term's gradient with respect to `logprobs`."""
        parameters = list(self._policy.trainable().values())
        parts = torch.autograd.grad(logprobs, parameters, from_pairs, retain_graph=True, materialize_grads=True)
        torch._foreach_add_(self._of_pairs, parts)

    def squares(self) -> Counter[str]:
        """The squared norm of each term's gradient, over all ranks; every rank must call this."""
        squares: Any = Counter()
        for parameter, part in zip(self._policy.trainable().values(), self._of_pairs, strict=True):
            pairs = self._policy.ranks.total(part).float()
            squares["pair_parameter_grad_square"] += pairs.square().sum()
            squares["policy_parameter_grad_square"] += (parameter.grad - pairs).square().sum()  # type: ignore[operator]
        return squares
