"""Triton helpers of the head: its operands, what a product becomes as logits, their store, the running log-sum-exp."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
"""Start of the running maximum: finite, so that a tile of -inf gives e^(-inf - m) = 0."""
DEEPEST = tl.constexpr(-1e4)
"""z - m where it is multiplied by e^(z - m), which is 0 long before: -inf * 0 cannot arise."""
RANK_BLOCK = tl.constexpr(16)
"""LoRA ranks of a product: the least that matrix instructions take."""


@triton.jit
def exp(x):
    """e^x, 0 below the normal numbers: `tl.exp` spends three instructions more on those."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def tanh(x):
    """(1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; near 0, where that cancels, the Taylor series to x^11."""
    e = exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    far = tl.where(x < 0, -far, far)
    y = x * x
    series = 62.0 / 2835 - y * (1382.0 / 155925)
    series = 1.0 - y * (1.0 / 3 - y * (2.0 / 15 - y * (17.0 / 315 - y * series)))
    return tl.where(tl.abs(x) < 0.3, x * series, far)


@triton.jit
def tanh_and_slope(x):
    """tanh x and 1 - tanh^2 x, each within two roundings or so: what float32 products are worth.

    From 1 on 1 - 2 e / (1 + e) with e = e^-2|x|, whose slope 4 e / (1 + e)^2 does not cancel; below 1 a convergent of
    Lambert's continued fraction, as a correction to x.
    """
    size, y = tl.abs(x), x * x
    e = exp(-2 * size)
    near = size - size * (y * (3465 + y * (189 + y)) / (10395 + y * (4725 + y * (210 + y))))
    t = tl.where(size < 1, near, 1 - 2 * e / (1 + e))
    slope = tl.where(size < 1, 1 - t * t, 4 * e / ((1 + e) * (1 + e)))
    return tl.where(x < 0, -t, t), slope


@triton.jit
def add_exactly(total, more):
    """total + more, and what this lost in rounding: exact where total is the larger, else within a rounding."""
    both = total + more
    return both, more - (both - total)


@triton.jit
def origin_of(matrix, row_stride, column_stride, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TENSOR: tl.constexpr):
    """What `load_tile` starts from: a tensor descriptor as it is, or the pointers of the matrix's first tile."""
    if TENSOR:
        return matrix
    else:
        lane, k = tl.arange(0, BLOCK_ROWS).to(tl.int64), tl.arange(0, BLOCK_K).to(tl.int64)
        return matrix + lane[:, None] * row_stride + k[None, :] * column_stride


@triton.jit
def load_tile(
    origin,
    first,
    start,
    rows,
    depth,
    row_stride,
    column_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TENSOR: tl.constexpr,
):
    """The tile at (first, start) of a `[rows, depth]` matrix, zeros past its edges."""
    if TENSOR:
        return origin.load([first, start])
    else:
        inside = (first + tl.arange(0, BLOCK_ROWS) < rows)[:, None] & (start + tl.arange(0, BLOCK_K) < depth)[None, :]
        at = origin + (tl.cast(first, tl.int64) * row_stride + tl.cast(start, tl.int64) * column_stride)
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def add_low_rank_product(acc, low_rank, lora_b, rows, columns, N, V, rank, COMPUTE: tl.constexpr):
    """acc + low_rank[rows] @ lora_b[columns].T in float32.

    Where products take 16 bits each factor is the sum of two halves, a + a' and b + b': the four products are columns
    a, a', a, a' times b, b, b', b' of one, which takes one accumulator and not four.
    """
    k = tl.arange(0, RANK_BLOCK)
    for start in tl.range(0, rank, RANK_BLOCK, num_stages=1):
        k_mask = (k < rank - start)[None, :]
        a_at = low_rank + rows.to(tl.int64)[:, None] * rank + (start + k)[None, :]
        b_at = lora_b + columns.to(tl.int64)[:, None] * rank + (start + k)[None, :]
        a = tl.load(a_at, mask=(rows < N)[:, None] & k_mask, other=0.0)
        b = tl.load(b_at, mask=(columns < V)[:, None] & k_mask, other=0.0).to(tl.float32)
        if COMPUTE.primitive_bitwidth == 32:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        else:
            a_halves = tl.join(a.to(COMPUTE), (a - a.to(COMPUTE).to(tl.float32)).to(COMPUTE))
            b_high, b_low = b.to(COMPUTE), (b - b.to(COMPUTE).to(tl.float32)).to(COMPUTE)
            left = tl.reshape(tl.join(a_halves, a_halves), (a.shape[0], 4 * RANK_BLOCK))
            right = tl.join(tl.join(b_high, b_high), tl.join(b_low, b_low))
            acc = tl.dot(left, tl.trans(tl.reshape(right, (b.shape[0], 4 * RANK_BLOCK))), acc)
    return acc


