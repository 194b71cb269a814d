"""Triton kernels over groups: advantages, and sums over the pairs of each row. Imported only if Triton serves a call.

Legend: B rows sorted by group. Offsets are int64; every sum has a fixed order and there are no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._backend import device_guard
from ._groups import Segments

MAX_GROUP_BLOCK = 512
ROW_BLOCK = 32
COLUMN_BLOCK = 16
RESOURCES = {} if torch.version.hip else {"maxnreg": 255}
"""Launch options. Without a bound, ptxas spills a few registers where that lets one more program run at once."""


@triton.jit
def _known(reward):
    """Whether a reward is not NaN."""
    return reward == reward  # noqa: PLR0124


@triton.jit
def _group_advantage_kernel(
    rewards,
    offsets,
    advantages,
    EPS: tl.constexpr,
    BASELINE: tl.constexpr,
    SCALE: tl.constexpr,
    UNBIASED: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per group computes the least reward, the mean excess over it, squared deviations and the advantages.

    Where the rewards of a group differ by rounding only, the excesses are 0.
    """
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets + group)
    end = tl.load(offsets + group + 1)
    lane = tl.arange(0, BLOCK)

    lows = tl.full([BLOCK], float("inf"), tl.float64)
    highs = tl.full([BLOCK], float("-inf"), tl.float64)
    counts = tl.zeros([BLOCK], tl.float64)
    for first in range(start, end, BLOCK):
        r = tl.load(rewards + first + lane, mask=first + lane < end, other=float("nan"))
        lows = tl.minimum(lows, tl.where(_known(r), r, float("inf")))
        highs = tl.maximum(highs, tl.where(_known(r), r, float("-inf")))
        counts += _known(r).to(tl.float64)
    least = tl.min(lows, axis=0)
    most = tl.max(highs, axis=0)
    noise = ROUNDING * tl.maximum(tl.maximum(tl.abs(least), tl.abs(most)), 1.0)
    differ = tl.where(most - least > noise, 1.0, 0.0)
    count = tl.sum(counts, axis=0)

    excesses = tl.zeros([BLOCK], tl.float64)
    for first in range(start, end, BLOCK):
        r = tl.load(rewards + first + lane, mask=first + lane < end, other=float("nan"))
        excesses += tl.where(_known(r), (r - least) * differ, 0.0)
    mean_excess = tl.sum(excesses, axis=0) / tl.maximum(count, 1.0)

    squares = tl.zeros([BLOCK], tl.float64)
    for first in range(start, end, BLOCK):
        r = tl.load(rewards + first + lane, mask=first + lane < end, other=float("nan"))
        centered = tl.where(_known(r), (r - least) * differ - mean_excess, 0.0)
        squares += centered * centered
    if SCALE == "std":
        free = count - 1.0 if UNBIASED else count
        scale = tl.sqrt(tl.sum(squares, axis=0) / tl.maximum(free, 1.0)) + EPS
    elif SCALE == "bernoulli":
        success = tl.where(count > 0.0, least + mean_excess, 0.0)
        scale = tl.sqrt(success * (1.0 - success) + EPS)
    else:
        scale = mean_excess * 0.0 + 1.0

    for first in range(start, end, BLOCK):
        r = tl.load(rewards + first + lane, mask=first + lane < end, other=float("nan"))
        a = tl.where(_known(r), r, 0.0)
        if BASELINE != "none":
            a = tl.where(_known(r), (r - least) * differ - mean_excess, 0.0)
        if BASELINE == "leave_one_out":
            a = a * (count / tl.maximum(count - 1.0, 1.0))
        a = tl.where(a == 0.0, 0.0, a / scale)
        tl.store(advantages + first + lane, a, mask=first + lane < end)


def group_advantages(
    rewards: Tensor,
    offsets: Tensor,
    longest: int,
    baseline: str,
    scale: str,
    eps: float,
    unbiased: bool,
    rounding: float,
) -> Tensor:
    """Advantages of sorted float64 rewards `[B]`, NaN where not scorable. The caller applies the scale "batch"."""
    advantages = torch.empty_like(rewards)
    groups = offsets.numel() - 1
    if groups:
        block = min(triton.next_power_of_2(longest), MAX_GROUP_BLOCK)
        with device_guard(rewards):
            _group_advantage_kernel[(groups,)](
                rewards,
                offsets,
                advantages,
                EPS=eps,
                BASELINE=baseline,
                SCALE=scale,
                UNBIASED=unbiased,
                ROUNDING=rounding,
                BLOCK=block,
                **RESOURCES,
            )
    return advantages


