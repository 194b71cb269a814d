"""Argument checks of the public functions. An error says what was found, what is expected and what to do."""

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuses all but the choices."""
    if value not in (allowed := tuple(choices)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuses all but True and False: the string "false" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_kind(value)}")


def check_number(name: str, value: object, at_least: float = -math.inf) -> None:
    """Refuses all but finite real numbers, and tensors, which would silently lose their gradient."""
    expected = "a finite number" if at_least == -math.inf else f"a finite number of at least {at_least}"
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        remedy = "; it would get no gradient: pass a float, value.item()" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be {expected}, got {_kind(value)}{remedy}")
    if not (-math.inf < value < math.inf and value >= at_least):  # type: ignore[operator]
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Refuses all but positive finite numbers."""
    check_number(name, value)
    if not value > 0:  # type: ignore[operator]
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")


def check_count(name: str, value: object, at_least: int | None = 1) -> None:
    """Refuses all but ints of at least `at_least`; None admits any int."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {_kind(value)}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value!r}")


def check_tensor(name: str, value: object) -> None:
    """Refuses all but tensors."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {_kind(value)}; torch.as_tensor makes one of lists and arrays")


def check_float(name: str, tensor: Tensor) -> None:
    """Refuses all but tensors of floats of at least 16 bits."""
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}; convert it with {name}.float()")
    if tensor.dtype.itemsize == 1:
        raise TypeError(f"{name} must have at least 16 bits, got {tensor.dtype}; convert it first")


def check_devices(main: str, device: torch.device, others: Mapping[str, object]) -> None:
    """Refuses tensors that are not on `device`, that of the argument `main`. Values that are not tensors pass."""
    for name, other in others.items():
        if isinstance(other, Tensor) and other.device != device:
            raise ValueError(
                f"{name} is on {other.device}, {main} on {device}; they must be on one device: move one of them"
            )


def check_values(holds: Tensor, message: str, describe: Callable[[], object]) -> None:
    """Raises ValueError if a 0-d bool is False: the message, and the values that `describe` returns.

    On a GPU and in a traced graph it is an assertion with the message alone, which does not synchronize the device.
    """
    if holds.device.type == "cpu" and type(holds) is Tensor and not torch.compiler.is_compiling():
        if not bool(holds):
            raise ValueError(f"{message}, got {describe()}")
    else:
        torch._assert_async(holds, message)


def step_divisor(name: str, total: float | Tensor | None, local: Tensor) -> Tensor:
    """The divisor of a loss: a `total` of the whole optimizer step, finite and at least 0, where 0 counts as 1.

    The default is the 0-d `local`, the total of this call, which also gives dtype and device.
    """
    if total is None:
        return local.clamp(min=1)
    if isinstance(total, Tensor):
        if total.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of shape {list(total.shape)}; pass its sum")
        if total.device.type != "cpu":
            check_devices("the loss", local.device, {name: total})
        divisor = total.detach().reshape(()).to(local)
        in_range = (divisor >= 0) & (divisor < math.inf)
        check_values(in_range, f"{name} must be a finite number of at least 0", lambda: divisor.item())
    else:
        check_number(name, total, at_least=0)
        divisor = torch.full((), total, dtype=local.dtype, device=local.device)
    return torch.where(divisor > 0, divisor, 1)


def _kind(value: object) -> str:
    """The value itself if it is short and says more than its type, else the name of its type."""
    return repr(value) if value is None or isinstance(value, (bool, str)) else type(value).__name__


def check_shape(name: str, tensor: Tensor, shape: Iterable[int], like: str) -> None:
    """Refuses all but tensors of that shape; `like` says what it is."""
    check_tensor(name, tensor)
    if tuple(tensor.shape) != (expected := tuple(shape)):
        raise ValueError(f"{name} must have shape {list(expected)} ({like}), got {list(tensor.shape)}")


def check_int64(name: str, tensor: Tensor) -> None:
    """Refuses all but int64 tensors."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be an int64 tensor, got {_kind(tensor)}; torch.as_tensor makes one")
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be an int64 tensor, got {tensor.dtype}; convert it with {name}.long()")


def check_removed(bias: Tensor, logit_scale: float) -> None:
    """Refuses a bias of -inf, which removes a token, where the scale gives it no value (0) or makes it +inf."""
    if logit_scale <= 0:
        message = (
            "bias must be finite where logit_scale is not positive, since -inf * logit_scale removes no token; "
            "use a positive logit_scale, or leave the tokens out of weight and bias"
        )
        check_values(
            bias.detach().isfinite().all(), f"{message} (logit_scale={logit_scale})", lambda: "an infinite bias"
        )


def active_transforms() -> set[str]:
    """Names of the torch.func transforms that the call is inside: "Grad", "Vmap", "Jvp". Empty in a traced graph."""
    if torch.compiler.is_compiling():
        return set()
    return {interpreter.key().name for interpreter in torch._C._functorch.get_interpreter_stack() or ()}


def check_transforms(op: str, tensors: Iterable[Tensor | None]) -> None:
    """Refuses derivatives that the op does not have: forward mode, and those by torch.func's transforms.

    Without this torch would take the results for constants, or name a function that the caller never wrote.
    """
    if torch.compiler.is_compiling():
        return
    transforms, present = active_transforms(), [tensor for tensor in tensors if tensor is not None]
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present)
    if tracked and transforms & {"Grad", "Jvp"}:
        raise NotImplementedError(
            f"{op} is called inside torch.func.grad, vjp, jvp or a transform made of them, which cannot differentiate "
            "it; use backward() or torch.autograd.grad, with torch.func.functional_call where the parameters are "
            "arguments, or the function of that name in amir_kernels.reference"
        )
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in present):
        raise NotImplementedError(
            f"{op} has no forward-mode derivatives, and an input carries a tangent; use reverse mode, or the function "
            "of that name in amir_kernels.reference"
        )


def check_vmap(op: str, tensors: Iterable[Tensor]) -> None:
    """Refuses tensors that `torch.vmap` batches."""
    if not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_batchedtensor, tensors)):
        raise NotImplementedError(
            f"{op} is called inside torch.vmap, which is not supported; pass all rows in one call, and "
            "their groups as ids"
        )


def check_batched_gradient(op: str, upstream: Iterable[Tensor | None]) -> None:
    """Refuses gradients that `torch.autograd.grad(..., is_grads_batched=True)` batches."""
    functorch = torch._C._functorch
    batched = (functorch.is_batchedtensor, functorch.is_legacy_batchedtensor)
    present = [grad for grad in upstream if grad is not None]
    if not torch.compiler.is_compiling() and any(check(grad) for check in batched for grad in present):
        raise NotImplementedError(
            f"the backward of {op} is called with a batch of gradients, which is not supported; call it once for each "
            "(is_grads_batched=False, vectorize=False)"
        )
