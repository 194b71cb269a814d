"""What the compiler makes of the kernels, read from the machine code; no GPU is needed."""

import json
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
KEPT = ["plain, kept logits", "all options, kept logits"]
PLAN = [
    *((arch, "bf16", ["stats_kernel", "dlogits_kernel"], ["plain", "all options"]) for arch in NVIDIA),
    *((arch, "bf16", ["stats_kernel"], KEPT) for arch in NVIDIA),
    *((arch, "bf16", ["kept_dlogits_kernel"], None) for arch in NVIDIA),
    ("sm_90", "fp32", ["stats_kernel"], KEPT),
    ("gfx942", "bf16", ["stats_kernel"], KEPT),
    ("sm_90", "bf16", ["stats_kernel", "dlogits_kernel"], ["plain, transposed head", "all options, transposed head"]),
    ("sm_100", "bf16", ["stats_kernel"], ["plain, transposed head", "all options, transposed head"]),
    *((arch, "fp32", ["stats_kernel"], ["plain", "all options"]) for arch in ("sm_80", "sm_90", "sm_100")),
    *((arch, "bf16", ["merge_kernel", "_group", "_pass_at_k", "_pair"], None) for arch in ("sm_90", "sm_120")),
    ("gfx942", "bf16", ["stats_kernel", "dlogits_kernel"], ["plain", "all options"]),
    ("gfx1100", "bf16", ["stats_kernel", "dlogits_kernel"], ["all options"]),
]
"""Every row of the table plain and with every option, where it is used: (architecture, dtype, kernels, forms)."""
SCRIPT = """
import json, sys
from amir_kernels.inspect import inspect_kernels
plans = json.load(sys.stdin)
print(json.dumps([row for plan in plans for row in inspect_kernels(*plan[:2], 2048, 151936, *plan[2:])]))
"""


def compiled(command: list[str], **options) -> subprocess.CompletedProcess:
    """In a process where the kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, **options
    )


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    done = compiled(["-c", SCRIPT], input=json.dumps(PLAN))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_was_compiled(rows):
    assert {row["arch"] for row in rows} >= {*NVIDIA, "gfx942", "gfx1100"}
    kernels = {"stats_kernel", "dlogits_kernel", "merge_kernel", "_group_advantage_kernel", "_pass_at_k_kernel"}
    kernels |= {"kept_dlogits_kernel"}
    assert {row["kernel"] for row in rows} == kernels | {"_pair_cap_kernel", "_pair_row_sums_kernel"}


SPILLS_BEFORE_3_7 = {("sm_120", "stats_kernel", "all options, kept logits"): 80}
"""Bytes that ptxas 12.9, which comes with Triton 3.6, spills and 13.1 does not."""


def test_nothing_spills_and_everything_fits(rows):
    older = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    for row in rows:
        allowed = SPILLS_BEFORE_3_7.get((row["arch"], row["kernel"], row["form"]), 0) if older else 0
        assert row["spill_bytes"] <= allowed, row
        if row["arch"] in NVIDIA:
            assert row["programs_per_multiprocessor"] >= row.get("programs_launched", 1), row


def test_sixteen_bit_products_use_matrix_instructions(rows):
    for row in rows:
        if row["dtype"] == "bf16" and "tile" in row:
            assert row["loop_products"] > 0, row
            assert row["matrix_instructions"] > 0, row
            assert row["arch"] not in NVIDIA or (row["wgmma"] > 0) == (row["arch"] == "sm_90"), row


def test_copies_run_ahead_of_the_products(rows):
    """At least two stages have room in shared memory, and the main loop issues asynchronous copies."""
    for row in rows:
        if row["arch"] in NVIDIA and "tile" in row:
            assert row["stages_in_shared"] >= 2, row
            assert row["loop_copies"] > 0, row
            assert row["async_copies"] > row["loop_copies"], row  # those before the loop
            assert (row["tensor_copies"] > 0) == (row["operands"] == "descriptors"), row


def test_float32_products_are_not_tf32(rows):
    for row in rows:
        if row["dtype"] == "fp32":
            assert row["tf32"] == 0, row
            assert row["matrix_instructions"] == 0, row


def test_bytes_and_flops_are_counted_and_the_prediction_is_the_larger(rows):
    for row in rows:
        assert row["bytes_moved"] > 0, row
        assert row["predicted"], row
        if row["kernel"] == "stats_kernel":
            assert row["flops"] == 2 * 8192 * 2048 * 151_936
    (h200,) = {
        row["predicted"]["H200"]["compute_ms"]
        for row in rows
        if row["arch"] == "sm_90" and row["kernel"] == "stats_kernel" and row["dtype"] == "bf16"
    }
    assert h200 == pytest.approx(2 * 8192 * 2048 * 151_936 / 989e12 * 1e3, rel=1e-3)


def test_command_prints_one_kernel_and_names_the_prediction():
    done = compiled(["-m", "amir_kernels.inspect", "--arch", "sm_90", "--only", "merge_kernel"])
    assert done.returncode == 0, done.stderr
    assert "merge_kernel" in done.stdout
    assert "predicted" in done.stdout


def test_interpreted_kernels_cannot_be_inspected():
    command = [sys.executable, "-m", "amir_kernels.inspect"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "unset it" in done.stderr
