"""The head in Triton: forward statistics by row tile and vocabulary split, and the tiles of dlogits for the backward.

As many programs as the GPU holds share out the work items (row tile, split of the vocabulary). An item sweeps its split
in one loop over vocabulary tiles and depth, so that copies run ahead across tiles, and stores its part of the
statistics; a second kernel merges the splits in order. Splits depend on V alone and nothing is added atomically, so a
row gets the same bits in any batch and from any program. The backward kernel writes dL/dx of a tile in the products'
dtype; the products that follow are the vendor's. Where the forward has kept its logits, no product forms them again.

Legend: N rows of a block, H hidden size, V vocabulary, S splits, r LoRA rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .backward import FormDlogits, Slopes
from .head import Head, Ranges, RowBlock, Rows, round_up, scratch_bytes
from .torch_backend import RowStats, empty_stats
from .triton_kernels import (
    DEEPEST,
    LOWEST,
    add_exactly,
    exp,
    finish_logits,
    load_tile,
    online_update,
    origin_of,
    raw_logits,
    store_parts,
)
from .triton_tiles import LARGEST_TILE, Config, architecture_of, config_of, splits_of

MERGE_ROWS = 128
KEPT_TILE = 4, 512
"""Rows and columns of a program that reads kept logits: sixteen numbers a thread, four at a time."""

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
    kept,
    N,
    H,
    V,
    weight_row,
    weight_column,
    rank,
    kept_row,
    splits,
    split_tiles,
    group,
    softcap,
    logit_scale,
    COMPUTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    KEEP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partial [S, 3, N]: m, sum e^(z - m), sum e^(z - m) (z - m). picked [N]: z_target, by the item that owns it.

    KEEP: kept [N, kept_row] gets the raw logits, before scale, cap and temperature, in whole tiles.
    Items run `group` row tiles through a split before the next split: those rows and that split stay in the L2 cache.
    """
    row_tiles = tl.cdiv(N, BLOCK_M)
    steps = tl.maximum(tl.cdiv(H, BLOCK_K), 1)
    hidden_at = origin_of(hidden, H, 1, BLOCK_M, BLOCK_K, DESCRIPTORS)
    weight_at = origin_of(weight, weight_row, weight_column, BLOCK_V, BLOCK_K, DESCRIPTORS)
    for item in range(tl.program_id(0), row_tiles * splits, tl.num_programs(0)):
        first_tile = item // (group * splits) * group
        tall = tl.minimum(row_tiles - first_tile, group)
        within = item % (group * splits)
        row = (first_tile + within % tall) * BLOCK_M
        split = within // tall
        rows = row + tl.arange(0, BLOCK_M)
        y = tl.load(target + rows, mask=rows < N, other=-1).to(tl.int32)
        m = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        lost = tl.zeros((BLOCK_M,), dtype=tl.float32)
        weighted = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
        column = split * split_tiles * BLOCK_V
        tiles = tl.minimum(split_tiles, tl.cdiv(V, BLOCK_V) - split * split_tiles)
        step = 0
        for _ in range(tiles * steps):
            k = step * BLOCK_K
            a = load_tile(hidden_at, row, k, N, H, H, 1, BLOCK_M, BLOCK_K, DESCRIPTORS)
            b = load_tile(weight_at, column, k, V, H, weight_row, weight_column, BLOCK_V, BLOCK_K, DESCRIPTORS)
            acc = tl.dot(a.to(COMPUTE), tl.trans(b.to(COMPUTE)), acc, input_precision="ieee")
            last = step == steps - 1
            if last:
                columns = column + tl.arange(0, BLOCK_V)
                x = raw_logits(acc, bias, low_rank, lora_b, rows, columns, N, V, rank, COMPUTE, HAS_BIAS, HAS_LORA)
                if KEEP:
                    store_parts(kept + tl.cast(row, tl.int64) * kept_row + column, x, kept_row, 8)
                heat = tl.load(temperature + rows, mask=rows < N, other=1.0)
                z, _cap_slope = finish_logits(x, heat, softcap, logit_scale, COMPUTE, CAPPED)
                if column + BLOCK_V > V:
                    z = tl.where((columns < V)[None, :], z, float("-inf"))
                owned = (y >= column) & (y < column + BLOCK_V)
                if tl.max(owned.to(tl.int32), axis=0) > 0:
                    at_target = tl.sum(tl.where(columns[None, :] == y[:, None], z, 0.0), axis=1)
                    tl.store(picked + rows, at_target, mask=owned)
                m, total, lost, weighted = online_update(z, m, total, lost, weighted, COMPUTE, WITH_ENTROPY)
                acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
            # outside the branch: the next copies start before this tile's statistics are taken
            step = tl.where(last, 0, step + 1)
            column = tl.where(last, column + BLOCK_V, column)
        out = partial + tl.cast(split, tl.int64) * 3 * N + rows
        tl.store(out, m, mask=rows < N)
        tl.store(out + N, total + lost, mask=rows < N)
        tl.store(out + 2 * N, weighted, mask=rows < N)


