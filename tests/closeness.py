"""The comparison of the tests: a kernel may err about as much as eager torch in its dtype, never by a fixed amount.

Errors are root mean squares against a float64 truth, row by row, and a row's target entry is judged apart from the
rest: one norm over a whole gradient lets the target's entry hide the 150,000 others, and an absolute tolerance above
the signal lets a zero gradient pass. `test_closeness.py` holds the wrong gradients that this must reject.
"""

import torch
from torch import Tensor

FACTORS = {torch.float64: 2.0, torch.float32: 2.0, torch.float16: 2.0, torch.bfloat16: 2.0}
"""How many times eager's own error a kernel may make, by the dtype of its result. The same everywhere."""


def _rms(values: Tensor) -> Tensor:
    return values.pow(2).mean(-1).sqrt()


def _parts(values: Tensor, truth: Tensor, target: Tensor | None) -> dict[str, Tensor]:
    """Rows of numbers to judge. With targets `[N]`: the rows without the targets' entries, and these apart.

    The latter are one number a row, on which eager can be right by luck: they form one row, each over its row's norm.
    """
    if target is None:
        return {"row": values}
    column = target.clamp(min=0)[:, None]
    norm = truth.norm(dim=-1, keepdim=True)
    norm = norm.clamp(min=norm[norm > 0].min()) if (norm > 0).any() else torch.ones_like(norm)
    return {"rest of row": values.scatter(1, column, 0.0), "target entries, row": (values.gather(1, column) / norm).T}


def assert_as_good_as(
    *,
    kernel: Tensor,
    eager: Tensor,
    truth: Tensor,
    target: Tensor | None = None,
    factor: float | None = None,
    name: str = "result",
) -> None:
    """Per row, rms(kernel - truth) <= factor * max(rms(eager - truth), eps * rms(truth)), with eps of kernel's dtype.

    `[..., K]` are rows of K numbers; a vector is one row. With `target` int64 `[N]` (negative: none) the rows are
    `[N, V]`, and the target entries are judged apart. `truth` is float64; `eager` is torch in the kernel's dtypes.
    """
    assert truth.dtype == torch.float64, f"{name}: the truth must be float64, got {truth.dtype}"
    assert kernel.shape == truth.shape == eager.shape, f"{name}: {kernel.shape}, {eager.shape}, {truth.shape}"
    assert kernel.isfinite().all(), f"{name}: {(~kernel.isfinite()).sum()} entries are not finite"
    factor = FACTORS[kernel.dtype] if factor is None else factor
    eps = torch.finfo(kernel.dtype).eps
    width = truth.shape[-1] if truth.dim() else 1
    flat = [values.detach().double().reshape(-1, width) for values in (kernel, eager, truth)]
    parts = [_parts(values, flat[2], target) for values in flat]
    for part in parts[0]:
        ours, theirs, exact = (values[part] for values in parts)
        error = _rms(ours - exact)
        allowed = factor * torch.maximum(_rms(theirs - exact), eps * _rms(exact))
        worse = error > allowed
        if worse.any():
            row = int((error - allowed).argmax())
            raise AssertionError(
                f"{name}: {int(worse.sum())} of {len(error)}; {part} {row} has error {error[row]:.3g}, "
                f"allowed {allowed[row]:.3g} (eager {_rms(theirs - exact)[row]:.3g}, value {_rms(exact)[row]:.3g})"
            )
