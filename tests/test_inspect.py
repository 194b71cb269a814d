"""What the compiler makes of the kernels, read from the machine code; no GPU is needed."""

import json
import os
import subprocess
import sys

import pytest

from amir_kernels.inspect.gpus import amd_occupancy

triton = pytest.importorskip("triton")

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx942", "gfx1100")
KEPT = ["plain, kept logits", "all options, kept logits"]
PLAN = [
    *((arch, "bf16", ["stats_kernel", "dlogits_kernel"], ["plain", "all options"]) for arch in NVIDIA),
    *((arch, "bf16", ["stats_kernel"], KEPT) for arch in NVIDIA),
    *((arch, "bf16", ["kept_dlogits_kernel"], None) for arch in NVIDIA),
    *((arch, "fp32", ["stats_kernel"], KEPT) for arch in ("sm_80", "sm_90")),
    ("gfx942", "bf16", ["stats_kernel"], KEPT),
    ("sm_90", "bf16", ["stats_kernel", "dlogits_kernel"], ["plain, transposed head", "all options, transposed head"]),
    ("sm_100", "bf16", ["stats_kernel"], ["plain, transposed head", "all options, transposed head"]),
    *((arch, "fp32", ["stats_kernel"], ["plain", "all options"]) for arch in NVIDIA),
    *((arch, "bf16", ["merge_kernel", "_group", "_pass_at_k", "_pair"], None) for arch in (*NVIDIA, *AMD)),
    ("gfx942", "bf16", ["stats_kernel", "dlogits_kernel"], ["plain", "all options"]),
    ("gfx1100", "bf16", ["stats_kernel", "dlogits_kernel"], ["plain", "all options"]),
    ("sm_90", "fp16", ["stats_kernel", "dlogits_kernel"], ["plain", "all options"]),
    ("sm_90", "fp16", ["stats_kernel"], KEPT),
    ("sm_90", "fp16", ["stats_kernel", "dlogits_kernel"], ["plain, transposed head", "all options, transposed head"]),
    *((arch, "fp16", ["stats_kernel"], ["plain", "all options"]) for arch in ("sm_80", "sm_100", "sm_120")),
    *((arch, "fp16", ["stats_kernel"], KEPT[1:]) for arch in ("sm_80", "sm_100", "sm_120")),
    *((arch, "fp16", ["stats_kernel"], ["plain", "all options"]) for arch in AMD),
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
    assert {row["arch"] for row in rows} >= {*NVIDIA, *AMD}
    kernels = {"stats_kernel", "dlogits_kernel", "merge_kernel", "_group_advantage_kernel", "_pass_at_k_kernel"}
    kernels |= {"kept_dlogits_kernel"}
    assert {row["kernel"] for row in rows} == kernels | {"_pair_cap_kernel", "_pair_row_sums_kernel"}


def test_members_of_a_family_compile_as_its_rows_promise():
    """Architectures that the table does not have; the forward, plain and with every option."""
    members = ("sm_103", "sm_121", "gfx950", "gfx1201")
    plan = [(arch, "bf16", ["stats_kernel"], ["plain", "all options"]) for arch in members]
    done = compiled(["-c", SCRIPT], input=json.dumps(plan))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 2 * len(members)
    for row in rows:
        assert row["spill_bytes"] == 0, row
        assert row["loop_products"] > 0, row
        assert row["matrix_instructions"] > 0, row
        assert row["programs_per_multiprocessor"] >= 1, row


SPILLS_BEFORE_3_7 = {("sm_120", "stats_kernel", "all options, kept logits"): 80}
"""Bytes that ptxas 12.9, which comes with Triton 3.6, spills and 13.1 does not."""


def test_registers_are_within_those_of_a_thread(rows):
    for row in rows:
        assert 0 < row["registers"] <= (255 if row["arch"] in NVIDIA else 512), row


def test_nothing_spills_and_everything_fits(rows):
    older = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    for row in rows:
        allowed = SPILLS_BEFORE_3_7.get((row["arch"], row["kernel"], row["form"]), 0) if older else 0
        assert row["spill_bytes"] <= allowed, row
        assert row["programs_per_multiprocessor"] >= row.get("programs_launched", 1), row


def test_sixteen_bit_products_use_matrix_instructions(rows):
    for row in rows:
        if row["dtype"] != "fp32" and "tile" in row:
            assert row["loop_products"] > 0, row
            assert row["matrix_instructions"] > 0, row
            assert row["arch"] not in NVIDIA or (row["wgmma"] > 0) == (row["arch"] == "sm_90"), row


def test_float16_is_compiled_as_float16(rows):
    """Instructions up to sm_90, and those of sm_120, name bfloat16; those of sm_100 take the dtype from a register."""
    seen = set()
    for row in rows:
        if row["arch"] in NVIDIA and row["arch"] != "sm_100" and "tile" in row:
            assert row["bf16"] == (row["matrix_instructions"] if row["dtype"] == "bf16" else 0), row
            seen.add((row["arch"], row["dtype"]))
    assert {("sm_80", "fp16"), ("sm_90", "fp16"), ("sm_120", "fp16"), ("sm_90", "bf16")} <= seen


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


HAND = [
    # 184 registers a wave: 2 waves of 512, one program of 8 waves on 4 SIMDs
    ("gfx942", 180, 8, 34_816, 1, 2),
    # 96: 5 waves, two programs by registers and by shared memory
    ("gfx942", 92, 8, 32_768, 2, 4),
    ("gfx942", 64, 4, 0, 8, 8),
    ("gfx942", 65, 4, 0, 7, 7),
    # 264, accumulation registers included: one wave of a SIMD, four of the eight
    ("gfx942", 257, 8, 0, 0, 0),
    # 10,240 bytes of 65,536
    ("gfx942", 20, 4, 10_000, 6, 6),
    # 16 barriers
    ("gfx942", 20, 1, 0, 16, 4),
    ("gfx942", 20, 4, 65_537, 0, 0),
    # 192: 8 waves of 1,536, four programs on the 4 SIMDs of two compute units
    ("gfx1100", 190, 8, 20_480, 4, 8),
    # 216: 7 waves, three programs and a half
    ("gfx1100", 195, 8, 20_480, 3, 6),
    ("gfx1100", 96, 4, 0, 16, 16),
    ("gfx1100", 97, 4, 0, 12, 12),
    # 32,768 bytes of 131,072; one program has no more than 65,536
    ("gfx1100", 96, 4, 32_768, 4, 4),
    ("gfx1100", 96, 4, 65_537, 0, 0),
]


@pytest.mark.parametrize(("architecture", "registers", "warps", "shared", "programs", "waves"), HAND)
def test_programs_and_waves_of_amd_by_hand(architecture, registers, warps, shared, programs, waves):
    found = amd_occupancy(architecture, registers, warps, shared)
    assert found == {"programs_per_multiprocessor": programs, "waves_per_simd": waves}


def test_waves_by_registers_are_the_compilers_own(rows):
    seen = [row for row in rows if row["arch"] in AMD]
    assert {row["arch"] for row in seen} == set(AMD)
    for row in seen:
        alone = amd_occupancy(row["arch"], row["registers"], 4, 0)["waves_per_simd"]
        assert alone == row["waves_per_simd_by_registers"] >= row["waves_per_simd"] > 0, row
        assert row["accumulation_registers"] <= row["registers"], row


def test_command_prints_one_kernel_and_names_the_prediction():
    done = compiled(["-m", "amir_kernels.inspect", "--arch", "sm_90", "--only", "merge_kernel"])
    assert done.returncode == 0, done.stderr
    assert "merge_kernel" in done.stdout
    assert "predicted" in done.stdout


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--hidden", "-3"], "must be a whole number of at least 1, got '-3'"),
        (["--vocabulary", "0"], "must be a whole number of at least 1, got '0'"),
        (["--only", "stat_kernel"], "no kernel's name starts with stat_kernel; leave it out"),
    ],
)
def test_what_is_not_there_is_no_success(option, message):
    done = compiled(["-m", "amir_kernels.inspect", *option])
    assert done.returncode == 2
    assert f"argument {option[0]}: " in done.stderr
    assert message in done.stderr


@pytest.mark.parametrize("architecture", ["sm_87", "gfx90a", "sm90"])
def test_an_architecture_without_a_card_is_refused_by_name(architecture):
    from amir_kernels.inspect.launches import DTYPES, head_launches

    with pytest.raises(ValueError, match=rf"^architecture must be of the family of one of .*'{architecture}'$"):
        list(head_launches(architecture, DTYPES["bf16"], 512, 2000))


def test_interpreted_kernels_cannot_be_inspected():
    command = [sys.executable, "-m", "amir_kernels.inspect"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "TRITON_INTERPRET=1 is set" in done.stderr
    assert "unset it" in done.stderr
