"""AdamW on the adapter, the learning rate of each step, and gradient clipping."""

import math

import torch
from torch import Tensor

from .config import RunConfig


def make_optimizer(config: RunConfig, named: dict[str, Tensor]) -> torch.optim.AdamW:
    """AdamW over the named parameters, in their order; gradients start at zero so that every step moves every one."""
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.AdamW(
        named.values(),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of a step, counted from 1: linear warm-up, then constant, or down to 0 after `max_steps`."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / (config.max_steps - config.warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.lr_scheduler]
    return config.learning_rate * factor


def apply_update(optimizer: torch.optim.Optimizer, config: RunConfig, step: int) -> Tensor:
    """Clips the accumulated gradient, updates the parameters, zeroes the gradient; returns the norm before clipping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm, error_if_nonfinite=True)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return norm
