"""Argument checks of the public functions, and their wording: what came, what was expected, the way out."""

from collections.abc import Iterable

import torch
from torch import Tensor


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    if value not in (allowed := tuple(choices)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")


def check_float(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, shape: Iterable[int], like: str) -> None:
    if tuple(tensor.shape) != (expected := tuple(shape)):
        raise ValueError(f"{name} must have shape {list(expected)} ({like}), got {list(tensor.shape)}")


def check_int64(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be an int64 tensor, got {got}")
