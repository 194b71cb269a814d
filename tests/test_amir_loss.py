"""The AMIR-GRPO loss: known numbers, the pair term on top of any objective, refusals."""

import html
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from amir_kernels import OBJECTIVES, amir_loss, policy_loss, preference_weights, reference
from token_batches import CLIPS, batch, compare, fixture, named, pack

NAN = math.nan


@pytest.mark.parametrize("function", [amir_loss, reference.amir_loss])
def test_amir_golden(function):
    expected = torch.tensor(
        [
            [-0.10497591, 0.00015120, -0.10000344, -0.07459840],
            [0.07373838, 0.12887812, 0.07036967, 0.0],
            [0.04380300, -0.00035054, 0.04412021, 0.04182927],
        ]
    )
    for dtype in (torch.float32, torch.float64):
        logprobs, old, ref, advantages, mask = fixture(dtype)
        rewards = torch.tensor([2.0, 0.0, 0.5], dtype=dtype)
        objective = OBJECTIVES["grpo"].replace(kl_coef=0.04, **CLIPS)
        got = function(logprobs, old, advantages, rewards, 3, mask, ref_logprobs=ref, objective=objective)
        assert abs(got.loss.item() - 0.035028232) < 1e-6
        assert abs(got.preference.item() - 0.689543419) < 1e-6
        assert abs(got.policy.item() - 0.028132798) < 1e-6
        (gradient,) = torch.autograd.grad(got.loss, logprobs)
        assert (gradient - expected).abs().max() < 2e-8


def test_amir_weights_golden():
    scores = torch.tensor([0.0375, -0.05 / 3, 0.0125], dtype=torch.float64)
    weights = preference_weights(scores, torch.tensor([2.0, 0.0, 0.5]), 3)
    assert (weights + torch.tensor([0.066402780, -0.066388891, -0.000013889])).abs().max() < 1e-8


@pytest.mark.parametrize("normalize", ["mean", "sum"])
@pytest.mark.parametrize("ref_free", [False, True])
def test_amir_equals_reference(normalize, ref_free):
    inputs, rewards = batch(), torch.tensor([1.0, 0, 9, 0.5, 1, 0])
    keywords = {
        "group": torch.tensor([3, 1, 3, 3, 1, 3]),
        "rewards": rewards,
        "objective": "gspo_token",
        "normalize": normalize,
        "ref_free": ref_free,
        "beta_dpo": 0.7,
        "lambda_reg": 0.3,
        "reward_margin": 0.25,
        "num_pairs": 11,
    }
    for chosen in (inputs, pack(inputs, torch.tensor([7, 3, 4, 0, 7, 5]))[0]):
        for extra in ({}, {"pair_mining": "topk"}, {"max_pairs_per_group": 2}):
            ours, theirs = (f(**chosen, **keywords, **extra) for f in (amir_loss, reference.amir_loss))
            compare(ours, theirs, chosen, 1e-12)
            assert abs(ours.loss - ours.policy - 0.3 * ours.preference) < 1e-15
            assert abs(ours.preference - theirs.preference) < 1e-12


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_pair_term_rides_on_every_objective(name):
    # its share of dL/dlp is lambda g_i m / n_i, whatever the policy term: the add-on stands outside clips and weights
    inputs, rewards, group = batch(), torch.tensor([1.0, 0, 9, 0.5, 1, 0]), torch.tensor([3, 1, 3, 3, 1, 3])
    lp, mask = inputs["logprobs"], inputs["mask"]
    tokens = mask.sum(1, keepdim=True).clamp(min=1)
    scores = torch.where(mask, lp - inputs["ref_logprobs"], 0).sum(1) / tokens[:, 0]
    g = preference_weights(scores.detach(), rewards, group, valid=mask.any(1))
    loss = amir_loss(**inputs, rewards=rewards, group=group, objective=named(name), lambda_reg=0.3)
    (whole,) = torch.autograd.grad(loss.loss, lp, retain_graph=True)
    (policy,) = torch.autograd.grad(policy_loss(**inputs, objective=named(name)).loss, lp)
    assert (whole - policy - 0.3 * g[:, None] * mask / tokens).abs().max() < 1e-15
    # the parts come apart: each has its own graph
    (pairs,) = torch.autograd.grad(loss.preference, lp)
    assert (whole - policy - 0.3 * pairs).abs().max() < 1e-15


def test_amir_metrics_by_hand():
    logprobs, old, ref, advantages, mask = fixture()
    rewards = torch.tensor([2.0, 0.0, 0.5])
    metrics = amir_loss(logprobs, old, advantages, rewards, 3, mask, ref_logprobs=ref).metrics
    mean = [-3.65 / 4, -2.6 / 3, -1.9 / 4]
    score = [0.15 / 4, -0.05 / 3, 0.05 / 4]
    expected = {
        "pairs": 3,
        "pairs_correct": 3,
        "pair_logit_sum": 0.2 * 2 * (score[0] - score[1]),
        "chosen_logprob_sum": 2 * mean[0] + mean[2],
        "rejected_logprob_sum": 2 * mean[1] + mean[2],
    }
    for name, value in expected.items():
        assert abs(metrics[name] - value) < 1e-12, name
    # an empty row forms no pair, though its score of 0 would beat both others
    metrics = amir_loss(
        logprobs, old, advantages, rewards, 3, mask * torch.tensor([[0], [1], [1]]), ref_logprobs=ref
    ).metrics
    assert metrics["pairs"] == 1


