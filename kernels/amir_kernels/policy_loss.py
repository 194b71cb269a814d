"""Policy losses of the GRPO family, built from parts.

Per token t of row i, with rho the policy ratio, A the advantage and w an importance weight from the caller:

    loss_t = -w * surrogate(rho, A) + kl_coef * KL(ref) + mirror_coef * KL(old) - entropy_coef * H

and the aggregation turns the tokens' losses into one number. `Objective` names the parts, `OBJECTIVES` the known
choices.

Legend: B completions (rows), L padded length, T packed tokens, N tokens that count, n_i those of row i. Log-probs are
in nats.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check_devices, check_float, check_shape, step_divisor
from ._token_layout import TokenLayout, compute_dtype, token_layout
from .objective import OBJECTIVES, SURROGATES, Objective

MAX_LOG_RATIO = 20.0
"""Bound on every log-ratio that is exponentiated: e^20 = 4.9e8 keeps float32 finite. Beyond it the gradient is zero."""

VESPO_MIN_LOG_WEIGHT = math.log(1e-8)


# ---- surrogates: what each token's policy term maximizes -----------------------------------------------------------


@dataclass(frozen=True)
class _Tokens:
    """Float32 or float64 values per token, exact zeros where the mask is off."""

    logprobs: Tensor
    log_ratio: Tensor
    """lp - old, not clamped"""
    ratio: Tensor
    """rho at the objective's level, from clamped log-ratios"""
    advantages: Tensor
    layout: TokenLayout

    def row_mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens of each row, `[B]`."""
        return self.layout.sum(values) / self.layout.counts(values.dtype).clamp(min=1)


class _Gain(NamedTuple):
    """A surrogate's value, and which tokens its clips affected."""

    value: Tensor
    """to maximize, per token"""
    clipped_low: Tensor | None = None
    """bool per token: the lower clip removed the gradient (`clip`, `geometric`) or changed the coefficient (`cispo`)"""
    clipped_high: Tensor | None = None
    clipped_dual: Tensor | None = None


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _by_sign(positive: Tensor, if_positive: float, otherwise: float, dtype: torch.dtype) -> Tensor:
    return torch.full_like(positive, otherwise, dtype=dtype).masked_fill(positive, if_positive)


def _clip(tokens: _Tokens, objective: Objective, clip_low: float, clip_high: float) -> _Gain:
    ratio, advantages = tokens.ratio, tokens.advantages
    low, high = 1 - clip_low, 1 + clip_high
    upper = ratio if objective.dual_clip is None else ratio.clamp(max=objective.dual_clip)
    return _Gain(
        torch.minimum(upper * advantages, ratio.clamp(low, high) * advantages),
        clipped_low=(ratio < low) & (advantages < 0),
        clipped_high=(ratio > high) & (advantages > 0),
        clipped_dual=None if objective.dual_clip is None else (ratio > objective.dual_clip) & (advantages < 0),
    )


def _cispo(tokens: _Tokens, objective: Objective, clip_low: float, clip_high: float) -> _Gain:
    low, high = clip_low, clip_high
    if objective.clip_bounds == "relative":
        low, high = 1 - low, 1 + high
    ratio = tokens.ratio.detach()
    coefficient = ratio.clamp(low, high) * tokens.advantages
    return _Gain(coefficient * tokens.logprobs, clipped_low=ratio < low, clipped_high=ratio > high)


def _sapo(tokens: _Tokens, objective: Objective, sapo_tau_pos: float, sapo_tau_neg: float) -> _Gain:
    positive = tokens.advantages > 0
    tau = _by_sign(positive, sapo_tau_pos, sapo_tau_neg, tokens.ratio.dtype)
    return _Gain(torch.sigmoid(tau * (tokens.ratio - 1)) * (4 / tau) * tokens.advantages)


