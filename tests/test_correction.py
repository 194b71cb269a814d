"""Importance weights for what another engine sampled: known numbers, gradients, what is missing, long completions."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from amir.config import CorrectionSettings, RunConfig
from amir.rollout.generate import sample
from amir.run.metrics import Clock, batch_sums, step_metrics
from amir.update.batch import make_batch
from amir.update.correction import importance_weight, mismatch_sums
from amir.update.gradient import make_objective
from tiny import PAD, backward, padded, policy, run_config

NAN = math.nan
OLD = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -5.0]])
SAMPLED = torch.tensor([[-1.5, -2.0, NAN], [-0.5, -0.9, 7.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
REWARDS = torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0])
PROMPTS = [[5, 6, 7], [12, 13, 14, 15]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"level": "token", "max": 1.5}, [[1.5, 1, 1], [math.exp(-0.5), math.exp(-0.1), 1]]),
        ({"level": "token", "min": 0.7, "max": 2.0}, [[math.exp(0.5), 1, 1], [0.7, math.exp(-0.1), 1]]),
        ({"level": "token", "mode": "mask", "min": 0.7, "max": 1.5}, [[0, 1, 1], [0, math.exp(-0.1), 1]]),
        ({"level": "sequence", "max": 2.0}, [math.exp(0.5), math.exp(-0.6)]),
        ({"level": "sequence", "max": 1.2, "min": 0.9}, [1.2, 0.9]),
        ({"level": "sequence", "mode": "mask", "min": 0.5, "max": 1.2}, [0.0, math.exp(-0.6)]),
    ],
    ids=str,
)
def test_known_weights(settings: dict[str, object], expected: list[object]) -> None:
    old = OLD.clone().requires_grad_()
    weight = importance_weight(old, SAMPLED, MASK, CorrectionSettings.model_validate(settings))
    assert not weight.requires_grad
    assert torch.allclose(weight, torch.tensor(expected))


def test_far_log_probs_stay_finite_and_infinite_ones_count_as_missing() -> None:
    sampled = torch.tensor([[-500.0, -math.inf, -2.0], [300.0, NAN, 0.0]])
    for mode, low in (("truncate", 0.0), ("mask", 0.5)):
        for level in ("token", "sequence"):
            settings = CorrectionSettings.model_validate({"level": level, "mode": mode, "min": low})
            assert importance_weight(OLD, sampled, MASK, settings).isfinite().all()
    sums = mismatch_sums(OLD, sampled, MASK, None)
    assert (sums["logprobs_known"], sums["logprobs_missing"]) == (3, 2)
    assert all(math.isfinite(value) for value in sums.values())


def test_a_small_mean_difference_drops_long_completions_at_sequence_level() -> None:
    """Methods that weigh whole completions: 0.012 nats a token are a ratio of 3.32 at 100 tokens, 1.6e5 at 1000."""
    settings = CorrectionSettings.model_validate({"level": "sequence", "mode": "mask", "min": 0.5, "max": 3.0})
    for length, kept in ((10, True), (100, False), (1000, False)):
        sampled = torch.full((1, length), -2.012)
        weight = importance_weight(sampled + 0.012, sampled, torch.ones(1, length, dtype=torch.bool), settings)
        assert bool(weight > 0) == kept
    by_token = importance_weight(
        sampled + 0.012, sampled, torch.ones(1, 1000, dtype=torch.bool), settings.model_copy(update={"level": "token"})
    )
    assert torch.allclose(by_token, torch.tensor(math.exp(0.012)))


def test_sums_give_the_mismatch_and_the_effective_sample_size() -> None:
    settings = CorrectionSettings.model_validate({"level": "sequence", "max": 1.5, "min": 0.9})
    sums = mismatch_sums(OLD, SAMPLED, MASK, settings)
    assert sums["mismatch_sum"] / sums["logprobs_known"] == pytest.approx((0.5 + 0 + 0.5 + 0.1) / 4)
    assert sums["mismatch_max"] == pytest.approx(0.5)
    c = torch.tensor([0.5, -0.6]).exp()
    effective = sums["weight_sum"] ** 2 / (sums["importance_weights"] * sums["weight_square_sum"])
    assert effective == pytest.approx(float(c.sum() ** 2 / (2 * c.square().sum())))
    assert sums["weights_bounded"] == 2


def gradient(config: RunConfig, shift: Tensor | None) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The step's gradient where the sampler's log-probs are the trainer's less `shift`, and the step's metrics."""
    made = policy(config)
    rollout = sample(made, PROMPTS, 4, 9, seed=3)
    batch = make_batch(rollout, REWARDS[:, None], config, pad_id=PAD)
    if shift is not None:
        with torch.no_grad():
            old = made.logprobs(padded(rollout))
        batch = replace(batch, sampled_logprobs=old - shift)
    batch, sums = backward(made, batch, make_objective(config), config)
    clock = Clock()
    for lap in ("rollout", "reward", "reference", "update"):
        clock.lap(lap)
    sums.update(batch_sums(batch, config))
    sums.update(groups_sampled=2, sampling_rounds=1, unusable=0)
    return {n: p.grad.clone() for n, p in made.trainable().items()}, step_metrics(
        config, 1, sums, torch.tensor(0.0), clock
    )