def test_amir_keeps_the_lambda_outside():
    logprobs, old, ref, advantages, mask = fixture()
    rewards = torch.tensor([2.0, 0.0, 0.5])
    plain = policy_loss(logprobs, old, advantages, mask).loss
    for strength in (0.0, 0.01, 5.0):
        got = amir_loss(logprobs, old, advantages, rewards, 3, mask, ref_logprobs=ref, lambda_reg=strength)
        assert got.policy == plain
        assert abs(got.preference.item() - 0.689543419) < 1e-6
        assert got.loss == got.policy + strength * got.preference


def test_amir_compiles_as_one_graph():
    inputs, _ = pack(batch(torch.float32), torch.tensor([7, 3, 4, 0, 7, 5]))
    logprobs, rewards = inputs.pop("logprobs"), torch.arange(6.0)
    for group in (3, torch.tensor([1, 0, 1, 0, 0, 1])):

        def loss(lp, group=group):
            return amir_loss(lp, rewards=rewards, group=group, **inputs)

        torch._dynamo.reset()
        got = torch.compile(loss, backend="aot_eager", fullgraph=True)(logprobs)
        compare(got, loss(logprobs), inputs | {"logprobs": logprobs}, 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ref_logprobs": None}, "needs ref_logprobs, got None; pass them, or ref_free=True"),
        ({"rewards": None}, "rewards and group are needed to form pairs, got rewards=None; pass both"),
        ({"group": None}, "rewards and group are needed to form pairs, got group=None; pass both"),
        ({"group": 4}, "group=4 must be at least 1 and divide the 6 rows; unequal groups need ids"),
        ({"rewards": torch.ones(5)}, "rewards must have shape \\[6\\] .*, got \\[5\\]"),
        ({"lambda_reg": NAN}, "lambda_reg must be a finite number, got nan"),
        ({"ref_free": "false"}, "ref_free must be True or False, got 'false'"),
        ({"beta_dpo": -1.0}, "beta_dpo must be a positive finite number, got -1.0"),
        ({"normalize": "tokens"}, "normalize must be one of 'mean', 'sum', got 'tokens'"),
        ({"preference_weights": torch.ones(5)}, "preference_weights must have shape \\[6\\] .*, got \\[5\\]"),
    ],
)
def test_amir_refusals(change, message):
    arguments = batch() | {"rewards": torch.ones(6), "group": 3} | change
    with pytest.raises((ValueError, TypeError), match=message):
        amir_loss(**arguments)


ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "pair-term.md"


@pytest.fixture
def lengths(monkeypatch):
    """bench/lengths.py, which draws the picture."""
    if not DOCUMENT.exists():
        pytest.skip("the sources are not here: a wheel is tested")
    monkeypatch.syspath_prepend(ROOT / "bench")
    import lengths

    yield lengths
    sys.modules.pop("lengths", None)


def test_the_table_of_lengths_is_what_the_losses_do(lengths):
    def push(objective, pairs=None):
        return lengths.push(objective, pairs, 400, longest=400)

    expected = {
        "`grpo`": push("grpo"),
        "`dapo`": push("dapo"),
        "`dr_grpo`, length 400": push("dr_grpo"),
        'pair term, `normalize="mean"`': push(None, "mean"),
        'pair term, `normalize="sum"`': push(None, "sum"),
        "`grpo` with the mean pair term": push("grpo", "mean"),
        "`grpo` with the sum pair term": push("grpo", "sum"),
        "`dapo` with the mean pair term": push("dapo", "mean"),
    }
    rows = re.findall(r"^\| (.+?) \| (\d\.\d{4}) \| (\d\.\d{4}) \| (\d\.\d{4}) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert {row[0] for row in rows} == set(expected)
    for label, *numbers in rows:
        short, long = expected[label]
        for printed, exact in zip(numbers, (short, long, long / short), strict=True):
            assert abs(float(printed) - exact) <= 0.5001e-4, label


def test_the_pushes_are_those_of_the_formulas(lengths):
    """By hand: advantages of +-0.935 over 8 rows and n tokens; beta / (2 K) per pair won, K = 16, over n tokens."""
    n, advantage = 400, 0.5 / (math.sqrt(2 / 7) + 1e-4)
    assert lengths.push("grpo", None, n)[1] == pytest.approx(1000 * advantage / 8 / n)
    assert lengths.push("dapo", None, n)[1] == pytest.approx(1000 * advantage / (400 + 100 + 2 * n))
    assert lengths.push("dr_grpo", None, n)[1] == pytest.approx(1000 * 0.5 / 8 / 800)
    assert lengths.push(None, "sum", n)[1] == pytest.approx(1000 * 0.01 * 4 * 0.2 / 2 / 16)
    assert lengths.push(None, "mean", n)[1] == pytest.approx(1000 * 0.01 * 4 * 0.2 / 2 / 16 / n)


def test_the_picture_of_lengths_shows_what_the_losses_do(lengths):
    text = lengths.PICTURE.read_text()
    drawn = json.loads(html.unescape(re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)[1]))
    expected = lengths.series()
    assert drawn.keys() == expected.keys()
    for label, pushes in expected.items():
        assert torch.allclose(torch.tensor(drawn[label]), torch.tensor(pushes), rtol=1e-6), label
        assert label.replace('"', "&quot;") in text or label in text
