"""preference_terms: loss, gradient and counts of one pass over the pairs, of which the public functions are views."""

import dataclasses

import pytest
import torch

from amir_kernels import pair_logits, preference_loss, preference_weights
from amir_kernels.preference_loss import PairRule, preference_terms

RULES = [
    PairRule(),
    PairRule(beta_dpo=3.0, reward_margin=0.5),
    PairRule(pair_mining="topk", max_pairs_per_group=2),
]
REDUCTIONS = [{}, {"reduction": "group_mean"}, {"reduction": "sum"}, {"num_pairs": 77}]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("options", REDUCTIONS, ids=str)
def test_the_public_functions_are_views_of_the_terms(rule, options):
    scores, rewards = torch.randn(24, requires_grad=True), torch.randint(0, 4, (24,)) / 2
    group, valid = torch.randint(0, 3, (24,)), torch.rand(24) > 0.2
    keywords = dataclasses.asdict(rule) | options | {"valid": valid}
    terms = preference_terms(scores, rewards, group, rule, valid=valid, **options)
    loss, pairs, accuracy, mean_logit = preference_loss(scores, rewards, group, **keywords)
    assert pairs > 0
    assert torch.equal(terms.loss, loss)
    assert torch.equal(terms.weights, preference_weights(scores, rewards, group, **keywords))
    assert not terms.weights.requires_grad
    assert torch.equal(torch.autograd.grad(terms.loss, scores)[0], terms.weights)
    assert (terms.pairs, terms.correct / pairs, terms.logit_sum / pairs) == (pairs, accuracy, mean_logit)
    chosen, rejected, _ = pair_logits(scores, rewards, group, **dataclasses.asdict(rule), valid=valid)
    assert torch.equal(terms.chosen, chosen.bincount(minlength=24))
    assert torch.equal(terms.rejected, rejected.bincount(minlength=24))


def test_sums_and_counts_add_over_groups():
    scores, rewards = torch.randn(12), torch.randint(0, 4, (12,)) / 2
    whole = preference_terms(scores, rewards, 4, PairRule(), reduction="sum")
    parts = [preference_terms(scores[i : i + 4], rewards[i : i + 4], 4, PairRule(), reduction="sum") for i in (0, 4, 8)]
    for name in ("pairs", "correct", "logit_sum", "loss"):
        torch.testing.assert_close(sum(getattr(part, name) for part in parts), getattr(whole, name))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"beta_dpo": 0.0}, "beta_dpo must be a positive finite number, got 0.0"),
        ({"reward_margin": -0.5}, "reward_margin must be a finite number of at least 0, got -0.5"),
        ({"pair_mining": "hard"}, "pair_mining must be one of 'all', 'topk', got 'hard'"),
        ({"max_pairs_per_group": 0}, "max_pairs_per_group must be at least 1, got 0"),
    ],
)
def test_a_rule_is_checked_where_it_is_made(parts, message):
    with pytest.raises(ValueError, match=message):
        PairRule(**parts)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PairRule().beta_dpo = 1.0
