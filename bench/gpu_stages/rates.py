"""Times pieces of work, measures the card's own rates, and predicts from them what a kernel takes.

A prediction is the largest of three times: operations at the rate of a bare product of the same dtype, divided by the
share of the multiprocessors that whole waves of programs use, bytes at the rate of a copy, and where they are counted
the host's time for as many launches.
"""

import math
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .sizes import Sizes

WARM_UP = 2


class Rates(NamedTuple):
    """What the card reaches in this process."""

    products: float
    """operations a second of a square product in the timed dtype"""
    bandwidth: float
    """bytes a second of a copy, read and written"""
    multiprocessors: int
    launch_seconds: float
    """time of the host for one operation on a single element"""


def event_seconds(work: Callable[[], object], device: str, repeats: int, warm_up: int = WARM_UP) -> list[float]:
    """Seconds of each repetition, by CUDA events: without the host's time, as long as it keeps ahead."""
    for _ in range(warm_up):
        work()
    if device != "cuda":
        return [_host_seconds(work) for _ in range(repeats)]
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1000 for begin, end in marks]


def _host_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def launch_microseconds(work: Callable[[], object], device: str, launches: int) -> float:
    """Microseconds of the host for one call, which does not wait for the GPU."""
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = sorted(_host_seconds(work) for _ in range(launches))[launches // 2]
    if device == "cuda":
        torch.cuda.synchronize()
    return seconds * 1e6


@cache
def rates_of(sizes: Sizes) -> Rates:
    """A bare product and a copy, timed once in this process."""
    n = sizes.product
    left, right = (torch.randn(n, n, device=sizes.device).to(sizes.dtype) for _ in range(2))
    out = torch.empty_like(left)
    product = min(event_seconds(lambda: torch.mm(left, right, out=out), sizes.device, sizes.repeats))
    source = torch.zeros(sizes.copied_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    copy = min(event_seconds(lambda: target.copy_(source), sizes.device, sizes.repeats))
    processors = torch.cuda.get_device_properties(0).multi_processor_count if sizes.device == "cuda" else 1
    element = torch.zeros(1, device=sizes.device)
    launch = launch_microseconds(lambda: element.add_(1), sizes.device, sizes.launches) / 1e6
    return Rates(2 * n**3 / product, 2 * sizes.copied_bytes / copy, processors, launch)


class _OperationCounter(TorchDispatchMode):
    """Counts operations that compute: all but views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        return func(*args, **(kwargs or {}))


def count_launches(work: Callable[[], object]) -> int:
    """Operations of torch in one call, each taken for one launch; a custom op counts once."""
    with _OperationCounter() as counter:
        work()
    return counter.count


def predict(
    rates: Rates,
    *,
    flops: float = 0,
    moved: float = 0,
    programs: int | None = None,
    at_once: int = 1,
    launches: int | None = None,
) -> dict[str, float]:
    """The `expected` of a row. `moved` bytes; `programs` of a grid, `at_once` on a multiprocessor."""
    expected: dict[str, float] = {"flops": flops, "bytes": moved}
    used = 1.0
    if programs is not None:
        waves = programs / (rates.multiprocessors * at_once)
        expected["waves"] = waves
        used = waves / math.ceil(waves)
    times = [flops / rates.products / used, moved / rates.bandwidth]
    if launches is not None:
        expected["launches"] = launches
        times.append(launches * rates.launch_seconds)
    expected["seconds"] = max(times)
    return expected
