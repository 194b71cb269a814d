"""Compares results with a float64 truth by the rule of the tests: the error over that of eager torch, row by row."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .stage import Ratio, Row, make_row

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from closeness import FACTORS, over_norm, worst_ratios

Results = dict[str, Tensor]

COLUMN_GRADIENTS = ("gradient of weight", "gradient of bias", "gradient of lora_b")


def judge(
    contender: str, case: str, kernel: Results, eager: Results, truth: Results, target: Tensor | None
) -> Iterator[Row]:
    """A row for each result: its error over eager's, bounded by the factor of the tests for its dtype.

    The rows of a matrix count alike, each over its norm, and all together: a row depends on the few tokens that are
    likely there, and what few numbers hold, eager can have right by luck. The rows of a gradient `[V, ...]` at targets
    are judged separately from the others.
    """
    for name, exact in truth.items():
        for part, rows in parts_of(name, exact, target):
            ratio = error_ratio(kernel[name][rows], eager[name][rows], exact[rows].double())
            dtype = kernel[name].dtype
            workload = {"check": case, "result": f"{name}{part}", "dtype": str(dtype).removeprefix("torch.")}
            within = Ratio("eager's error", ratio, FACTORS[dtype])
            yield make_row(contender, f"{case}: {name}{part}", workload, ratio=within)


def error_ratio(kernel: Tensor, eager: Tensor, truth: Tensor) -> float:
    """The kernel's error over what eager torch may err; infinite where a number is missing."""
    if not bool(kernel.isfinite().all()):
        return math.inf
    values = [value.double() for value in (kernel, eager, truth)]
    if truth.dim() == 2:
        values = [over_norm(value, truth).flatten() for value in values]
    eps = torch.finfo(kernel.dtype).eps
    return max(worst_ratios(kernel=values[0], eager=values[1], truth=values[2], eps=eps).values(), default=0.0)


def parts_of(name: str, value: Tensor, target: Tensor | None) -> list[tuple[str, Tensor | slice]]:
    """The rows of a result that are judged together."""
    if target is None or name not in COLUMN_GRADIENTS:
        return [("", slice(None))]
    at_target = torch.zeros(len(value), dtype=torch.bool, device=value.device)
    at_target[target[target >= 0]] = True
    return [(", at targets", at_target), (", elsewhere", ~at_target)]


def relative_difference(measured: Tensor, expected: Tensor) -> float:
    """|| measured - expected || / || expected ||; infinite where a number is missing."""
    if not bool(measured.isfinite().all()):
        return float("inf")
    norm = expected.double().norm()
    return float((measured.double() - expected.double()).norm() / norm.clamp(min=1e-300))


def compare(contender: str, case: str, measured: Tensor, expected: Tensor, *, to: str, at_most: float) -> Row:
    """A row with the relative difference in norm, and its bound."""
    ratio = Ratio(to, relative_difference(measured, expected), at_most)
    return make_row(contender, case, {"check": case}, ratio=ratio)


def same_bits(contender: str, case: str, measured: Tensor, expected: Tensor) -> Row:
    """A row with the number of entries whose bits differ."""
    count = float((measured != expected).sum())
    return make_row(contender, case, {"check": case}, ratio=Ratio("entries with other bits", count, 0))
