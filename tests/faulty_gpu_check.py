"""`gpu_check.py` with a fault in each stage, named by the variable FAULT: raise, hang, crash or wrong numbers."""

import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import gpu_check
from gpu_stages.stage import STAGES

HANG_SECONDS = 1


def fault(kind: str) -> Any:
    """A part's work that fails."""
    if kind == "hang":
        time.sleep(1000)
    if kind == "crash":
        os.abort()
    raise RuntimeError("an injected fault")
    yield


def break_first_part(module: Any, kind: str) -> None:
    """The first part of a stage fails."""
    honest = module.parts

    def parts(sizes: Any) -> list[Any]:
        first, *others = honest(sizes)
        limit = HANG_SECONDS if kind == "hang" else first.seconds
        return [replace(first, rows=lambda: fault(kind), seconds=limit), *others]

    module.parts = parts


def wrong(honest: Callable[..., Any], spoil: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """A function whose results are spoilt, each call's in its own way."""
    calls = itertools.count(1)
    return lambda *arguments, **options: spoil(honest(*arguments, **options), next(calls))


def break_numbers() -> None:
    """Every gradient of the head, the statistics of its kernel, and packed attention."""
    from amir.policy import packing
    from amir_kernels.linear_logprob import backward, op, triton_backend

    for module in (backward, op):
        module.row_coefficients = wrong(module.row_coefficients, lambda found, n: found._replace(a=found.a * (1 + n)))
    triton_backend.block_stats = wrong(
        triton_backend.block_stats, lambda found, n: found._replace(shift=found.shift + n)
    )
    packing.packed_attention = wrong(packing.packed_attention, lambda found, n: (found[0] * (1 + n), None))


if __name__ == "__main__":
    kind = os.environ["FAULT"]
    if "--inside" in sys.argv:
        stage = STAGES[sys.argv[sys.argv.index("--inside") + 1]]
        if kind == "wrong numbers":
            break_numbers()
        else:
            break_first_part(importlib.import_module(f"gpu_stages.{stage.module}"), kind)
    sys.exit(gpu_check.main())
