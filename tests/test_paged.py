"""Continuous batching: the policy's own distribution at its temperature, its own log-probs, whole groups, one seed."""

import math

import pytest
import torch
from torch import Tensor

from amir.errors import ConfigError, RunStopped
from amir.rollout.paged import Paged
from amir.rollout.samplers import make_sampler
from amir.tokens import pad_right
from tiny import EOS, VOCAB, padded, policy, run_config

PROMPTS = [[5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20]]
CONFIG = run_config(temperature=0.7, sampler={"name": "paged"})


@pytest.fixture(scope="module")
def paged() -> Paged:
    made = make_sampler(CONFIG, policy(CONFIG), None, print)
    assert isinstance(made, Paged)
    return made


def next_token(made: Paged, ids: list[int]) -> Tensor:
    """The distribution after `ids` from full logits, float64 `[V]`."""
    with torch.no_grad():
        logits = made.policy.base(input_ids=torch.tensor([ids])).logits[0, -1]
    return (logits.double() / made.policy.temperature).softmax(-1)


def surprise(counts: Tensor, expected: Tensor) -> float:
    """Chi-square of counts against probabilities in standard deviations from its mean; cells below 5 are joined."""
    expected = expected * counts.sum()
    rare = expected < 5
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    freedom = len(seen) - 1
    return float(((seen - wanted).square() / wanted).sum() - freedom) / math.sqrt(2 * freedom)


def test_first_and_second_tokens_follow_the_policy_at_its_temperature(paged) -> None:
    bounded = Paged(paged.policy, run_config(sampler={"name": "paged", "batch_tokens": 256}).sampler)
    rollout = bounded.sample([PROMPTS[1]], 3000, 2, seed=0)
    ids = padded(rollout).completion_ids
    first = ids[:, 0]
    counts = torch.bincount(first, minlength=VOCAB)
    law = next_token(paged, PROMPTS[1])
    assert abs(surprise(counts, law)) < 4
    flat = law.sqrt() / law.sqrt().sum()
    assert surprise(counts, flat) > 20, "the test must tell another temperature apart"
    usual = int(counts.argmax())
    assert usual != EOS
    second = torch.bincount(ids[first == usual, 1], minlength=VOCAB)
    assert abs(surprise(second, next_token(paged, [*PROMPTS[1], usual]))) < 4


def test_completions_of_a_group_are_independent(paged) -> None:
    rollout = paged.sample([PROMPTS[0]] * 400, 2, 1, seed=1)
    first, second = padded(rollout).completion_ids[:, 0].view(400, 2).T
    same = float(next_token(paged, PROMPTS[0]).square().sum())
    deviation = math.sqrt(same * (1 - same) / 400)
    assert abs(float((first == second).double().mean()) - same) < 4 * deviation
    apart = float((first[:-1] == first[1:]).double().mean())
    assert abs(apart - same) < 4 * deviation


def test_log_probs_are_the_policys_and_groups_stand_side_by_side(paged) -> None:
    rollout = paged.sample(PROMPTS, 4, 9, seed=3)
    tokens = padded(rollout)
    assert tokens.prompt_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for place, ids in enumerate(PROMPTS):
        assert tokens.prompt_ids[place][tokens.prompt_mask[place]].tolist() == ids
    with torch.no_grad():
        expected = paged.policy.logprobs(tokens)
    assert rollout.logprobs is not None
    assert list(map(len, rollout.logprobs)) == tokens.completion_lengths.tolist()
    assert torch.allclose(pad_right(rollout.logprobs, 0.0), expected, atol=1e-5)
    ends = [row[keep][-1] for row, keep in zip(tokens.completion_ids, tokens.completion_mask, strict=True)]
    assert [bool(end != EOS) for end in ends] == rollout.truncated
    assert 0 < sum(rollout.truncated) < 12
    assert rollout.texts[0] == paged.policy.tokenizer.decode(
        tokens.completion_ids[0][tokens.completion_mask[0]], skip_special_tokens=True
    )


def test_it_repeats_with_its_seed_and_leaves_model_and_random_state_alone(paged) -> None:
    before, attention = torch.get_rng_state(), paged.policy.base.config._attn_implementation
    first, second = (paged.sample(PROMPTS, 2, 5, seed=3).completions for _ in range(2))
    assert first == second
    assert first != paged.sample(PROMPTS, 2, 5, seed=4).completions
    assert torch.equal(before, torch.get_rng_state())
    assert paged.policy.base.config._attn_implementation == attention


def test_a_cache_too_small_for_the_rollout_makes_completions_wait(paged) -> None:
    config = run_config(temperature=0.7, sampler={"name": "paged", "cache_tokens": 1024, "batch_tokens": 64})
    small = Paged(paged.policy, config.sampler)
    rollout = small.sample(PROMPTS, 8, 9, seed=3)
    with torch.no_grad():
        assert torch.allclose(pad_right(rollout.logprobs, 0.0), paged.policy.logprobs(padded(rollout)), atol=1e-5)


def test_an_engine_that_fails_stops_the_run(paged, monkeypatch) -> None:
    def nothing(self: object, inputs: object, *settings: object) -> dict[str, object]:
        return {}

    monkeypatch.setattr(type(paged.policy.base), "generate_batch", nothing)
    with pytest.raises(RunStopped, match=r"generate_batch failed \(0 of 6 completions came back\); see its log"):
        paged.sample(PROMPTS, 2, 5, seed=3)


def test_layers_checkpoint_after_sampling_as_before() -> None:
    config = run_config(sampler={"name": "paged"}, gradient_checkpointing=True)
    made = make_sampler(config, policy(config), None, print)
    modes = [module.training for module in made.policy.model.modules()]
    assert any(modes)
    made.sample(PROMPTS[:1], 2, 2, seed=0)
    assert [module.training for module in made.policy.model.modules()] == modes


def test_a_prompt_of_one_token_is_refused(paged) -> None:
    with pytest.raises(ConfigError, match=r"cannot share a prompt of one token .*; set min_prompt_length: 2"):
        paged.sample([[5], PROMPTS[0]], 2, 2, seed=0)
