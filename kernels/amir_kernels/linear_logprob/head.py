"""What a call of the head is made of: the head itself, its blocks of rows and tiles of vocabulary, and its products.

Legend: N rows (tokens), R rows of a block, H hidden size, V vocabulary, C columns of a tile, r LoRA rank.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEFAULT_WORKSPACE_BYTES = {"cpu": 20 * 2**20}
DEFAULT_WORKSPACE_BYTES_GPU = 256 * 2**20
ROW_MULTIPLE = 16
"""Row blocks are padded to this multiple: BLAS then computes a row the same way whatever the number of rows."""


class Limits(NamedTuple):
    """Rows of a block and columns of a tile beyond which the products gain nothing."""

    rows: int
    columns: int
    formed_rows: int
    """where a block's logits are kept for the whole vocabulary"""


LIMITS = {"cpu": Limits(1024, 1024, 448)}
"""A tile of 4 MiB: little enough for the elementwise work to stay in the cache, enough for two threads."""
LIMITS_GPU = Limits(2**20, 4096, 2**20)


class Lora(NamedTuple):
    """The head is weight + scaling * b @ a."""

    a: Tensor
    """[r, H]"""
    b: Tensor
    """[V, r]"""
    scaling: float


@dataclass(frozen=True)
class Head:
    """The head of a call, as every tile needs it."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    lora: Lora | None
    softcap: float | None
    logit_scale: float
    compute: torch.dtype
    """of the products' inputs; they are rounded to it first"""

    @property
    def accumulate(self) -> torch.dtype:
        """of the products' results, the statistics and the gradients under way"""
        return torch.float64 if self.compute == torch.float64 else torch.float32

    @property
    def operand(self) -> torch.dtype:
        """What the products are called with. A CPU has no 16-bit product with a float32 result: tiles are widened."""
        return self.compute if self.weight.is_cuda else self.accumulate

    @property
    def depth(self) -> int:
        """H + r"""
        return self.weight.shape[1] + (self.lora.a.shape[0] if self.lora else 0)

    def operands(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.compute).to(self.operand)


class Blocks(NamedTuple):
    """Rows of a block and columns of a tile."""

    rows: int
    columns: int

    def columns_of(self, vocabulary: int) -> list[tuple[int, int]]:
        return [(c, min(c + self.columns, vocabulary)) for c in range(0, vocabulary, self.columns)]

    def rows_of(self, rows: int) -> list[tuple[int, int]]:
        """Equal blocks, as few as `self.rows` allows."""
        count = max(1, math.ceil(rows / self.rows))
        step = round_up(math.ceil(rows / count), ROW_MULTIPLE)
        return [(r, min(r + step, rows)) for r in range(0, rows, step)] if rows else []


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def default_workspace(device: torch.device) -> int:
    return DEFAULT_WORKSPACE_BYTES.get(device.type, DEFAULT_WORKSPACE_BYTES_GPU)


def limits_of(device: torch.device) -> Limits:
    return LIMITS.get(device.type, LIMITS_GPU)


