"""The choice between the two backends. Triton is optional: without it, or without a GPU, the torch backend serves."""

import os

import torch
from torch import Tensor

try:
    import triton  # noqa: F401

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

BACKENDS = ("auto", "triton", "torch")


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
    return None


def use_triton(backend: str, tensor: Tensor) -> bool:
    """Whether Triton serves a call whose main input is `tensor`; raises if it is requested and cannot serve."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend == "torch":
        return False
    obstacle = _triton_obstacle(tensor)
    if backend == "triton" and obstacle:
        raise ValueError(f'backend="triton" cannot serve this call: {obstacle}; pass backend="torch" or "auto"')
    return obstacle is None and (tensor.is_cuda or backend == "triton")