@triton.jit
def raw_logits(
    acc,
    bias,
    low_rank,
    lora_b,
    rows,
    columns,
    N,
    V,
    rank,
    COMPUTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
):
    """acc + low_rank @ lora_b.T + bias of a tile, for acc = hidden @ weight.T, in float32."""
    if HAS_LORA:
        acc = add_low_rank_product(acc, low_rank, lora_b, rows, columns, N, V, rank, COMPUTE)
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def store_parts(at, x, row_stride, PARTS: tl.constexpr):
    """A tile to the matrix whose entry for its corner is at `at`, a part of its columns at a time.

    Whole rows are written through shared memory and registers, which have no room for more beside operands and sums.
    """
    if PARTS == 1:
        tl.store(at + tl.arange(0, x.shape[0])[:, None] * row_stride + tl.arange(0, x.shape[1])[None, :], x)
    else:
        half: tl.constexpr = x.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, half)), (0, 2, 1)))
        store_parts(at, left, row_stride, PARTS // 2)
        store_parts(at + half, right, row_stride, PARTS // 2)


@triton.jit
def finish_logits(x, heat, softcap, logit_scale, COMPUTE: tl.constexpr, CAPPED: tl.constexpr):
    """z from the raw logits x of a tile, and the cap's derivative 1 - tanh^2 (1 without one).

    With 16-bit products the derivative comes from z itself, which saves a second tile of registers. Columns past V are
    left to the caller.
    """
    slope = 1.0
    if CAPPED and COMPUTE.primitive_bitwidth == 32:
        t, slope = tanh_and_slope(x * (logit_scale / softcap))
        z = t * (softcap / heat)[:, None]
    elif CAPPED:
        z = tanh(x * (logit_scale / softcap)) * (softcap / heat)[:, None]
        t = z * (heat / softcap)[:, None]
        slope = 1 - t * t
    else:
        z = x * (logit_scale / heat)[:, None]
    return z, slope


@triton.jit
def online_update(z, m, total, lost, weighted, COMPUTE: tl.constexpr, WITH_ENTROPY: tl.constexpr):
    """The running (max m, sum e^(z - m), what this lost, sum e^(z - m) (z - m)) after the columns of z.

    Beside the 1 of a nearly certain token a tile of small terms would round to nothing, and 1 - p be their sum. Among
    16-bit inputs that is no loss, and not kept.
    """
    highest = tl.maximum(m, tl.max(z, axis=1))
    fade = exp(m - highest)
    d = z - highest[:, None]
    e = exp(d)
    if WITH_ENTROPY:
        weighted = (weighted + (m - highest) * total) * fade + tl.sum(e * tl.maximum(d, DEEPEST), axis=1)
    if COMPUTE.primitive_bitwidth == 32:
        total, lost = add_exactly(total * fade, tl.sum(e, axis=1) + lost * fade)
    else:
        total = total * fade + tl.sum(e, axis=1)
    return highest, total, lost, weighted
