"""What the Triton compiler makes of the kernels on a named GPU, on a machine without one.

`python -m amir_kernels.inspect --arch sm_90 --dtype bf16 --hidden 2048` compiles the kernels that the ops would launch
on that architecture: the head's kernels plain and with every option, read by tensor descriptors and by pointers, and
those over groups and pairs. It prints registers, spills, shared memory, warps, programs per multiprocessor, matrix
instructions, asynchronous copies, the share of other instructions in the main loop, and for the cards of that
architecture a roofline: a prediction from counted flops and bytes, not a measurement.
"""

from typing import Any

from .gpus import amd_occupancy, nvidia_occupancy, roofline
from .launches import DTYPES, Launch, group_launches, head_launches
from .machine_code import amd_facts, nvidia_facts


def inspect_kernels(
    architecture: str,
    dtype: str,
    hidden_size: int,
    vocabulary: int,
    only: list[str] | None = None,
    forms: list[str] | None = None,
) -> list[dict[str, Any]]:
    """One row of facts for each kernel and form.

    Args:
        architecture: `sm_*` or `gfx*`.
        dtype: of hidden states and head: "bf16", "fp16" or "fp32".
        hidden_size, vocabulary: of the head.
        only: starts of kernel names; others are left out.
        forms: exact names of forms; others are left out.
    """
    from .._backend import interpreting

    if interpreting():
        raise RuntimeError(
            "TRITON_INTERPRET=1 is set, which replaces the compiler by the interpreter; unset it to compile kernels"
        )
    launches = [*head_launches(architecture, DTYPES[dtype], hidden_size, vocabulary), *group_launches()]
    return [
        _inspect(launch, architecture, dtype)
        for launch in launches
        if (not only or launch.kernel.fn.__name__.startswith(tuple(only))) and (not forms or launch.form in forms)
    ]


def specialization(launch: Launch, nvidia: bool) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """(types, constants, hints) as Triton's launcher forms them.

    Integers of 1 become constants; multiples of 16 and pointers get a hint.
    """
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
        if pointer and not nvidia and name not in launch.large:
            hints[(place,)].append(["tt.pointer_range", 32])
    return signature, constants, hints


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
    facts = nvidia_facts(compiled.asm["cubin"]) if nvidia else amd_facts(compiled.asm["amdgcn"])
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
    row |= facts
    if nvidia:
        row["programs_per_multiprocessor"] = nvidia_occupancy(
            number, facts["registers"], warps, shared, row["tensor_memory_columns"]
        )
    else:
        row |= amd_occupancy(architecture, facts["registers"], warps, shared)
    single = config is None or dtype == "fp32"
    predicted = roofline(architecture, single, launch.flops, launch.bytes)
    return row | {"flops": launch.flops, "bytes_moved": launch.bytes, "predicted": predicted}
