"""The choice between the two backends, and the device that a kernel is launched on.

Triton is optional: without it, without a GPU, or on a GPU without the matrix instructions that the kernels are written
for, the torch backend serves.
"""

import functools
import logging
import os
from contextlib import AbstractContextManager

import torch
from torch import Tensor

try:
    import triton  # noqa: F401

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

BACKENDS = ("auto", "triton", "torch")
LEAST_CAPABILITY = 8, 0
"""Compute capability. Below it Triton forms 16-bit products without tensor cores, and there is no bfloat16."""

_LOG = logging.getLogger("amir_kernels")


def interpreting() -> bool:
    """True where Triton kernels run in its interpreter (`TRITON_INTERPRET=1`), which also takes CPU tensors."""
    return HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"


def _triton_obstacle(tensor: Tensor) -> str | None:
    if not HAS_TRITON:
        return "triton is not installed"
    if tensor.dtype == torch.float64:
        return "float64 is served by the torch backend only"
    if not tensor.is_cuda and not interpreting():
        return f"the tensors are on {tensor.device}, not on a GPU"
    if tensor.is_cuda:
        return _card_obstacle(tensor.device)
    return None


def _card_obstacle(device: torch.device) -> str | None:
    """Why Triton's kernels are not for this card; they are for every AMD card. A constant of a traced graph."""
    if torch.version.hip or (capability := torch.cuda.get_device_capability(device)) >= LEAST_CAPABILITY:
        return None
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, the kernels "
        f"need {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} (Ampere) or later"
    )


@functools.cache
def _log_once(obstacle: str) -> None:
    _LOG.warning('backend="auto" takes the torch backend: %s', obstacle)


def _log_obstacle(obstacle: str) -> None:
    """Logs why Triton does not serve a GPU, once in a process."""
    _log_once(obstacle)


for _function in (_card_obstacle, _log_obstacle):
    # torch.compiler.assume_constant_result, which would import the compiler
    vars(_function)["_dynamo_marked_constant"] = True


def device_guard(tensor: Tensor) -> AbstractContextManager[None]:
    """Makes the tensor's GPU the current one: Triton launches there, on its current stream. Nothing for a CPU."""
    return torch.cuda.device_of(tensor)


def refuse_capture(op: str, tensor: Tensor) -> None:
    """Refuses a call while a CUDA graph is captured: the op reads values from the GPU, and a graph could not."""
    if tensor.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op} is called while a CUDA graph is captured, but it waits for values from the GPU (the targets that "
            "count, the sizes of groups, the pairs), so a graph cannot hold it; capture the model without it. "
            "torch.compile leaves it out of its graphs by itself"
        )


def use_triton(backend: str, tensor: Tensor) -> bool:
    """Whether Triton serves a call whose main input is `tensor`; raises if it is requested and cannot serve."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend == "torch":
        return False
    obstacle = _triton_obstacle(tensor)
    if backend == "triton" and obstacle:
        raise ValueError(f'backend="triton" cannot serve this call: {obstacle}; pass backend="torch" or "auto"')
    if obstacle and tensor.is_cuda and HAS_TRITON and tensor.dtype != torch.float64:
        _log_obstacle(obstacle)
    return obstacle is None and (tensor.is_cuda or backend == "triton")
