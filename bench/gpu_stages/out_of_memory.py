"""A micro-batch that really runs out of memory is halved, and the gradient is that of the whole one.

The process is allowed too little memory for the micro-batch, and enough for its half. On a CPU the error is raised.
"""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from amir.policy.policy import Policy
from amir.tokens import Tokens
from amir.update.batch import Batch
from amir.update.gradient import backward, make_objective, reference_logprobs
from amir.update.micro_batches import TokenBudget

from .judging import compare
from .real_model import config_of, make_batch, make_policy, setting_of
from .sizes import Sizes
from .stage import Part, Ratio, Row, make_row
from .trainer_step import AGREEMENT

SHARE = 0.75
"""Of the memory that the step adds to what is held, left to it."""


def parts(sizes: Sizes) -> list[Part]:
    """One part."""
    return [Part("halved", partial(halved, sizes), 25)]


def halved(sizes: Sizes) -> Iterator[Row]:
    """The gradient of a step that fits, then of the same step with too little memory."""
    setting = setting_of(sizes)
    config = config_of(setting, sizes)
    policy = make_policy(setting, sizes)
    batch = make_batch(setting, sizes, policy.vocabulary_size)
    for parameter in policy.trainable().values():
        parameter.grad = torch.zeros_like(parameter)
    whole_budget = TokenBudget.for_policy(config, policy)
    batch = replace(batch, ref_logprobs=reference_logprobs(policy, batch, config, whole_budget))
    held = memory(sizes)
    whole = gradient(policy, batch, config, whole_budget)
    peak = torch.cuda.max_memory_allocated() if sizes.device == "cuda" else 0
    messages: list[str] = []
    budget = TokenBudget.for_policy(config, policy, log=messages.append)
    with limited(sizes, held, peak, batch.tokens):
        parts_gradient = gradient(policy, batch, config, budget)
    bound = AGREEMENT[sizes.dtype]
    yield compare("amir", f"{setting.case}, halved: gradient", parts_gradient, whole, to="the whole one", at_most=bound)
    halvings = Ratio("steps that were not halved", float(not messages), 0)
    observed = {"halvings": len(messages), "micro_batch_tokens": budget.tokens}
    yield make_row("amir", f"{setting.case}, halved", {"check": "halved"}, observed=observed, ratio=halvings)


def memory(sizes: Sizes) -> int:
    """Bytes of the tensors that are alive, after the peak is set back."""
    gc.collect()
    if sizes.device != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def gradient(policy: Policy, batch: Batch, config: Any, budget: TokenBudget) -> Tensor:
    """The adapter's gradient of a step, as one vector."""
    for parameter in policy.trainable().values():
        assert parameter.grad is not None
        parameter.grad.zero_()
    backward(policy, batch, make_objective(config), config, budget)
    return torch.cat([p.grad.flatten().clone() for p in policy.trainable().values()])  # type: ignore[union-attr]


def limited(sizes: Sizes, held: int, peak: int, tokens: Tokens) -> AbstractContextManager[None]:
    """Less memory than the step needs."""
    if sizes.device == "cuda":
        return _limited_gpu(held + int(SHARE * (peak - held)))
    return _raised(tokens.computed(packed=True))


@contextmanager
def _limited_gpu(allowed: int) -> Iterator[None]:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def _raised(tokens: int) -> Iterator[None]:
    original = Policy.logprobs_entropy

    def short_of_memory(policy: Policy, batch: Tokens) -> Any:
        if batch.computed(packed=True) >= tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. This is a rehearsal.")
        return original(policy, batch)

    with patch.object(Policy, "logprobs_entropy", short_of_memory):
        yield
