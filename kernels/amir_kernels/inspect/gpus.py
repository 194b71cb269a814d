"""Published numbers of GPUs: how many programs a multiprocessor runs at once, and the roofline of a kernel."""

from typing import NamedTuple

from ..linear_logprob.head import round_up
from ..linear_logprob.triton_tiles import family


class Card(NamedTuple):
    """The published numbers of a GPU."""

    architecture: str
    half: float
    """dense 16-bit TFLOP/s"""
    single: float
    """float32 TFLOP/s, without tensor cores"""
    bandwidth: float
    """TB/s"""
    cache_mb: int
    """L2"""


CARDS = {
    "A100": Card("sm_80", 312, 19.5, 2.0, 40),
    "RTX 3090": Card("sm_86", 71, 35.6, 0.94, 6),
    "RTX 4090": Card("sm_89", 165, 82.6, 1.0, 72),
    "H100": Card("sm_90", 989, 66.9, 3.35, 50),
    "H200": Card("sm_90", 989, 66.9, 4.8, 50),
    "B200": Card("sm_100", 2250, 75, 8.0, 126),
    "RTX 5090": Card("sm_120", 210, 105, 1.8, 96),
    "MI300X": Card("gfx942", 1307, 163, 5.3, 4),
    "RX 7900 XTX": Card("gfx1100", 123, 61, 0.96, 6),
}
SHARED_BYTES = {80: 167_936, 90: 233_472, 100: 233_472}
"""Shared memory of a multiprocessor by compute capability; 102,400 on the others."""
MAX_WARPS = {80: 64, 90: 64, 100: 64}
"""Warps of a multiprocessor by compute capability; 48 on the others."""


class AmdMultiprocessor(NamedTuple):
    """Resources of an AMD multiprocessor, from the ISA's manuals and LLVM's guide to the AMDGPU backend."""

    simds: int
    registers: int
    """vector registers of a SIMD, for each lane, those for accumulation included"""
    granule: int
    """a wave is given a multiple of this many registers"""
    waves: int
    """waves of a SIMD, at most"""
    shared: int
    """bytes of shared memory"""
    programs: int
    """programs at most, if a program has several waves: each needs a barrier"""


AMD: dict[str, AmdMultiprocessor] = {
    "gfx942": AmdMultiprocessor(simds=4, registers=512, granule=8, waves=8, shared=65_536, programs=16),
    # Waves of 32. A program's waves are distributed over the two compute units of a WGP, which counts as one here.
    "gfx1100": AmdMultiprocessor(simds=4, registers=1536, granule=24, waves=16, shared=131_072, programs=32),
}
AMD_SHARED_GRANULE, AMD_SHARED_LIMIT = 512, 65_536
"""Bytes of shared memory: a program is given a multiple of the first, and at most the second."""


def nvidia_occupancy(number: int, registers: int, warps: int, shared: int, tensor_columns: int) -> int:
    """Programs that a multiprocessor runs at once; 0 where the kernel cannot be launched."""
    number = int(family(f"sm_{number}")[3:])
    by_registers = 65_536 // (-(-max(registers, 1) // 8) * 8 * warps * 32)
    by_shared = SHARED_BYTES.get(number, 102_400) // (shared + 1024)
    by_tensor_memory = 512 // max(tensor_columns, 1)
    return min(by_registers, by_shared, by_tensor_memory, MAX_WARPS.get(number, 48) // warps)


def amd_occupancy(architecture: str, registers: int, warps: int, shared: int) -> dict[str, int]:
    """Programs of a multiprocessor and waves of a SIMD at once; 0 where the kernel cannot be launched."""
    amd = AMD[family(architecture)]
    waves = min(amd.waves, amd.registers // round_up(max(registers, 1), amd.granule))
    by_shared = amd.shared // round_up(max(shared, 1), AMD_SHARED_GRANULE) if shared <= AMD_SHARED_LIMIT else 0
    programs = min(waves * amd.simds // warps, by_shared, amd.programs)
    return {"programs_per_multiprocessor": programs, "waves_per_simd": programs * warps // amd.simds}


def roofline(architecture: str, single: bool, flops: int, moved_bytes: int) -> dict[str, dict[str, float]]:
    """Milliseconds by flops and by bytes on each card of an architecture; `single`: float32 without tensor cores."""
    predicted = {}
    for name, card in CARDS.items():
        if card.architecture == architecture:
            peak = card.single if single else card.half
            compute, memory = flops / peak / 1e9, moved_bytes / card.bandwidth / 1e9
            predicted[name] = {"compute_ms": round(compute, 4), "memory_ms": round(memory, 4)}
    return predicted
