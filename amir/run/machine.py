"""Where a run takes place: its versions, its machine, and the commit of this package."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("amir-grpo", "torch", "triton", "transformers", "peft", "tokenizers", "bitsandbytes", "liger-kernel")
"""Those that the result of a run may depend on."""
PACKAGE_FOLDER = Path(__file__).parents[1]


def process_description(ranks: int, finished_steps: int) -> dict[str, Any]:
    """What run.json says of the process that starts or resumes a run after `finished_steps`."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "after_step": finished_steps,
        "command": shlex.join(sys.orig_argv),
        "working_directory": str(Path.cwd()),
        "ranks": ranks,
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Python's version and those of the packages that are installed."""
    numbers = {"python": platform.python_version()}
    for package in packages:
        try:
            numbers[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        numbers["cuda"] = torch.version.cuda
    return numbers


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, threads and memory; with GPUs their number, and the first one's facts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts: dict[str, Any] = {
        "cpu": _processor(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpus"] = torch.cuda.device_count()
        facts["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        facts |= _gpu_power_and_driver()
    return facts


def commit() -> str | None:
    """The commit of this package: of the checkout it runs from (`-dirty` with changes), or of its installation.

    None if the installation has no commit, because the package came as a wheel.
    """
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return _git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return _installed_commit()


def _installed_commit() -> str | None:
    try:
        origin = importlib.metadata.distribution("amir-grpo").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    return json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(PACKAGE_FOLDER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu_power_and_driver() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=power.limit,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    fields = [field.strip() for field in answer.partition("\n")[0].split(",")]
    return dict(zip(("gpu_power_limit", "driver"), fields, strict=True)) if len(fields) == 2 else {}
