"""AdamW on the trained parameters, the learning-rate schedule, and gradient clipping."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..config import RunConfig
from ..distributed import gathered
from ..errors import DIVERGED, RunStopped


def make_optimizer(config: RunConfig, named: dict[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW over the named parameters, in their order; gradients start at zero, so every step updates every parameter.

    With `adamw_8bit`, parameters of at least 4,096 elements have blockwise 8-bit moments (bitsandbytes).
    """
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    kind: Any = torch.optim.AdamW
    if config.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit as kind
    return kind(
        parameter_groups(named, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )


def parameter_groups(named: dict[str, Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """The parameters by their weight decay. Norms and biases, which have one dimension, have none, as in TRL.

    Without weight decay all of them are one group.
    """
    groups: dict[float, list[Tensor]] = {}
    for parameter in named.values():
        groups.setdefault(weight_decay if parameter.dim() > 1 else 0.0, []).append(parameter)
    return [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of a step, counted from 1: linear warm-up, then constant, or decay to 0 after `max_steps`."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / (config.max_steps - config.warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.lr_scheduler]
    return config.learning_rate * factor


def apply_update(optimizer: torch.optim.Optimizer, config: RunConfig, step: int) -> Tensor:
    """Clips the accumulated gradient, updates the parameters, zeroes the gradient; returns the norm before clipping.

    RunStopped if the norm is NaN or infinite.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = gathered(nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
    if not norm.isfinite():
        raise RunStopped(
            f"step {step}: the gradient is not finite (norm {norm.item()}), so the weights were not updated; {DIVERGED}"
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    update(optimizer, parameters)
    optimizer.zero_grad(set_to_none=False)
    return norm


MASTER = "master"
"""Key of a 16-bit parameter's float32 value in the optimizer's state."""

PORTION = 2**26
"""Elements whose float32 gradients are in memory at once in addition to the 16-bit ones: 256 MiB."""


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """One step of the optimizer. 16-bit parameters have float32 masters, because most updates would round to nothing.

    For the step, a portion of the parameters at a time holds the values of its masters.
    """
    if not any(parameter.dtype.itemsize == 2 for parameter in parameters):
        optimizer.step()
        return
    gradients: dict[nn.Parameter, Any] = {parameter: parameter.grad for parameter in parameters}
    for parameter in parameters:
        parameter.grad = None
    for portion in _portions(parameters):
        rounded = [parameter.data for parameter in portion]
        for parameter in portion:
            parameter.data = optimizer.state[parameter].pop(MASTER, parameter.data.float())
            parameter.grad = gradients[parameter].float()
        optimizer.step()
        for parameter, values in zip(portion, rounded, strict=True):
            optimizer.state[parameter][MASTER] = parameter.data
            parameter.grad, parameter.data = None, values.copy_(parameter.data)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def _portions(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    portion: list[nn.Parameter] = []
    for parameter in parameters:
        if portion and sum(p.numel() for p in portion) + parameter.numel() > PORTION:
            yield portion
            portion = []
        portion.append(parameter)
    yield portion
