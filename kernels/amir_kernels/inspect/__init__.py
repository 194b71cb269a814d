"""`python -m amir_kernels.inspect --arch sm_90 --dtype bf16 --hidden 2048`: compiles the kernels without a GPU.

Compiles what the ops would launch on that architecture: the head's kernels plain and with every option, read by tensor
descriptors and by pointers, and those over groups and pairs. Prints registers, spills, shared memory, warps, programs
per multiprocessor, matrix instructions, asynchronous copies, the share of other instructions in the main loop, and for
the cards of that architecture a roofline: a prediction from counted flops and bytes, not a measurement.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..linear_logprob.head import Head, Lora, round_up
from ..linear_logprob.triton_tiles import Config, select_config, vocabulary_splits
from .machine_code import amd_facts, nvidia_facts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100")
ROWS, VOCABULARY, RANK = 8192, 151_936, 16
GROUP, COMPLETIONS = 16, 8192


class Card(NamedTuple):
    """A GPU's published numbers."""

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
"""of a multiprocessor; 102,400 on the others"""
MAX_WARPS = {80: 64, 90: 64, 100: 64}
"""of a multiprocessor; 48 on the others"""


class Amd(NamedTuple):
    """A multiprocessor of AMD's and how it is shared out: the ISA's manuals, and LLVM's guide to the AMDGPU backend."""

    simds: int
    registers: int
    """vector registers of a SIMD, for each lane; those for accumulation are among them"""
    granule: int
    """a wave gets a multiple of this"""
    waves: int
    """of a SIMD, at most"""
    shared: int
    programs: int
    """at most, where a program has several waves: each needs a barrier"""


AMD = {
    "gfx942": Amd(simds=4, registers=512, granule=8, waves=8, shared=65_536, programs=16),
    # Waves of 32. A program's waves are spread over the two compute units of a WGP, which is what counts as one here.
    "gfx1100": Amd(simds=4, registers=1536, granule=24, waves=16, shared=131_072, programs=32),
}
AMD_SHARED_GRANULE, AMD_SHARED_LIMIT = 512, 65_536
"""Bytes: a program gets a multiple of one, and at most the other."""


class Launch(NamedTuple):
    """A kernel as it would be launched, and what it does."""

    kernel: Any
    form: str
    values: dict[str, Any]
    """argument: value, or type where it is a pointer"""
    constants: frozenset[str]
    resources: dict[str, int]
    """num_warps and the like, where the launch names them"""
    flops: int
    bytes: int
    """that must come from and go to device memory at least"""
    config: Config | None = None


# ---- the launches ----------------------------------------------------------------------------------------------------


def _head(dtype: torch.dtype, hidden_size: int, vocabulary: int, transposed: bool, everything: bool) -> Head:
    weight = torch.empty(vocabulary, hidden_size, dtype=dtype, device="meta")
    if transposed:
        weight = torch.empty(hidden_size, vocabulary, dtype=dtype, device="meta").T
    bias = weight.new_empty(vocabulary) if everything else None
    lora = Lora(weight.new_empty(RANK, hidden_size), weight.new_empty(vocabulary, RANK), 1.0) if everything else None
    return Head(weight, bias, lora, 30.0 if everything else None, 1.0, dtype)


