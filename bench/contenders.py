"""One GRPO loss from hidden states, forward and backward, by every head that is compared.

    loss = -mean of min(rho A, clip(rho, 0.8, 1.2) A),   rho = exp(logprob - old)
    logprob = log_softmax(hidden @ weight.T)[target]

Legend: B completions, L their length, H hidden size, V vocabulary.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from amir_kernels import linear_logprob, linear_policy_loss, policy_loss

CLIP = 0.2
CLIPPED_LOG_RATIO = 0.5
"""Log-ratio of a token whose gradient the clip makes zero."""


@dataclass(frozen=True)
class HeadSize:
    """A model's head."""

    name: str
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.name} {self.hidden} x {self.vocabulary:,}"


@dataclass(frozen=True)
class Problem:
    """The inputs of the loss."""

    hidden: Tensor
    """[B, L, H], requires its gradient"""
    weight: Tensor
    """[V, H]; requires its gradient where the head is trained"""
    target: Tensor
    """[B, L]"""
    old: Tensor
    """[B, L] log-probs of the policy that sampled"""
    advantages: Tensor
    """[B]"""

    @property
    def inputs_with_gradient(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad)

    def with_trained_head(self) -> "Problem":
        return replace(self, weight=self.weight.detach().requires_grad_())

    def part(self, columns: int) -> "Problem":
        """The same with the first `columns` of the vocabulary only."""
        columns = min(columns, self.weight.shape[0])
        weight, target = self.weight.detach()[:columns], self.target % columns
        part = replace(self, weight=weight, target=target, old=sampled_logprob(self.hidden, weight, target))
        return part.with_trained_head() if self.weight.requires_grad else part

    def with_zero_gradient_rows(self, share: float) -> "Problem":
        """Tokens chosen at random are clipped: their gradient is exactly 0."""
        dead = torch.rand(self.old.shape, device=self.old.device) < share
        return replace(
            self, old=torch.where(dead, self.old - CLIPPED_LOG_RATIO * self.advantages.sign()[:, None], self.old)
        )


def make_problem(head: HeadSize, batch: int, length: int, dtype: torch.dtype, device: str = "cpu") -> Problem:
    """Logits of standard deviation 2, random targets, advantages +1 and -1, log-ratios within the clip."""
    torch.manual_seed(0)
    hidden = torch.randn(batch, length, head.hidden, device=device).to(dtype)
    weight = torch.randn(head.vocabulary, head.hidden, device=device).mul_(2 * head.hidden**-0.5).to(dtype)
    target = torch.randint(head.vocabulary, (batch, length), device=device)
    old = sampled_logprob(hidden, weight, target)
    advantages = torch.ones(batch, device=device)
    advantages[1::2] = -1
    return Problem(hidden.requires_grad_(), weight, target, old, advantages)


def sampled_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Log-probs of a policy close to this one."""
    with torch.no_grad():
        logprob = linear_logprob(hidden, weight, target)
    return logprob + 0.1 * (torch.rand_like(logprob) - 0.5)


Contender = Callable[[Problem], Tensor]
"""A problem's loss, with its graph."""


def gradients(contender: Contender, problem: Problem) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Forward and backward: the loss and the gradients of `problem.inputs_with_gradient`."""
    loss = contender(problem)
    return loss.detach(), torch.autograd.grad(loss, problem.inputs_with_gradient)


def grpo(logprob: Tensor, problem: Problem) -> Tensor:
    """The loss in plain torch."""
    ratio, advantages = (logprob - problem.old).exp(), problem.advantages[:, None]
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def ours(problem: Problem) -> Tensor:
    """`linear_logprob`, then `policy_loss`."""
    logprob = linear_logprob(problem.hidden, problem.weight, problem.target)
    return policy_loss(logprob, problem.old, problem.advantages, objective="grpo").loss


def ours_fused(problem: Problem) -> Tensor:
    """`linear_policy_loss`."""
    p = problem
    return linear_policy_loss(p.hidden, p.weight, p.target, p.old, p.advantages, objective="grpo").loss


def full_logits(problem: Problem) -> Tensor:
    """Log-softmax in float32 of all logits."""
    logits = problem.hidden @ problem.weight.T
    logprob = logits.float().log_softmax(-1).gather(-1, problem.target[..., None])[..., 0]
    return grpo(logprob, problem)


def trl_chunked(chunk: int) -> Contender:
    """TRL's `ChunkedLogProbFunction` over `chunk` columns at a time."""
    from trl.kernels import ChunkedLogProbFunction

    def loss(problem: Problem) -> Tensor:
        flat, target = problem.hidden.flatten(0, 1), problem.target.flatten()
        logprob = ChunkedLogProbFunction.apply(flat, problem.weight, None, target, 1.0, chunk, None, 1.0, ())[0]
        return grpo(logprob.view_as(problem.target), problem)

    return loss


def trl_default_chunk() -> int:
    """The columns that TRL's trainer takes at a time."""
    from trl.trainer import utils

    return utils._CHUNKED_LOGPROB_CHUNK_SIZE


def liger(compiled: bool) -> Contender:
    """Liger's `LigerFusedLinearGRPOLoss`, with its own loss."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    fused = LigerFusedLinearGRPOLoss(beta=0.0, compiled=compiled, use_ref_model=False, loss_type="grpo")

    def loss(problem: Problem) -> Tensor:
        p, mask = problem, torch.ones_like(problem.target)
        return fused(p.hidden, p.weight, p.target, mask, p.advantages, old_per_token_logps=p.old)[0]

    return loss


def cut_cross_entropy(implementation: str) -> Contender:
    """Apple's Cut Cross Entropy, an implementation by its own name."""
    from cut_cross_entropy import linear_cross_entropy

    def loss(problem: Problem) -> Tensor:
        nll = linear_cross_entropy(
            problem.hidden, problem.weight, problem.target, reduction="none", impl=implementation
        )
        return grpo(-nll.float(), problem)

    return loss


def verl_triton() -> Contender:
    """verl's Triton kernel, from its own file: importing verl itself needs ray."""
    kernel = _verl_kernel().linear_cross_entropy

    def loss(problem: Problem) -> Tensor:
        logprob, _ = kernel(problem.hidden.flatten(0, 1), problem.weight, problem.target.flatten(), 1.0, "none", None)
        return grpo(logprob.float().view_as(problem.target), problem)

    return loss


@cache
def _verl_kernel() -> ModuleType:
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("verl is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    for name, path in {
        "verl": folder,
        "verl.utils": folder / "utils",
        "verl.utils.kernel": folder / "utils" / "kernel",
    }.items():
        package: Any = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(path)]
    return importlib.import_module("verl.utils.kernel.linear_cross_entropy")
