"""Every public op, forward and backward, by pytest-benchmark: ours beside the plain `reference` where that is feasible.

    make ops                             the real sizes
    make ops K="real and linear"         some of them
    make ops K=tiny ARGS=--benchmark-disable

A group is an op at a size. The real one is what a CPU does in seconds: the head of SmolLM2-135M under 256 tokens, pairs
of 64 groups of 16, losses of 64 completions of 1,024 tokens.

Legend: B completions, L their length, H hidden size, V vocabulary, G group size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import amir_kernels
from amir_kernels import OBJECTIVES, reference


@dataclass(frozen=True)
class Size:
    """The sizes of a case."""

    name: str
    batch: int
    length: int
    head_length: int
    hidden: int
    vocabulary: int
    groups: int
    group: int


TINY = Size("tiny", batch=4, length=6, head_length=6, hidden=8, vocabulary=50, groups=2, group=4)
REAL = Size("real", batch=64, length=1024, head_length=64, hidden=576, vocabulary=49_152, groups=64, group=16)


def head(size: Size, trained: bool) -> dict[str, Any]:
    """Arguments of the head's ops."""
    rows = (4, size.head_length)
    return {
        "hidden": torch.randn(*rows, size.hidden, requires_grad=True),
        "weight": (torch.randn(size.vocabulary, size.hidden) / size.hidden**0.5).requires_grad_(trained),
        "target": torch.randint(size.vocabulary, rows),
    }


def head_loss(size: Size, trained: bool) -> dict[str, Any]:
    """Arguments of `linear_policy_loss`."""
    tokens = {"old_logprobs": torch.full((4, size.head_length), -11.0), "advantages": torch.randn(4)}
    return head(size, trained) | tokens


def tokens(size: Size, objective: str) -> dict[str, Any]:
    """Arguments of the policy losses."""
    shape, chosen = (size.batch, size.length), OBJECTIVES[objective]
    if objective == "dr_grpo":
        chosen = chosen.replace(max_completion_length=size.length)
    logprobs = -torch.rand(shape)
    return {
        "logprobs": logprobs.clone().requires_grad_(),
        "old_logprobs": logprobs + 0.1 * torch.randn(shape),
        "advantages": torch.randn(size.batch),
        "mask": torch.rand(shape) < 0.9,
        "ref_logprobs": logprobs + 0.1 * torch.randn(shape),
        "objective": chosen.replace(kl_coef=0.04),
    }


def rewards(size: Size) -> dict[str, Any]:
    """Rewards of 0 and 1, and their groups."""
    return {"rewards": torch.randint(2, (size.groups * size.group,)).float(), "group": size.group}


def pairs(size: Size) -> dict[str, Any]:
    """Arguments of the pair ops."""
    return rewards(size) | {"scores": torch.randn(size.groups * size.group, requires_grad=True)}


def sequences(size: Size) -> dict[str, Any]:
    """Arguments of `sequence_logprob`."""
    return {name: value for name, value in tokens(size, "grpo").items() if name in ("logprobs", "mask")}


def amir(size: Size) -> dict[str, Any]:
    """Arguments of `amir_loss`."""
    return tokens(size, "grpo") | {"rewards": torch.randint(2, (size.batch,)).float(), "group": 4}


CASES: dict[str, tuple[str, Callable[[Size], dict[str, Any]]]] = {
    "linear_logprob, frozen head": ("linear_logprob", lambda size: head(size, False)),
    "linear_logprob, trained head": ("linear_logprob", lambda size: head(size, True)),
    "linear_logprob_entropy": ("linear_logprob_entropy", lambda size: head(size, False)),
    "linear_policy_loss, frozen head": ("linear_policy_loss", lambda size: head_loss(size, False)),
    "linear_policy_loss, trained head": ("linear_policy_loss", lambda size: head_loss(size, True)),
    "group_advantage": ("group_advantage", rewards),
    "pass_at_k_advantage": ("pass_at_k_advantage", lambda size: rewards(size) | {"k": 2}),
    "sequence_logprob": ("sequence_logprob", sequences),
    "preference_loss": ("preference_loss", pairs),
    "preference_weights": ("preference_weights", pairs),
    "pair_logits": ("pair_logits", pairs),
    **{
        f"policy_loss, {name}": ("policy_loss", lambda size, name=name: tokens(size, name))  # type: ignore[misc]
        for name in OBJECTIVES
    },
    "amir_loss": ("amir_loss", amir),
}


def differentiated(result: Any) -> torch.Tensor | None:
    """What the backward starts from: a loss, or the sum of everything that has a gradient."""
    loss = getattr(result, "loss", result)
    values = [value for value in (loss if isinstance(loss, tuple) else (loss,)) if value.requires_grad]
    return torch.stack([value.sum() for value in values]).sum() if values else None


@pytest.mark.parametrize("implementation", ["ours", "reference"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [TINY, REAL], ids=lambda size: size.name)
def bench_op(benchmark: Any, size: Size, case: str, implementation: str) -> None:
    """One forward and, where something has a gradient, one backward."""
    op, make = CASES[case]
    module = amir_kernels if implementation == "ours" else reference
    torch.manual_seed(0)
    arguments = make(size)
    leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad]

    def forward_and_backward() -> tuple[torch.Tensor, ...]:
        total = differentiated(getattr(module, op)(**arguments))
        return () if total is None else torch.autograd.grad(total, leaves)

    benchmark.group = f"{case}, {size.name}"
    assert all(grad.isfinite().all() for grad in benchmark.pedantic(forward_and_backward, rounds=5, warmup_rounds=1))
