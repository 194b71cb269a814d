"""The refusal of second derivatives: no op here has one, and autograd would take it for zero."""

from typing import Any

import torch
from torch import Tensor


class _Refusal(torch.autograd.Function):
    """Passes a gradient on, and raises where it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, op: str, grad: Tensor, *depends_on: Tensor) -> Tensor:
        ctx.op = op
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"{ctx.op} cannot be differentiated twice: its gradient was computed without a graph; call "
            f"amir_kernels.reference.{ctx.op}, which autograd differentiates any number of times"
        )


def refuse_double_backward(op: str, grad: Tensor, *depends_on: Tensor | None) -> Tensor:
    """`grad`, which raises when a graph built on it (`create_graph=True`) is differentiated with respect to anything.

    Without this a second derivative would silently lack a term. `depends_on` are tensors with a graph that the gradient
    depends on, upstream gradients included. A plain backward builds no graph: `grad` comes back as it is.
    """
    if not torch.is_grad_enabled():
        return grad
    return _Refusal.apply(op, grad, *(tensor for tensor in depends_on if tensor is not None))
