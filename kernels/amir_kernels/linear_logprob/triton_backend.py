"""The Triton backend: launches of the head's kernels, in blocks of rows that fit the workspace.

As many programs as the GPU holds share out the work items (row tile, split of the vocabulary) of the forward; a second
kernel merges the splits in order. Splits depend on V alone and nothing is added atomically, so a row gets the same bits
in any batch and from any program. The backward's kernel writes dL/dx of a tile in the products' dtype, and the products
that follow are the vendor's. Where the forward has kept its logits, no product recomputes them.

Legend: n selected rows, R rows of a block, H hidden size, V vocabulary, r LoRA rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .._backend import device_guard
from .backward import FormDlogits, RowCoefficients
from .head import Head, round_up
from .rows import RowBlock, RowSelection, RowStats, empty_stats
from .tiling import Tiling, scratch_bytes
from .triton_kernels import dlogits_kernel, kept_dlogits_kernel, merge_kernel, stats_kernel
from .triton_tiles import LARGEST_TILE, Config, device_architecture, select_config, vocabulary_splits

MERGE_ROWS = 128
KEPT_TILE = 4, 512
"""Rows and columns of a program that reads kept logits: sixteen numbers a thread, four at a time."""

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# ---- sizes ---------------------------------------------------------------------------------------------------------


def program_count(items: int, config: Config, multiprocessors: int) -> int:
    """Programs of the forward: as many as run at once, at most one per item."""
    return max(1, min(items, multiprocessors * config.programs))


def row_tiles_per_group(hidden_size: int, itemsize: int, config: Config, cache_bytes: int) -> int:
    """Row tiles whose hidden states fill a third of the L2 cache. Sets the order of the work items, not their bits."""
    return max(1, cache_bytes // 3 // (config.rows * max(1, hidden_size) * itemsize))


def _device_size(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of L2 cache)"""
    if device.type != "cuda":
        return 1, 2**20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size


