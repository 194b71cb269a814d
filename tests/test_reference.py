"""The references of groups, pairs and policy losses: differentiable in float64, and right by brute force."""

import math
from itertools import combinations, product

import pytest
import torch

from amir_kernels import OBJECTIVES, amir_loss, policy_loss, reference

NAN = math.nan


def named(name):
    objective = OBJECTIVES[name]
    return objective.replace(max_completion_length=9) if name == "dr_grpo" else objective


def fixed_inputs():
    """Away from every kink: no ratio within 1e-3 of a bound, so that finite differences are fair."""
    lp = torch.tensor([[-0.2, -1.1, -0.05, -2.3], [-0.7, -0.4, -1.5, -9.0], [-0.3, -0.9, -0.6, -0.1]]).double()
    old = torch.tensor([[-0.25, -1.5, -0.05, -2.0], [-0.65, -0.9, -1.4, NAN], [-0.35, -0.6, -0.65, -0.1]]).double()
    ref = torch.tensor([[-0.3, -1.2, -0.1, -2.2], [-0.6, -0.5, -1.45, NAN], [-0.3, -0.8, -0.7, -0.15]]).double()
    entropy = torch.tensor([[0.3, 0.8, 0.1, 1.2], [0.6, 0.2, 0.9, 9.0], [0.4, 0.7, 0.5, 0.1]]).double()
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
    return lp.requires_grad_(), old, ref, entropy.requires_grad_(), mask, torch.tensor([1.2, -0.7, -0.5]).double()


DETACHED = ("gspo_token", "cispo", "vespo")
"""objectives whose gradient is by design not that of their value: parts of it are constants to the gradient"""


@pytest.mark.parametrize(
    ("name", "corrected"),
    [
        (name, corrected)
        for name, corrected in product(OBJECTIVES, (False, True))
        if name not in DETACHED and not (corrected and OBJECTIVES[name].ratio_level == "none")
    ],
)
@pytest.mark.parametrize("function", [policy_loss, reference.policy_loss])
def test_policy_loss_gradcheck(function, name, corrected):
    lp, old, ref, entropy, mask, advantages = fixed_inputs()
    objective = named(name).replace(kl_coef=0.3, mirror_coef=0.2, entropy_coef=0.1, kl_bias_correction=corrected)

    def loss(lp, entropy):
        return function(lp, old, advantages, mask, ref_logprobs=ref, objective=objective, entropy=entropy).loss

    assert torch.autograd.gradcheck(loss, (lp, entropy))


@pytest.mark.parametrize("name", DETACHED)
@pytest.mark.parametrize("function", [policy_loss, reference.policy_loss])
def test_policy_loss_gradcheck_with_the_constants_frozen(function, name):
    lp, old, _, _, mask, advantages = fixed_inputs()
    objective = named(name).replace(clip_low=0.2, clip_high=0.28) if name == "cispo" else named(name)
    (gradient,) = torch.autograd.grad(function(lp, old, advantages, mask, objective=objective).loss, lp)
    base = torch.where(mask.bool(), (lp - old).detach(), 0)
    tokens, total = mask.sum(1, keepdim=True), mask.sum()
    mean_ratio = torch.exp(base.sum(1, keepdim=True) / tokens)

    def frozen(lp):
        """What the objective differentiates, with its constants taken at the base point."""
        if name == "cispo":
            per_token = -base.exp().clamp(0.8, 1.28) * advantages[:, None] * lp
            return torch.where(mask.bool(), per_token, 0).sum() / total
        if name == "vespo":
            w = base.sum(1).exp()
            k, lam = ((advantages >= 0) * sign + other for sign, other in ((-1.0, 3.0), (1.0, 2.0)))
            phi = lam.double().exp() * w**k * torch.exp(-lam * w)
            return torch.where(mask.bool(), -(phi * advantages)[:, None] * lp, 0).sum() / total
        ratio = mean_ratio * torch.exp(torch.where(mask.bool(), lp - fixed_inputs()[0].detach(), 0))
        gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages[:, None])
        return -(torch.where(mask.bool(), gain, 0) / tokens).sum() / 3

    leaf = lp.detach().requires_grad_()
    assert torch.autograd.gradcheck(frozen, leaf)
    (expected,) = torch.autograd.grad(frozen(leaf), leaf)
    assert (gradient - expected).abs().max() < 1e-12


@pytest.mark.parametrize("function", [amir_loss, reference.amir_loss])
@pytest.mark.parametrize("normalize", ["mean", "sum"])
def test_amir_loss_gradcheck(function, normalize):
    lp, old, ref, _, mask, advantages = fixed_inputs()
    objective = OBJECTIVES["gspo"].replace(kl_coef=0.3)

    def loss(lp):
        return function(
            lp,
            old,
            advantages,
            torch.tensor([2.0, 0.0, 0.5]),
            3,
            mask,
            ref_logprobs=ref,
            objective=objective,
            lambda_reg=2.0,
            normalize=normalize,
        ).loss

    assert torch.autograd.gradcheck(loss, lp)


def test_reference_preference_loss_can_be_differentiated_twice():
    scores = torch.randn(5, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0, 2, 0, 1])
    assert torch.autograd.gradgradcheck(lambda s: reference.preference_loss(s, rewards, 5, beta_dpo=2.0).loss, scores)


def test_preference_loss_by_brute_force():
    scores, rewards = torch.randn(6, dtype=torch.float64), torch.tensor([1.0, 0.5, 0, 1, 0.5, 0])
    losses = [
        math.log1p(math.exp(-0.2 * float(scores[i] - scores[j])))
        for i, j in product(range(6), repeat=2)
        if i // 3 == j // 3 and rewards[i] > rewards[j]
    ]
    assert abs(reference.preference_loss(scores, rewards, 3).loss - sum(losses) / len(losses)) < 1e-12


def test_leave_one_out_by_brute_force():
    rewards = torch.tensor([0.5, 1.0, 0.25, 0.0], dtype=torch.float64)
    got = reference.group_advantage(rewards, 4, baseline="leave_one_out", scale="none")
    for row in range(4):
        others = [rewards[other] for other in range(4) if other != row]
        assert abs(got[row] - (rewards[row] - sum(others) / 3)) < 1e-12


def test_pass_at_k_contributions_rebuild_the_estimate():
    # the k-subsets with and without row i are all k-subsets: weighed by their counts they give pass@k of the group
    rewards, n, k = torch.tensor([1.0, 0, 0, 1, 0], dtype=torch.float64), 5, 2
    whole = 1 - math.comb(3, 2) / math.comb(5, 2)
    for row, advantage in enumerate(reference.pass_at_k_advantage(rewards, n, k)):
        others = torch.cat([rewards[:row], rewards[row + 1 :]]).tolist()
        without = sum(max(subset) for subset in combinations(others, k)) / math.comb(n - 1, k)
        with_row = advantage / k + without
        assert abs(k / n * with_row + (1 - k / n) * without - whole) < 1e-12
