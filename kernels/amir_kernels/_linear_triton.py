"""The head in Triton: forward statistics by row tile and vocabulary split, and the tiles of dlogits for the backward.

Each program of the forward sweeps one split of the vocabulary for one tile of rows and stores its part of the
statistics; a second kernel merges the splits in order. Splits depend on V alone and nothing is added atomically, so
a row gets the same bits in any batch. The backward kernel writes dL/dx of a tile in the products' dtype; the products
that follow are the vendor's.

Legend: N rows of a block, H hidden size, V vocabulary, S splits, r LoRA rank.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._linear_backward import FormDlogits, Slopes
from ._linear_head import Head, Ranges, RowBlock, row_block
from ._linear_torch import RowStats, empty_stats
from ._lse import DEEPEST, LOWEST, logits_tile, online_update


class Config(NamedTuple):
    """Shape of a program's tile and its resources."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Chosen by compiling: the largest tile that spills no registers with any option. "plain" has neither cap nor LoRA.
CONFIGS = {
    # Two warpgroups of wgmma; the sums take half the registers, a depth of 32 leaves enough for the rest (64 does not).
    ("sm_90", "plain"): Config(256, 128, 32, 8, 4),
    ("sm_90", "rich"): Config(128, 128, 64, 8, 4),
    # Sums in tensor memory, but the statistics need them in registers.
    ("sm_100", "plain"): Config(128, 128, 64, 8, 3),
    ("sm_100", "rich"): Config(128, 128, 64, 8, 3),
    # 48 KiB of shared memory fits every GPU from sm_80 on.
    ("other", "plain"): Config(128, 128, 32, 8, 4),
    ("other", "rich"): Config(128, 128, 32, 8, 4),
    # Float32 products run on the ordinary units, which a smaller tile keeps busy.
    ("sm_90", "float32"): Config(64, 64, 32, 4, 2),
    ("other", "float32"): Config(64, 64, 16, 4, 3),
}
SPLIT_COLUMNS = 8192
"""Vocabulary columns of a split: enough splits to fill a GPU with few rows, few enough that the partials stay small."""
MERGE_ROWS = 128

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def stats_kernel(
    hidden,
    weight,
    bias,
    low_rank,
    lora_b,
    target,
    temperature,
    partial,
    picked,
    N,
    H,
    V,
    weight_row,
    weight_column,
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
    """partial [S, 3, N]: m, sum e^(z - m), sum e^(z - m) (z - m). picked [N]: z_target, by the program that owns it."""
    row_tiles = tl.cdiv(N, BLOCK_M)
    split = tl.program_id(0) // row_tiles  # neighbours share a split, so its weight rows stay in the L2 cache
    rows = ((tl.program_id(0) % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_mask = rows < N
    y = tl.load(target + rows, mask=row_mask, other=-1).to(tl.int32)
    heat = tl.load(temperature + rows, mask=row_mask, other=1.0)
    m = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_M,), dtype=tl.float32)
    first = split * split_tiles
    for tile in range(first, tl.minimum(first + split_tiles, tl.cdiv(V, BLOCK_V))):
        columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
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
            weight_row,
            weight_column,
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
        at_target = tl.sum(tl.where(columns[None, :] == y[:, None], z, 0.0), axis=1)
        tl.store(picked + rows, at_target, mask=(y >= tile * BLOCK_V) & (y < tile * BLOCK_V + BLOCK_V))
        m, total, weighted = online_update(z, m, total, weighted, WITH_ENTROPY)
    out = partial + split.to(tl.int64) * 3 * N + rows
    tl.store(out, m, mask=row_mask)
    tl.store(out + N, total, mask=row_mask)
    tl.store(out + 2 * N, weighted, mask=row_mask)


@triton.jit
def _merge_kernel(partial, merged, N, splits, BLOCK: tl.constexpr):
    """merged [3, N] from partial [S, 3, N], split after split."""
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = rows < N
    m = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        at = partial + split * 3 * N + rows
        other = tl.load(at, mask=mask, other=LOWEST)
        other_total = tl.load(at + N, mask=mask, other=0.0)
        other_weighted = tl.load(at + 2 * N, mask=mask, other=0.0)
        highest = tl.maximum(m, other)
        weighted = (weighted + (m - highest) * total) * tl.exp(m - highest)
        weighted += (other_weighted + (other - highest) * other_total) * tl.exp(other - highest)
        total = total * tl.exp(m - highest) + other_total * tl.exp(other - highest)
        m = highest
    tl.store(merged + rows, m, mask=mask)
    tl.store(merged + N + rows, total, mask=mask)
    tl.store(merged + 2 * N + rows, weighted, mask=mask)


@triton.jit
def dlogits_kernel(
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
    weight_row,
    weight_column,
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
    columns = start + local
    row_mask = rows < N
    y = tl.load(target + rows, mask=row_mask, other=-1).to(tl.int32)
    heat = tl.load(temperature + rows, mask=row_mask, other=1.0)
    z, cap_slope = logits_tile(
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
        weight_row,
        weight_column,
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
        dz = dz * cap_slope
    out = dlogits + rows[:, None] * width + local[None, :]
    tl.store(out, dz.to(dlogits.dtype.element_ty), mask=row_mask[:, None] & (local < width)[None, :])


# ---- launches ------------------------------------------------------------------------------------------------------


def architecture_of(device: torch.device) -> str:
    """ "sm_90" and the like on NVIDIA; "other" elsewhere, and in the interpreter."""
    if device.type != "cuda" or torch.version.hip:
        return "other"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def config_of(head: Head, architecture: str) -> Config:
    """The row of the table, by the head alone and never by the batch or the results asked for: all share their bits."""
    kind = "float32" if head.compute == torch.float32 else "rich" if head.lora or head.softcap else "plain"
    return CONFIGS.get((architecture, kind), CONFIGS["other", kind])


def splits_of(vocabulary: int, config: Config) -> tuple[int, int]:
    """(splits, vocabulary tiles of each): of V alone, so that a row's bits do not depend on the batch."""
    tiles = triton.cdiv(vocabulary, config.columns)
    each = max(1, SPLIT_COLUMNS // config.columns)
    return triton.cdiv(tiles, each), each


def _head_arguments(head: Head, block: RowBlock) -> tuple[Tensor, ...]:
    """hidden, weight, bias, low_rank, lora_b, target, temperature; others stand in for those that are absent."""
    heat = block.temperature
    if not isinstance(heat, Tensor):
        heat = torch.full((block.padded,), heat, dtype=torch.float32, device=block.hidden.device)
    bias = block.hidden if head.bias is None else head.bias.contiguous()
    low_rank, lora_b = (heat, heat) if head.lora is None else (block.low_rank, head.lora.b.contiguous())
    return block.hidden, head.weight, bias, low_rank, lora_b, block.target, heat


def options_of(head: Head, config: Config, with_entropy: bool) -> dict[str, object]:
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
    config, (vocabulary, hidden_size) = config_of(head, architecture_of(head.weight.device)), head.weight.shape
    splits, each = splits_of(vocabulary, config)
    result = empty_stats(index.shape[0], hidden, torch.float32, with_entropy)
    for first, last in Ranges.of(head, workspace, index.shape[0]).rows:
        block = row_block(head, hidden, target, temperature, index[first:last])
        rows = block.padded
        partial = torch.empty(splits, 3, rows, dtype=torch.float32, device=hidden.device)
        merged = torch.zeros(4, rows, dtype=torch.float32, device=hidden.device)
        stats_kernel[(triton.cdiv(rows, config.rows) * splits,)](
            *_head_arguments(head, block),
            partial,
            merged[3],
            rows,
            hidden_size,
            vocabulary,
            *head.weight.stride(),
            head.lora.a.shape[0] if head.lora else 0,
            each,
            head.softcap or 1.0,
            head.logit_scale,
            **options_of(head, config, with_entropy),
        )
        _merge_kernel[(triton.cdiv(rows, MERGE_ROWS),)](partial, merged, rows, splits, BLOCK=MERGE_ROWS)
        result.take(slice(first, last), RowStats(*merged))
    return result


def triton_dlogits(head: Head, ranges: Ranges) -> FormDlogits:
    """`torch_dlogits` by the kernel: the tile comes in the products' own dtype, 16 bits where they are."""
    config, (vocabulary, hidden_size) = config_of(head, architecture_of(head.weight.device)), head.weight.shape
    room = torch.empty(ranges.tallest * ranges.widest, dtype=head.compute, device=head.weight.device)

    def form(block: RowBlock, slopes: Slopes, _: Tensor, start: int, stop: int) -> Tensor:
        rows, width = block.padded, stop - start
        dlogits = room[: rows * width].view(rows, width)
        dlogits_kernel[(triton.cdiv(rows, config.rows) * triton.cdiv(width, config.columns),)](
            *_head_arguments(head, block),
            slopes.shift,
            slopes.a,
            slopes.a if slopes.b is None else slopes.b,
            slopes.at_target,
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
            **options_of(head, config, slopes.b is not None),
        )
        return dlogits.to(head.operand)

    return form
