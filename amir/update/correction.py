"""Training-inference correction: importance weights for completions that another engine than the trainer sampled.

The engine's arithmetic differs from the trainer's, so its policy differs slightly from the old policy of the ratio.
With d_t = old_t - sampled_t, nats at the training temperature, 0 for a missing log-prob:

    c = exp(d_t) of a token, or exp(sum_t d_t) of a completion;    w = clamp(c, min, max), or c inside and 0 outside

w multiplies the policy term (truncated importance sampling; IcePop's mask), never the KL, the entropy or the pair term.

B completions of padded length C.
"""

import torch
from torch import Tensor

from amir_kernels.policy_loss import MAX_LOG_RATIO

from ..config import CorrectionSettings

LARGE_MISMATCH = 0.1
"""Mean |d| in nats above which the run warns; engines in bfloat16 have around 0.01 to 0.05."""


def log_ratio(old: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
    """d `[B, C]`: 0 at masked tokens and at tokens without a finite log-prob of the sampler."""
    return torch.where(mask & sampled.isfinite(), old - sampled, 0.0)


def importance_weight(old: Tensor, sampled: Tensor, mask: Tensor, settings: CorrectionSettings) -> Tensor:
    """w, float32: `[B, C]` at token level, `[B]` at sequence level; without gradient.

    Args:
        old: `[B, C]`, the trainer's log-probs before the update.
        sampled: `[B, C]`, the sampler's log-probs; NaN for a missing one.
        mask: bool `[B, C]`, the completion's tokens.
    """
    ratio = _ratio(log_ratio(old.detach(), sampled, mask), settings.level)
    if settings.mode == "truncate":
        return ratio.clamp(settings.min, settings.max)
    return torch.where((ratio >= settings.min) & (ratio <= settings.max), ratio, 0.0)


def mismatch_sums(old: Tensor, sampled: Tensor, mask: Tensor, settings: CorrectionSettings | None) -> dict[str, float]:
    """The difference between sampler and trainer, as sums over the tokens in `mask`.

    Only `mismatch_max` is a maximum. `weight_sum` and `weight_square_sum` are those of the unbounded c, over
    `importance_weights` tokens, or completions at sequence level; (sum c)^2 / (n sum c^2) is the effective sample size
    as a share of them.
    """
    difference = log_ratio(old, sampled, mask)
    known = mask & sampled.isfinite()
    level = settings.level if settings else "token"
    ratio = _ratio(difference, level)[mask if level == "token" else mask.any(1)].double()
    sums = {
        "mismatch_sum": float(difference.abs().double().sum()),
        "mismatch_max": float(difference.abs().max()),
        "logprobs_known": int(known.sum()),
        "logprobs_missing": int((mask & ~known).sum()),
        "importance_weights": len(ratio),
        "weight_sum": float(ratio.sum()),
        "weight_square_sum": float(ratio.square().sum()),
    }
    if settings:
        sums["weights_bounded"] = int(((ratio < settings.min) | (ratio > settings.max)).sum())
    return sums


def _ratio(difference: Tensor, level: str) -> Tensor:
    """c, from log-ratios clamped to +-20 before the exponential."""
    total = difference if level == "token" else difference.sum(1)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
