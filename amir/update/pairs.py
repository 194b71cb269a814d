"""The pairs of an optimizer step, counted from its rewards: the divisor of the pair term, and the rows that it trains.

A pair is two completions of one prompt whose rewards differ by more than the margin. The pairs depend on the rewards
only, so they are counted before any forward pass. The loss and its gradient depend on scores, the sequence log-ratios:
`amir_loss` computes them for a micro-batch of complete groups, and `Pairs.terms` for groups that are split.

B completions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from amir_kernels.preference_loss import PairRule, PreferenceTerms, preference_terms

from ..config import RunConfig


@dataclass(frozen=True)
class Pairs:
    """The pairs of a whole step, as counts per completion, and the rule by which rewards form them."""

    rule: PairRule
    rewards: Tensor  # float32 [B]
    group: Tensor  # int64 [B], group ids
    chosen: Tensor  # int64 [B], pairs whose better completion this is
    rejected: Tensor  # int64 [B], pairs whose worse completion this is
    total: Tensor  # int64 scalar

    @property
    def participants(self) -> Tensor:
        """Completions that are in some pair, bool `[B]`."""
        return (self.chosen + self.rejected) > 0

    def terms(self, scores: Tensor, rows: Tensor) -> PreferenceTerms:
        """Loss, weights d loss / d score `[B]` and counts of the pairs among `rows`; the divisor is the step's pairs.

        `scores` `[B]`: log-ratio of each completion to the reference, in nats; `rows` bool `[B]`, complete groups.
        """
        return preference_terms(scores, self.rewards, self.group, self.rule, num_pairs=self.total, valid=rows)


def form_pairs(rewards: Tensor, group: Tensor, valid: Tensor, config: RunConfig) -> Pairs:
    """The pairs of a step's rewards `[B]`; none if lambda_reg is 0. `valid` bool `[B]`: rows that may form pairs."""
    rule = PairRule(config.beta_dpo, config.reward_margin, config.pair_mining, config.max_pairs_per_group)
    if config.lambda_reg == 0:
        none = torch.zeros_like(group)
        return Pairs(rule, rewards, group, none, none, none.sum())
    terms = preference_terms(torch.zeros_like(rewards), rewards, group, rule, valid=valid)
    return Pairs(rule, rewards, group, terms.chosen, terms.rejected, terms.pairs)
