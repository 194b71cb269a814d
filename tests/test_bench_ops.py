"""The benchmark suite of the ops runs: every op, ours and the reference, at its tiny size and untimed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "bench" / "ops.py"


@pytest.mark.skipif(not SUITE.exists(), reason="the sources are not here: a wheel is tested")
def test_every_op_runs_in_the_suite():
    pytest.importorskip("pytest_benchmark")
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(SUITE),
        "-q",
        "-k",
        "tiny",
        "--benchmark-disable",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
