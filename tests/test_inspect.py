"""What the compiler makes of the head's kernels, read from the machine code; no GPU is needed."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def inspected(*arguments: str) -> list[dict]:
    """Rows of the command, in a process where the kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "amir_kernels.inspect", "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_bfloat16_uses_matrix_instructions_and_spills_nothing(arch):
    """Plain and with every option; copies run ahead of the products."""
    rows = inspected("--arch", arch, "--dtype", "bf16", "--hidden", "2048")
    assert {row["form"] for row in rows} == {"plain", "all options"}
    for row in rows:
        assert row["spill_bytes"] == 0, row
        assert row["matrix_instructions"] > 0, row
        assert row["async_copies"] > 0, row
        assert row["stages"] >= 2, row
        assert (row["wgmma"] > 0) == (arch == "sm_90"), row


def test_float32_products_are_not_tf32():
    for row in inspected("--arch", "sm_90", "--dtype", "fp32", "--hidden", "576"):
        assert row["tf32"] == 0, row
        assert row["matrix_instructions"] == 0, row
        assert row["spill_bytes"] == 0, row


def test_interpreted_kernels_cannot_be_inspected():
    command = [sys.executable, "-m", "amir_kernels.inspect"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "unset it" in done.stderr
