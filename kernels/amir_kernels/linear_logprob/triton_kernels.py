"""The Triton kernels of the head, after the device functions that they share.

`stats_kernel` computes the forward's statistics for a row tile and a split of the vocabulary, and stores the raw logits
where they are kept. `merge_kernel` merges the splits in order. `dlogits_kernel` recomputes a tile of logits and writes
dL/dx, `kept_dlogits_kernel` does so from kept logits; `backward.py` has the formula.

Legend: N rows of a block, H hidden size, V vocabulary, S splits, r LoRA rank. Raw logits are those before scale, soft
cap and temperature.
"""

import triton
import triton.language as tl

MIN_SHIFT = tl.constexpr(-1e30)
"""Start of the running maximum: finite, so that a tile of -inf gives e^(-inf - m) = 0."""
MIN_EXPONENT = tl.constexpr(-1e4)
"""z - m where it is multiplied by e^(z - m), which is 0 long before: -inf * 0 cannot arise."""
RANK_BLOCK = tl.constexpr(16)
"""LoRA ranks of a product: the least that matrix instructions take."""


@triton.jit
def exp(x):
    """e^x, and 0 below the normal numbers, on which `tl.exp` spends three more instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def tanh(x):
    """(1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; near 0, where that cancels, the Taylor series to x^11."""
    e = exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    far = tl.where(x < 0, -far, far)
    y = x * x
    series = tl.fma(y, -1382.0 / 155925, 62.0 / 2835)
    series = tl.fma(-y, series, 17.0 / 315)
    series = tl.fma(-y, series, 2.0 / 15)
    series = tl.fma(-y, tl.fma(-y, series, 1.0 / 3), 1.0)
    return tl.where(tl.abs(x) < 0.3, x * series, far)


@triton.jit
def tanh_and_derivative(x):
    """tanh x and 1 - tanh^2 x, each within about two roundings, as float32 products deserve.

    From |x| = 1 on, tanh is 1 - 2 e / (1 + e) with e = e^-2|x|, and its derivative 4 e / (1 + e)^2 does not cancel.
    Below 1 it is a convergent of Lambert's continued fraction, as a correction to x.
    """
    size, y = tl.abs(x), x * x
    e = exp(-2 * size)
    divisor = tl.fma(y, tl.fma(y, 210 + y, 4725.0), 10395.0)
    near = tl.fma(-size, y * tl.fma(y, 189 + y, 3465.0) / divisor, size)
    t = tl.where(size < 1, near, 1 - 2 * e / (1 + e))
    derivative = tl.where(size < 1, tl.fma(-t, t, 1.0), 4 * e / ((1 + e) * (1 + e)))
    return tl.where(x < 0, -t, t), derivative


@triton.jit
def add_compensated(total, more):
    """total + more, and its rounding error: exact where total is the larger, else within a rounding."""
    both = total + more
    return both, more - (both - total)


@triton.jit
def tile_origin(
    matrix, row_stride, column_stride, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TENSOR: tl.constexpr
):
    """The origin that `load_tile` counts from: a tensor descriptor as it is, or pointers to the matrix's first tile."""
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
    """Stores a tile in the matrix whose entry for the tile's corner is at `at`, a part of its columns at a time.

    Whole rows are written through shared memory and registers, and the operands and sums leave room for a part only.
    """
    if PARTS == 1:
        tl.store(at + tl.arange(0, x.shape[0])[:, None] * row_stride + tl.arange(0, x.shape[1])[None, :], x)
    else:
        half: tl.constexpr = x.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, half)), (0, 2, 1)))
        store_parts(at, left, row_stride, PARTS // 2)
        store_parts(at + half, right, row_stride, PARTS // 2)


@triton.jit
def finish_logits(x, row_temperature, softcap, logit_scale, COMPUTE: tl.constexpr, CAPPED: tl.constexpr):
    """z from the raw logits x of a tile, and the cap's derivative 1 - tanh^2 (1 without a cap).

    With 16-bit products the derivative comes from z itself, which saves a second tile of registers. The caller masks
    the columns past V.
    """
    cap_grad = 1.0
    if CAPPED and COMPUTE.primitive_bitwidth == 32:
        t, cap_grad = tanh_and_derivative(x * (logit_scale / softcap))
        z = t * (softcap / row_temperature)[:, None]
    elif CAPPED:
        z = tanh(x * (logit_scale / softcap)) * (softcap / row_temperature)[:, None]
        t = z * (row_temperature / softcap)[:, None]
        cap_grad = tl.fma(-t, t, 1.0)
    else:
        z = x * (logit_scale / row_temperature)[:, None]
    return z, cap_grad


@triton.jit
def online_update(z, m, total, compensation, weighted, COMPUTE: tl.constexpr, WITH_ENTROPY: tl.constexpr):
    """The running (max m, sum e^(z - m), its rounding error, sum e^(z - m) (z - m)) after the columns of z.

    Beside the 1 of a nearly certain token a tile of small terms would round to nothing, and 1 - p is their sum: the
    rounding error is carried as a compensation. For 16-bit inputs it does not matter, and is left out.
    """
    highest = tl.maximum(m, tl.max(z, axis=1))
    rescale = exp(m - highest)
    d = z - highest[:, None]
    e = exp(d)
    if WITH_ENTROPY:
        weighted = (weighted + (m - highest) * total) * rescale + tl.sum(e * tl.maximum(d, MIN_EXPONENT), axis=1)
    if COMPUTE.primitive_bitwidth == 32:
        total, compensation = add_compensated(total * rescale, tl.sum(e, axis=1) + compensation * rescale)
    else:
        total = total * rescale + tl.sum(e, axis=1)
    return highest, total, compensation, weighted


# ---- kernels -------------------------------------------------------------------------------------------------------


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
    target_logit,
    kept_logits,
    N,
    H,
    V,
    weight_row_stride,
    weight_column_stride,
    rank,
    kept_row_stride,
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
    """partial [S, 3, N]: m, sum e^(z - m), sum e^(z - m) (z - m). target_logit [N]: z_target, by the item that owns it.

    A program takes work items (row tile, split of the vocabulary) in turn and sweeps the split in one loop over
    vocabulary tiles and depth, so that asynchronous copies run ahead across tiles. KEEP: kept_logits
    [N, kept_row_stride] gets the raw logits in whole tiles. Items run `group` row tiles through a split before the next
    split: those rows and that split stay in the L2 cache.
    """
    row_tiles = tl.cdiv(N, BLOCK_M)
    steps = tl.maximum(tl.cdiv(H, BLOCK_K), 1)
    hidden_at = tile_origin(hidden, H, 1, BLOCK_M, BLOCK_K, DESCRIPTORS)
    weight_at = tile_origin(weight, weight_row_stride, weight_column_stride, BLOCK_V, BLOCK_K, DESCRIPTORS)
    for item in range(tl.program_id(0), row_tiles * splits, tl.num_programs(0)):
        first_tile = item // (group * splits) * group
        tall = tl.minimum(row_tiles - first_tile, group)
        within = item % (group * splits)
        row = (first_tile + within % tall) * BLOCK_M
        split = within // tall
        rows = row + tl.arange(0, BLOCK_M)
        y = tl.load(target + rows, mask=rows < N, other=-1).to(tl.int32)
        m = tl.full((BLOCK_M,), MIN_SHIFT, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        compensation = tl.zeros((BLOCK_M,), dtype=tl.float32)
        weighted = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
        column = split * split_tiles * BLOCK_V
        tiles = tl.minimum(split_tiles, tl.cdiv(V, BLOCK_V) - split * split_tiles)
        step = 0
        for _ in range(tiles * steps):
            k = step * BLOCK_K
            a = load_tile(hidden_at, row, k, N, H, H, 1, BLOCK_M, BLOCK_K, DESCRIPTORS)
            b = load_tile(
                weight_at, column, k, V, H, weight_row_stride, weight_column_stride, BLOCK_V, BLOCK_K, DESCRIPTORS
            )
            acc = tl.dot(a.to(COMPUTE), tl.trans(b.to(COMPUTE)), acc, input_precision="ieee")
            last = step == steps - 1
            if last:
                columns = column + tl.arange(0, BLOCK_V)
                x = raw_logits(acc, bias, low_rank, lora_b, rows, columns, N, V, rank, COMPUTE, HAS_BIAS, HAS_LORA)
                if KEEP:
                    store_parts(kept_logits + tl.cast(row, tl.int64) * kept_row_stride + column, x, kept_row_stride, 8)
                row_temperature = tl.load(temperature + rows, mask=rows < N, other=1.0)
                z, _cap_grad = finish_logits(x, row_temperature, softcap, logit_scale, COMPUTE, CAPPED)
                if column + BLOCK_V > V:
                    z = tl.where((columns < V)[None, :], z, float("-inf"))
                owned = (y >= column) & (y < column + BLOCK_V)
                if tl.max(owned.to(tl.int32), axis=0) > 0:
                    at_target = tl.sum(tl.where(columns[None, :] == y[:, None], z, 0.0), axis=1)
                    tl.store(target_logit + rows, at_target, mask=owned)
                m, total, compensation, weighted = online_update(
                    z, m, total, compensation, weighted, COMPUTE, WITH_ENTROPY
                )
                acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
            # outside the branch: the next copies start before this tile's statistics are taken
            step = tl.where(last, 0, step + 1)
            column = tl.where(last, column + BLOCK_V, column)
        out = partial + tl.cast(split, tl.int64) * 3 * N + rows
        tl.store(out, m, mask=rows < N)
        tl.store(out + N, total + compensation, mask=rows < N)
        tl.store(out + 2 * N, weighted, mask=rows < N)


@triton.jit
def merge_kernel(partial, merged, N, splits, BLOCK: tl.constexpr):
    """merged [3, N] from partial [S, 3, N], added in the order of the splits whichever finished first."""
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = rows < N
    m = tl.full((BLOCK,), MIN_SHIFT, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    compensation = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        at = partial + tl.cast(split, tl.int64) * 3 * N + rows
        other = tl.load(at, mask=mask, other=MIN_SHIFT)
        other_total = tl.load(at + N, mask=mask, other=0.0)
        other_weighted = tl.load(at + 2 * N, mask=mask, other=0.0)
        highest = tl.maximum(m, other)
        rescale, other_rescale = tl.exp(m - highest), tl.exp(other - highest)
        weighted = (weighted + (m - highest) * total) * rescale
        weighted += (other_weighted + (other - highest) * other_total) * other_rescale
        total, compensation = add_compensated(total * rescale, other_total * other_rescale + compensation * rescale)
        m = highest
    tl.store(merged + rows, m, mask=mask)
    tl.store(merged + N + rows, total + compensation, mask=mask)
    tl.store(merged + 2 * N + rows, weighted, mask=mask)


@triton.jit
def logit_gradients(
    x,
    is_target,
    row_temperature,
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
    """e^(z - m) (a + b (z - m)) times the cap's derivative, from raw logits x; the target has its own value `own`."""
    z, cap_grad = finish_logits(x, row_temperature, softcap, logit_scale, COMPUTE, CAPPED)
    d = tl.maximum(z - m[:, None], MIN_EXPONENT)
    slope = a[:, None]
    if WITH_ENTROPY:
        slope = tl.fma(b[:, None] + tl.zeros_like(d), d, slope + tl.zeros_like(d))
    dz = tl.where(is_target, own[:, None], exp(d) * slope)
    if CAPPED:
        dz = dz * cap_grad
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
    coefficient_a,
    coefficient_b,
    at_target,
    dlogits,
    N,
    H,
    V,
    weight_row_stride,
    weight_column_stride,
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
    """dlogits [N, width] of the columns from `start`, in the dtype of `dlogits`, from recomputed logits."""
    row_tiles = tl.cdiv(N, BLOCK_M)
    row = (tl.program_id(0) % row_tiles) * BLOCK_M
    first = (tl.program_id(0) // row_tiles) * BLOCK_V
    hidden_at = tile_origin(hidden, H, 1, BLOCK_M, BLOCK_K, DESCRIPTORS)
    weight_at = tile_origin(weight, weight_row_stride, weight_column_stride, BLOCK_V, BLOCK_K, DESCRIPTORS)
    acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    for step in range(tl.cdiv(H, BLOCK_K)):
        k = step * BLOCK_K
        a = load_tile(hidden_at, row, k, N, H, H, 1, BLOCK_M, BLOCK_K, DESCRIPTORS)
        b = load_tile(
            weight_at, start + first, k, V, H, weight_row_stride, weight_column_stride, BLOCK_V, BLOCK_K, DESCRIPTORS
        )
        acc = tl.dot(a.to(COMPUTE), tl.trans(b.to(COMPUTE)), acc, input_precision="ieee")
    rows = row + tl.arange(0, BLOCK_M)
    local = first + tl.arange(0, BLOCK_V)
    columns = start + local
    y = tl.load(target + rows, mask=rows < N, other=-1).to(tl.int32)
    row_temperature = tl.load(temperature + rows, mask=rows < N, other=1.0)
    x = raw_logits(acc, bias, low_rank, lora_b, rows, columns, N, V, rank, COMPUTE, HAS_BIAS, HAS_LORA)
    m = tl.load(shift + rows, mask=rows < N, other=float("inf"))
    a = tl.load(coefficient_a + rows, mask=rows < N, other=0.0)
    b = tl.load(coefficient_b + rows, mask=rows < N, other=0.0)
    own = tl.load(at_target + rows, mask=rows < N, other=0.0)
    is_target = columns[None, :] == y[:, None]
    dz = logit_gradients(
        x, is_target, row_temperature, m, a, b, own, softcap, logit_scale, COMPUTE, CAPPED, WITH_ENTROPY
    )
    out = dlogits + rows.to(tl.int64)[:, None] * width + local[None, :]
    tl.store(out, dz.to(dlogits.dtype.element_ty), mask=(rows < N)[:, None] & (local < width)[None, :])


@triton.jit
def kept_dlogits_kernel(
    kept_logits,
    target,
    temperature,
    shift,
    coefficient_a,
    at_target,
    dlogits,
    N,
    kept_row_stride,
    start,
    width,
    softcap,
    logit_scale,
    COMPUTE: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """`dlogits_kernel` from the raw logits that `stats_kernel` kept, float32 [N, kept_row_stride]."""
    row_tiles = tl.cdiv(N, BLOCK_M)
    rows = (tl.program_id(0) % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    local = (tl.program_id(0) // row_tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows < N)[:, None] & (local < width)[None, :]
    x = tl.load(
        kept_logits + rows.to(tl.int64)[:, None] * kept_row_stride + (start + local)[None, :], mask=inside, other=0.0
    )
    y = tl.load(target + rows, mask=rows < N, other=-1).to(tl.int32)
    row_temperature = tl.load(temperature + rows, mask=rows < N, other=1.0)
    m = tl.load(shift + rows, mask=rows < N, other=float("inf"))
    a = tl.load(coefficient_a + rows, mask=rows < N, other=0.0)
    own = tl.load(at_target + rows, mask=rows < N, other=0.0)
    is_target = (start + local)[None, :] == y[:, None]
    dz = logit_gradients(x, is_target, row_temperature, m, a, a, own, softcap, logit_scale, COMPUTE, CAPPED, False)
    tl.store(
        dlogits + rows.to(tl.int64)[:, None] * width + local[None, :], dz.to(dlogits.dtype.element_ty), mask=inside
    )
