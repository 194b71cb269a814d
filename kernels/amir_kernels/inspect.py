"""`python -m amir_kernels.inspect --arch sm_90 --dtype bf16 --hidden 2048`: compiles the head's kernels without a GPU.

Compiles what `linear_logprob` would launch on that architecture, plain and with every option, and prints registers,
spills, shared memory, warps, programs per multiprocessor, matrix instructions, asynchronous copies, the share of other
instructions in the inner loop, and a roofline for the cards of that architecture: a prediction from counted flops and
bytes, not a measurement.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS, VOCABULARY, RANK = 8192, 151_936, 16
CARDS = {
    # name: architecture, dense 16-bit TFLOP/s, float32 TFLOP/s, TB/s
    "A100": ("sm_80", 312, 19.5, 2.0),
    "RTX 4090": ("sm_89", 165, 82.6, 1.0),
    "H100": ("sm_90", 989, 66.9, 3.35),
    "H200": ("sm_90", 989, 66.9, 4.8),
    "B200": ("sm_100", 2250, 75, 8.0),
    "MI300X": ("gfx942", 1307, 163, 5.3),
}
SHARED_BYTES = {80: 167_936, 86: 102_400, 89: 102_400, 90: 233_472, 100: 233_472, 120: 102_400}
"""of a multiprocessor"""
MATRIX = r"(HGMMA|UTCHMMA|UTCMMA|HMMA|v_mfma|v_wmma)"


def _head(dtype: torch.dtype, hidden_size: int, vocabulary: int, everything: bool) -> Any:
    from ._linear_head import Head, Lora

    weight = torch.empty(vocabulary, hidden_size, dtype=dtype, device="meta")
    bias = torch.empty(vocabulary, dtype=dtype, device="meta") if everything else None
    lora = Lora(weight.new_empty(RANK, hidden_size), weight.new_empty(vocabulary, RANK), 1.0) if everything else None
    return Head(weight, bias, lora, 30.0 if everything else None, 1.0, dtype)


def _arguments(head: Any) -> dict[str, Any]:
    """Values or pointer types that the launcher would pass, by the kernels' argument names."""
    pointer = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[head.compute]
    vocabulary, hidden_size = head.weight.shape
    typed = dict.fromkeys(("hidden", "weight", "dlogits"), pointer)
    typed |= dict.fromkeys(("bias", "lora_b"), pointer)
    names = ("low_rank", "temperature", "partial", "picked", "shift", "slope_a", "slope_b", "at_target")
    typed |= dict.fromkeys(names, "*fp32") | {"target": "*i64"}
    sizes = {
        "N": ROWS,
        "H": hidden_size,
        "V": vocabulary,
        "weight_row": hidden_size,
        "weight_column": 1,
        "rank": RANK if head.lora else 0,
        "start": 4096,
        "width": 4096,
    }
    return typed | sizes | {"split_tiles": 64, "softcap": 30.0, "logit_scale": 1.0}


def _source(kernel: Any, head: Any, config: Any, with_entropy: bool) -> tuple[Any, dict[str, Any]]:
    """The kernel as the launcher specializes it: pointers and multiples of 16 carry that hint, ones are constants."""
    from triton.compiler import ASTSource

    from ._linear_triton import options_of

    options = options_of(head, config, with_entropy)
    resources = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    values = _arguments(head) | options
    signature, constants, hints = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = values[name]
        if name in options or (isinstance(value, int) and value == 1):
            signature[name], constants[(place,)] = "constexpr", value
            continue
        signature[name] = value if isinstance(value, str) else "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, str) or (isinstance(value, int) and value % 16 == 0):
            hints[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints), resources


