"""Triton's interpreter, for tests and rehearsals without a GPU: the product of two tiles by torch."""

from typing import Any

import torch


def use_torch_products() -> None:
    """Lets the interpreter multiply by torch: as on a GPU, a row has the same bits wherever it stands in a tile.

    NumPy's product, by OpenBLAS, depends on the row's place where the processor has no AVX-512. Does nothing without
    Triton. For float16 and float32; the interpreter keeps bfloat16 as integers, whose products are wrong either way.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return

    def create_dot(_: object, a: Any, b: Any, d: Any, *precision: object) -> Any:
        left, right = (torch.tensor(tile.data.astype(d.data.dtype)) for tile in (a, b))
        return interpreter.TensorHandle(torch.matmul(left, right).numpy() + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
