"""From a batch to gradients: log-probs, the objective with its pair term, one backward per micro-batch.

The loss is a function of log-probs only. Its gradient with respect to them is computed first, for each term separately;
one backward of the model follows. The norm of each term's gradient is therefore known without a second pass.

B completions of padded length C.
"""

from collections import Counter
from dataclasses import asdict

import torch
from torch import Tensor

from amir_kernels import OBJECTIVES, Objective, amir_loss, sequence_logprob

from ..config import RunConfig
from ..errors import MicroBatchTooLarge
from ..policy.memory import mmap_large_allocations
from ..policy.policy import Policy
from .batch import Batch
from .correction import importance_weight
from .micro_batches import MicroBatch, TokenBudget
from .term_gradients import TermGradients

Sums = Counter[str]
"""Sums and counts over micro-batches, by name."""


def make_objective(config: RunConfig) -> Objective:
    """The objective that `loss_type` names, with the clip bounds and coefficients of the run."""
    changes: dict[str, float | int] = {"kl_coef": config.beta, "entropy_coef": config.entropy_coef}
    if config.epsilon is not None:
        changes |= {"clip_low": config.epsilon, "clip_high": config.epsilon}
    if config.epsilon_high is not None:
        changes["clip_high"] = config.epsilon_high
    if config.loss_type == "dr_grpo":
        changes["max_completion_length"] = config.max_completion_length
    return OBJECTIVES[config.loss_type].replace(**changes)


def reference_logprobs(policy: Policy, batch: Batch, config: RunConfig, budget: TokenBudget) -> Tensor | None:
    """The reference policy's log-probs, float32 `[B, C]`, 0 for rows without gradient; None if no term needs them."""
    pairs = config.lambda_reg > 0 and not config.ref_free and bool(batch.pairs.participants.any())
    if config.beta == 0 and not pairs:
        return None
    while True:
        try:
            with policy.reference(), mmap_large_allocations():
                return _score(policy, batch, batch.has_gradient, budget)
        except MicroBatchTooLarge as error:
            too_large = error.tokens, error.rows, error.reason
        budget.halve(*too_large)


def backward(
    policy: Policy,
    batch: Batch,
    objective: Objective,
    config: RunConfig,
    budget: TokenBudget,
    *,
    measure_terms: bool = False,
) -> tuple[Sums, Tensor]:
    """Accumulates the gradient of the whole step's loss in the trained parameters' `.grad`, which must be zero.

    Returns the sums for the step's metrics and the log-probs under the current policy, float32 `[B, C]`, 0 for rows
    without gradient. Every divisor is the whole step's, so micro-batches change the result by rounding only, and a step
    that runs out of memory is repeated with smaller ones. ConfigError if a micro-batch of one completion does not fit.

    `measure_terms`: the sums also have the squared norm of each term's gradient of the trained parameters.
    """
    while True:
        try:
            with mmap_large_allocations():
                return _backward(policy, batch, objective, config, budget, measure_terms)
        except MicroBatchTooLarge as error:
            too_large = error.tokens, error.rows, error.reason
        for parameter in policy.trainable().values():
            if parameter.grad is not None:
                parameter.grad.zero_()
        budget.halve(*too_large)


def _backward(
    policy: Policy, batch: Batch, objective: Objective, config: RunConfig, budget: TokenBudget, measure_terms: bool
) -> tuple[Sums, Tensor]:
    sums: Sums = Counter()
    weights = _pair_weights_of_split_groups(policy, batch, config, sums, budget)
    logprobs = torch.zeros_like(batch.loss_mask, dtype=torch.float32)
    terms = TermGradients(policy) if measure_terms else None
    with budget.agreed():
        for micro in budget.assigned(batch.tokens, batch.has_gradient):
            with budget.limits(micro):
                current = _accumulate(policy, batch, micro, objective, config, weights, sums, terms)
                if not micro.idle:
                    logprobs[micro.rows, : current.shape[1]] = current
    policy.average_gradients()
    sums = policy.ranks.total_sums(sums)
    if terms is not None:
        sums.update(terms.squares())
    return sums, policy.ranks.total(logprobs)


