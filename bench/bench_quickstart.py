"""The recipe `quickstart` as a stranger runs it: seconds of the whole command, and what the model learnt.

One run (n = 1). On the first run on a machine the time includes converting the packaged weights.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from machine import birth_certificate
from rows import keep, timing

LAST_STEPS = 3
"""Sampled success is that of the first step, and the mean of this many last ones."""


def main() -> int:
    """Runs the recipe in a temporary folder, keeps and prints its row; the command's exit code where it failed."""
    certificate = birth_certificate()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "quickstart"
        began = time.perf_counter()
        command = [sys.executable, "-m", "amir", "train", "quickstart", "--set", f"output_dir={run}"]
        code = subprocess.run(command, check=False).returncode
        seconds = time.perf_counter() - began
        if code:
            return code
        row = {
            "bench": "quickstart",
            "contender": "amir train quickstart",
            "case": case(read(run / "metrics.jsonl"), read(run / "evaluations.jsonl")),
            "seconds": timing([seconds]),
            "peak_memory_mb": round(read(run / "metrics.jsonl")[-1]["peak_memory_mb"], 1),
            "ratio_to": None,
            "ratio": None,
        }
    print(json.dumps(row, indent=2))
    print(f"kept in {keep(row | certificate)}")
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def case(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    """What happened to success, in words."""
    sampled = f"{metrics[0]['success']:.2f} to {mean(row['success'] for row in metrics[-LAST_STEPS:]):.2f}"
    before, after = evaluations[0], evaluations[-1]
    held_out = f"{before['success']:.2f} to {after['success']:.2f} ({after['samples']} samples)"
    return f"one-digit sums, {len(metrics)} steps: sampled success {sampled}, held-out {held_out}"


if __name__ == "__main__":
    sys.exit(main())
