"""Where a row was measured: machine, versions, commit, date and command."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "liger-kernel")


def birth_certificate() -> dict[str, Any]:
    """The fields `machine`, `versions`, `commit`, `date` and `command` of a row (bench/README.md)."""
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join(["python", *sys.argv]),
    }


def machine() -> dict[str, Any]:
    """Processor, cores used and memory; with a GPU also its name, memory and power limit."""
    facts: dict[str, Any] = {
        "cpu": _processor(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        facts |= _gpu_power_and_driver()
    return facts


def versions() -> dict[str, str]:
    """Python's version and those of the packages a result may depend on, where installed."""
    numbers = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        numbers["cuda"] = torch.version.cuda
    return numbers


def commit() -> str:
    """The checked-out commit, with `-dirty` where tracked files outside bench/results differ from it."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not a git checkout"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    kib = int(info.read_text().split("MemTotal:")[1].split()[0])
    return round(kib / 2**20, 1)


def _gpu_power_and_driver() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=power.limit,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return {}
    power, driver = (part.strip() for part in answer.split(","))
    return {"gpu_power_limit": power, "driver": driver}