def test_the_policy_terms_gradient_is_weighted_and_the_pair_terms_is_not() -> None:
    """One shift for all tokens weighs them all alike: the policy's gradient scales, the pairs' stays."""
    correction = {"level": "token", "max": 5.0}
    plain, _ = gradient(run_config(lambda_reg=0, micro_batch_tokens=60), None)
    both, _ = gradient(run_config(lambda_reg=0.5, micro_batch_tokens=60), None)
    shift = torch.tensor(0.3)
    weighted, metrics = gradient(run_config(lambda_reg=0, correction=correction, sampler={"name": "paged"}), shift)
    with_pairs, _ = gradient(run_config(lambda_reg=0.5, correction=correction, sampler={"name": "paged"}), shift)
    factor = math.exp(0.3)
    for name, grad in plain.items():
        assert torch.allclose(weighted[name], factor * grad, rtol=1e-4, atol=1e-6)
        assert torch.allclose(with_pairs[name], both[name] + (factor - 1) * grad, rtol=1e-3, atol=1e-5)
    assert max(float(grad.abs().max()) for grad in plain.values()) > 1e-3
    assert metrics["mismatch"] == pytest.approx(0.3, abs=1e-4)
    assert metrics["effective_sample_share"] == pytest.approx(1)


def test_without_correction_the_mismatch_is_measured_and_changes_nothing() -> None:
    plain, untouched = gradient(run_config(), None)
    measured, metrics = gradient(run_config(sampler={"name": "paged"}), torch.tensor(-0.2))
    assert all(torch.equal(measured[name], grad) for name, grad in plain.items())
    assert metrics["mismatch"] == pytest.approx(0.2, abs=1e-4)
    assert metrics["corrected_share"] is None
    assert untouched["mismatch"] is None


def test_missing_log_probs_weigh_one() -> None:
    config = run_config(correction={"level": "token", "max": 5.0}, sampler={"name": "paged"})
    plain, _ = gradient(run_config(), None)
    missing, metrics = gradient(config, torch.tensor(NAN))
    assert all(torch.equal(missing[name], grad) for name, grad in plain.items())
    assert metrics["missing_logprob_share"] == 1
    assert metrics["mismatch"] is None


def test_weights_do_not_depend_on_micro_batches() -> None:
    shift = 0.2 * torch.randn(8, 9, generator=torch.Generator().manual_seed(5))
    for correction in (
        {"level": "token", "max": 1.1, "min": 0.9},
        {"level": "sequence", "mode": "mask", "min": 0.6, "max": 1.5},
    ):
        grads = [
            gradient(
                run_config(correction=correction, sampler={"name": "paged"}, micro_batch_tokens=tokens),
                shift,
            )
            for tokens in (20, 60, 1000)
        ]
        for name, grad in grads[-1][0].items():
            assert torch.allclose(grads[0][0][name], grad, rtol=1e-3, atol=1e-5)
            assert torch.allclose(grads[1][0][name], grad, rtol=1e-3, atol=1e-5)
        assert 0 < grads[0][1]["corrected_share"] < 1
        assert grads[0][1]["corrected_share"] == pytest.approx(grads[-1][1]["corrected_share"])
