"""What holds for any batch: splitting, reordering, padding and masking change nothing; wrong gradients are caught."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amir_kernels import (
    OBJECTIVES,
    amir_loss,
    group_advantage,
    pair_logits,
    policy_loss,
    preference_loss,
    preference_weights,
    sequence_logprob,
)

NAN = math.nan
REF_AND_BONUS = {"kl_coef": 0.1, "mirror_coef": 0.05, "entropy_coef": 0.02}


def named(name):
    objective = OBJECTIVES[name]
    return objective.replace(max_completion_length=11) if name == "dr_grpo" else objective


def batch(rows=8, length=9):
    mask = torch.rand(rows, length) > 0.3
    mask[3] = False
    mask[0, 0] = True
    lp = -2 * torch.rand(rows, length).double()
    old, ref = (lp + 0.3 * torch.randn(rows, length).double() for _ in range(2))
    return {
        "logprobs": lp.requires_grad_(),
        "old_logprobs": old,
        "ref_logprobs": ref,
        "advantages": torch.randn(rows).double(),
        "mask": mask,
        "entropy": torch.rand(rows, length).double(),
        "importance_weight": torch.rand(rows).double() + 0.5,
    }


def gradient(loss, inputs):
    return torch.autograd.grad(loss, inputs["logprobs"])[0]


def take(inputs, index):
    return {name: value[index] for name, value in inputs.items()}


# ---- micro-batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_add_up(name):
    inputs, objective = batch(), named(name).replace(**REF_AND_BONUS)
    whole = policy_loss(**inputs, objective=objective)
    divisors = {"num_tokens": inputs["mask"].sum(), "num_sequences": 8}
    parts = [
        policy_loss(**take(inputs, rows), **divisors, objective=objective)
        for rows in (slice(0, 3), slice(3, 4), slice(4, 8))
    ]
    loss = sum(part.loss for part in parts)
    assert abs(loss - whole.loss) < 1e-12
    assert (gradient(loss, inputs) - gradient(whole.loss, inputs)).abs().max() < 1e-14
    for metric, value in whole.metrics.items():
        assert abs(sum(part.metrics[metric] for part in parts) - value) < 1e-9, metric


def test_bnpo_is_local_and_dapo_of_the_step_where_told():
    inputs = batch()
    bnpo = OBJECTIVES["bnpo"].replace(clip_high=0.28)
    parts = [take(inputs, rows) for rows in (slice(0, 3), slice(3, 8))]
    local = sum(policy_loss(**part, objective=bnpo).loss for part in parts)
    step = sum(policy_loss(**part, objective=bnpo, num_tokens=inputs["mask"].sum()).loss for part in parts)
    dapo = policy_loss(**inputs, objective="dapo").loss
    assert abs(step - dapo) < 1e-12
    assert abs(local - dapo) > 1e-3


@pytest.mark.parametrize("normalize", ["mean", "sum"])
@pytest.mark.parametrize("ref_free", [False, True])
def test_groups_split_over_three_micro_batches(normalize, ref_free):
    # two interleaved groups, each of which is spread over all three micro-batches
    inputs, group = batch(), torch.tensor([0, 1, 0, 1, 1, 0, 0, 1])
    rewards = torch.tensor([1.0, 0, 0.5, 2, 1, 0, 0.25, 0.5])
    keywords = {"normalize": normalize, "lambda_reg": 0.7}
    whole = amir_loss(**inputs, rewards=rewards, group=group, ref_free=ref_free, **keywords)

    scores = sequence_logprob(inputs["logprobs"].detach(), inputs["mask"], normalize=normalize)
    if not ref_free:
        scores = scores - sequence_logprob(inputs["ref_logprobs"], inputs["mask"], normalize=normalize)
    weights = preference_weights(scores, rewards, group, valid=inputs["mask"].any(dim=1))
    loss = sum(
        amir_loss(
            **take(inputs, rows),
            rewards=None,
            group=None,
            preference_weights=weights[rows],
            ref_free=ref_free,
            num_sequences=8,
            **keywords,
        ).loss
        for rows in (slice(0, 3), slice(3, 5), slice(5, 8))
    )
    assert (gradient(loss, inputs) - gradient(whole.loss, inputs)).abs().max() < 1e-14


def test_whole_groups_in_micro_batches_with_the_pairs_of_the_step():
    scores, rewards = torch.randn(12).double(), torch.randint(0, 3, (12,)).float()
    whole = preference_loss(scores, rewards, 4)
    parts = [slice(0, 4), slice(4, 12)]
    got = [preference_loss(scores[rows], rewards[rows], 4, num_pairs=whole.pairs) for rows in parts]
    assert abs(sum(part.loss for part in got) - whole.loss) < 1e-15
    mean = preference_loss(scores, rewards, 4, reduction="group_mean")
    teaching = sum(int(preference_loss(scores[i : i + 4], rewards[i : i + 4], 4).pairs > 0) for i in (0, 4, 8))
    got = [
        preference_loss(scores[rows], rewards[rows], 4, reduction="group_mean", num_groups=teaching).loss
        for rows in parts
    ]
    assert abs(sum(got) - mean.loss) < 1e-15


# ---- masks and layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_mask_with_holes_equals_deleting_the_tokens(name):
    # 1 1 0 0 1: a tool's answer in the middle of a completion
    inputs, objective = batch(), named(name).replace(**REF_AND_BONUS)
    mask = inputs["mask"]
    holes = policy_loss(**inputs, objective=objective)
    kept = {key: inputs[key].detach()[mask] for key in ("logprobs", "old_logprobs", "ref_logprobs", "entropy")}
    kept["logprobs"].requires_grad_()
    bounds = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    rows = {key: inputs[key] for key in ("advantages", "importance_weight")}
    deleted = policy_loss(**kept, **rows, cu_seqlens=bounds, objective=objective)
    assert abs(holes.loss - deleted.loss) < 1e-12
    assert (gradient(holes.loss, inputs)[mask] - gradient(deleted.loss, kept)).abs().max() < 1e-14


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_entries_change_no_bit(name):
    inputs, objective = batch(), named(name).replace(**REF_AND_BONUS)
    inputs["rewards"], group = torch.randn(8), torch.tensor([0, 1, 0, 1, 1, 0, 0, 1])
    clean = amir_loss(**inputs, group=group, objective=objective)
    clean_gradient = gradient(clean.loss, inputs)
    for poison in (NAN, math.inf, -math.inf):
        dirty = {
            key: torch.where(inputs["mask"], value.detach(), poison) if value.shape == inputs["mask"].shape else value
            for key, value in inputs.items()
        }
        dirty["mask"] = inputs["mask"]
        dirty["advantages"] = torch.where(inputs["mask"].any(1), inputs["advantages"], poison)
        dirty["importance_weight"] = torch.where(inputs["mask"].any(1), inputs["importance_weight"], poison)
        dirty["rewards"] = torch.where(inputs["mask"].any(1), inputs["rewards"], poison)
        dirty["logprobs"].requires_grad_()
        got = amir_loss(**dirty, group=group, objective=objective)
        assert got.loss == clean.loss
        assert torch.equal(gradient(got.loss, dirty), clean_gradient)
        assert all(got.metrics[key] == value for key, value in clean.metrics.items())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_more_padding_changes_nothing(name):
    inputs, objective = batch(), named(name).replace(**REF_AND_BONUS)
    short = policy_loss(**inputs, objective=objective)
    wide = {
        key: torch.nn.functional.pad(value, (2, 3)) if value.shape == inputs["mask"].shape else value
        for key, value in inputs.items()
    }
    assert abs(policy_loss(**wide, objective=objective).loss - short.loss) < 1e-14


# ---- order ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_order_within_and_across_groups_does_not_matter(data):
    rows = data.draw(st.integers(1, 14))
    ids = torch.tensor(data.draw(st.lists(st.integers(-2, 3), min_size=rows, max_size=rows)))
    # distinct rewards and gaps: ties are broken by the order of the rows
    rewards = 2.0 ** torch.tensor(data.draw(st.permutations(range(rows)))).double()
    scores = torch.randn(rows).double()
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    renamed = ids[order] * 7 + 5
    for options in (
        {},
        {"reward_margin": 1.0},
        {"pair_mining": "topk"},
        {"max_pairs_per_group": 2},
        {"reduction": "group_mean"},
    ):
        before = preference_weights(scores, rewards, ids, **options)
        after = preference_weights(scores[order], rewards[order], renamed, **options)
        assert (after - before[order]).abs().max() < 1e-15
        # scores matter by their differences within a group only, and what one row gains another loses
        shift = (ids * 3).double()
        assert (preference_weights(scores + shift, rewards, ids, **options) - before).abs().max() < 1e-14
        assert all(abs(before[ids == number].sum()) < 1e-15 for number in ids.unique())
    for options in ({}, {"scale": "none"}, {"scale": "batch"}, {"baseline": "leave_one_out"}):
        before = group_advantage(rewards, ids, **options)
        after = group_advantage(rewards[order], renamed, **options)
        assert (after - before[order]).abs().max() < 1e-12
        assert all(abs(before[ids == number].sum()) < 1e-12 for number in ids.unique())


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_pairs_of_any_rewards(data):
    rows = data.draw(st.integers(1, 10))
    reward = st.sampled_from(
        [0.0, 0.1, 0.2, 0.30000000000000004, 0.3, 1.0, 1e6, 1e6 + 1, -1.0, NAN, math.inf, -math.inf]
    )
    rewards = torch.tensor(data.draw(st.lists(reward, min_size=rows, max_size=rows)), dtype=torch.float64)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    margin = data.draw(st.sampled_from([0.0, 0.1, 0.2, 1.0]))
    scores = torch.randn(rows).double()
    chosen, rejected, _ = pair_logits(scores, rewards, ids, reward_margin=margin)
    assert (ids[chosen] == ids[rejected]).all()
    assert (rewards[chosen] > rewards[rejected]).all()
    assert rewards[chosen].isfinite().all()
    assert len(chosen) == preference_loss(scores, rewards, ids, reward_margin=margin).pairs
    listed = set(zip(chosen.tolist(), rejected.tolist(), strict=True))
    assert len(listed) == len(chosen)
    assert not any((loser, winner) in listed for winner, loser in listed)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_order_of_completions_does_not_matter(name):
    inputs, objective = batch(), named(name).replace(**REF_AND_BONUS)
    order = torch.randperm(8)
    before, after = (policy_loss(**x, objective=objective) for x in (inputs, take(inputs, order)))
    assert abs(before.loss - after.loss) < 1e-12
    assert (gradient(before.loss, inputs) - gradient(after.loss, inputs)).abs().max() < 1e-15


# ---- the test of the tests -----------------------------------------------------------------------------------------


def rejects(got, exact):
    """Why `got` is not the gradient `[B, L]`: judged token by token against its row's size, zeros exactly."""
    if ((got != 0) & (exact == 0)).any():
        return "a gradient where there is none"
    if ((got - exact).abs() > 1e-5 * exact.abs().amax(dim=1, keepdim=True)).any():
        return "a token differs"
    return None


