"""Group advantages: the reward of a completion relative to those of the other completions of its prompt.

Legend: B completions (rows), F reward functions, G group size, n scorable rows of a group (reward not NaN).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._backend import refuse_capture, use_triton
from ._checks import check_choice, check_count, check_devices, check_flag, check_number, check_vmap
from ._groups import ROUNDING, Segments, check_group, check_rewards, segments

BASELINES = ("mean", "leave_one_out", "none")
SCALES = ("std", "batch", "bernoulli", "none")
COMBINATIONS = ("sum", "normalize_then_sum")


def group_advantage(
    rewards: Tensor,
    group: int | Tensor,
    *,
    baseline: str = "mean",
    scale: str = "std",
    eps: float = 1e-4,
    unbiased: bool = True,
    combine: str = "sum",
    weights: Tensor | Sequence[float] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Advantage of each completion, `(r_i - baseline_i) / scale_i` (GRPO: arXiv 2402.03300), `[B]`, without a graph.

    Args:
        rewards: `[B]`, or `[B, F]` for several reward functions. A row with a NaN reward is not scorable: it gets 0
            and is left out of its group's statistics. With F functions, a NaN function is left out of the row's sum,
            and a row is not scorable where all of them are NaN. An infinite reward raises ValueError.
            Rewards of prompts times completions, `[P, G]`, are passed as `rewards.flatten()`: two dimensions are
            always completions times functions, also where their sizes agree.
        group: rows per group (equal, consecutive), or int64 `[B]` group ids in any order, groups of any sizes.
        baseline: "mean" of the group, "leave_one_out" (mean of the others, RLOO), or "none".
        scale: "std" (deviation of the own group, + eps), "batch" (deviation of all rewards, + eps), "bernoulli"
            (`sqrt(p (1 - p) + eps)` with p the group's mean, arXiv 2503.06639; rewards in [0, 1]), or "none".
        eps: added to the deviation; under the root for "bernoulli".
        unbiased: divides the squared deviations by n - 1 (TRL, verl) rather than by n.
        combine: of `[B, F]`. "sum": weighted sum, then the advantage. "normalize_then_sum" (GDPO): each function is
            normalized within its group, the weighted sum is normalized over the batch; needs baseline "mean", scale
            "std". Functions that cancel, to rounding, give 0.
        weights: one per reward function; default 1.
        backend: "auto", "triton" or "torch".

    With a baseline, a group whose rewards are all equal gets exactly 0, and so does one with a single scorable row.
    Rewards are equal up to rounding, as for the pairs of `preference_loss`: highest - lowest <= 4 * 2**-23 * max(1,
    |r|), with |r| the larger of their magnitudes, so that sums of rewards that differ in their last bits are no signal
    in any dtype. Without a baseline the deviation of such a group is 0.

    Statistics are float64 in two passes around the group's least reward, so that rewards like 1e6 + {0, 1} keep sign
    and size. Returns float32, or float64 for float64 rewards. Synchronizes the device to refuse infinite rewards, and
    to find the groups of ids. Keeps nothing for a backward. Raises ValueError or TypeError for rewards, groups, weights
    and options that do not fit.

    TRL's defaults are these defaults. verl's: `eps=1e-6`. Dr.GRPO: `scale="none"`. RLOO: `baseline="leave_one_out",
    scale="none"`. 2503.06639: `scale="bernoulli", eps=1e-5`.
    """
    check_choice("baseline", baseline, BASELINES)
    check_choice("scale", scale, SCALES)
    check_choice("combine", combine, COMBINATIONS)
    check_number("eps", eps, at_least=0)
    check_flag("unbiased", unbiased)
    _check_rewards(rewards, group)
    exact = rewards.detach().to(torch.float64)
    factors = _checked_weights(weights, rewards)
    triton = use_triton(backend, rewards)
    groups = _find_groups(group, rewards.shape[0], rewards.device)
    options = _Options(baseline, scale, eps, unbiased)
    if combine == "sum":
        total = exact if factors is None else weighted_sum(exact, factors)
        advantages = _advantages(total, groups, options, triton)
    else:
        if factors is None:
            raise ValueError(
                'combine="normalize_then_sum" is for several reward functions [B, F], got rewards '
                f'{list(rewards.shape)}; pass combine="sum"'
            )
        if (baseline, scale) != ("mean", "std"):
            raise ValueError(
                'combine="normalize_then_sum" normalizes by mean and deviation; it needs baseline="mean", scale="std", '
                f"got baseline={baseline!r}, scale={scale!r}"
            )
        advantages = _normalize_then_sum(exact, factors, groups, options, triton)
    return advantages.to(torch.float64 if rewards.dtype == torch.float64 else torch.float32)


