"""Metrics from sums: known values, blanks where nothing is known, the same however a step is split."""

import itertools
import math
from collections import Counter
from statistics import mean

import pytest
import torch

from amir.config import RunConfig
from amir.run.metrics import METRICS, Clock, batch_sums, evaluation_metrics, step_metrics
from amir.update.batch import Batch, assemble
from amir.update.gradient import make_objective
from amir.update.optimizer import make_optimizer
from test_batch import tokens_of
from tiny import backward, policy, run_config, with_reference

NAN = math.nan
REWARDS = [{"name": "correctness", "weight": 2.0}, {"name": "integer", "weight": 0.5}]
TIMED = {"tokens_per_second", "peak_memory_mb", "step_seconds"}
# two groups of four: the first with pairs, the second all equal
SCORES = torch.tensor([[1, 1], [0, 1], [1, 0], [0, NAN], [0, 0], [0, 0], [0, 0], [0, 0]])
LENGTHS = [3, 5, 4, 9, 2, 2, 2, 2]


def batch_of(config: RunConfig, scores: torch.Tensor = SCORES, lengths: list[int] | None = None) -> Batch:
    tokens = tokens_of([3] * (len(scores) // 4), lengths or LENGTHS)
    truncated = torch.tensor([length == 9 for length in lengths or LENGTHS])
    return assemble(tokens, scores, truncated, config)


def row_of(config: RunConfig, sums: Counter[str]) -> dict[str, object]:
    clock = Clock()
    for name in ("rollout", "reward", "reference", "update"):
        clock.lap(name)
    sampled = Counter(sums)
    sampled.update(groups_sampled=2, sampling_rounds=1, unusable=0)
    return step_metrics(config, 1, sampled, torch.tensor(0.5), clock)


def test_known_values() -> None:
    config = run_config(rewards=REWARDS)
    row = row_of(config, batch_sums(batch_of(config), config))
    totals = torch.tensor([2.5, 0.5, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    expected = {
        "reward": float(totals.mean()),
        "reward_std": float(totals.std(correction=0)),
        "success": 0.25,
        "reward/correctness": 0.25,
        "reward/integer": 2 / 7,
        "unscored_share": 0,
        "pairs": 6,
        "zero_variance_share": 0.5,
        "zero_gradient_share": 0.5,
        "truncated_share": 1 / 8,
        "completion_tokens": 29 / 8,
        "right_tokens": 3.5,
        "wrong_tokens": 22 / 6,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert list(row) == [*METRICS, "reward/correctness", "reward/integer"]


def test_blanks_where_nothing_is_known() -> None:
    config = run_config(rewards=[{"name": "integer"}], lambda_reg=0.0)
    row = row_of(config, batch_sums(batch_of(config, torch.full((8, 1), NAN)), config))
    blank = ["reward", "success", "reward_std", "reward/integer", "right_tokens", "chosen_logprob", "kl", "entropy"]
    assert [row[name] for name in blank] == [None] * len(blank)
    assert row["unscored_share"] == 1
    assert row["preference_loss"] is None


def test_sums_add_over_ranks() -> None:
    config = run_config(rewards=REWARDS)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 2, (16, 2), generator=generator).float()
    scores[3] = NAN
    lengths = torch.randint(1, 10, (16,), generator=generator).tolist()
    whole = row_of(config, batch_sums(batch_of(config, scores, lengths), config))
    parts = Counter()
    for half in (slice(0, 8), slice(8, 16)):
        parts.update(batch_sums(batch_of(config, scores[half], lengths[half]), config))
    one, both = ({k: v for k, v in untimed(row).items() if v is not None} for row in (whole, row_of(config, parts)))
    assert one == pytest.approx(both)


@pytest.mark.parametrize("changes", [{"beta": 0.04}, {"entropy_coef": 0.01, "num_iterations": 2}], ids=str)
def test_a_step_in_micro_batches_reports_the_same(changes: dict[str, object]) -> None:
    rows = []
    for budget in (10_000, 40):
        config = run_config(rewards=REWARDS, micro_batch_tokens=budget, max_completion_length=9, **changes)
        made = policy(config)
        make_optimizer(config, made.trainable())
        batch = with_reference(made, batch_of(config), config)
        batch, sums = backward(made, batch, make_objective(config), config)
        sums.update(batch_sums(batch, config))
        rows.append(untimed(row_of(config, sums)))
    one, many = ({name: value for name, value in row.items() if value is not None} for row in rows)
    assert one == pytest.approx(many, rel=1e-4, abs=1e-6)
    assert rows[0]["kl"] > 0
    assert rows[0]["entropy"] > 0
    assert min(rows[0]["policy_grad_norm"], rows[0]["pair_grad_norm"]) > 0
    share = rows[0]["pair_grad_norm"] / (rows[0]["pair_grad_norm"] + rows[0]["policy_grad_norm"])
    assert rows[0]["pair_grad_share"] == pytest.approx(share)


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_entropy_is_that_of_full_logits_over_the_rows_that_were_trained(coefficient: float) -> None:
    config = run_config(rewards=REWARDS, micro_batch_tokens=40, temperature=0.7, entropy_coef=coefficient)
    made = policy(config)
    make_optimizer(config, made.trainable())
    batch, sums = backward(made, batch_of(config), make_objective(config), config)
    sums.update(batch_sums(batch, config))
    tokens = batch.tokens
    ids = torch.cat([tokens.prompt_ids[tokens.prompt_index], tokens.completion_ids], 1)
    mask = torch.cat([tokens.prompt_mask[tokens.prompt_index], tokens.completion_mask], 1).long()
    with torch.no_grad():
        logits = made.base(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    entropy = torch.distributions.Categorical(logits=logits[:, tokens.prompt_ids.shape[1] - 1 : -1] / 0.7).entropy()
    trained = tokens.completion_mask & batch.has_gradient[:, None]
    expected = float(entropy[trained].mean())
    assert bool(batch.has_gradient.all()) == (coefficient > 0)
    assert row_of(config, sums)["entropy"] == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(float(entropy.mean()), rel=1e-3)


def test_chosen_and_rejected_logprobs_are_means_over_pairs() -> None:
    config = run_config(rewards=REWARDS)
    made = policy(config)
    make_optimizer(config, made.trainable())
    batch, sums = backward(made, batch_of(config), make_objective(config), config)
    sums.update(batch_sums(batch, config))
    row = row_of(config, sums)
    with torch.no_grad():
        logprobs = made.logprobs(batch.tokens)
    mean = [float(logprobs[i].sum()) / LENGTHS[i] for i in range(8)]
    rewards = batch.rewards.tolist()
    pairs = [(i, j) for i in range(4) for j in range(4) if rewards[i] > rewards[j]]
    assert len(pairs) == row["pairs"] == 6
    assert row["chosen_logprob"] == pytest.approx(sum(mean[i] for i, _ in pairs) / 6, rel=1e-5)
    assert row["rejected_logprob"] == pytest.approx(sum(mean[j] for _, j in pairs) / 6, rel=1e-5)
    assert row["chosen_logprob"] != pytest.approx(row["rejected_logprob"], rel=1e-3)


def test_evaluations_count_right_answers_and_bear_unscored_ones() -> None:
    rows = [
        {"reward": 2.5, "rewards": {"correctness": 1.0, "style": 1.0}},
        {"reward": NAN, "rewards": {"correctness": None, "style": None}},
        {"reward": 0.5, "rewards": {"correctness": 0.0, "style": 1.0}},
    ]
    assert evaluation_metrics(3, rows, 1) == {"step": 3, "samples": 3, "success": 0.5, "reward": 1.5}
    unjudged = [{"reward": NAN, "rewards": {"style": None}}]
    assert evaluation_metrics(3, unjudged, 1) == {"step": 3, "samples": 1, "success": None, "reward": None}


def test_pass_at_k_is_the_share_of_draws_of_k_with_a_right_one() -> None:
    right = [[1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0], [0] * 8, [1] * 4 + [0] * 4]
    rows = [{"reward": float(r), "rewards": {"correctness": float(r)}} for prompt in right for r in prompt]
    found = evaluation_metrics(3, rows, 8)
    assert list(found) == ["step", "samples", "success", "reward", "pass@2", "pass@4", "pass@8"]
    for k in (2, 4, 8):
        shares = [mean(any(draw) for draw in itertools.combinations(prompt, k)) for prompt in right]
        assert found[f"pass@{k}"] == pytest.approx(mean(shares))
    for row in rows[1:8]:  # of the first prompt one completion is judged, which is too few for any k
        row["rewards"]["correctness"] = None
    shares = [mean(any(draw) for draw in itertools.combinations(prompt, 2)) for prompt in right[1:]]
    assert evaluation_metrics(3, rows, 8)["pass@2"] == pytest.approx(mean(shares))
    assert evaluation_metrics(3, rows[1:8], 8)["pass@2"] is None


def untimed(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in TIMED and not name.endswith("_seconds")}