def grpo_gradient(inputs, **mutation):
    """dL/dlp of clipped grpo with k3, importance weights and pair term, from the formula; mistakes on request."""
    m = {"sign": 1.0, "low": 0.2, "high": 0.28, "kl": 0.1, "weights": True, "ratio": True, "swap": False} | mutation
    lp, mask = inputs["logprobs"].detach(), inputs["mask"]
    rho, d = torch.exp(lp - inputs["old_logprobs"]), inputs["ref_logprobs"] - lp
    A = inputs["advantages"][:, None]
    up, down = (A < 0, A > 0) if m["swap"] else (A > 0, A < 0)
    live = ~((up & (rho > 1 + m["high"])) | (down & (rho < 1 - m["low"])))
    weight = inputs["importance_weight"][:, None] if m["weights"] else 1.0
    policy = weight * live * (rho if m["ratio"] else 1.0) * A + m["kl"] * torch.expm1(d)
    tokens = mask.sum(1, keepdim=True).clamp(min=1)
    share = {"row": 1 / (8 * tokens), "token": 1 / mask.sum(), "width": 1 / (8 * 9)}[m.get("divisor", "row")]
    kept = torch.ones_like(mask) if m.get("mask_ignored") else mask
    g = m.get("lambda", 0.5) * inputs["pair_weights"][:, None] / (1 if m.get("summed") else tokens)
    return m["sign"] * torch.where(kept, -share * policy + m.get("pair_sign", 1.0) * g, 0)