def forward_rows(head: Head, rows: int, workspace: int, splits: int) -> int:
    """Rows of a forward block, a multiple of 16. Its copy of the hidden states and its partial statistics are scratch.

    They fit the scratch that a call with this many rows may use, backward included.
    """
    hidden_size = head.weight.shape[1]
    converted = head.compute.itemsize * (head.compute != head.operand)
    per_row = hidden_size * (head.operand.itemsize + converted) + 12 * splits + 32
    if head.lora:
        per_row += 4 * (hidden_size + head.lora.a.shape[0])
    return max(16, scratch_bytes(head, rows, workspace) // per_row // 16 * 16)


def _row_temperature(block: RowBlock) -> Tensor:
    """One temperature per row, `[R]`."""
    if isinstance(block.temperature, Tensor):
        return block.temperature
    return torch.full((block.padded,), block.temperature, dtype=torch.float32, device=block.hidden.device)


def _head_arguments(head: Head, block: RowBlock, config: Config) -> tuple[Any, ...]:
    """hidden, weight, bias, low_rank, lora_b, target, temperature; some other tensor stands in for an absent one."""
    temperature = _row_temperature(block)
    hidden, weight = block.hidden.to(head.compute), head.weight
    bias = hidden if head.bias is None else head.bias.contiguous()
    low_rank, lora_b = temperature, hidden
    if head.lora is not None:
        low_rank, lora_b = block.low_rank, head.lora.b.contiguous()
    if config.descriptors:
        hidden = TensorDescriptor.from_tensor(hidden, [config.rows, config.depth])
        weight = TensorDescriptor.from_tensor(weight, [config.columns, config.depth])
    return hidden, weight, bias, low_rank, lora_b, block.target, temperature


def kernel_options(head: Head, config: Config, with_entropy: bool) -> dict[str, object]:
    """The compile-time arguments and resources of the kernels that form products.

    The compiler fuses no product with a sum by itself, which it could do in one form of a kernel and not in another:
    with and without entropy or kept logits the sums are the same operations. Fused ones are written as `tl.fma`.
    """
    return {
        "COMPUTE": _DTYPES[head.compute],
        "HAS_BIAS": head.bias is not None,
        "HAS_LORA": head.lora is not None,
        "CAPPED": head.softcap is not None,
        "WITH_ENTROPY": with_entropy,
        "DESCRIPTORS": config.descriptors,
        "BLOCK_M": config.rows,
        "BLOCK_V": config.columns,
        "BLOCK_K": config.depth,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": False,
    }


def empty_kept_logits(head: Head, rows: int) -> Tensor:
    """Memory for a block's raw logits, float32 `[R, V]` rounded up to whole tiles of the largest size."""
    sizes = round_up(rows, LARGEST_TILE[0]), round_up(head.weight.shape[0], LARGEST_TILE[1])
    return torch.empty(sizes, dtype=torch.float32, device=head.weight.device)


# ---- launches ------------------------------------------------------------------------------------------------------


def block_stats(head: Head, block: RowBlock, with_entropy: bool, kept_logits: Tensor | None = None) -> RowStats:
    """Statistics of a block's rows; the raw logits are stored in `kept_logits`, from `empty_kept_logits`, if given."""
    config, (vocabulary, hidden_size) = select_config(head, device_architecture(head.weight.device)), head.weight.shape
    splits, split_tiles = vocabulary_splits(vocabulary, config)
    multiprocessors, cache_bytes = _device_size(block.hidden.device)
    rows = block.padded
    partial = torch.empty(splits, 3, rows, dtype=torch.float32, device=block.hidden.device)
    merged = torch.zeros(4, rows, dtype=torch.float32, device=block.hidden.device)
    items = triton.cdiv(rows, config.rows) * splits
    with device_guard(block.hidden):
        stats_kernel[(program_count(items, config, multiprocessors),)](
            *_head_arguments(head, block, config),
            partial,
            merged[3],
            partial if kept_logits is None else kept_logits,
            rows,
            hidden_size,
            vocabulary,
            *head.weight.stride(),
            head.lora.a.shape[0] if head.lora else 0,
            0 if kept_logits is None else kept_logits.stride(0),
            splits,
            split_tiles,
            row_tiles_per_group(hidden_size, head.operand.itemsize, config, cache_bytes),
            head.softcap or 1.0,
            head.logit_scale,
            KEEP=kept_logits is not None,
            **kernel_options(head, config, with_entropy),
        )
        merge_kernel[(triton.cdiv(rows, MERGE_ROWS),)](partial, merged, rows, splits, BLOCK=MERGE_ROWS)
    return RowStats(*merged)


def triton_row_stats(head: Head, rows: RowSelection, workspace: int, with_entropy: bool) -> RowStats:
    """Statistics `[n]` of the rows: `torch_row_stats` by the kernels."""
    config, count = select_config(head, device_architecture(head.weight.device)), rows.num_rows
    result = empty_stats(count, rows.hidden, torch.float32, with_entropy)
    tall = forward_rows(head, count, workspace, vocabulary_splits(head.weight.shape[0], config)[0])
    for first in range(0, count, tall):
        last = min(first + tall, count)
        result.store(slice(first, last), block_stats(head, rows.block(head, first, last), with_entropy))
    return result.select(slice(None))


def triton_dlogits(head: Head, tiling: Tiling) -> FormDlogits:
    """`torch_dlogits` by the kernel, which writes the tile in the products' dtype, with 16 bits where they have 16."""
    config, (vocabulary, hidden_size) = select_config(head, device_architecture(head.weight.device)), head.weight.shape
    scratch = torch.empty(tiling.tallest * tiling.widest, dtype=head.compute, device=head.weight.device)

    def form(block: RowBlock, coefficients: RowCoefficients, _: Tensor, start: int, stop: int) -> Tensor:
        rows, width = block.padded, stop - start
        dlogits = scratch[: rows * width].view(rows, width)
        with device_guard(block.hidden):
            dlogits_kernel[(triton.cdiv(rows, config.rows) * triton.cdiv(width, config.columns),)](
                *_head_arguments(head, block, config),
                coefficients.shift,
                coefficients.a,
                coefficients.a if coefficients.b is None else coefficients.b,
                coefficients.at_target,
                dlogits,
                rows,
                hidden_size,
                vocabulary,
                *head.weight.stride(),
                head.lora.a.shape[0] if head.lora else 0,
                start,
                width,
                head.softcap or 1.0,
                head.logit_scale,
                **kernel_options(head, config, coefficients.b is not None),
            )
        return dlogits.to(head.operand)

    return form


def kept_dlogits(head: Head, tiling: Tiling, kept_logits: Tensor) -> FormDlogits:
    """`triton_dlogits` from the raw logits that `block_stats` kept of the block."""
    scratch = torch.empty(tiling.tallest * tiling.widest, dtype=head.compute, device=head.weight.device)

    def form(block: RowBlock, coefficients: RowCoefficients, _: Tensor, start: int, stop: int) -> Tensor:
        rows, width = block.padded, stop - start
        dlogits = scratch[: rows * width].view(rows, width)
        with device_guard(block.hidden):
            kept_dlogits_kernel[(triton.cdiv(rows, KEPT_TILE[0]) * triton.cdiv(width, KEPT_TILE[1]),)](
                kept_logits,
                block.target,
                _row_temperature(block),
                coefficients.shift,
                coefficients.a,
                coefficients.at_target,
                dlogits,
                rows,
                kept_logits.stride(0),
                start,
                width,
                head.softcap or 1.0,
                head.logit_scale,
                COMPUTE=_DTYPES[head.compute],
                CAPPED=head.softcap is not None,
                BLOCK_M=KEPT_TILE[0],
                BLOCK_V=KEPT_TILE[1],
                enable_fp_fusion=False,
            )
        return dlogits.to(head.operand)

    return form
