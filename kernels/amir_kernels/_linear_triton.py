"""The head in Triton: forward statistics by row tile and vocabulary split, and the tiles of dlogits for the backward.

Each program of the forward sweeps one split of the vocabulary for one tile of rows and stores its (m, S, sum e d, z_target);
a second kernel merges the splits in order. Splits depend on V alone and nothing is added atomically, so a row gets the
same bits in any batch. The backward kernel writes dL/dx of a tile in the products' dtype; the products are the vendor's.

Legend: N rows of a block, H hidden size, V vocabulary, S splits, r LoRA rank.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._linear_torch import (
    FormDlogits,
    Head,
    Ranges,
    RowBlock,
    RowStats,
    Slopes,
    blocks_of,
    empty_stats,
    row_block,
)
from ._lse import DEEPEST, LOWEST, logits_tile, online_update


class Config(NamedTuple):
    """Shape of a program's tile and its resources."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


CONFIGS = {
    # 128 x 256 float32 sums fill half the registers of 8 warps; 48 KiB a stage leaves room for three.
    torch.bfloat16: Config(128, 256, 64, 8, 3),
    torch.float16: Config(128, 256, 64, 8, 3),
    # Without matrix instructions: a smaller tile, bound by arithmetic all the same.
    torch.float32: Config(64, 64, 32, 4, 2),
}
SPLIT_COLUMNS = 8192
"""Vocabulary columns of a split: enough splits to fill a GPU with few rows, few enough that the partials stay small."""
MERGE_ROWS = 128

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _stats_kernel(
    hidden,
    weight,
    bias,
    low_rank,
    lora_b,
    target,
    temperature,
    partial,
    N,
    H,
    V,
    rank,
    split_tiles,
    softcap,
    logit_scale,
    COMPUTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partial [S, 4, N]: m, sum e^(z - m), sum e^(z - m) (z - m) and z_target (0 where another split owns it)."""
    row_tiles = tl.cdiv(N, BLOCK_M)
    split = tl.program_id(0) // row_tiles  # neighbours share a split, so its weight rows stay in the L2 cache
    rows = ((tl.program_id(0) % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_mask = rows < N
    y = tl.load(target + rows, mask=row_mask, other=-1)
    heat = tl.load(temperature + rows, mask=row_mask, other=1.0)
    m = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_M,), dtype=tl.float32)
    picked = tl.zeros((BLOCK_M,), dtype=tl.float32)
    first = split * split_tiles
    for tile in range(first, tl.minimum(first + split_tiles, tl.cdiv(V, BLOCK_V))):
        columns = (tile * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
        z, _ = logits_tile(
            hidden,
            weight,
            bias,
            low_rank,
            lora_b,
            heat,
            rows,
            columns,
            row_mask,
            H,
            V,
            rank,
            softcap,
            logit_scale,
            COMPUTE,
            HAS_BIAS,
            HAS_LORA,
            CAPPED,
            BLOCK_M,
            BLOCK_V,
            BLOCK_K,
        )
        picked += tl.sum(tl.where(columns[None, :] == y[:, None], z, 0.0), axis=1)
        m, total, weighted = online_update(z, m, total, weighted, WITH_ENTROPY)
    out = partial + split.to(tl.int64) * 4 * N + rows
    tl.store(out, m, mask=row_mask)
    tl.store(out + N, total, mask=row_mask)
    tl.store(out + 2 * N, weighted, mask=row_mask)
    tl.store(out + 3 * N, picked, mask=row_mask)


@triton.jit
def _merge_kernel(partial, merged, N, splits, BLOCK: tl.constexpr):
    """merged [4, N] from partial [S, 4, N], split after split."""
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = rows < N
    m = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    picked = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        at = partial + split * 4 * N + rows
        other = tl.load(at, mask=mask, other=LOWEST)
        other_total = tl.load(at + N, mask=mask, other=0.0)
        other_weighted = tl.load(at + 2 * N, mask=mask, other=0.0)
        highest = tl.maximum(m, other)
        weighted = (weighted + (m - highest) * total) * tl.exp(m - highest)
        weighted += (other_weighted + (other - highest) * other_total) * tl.exp(other - highest)
        total = total * tl.exp(m - highest) + other_total * tl.exp(other - highest)
        picked += tl.load(at + 3 * N, mask=mask, other=0.0)
        m = highest
    tl.store(merged + rows, m, mask=mask)
    tl.store(merged + N + rows, total, mask=mask)
    tl.store(merged + 2 * N + rows, weighted, mask=mask)
    tl.store(merged + 3 * N + rows, picked, mask=mask)


@triton.jit
def _dlogits_kernel(
    hidden,
    weight,
    bias,
    low_rank,
    lora_b,
    target,
    temperature,
    shift,
    slope_a,
    slope_b,
    at_target,
    dlogits,
    N,
    H,
    V,
    rank,
    start,
    width,
    softcap,
    logit_scale,
    COMPUTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dlogits [N, width] of the columns from `start`: e^(z - m) (a + b (z - m)), at the target its own value."""
    row_tiles = tl.cdiv(N, BLOCK_M)
    rows = ((tl.program_id(0) % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    local = (tl.program_id(0) // row_tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = (start + local).to(tl.int64)
    row_mask = rows < N
    y = tl.load(target + rows, mask=row_mask, other=-1)
    heat = tl.load(temperature + rows, mask=row_mask, other=1.0)
    z, t = logits_tile(
        hidden,
        weight,
        bias,
        low_rank,
        lora_b,
        heat,
        rows,
        columns,
        row_mask,
        H,
        V,
        rank,
        softcap,
        logit_scale,
        COMPUTE,
        HAS_BIAS,
        HAS_LORA,
        CAPPED,
        BLOCK_M,
        BLOCK_V,
        BLOCK_K,
    )
    m = tl.load(shift + rows, mask=row_mask, other=float("inf"))
    d = tl.maximum(z - m[:, None], DEEPEST)
    slope = tl.load(slope_a + rows, mask=row_mask, other=0.0)[:, None]
    if WITH_ENTROPY:
        slope = slope + tl.load(slope_b + rows, mask=row_mask, other=0.0)[:, None] * d
    own = tl.load(at_target + rows, mask=row_mask, other=0.0)
    dz = tl.where(columns[None, :] == y[:, None], own[:, None], tl.exp(d) * slope)
    if CAPPED:
        dz = dz * (1 - t * t)
    out = dlogits + rows[:, None] * width + local[None, :]
    tl.store(out, dz.to(dlogits.dtype.element_ty), mask=row_mask[:, None] & (local < width)[None, :])


# ---- launches ------------------------------------------------------------------------------------------------------


def splits_of(vocabulary: int, config: Config) -> tuple[int, int]:
    """(splits, vocabulary tiles of each): of V alone, so that a row's bits do not depend on the batch."""
    tiles = triton.cdiv(vocabulary, config.columns)
    each = max(1, SPLIT_COLUMNS // config.columns)
    return triton.cdiv(tiles, each), each


def _head_arguments(head: Head, block: RowBlock, weight: Tensor) -> tuple[Tensor, ...]:
    """hidden, weight, bias, low_rank, lora_b, target, temperature; hidden stands in for those that are absent."""
    heat = block.temperature
    if not isinstance(heat, Tensor):
        heat = torch.full((block.padded,), heat, dtype=torch.float32, device=block.hidden.device)
    bias = block.hidden if head.bias is None else head.bias.contiguous()
    low_rank, lora_b = (block.hidden, block.hidden) if head.lora is None else (block.low_rank, head.lora.b.contiguous())
    return block.hidden, weight, bias, low_rank, lora_b, block.target, heat


def _options(head: Head, config: Config, with_entropy: bool) -> dict[str, object]:
    return {
        "COMPUTE": _DTYPES[head.compute],
        "HAS_BIAS": head.bias is not None,
        "HAS_LORA": head.lora is not None,
        "CAPPED": head.softcap is not None,
        "WITH_ENTROPY": with_entropy,
        "BLOCK_M": config.rows,
        "BLOCK_V": config.columns,
        "BLOCK_K": config.depth,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def triton_row_stats(
    head: Head,
    hidden: Tensor,
    target: Tensor,
    temperature: Tensor | float,
    index: Tensor,
    workspace: int,
    with_entropy: bool,
) -> RowStats:
    """`row_stats` of the torch backend, by the kernels."""
    config, (vocabulary, hidden_size) = CONFIGS[head.compute], head.weight.shape
    splits, each = splits_of(vocabulary, config)
    weight = head.weight.contiguous()
    result = empty_stats(index.shape[0], hidden, torch.float32, with_entropy)
    for first, last in Ranges.of(head, blocks_of(head, workspace), index.shape[0]).rows:
        block = row_block(head, hidden, target, temperature, index[first:last])
        rows = block.padded
        partial = torch.empty(splits, 4, rows, dtype=torch.float32, device=hidden.device)
        merged = torch.empty(4, rows, dtype=torch.float32, device=hidden.device)
        _stats_kernel[(triton.cdiv(rows, config.rows) * splits,)](
            *_head_arguments(head, block, weight),
            partial,
            rows,
            hidden_size,
            vocabulary,
            head.lora.a.shape[0] if head.lora else 0,
            each,
            head.softcap or 1.0,
            head.logit_scale,
            **_options(head, config, with_entropy),
        )
        _merge_kernel[(triton.cdiv(rows, MERGE_ROWS),)](partial, merged, rows, splits, BLOCK=MERGE_ROWS)
        for whole, own in zip(result, merged, strict=True):
            if whole is not None:
                whole[first:last] = own[: last - first]
    return result


def triton_dlogits(head: Head, ranges: Ranges) -> FormDlogits:
    """`torch_dlogits` by the kernel: the tile comes in the products' own dtype, 16 bits where they are."""
    config, (vocabulary, hidden_size) = CONFIGS[head.compute], head.weight.shape
    weight = head.weight.contiguous()
    room = torch.empty(ranges.tallest * ranges.widest, dtype=head.compute, device=weight.device)

    def form(block: RowBlock, slopes: Slopes, _: Tensor, start: int, stop: int) -> Tensor:
        rows, width = block.padded, stop - start
        dlogits = room[: rows * width].view(rows, width)
        _dlogits_kernel[(triton.cdiv(rows, config.rows) * triton.cdiv(width, config.columns),)](
            *_head_arguments(head, block, weight),
            slopes.shift,
            slopes.a,
            slopes.a if slopes.b is None else slopes.b,
            slopes.at_target,
            dlogits,
            rows,
            hidden_size,
            vocabulary,
            head.lora.a.shape[0] if head.lora else 0,
            start,
            width,
            head.softcap or 1.0,
            head.logit_scale,
            **_options(head, config, slopes.b is not None),
        )
        return dlogits.to(head.operand)

    return form
