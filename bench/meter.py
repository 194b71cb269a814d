"""Measures seconds and peak memory of a piece of work: of the process on a CPU, of the allocator on a GPU."""

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(work: Callable[[], Any], device: torch.device) -> tuple[float, float | None, Any]:
    """Seconds, the peak's growth in MB (None where it cannot be read: a CPU outside Linux), and what `work` returned.

    The process's resident memory is read on a CPU, since compiled code allocates beside torch's dispatcher. Freed
    memory is returned to the system first, so that its reuse is not missed.
    """
    if device.type == "cuda":
        return _measure_gpu(work)
    before = _resident_after_release()
    began = time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - began
    return elapsed, None if before is None else (_status("VmHWM") - before) / 1e6, result


def _measure_gpu(work: Callable[[], Any]) -> tuple[float, float, Any]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - began, (torch.cuda.max_memory_allocated() - before) / 1e6, result


def _resident_after_release() -> int | None:
    """Resident bytes, after setting the peak back to them; None if the system does not report them."""
    if not sys.platform.startswith("linux"):
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        _CLEAR.write_text("5")  # proc(5): sets the peak back to what is resident now
    except OSError:
        return None
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
