"""The all-pairs preference term of AMIR-GRPO (arXiv 2601.03661): completions of a prompt compared by their rewards.

For the pairs S = {(i, j) of one group : r_i > r_j by more than the margin} and K = |S| over the optimizer step,

    z_ij = beta_dpo * (u_i - u_j),   J_pref = (1/K) sum_S log sigmoid(z_ij),   loss = -J_pref
    g_i = d loss / d u_i = (beta_dpo / K) * ( sum_{j: (j,i) in S} sigmoid(-z_ji) - sum_{j: (i,j) in S} sigmoid(-z_ij) )

`u` are sequence log-ratios, the `scores`. One pass over the pairs gives the loss, the gradient g and the counts
(`preference_terms`); no pair is stored. The public functions are views of it.

Legend: B completions (rows), G group size. Log-probs are in nats. Rows are sorted by group inside.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._backend import refuse_capture, use_triton
from ._checks import (
    check_choice,
    check_count,
    check_devices,
    check_float,
    check_number,
    check_positive,
    check_shape,
    check_transforms,
    check_vmap,
    step_divisor,
)
from ._double_backward import refuse_double_backward
from ._groups import ROUNDING, Segments, check_group, check_rewards, segments
from ._token_layout import compute_dtype

TILE_ELEMENTS = 1 << 16
"""Entries of a [rows, G] tile of the torch backend; about ten such tiles of 8 bytes are alive at once (5 MiB)."""

PAIR_MINING = ("all", "topk")
REDUCTIONS = ("mean", "group_mean", "sum")


# ---- what the functions take and return ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PairRule:
    """Which completions of a group are paired, and how a pair's logit is scaled."""

    beta_dpo: float = 0.2
    """scale of the logits, positive"""
    reward_margin: float = 0.0
    """at least 0: (i, j) is a pair where `r_i - r_j - reward_margin > 4 * 2**-23 * max(1, |r_i|, |r_j|)`"""
    pair_mining: str = "all"
    """"all" pairs, or "topk": the group's best row (lowest index on ties) against each lower one"""
    max_pairs_per_group: int | None = None
    """keeps the pairs with the largest gaps of each group, ties by lowest indices of chosen, then rejected"""

    def __post_init__(self) -> None:
        check_positive("beta_dpo", self.beta_dpo)
        check_number("reward_margin", self.reward_margin, at_least=0)
        check_choice("pair_mining", self.pair_mining, PAIR_MINING)
        if self.max_pairs_per_group is not None:
            check_count("max_pairs_per_group", self.max_pairs_per_group)


class PreferenceTerms(NamedTuple):
    """The results of one pass over the pairs. All but the loss are constants."""

    loss: Tensor
    """0-d, -J_pref with a graph to the scores"""
    weights: Tensor
    """`[B]`: d loss / d score"""
    pairs: Tensor
    """int64 0-d: the pairs of this call"""
    correct: Tensor
    """int64 0-d: pairs with a positive logit"""
    logit_sum: Tensor
    """0-d: sum of the pairs' logits"""
    chosen: Tensor
    """int64 `[B]`: pairs in which the row is chosen"""
    rejected: Tensor
    """int64 `[B]`: pairs in which the row is rejected"""


class PreferenceLoss(NamedTuple):
    """The result of `preference_loss`."""

    loss: Tensor
    """0-d, with a graph to the scores"""
    pairs: Tensor
    """int64 0-d: the pairs of this call"""
    accuracy: Tensor
    """share of them with a positive logit; 0 without pairs"""
    mean_logit: Tensor
    """0 without pairs"""


class PairLogits(NamedTuple):
    """The result of `pair_logits`: pair p is `(chosen[p], rejected[p])`."""

    chosen: Tensor
    """int64 `[K]` row indices"""
    rejected: Tensor
    """int64 `[K]` row indices"""
    logit: Tensor
    """`[K]`, with a graph to the scores"""