class _Options(NamedTuple):
    """The formula of the advantage."""

    baseline: str
    scale: str
    eps: float
    unbiased: bool


def _check_rewards(rewards: Tensor, group: int | Tensor) -> None:
    check_rewards(rewards)
    if rewards.dim() not in (1, 2) or rewards.shape[1:].numel() == 0:
        raise ValueError(
            f"rewards must be [B] or [B, F] with F of at least 1, got {list(rewards.shape)}; one row per completion"
        )
    check_group(group, rewards.shape[0])
    check_devices("rewards", rewards.device, {"group": group})
    check_vmap("group_advantage", (rewards,))
    refuse_capture("group_advantage", rewards)
    if bool(rewards.isinf().any()):
        rows = rewards.reshape(rewards.shape[0], -1)
        row = int(rows.isinf().any(dim=1).nonzero()[0])
        raise ValueError(
            f"rewards must be finite, or NaN for a row without a reward, got {rows[row].tolist()} in row {row}; "
            "clip them, or set them to NaN to leave the row out"
        )


def _checked_weights(weights: Tensor | Sequence[float] | None, rewards: Tensor) -> Tensor | None:
    """One factor per reward function; None for rewards `[B]`."""
    if rewards.dim() == 1:
        if weights is not None:
            raise ValueError(
                f"weights are for several reward functions [B, F], got weights={weights!r} and rewards "
                f"{list(rewards.shape)}; leave weights out"
            )
        return None
    functions = rewards.shape[1]
    if weights is None:
        return torch.ones(functions, dtype=torch.float64, device=rewards.device)
    try:
        factors = torch.as_tensor(weights, dtype=torch.float64, device=rewards.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"weights must be {functions} numbers, one per reward function, got {weights!r}") from error
    if tuple(factors.shape) != (functions,) or not bool(factors.isfinite().all()):
        raise ValueError(f"weights must be {functions} finite numbers, one per reward function, got {weights!r}")
    return factors


def weighted_sum(rewards: Tensor, weights: Tensor | Sequence[float]) -> Tensor:
    """The rewards `[B, F]` of several functions as one, `sum_f weights_f * rewards_f`, float64 `[B]`, without a graph.

    A function that is NaN for a row is left out of the row's sum; a row is NaN where all functions are. `weights` are F
    numbers, one per function.
    """
    columns = rewards.detach().to(torch.float64)
    factors = torch.as_tensor(weights, dtype=torch.float64, device=rewards.device)
    return torch.where(columns.isnan().all(dim=1), math.nan, (columns * factors).nansum(dim=1))


# ---- statistics ----------------------------------------------------------------------------------------------------


class _Groups(NamedTuple):
    """The groups of the rows, sorted."""

    where: Segments
    offsets: Tensor
    """int64 `[groups + 1]`: the bounds of the groups in sorted rows"""
    number: Tensor
    """int64 `[B]`: the group of each sorted row"""
    longest: int

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each row's group, in a fixed order, as a value per sorted row."""
        return torch.segment_reduce(values, "sum", offsets=self.offsets, initial=0.0)[self.number]

    def min(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "min", offsets=self.offsets)[self.number]

    def max(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "max", offsets=self.offsets)[self.number]

    def differ(self, ordered: Tensor) -> Tensor:
        """Whether each row's group has two rewards that differ by more than rounding; NaN is none."""
        least, most = self.min(ordered.nan_to_num(math.inf)), self.max(ordered.nan_to_num(-math.inf))
        return most - least > ROUNDING * torch.maximum(least.abs(), most.abs()).clamp(min=1)


