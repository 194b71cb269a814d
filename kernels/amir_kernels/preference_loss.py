"""The all-pairs preference term of AMIR-GRPO (arXiv 2601.03661): completions of a prompt compared by their rewards.

For the pairs S = {(i, j) of one group : r_i > r_j by more than the margin} and K = |S| over the optimizer step,

    z_ij = beta_dpo * (u_i - u_j),   J_pref = (1/K) sum_S log sigmoid(z_ij),   loss = -J_pref
    g_i = d loss / d u_i = (beta_dpo / K) * ( sum_{j: (j,i) in S} sigmoid(-z_ji) - sum_{j: (i,j) in S} sigmoid(-z_ij) )

`u` are sequence log-ratios. The gradient is formed in the forward, tile by tile, and only `g` is kept.

Legend: B completions (rows), G group size, L padded length, T packed tokens. Log-probs are in nats.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._backend import use_triton
from ._checks import (
    check_choice,
    check_count,
    check_devices,
    check_float,
    check_number,
    check_positive,
    check_shape,
    step_divisor,
)
from ._groups import ROUNDING, Segments, check_group, check_rewards, segments
from ._token_layout import compute_dtype, token_layout

TILE_ELEMENTS = 1 << 16
"""Entries of a [rows, G] tile of the torch backend; about ten such tiles of 8 bytes are alive at once (5 MiB)."""

PAIR_MINING = ("all", "topk")
REDUCTIONS = ("mean", "group_mean", "sum")


# ---- scores --------------------------------------------------------------------------------------------------------


def sequence_logprob(
    logprobs: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None, normalize: str = "mean"
) -> Tensor:
    """Log-prob of each sequence, `[B]`, in nats: `sum_t m_t lp_t / max(sum_t m_t, 1)`; "sum" leaves the divisor out.

    `logprobs` are `[B, L]`, or packed `[T]` with `cu_seqlens` (int32 or int64 `[B + 1]`); they take the gradient.
    `mask` has their shape, of 0 and 1 in any dtype; masked entries may hold anything. A sequence without tokens gets 0.
    float32, or float64 for float64. "mean" is AMIR-GRPO's form (arXiv 2601.03661, the authors' code), "sum" is DPO's.
    """
    check_choice("normalize", normalize, ("mean", "sum"))
    layout = token_layout(logprobs, mask, cu_seqlens)
    dtype = compute_dtype(logprobs)
    total = layout.sum(layout.clean(logprobs, dtype))
    return total / layout.counts(dtype).clamp(min=1) if normalize == "mean" else total


# ---- statistics of the pairs, torch --------------------------------------------------------------------------------


class _Cap(NamedTuple):
    """The last pair kept in each row's group: larger gaps stay, and equal ones up to its rank."""

    gap: Tensor
    """float64 `[B]`, -inf where nothing is dropped"""
    rank: Tensor
    """int64 `[B]`: (i - start) * G + (j - start) of that pair"""


class _RowSums(NamedTuple):
    """Sums over the pairs of each sorted row, `[B]`."""

    loss: Tensor
    """softplus(-z) over the pairs in which the row is chosen"""
    grad: Tensor
    """d (sum of all pair losses) / d score"""
    chosen: Tensor
    """int64: pairs in which the row is chosen"""
    rejected: Tensor
    correct: Tensor
    """int64: of the chosen ones, those with z > 0"""
    logit: Tensor
    """z over the pairs in which the row is chosen"""


class _Tile(NamedTuple):
    """Rows [rows] against all members of their groups [rows, window]."""

    members: Tensor
    """int64: the sorted row of each column"""
    gap: Tensor
    """float64: r_i - r_j"""
    over: Tensor
    """bool: (i, j) is a pair"""
    under: Tensor
    """bool: (j, i) is a pair"""


def _wins(gap: Tensor, scale: Tensor, margin: float) -> Tensor:
    return gap - margin > ROUNDING * scale