def _vespo(
    tokens: _Tokens,
    objective: Objective,
    vespo_k_pos: float,
    vespo_k_neg: float,
    vespo_lambda_pos: float,
    vespo_lambda_neg: float,
) -> _Gain:
    log_weight = tokens.layout.sum(tokens.log_ratio.detach()).clamp(VESPO_MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    log_weight = tokens.layout.broadcast(log_weight)
    positive = tokens.advantages >= 0
    k = _by_sign(positive, vespo_k_pos, vespo_k_neg, log_weight.dtype)
    lam = _by_sign(positive, vespo_lambda_pos, vespo_lambda_neg, log_weight.dtype)
    phi = torch.exp(lam + k * log_weight - lam * torch.exp(log_weight))
    return _Gain(phi * tokens.advantages * tokens.logprobs)


def _geometric(tokens: _Tokens, objective: Objective, clip_low: float, clip_high: float) -> _Gain:
    sign, log_ratio = tokens.advantages.sign(), tokens.log_ratio
    clamped = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clamped)
    mean_ratio = torch.exp(_clamped(tokens.row_mean(pessimistic)))
    return _Gain(
        tokens.layout.broadcast(mean_ratio) * tokens.advantages,
        clipped_low=(log_ratio < -clip_low) & (sign < 0),
        clipped_high=(log_ratio > clip_high) & (sign > 0),
    )


def _logprob(tokens: _Tokens, objective: Objective) -> _Gain:
    return _Gain(tokens.advantages * tokens.logprobs)


_GAINS: dict[str, Callable[..., _Gain]] = {
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "geometric": _geometric,
    "vespo": _vespo,
    "logprob": _logprob,
}


# ---- the loss ------------------------------------------------------------------------------------------------------


class PolicyLoss(NamedTuple):
    """The result of `policy_loss`."""

    loss: Tensor
    """0-d, float32 (float64 for float64 inputs)"""
    metrics: dict[str, Tensor]
    """0-d sums and counts without a graph"""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    objective: str | Objective = "grpo",
    importance_weight: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    entropy: Tensor | None = None,
) -> PolicyLoss:
    """The policy loss of `objective`, to minimize.

    Args:
        logprobs: `[B, L]`, or packed `[T]` with `cu_seqlens`; log pi of the sampled tokens, in nats. Takes the
            gradient.
        old_logprobs: same shape, of the policy that sampled. None: on policy, the detached `logprobs` stand in.
        advantages: `[B]`, or one per token. Where T = B a vector is read per row. No gradient.
        mask: same shape as `logprobs`, of 0 and 1 in any dtype; 0 leaves a token out, whatever it holds in any input.
        cu_seqlens: int32 or int64 `[B + 1]`, the packed rows' bounds: from 0, not decreasing, T at most. Tokens past
            the last bound are left out.
        ref_logprobs: same shape, of the reference policy; needed where `kl_coef` is not 0, else only measured. No
            gradient.
        objective: a name in `OBJECTIVES` or an `Objective`.
        importance_weight: `[B]` or per token, multiplies the policy term only. No gradient.
        num_tokens: divisor of a token mean for the whole optimizer step. Default: the tokens of this call.
        num_sequences: divisor of a sequence mean for the whole optimizer step. Default: B. Of the two, the one that the
            aggregation does not use is ignored, so both may always be passed. Both are finite and at least 0, as
            numbers and as tensors; 0 counts as 1.
        entropy: same shape; needed where `entropy_coef` is not 0, else only measured. Takes the gradient.

    A row without tokens contributes 0 and stays in a sequence mean, as in TRL. Log-ratios are clamped to +-20 before
    they are exponentiated, with zero gradient beyond. Everything is computed in float32, in float64 where an input is
    float64. Does not synchronize the device; `torch.compile(fullgraph=True)` traces it. Autograd keeps O(tokens).

    Metrics add over micro-batches and ranks: `tokens`, `sequences`, `policy_sum` (the policy term), `ratio_sum`,
    `clip_low_count`, `clip_high_count`, `dual_clip_count`, `old_kl_sum`, and where measured `kl_sum`, `entropy_sum`;
    all over tokens. The ratio is the objective's own, per token for ratio_level "none". KLs use the objective's
    estimator.

    Raises ValueError for an unknown objective, a missing input that the objective needs, or shapes that disagree.
    """
    chosen = resolve_objective(objective)
    layout = token_layout(logprobs, mask, cu_seqlens)
    for name, values in (("old_logprobs", old_logprobs), ("ref_logprobs", ref_logprobs), ("entropy", entropy)):
        if values is not None:
            check_float(name, values)
            check_shape(name, values, logprobs.shape, "like logprobs")
            check_devices("logprobs", logprobs.device, {name: values})
    check_float("advantages", advantages)
    if importance_weight is not None:
        check_float("importance_weight", importance_weight)
    _refuse_missing(chosen, layout, advantages, ref_logprobs, entropy)
    dtype = compute_dtype(logprobs, old_logprobs, advantages, ref_logprobs, importance_weight, entropy)

    tokens = _tokens(logprobs, old_logprobs, advantages, layout, chosen, dtype)
    gain = _gain(tokens, chosen)
    policy = -gain.value
    if importance_weight is not None:
        policy = policy * layout.per_token("importance_weight", importance_weight, dtype).detach()
    old_kl = _kl(-tokens.log_ratio, tokens.ratio, chosen)
    loss = policy + chosen.mirror_coef * old_kl if chosen.mirror_coef else policy
    metrics = _policy_metrics(tokens, policy, gain, old_kl)
    if ref_logprobs is not None:
        kl = _kl(layout.clean(ref_logprobs.detach(), dtype) - tokens.logprobs, tokens.ratio, chosen)
        loss = loss + chosen.kl_coef * kl if chosen.kl_coef else loss
        metrics["kl_sum"] = _total(kl, layout)
    if entropy is not None:
        bonus = layout.clean(entropy, dtype)
        loss = loss - chosen.entropy_coef * bonus if chosen.entropy_coef else loss
        metrics["entropy_sum"] = _total(bonus, layout)
    return PolicyLoss(_aggregate(loss, layout, chosen, num_tokens, num_sequences), metrics)


