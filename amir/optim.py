"""AdamW on what is trained, the learning rate of each step, and gradient clipping."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .config import RunConfig
from .ranks import whole


def make_optimizer(config: RunConfig, named: dict[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW over the named parameters, in their order; gradients start at zero so that every step moves every one.

    With `adamw_8bit` the moments of parameters from 4,096 numbers on are kept in 8 bits by blocks (bitsandbytes).
    """
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    kind: Any = torch.optim.AdamW
    if config.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit as kind
    return kind(
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
    norm = whole(nn.utils.clip_grad_norm_(parameters, config.max_grad_norm, error_if_nonfinite=True))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    if any(p.dtype.itemsize == 2 for p in parameters):
        _step_in_float32(optimizer, parameters)
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return norm


MASTER = "master"
"""Key of a 16-bit parameter's float32 value in the optimizer's state."""


@torch.no_grad()
def _step_in_float32(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Updates float32 masters of 16-bit parameters, which would round most updates of a usual size away.

    One parameter at a time stands in for its master, so that a single float32 gradient exists at once.
    """
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    for parameter, gradient in zip(parameters, gradients, strict=True):
        rounded = parameter.data
        parameter.data = optimizer.state[parameter].pop(MASTER, rounded.float())
        parameter.grad = gradient.float()
        optimizer.step()
        optimizer.state[parameter][MASTER] = parameter.data
        parameter.grad, parameter.data = None, rounded.copy_(parameter.data)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
