"""The recipe `quickstart` as a newcomer runs it: seconds of the whole command, and how the success rate rises.

One run (n = 1). On the first run on a machine the time includes converting the packaged weights. `curve.py` draws the
README's picture from the newest row.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from machine import row_origin
from rows import keep, timing

Records = list[dict[str, Any]]

COMMAND = "amir train quickstart"
LAST_STEPS = 3
"""Sampled success is that of the first step, and the mean of this many last ones."""


def main() -> int:
    """Runs the recipe in a temporary folder, keeps and prints its row; returns the command's exit code if it failed."""
    origin = row_origin()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "quickstart"
        began = time.perf_counter()
        command = [sys.executable, "-m", "amir", "train", "quickstart", "--set", f"output_dir={run}"]
        code = subprocess.run(command, check=False).returncode
        seconds = time.perf_counter() - began
        if code:
            return code
        row = row_of(run, seconds)
    print(json.dumps(row, indent=2))
    print(f"kept in {keep(row | origin)}")
    return 0


def row_of(run: Path, seconds: float) -> dict[str, Any]:
    """The row of a finished run, without machine, versions and date."""
    metrics, evaluations = read(run / "metrics.jsonl"), read(run / "evaluations.jsonl")
    return {
        "bench": "quickstart",
        "contender": COMMAND,
        "workload": {"recipe": "quickstart", "task": "one-digit sums", "steps": len(metrics)},
        "case": case(metrics, evaluations),
        "seconds": timing([seconds]),
        "peak_memory_mb": round(metrics[-1]["peak_memory_mb"], 1),
        "ratio_to": None,
        "ratio": None,
        "observed": observed(metrics, evaluations),
        "curve": curve(metrics, evaluations),
    }


def read(path: Path) -> Records:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def observed(metrics: Records, evaluations: Records) -> dict[str, Any]:
    """Success at the start and at the end: of the sampled completions, and of the held-out sums."""
    last = mean(row["success"] for row in metrics[-LAST_STEPS:])
    return {
        "sampled_success": [round(metrics[0]["success"], 2), round(last, 2)],
        "held_out_success": [round(evaluations[0]["success"], 2), round(evaluations[-1]["success"], 2)],
        "held_out_samples": evaluations[-1]["samples"],
    }


def curve(metrics: Records, evaluations: Records) -> dict[str, list[float]]:
    """Success by step: of the step's own samples, and of the held-out sums where they were evaluated."""
    return {
        "step": [row["step"] for row in metrics],
        "success": [round(row["success"], 4) for row in metrics],
        "held_out_step": [row["step"] for row in evaluations],
        "held_out": [round(row["success"], 4) for row in evaluations],
    }


def case(metrics: Records, evaluations: Records) -> str:
    """The result in words."""
    success = observed(metrics, evaluations)
    sampled, held_out = ("{:.2f} to {:.2f}".format(*success[name]) for name in ("sampled_success", "held_out_success"))
    return (
        f"one-digit sums, {len(metrics)} steps: sampled success {sampled}, held-out {held_out} "
        f"({success['held_out_samples']} samples)"
    )


if __name__ == "__main__":
    sys.exit(main())