@triton.jit
def _pass_at_k_kernel(rewards, offsets, advantages, k, BLOCK: tl.constexpr):
    """One program per group counts n scorable rows, c of them correct, and computes each row's contribution.

    prod_{t<k} (n-1-c'-t)^+ / (n-1-t) is the share of the k-subsets of the others that contain none of their c' correct
    rows; without its last factor it is the share for k - 1.
    """
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets + group)
    end = tl.load(offsets + group + 1)
    lane = tl.arange(0, BLOCK)

    knowns = tl.zeros([BLOCK], tl.float64)
    corrects = tl.zeros([BLOCK], tl.float64)
    for first in range(start, end, BLOCK):
        r = tl.load(rewards + first + lane, mask=first + lane < end, other=float("nan"))
        knowns += _known(r).to(tl.float64)
        corrects += (r == 1.0).to(tl.float64)
    count = tl.sum(knowns, axis=0)
    correct = tl.sum(corrects, axis=0)

    enough = tl.where(count > k, 1.0, 0.0)
    of_correct = count * 0.0 + 1.0
    of_wrong = count * 0.0 + 1.0
    before = of_wrong
    for draw in range(k):
        others = tl.maximum(count - 1.0 - draw, 1.0)
        before = of_wrong
        of_correct = of_correct * (tl.maximum(count - correct - draw, 0.0) / others)
        of_wrong = of_wrong * (tl.maximum(count - 1.0 - correct - draw, 0.0) / others)

    for first in range(start, end, BLOCK):
        r = tl.load(rewards + first + lane, mask=first + lane < end, other=float("nan"))
        a = enough * k * tl.where(r == 1.0, of_correct, of_wrong - before)
        tl.store(advantages + first + lane, tl.where(_known(r), a, 0.0), mask=first + lane < end)


def pass_at_k_advantages(rewards: Tensor, offsets: Tensor, longest: int, k: int) -> Tensor:
    """Pass@k contributions of sorted float64 rewards `[B]` of 0 and 1, NaN where not scorable."""
    advantages = torch.empty_like(rewards)
    groups = offsets.numel() - 1
    if groups:
        block = min(triton.next_power_of_2(longest), MAX_GROUP_BLOCK)
        with device_guard(rewards):
            _pass_at_k_kernel[(groups,)](rewards, offsets, advantages, k, BLOCK=block, **RESOURCES)
    return advantages


@triton.jit
def _wins(reward_i, reward_j, MARGIN: tl.constexpr, ROUNDING: tl.constexpr):
    """The pair rule: whether r_i - r_j exceeds the margin by more than rounding."""
    noise = ROUNDING * tl.maximum(tl.maximum(tl.abs(reward_i), tl.abs(reward_j)), 1.0)
    return reward_i - reward_j - MARGIN > noise


@triton.jit
def _best_row(rewards, start, end, first, last, rows, COLUMNS: tl.constexpr):
    """The row of the highest reward in [start, end), `[ROWS, 1]` each, the first on ties; -1 if all rewards are NaN."""
    best = tl.max(start * 0 - 1, axis=1)
    highest = tl.max(start.to(tl.float64) * 0 + float("-inf"), axis=1)
    for column in range(first, last, COLUMNS):
        j = (column + tl.arange(0, COLUMNS))[None, :]
        reward_j = tl.load(rewards + j, mask=j < last, other=float("nan"))
        eligible = (j >= start) & (j < end) & _known(reward_j)
        reward_j = tl.where(eligible, reward_j, float("-inf"))
        here = tl.max(reward_j, axis=1)
        place = tl.min(tl.where(eligible & (reward_j == here[:, None]), j, rows), axis=1)
        best = tl.where(here > highest, place, best)
        highest = tl.maximum(highest, here)
    return best