# ---- public functions ----------------------------------------------------------------------------------------------


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

    Without a pair the loss is 0 with a graph, and gradients are zero. Scores are compared in float32, in float64 for
    float64. Kept for the backward: `g` `[B]` and the scores. Triton works in O(B), torch in tiles of 5 MiB. Double
    backward is refused. Triton does not synchronize the device; torch does, for group ids and `max_pairs_per_group`.
    Raises ValueError or TypeError for an argument that does not fit, and names it.
    """
    rule = PairRule(beta_dpo, reward_margin, pair_mining, max_pairs_per_group)
    terms = preference_terms(
        scores,
        rewards,
        group,
        rule,
        reduction=reduction,
        num_pairs=num_pairs,
        num_groups=num_groups,
        valid=valid,
        backend=backend,
    )
    divisor = terms.pairs.clamp(min=1).to(terms.loss.dtype)
    return PreferenceLoss(terms.loss, terms.pairs, terms.correct / divisor, terms.logit_sum / divisor)


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
    micro-batch's own rows has the gradient of the whole loss. The result is float32, or float64 for float64 scores.
    """
    rule = PairRule(beta_dpo, reward_margin, pair_mining, max_pairs_per_group)
    return preference_terms(
        scores.detach() if isinstance(scores, Tensor) else scores,
        rewards,
        group,
        rule,
        reduction=reduction,
        num_pairs=num_pairs,
        num_groups=num_groups,
        valid=valid,
        backend=backend,
    ).weights


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
    """The pairs that `preference_loss` forms and their logits, `[K]` each, for inspection. Synchronizes the device.

    Ordered by group, then chosen, then rejected. The arguments are those of `preference_loss`; gradients go to
    `scores`. Stores every pair, unlike the other functions.
    """
    rule = PairRule(beta_dpo, reward_margin, pair_mining, max_pairs_per_group)
    scores, rewards = _checked_rows(scores, rewards, group, valid)
    check_vmap("pair_logits", (rewards,))
    refuse_capture("pair_logits", scores)
    where = segments(group, scores.shape[0], scores.device)
    ordered = where.sort(rewards)
    chosen, rejected = [where.start.new_empty(0)], [where.start.new_empty(0)]
    if scores.shape[0]:
        window = _largest_group(group, where)
        cap = _find_cap(ordered, where, rule)
        for rows in _row_blocks(scores.shape[0], window, scores.device):
            tile = _pair_tile(ordered, where, rows, window, rule, cap)
            row, column = tile.chosen.nonzero(as_tuple=True)
            chosen.append(rows[row])
            rejected.append(tile.members[row, column])
    i, j = torch.cat(chosen), torch.cat(rejected)
    if where.order is not None:
        i, j = where.order[i], where.order[j]
    return PairLogits(i, j, float(rule.beta_dpo) * (scores[i] - scores[j]))


def preference_terms(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    rule: PairRule,
    *,
    reduction: str = "mean",
    num_pairs: float | Tensor | None = None,
    num_groups: float | Tensor | None = None,
    valid: Tensor | None = None,
    backend: str = "auto",
) -> PreferenceTerms:
    """The loss, its gradient and the counts from one pass over the pairs; arguments as in `preference_loss`.

    The loss has a graph to `scores`; `weights` is the same gradient as a constant. Sums and counts, unlike means, add
    over micro-batches and ranks.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    scores, rewards = _checked_rows(scores, rewards, group, valid)
    check_transforms("preference_loss", (scores,))
    results = _preference(
        scores,
        rewards,
        group if isinstance(group, Tensor) else None,
        0 if isinstance(group, Tensor) else group,
        float(rule.beta_dpo),
        float(rule.reward_margin),
        rule.pair_mining == "topk",
        rule.max_pairs_per_group or 0,
        reduction,
        _divisor(reduction, num_pairs, num_groups, scores),
        use_triton(backend, scores),
    )
    return PreferenceTerms(*results)


def check_preference_weights(weights: Tensor, rows: int, device: torch.device) -> None:
    """Refuses all but one float per row."""
    check_float("preference_weights", weights)
    check_shape("preference_weights", weights, (rows,), "one per row")
    check_devices("logprobs", device, {"preference_weights": weights})


def _checked_rows(scores: Tensor, rewards: Tensor, group: int | Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores in the dtype of the computation, and float64 rewards, NaN for the rows that form no pair."""
    check_float("scores", scores)
    check_rewards(rewards)
    if scores.dim() != 1:
        raise ValueError(
            f"scores must be one per completion [B], got {list(scores.shape)}; sequence_logprob makes them"
        )
    check_shape("rewards", rewards, scores.shape, "one per completion")
    check_group(group, scores.shape[0])
    check_devices("scores", scores.device, {"rewards": rewards, "group": group, "valid": valid})
    rewards = rewards.detach().to(torch.float64)
    comparable = rewards.isfinite()
    if valid is not None:
        check_shape("valid", valid, scores.shape, "one per completion")
        if valid.dtype != torch.bool:
            raise TypeError(f"valid must be bool, got {valid.dtype}; pass valid != 0")
        comparable = comparable & valid
    return scores.to(compute_dtype(scores)), torch.where(comparable, rewards, math.nan)


