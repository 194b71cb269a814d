"""The head of a call and its products.

Legend: H hidden size, V vocabulary, r LoRA rank.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

ROW_MULTIPLE = 16
"""Row blocks are padded to this multiple: BLAS then computes a row the same way whatever the number of rows."""

T = TypeVar("T")


class PerInput(NamedTuple, Generic[T]):
    """One value for each input that can get a gradient: the tensors, their gradients, or whether they need one."""

    hidden: T
    weight: T
    bias: T
    lora_a: T
    lora_b: T


class Lora(NamedTuple):
    """A low-rank addition to the head, which is then weight + scaling * b @ a."""

    a: Tensor
    """[r, H]"""
    b: Tensor
    """[V, r]"""
    scaling: float


@dataclass(frozen=True)
class Head:
    """The head of a call: logits are softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    lora: Lora | None
    softcap: float | None
    logit_scale: float
    compute: torch.dtype
    """dtype of the products' inputs, which are rounded to it first"""

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype of the products' results, the statistics and the gradients before they are returned."""
        return torch.float64 if self.compute == torch.float64 else torch.float32

    @property
    def operand(self) -> torch.dtype:
        """Dtype that the products are called with.

        A CPU has no 16-bit product with a float32 result, and ROCm 7 is reported to refuse it (torch 2.9): tiles are
        widened there, and the products are float32.
        """
        return self.compute if self.weight.is_cuda and not torch.version.hip else self.accumulate

    @property
    def depth(self) -> int:
        """H + r"""
        return self.weight.shape[1] + (self.lora.a.shape[0] if self.lora else 0)

    def operands(self, tensor: Tensor) -> Tensor:
        """`tensor` as the products take it."""
        return tensor.to(self.compute).to(self.operand)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


# ---- products ------------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out = a @ b` for a row block `a`; a row's bits do not depend on the number of rows."""
    if out.dtype == torch.float64:  # with several threads BLAS may split the sum of a product of few float64 rows
        for first in range(0, a.shape[0], ROW_MULTIPLE):
            rows = slice(first, first + ROW_MULTIPLE)
            torch.mm(a[rows], b, out=out[rows])
    elif a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, summed in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@contextlib.contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Computes products as the ops promise, whatever is set outside.

    Float32 products are true float32 (no TF32, no bfloat16), 16-bit products sum in float32, and there is no autocast.
    """
    with _STRICT_PRODUCTS, torch.autocast(device.type, enabled=False):
        yield


@contextlib.contextmanager
def _strict_products() -> Iterator[None]:
    with _float32_products(), _float32_sums():
        yield


@contextlib.contextmanager
def _float32_products() -> Iterator[None]:
    backends: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    if all(own == "ieee" for own in before):
        yield
        return
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set per backend, which the older interface refuses to read
        precision = None
        for backend in backends:
            backend.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        for backend, own in zip(backends, before, strict=True):
            backend.fp32_precision = "none"  # inherited from torch.backends.fp32_precision where that gives the same
            if backend.fp32_precision != own:
                backend.fp32_precision = own


@contextlib.contextmanager
def _float32_sums() -> Iterator[None]:
    """16-bit products on a GPU sum in float32, and partial sums are not rounded. Versions lack some of the flags."""
    flags: Any = torch.backends.cuda.matmul
    accumulation = getattr(flags, "allow_fp16_accumulation", None)
    reductions = {}
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        if (allowed := getattr(flags, name, None)) is not None:
            split_k = getattr(flags, f"{name}_split_k", None)
            reductions[name] = (allowed, False) if split_k is None else ((allowed, split_k), (False, split_k))
    if accumulation:
        flags.allow_fp16_accumulation = False
    for name, (_, strict) in reductions.items():
        setattr(flags, name, strict)
    try:
        yield
    finally:
        for name, (before, _) in reductions.items():
            setattr(flags, name, before)
        if accumulation:
            flags.allow_fp16_accumulation = True


class _SharedContext:
    """A context of the whole process: the first of several threads enters it and the last one leaves it."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make, self._lock, self._inside = make, threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._context = self._make()
                self._context.__enter__()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._context.__exit__(None, None, None)


_STRICT_PRODUCTS = _SharedContext(_strict_products)