@triton.jit
def _count_pairs(
    rewards,
    start,
    end,
    best,
    bits,
    rank,
    MARGIN: tl.constexpr,
    ROUNDING: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Counts the pairs of [start, end) with a gap above that of `bits` (a float64's), and those at it up to `rank`."""
    above = start * 0
    upto = start * 0
    for row in range(start, end, ROWS):
        i = (row + tl.arange(0, ROWS))[:, None]
        reward_i = tl.load(rewards + i, mask=i < end, other=float("nan"))
        for column in range(start, end, COLUMNS):
            j = (column + tl.arange(0, COLUMNS))[None, :]
            reward_j = tl.load(rewards + j, mask=j < end, other=float("nan"))
            over = _wins(reward_i, reward_j, MARGIN, ROUNDING)
            if TOPK:
                over = over & (i == best)
            gap_bits = (reward_i - reward_j).to(tl.int64, bitcast=True)
            at = over & (gap_bits == bits) & ((i - start) * (end - start) + (j - start) <= rank)
            above += tl.sum(tl.sum((over & (gap_bits > bits)).to(tl.int64), axis=1), axis=0)
            upto += tl.sum(tl.sum(at.to(tl.int64), axis=1), axis=0)
    return above, upto


@triton.jit
def _pair_cap_kernel(
    rewards,
    starts,
    ends,
    cap_bits,
    cap_ranks,
    rows,
    max_pairs,
    MARGIN: tl.constexpr,
    ROUNDING: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The last pair that each group keeps, stored for its first row, by bisection over the gaps' bits and the ranks.

    The gap of a pair is positive, and positive float64 numbers are ordered like their bits. (0, 0) if no pair is
    dropped.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + row)
    end = tl.load(ends + row)
    low = start * 0
    rank = start * 0
    if start == row:
        size = end - start
        best = start * 0
        if TOPK:
            bounds = tl.full([1, 1], 0, tl.int64)
            best = tl.max(_best_row(rewards, bounds + start, bounds + end, start, end, rows, COLUMNS), axis=0)
        above, upto = _count_pairs(rewards, start, end, best, low, rank, MARGIN, ROUNDING, TOPK, ROWS, COLUMNS)
        if above > max_pairs:
            # more than max_pairs pairs lie above `low`, at most max_pairs above `high`
            high = low + 0x7FF0000000000000
            while high - low > 1:
                middle = low + (high - low) // 2
                above, upto = _count_pairs(
                    rewards, start, end, best, middle, rank, MARGIN, ROUNDING, TOPK, ROWS, COLUMNS
                )
                enough = above > max_pairs
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            # the last kept pair has the gap `high`, unless exactly max_pairs pairs lie above it, at `high + 1` or more
            low = high
            lowest = start * 0 - 1
            highest = size * size - 1
            above, upto = _count_pairs(rewards, start, end, best, low, highest, MARGIN, ROUNDING, TOPK, ROWS, COLUMNS)
            needed = max_pairs - above
            while highest - lowest > 1:
                middle = lowest + (highest - lowest) // 2
                above, upto = _count_pairs(
                    rewards, start, end, best, low, middle, MARGIN, ROUNDING, TOPK, ROWS, COLUMNS
                )
                enough = upto >= needed
                highest = tl.where(enough, middle, highest)
                lowest = tl.where(enough, lowest, middle)
            rank = tl.where(needed > 0, highest, start * 0 - 1)
    tl.store(cap_bits + row, low)
    tl.store(cap_ranks + row, rank)


@triton.jit
def _log1p(t):
    """log(1 + t) for t in [0, 1], corrected for the rounding of 1 + t."""
    u = 1.0 + t
    return tl.where(u == 1.0, t, tl.log(u) * (t / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _pair_row_sums_kernel(
    scores,
    rewards,
    starts,
    ends,
    cap_bits,
    cap_ranks,
    losses,
    grads,
    chosen,
    rejected,
    correct,
    logits,
    rows,
    beta,
    MARGIN: tl.constexpr,
    ROUNDING: tl.constexpr,
    TOPK: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program compares a block of sorted rows with all members of their groups, one block of columns at a time."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = i < rows
    score_i = tl.load(scores + i, mask=in_range, other=0.0)[:, None]
    reward_i = tl.load(rewards + i, mask=in_range, other=float("nan"))[:, None]
    start = tl.load(starts + i, mask=in_range, other=rows)[:, None]
    end = tl.load(ends + i, mask=in_range, other=0)[:, None]
    first = tl.min(tl.min(start, axis=1), axis=0)
    last = tl.max(tl.max(end, axis=1), axis=0)
    lane = tl.arange(0, COLUMNS)

    if TOPK:
        best = _best_row(rewards, start, end, first, last, rows, COLUMNS)[:, None]
    if CAPPED:
        bits = tl.load(cap_bits + start, mask=in_range[:, None], other=0)
        rank = tl.load(cap_ranks + start, mask=in_range[:, None], other=0)

    loss = tl.zeros([ROWS], tl.float32)
    grad = tl.zeros([ROWS], tl.float32)
    logit = tl.zeros([ROWS], tl.float32)
    times_chosen = tl.zeros([ROWS], tl.int64)
    times_rejected = tl.zeros([ROWS], tl.int64)
    positive_logits = tl.zeros([ROWS], tl.int64)
    for column in range(first, last, COLUMNS):
        j = (column + lane)[None, :]
        reward_j = tl.load(rewards + j, mask=j < last, other=float("nan"))
        score_j = tl.load(scores + j, mask=j < last, other=0.0)
        same = (j >= start) & (j < end)
        over = same & _wins(reward_i, reward_j, MARGIN, ROUNDING)
        under = same & _wins(reward_j, reward_i, MARGIN, ROUNDING)
        if TOPK:
            over = over & (i[:, None] == best)
            under = under & (j == best)
        if CAPPED:
            gap_bits = tl.abs(reward_i - reward_j).to(tl.int64, bitcast=True)
            as_chosen = (i[:, None] - start) * (end - start) + (j - start)
            as_rejected = (j - start) * (end - start) + (i[:, None] - start)
            over = over & ((gap_bits > bits) | ((gap_bits == bits) & (as_chosen <= rank)))
            under = under & ((gap_bits > bits) | ((gap_bits == bits) & (as_rejected <= rank)))
        z = tl.where(over | under, beta * (score_i - score_j), 0.0)
        t = tl.exp(-tl.abs(z))
        positive = tl.where(z >= 0.0, 1.0, t) / (1.0 + t)
        negative = tl.where(z >= 0.0, t, 1.0) / (1.0 + t)
        loss += tl.sum(tl.where(over, tl.maximum(-z, 0.0) + _log1p(t), 0.0), axis=1)
        grad += tl.sum(tl.where(under, positive, 0.0) - tl.where(over, negative, 0.0), axis=1)
        logit += tl.sum(tl.where(over, z, 0.0), axis=1)
        times_chosen += tl.sum(over.to(tl.int64), axis=1)
        times_rejected += tl.sum(under.to(tl.int64), axis=1)
        positive_logits += tl.sum((over & (z > 0.0)).to(tl.int64), axis=1)
    tl.store(losses + i, loss, mask=in_range)
    tl.store(grads + i, beta * grad, mask=in_range)
    tl.store(chosen + i, times_chosen, mask=in_range)
    tl.store(rejected + i, times_rejected, mask=in_range)
    tl.store(correct + i, positive_logits, mask=in_range)
    tl.store(logits + i, logit, mask=in_range)


def pair_row_sums(
    scores: Tensor, rewards: Tensor, where: Segments, beta: float, margin: float, topk: bool, cap: int, rounding: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Per sorted row: loss, gradient, pairs as chosen, as rejected, correct ones, sum of logits. `cap` 0 keeps all."""
    rows = scores.shape[0]
    losses, grads, logits = (torch.empty_like(scores) for _ in range(3))
    chosen, rejected, correct = (torch.empty_like(where.start) for _ in range(3))
    bits, ranks = (torch.empty_like(where.start) for _ in range(2)) if cap else (where.start, where.start)
    options = {"MARGIN": margin, "ROUNDING": rounding, "TOPK": topk, "ROWS": ROW_BLOCK, "COLUMNS": COLUMN_BLOCK}
    options |= RESOURCES
    with device_guard(scores):
        if cap:
            _pair_cap_kernel[(rows,)](rewards, where.start, where.end, bits, ranks, rows, cap, **options)
        _pair_row_sums_kernel[(triton.cdiv(rows, ROW_BLOCK),)](
            scores,
            rewards,
            where.start,
            where.end,
            bits,
            ranks,
            losses,
            grads,
            chosen,
            rejected,
            correct,
            logits,
            rows,
            beta,
            CAPPED=cap > 0,
            **options,
        )
    return losses, grads, chosen, rejected, correct, logits