def resolve_objective(objective: str | Objective) -> Objective:
    """The objective itself, or the known one of that name. The error of an unknown name says which is nearest."""
    if isinstance(objective, Objective):
        return objective
    if not isinstance(objective, str):
        raise TypeError(
            f"objective must be a name in OBJECTIVES or an Objective, got {type(objective).__name__} {objective!r}"
        )
    if objective not in OBJECTIVES:
        near = max(OBJECTIVES, key=lambda known: _likeness(objective.lower(), known))
        raise ValueError(
            f"objective {objective!r} is unknown; the nearest is {near!r}, the known ones are {', '.join(OBJECTIVES)}"
        )
    return OBJECTIVES[objective]


def _likeness(name: str, known: str) -> tuple[float, float]:
    """By the order of letters, then by the letters alone, which prefers a swap ("gpro") to a replacement."""
    in_order = difflib.SequenceMatcher(None, name, known).ratio()
    return in_order, difflib.SequenceMatcher(None, sorted(name), sorted(known)).ratio()


def _refuse_missing(
    objective: Objective, layout: TokenLayout, advantages: Tensor, ref_logprobs: Tensor | None, entropy: Tensor | None
) -> None:
    if objective.kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef={objective.kl_coef} needs ref_logprobs, got None; pass them, or kl_coef=0")
    if objective.entropy_coef and entropy is None:
        raise ValueError(f"entropy_coef={objective.entropy_coef} needs entropy, got None; pass it, or entropy_coef=0")
    if objective.aggregation == "sequence_mean_token_sum_norm" and objective.max_completion_length is None:
        raise ValueError(
            "dr_grpo's aggregation divides by max_completion_length, which is None in this objective; pass "
            'OBJECTIVES["dr_grpo"].replace(max_completion_length=...)'
        )
    if objective.surrogate == "geometric" and tuple(advantages.shape) != (layout.rows,):
        raise ValueError(
            f'surrogate="geometric" (GMPO) needs one advantage per row, [{layout.rows}], got {list(advantages.shape)}: '
            "its clamp follows the sign of the row's advantage; pass advantages [B]"
        )