def _divisor(
    reduction: str, num_pairs: float | Tensor | None, num_groups: float | Tensor | None, scores: Tensor
) -> Tensor | None:
    """The divisor of the whole step that belongs to the reduction; None for that of this call."""
    divisor = None
    for name, total, owner in (("num_pairs", num_pairs, "mean"), ("num_groups", num_groups, "group_mean")):
        if total is None:
            continue
        if reduction != owner:
            raise ValueError(
                f"{name} is the divisor of reduction={owner!r} and has no effect on reduction={reduction!r}; "
                f"leave it out or pass reduction={owner!r}"
            )
        divisor = step_divisor(name, total, scores.new_empty((), dtype=compute_dtype(scores)))
    return divisor


# ---- one op for both backends --------------------------------------------------------------------------------------


@torch.library.custom_op("amir_kernels::preference", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
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
    """`PreferenceTerms` of float64 rewards, NaN where a row forms no pair; `max_pairs` 0 keeps all."""
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
        rule = PairRule(beta, margin, "topk" if topk else "all", max_pairs or None)
        sums = _row_sums_torch(sorted_scores, sorted_rewards, where, _largest_group(group, where), rule)
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
    """The factor of each row's sums, 0-d or `[B]`. Counts are integers, so their order does not matter."""
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The loss has a graph to the scores; the other results are constants."""
    ctx.save_for_backward(output[1], inputs[0])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weights, scores = ctx.saved_tensors
    return refuse_double_backward("preference_loss", grad_loss * weights, scores), *(None for _ in range(10))


_preference.register_autograd(_differentiate, setup_context=_save)


# ---- sums over the pairs, torch ------------------------------------------------------------------------------------


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


class _PairTile(NamedTuple):
    """The rows of a block against all members of their groups, `[rows, window]`."""

    members: Tensor
    """int64: the sorted row of each column"""
    gap: Tensor
    """float64: r_i - r_j"""
    chosen: Tensor
    """bool: (i, j) is a pair, the row is chosen"""
    rejected: Tensor
    """bool: (j, i) is a pair, the row is rejected"""


def _largest_group(group: int | Tensor, where: Segments) -> int:
    """Size of the largest group; for ids this synchronizes the device."""
    if not isinstance(group, Tensor):
        return group
    refuse_capture("preference_loss with group ids", group)
    return int((where.end - where.start).max())


def _row_blocks(rows: int, window: int, device: torch.device) -> list[Tensor]:
    """Sorted rows in tiles of at most TILE_ELEMENTS entries."""
    step = max(1, TILE_ELEMENTS // max(window, 1))
    return [torch.arange(first, min(first + step, rows), device=device) for first in range(0, rows, step)]


def _exceeds_margin(gap: Tensor, scale: Tensor, margin: float) -> Tensor:
    return gap - margin > ROUNDING * scale


def _within_cap(gap: Tensor, rank: Tensor, cap: _Cap, rows: Tensor) -> Tensor:
    last_gap, last_rank = cap.gap[rows, None], cap.rank[rows, None]
    return (gap > last_gap) | ((gap == last_gap) & (rank <= last_rank))


def _pair_tile(
    rewards: Tensor, where: Segments, rows: Tensor, window: int, rule: PairRule, cap: _Cap | None
) -> _PairTile:
    start, end = where.start[rows, None], where.end[rows, None]
    members = start + torch.arange(window, device=rewards.device)
    inside = members < end
    members = members.clamp(max=rewards.shape[0] - 1)
    mine, theirs = rewards[rows, None], rewards[members]
    gap = mine - theirs
    scale = torch.maximum(mine.abs(), theirs.abs()).clamp(min=1)
    margin = float(rule.reward_margin)
    chosen = inside & _exceeds_margin(gap, scale, margin)
    rejected = inside & _exceeds_margin(-gap, scale, margin)
    if rule.pair_mining == "topk":
        best = torch.where(inside & ~theirs.isnan(), theirs, -math.inf).argmax(dim=1, keepdim=True) + start
        chosen, rejected = chosen & (rows[:, None] == best), rejected & (members == best)
    if cap is not None:
        size = end - start
        i, j = rows[:, None] - start, members - start
        chosen = chosen & _within_cap(gap, i * size + j, cap, rows)
        rejected = rejected & _within_cap(-gap, j * size + i, cap, rows)
    return _PairTile(members, gap, chosen, rejected)


def _find_cap(rewards: Tensor, where: Segments, rule: PairRule) -> _Cap | None:
    """The last pair that `max_pairs_per_group` keeps of each group, by falling gap, ties by lowest (i, j).

    Memory is that many pairs and one tile. None where the rule has no such bound.
    """
    if (max_pairs := rule.max_pairs_per_group) is None:
        return None
    refuse_capture("preference_loss with max_pairs_per_group", rewards)
    cap = _Cap(torch.full_like(rewards, -math.inf), torch.zeros_like(where.start))
    firsts = where.start.unique().tolist()
    for start, end in zip(firsts, [*firsts[1:], rewards.shape[0]], strict=True):
        size = end - start
        gaps = rewards.new_empty(0)
        ranks = where.start.new_empty(0)
        for block in _row_blocks(size, size, rewards.device):
            tile = _pair_tile(rewards, where, block + start, size, rule, None)
            candidates = tile.chosen if gaps.numel() < max_pairs else tile.chosen & (tile.gap > gaps[-1])
            row, column = candidates.nonzero(as_tuple=True)
            gaps = torch.cat([gaps, tile.gap[row, column]])
            ranks = torch.cat([ranks, block[row] * size + column])
            gaps, best = gaps.sort(descending=True, stable=True)
            gaps, ranks = gaps[:max_pairs], ranks[best][:max_pairs]
        if gaps.numel() == max_pairs:
            cap.gap[start:end] = gaps[-1]
            cap.rank[start:end] = ranks[-1]
    return cap


def _row_sums_torch(scores: Tensor, rewards: Tensor, where: Segments, window: int, rule: PairRule) -> _RowSums:
    beta, cap, parts = float(rule.beta_dpo), _find_cap(rewards, where, rule), []
    for rows in _row_blocks(scores.shape[0], window, scores.device):
        tile = _pair_tile(rewards, where, rows, window, rule, cap)
        z = torch.where(tile.chosen | tile.rejected, beta * (scores[rows, None] - scores[tile.members]), 0)
        # d softplus(-z) / d u_i = -beta sigmoid(-z) where i is chosen; where j is, its logit is -z and the sign turns.
        as_rejected = torch.where(tile.rejected, torch.sigmoid(z), 0)
        grad = beta * (as_rejected - torch.where(tile.chosen, torch.sigmoid(-z), 0))
        parts.append(
            _RowSums(
                loss=torch.where(tile.chosen, torch.nn.functional.softplus(-z), 0).sum(dim=1),
                grad=grad.sum(dim=1),
                chosen=tile.chosen.sum(dim=1),
                rejected=tile.rejected.sum(dim=1),
                correct=(tile.chosen & (z > 0)).sum(dim=1),
                logit=torch.where(tile.chosen, z, 0).sum(dim=1),
            )
        )
    return _RowSums(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