def _find_groups(group: int | Tensor, rows: int, device: torch.device) -> _Groups:
    where = segments(group, rows, device)
    if not isinstance(group, Tensor):
        numbers = torch.arange(rows // group + 1, device=device)
        return _Groups(where, numbers * group, numbers[:-1].repeat_interleave(group), group)
    first = where.start == torch.arange(rows, device=device)
    firsts = first.nonzero().squeeze(1)
    offsets = torch.cat([firsts, firsts.new_full((1,), rows)])
    longest = int(offsets.diff().max()) if rows else 0
    return _Groups(where, offsets, first.cumsum(0) - 1, longest)


def _advantages(rewards: Tensor, groups: _Groups, options: _Options, triton: bool) -> Tensor:
    """Advantages of float64 rewards `[B]`, in float64."""
    ordered = groups.where.sort(rewards)
    scored = ~ordered.isnan()
    if options.scale == "bernoulli" and not bool(((ordered >= 0) & (ordered <= 1) | ~scored).all()):
        outside = ordered[scored & ~((ordered >= 0) & (ordered <= 1))][0].item()
        raise ValueError(
            f'scale="bernoulli" is for rewards in [0, 1] (a success probability), got {outside:g}; pass scale="std"'
        )
    if triton:
        from ._group_kernels import group_advantages

        advantages = group_advantages(
            ordered,
            groups.offsets,
            groups.longest,
            options.baseline,
            options.scale,
            options.eps,
            options.unbiased,
            ROUNDING,
        )
    else:
        advantages = _advantages_torch(ordered, scored, groups, options)
    if options.scale == "batch":
        advantages = _divide(advantages, _deviation(ordered, scored, options.unbiased) + options.eps)
    return groups.where.unsort(advantages)


def _advantages_torch(ordered: Tensor, scored: Tensor, groups: _Groups, options: _Options) -> Tensor:
    """Advantages of sorted rows; the caller divides where the scale is "batch"."""
    least = groups.min(ordered.nan_to_num(math.inf))
    excess = torch.where(scored & groups.differ(ordered), ordered - least, 0)
    count = groups.sum(scored.to(ordered.dtype))
    mean_excess = groups.sum(excess) / count.clamp(min=1)
    centered = torch.where(scored, excess - mean_excess, 0)
    match options.baseline:
        case "mean":
            advantages = centered
        case "leave_one_out":
            advantages = centered * (count / (count - 1).clamp(min=1))
        case _:
            advantages = torch.where(scored, ordered, 0)
    if options.scale == "std":
        squares = groups.sum(centered.square())
        variance = squares / ((count - 1) if options.unbiased else count).clamp(min=1)
        return _divide(advantages, variance.sqrt() + options.eps)
    if options.scale == "bernoulli":
        success = torch.where(count > 0, least + mean_excess, 0)
        return _divide(advantages, (success * (1 - success) + options.eps).sqrt())
    return advantages


def _divide(advantages: Tensor, scale: Tensor) -> Tensor:
    """advantages / scale, where an advantage of exactly 0 stays 0 even if the scale is 0."""
    return torch.where(advantages == 0, 0, advantages / scale)


def _deviation(values: Tensor, scored: Tensor, unbiased: bool) -> Tensor:
    """Standard deviation of the scored values, 0-d; 0 for fewer than two."""
    count = scored.sum()
    least = values.nan_to_num(math.inf).min() if values.numel() else values.new_zeros(())
    excess = torch.where(scored, values - least, 0)
    centered = torch.where(scored, excess - excess.sum() / count.clamp(min=1), 0)
    return (centered.square().sum() / (count - 1 if unbiased else count).clamp(min=1)).sqrt()


def _normalize_then_sum(rewards: Tensor, factors: Tensor, groups: _Groups, options: _Options, triton: bool) -> Tensor:
    missing = rewards.isnan()
    columns = [_advantages(column, groups, options, triton) for column in rewards.unbind(dim=1)]
    addends = torch.stack(columns, dim=1) * factors
    summed = addends.sum(dim=1)
    scored = ~missing.all(dim=1)
    mean = torch.where(scored, summed, 0).sum() / scored.sum().clamp(min=1)
    differ = torch.where(scored, summed - mean, 0).norm() > ROUNDING * addends.norm()
    scale = _deviation(summed, scored, options.unbiased) + options.eps
    return torch.where(scored & differ & _informative(rewards, groups), _divide(summed - mean, scale), 0)


def _informative(rewards: Tensor, groups: _Groups) -> Tensor:
    """Rows whose group has two rewards of some function that differ by more than rounding."""
    informative = torch.zeros(rewards.shape[0], dtype=torch.bool, device=rewards.device)
    for column in rewards.unbind(dim=1):
        informative |= groups.differ(groups.where.sort(column))
    return groups.where.unsort(informative)


# ---- pass@k --------------------------------------------------------------------------------------------------------


def pass_at_k_advantage(rewards: Tensor, group: int | Tensor, k: int, *, backend: str = "auto") -> Tensor:
    """Contribution of each completion to its group's pass@k, against a leave-one-out baseline, `[B]`, without a graph.

    With n scorable rows of a group, c of them correct, and `rho(n, c, k) = 1 - C(n-c, k) / C(n, k)`, the unbiased
    estimate of pass@k,

        A_i = k * ( mean of "some row is correct" over the k-subsets that contain i
                    - the same over the k-subsets of the n - 1 other rows )

        correct row:  k * (1                    - rho(n-1, c-1, k))
        wrong row:    k * (rho(n-1, c, k-1)     - rho(n-1, c,   k))

    `(1/n) sum_i A_i grad log pi(o_i)` is an unbiased estimate of the gradient of pass@k: the subset estimator is that
    of PKPO (arXiv 2505.15201), the baseline does not depend on row i, and k = 1 is RLOO. (PKPO's own baselines
    differ.)

    `rewards [B]` are 0 or 1; a NaN row gets 0 and is left out; other values raise ValueError, as does a group of k
    rows or fewer, which has no k others. Where NaN leaves k scorable rows or fewer, the group gets 0. A group that is
    all correct or all wrong gets exactly 0. float64 inside; returns float32, float64 for float64 rewards, which the
    torch backend alone takes. `backend` is "auto", "triton" or "torch". Synchronizes the device.
    """
    check_rewards(rewards)
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be [B], got {list(rewards.shape)}; combine several reward functions first")
    check_group(group, rewards.shape[0])
    check_devices("rewards", rewards.device, {"group": group})
    check_vmap("pass_at_k_advantage", (rewards,))
    refuse_capture("pass_at_k_advantage", rewards)
    check_count("k", k)
    triton = use_triton(backend, rewards)
    exact = rewards.detach().to(torch.float64)
    scored = ~exact.isnan()
    if not bool(((exact == 0) | (exact == 1) | ~scored).all()):
        other = exact[scored & (exact != 0) & (exact != 1)][0].item()
        raise ValueError(
            f"pass_at_k_advantage is for rewards of 0 and 1 (NaN where there is none), got {other:g}; apply a "
            "threshold first"
        )
    groups = _find_groups(group, rewards.shape[0], rewards.device)
    sizes = groups.offsets.diff()
    if rewards.shape[0] and int(sizes.min()) <= k:
        raise ValueError(
            f"k={k} needs groups of more than {k} rows, since the baseline draws k of the others; a group has "
            f"{int(sizes.min())}: pass a smaller k or sample more completions"
        )
    ordered = groups.where.sort(exact)
    if triton:
        from ._group_kernels import pass_at_k_advantages

        advantages = pass_at_k_advantages(ordered, groups.offsets, groups.longest, k)
    else:
        advantages = _pass_at_k_torch(ordered, groups, k)
    out = groups.where.unsort(advantages)
    return out if rewards.dtype == torch.float64 else out.float()


def _pass_at_k_torch(ordered: Tensor, groups: _Groups, k: int) -> Tensor:
    known = ~ordered.isnan()
    correct = known & (ordered == 1)
    n, c = groups.sum(known.to(torch.float64)), groups.sum(correct.to(torch.float64))
    others = n - 1
    with_row = torch.where(correct, 1.0, _pass_at_k(others, c, k - 1))
    without_row = _pass_at_k(others, torch.where(correct, c - 1, c), k)
    return torch.where(known & (n > k), k * (with_row - without_row), 0)


def _pass_at_k(n: Tensor, c: Tensor, k: int) -> Tensor:
    """rho(n, c, k) for float64 counts: 1 - prod_{t<k} (n - c - t) / (n - t), 0 factors once the wrong ones run out."""
    draws = torch.arange(k, dtype=torch.float64, device=n.device)
    wrong_left = (n - c)[:, None] - draws
    return 1 - (wrong_left.clamp(min=0) / (n[:, None] - draws).clamp(min=1)).prod(dim=1)