def _tokens(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    layout: TokenLayout,
    objective: Objective,
    dtype: torch.dtype,
) -> _Tokens:
    current = layout.clean(logprobs, dtype)
    old = current.detach() if old_logprobs is None else layout.clean(old_logprobs.detach(), dtype)
    log_ratio = current - old
    level = objective.ratio_level
    if level in ("sequence", "sequence_token"):
        mean = layout.sum(log_ratio) / layout.counts(dtype).clamp(min=1)
        log_rho = layout.broadcast(_clamped(mean))
        if level == "sequence_token":
            not_clamped = layout.broadcast(mean.detach().abs() <= MAX_LOG_RATIO)
            log_rho = log_rho.detach() + not_clamped * (current - current.detach())
    else:
        log_rho = _clamped(log_ratio if level == "token" else log_ratio.detach())
    adv = layout.per_token("advantages", advantages, dtype).detach()
    return _Tokens(current, log_ratio, torch.exp(log_rho), adv, layout)


def _gain(tokens: _Tokens, objective: Objective) -> _Gain:
    parts = {name: getattr(objective, name) for name in SURROGATES[objective.surrogate].defaults}
    return _GAINS[objective.surrogate](tokens, objective, **parts)


def _kl(difference: Tensor, ratio: Tensor, objective: Objective) -> Tensor:
    """The objective's estimator of KL(pi || other) from d = other - lp, per token."""
    d = _clamped(difference)
    match objective.kl_estimator:
        case "k1":
            kl = -d
        case "k2":
            kl = d.square() / 2
        case "k3":
            kl = torch.expm1(d) - d
        case _:
            kl = d.abs()
    return ratio * kl if objective.kl_bias_correction else kl


def _total(values: Tensor, layout: TokenLayout) -> Tensor:
    return layout.clean(values.detach(), values.dtype).sum()


def _policy_metrics(tokens: _Tokens, policy: Tensor, gain: _Gain, old_kl: Tensor) -> dict[str, Tensor]:
    layout, dtype = tokens.layout, tokens.ratio.dtype
    none = torch.zeros_like(layout.keep)
    metrics = {
        "tokens": layout.keep.sum().to(dtype),
        "sequences": torch.full((), layout.rows, dtype=dtype, device=policy.device),
        "policy_sum": _total(policy, layout),
        "ratio_sum": _total(tokens.ratio, layout),
        "old_kl_sum": _total(old_kl, layout),
    }
    for name, clipped in (
        ("clip_low_count", gain.clipped_low),
        ("clip_high_count", gain.clipped_high),
        ("dual_clip_count", gain.clipped_dual),
    ):
        metrics[name] = _total((none if clipped is None else clipped).to(dtype), layout)
    return metrics


def _aggregate(
    loss: Tensor,
    layout: TokenLayout,
    objective: Objective,
    num_tokens: float | Tensor | None,
    num_sequences: float | Tensor | None,
) -> Tensor:
    per_row = layout.sum(layout.clean(loss, loss.dtype))
    counts = layout.counts(loss.dtype)
    if objective.aggregation == "token_mean":
        return per_row.sum() / step_divisor("num_tokens", num_tokens, counts.sum())
    rows = step_divisor("num_sequences", num_sequences, torch.full_like(counts.sum(), layout.rows))
    if objective.aggregation == "sequence_mean_token_mean":
        per_row = per_row / counts.clamp(min=1)
    if objective.max_completion_length is not None:
        per_row = per_row / objective.max_completion_length
    return per_row.sum() / rows
