"""The kernels as the ops launch them: arguments, compile-time constants, resources, and the work that they do."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..linear_logprob.head import Head, Lora
from ..linear_logprob.triton_tiles import Config, family, select_config, vocabulary_splits
from .gpus import CARDS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
ROWS, VOCABULARY, RANK = 8192, 151_936, 16
"""Sizes of the head that flops and bytes are counted for."""
GROUP, COMPLETIONS = 16, 8192
"""Sizes of the groups."""


LARGE = 2**31 - 1
"""Bytes that offsets of 32 bits reach."""


class Launch(NamedTuple):
    """One kernel as an op would launch it, and the work that it does."""

    kernel: Any
    form: str
    values: dict[str, Any]
    """argument: its value, or its type if it is a pointer"""
    constants: frozenset[str]
    """names of the compile-time arguments"""
    resources: dict[str, int]
    """num_warps and the like, if the launch names them"""
    flops: int
    bytes: int
    """the least that must be read from and written to device memory"""
    config: Config | None = None
    large: frozenset[str] = frozenset()
    """pointers to more than 2 GiB, whose offsets take 64 bits on AMD"""


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
    splits, tiles_per_split = vocabulary_splits(vocabulary, config)
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
        "split_tiles": tiles_per_split,
        "start": 4096,
        "width": 4096,
        "kept_row_stride": -(-vocabulary // 256) * 256,
    }
    values |= {"group": row_tiles_per_group(hidden_size, head.compute.itemsize, config, cache_bytes)}
    return values | {"softcap": 30.0, "logit_scale": 1.0}


def head_launches(architecture: str, dtype: torch.dtype, hidden_size: int, vocabulary: int) -> Iterator[Launch]:
    """The kernels of the head, plain and with every option, read in place and transposed, with kept logits or not."""
    from ..linear_logprob import triton_backend as kernels

    caches = [card.cache_mb for card in CARDS.values() if card.architecture == family(architecture)]
    if not caches:
        known = ", ".join(sorted({card.architecture for card in CARDS.values()}))
        raise ValueError(f"architecture must be of the family of one of {known}, got {architecture!r}")
    cache_bytes = max(caches) * 10**6
    for transposed in (False, True):
        for everything in (False, True):
            head = _head(dtype, hidden_size, vocabulary, transposed, everything)
            config = select_config(head, architecture)
            options = kernels.kernel_options(head, config, everything)
            resources = {name: int(options.pop(name)) for name in ("num_warps", "num_stages", "enable_fp_fusion")}  # type: ignore[call-overload]
            values = _head_values(head, config, cache_bytes) | options
            sweeps = -(-ROWS // (config.rows * values["group"]))
            flops = 2 * ROWS * hidden_size * vocabulary
            operands = (ROWS + sweeps * vocabulary) * hidden_size * dtype.itemsize
            tile = 4096 * (ROWS + hidden_size) * dtype.itemsize + ROWS * hidden_size * dtype.itemsize
            form = ("all options" if everything else "plain") + (", transposed head" if transposed else "")
            shared = (frozenset({*options, "KEEP"}), resources)
            tail = (config, frozenset({"weight"} if head.weight.untyped_storage().nbytes() > LARGE else ()))
            moved, logits = operands + 12 * ROWS * values["splits"], 4 * ROWS * vocabulary
            yield Launch(kernels.stats_kernel, form, values | {"KEEP": False}, *shared, flops, moved, *tail)
            values_kept, form_kept = values | {"KEEP": True, "WITH_ENTROPY": False}, f"{form}, kept logits"
            yield Launch(kernels.stats_kernel, form_kept, values_kept, *shared, flops, moved + logits, *tail)
            yield Launch(kernels.dlogits_kernel, form, values, *shared, flops * 4096 // vocabulary, tile, *tail)
    rows, columns = kernels.KEPT_TILE
    values = values | {"BLOCK_M": rows, "BLOCK_V": columns}
    elements, constants = ROWS * 4096, frozenset({"COMPUTE", "CAPPED", "BLOCK_M", "BLOCK_V"})
    moved = (4 + dtype.itemsize) * elements
    yield Launch(
        kernels.kept_dlogits_kernel, "capped", values, constants, {"enable_fp_fusion": False}, 20 * elements, moved
    )
    splits = vocabulary_splits(vocabulary, config)[0]
    values = {"partial": "*fp32", "merged": "*fp32", "N": ROWS, "splits": splits, "BLOCK": kernels.MERGE_ROWS}
    moved = 12 * ROWS * (splits + 1)
    yield Launch(kernels.merge_kernel, "", values, frozenset({"BLOCK"}), {}, 12 * ROWS * splits, moved)


def group_launches() -> Iterator[Launch]:
    """Advantages and pairs of groups of 16. A row is compared with its whole group, so flops grow with its size."""
    from .. import _group_kernels as kernels

    count, pairs, resources = COMPLETIONS, COMPLETIONS * GROUP, kernels.RESOURCES
    rounding: dict[str, Any] = {"ROUNDING": 4 * 2.0**-23}
    groups = {"rewards": "*fp64", "offsets": "*i64", "advantages": "*fp64"}
    for block in (8, GROUP, kernels.MAX_GROUP_BLOCK):
        for baseline, scale in (("mean", "std"), ("leave_one_out", "std"), ("leave_one_out", "bernoulli")):
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
        # a bisection over 63 bits of gaps and 8 bits of ranks counts the pairs in each step
        yield Launch(kernels._pair_cap_kernel, form, rows | parts, *shared, 71 * 2 * pairs, 40 * count)
        for capped in (False, True):
            parts |= {"CAPPED": capped}
            name, shared = form + (", capped" if capped else ""), (frozenset(parts), resources)
            moved = (64 + 16 * capped) * count
            yield Launch(kernels._pair_row_sums_kernel, name, rows | parts, *shared, 20 * pairs, moved)
