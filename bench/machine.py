"""Where a row was measured: machine, versions, commit, date and command."""

import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from amir.run.machine import machine, versions

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "liger-kernel")


def row_origin() -> dict[str, Any]:
    """The fields `machine`, `versions`, `commit`, `date` and `command` of a row (bench/README.md)."""
    return {
        "machine": machine(),
        "versions": versions(PACKAGES),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join(["python", *sys.argv]),
    }


def commit() -> str:
    """The checked-out commit, with `-dirty` where tracked files outside bench/results differ from it."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not a git checkout"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
