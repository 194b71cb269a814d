"""The AMIR-GRPO loss (arXiv 2601.03661): a policy loss plus the all-pairs preference term, from one policy forward.

    L = L_policy + lambda_reg * (-J_pref)

Legend: B completions (rows), L padded length, T packed tokens. Log-probs are in nats.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check_flag, check_number
from ._token_layout import token_layout
from .objective import Objective
from .policy_loss import policy_loss
from .preference_loss import PairRule, PreferenceTerms, check_preference_weights, preference_terms
from .sequence_logprob import sequence_logprob


class AmirLoss(NamedTuple):
    """The result of `amir_loss`: `loss = policy + lambda_reg * preference`."""

    loss: Tensor
    """0-d, float32 (float64 for float64 inputs)"""
    policy: Tensor
    """the policy loss, with its graph"""
    preference: Tensor
    """-J_pref with its graph, not multiplied by lambda_reg"""
    metrics: dict[str, Tensor]
    """those of `policy_loss`, and the pairs' sums and counts"""


def amir_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    rewards: Tensor | None,
    group: int | Tensor | None,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    objective: str | Objective = "grpo",
    lambda_reg: float = 0.01,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    ref_free: bool = False,
    normalize: str = "mean",
    preference_weights: Tensor | None = None,
    num_pairs: float | Tensor | None = None,
    importance_weight: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    entropy: Tensor | None = None,
) -> AmirLoss:
    """AMIR-GRPO (arXiv 2601.03661): `L = L_policy - lambda_reg * J_pref`, from one forward of the policy.

    `J_pref` is the mean over the pairs (i, j) of a prompt's completions with `r_i - r_j > reward_margin` of
    `log sigmoid(beta_dpo * (u_i - u_j))`, `u = l_theta - l_ref`, `l` the mean (`normalize="mean"`) or the sum
    (`"sum"`) of a completion's log-probs. `ref_free=True` takes `u = l_theta`. See `preference_loss` for the pair rule.

    Args:
        rewards: `[B]`; NaN leaves a row out of all pairs. None where `preference_weights` is given.
        group: rows per group, or int64 `[B]` group ids. None where `preference_weights` is given.
        lambda_reg: weight of the preference term.
        ref_logprobs: like `logprobs`; needed unless `ref_free=True`. No gradient.
        preference_weights: `[B]`, d(-J_pref)/d score of these rows, computed once for their whole groups by
            `preference_weights`. The preference term is then `sum(weights * scores)`: the right gradient, but not the
            value of -J_pref, and the pairs' metrics are left out (they are known where the weights are computed).
        num_pairs: pairs of the whole optimizer step, the divisor of J_pref; 0 counts as 1. Default: those of this call.

    The other arguments are those of `policy_loss`. A row without tokens forms no pair. The gradient goes to `logprobs`,
    and to `entropy` for the bonus. Autograd keeps O(tokens + B), no pair. Synchronizes the device only where
    `preference_loss` does.

    Metrics beside `policy_loss`'s: `pairs`, `pairs_correct` (positive logit), `pair_logit_sum`, and over the pairs
    `chosen_logprob_sum`, `rejected_logprob_sum` (of `l_theta`).
    """
    if not ref_free and ref_logprobs is None:
        raise ValueError(
            "the preference term needs ref_logprobs, got None; pass them, or ref_free=True to compare l_theta alone"
        )
    check_number("lambda_reg", lambda_reg)
    check_flag("ref_free", ref_free)
    policy = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        cu_seqlens=cu_seqlens,
        ref_logprobs=ref_logprobs,
        objective=objective,
        importance_weight=importance_weight,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        entropy=entropy,
    )
    sequence = sequence_logprob(logprobs, mask, cu_seqlens=cu_seqlens, normalize=normalize)
    scores = sequence
    if not ref_free and ref_logprobs is not None:
        reference = sequence_logprob(ref_logprobs, mask, cu_seqlens=cu_seqlens, normalize=normalize)
        scores = sequence - reference.detach()
    metrics = dict(policy.metrics)
    if preference_weights is not None:
        check_preference_weights(preference_weights, scores.shape[0], scores.device)
        preference = (preference_weights.detach() * scores).sum()
    else:
        if rewards is None or group is None:
            missing = "rewards" if rewards is None else "group"
            raise ValueError(
                f"rewards and group are needed to form pairs, got {missing}=None; pass both, or preference_weights"
            )
        layout = token_layout(logprobs, mask, cu_seqlens)
        rule = PairRule(beta_dpo, reward_margin, pair_mining, max_pairs_per_group)
        valid = layout.counts(torch.float32) > 0
        terms = preference_terms(scores, rewards, group, rule, num_pairs=num_pairs, valid=valid)
        preference = terms.loss
        metrics |= _pair_metrics(terms, sequence.detach())
    return AmirLoss(policy.loss + lambda_reg * preference, policy.loss, preference, metrics)


def _pair_metrics(terms: PreferenceTerms, sequence: Tensor) -> dict[str, Tensor]:
    return {
        "pairs": terms.pairs.to(sequence.dtype),
        "pairs_correct": terms.correct.to(sequence.dtype),
        "pair_logit_sum": terms.logit_sum,
        "chosen_logprob_sum": (terms.chosen * sequence).sum(),
        "rejected_logprob_sum": (terms.rejected * sequence).sum(),
    }