@triton.jit
def merge_kernel(partial, merged, N, splits, BLOCK: tl.constexpr):
    """merged [3, N] from partial [S, 3, N], split after split."""
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = rows < N
    m = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    lost = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        at = partial + tl.cast(split, tl.int64) * 3 * N + rows
        other = tl.load(at, mask=mask, other=LOWEST)
        other_total = tl.load(at + N, mask=mask, other=0.0)
        other_weighted = tl.load(at + 2 * N, mask=mask, other=0.0)
        highest = tl.maximum(m, other)
        fade, other_fade = tl.exp(m - highest), tl.exp(other - highest)
        weighted = (weighted + (m - highest) * total) * fade
        weighted += (other_weighted + (other - highest) * other_total) * other_fade
        total, lost = add_exactly(total * fade, other_total * other_fade + lost * fade)
        m = highest
    tl.store(merged + rows, m, mask=mask)
    tl.store(merged + N + rows, total + lost, mask=mask)
    tl.store(merged + 2 * N + rows, weighted, mask=mask)


@triton.jit
def dlogits_of(
    x,
    is_target,
    heat,
    m,
    a,
    b,
    own,
    softcap,
    logit_scale,
    COMPUTE: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    """e^(z - m) (a + b (z - m)), at the target its own value, times the cap's derivative; from raw logits x."""
    z, cap_slope = finish_logits(x, heat, softcap, logit_scale, COMPUTE, CAPPED)
    d = tl.maximum(z - m[:, None], DEEPEST)
    slope = a[:, None]
    if WITH_ENTROPY:
        slope = slope + b[:, None] * d
    dz = tl.where(is_target, own[:, None], exp(d) * slope)
    if CAPPED:
        dz = dz * cap_slope
    return dz


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
    DESCRIPTORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dlogits [N, width] of the columns from `start`, in its own dtype."""
    row_tiles = tl.cdiv(N, BLOCK_M)
    row = (tl.program_id(0) % row_tiles) * BLOCK_M
    first = (tl.program_id(0) // row_tiles) * BLOCK_V
    hidden_at = origin_of(hidden, H, 1, BLOCK_M, BLOCK_K, DESCRIPTORS)
    weight_at = origin_of(weight, weight_row, weight_column, BLOCK_V, BLOCK_K, DESCRIPTORS)
    acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    for step in range(tl.cdiv(H, BLOCK_K)):
        k = step * BLOCK_K
        a = load_tile(hidden_at, row, k, N, H, H, 1, BLOCK_M, BLOCK_K, DESCRIPTORS)
        b = load_tile(weight_at, start + first, k, V, H, weight_row, weight_column, BLOCK_V, BLOCK_K, DESCRIPTORS)
        acc = tl.dot(a.to(COMPUTE), tl.trans(b.to(COMPUTE)), acc, input_precision="ieee")
    rows = row + tl.arange(0, BLOCK_M)
    local = first + tl.arange(0, BLOCK_V)
    columns = start + local
    y = tl.load(target + rows, mask=rows < N, other=-1).to(tl.int32)
    heat = tl.load(temperature + rows, mask=rows < N, other=1.0)
    x = raw_logits(acc, bias, low_rank, lora_b, rows, columns, N, V, rank, COMPUTE, HAS_BIAS, HAS_LORA)
    m = tl.load(shift + rows, mask=rows < N, other=float("inf"))
    a = tl.load(slope_a + rows, mask=rows < N, other=0.0)
    b = tl.load(slope_b + rows, mask=rows < N, other=0.0)
    own = tl.load(at_target + rows, mask=rows < N, other=0.0)
    is_target = columns[None, :] == y[:, None]
    dz = dlogits_of(x, is_target, heat, m, a, b, own, softcap, logit_scale, COMPUTE, CAPPED, WITH_ENTROPY)
    out = dlogits + rows.to(tl.int64)[:, None] * width + local[None, :]
    tl.store(out, dz.to(dlogits.dtype.element_ty), mask=(rows < N)[:, None] & (local < width)[None, :])


@triton.jit
def kept_dlogits_kernel(
    kept,
    target,
    temperature,
    shift,
    slope_a,
    at_target,
    dlogits,
    N,
    kept_row,
    start,
    width,
    softcap,
    logit_scale,
    COMPUTE: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """`dlogits_kernel` from the raw logits that the forward kept."""
    row_tiles = tl.cdiv(N, BLOCK_M)
    rows = (tl.program_id(0) % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    local = (tl.program_id(0) // row_tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows < N)[:, None] & (local < width)[None, :]
    x = tl.load(kept + rows.to(tl.int64)[:, None] * kept_row + (start + local)[None, :], mask=inside, other=0.0)
    y = tl.load(target + rows, mask=rows < N, other=-1).to(tl.int32)
    heat = tl.load(temperature + rows, mask=rows < N, other=1.0)
    m = tl.load(shift + rows, mask=rows < N, other=float("inf"))
    a = tl.load(slope_a + rows, mask=rows < N, other=0.0)
    own = tl.load(at_target + rows, mask=rows < N, other=0.0)
    is_target = (start + local)[None, :] == y[:, None]
    dz = dlogits_of(x, is_target, heat, m, a, a, own, softcap, logit_scale, COMPUTE, CAPPED, False)
    tl.store(
        dlogits + rows.to(tl.int64)[:, None] * width + local[None, :], dz.to(dlogits.dtype.element_ty), mask=inside
    )


# ---- launches ------------------------------------------------------------------------------------------------------


def programs_of(items: int, config: Config, multiprocessors: int) -> int:
    """Programs of the forward: as many as run at once, at most one per item."""
    return max(1, min(items, multiprocessors * config.programs))


def group_of(hidden_size: int, itemsize: int, config: Config, cache_bytes: int) -> int:
    """Row tiles of a group: their hidden states fill a third of the L2 cache. The order of items, never their bits."""
    return max(1, cache_bytes // 3 // (config.rows * max(1, hidden_size) * itemsize))


def _device_size(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of L2 cache)"""
    if device.type != "cuda":
        return 1, 2**20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size


def forward_rows(head: Head, rows: int, workspace: int, splits: int) -> int:
    """Rows of a forward block, a multiple of 16: its copy of the hidden states and its partial statistics are scratch.

    Within what a call of this many rows may use, backward included.
    """
    hidden_size = head.weight.shape[1]
    per_row = hidden_size * head.operand.itemsize + 12 * splits + 32
    if head.lora:
        per_row += 4 * (hidden_size + head.lora.a.shape[0])
    return max(16, scratch_bytes(head, rows, workspace) // per_row // 16 * 16)


def _heat(block: RowBlock) -> Tensor:
    """[R]"""
    if isinstance(block.temperature, Tensor):
        return block.temperature
    return torch.full((block.padded,), block.temperature, dtype=torch.float32, device=block.hidden.device)


def _head_arguments(head: Head, block: RowBlock, config: Config) -> tuple[Any, ...]:
    """hidden, weight, bias, low_rank, lora_b, target, temperature; others stand in for those that are absent."""
    heat = _heat(block)
    bias = block.hidden if head.bias is None else head.bias.contiguous()
    low_rank, lora_b = (heat, heat) if head.lora is None else (block.low_rank, head.lora.b.contiguous())
    hidden, weight = block.hidden, head.weight
    if config.descriptors:
        hidden = TensorDescriptor.from_tensor(hidden, [config.rows, config.depth])
        weight = TensorDescriptor.from_tensor(weight, [config.columns, config.depth])
    return hidden, weight, bias, low_rank, lora_b, block.target, heat


def options_of(head: Head, config: Config, with_entropy: bool) -> dict[str, object]:
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
    }


def room_for_logits(head: Head, rows: int) -> Tensor:
    """Float32 `[R, V]` in whole tiles of the largest size."""
    sizes = round_up(rows, LARGEST_TILE[0]), round_up(head.weight.shape[0], LARGEST_TILE[1])
    return torch.empty(sizes, dtype=torch.float32, device=head.weight.device)


def block_stats(head: Head, block: RowBlock, with_entropy: bool, kept: Tensor | None = None) -> RowStats:
    """Statistics of a block's rows; the raw logits go to `kept` where it is given (of `room_for_logits`)."""
    config, (vocabulary, hidden_size) = config_of(head, architecture_of(head.weight.device)), head.weight.shape
    splits, each = splits_of(vocabulary, config)
    multiprocessors, cache_bytes = _device_size(block.hidden.device)
    rows = block.padded
    partial = torch.empty(splits, 3, rows, dtype=torch.float32, device=block.hidden.device)
    merged = torch.zeros(4, rows, dtype=torch.float32, device=block.hidden.device)
    items = triton.cdiv(rows, config.rows) * splits
    stats_kernel[(programs_of(items, config, multiprocessors),)](
        *_head_arguments(head, block, config),
        partial,
        merged[3],
        partial if kept is None else kept,
        rows,
        hidden_size,
        vocabulary,
        *head.weight.stride(),
        head.lora.a.shape[0] if head.lora else 0,
        0 if kept is None else kept.stride(0),
        splits,
        each,
        group_of(hidden_size, head.operand.itemsize, config, cache_bytes),
        head.softcap or 1.0,
        head.logit_scale,
        KEEP=kept is not None,
        **options_of(head, config, with_entropy),
    )
    merge_kernel[(triton.cdiv(rows, MERGE_ROWS),)](partial, merged, rows, splits, BLOCK=MERGE_ROWS)
    return RowStats(*merged)


def triton_row_stats(head: Head, rows: Rows, workspace: int, with_entropy: bool) -> RowStats:
    """`row_stats` of the torch backend, by the kernels."""
    config, count = config_of(head, architecture_of(head.weight.device)), rows.positions.shape[0]
    result = empty_stats(count, rows.hidden, torch.float32, with_entropy)
    tall = forward_rows(head, count, workspace, splits_of(head.weight.shape[0], config)[0])
    for first in range(0, count, tall):
        last = min(first + tall, count)
        result.take(slice(first, last), block_stats(head, rows.block(head, first, last), with_entropy))
    return result.of(slice(None))


def triton_dlogits(head: Head, ranges: Ranges) -> FormDlogits:
    """`torch_dlogits` by the kernel: the tile comes in the products' own dtype, 16 bits where they are."""
    config, (vocabulary, hidden_size) = config_of(head, architecture_of(head.weight.device)), head.weight.shape
    room = torch.empty(ranges.tallest * ranges.widest, dtype=head.compute, device=head.weight.device)

    def form(block: RowBlock, slopes: Slopes, _: Tensor, start: int, stop: int) -> Tensor:
        rows, width = block.padded, stop - start
        dlogits = room[: rows * width].view(rows, width)
        dlogits_kernel[(triton.cdiv(rows, config.rows) * triton.cdiv(width, config.columns),)](
            *_head_arguments(head, block, config),
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


def kept_dlogits(head: Head, ranges: Ranges, kept: Tensor) -> FormDlogits:
    """`triton_dlogits` from the raw logits that `block_stats` kept of the block."""
    room = torch.empty(ranges.tallest * ranges.widest, dtype=head.compute, device=head.weight.device)

    def form(block: RowBlock, slopes: Slopes, _: Tensor, start: int, stop: int) -> Tensor:
        rows, width = block.padded, stop - start
        dlogits = room[: rows * width].view(rows, width)
        kept_dlogits_kernel[(triton.cdiv(rows, KEPT_TILE[0]) * triton.cdiv(width, KEPT_TILE[1]),)](
            kept,
            block.target,
            _heat(block),
            slopes.shift,
            slopes.a,
            slopes.at_target,
            dlogits,
            rows,
            kept.stride(0),
            start,
            width,
            head.softcap or 1.0,
            head.logit_scale,
            COMPUTE=_DTYPES[head.compute],
            CAPPED=head.softcap is not None,
            BLOCK_M=KEPT_TILE[0],
            BLOCK_V=KEPT_TILE[1],
        )
        return dlogits.to(head.operand)

    return form