MUTANTS = {
    "zero": {"sign": 0.0},
    "sign": {"sign": -1.0},
    "mask ignored": {"mask_ignored": True},
    "token mean": {"divisor": "token"},
    "padded width": {"divisor": "width"},
    "clip low for high": {"high": 0.2},
    "clip on the wrong side": {"swap": True},
    "no clip": {"low": 9.0, "high": 1e9},
    "ratio forgotten": {"ratio": False},
    "importance weight forgotten": {"weights": False},
    "KL dropped": {"kl": 0.0},
    "KL sign": {"kl": -0.1},
    "pair term dropped": {"lambda": 0.0},
    "pair sign": {"pair_sign": -1.0},
    "pair term summed": {"summed": True},
}


def test_mutant_gradients_are_rejected():
    inputs = batch()
    rewards, group = torch.randn(8), torch.tensor([0, 1, 0, 1, 1, 0, 0, 1])
    scores = sequence_logprob(inputs["logprobs"].detach() - inputs["ref_logprobs"], inputs["mask"])
    pair_weights = preference_weights(scores, rewards, group, valid=inputs["mask"].any(1))
    objective = OBJECTIVES["grpo"].replace(clip_high=0.28, kl_coef=0.1)
    for dtype in (torch.float64, torch.float32):
        ours = {key: value if key == "mask" else value.detach().to(dtype) for key, value in inputs.items()}
        ours["logprobs"].requires_grad_()
        loss = amir_loss(**ours, rewards=rewards, group=group, objective=objective, lambda_reg=0.5).loss
        got = gradient(loss, ours).double()
        written = inputs | {"pair_weights": pair_weights}
        assert rejects(got, grpo_gradient(written)) is None
        for mutant, mutation in MUTANTS.items():
            assert rejects(got, grpo_gradient(written, **mutation)) is not None, mutant