def choose_blocks(vocabulary: int, depth: int, workspace: int, itemsize: int, copies: int, limits: Limits) -> Blocks:
    """The largest blocks whose scratch fits `workspace` bytes; at least 16 x 16. Does not depend on the number of rows.

    `depth` is H + r. A quarter is for the `copies` of weight tiles where there are any, the rest for the rows: a tile,
    two like it for elementwise work, and three `[R, H + r]`. Rows and columns each grow with the workspace, or stay.
    """
    widest = min(limits.columns, round_up(vocabulary, ROW_MULTIPLE))
    per_column = itemsize * max(3 * ROW_MULTIPLE, copies * depth)
    columns = widest
    while columns > ROW_MULTIPLE and columns * per_column > workspace // 4:
        columns = max(ROW_MULTIPLE, round_up(columns // 2, ROW_MULTIPLE))
    for_rows = workspace - (workspace // 4 if copies else 0)
    rows = for_rows // (itemsize * 3 * (widest + depth) * ROW_MULTIPLE) * ROW_MULTIPLE
    return Blocks(min(max(rows, ROW_MULTIPLE), limits.rows), columns)


def weight_copies(head: Head) -> int:
    """Weight tiles in scratch: two on the way to the products' dtype, one float32 sum of a 16-bit gradient."""
    return 2 * (head.weight.dtype != head.operand) + (head.weight.dtype != head.accumulate)


def blocks_of(head: Head, workspace: int) -> Blocks:
    copies, limits = weight_copies(head), limits_of(head.weight.device)
    return choose_blocks(head.weight.shape[0], head.depth, workspace, head.accumulate.itemsize, copies, limits)


def scratch_bytes(head: Head, rows: int, workspace: int) -> int:
    """Bound on the scratch of a call with so many rows, forward and backward."""
    blocks = blocks_of(head, workspace)
    tall = min(blocks.rows, round_up(rows, ROW_MULTIPLE))
    numbers = tall * 3 * (blocks.columns + head.depth) + weight_copies(head) * blocks.columns * head.depth
    return numbers * head.accumulate.itemsize


@contextlib.contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Float32 products in float32 (no TF32, no bfloat16) and no autocast inside the op, whatever is set outside."""
    with _FLOAT32_PRODUCTS, torch.autocast(device.type, enabled=False):
        yield


@contextlib.contextmanager
def _float32_products() -> Iterator[None]:
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by backend, which the older interface refuses to read
        with _float32_products_by_backend():
            yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def _float32_products_by_backend() -> Iterator[None]:
    backends: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


class _OnceInProcess:
    """A context that the first of several threads enters and the last one leaves: what it sets is the process's."""

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


_FLOAT32_PRODUCTS = _OnceInProcess(_float32_products)


def gather_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of `[..., H]` by flat position, without the flattened copy that a non-contiguous tensor would need."""
    if tensor.dim() == 2:
        return tensor.index_select(0, index)
    return tensor[torch.unravel_index(index, tensor.shape[:-1])]


def pad_rows(values: Tensor, rows: int, fill: float) -> Tensor:
    out = values.new_full((rows,), fill)
    out[: values.shape[0]] = values
    return out


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a @ b of a row block; a row's bits do not depend on how many there are."""
    if out.dtype == torch.float64:  # with several threads BLAS may split the sum of a product of few float64 rows
        for first in range(0, a.shape[0], ROW_MULTIPLE):
            rows = slice(first, first + ROW_MULTIPLE)
            torch.mm(a[rows], b, out=out[rows])
    elif a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class RowBlock(NamedTuple):
    """Some live rows, padded to a multiple of 16 with rows that give zeros."""

    positions: Tensor
    """int64, among the call's rows"""
    hidden: Tensor
    """[R, H], operands"""
    low_rank: Tensor
    """scaling * hidden @ a.T `[R, r]`, float32: too small a product to be worth rounding for; r = 0 without LoRA"""
    target: Tensor
    temperature: Tensor | float

    @property
    def padded(self) -> int:
        return self.hidden.shape[0]


class Rows(NamedTuple):
    """Some rows of a call, and what comes with them."""

    hidden: Tensor
    """[..., H], of all rows of the call; so are `target` and a temperature for each"""
    target: Tensor
    temperature: Tensor | float
    positions: Tensor
    """int64 [n], among the call's rows"""

    def block(self, head: Head, first: int, last: int) -> RowBlock:
        """Those from `first` to before `last`."""
        index, temperature = self.positions[first:last], self.temperature
        rows = round_up(index.shape[0], ROW_MULTIPLE)
        block = torch.zeros(rows, self.hidden.shape[-1], dtype=head.operand, device=self.hidden.device)
        block[: index.shape[0]] = head.operands(gather_rows(self.hidden, index))
        rank = head.lora.a.shape[0] if head.lora else 0
        low_rank = torch.empty(rows, rank, dtype=head.accumulate, device=self.hidden.device)
        if head.lora:
            product(block.to(head.accumulate), head.lora.a.to(head.accumulate).T, low_rank)
            low_rank.mul_(head.lora.scaling)
        if isinstance(temperature, Tensor):
            temperature = pad_rows(temperature.reshape(-1)[index].to(head.accumulate), rows, 1.0)
        return RowBlock(index, block, low_rank, pad_rows(self.target.reshape(-1)[index], rows, -1), temperature)


class Ranges(NamedTuple):
    """The row blocks and vocabulary tiles of a call."""

    rows: list[tuple[int, int]]
    columns: list[tuple[int, int]]

    @classmethod
    def of(cls, head: Head, workspace: int, rows: int) -> "Ranges":
        blocks = blocks_of(head, workspace)
        return cls(blocks.rows_of(rows), blocks.columns_of(head.weight.shape[0]))

    @property
    def tallest(self) -> int:
        return max((round_up(stop - start, ROW_MULTIPLE) for start, stop in self.rows), default=0)

    @property
    def widest(self) -> int:
        return max(round_up(stop - start, ROW_MULTIPLE) for start, stop in self.columns)