def _accumulate(
    policy: Policy,
    batch: Batch,
    micro: MicroBatch,
    objective: Objective,
    config: RunConfig,
    weights: Tensor,
    sums: Sums,
    terms: TermGradients | None,
) -> Tensor:
    """Forward and backward of one micro-batch; returns its log-probs.

    The pair term of complete groups is computed here; that of split groups is given by their `weights`.
    """
    computes_pairs = micro.complete_groups and config.lambda_reg > 0
    rows = micro.rows
    tokens = batch.tokens.rows(rows)
    mask = tokens.completion_mask
    result = policy.logprobs_entropy(tokens)
    outputs = result[:2] if config.entropy_coef > 0 else result[:1]
    if micro.idle:
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        return outputs[0].detach()
    leaves = [output.detach().requires_grad_() for output in outputs]
    logprobs = leaves[0].detach()
    old = logprobs if batch.old_logprobs is None else _select_rows(batch.old_logprobs, rows, mask)
    loss = amir_loss(
        leaves[0],
        old,
        batch.advantages[rows],
        batch.rewards[rows],
        batch.group[rows],
        mask,
        ref_logprobs=None if batch.ref_logprobs is None else _select_rows(batch.ref_logprobs, rows, mask),
        objective=objective,
        importance_weight=_correction(batch, rows, old, mask, config),
        entropy=leaves[1] if len(leaves) > 1 else None,
        lambda_reg=config.lambda_reg,
        ref_free=config.ref_free or batch.ref_logprobs is None,
        normalize=config.normalize,
        preference_weights=None if computes_pairs else weights[rows],
        num_pairs=batch.pairs.total,
        num_tokens=batch.num_tokens,
        num_sequences=batch.num_sequences,
        **asdict(batch.pairs.rule),
    )
    from_policy = torch.autograd.grad(loss.policy, leaves, retain_graph=True)
    from_pairs = torch.autograd.grad(config.lambda_reg * loss.preference, leaves[0])[0]
    if terms is not None:
        terms.add(outputs[0], from_pairs)
    ranks = policy.ranks.size  # gradients are averaged over the ranks, and sums are needed
    torch.autograd.backward(outputs, [ranks * (from_policy[0] + from_pairs), *(ranks * g for g in from_policy[1:])])
    sums.update(
        loss.metrics
        | {
            "entropy_sum": result.entropy.detach().sum(),
            "tokens_computed": tokens.computed(packed=policy.packed),
            "policy_loss": loss.policy.detach(),
            "preference_loss": loss.preference.detach() if computes_pairs else 0,
            "policy_grad_square": from_policy[0].square().sum(),
            "pair_grad_square": from_pairs.square().sum(),
        }
    )
    return logprobs


def _correction(batch: Batch, rows: Tensor, old: Tensor, mask: Tensor, config: RunConfig) -> Tensor | None:
    if config.correction is None or batch.sampled_logprobs is None:
        return None
    return importance_weight(old, _select_rows(batch.sampled_logprobs, rows, mask), mask, config.correction)


def _pair_weights_of_split_groups(
    policy: Policy, batch: Batch, config: RunConfig, sums: Sums, budget: TokenBudget
) -> Tensor:
    """d loss / d score `[B]` of the groups that `budget` splits over micro-batches, from a pass without gradients.

    Zero for other groups, whose micro-batch computes their pair term. Adds the pair loss of the split groups to `sums`.
    """
    if config.lambda_reg == 0:
        return torch.zeros_like(batch.rewards)
    parts = [micro for micro in budget.split(batch.tokens, batch.has_gradient) if not micro.complete_groups]
    if not parts:
        return torch.zeros_like(batch.rewards)
    split = torch.zeros_like(batch.has_gradient)
    split[torch.cat([part.rows for part in parts])] = True
    mask = batch.loss_mask & split[:, None]
    scores = sequence_logprob(_score(policy, batch, split, budget), mask, normalize=config.normalize)
    if not config.ref_free and batch.ref_logprobs is not None:
        scores = scores - sequence_logprob(batch.ref_logprobs, mask, normalize=config.normalize)
    term = batch.pairs.terms(scores, split)
    if policy.ranks.first:  # every rank has the same split groups
        sums.update({"preference_loss": term.loss, "pairs": term.pairs, "pairs_correct": term.correct})
    return term.weights


@torch.no_grad()
def _score(policy: Policy, batch: Batch, needed: Tensor, budget: TokenBudget) -> Tensor:
    """Log-probs `[B, C]` of the `needed` rows, 0 elsewhere, without a graph."""
    scores = torch.zeros_like(batch.loss_mask, dtype=torch.float32)
    with budget.agreed():
        for micro in budget.assigned(batch.tokens, needed):
            with budget.limits(micro):
                logprobs = policy.logprobs(batch.tokens.rows(micro.rows))
                if not micro.idle:
                    scores[micro.rows, : logprobs.shape[1]] = logprobs
    return policy.ranks.total(scores)


def _select_rows(values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """The rows of a `[B, C]` tensor at the width of their micro-batch's mask."""
    return values[rows, : mask.shape[1]]
