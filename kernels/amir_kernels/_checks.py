"""Argument checks of the public functions, and their wording: what came, what was expected, the way out."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real

import torch
from torch import Tensor


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    if value not in (allowed := tuple(choices)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuses all but True and False: the string "false" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_kind(value)}")


def check_number(name: str, value: object, at_least: float = -math.inf) -> None:
    """Refuses all but finite real numbers; a tensor too, which would lose its gradient without a word."""
    expected = "a finite number" if at_least == -math.inf else f"a finite number of at least {at_least}"
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        way_out = "; it gets no gradient, pass a float: value.item()" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be {expected}, got {_kind(value)}{way_out}")
    if not (-math.inf < value < math.inf and value >= at_least):  # type: ignore[operator]
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_positive(name: str, value: object) -> None:
    check_number(name, value)
    if not value > 0:  # type: ignore[operator]
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")


def check_count(name: str, value: object, at_least: int | None = 1) -> None:
    """Refuses all but ints of at least `at_least`, of any sign for None."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {_kind(value)}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value!r}")


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {_kind(value)}; torch.as_tensor makes one of lists and arrays")


def check_float(name: str, tensor: Tensor) -> None:
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
    if tensor.dtype.itemsize == 1:
        raise TypeError(f"{name} must have at least 16 bits, got {tensor.dtype}; convert it first")


def check_devices(main: str, device: torch.device, others: Mapping[str, object]) -> None:
    """Refuses tensors elsewhere than on `device`, that of the argument `main`; leaves alone what is no tensor."""
    for name, other in others.items():
        if isinstance(other, Tensor) and other.device != device:
            raise ValueError(f"{name} is on {other.device}, {main} on {device}; they must be on one device")


def check_values(holds: Tensor, message: str) -> None:
    """ValueError where a 0-d bool is False; on a GPU and in a traced graph an assertion, which does not wait for it."""
    if holds.device.type == "cpu" and type(holds) is Tensor and not torch.compiler.is_compiling():
        if not bool(holds):
            raise ValueError(message)
    else:
        torch._assert_async(holds, message)


def step_divisor(name: str, given: float | Tensor | None, local: Tensor) -> Tensor:
    """A total of the whole optimizer step, finite and at least 0, like the 0-d `local`, its default; 0 counts as 1."""
    if given is None:
        return local.clamp(min=1)
    if isinstance(given, Tensor):
        if given.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of shape {list(given.shape)}")
        if given.device.type != "cpu":
            check_devices("the loss", local.device, {name: given})
        total = given.detach().reshape(()).to(local)
        check_values((total >= 0) & (total < math.inf), f"{name} must be a finite number of at least 0")
    else:
        check_number(name, given, at_least=0)
        total = torch.full((), given, dtype=local.dtype, device=local.device)
    return torch.where(total > 0, total, 1)


def _kind(value: object) -> str:
    """What came, in words: the value itself where that is short and says more than its type."""
    return repr(value) if value is None or isinstance(value, (bool, str)) else type(value).__name__


def check_shape(name: str, tensor: Tensor, shape: Iterable[int], like: str) -> None:
    check_tensor(name, tensor)
    if tuple(tensor.shape) != (expected := tuple(shape)):
        raise ValueError(f"{name} must have shape {list(expected)} ({like}), got {list(tensor.shape)}")


def check_int64(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
        got = tensor.dtype if isinstance(tensor, Tensor) else _kind(tensor)
        raise TypeError(f"{name} must be an int64 tensor, got {got}")
