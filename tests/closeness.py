"""The comparison of the tests: a kernel may err about as much as eager torch in its dtype, never by a fixed amount.

Errors are root mean squares against a float64 truth, row by row, and a row's target entry is judged apart from the
rest: one norm over a whole gradient lets the target's entry hide the 150,000 others, and an absolute tolerance above
the signal lets a zero gradient pass. `test_closeness.py` holds the wrong gradients that this must reject.
"""

import torch
from torch import Tensor

FACTORS = {torch.float64: 2.0, torch.float32: 2.0, torch.float16: 2.0, torch.bfloat16: 2.0}
"""How many times eager's own error a kernel may make, by the dtype of its result. The same everywhere."""
FEW = 16
"""Entries of equal size below which a row's error says little of the next row's."""


def _rms(values: Tensor) -> Tensor:
    return values.pow(2).mean(-1).sqrt()


def over_norm(values: Tensor, truth: Tensor) -> Tensor:
    """Each row over the norm of its truth."""
    norm = truth.norm(dim=-1, keepdim=True)
    return values / (norm.clamp(min=norm[norm > 0].min()) if (norm > 0).any() else torch.ones_like(norm))


def _parts(values: Tensor, truth: Tensor, target: Tensor | None) -> dict[str, Tensor]:
    """Rows of numbers to judge. With targets `[N]`: the rows without the targets' entries, and these apart.

    On one number, or a few, eager can be right by luck. So the targets' entries form one row, each over its row's norm;
    and so do rows whose squares a few entries hold: sum(x^2)^2 / sum(x^4), the count of equal ones, below `FEW`.
    """
    if target is None:
        return {"row": values}
    column = target.clamp(min=0)[:, None]
    own = over_norm(values.gather(1, column), truth).T
    rest, exact = values.scatter(1, column, 0.0), truth.scatter(1, column, 0.0)
    squares = (exact / exact.abs().amax(1, keepdim=True).clamp(min=1e-300)) ** 2
    few = squares.sum(1) ** 2 < FEW * squares.square().sum(1)
    peaked = over_norm(rest[few], exact[few]).reshape(1, -1)
    return {"rest of row": rest[~few], "rest of peaked rows,": peaked, "target entries, row": own}


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
    factor = FACTORS[kernel.dtype] if factor is None else factor
    for part, (error, theirs, size) in _errors(kernel, eager, truth, target, name).items():
        allowed = factor * torch.maximum(theirs, torch.finfo(kernel.dtype).eps * size)
        worse = error > allowed
        if worse.any():
            row = int((error - allowed).argmax())
            raise AssertionError(
                f"{name}: {int(worse.sum())} of {len(error)}; {part} {row} has error {error[row]:.3g}, "
                f"allowed {allowed[row]:.3g} (eager {theirs[row]:.3g}, value {size[row]:.3g})"
            )


def worst_ratios(
    *,
    kernel: Tensor,
    eager: Tensor,
    truth: Tensor,
    target: Tensor | None = None,
    eps: float | None = None,
    name: str = "result",
) -> dict[str, float]:
    """For each part the largest ratio of an error to what `assert_as_good_as` allows at a factor of 1.

    `eps`: of the dtype that the kernel's results had, if they were converted.
    """
    found = {}
    for part, (error, theirs, size) in _errors(kernel, eager, truth, target, name).items():
        allowed = torch.maximum(theirs, (torch.finfo(kernel.dtype).eps if eps is None else eps) * size)
        found[part] = float(torch.where(error == 0, 0.0, error / allowed).max())
    return found


def _errors(
    kernel: Tensor, eager: Tensor, truth: Tensor, target: Tensor | None, name: str
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """For each part that has rows: the rms of the kernel's error, of eager's, and of the truth, row by row."""
    assert truth.dtype == torch.float64, f"{name}: the truth must be float64, got {truth.dtype}"
    assert kernel.shape == truth.shape == eager.shape, f"{name}: {kernel.shape}, {eager.shape}, {truth.shape}"
    assert kernel.isfinite().all(), f"{name}: {(~kernel.isfinite()).sum()} entries are not finite"
    width = truth.shape[-1] if truth.dim() else 1
    flat = [values.detach().double().reshape(-1, width) for values in (kernel, eager, truth)]
    ours, theirs, exact = (_parts(values, flat[2], target) for values in flat)
    return {
        part: (_rms(ours[part] - exact[part]), _rms(theirs[part] - exact[part]), _rms(exact[part]))
        for part in ours
        if ours[part].numel()
    }