def _head_values(head: Head, config: Config, cache_bytes: int) -> dict[str, Any]:
    from ..linear_logprob.triton_backend import row_tiles_per_group

    pointer, (vocabulary, hidden_size) = POINTERS[head.compute], head.weight.shape
    splits, each = vocabulary_splits(vocabulary, config)
    values: dict[str, Any] = dict.fromkeys(("hidden", "weight", "dlogits", "bias", "lora_b"), pointer)
    if config.descriptors:
        for name, tall in (("hidden", config.rows), ("weight", config.columns)):
            values[name] = f"tensordesc<{pointer[1:]}[{tall}, {config.depth}]>"
    names = (
        "low_rank",
        "temperature",
        "partial",
        "target_logit",
        "shift",
        "coefficient_a",
        "coefficient_b",
        "at_target",
    )
    values |= dict.fromkeys(names, "*fp32") | {"target": "*i64", "kept_logits": "*fp32"}
    values |= {"N": ROWS, "H": hidden_size, "V": vocabulary, "rank": RANK if head.lora else 0}
    values |= dict(zip(("weight_row_stride", "weight_column_stride"), head.weight.stride(), strict=True))
    values |= {
        "splits": splits,
        "split_tiles": each,
        "start": 4096,
        "width": 4096,
        "kept_row_stride": -(-vocabulary // 256) * 256,
    }
    values |= {"group": row_tiles_per_group(hidden_size, head.compute.itemsize, config, cache_bytes)}
    return values | {"softcap": 30.0, "logit_scale": 1.0}


def _head_launches(architecture: str, dtype: torch.dtype, hidden_size: int, vocabulary: int) -> Iterator[Launch]:
    from ..linear_logprob import triton_backend as kernels

    cache_bytes = max([card.cache_mb for card in CARDS.values() if card.architecture == architecture]) * 10**6
    for transposed in (False, True):
        for everything in (False, True):
            head = _head(dtype, hidden_size, vocabulary, transposed, everything)
            config = select_config(head, architecture)
            options = kernels.kernel_options(head, config, everything)
            resources = {name: int(str(options.pop(name))) for name in ("num_warps", "num_stages")}
            values = _head_values(head, config, cache_bytes) | options
            sweeps = -(-ROWS // (config.rows * values["group"]))
            flops = 2 * ROWS * hidden_size * vocabulary
            operands = (ROWS + sweeps * vocabulary) * hidden_size * dtype.itemsize
            tile = 4096 * (ROWS + hidden_size) * dtype.itemsize + ROWS * hidden_size * dtype.itemsize
            form = ("all options" if everything else "plain") + (", transposed head" if transposed else "")
            shared = (frozenset({*options, "KEEP"}), resources)
            moved, logits = operands + 12 * ROWS * values["splits"], 4 * ROWS * vocabulary
            yield Launch(kernels.stats_kernel, form, values | {"KEEP": False}, *shared, flops, moved, config)
            values_kept, form_kept = values | {"KEEP": True, "WITH_ENTROPY": False}, f"{form}, kept logits"
            yield Launch(kernels.stats_kernel, form_kept, values_kept, *shared, flops, moved + logits, config)
            yield Launch(kernels.dlogits_kernel, form, values, *shared, flops * 4096 // vocabulary, tile, config)
    rows, columns = kernels.KEPT_TILE
    values = values | {"BLOCK_M": rows, "BLOCK_V": columns}
    elements, constants = ROWS * 4096, frozenset({"COMPUTE", "CAPPED", "BLOCK_M", "BLOCK_V"})
    moved = (4 + dtype.itemsize) * elements
    yield Launch(kernels.kept_dlogits_kernel, "capped", values, constants, {}, 20 * elements, moved)
    splits = vocabulary_splits(vocabulary, config)[0]
    values = {"partial": "*fp32", "merged": "*fp32", "N": ROWS, "splits": splits, "BLOCK": kernels.MERGE_ROWS}
    moved = 12 * ROWS * (splits + 1)
    yield Launch(kernels.merge_kernel, "", values, frozenset({"BLOCK"}), {}, 12 * ROWS * splits, moved)


def _group_launches() -> Iterator[Launch]:
    """Advantages and pairs of groups of 16. A row's programs read its whole group: their flops grow with its size."""
    from .. import _group_kernels as kernels

    count, pairs, resources = COMPLETIONS, COMPLETIONS * GROUP, kernels.RESOURCES
    rounding: dict[str, Any] = {"ROUNDING": 4 * 2.0**-23}
    groups = {"rewards": "*fp64", "offsets": "*i64", "advantages": "*fp64"}
    for block in (GROUP, kernels.MAX_GROUP_BLOCK):
        for baseline, scale in (("mean", "std"), ("leave_one_out", "bernoulli")):
            parts = {"BASELINE": baseline, "SCALE": scale, "EPS": 1e-4, "UNBIASED": True, "BLOCK": block} | rounding
            form, shared = f"{baseline}, {scale}, block {block}", (frozenset(parts), resources)
            yield Launch(kernels._group_advantage_kernel, form, groups | parts, *shared, 12 * count, 16 * count)
        values = groups | {"k": 4, "BLOCK": block}
        shared = (frozenset({"BLOCK"}), resources)
        yield Launch(kernels._pass_at_k_kernel, f"block {block}", values, *shared, 4 * count, 16 * count)
    rows: dict[str, Any] = dict.fromkeys(("starts", "ends", "cap_bits", "cap_ranks"), "*i64") | {"rewards": "*fp64"}
    rows |= dict.fromkeys(("chosen", "rejected", "correct"), "*i64") | {"rows": count, "max_pairs": 20, "beta": 0.2}
    rows |= dict.fromkeys(("scores", "losses", "grads", "logits"), "*fp32")
    for topk in (False, True):
        parts = {"MARGIN": 0.0, "TOPK": topk, "ROWS": kernels.ROW_BLOCK, "COLUMNS": kernels.COLUMN_BLOCK} | rounding
        form, shared = "topk" if topk else "all", (frozenset(parts), resources)
        # a bisection over 63 bits of gaps and 8 of ranks counts the pairs each time
        yield Launch(kernels._pair_cap_kernel, form, rows | parts, *shared, 71 * 2 * pairs, 40 * count)
        for capped in (False, True):
            parts |= {"CAPPED": capped}
            name, shared = form + (", capped" if capped else ""), (frozenset(parts), resources)
            moved = (64 + 16 * capped) * count
            yield Launch(kernels._pair_row_sums_kernel, name, rows | parts, *shared, 20 * pairs, moved)


# ---- compiling -------------------------------------------------------------------------------------------------------


def specialization(launch: Launch, nvidia: bool) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """(types, constants, hints) as the launcher finds them: ones are constants, multiples of 16 and pointers hinted."""
    signature, constants, hints = {}, {}, {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.values[name]
        if name in launch.constants or (isinstance(value, int) and value == 1):
            signature[name], constants[(place,)] = "constexpr", value
            continue
        signature[name] = value if isinstance(value, str) else "fp32" if isinstance(value, float) else "i32"
        pointer = isinstance(value, str) and value.startswith("*")
        if pointer or (isinstance(value, int) and value % 16 == 0):
            hints[(place,)] = [["tt.divisibility", 16]]
        if pointer and not nvidia:
            hints[(place,)].append(["tt.pointer_range", 32])
    return signature, constants, hints


def _programs_per_multiprocessor(number: int, registers: int, warps: int, shared: int, tensor_columns: int) -> int:
    """0: the kernel cannot be launched."""
    by_registers = 65_536 // (-(-max(registers, 1) // 8) * 8 * warps * 32)
    by_shared = SHARED_BYTES.get(number, 102_400) // (shared + 1024)
    by_tensor_memory = 512 // max(tensor_columns, 1)
    return min(by_registers, by_shared, by_tensor_memory, MAX_WARPS.get(number, 48) // warps)


def _amd_occupancy(architecture: str, registers: int, warps: int, shared: int) -> dict[str, int]:
    """Programs of a multiprocessor and waves of a SIMD; 0: the kernel cannot be launched."""
    amd = AMD[architecture]
    waves = min(amd.waves, amd.registers // round_up(max(registers, 1), amd.granule))
    by_shared = amd.shared // round_up(max(shared, 1), AMD_SHARED_GRANULE) if shared <= AMD_SHARED_LIMIT else 0
    programs = min(waves * amd.simds // warps, by_shared, amd.programs)
    return {"programs_per_multiprocessor": programs, "waves_per_simd": programs * warps // amd.simds}


def _predicted(architecture: str, single: bool, launch: Launch) -> dict[str, Any]:
    """Milliseconds by flops and by bytes for the cards of an architecture."""
    out = {}
    for name, card in CARDS.items():
        if card.architecture == architecture:
            peak = card.single if single else card.half
            compute, memory = launch.flops / peak / 1e9, launch.bytes / card.bandwidth / 1e9
            out[name] = {"compute_ms": round(compute, 4), "memory_ms": round(memory, 4)}
    return out


def _inspect(launch: Launch, architecture: str, dtype: str) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = architecture.startswith("sm_")
    number = int(architecture[3:]) if nvidia else 0
    warp = 64 if architecture.startswith("gfx9") else 32
    target = GPUTarget("cuda", number, 32) if nvidia else GPUTarget("hip", architecture, warp)
    resources = {name: value for name, value in launch.resources.items() if nvidia or name != "maxnreg"}
    signature, constants, hints = specialization(launch, nvidia)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=hints)
    compiled = triton.compile(source, target=target, options=resources)
    found = nvidia_facts(compiled.asm["cubin"]) if nvidia else amd_facts(compiled.asm["amdgcn"])
    shared, config = compiled.metadata.shared, launch.config
    row = {"kernel": launch.kernel.fn.__name__, "form": launch.form, "arch": architecture, "dtype": dtype}
    if config:
        stage = (config.rows + config.columns) * config.depth * DTYPES[dtype].itemsize
        row |= {"tile": list(config[:3]), "operands": "descriptors" if config.descriptors else "pointers"}
        row |= {"stages_in_shared": shared // stage, "programs_launched": config.programs}
    warps = compiled.metadata.num_warps
    row |= {"warps": warps, "shared_bytes": shared}
    if nvidia:
        row["tensor_memory_columns"] = getattr(compiled.metadata, "tmem_size", 0)
    row |= found
    if nvidia:
        row["programs_per_multiprocessor"] = _programs_per_multiprocessor(
            number, found["registers"], warps, shared, row["tensor_memory_columns"]
        )
    else:
        row |= _amd_occupancy(architecture, found["registers"], warps, shared)
    single = config is None or dtype == "fp32"
    predicted = _predicted(architecture, single, launch)
    return row | {"flops": launch.flops, "bytes_moved": launch.bytes, "predicted": predicted}


def inspect_kernels(
    architecture: str,
    dtype: str,
    hidden_size: int,
    vocabulary: int,
    only: list[str] | None = None,
    forms: list[str] | None = None,
) -> list[dict[str, Any]]:
    """A row per kernel and form, for `sm_*` or `gfx*`; of the kernels whose names start with one of `only`."""
    from .._backend import interpreting

    if interpreting():
        raise RuntimeError("TRITON_INTERPRET=1 puts the interpreter in the compiler's place; unset it")
    launches = [*_head_launches(architecture, DTYPES[dtype], hidden_size, vocabulary), *_group_launches()]
    return [
        _inspect(launch, architecture, dtype)
        for launch in launches
        if (not only or launch.kernel.fn.__name__.startswith(tuple(only))) and (not forms or launch.form in forms)
    ]


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status, 1 where a kernel spills registers."""
    parser = argparse.ArgumentParser(prog="python -m amir_kernels.inspect", description=__doc__)
    parser.add_argument("--arch", default=["sm_90"], nargs="+", choices=ARCHITECTURES)
    parser.add_argument("--dtype", default=["bf16"], nargs="+", choices=DTYPES)
    parser.add_argument("--hidden", type=_size, default=2048, help="H")
    parser.add_argument("--vocabulary", type=_size, default=VOCABULARY, help="V")
    parser.add_argument("--only", nargs="+", help="kernels whose names start so, stats_kernel for instance")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of text")
    options = parser.parse_args(arguments)
    rows = [
        row
        for architecture in options.arch
        for dtype in options.dtype
        for row in inspect_kernels(architecture, dtype, options.hidden, options.vocabulary, options.only)
    ]
    if not rows:
        parser.error(f"argument --only: no kernel's name starts with {' or '.join(options.only)}")
    if options.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row.pop('kernel')} ({row.pop('form')})")
            print("\n".join(f"    {name:32} {value}" for name, value in row.items()))
    return int(any(row["spill_bytes"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
