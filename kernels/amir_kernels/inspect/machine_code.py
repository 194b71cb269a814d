"""Facts about a compiled kernel from its machine code: registers, spills, matrix instructions, the main loop."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

MATRIX = r"\b(HGMMA|UTCHMMA|UTCMMA|HMMA|OMMA|v_mfma|v_wmma)"
FUSED = r"\b(FFMA2?|v_fma_f32|v_fmac_f32|v_pk_fma_f32|v_dual_fmac_f32)"
"""Instructions of float32 products."""
COPIES = r"\b(LDGSTS|UTMALDG|global_load|buffer_load)"
"""Copies from global to shared memory; on AMD to registers."""


class Instruction(NamedTuple):
    """A machine instruction and where it stands."""

    place: int
    text: str
    target: int | None
    """the place that it branches to"""


def _sass(text: str) -> list[Instruction]:
    out = []
    for place, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?;)", text):
        branch = re.search(r"BRA.*?0x([0-9a-f]+)", line)
        out.append(Instruction(int(place, 16), line, int(branch[1], 16) if branch else None))
    return out


def _gcn(text: str) -> list[Instruction]:
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in text.split(".section")[0].splitlines():
        label = re.match(r"(\.LBB\w+):", line)
        if label:
            labels[label[1]] = len(lines)
        elif re.match(r"\s+[a-z]\w+", line):
            lines.append(line.split(";")[0].strip())
    branches = [re.search(r"s_c?branch\w*\s+(\.LBB\w+)", line) for line in lines]
    return [
        Instruction(place, line, labels.get(branch[1]) if branch else None)
        for place, (line, branch) in enumerate(zip(lines, branches, strict=True))
    ]


def main_loop(code: list[Instruction], product: str) -> list[str]:
    """Instructions of one step along the depth: the smallest loop with products and copies, without its skipped part.

    The skipped part computes the statistics of a tile. A branch, the longest, jumps over it in all steps but the last.
    """
    bodies = []
    for branch in code:
        if branch.target is not None and branch.target < branch.place:
            body = [line for line in code if branch.target <= line.place <= branch.place]
            if all(any(re.search(pattern, line.text) for line in body) for pattern in (product, COPIES)):
                bodies.append(body)
    if not bodies:
        return []
    body = min(bodies, key=len)
    skips = [
        [line for line in body if branch.place < line.place < branch.target]
        for branch in body
        if branch.target is not None and branch.place < branch.target <= body[-1].place
    ]
    skipped = max(skips, key=len, default=[])
    rest = [line.text for line in body if line not in skipped]
    return rest if len(skipped) > len(body) // 4 and _count(product, rest) else [line.text for line in body]


def _count(pattern: str, lines: list[str]) -> int:
    return sum(bool(re.search(pattern, line)) for line in lines)


def _loop_facts(code: list[Instruction]) -> dict[str, Any]:
    product = MATRIX if _count(MATRIX, [line.text for line in code]) else FUSED
    loop = main_loop(code, product)
    products = _count(product, loop)
    return {
        "loop_instructions": len(loop),
        "loop_products": products,
        "loop_copies": _count(COPIES, loop),
        "loop_other_share": round(1 - products / len(loop), 3) if loop else None,
    }


def nvidia_facts(cubin: bytes) -> dict[str, Any]:
    """Counts from the SASS of a compiled kernel, by `cuobjdump`, which comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, text = (
            subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    code = _sass(text)
    lines = [line.text for line in code]
    registers, stack = (int(number) for number in re.findall(r"\b(?:REG|STACK):(\d+)", usage)[:2])
    # A spilled register is read back. On sm_120 Triton 3.6 stores a zero at each wait for a tensor copy, never read.
    spilled = max(stack, 4 * _count(r"\b(LDL|STL)\b", lines)) if _count(r"\bLDL\b", lines) else 0
    return {
        "registers": registers,
        "spill_bytes": spilled,
        "matrix_instructions": _count(MATRIX, lines),
        "wgmma": _count("HGMMA", lines),
        "tf32": _count("TF32", lines),
        "bf16": _count(MATRIX + r"\S*\bBF16", lines),
        "async_copies": _count(r"\b(LDGSTS|UTMALDG)", lines),
        "tensor_copies": _count(r"\bUTMALDG", lines),
    } | _loop_facts(code)


def amd_facts(text: str) -> dict[str, Any]:
    """Counts from the assembly of a compiled kernel.

    `registers` are all vector registers of a lane, those for accumulation (CDNA) included.
    """
    counts = {name: int(number) for name, number in re.findall(r"\.([av]gpr_count|vgpr_spill_count):\s+(\d+)", text)}
    code = _gcn(text)
    lines = [line.text for line in code]
    return {
        "registers": counts["vgpr_count"],
        "accumulation_registers": counts.get("agpr_count", 0),
        "spill_bytes": 4 * max(counts["vgpr_spill_count"], _count(r"\bscratch_(load|store)", lines)),
        "matrix_instructions": _count(MATRIX, lines),
        "waves_per_simd_by_registers": int(re.findall(r"; Occupancy: (\d+)", text)[0]),
    } | _loop_facts(code)
