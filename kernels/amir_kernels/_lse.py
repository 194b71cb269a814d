"""Triton helpers of the head: logits of a tile, and the running log-sum-exp over tiles."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
"""Start of the running maximum: finite, so that a tile of -inf gives e^(-inf - m) = 0."""
DEEPEST = tl.constexpr(-1e4)
"""z - m where it is multiplied by e^(z - m), which is 0 long before: -inf * 0 cannot arise."""


@triton.jit
def tanh(x):
    """(1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; near 0, where that cancels, the Taylor series to x^11."""
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    far = tl.where(x < 0, -far, far)
    y = x * x
    series = 62.0 / 2835 - y * (1382.0 / 155925)
    series = 1.0 - y * (1.0 / 3 - y * (2.0 / 15 - y * (17.0 / 315 - y * series)))
    return tl.where(tl.abs(x) < 0.3, x * series, far)


@triton.jit
def add_product(
    acc,
    left,
    right,
    rows,
    columns,
    row_mask,
    column_mask,
    depth,
    right_row,
    right_column,
    COMPUTE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc [BLOCK_M, BLOCK_V] + left[rows] @ right[columns].T over `depth` entries, in float32; left is row-major."""
    k = tl.arange(0, BLOCK_K)
    left_at = left + rows[:, None] * depth + k[None, :]
    right_at = right + columns.to(tl.int64)[:, None] * right_row + k[None, :] * right_column
    for start in range(0, depth, BLOCK_K):
        k_mask = k < depth - start
        a = tl.load(left_at, mask=row_mask[:, None] & k_mask[None, :], other=0.0).to(COMPUTE)
        b = tl.load(right_at, mask=column_mask[:, None] & k_mask[None, :], other=0.0).to(COMPUTE)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        left_at += BLOCK_K
        right_at += BLOCK_K * right_column
    return acc


@triton.jit
def add_low_rank_product(
    acc,
    low_rank,
    lora_b,
    rows,
    columns,
    row_mask,
    column_mask,
    rank,
    COMPUTE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc + low_rank[rows] @ lora_b[columns].T; float32 factors are split in two halves where products take 16 bits."""
    k = tl.arange(0, BLOCK_K)
    for start in tl.range(0, rank, BLOCK_K, num_stages=1):
        k_mask = k < rank - start
        a_at = low_rank + rows[:, None] * rank + (start + k)[None, :]
        b_at = lora_b + columns.to(tl.int64)[:, None] * rank + (start + k)[None, :]
        a = tl.load(a_at, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        b = tl.trans(tl.load(b_at, mask=column_mask[:, None] & k_mask[None, :], other=0.0).to(tl.float32))
        a_high, b_high = a.to(COMPUTE), b.to(COMPUTE)
        acc = tl.dot(a_high, b_high, acc, input_precision="ieee")
        if COMPUTE.primitive_bitwidth < 32:
            acc = tl.dot((a - a_high.to(tl.float32)).to(COMPUTE), b_high, acc)
            acc = tl.dot(a_high, (b - b_high.to(tl.float32)).to(COMPUTE), acc)
    return acc


@triton.jit
def logits_tile(
    hidden,
    weight,
    bias,
    low_rank,
    lora_b,
    temperature,
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
    COMPUTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """z [BLOCK_M, BLOCK_V] in float32, -inf past V, and the derivative of the cap (1 without one).

    With 16-bit products the derivative comes from z itself, which saves a second tile of registers.
    """
    column_mask = columns < V
    acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    acc = add_product(
        acc, hidden, weight, rows, columns, row_mask, column_mask, H, weight_row, weight_column, COMPUTE, BLOCK_K
    )
    if HAS_LORA:
        acc = add_low_rank_product(acc, low_rank, lora_b, rows, columns, row_mask, column_mask, rank, COMPUTE, BLOCK_K)
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    acc *= logit_scale
    if CAPPED:
        acc = tanh(acc / softcap)
        if COMPUTE.primitive_bitwidth == 32:
            slope = 1 - acc * acc
        acc *= softcap
    acc = acc / temperature[:, None]
    if CAPPED and COMPUTE.primitive_bitwidth < 32:
        t = acc * (temperature / softcap)[:, None]
        slope = 1 - t * t
    if not CAPPED:
        slope = 1.0
    return tl.where(column_mask[None, :], acc, float("-inf")), slope


@triton.jit
def online_update(z, m, total, weighted, WITH_ENTROPY: tl.constexpr):
    """The running (max m, sum e^(z - m), sum e^(z - m) (z - m)) after the columns of z."""
    highest = tl.maximum(m, tl.max(z, axis=1))
    fade = tl.exp(m - highest)
    d = z - highest[:, None]
    e = tl.exp(d)
    if WITH_ENTROPY:
        weighted = (weighted + (m - highest) * total) * fade + tl.sum(e * tl.maximum(d, DEEPEST), axis=1)
    return highest, total * fade + tl.sum(e, axis=1), weighted