def _tool(name: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _inner_loop(instructions: list[tuple[int, str]]) -> tuple[int, int]:
    """(instructions, matrix instructions) of the smallest loop that has any: a backward branch and its body."""
    best = (0, 0)
    for address, text in instructions:
        target = re.search(r"BRA.*?0x([0-9a-f]+)", text)
        if not target or int(target[1], 16) >= address:
            continue
        body = [line for at, line in instructions if int(target[1], 16) <= at <= address]
        matrix = sum(bool(re.search(MATRIX, line)) for line in body)
        if matrix and (not best[0] or len(body) < best[0]):
            best = (len(body), matrix)
    return best


def _nvidia(compiled: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = _tool("cuobjdump")
        usage = subprocess.run(
            [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    instructions = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?;)", sass)]
    loop, matrix = _inner_loop(instructions)
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "spill_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        "matrix_instructions": len(re.findall(MATRIX, sass)),
        "wgmma": len(re.findall("HGMMA", sass)),
        "tf32": len(re.findall(r"TF32", sass)),
        "async_copies": len(re.findall(r"LDGSTS|UTMALDG", sass)),
        "inner_loop": loop,
        "inner_loop_other_share": round(1 - matrix / loop, 3) if loop else None,
    }


def _amd(compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]
    counts = {name: int(number) for name, number in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
    return {
        "registers": counts["vgpr_count"],
        "spill_bytes": 4 * counts["vgpr_spill_count"],
        "matrix_instructions": len(re.findall(MATRIX, text)),
    }


def _programs_per_multiprocessor(architecture: str, registers: int, warps: int, shared: int) -> int | None:
    if not architecture.startswith("sm_"):
        return None
    number = int(architecture[3:])
    by_registers = 65_536 // (max(registers, 1) * warps * 32)
    by_shared = SHARED_BYTES.get(number, 102_400) // (shared + 1024)
    return min(by_registers, by_shared, 2048 // (warps * 32))


def _roofline(architecture: str, dtype: torch.dtype, hidden_size: int, vocabulary: int, config: Any) -> dict[str, Any]:
    """Predicted milliseconds of a forward over ROWS tokens, by flops, and by bytes if no tile comes from L2."""
    flops = 2 * ROWS * hidden_size * vocabulary
    traffic = (
        vocabulary * hidden_size * (ROWS / config.rows) + ROWS * hidden_size * vocabulary / 8192
    ) * dtype.itemsize
    out = {}
    for card, (card_architecture, half, single, bandwidth) in CARDS.items():
        if card_architecture == architecture:
            peak = single if dtype == torch.float32 else half
            compute, memory = flops / peak / 1e9, traffic / bandwidth / 1e9
            out[card] = {"compute_ms": round(compute, 2), "memory_ms_without_l2": round(memory, 2)}
    return out


def inspect_head(architecture: str, dtype: torch.dtype, hidden_size: int, vocabulary: int) -> list[dict[str, Any]]:
    """A row per kernel and form, for `sm_*` or `gfx*`."""
    import triton
    from triton.backends.compiler import GPUTarget

    from . import _linear_triton as kernels
    from ._launch import interpreting

    if interpreting():
        raise RuntimeError("TRITON_INTERPRET=1 puts the interpreter in the compiler's place; unset it")
    nvidia = architecture.startswith("sm_")
    warp = 64 if architecture.startswith("gfx9") else 32
    target = GPUTarget("cuda", int(architecture[3:]), 32) if nvidia else GPUTarget("hip", architecture, warp)
    rows = []
    for everything in (False, True):
        head = _head(dtype, hidden_size, vocabulary, everything)
        config = kernels.config_of(head, architecture)
        for kernel in (kernels.stats_kernel, kernels.dlogits_kernel):
            source, resources = _source(kernel, head, config, with_entropy=everything)
            compiled = triton.compile(source, target=target, options=resources)
            found = _nvidia(compiled) if nvidia else _amd(compiled)
            shared = compiled.metadata.shared
            rows.append(
                {
                    "kernel": kernel.fn.__name__,
                    "form": "all options" if everything else "plain",
                    "arch": architecture,
                    "tile": list(config[:3]),
                    "warps": config.warps,
                    "stages": config.stages,
                    "shared_bytes": shared,
                    **found,
                    "programs_per_multiprocessor": _programs_per_multiprocessor(
                        architecture, found["registers"], config.warps, shared
                    ),
                    "predicted": _roofline(architecture, dtype, hidden_size, vocabulary, config),
                }
            )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status, 1 where a kernel spills registers."""
    parser = argparse.ArgumentParser(prog="python -m amir_kernels.inspect", description=__doc__)
    parser.add_argument("--arch", default="sm_90", help="sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, gfx942, gfx1100")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--hidden", type=int, default=2048, help="H")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="V")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of text")
    options = parser.parse_args(arguments)
    rows = inspect_head(options.arch, DTYPES[options.dtype], options.hidden, options.vocabulary)
    if options.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row.pop('kernel')} ({row.pop('form')})")
            print("\n".join(f"    {name:32} {value}" for name, value in row.items()))
    return int(any(row["spill_bytes"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