def _tile(
    rewards: Tensor, where: Segments, rows: Tensor, window: int, margin: float, topk: bool, cap: _Cap | None
) -> _Tile:
    start, end = where.start[rows, None], where.end[rows, None]
    members = start + torch.arange(window, device=rewards.device)
    inside = members < end
    members = members.clamp(max=rewards.shape[0] - 1)
    mine, theirs = rewards[rows, None], rewards[members]
    gap = mine - theirs
    scale = torch.maximum(mine.abs(), theirs.abs()).clamp(min=1)
    over, under = inside & _wins(gap, scale, margin), inside & _wins(-gap, scale, margin)
    if topk:
        best = torch.where(inside & ~theirs.isnan(), theirs, -math.inf).argmax(dim=1, keepdim=True) + start
        over, under = over & (rows[:, None] == best), under & (members == best)
    if cap is not None:
        size = end - start
        i, j = rows[:, None] - start, members - start
        over = over & _kept(gap, i * size + j, cap, rows)
        under = under & _kept(-gap, j * size + i, cap, rows)
    return _Tile(members, gap, over, under)


def _kept(gap: Tensor, rank: Tensor, cap: _Cap, rows: Tensor) -> Tensor:
    last_gap, last_rank = cap.gap[rows, None], cap.rank[rows, None]
    return (gap > last_gap) | ((gap == last_gap) & (rank <= last_rank))


def _blocks(rows: int, window: int, device: torch.device) -> list[Tensor]:
    """Sorted rows in tiles of at most TILE_ELEMENTS entries."""
    step = max(1, TILE_ELEMENTS // max(window, 1))
    return [torch.arange(first, min(first + step, rows), device=device) for first in range(0, rows, step)]


def _find_cap(rewards: Tensor, where: Segments, margin: float, topk: bool, max_pairs: int) -> _Cap:
    """The `max_pairs`-th pair of each group by falling gap, ties by lowest (i, j). Keeps O(max_pairs) and one tile."""
    cap = _Cap(torch.full_like(rewards, -math.inf), torch.zeros_like(where.start))
    firsts = where.start.unique().tolist()
    for start, end in zip(firsts, [*firsts[1:], rewards.shape[0]], strict=True):
        size = end - start
        gaps = rewards.new_empty(0)
        ranks = where.start.new_empty(0)
        for block in _blocks(size, size, rewards.device):
            tile = _tile(rewards, where, block + start, size, margin, topk, None)
            candidates = tile.over if gaps.numel() < max_pairs else tile.over & (tile.gap > gaps[-1])
            row, column = candidates.nonzero(as_tuple=True)
            gaps = torch.cat([gaps, tile.gap[row, column]])
            ranks = torch.cat([ranks, block[row] * size + column])
            gaps, best = gaps.sort(descending=True, stable=True)
            gaps, ranks = gaps[:max_pairs], ranks[best][:max_pairs]
        if gaps.numel() == max_pairs:
            cap.gap[start:end] = gaps[-1]
            cap.rank[start:end] = ranks[-1]
    return cap


def _row_sums_torch(
    scores: Tensor,
    rewards: Tensor,
    where: Segments,
    window: int,
    beta: float,
    margin: float,
    topk: bool,
    max_pairs: int,
) -> _RowSums:
    cap = _find_cap(rewards, where, margin, topk, max_pairs) if max_pairs else None
    parts = []
    for rows in _blocks(scores.shape[0], window, scores.device):
        tile = _tile(rewards, where, rows, window, margin, topk, cap)
        z = torch.where(tile.over | tile.under, beta * (scores[rows, None] - scores[tile.members]), 0)
        # d softplus(-z) / d u_i = -beta sigmoid(-z) where i is chosen; where j is, its logit is -z and the sign turns.
        slope = beta * (torch.where(tile.under, torch.sigmoid(z), 0) - torch.where(tile.over, torch.sigmoid(-z), 0))
        parts.append(
            _RowSums(
                loss=torch.where(tile.over, torch.nn.functional.softplus(-z), 0).sum(dim=1),
                grad=slope.sum(dim=1),
                chosen=tile.over.sum(dim=1),
                rejected=tile.under.sum(dim=1),
                correct=(tile.over & (z > 0)).sum(dim=1),
                logit=torch.where(tile.over, z, 0).sum(dim=1),
            )
        )
    return _RowSums(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


# ---- one op for both backends --------------------------------------------------------------------------------------


def _window(group: int | Tensor, where: Segments) -> int:
    """Size of the largest group; for ids this waits for the device."""
    return int((where.end - where.start).max()) if isinstance(group, Tensor) else group


@torch.library.custom_op("amir_kernels::preference", mutates_args=())
def _preference(
    scores: Tensor,
    rewards: Tensor,
    ids: Tensor | None,
    group_size: int,
    beta: float,
    margin: float,
    topk: bool,
    max_pairs: int,
    reduction: str,
    divisor: Tensor | None,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, d loss / d scores, rest of `PairTotals`. Rewards are float64, NaN where no pair; `max_pairs` 0: no cap."""
    rows = scores.shape[0]
    group = group_size if ids is None else ids
    where = segments(group, rows, scores.device)
    sorted_scores, sorted_rewards = where.sort(scores), where.sort(rewards)
    if rows == 0:
        empty, count = scores.new_zeros(0), where.start.new_zeros(0)
        sums = _RowSums(empty, empty, count, count, count, empty)
    elif triton:
        from ._group_kernels import pair_row_sums

        sums = _RowSums(*pair_row_sums(sorted_scores, sorted_rewards, where, beta, margin, topk, max_pairs, ROUNDING))
    else:
        window = _window(group, where)
        sums = _row_sums_torch(sorted_scores, sorted_rewards, where, window, beta, margin, topk, max_pairs)
    scale = _row_scale(sums.chosen, where, reduction, divisor, scores.dtype)
    return (
        (sums.loss * scale).sum(),
        where.unsort(sums.grad * scale).clone(),
        sums.chosen.sum(),
        sums.correct.sum(),
        sums.logit.sum(),
        where.unsort(sums.chosen).clone(),
        where.unsort(sums.rejected).clone(),
    )


def _row_scale(chosen: Tensor, where: Segments, reduction: str, divisor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What each row's sums are multiplied by, 0-d or `[B]`. Counts are integers, so their order does not matter."""
    if reduction == "sum":
        return torch.ones((), dtype=dtype, device=chosen.device)
    if reduction == "mean":
        return 1 / (chosen.sum().to(dtype).clamp(min=1) if divisor is None else divisor)
    before = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))
    in_group = before[where.end] - before[where.start]
    first = where.start == torch.arange(where.start.shape[0], device=chosen.device)
    groups = (first & (in_group > 0)).sum().to(dtype).clamp(min=1) if divisor is None else divisor
    return 1 / (in_group.to(dtype).clamp(min=1) * groups)


@_preference.register_fake
def _preference_fake(scores: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    count, counts = scores.new_empty((), dtype=torch.int64), torch.empty_like(scores, dtype=torch.int64)
    return (
        scores.new_empty(()),
        torch.empty_like(scores),
        count,
        count.clone(),
        scores.new_empty(()),
        counts,
        counts.clone(),
    )


class PairTotals(NamedTuple):
    """The loss with its graph, and constants about the pairs of the call."""

    loss: Tensor
    pairs: Tensor
    correct: Tensor
    """pairs with a positive logit"""
    logit_sum: Tensor
    chosen: Tensor
    """int64 `[B]`: pairs in which the row is chosen"""
    rejected: Tensor


class _PreferenceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        loss, weights, *constants = _preference(scores, *arguments)
        ctx.save_for_backward(weights, scores)
        ctx.mark_non_differentiable(*constants)
        return loss, *constants

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        weights, scores = ctx.saved_tensors
        return _DifferentiatedOnce.apply(grad_loss * weights, scores), *(None for _ in range(10))


class _DifferentiatedOnce(torch.autograd.Function):
    """Ties a gradient to the scores it depends on, so that differentiating it again raises instead of losing a term."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, scores: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError("preference_loss cannot be differentiated twice; amir_kernels.reference.preference_loss can")


# ---- public --------------------------------------------------------------------------------------------------------


class PreferenceLoss(NamedTuple):
    """What `preference_loss` returns."""

    loss: Tensor
    """0-d, with a graph to the scores"""
    pairs: Tensor
    """int64 0-d: the pairs of this call"""
    accuracy: Tensor
    """share of them with a positive logit; 0 without pairs"""
    mean_logit: Tensor
    """0 without pairs"""


class PairLogits(NamedTuple):
    """What `pair_logits` returns: pair p is `(chosen[p], rejected[p])`."""

    chosen: Tensor
    """int64 `[K]` row indices"""
    rejected: Tensor
    """int64 `[K]` row indices"""
    logit: Tensor
    """`[K]`, with a graph to the scores"""


def preference_loss(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    *,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    reduction: str = "mean",
    num_pairs: float | Tensor | None = None,
    num_groups: float | Tensor | None = None,
    valid: Tensor | None = None,
    backend: str = "auto",
) -> PreferenceLoss:
    """`-J_pref`, AMIR-GRPO's preference term (arXiv 2601.03661; the formula is at the top of this module).

    Args:
        scores: `[B]`, `l_theta - l_ref` of each completion (`l_theta` when reference-free), in nats. Takes the
            gradient.
        rewards: `[B]`. A row with a NaN or infinite reward forms no pair. No gradient.
        group: rows per group (equal, consecutive), or int64 `[B]` group ids in any order, groups of any sizes.
        beta_dpo: scale of the logits.
        reward_margin: at least 0. (i, j) is a pair where `r_i - r_j - reward_margin > 4 * 2**-23 * max(1, |r_i|,
            |r_j|)`, in float64 for the rewards as given: a difference equal to the margin is none in any dtype.
        pair_mining: "all", or "topk": the group's best row (lowest index on ties) against each lower one.
        max_pairs_per_group: keeps the largest gaps of each group, ties by lowest indices of chosen, then rejected.
        reduction: "mean" over all pairs, "group_mean" (mean of the means of the groups that have pairs), or "sum".
        num_pairs: divisor of "mean" for the whole optimizer step, 0 counts as 1; default: the pairs of this call.
        num_groups: divisor of "group_mean", likewise; default: the groups with pairs of this call.
        valid: bool `[B]`; a row that is not valid (empty, masked) forms no pair, whatever its score holds.
        backend: "auto", "triton" or "torch".

    No pair: loss 0 with a graph, zero gradients. Scores are compared in float32, in float64 for float64. The forward
    keeps `g` `[B]` for the backward and no pair; Triton works in O(B), torch in tiles of 5 MiB. Double backward is
    refused. Triton does not wait for the device; torch does, for group ids and for `max_pairs_per_group`.
    """
    totals = paired_preference(
        scores,
        rewards,
        group,
        beta_dpo=beta_dpo,
        reward_margin=reward_margin,
        pair_mining=pair_mining,
        max_pairs_per_group=max_pairs_per_group,
        reduction=reduction,
        num_pairs=num_pairs,
        num_groups=num_groups,
        valid=valid,
        backend=backend,
    )
    divisor = totals.pairs.clamp(min=1).to(totals.loss.dtype)
    return PreferenceLoss(totals.loss, totals.pairs, totals.correct / divisor, totals.logit_sum / divisor)


def preference_weights(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    *,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    reduction: str = "mean",
    num_pairs: float | Tensor | None = None,
    num_groups: float | Tensor | None = None,
    valid: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`g = d loss / d scores` of `preference_loss` with the same arguments, `[B]`, without a graph.

    For groups larger than a micro-batch: computed once from all scores of the group, `sum(g * scores)` over each
    micro-batch's own rows has the gradient of the whole loss.
    """
    arguments = _arguments(
        scores,
        rewards,
        group,
        beta_dpo,
        reward_margin,
        pair_mining,
        max_pairs_per_group,
        reduction,
        num_pairs,
        num_groups,
        valid,
        backend,
    )
    return _preference(arguments[0].detach(), *arguments[1:])[1]


def pair_logits(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    *,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    valid: Tensor | None = None,
) -> PairLogits:
    """The pairs that `preference_loss` forms and their logits, `[K]` each, for inspection. Waits for the device.

    Ordered by group, then chosen, then rejected. The arguments are those of `preference_loss`; gradients go to
    `scores`.
    """
    scores, rewards, ids, size, beta, margin, topk, max_pairs, *_ = _arguments(
        scores,
        rewards,
        group,
        beta_dpo,
        reward_margin,
        pair_mining,
        max_pairs_per_group,
        "sum",
        None,
        None,
        valid,
        "torch",
    )
    where = segments(size if ids is None else ids, scores.shape[0], scores.device)
    ordered = where.sort(rewards)
    chosen, rejected = [where.start.new_empty(0)], [where.start.new_empty(0)]
    if scores.shape[0]:
        window = _window(group, where)
        cap = _find_cap(ordered, where, margin, topk, max_pairs) if max_pairs else None
        for rows in _blocks(scores.shape[0], window, scores.device):
            tile = _tile(ordered, where, rows, window, margin, topk, cap)
            row, column = tile.over.nonzero(as_tuple=True)
            chosen.append(rows[row])
            rejected.append(tile.members[row, column])
    i, j = torch.cat(chosen), torch.cat(rejected)
    if where.order is not None:
        i, j = where.order[i], where.order[j]
    return PairLogits(i, j, beta * (scores[i] - scores[j]))


def paired_preference(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    *,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    reduction: str = "mean",
    num_pairs: float | Tensor | None = None,
    num_groups: float | Tensor | None = None,
    valid: Tensor | None = None,
    backend: str = "auto",
) -> PairTotals:
    """`preference_loss` with the sums behind its shares, which add over micro-batches."""
    arguments = _arguments(
        scores,
        rewards,
        group,
        beta_dpo,
        reward_margin,
        pair_mining,
        max_pairs_per_group,
        reduction,
        num_pairs,
        num_groups,
        valid,
        backend,
    )
    return PairTotals(*_PreferenceLoss.apply(*arguments))


def _arguments(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    beta_dpo: float,
    reward_margin: float,
    pair_mining: str,
    max_pairs_per_group: int | None,
    reduction: str,
    num_pairs: float | Tensor | None,
    num_groups: float | Tensor | None,
    valid: Tensor | None,
    backend: str,
) -> tuple[Any, ...]:
    """The checked arguments of the op."""
    check_float("scores", scores)
    check_rewards(rewards)
    if scores.dim() != 1:
        raise ValueError(f"scores must be one per completion [B], got {list(scores.shape)}")
    check_shape("rewards", rewards, scores.shape, "one per completion")
    check_group(group, scores.shape[0])
    check_devices("scores", scores.device, {"rewards": rewards, "group": group, "valid": valid})
    check_positive("beta_dpo", beta_dpo)
    check_number("reward_margin", reward_margin, at_least=0)
    check_choice("pair_mining", pair_mining, PAIR_MINING)
    check_choice("reduction", reduction, REDUCTIONS)
    if max_pairs_per_group is not None:
        check_count("max_pairs_per_group", max_pairs_per_group)
    rewards = rewards.detach().to(torch.float64)
    comparable = rewards.isfinite()
    if valid is not None:
        check_shape("valid", valid, scores.shape, "one per completion")
        if valid.dtype != torch.bool:
            raise TypeError(f"valid must be bool, got {valid.dtype}")
        comparable = comparable & valid
    rewards = torch.where(comparable, rewards, math.nan)
    return (
        scores.to(compute_dtype(scores)),
        rewards,
        group if isinstance(group, Tensor) else None,
        0 if isinstance(group, Tensor) else group,
        float(beta_dpo),
        float(reward_margin),
        pair_mining == "topk",
        max_pairs_per_group or 0,
        reduction,
        _step_divisor(reduction, num_pairs, num_groups, scores),
        use_triton(backend, scores),
    )


def _step_divisor(
    reduction: str, num_pairs: float | Tensor | None, num_groups: float | Tensor | None, scores: Tensor
) -> Tensor | None:
    divisor = None
    for name, given, owner in (("num_pairs", num_pairs, "mean"), ("num_groups", num_groups, "group_mean")):
        if given is None:
            continue
        if reduction != owner:
            raise ValueError(f"{name} is the divisor of reduction={owner!r}; it has no effect on {reduction!r}")
        divisor = step_divisor(name, given, scores.new_empty((), dtype=compute_dtype(scores)))
    return divisor
