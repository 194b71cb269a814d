"""Sampling: EOS kept once, truncation known, prefilling changes nothing, and scores are those of the sampled tokens."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GenerationConfig, GPT2Config, Qwen2Config

from amir.errors import RunStopped
from amir.policy.load import wrap_policy
from amir.rollout.generate import _PreallocatedLayer, sample
from amir.rollout.rollout import Rollout, concatenate, make_rollout
from amir.rollout.samplers import make_sampler
from amir.update.batch import make_batch
from tiny import EOS, PAD, model, padded, policy, run_config, tokenizer

PROMPTS = [[5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20]]


def test_a_completion_ends_with_its_first_eos_even_where_padding_is_eos() -> None:
    ids = torch.tensor([[9, EOS, EOS, EOS], [EOS, EOS, EOS, EOS], [9, 9, 9, EOS], [9, 9, 9, 9], [PAD, 9, EOS, 9]])
    rollout = make_rollout(policy(), PROMPTS[:1], ids.tolist())
    assert list(map(len, rollout.completions)) == [2, 1, 4, 4, 3]
    assert rollout.truncated == [False, False, False, True, False]


def test_any_of_several_eos_ids_ends_a_completion() -> None:
    made = policy()
    made.eos_ids = [EOS, 4]
    rollout = make_rollout(made, PROMPTS[:1], [[9, 4, EOS], [9, EOS, 4], [9, 9, 9]])
    assert rollout.completions == [[9, 4], [9, EOS], [9, 9, 9]]
    assert rollout.truncated == [False, False, True]


SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WINDOWS = {"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
BASES = {
    "llama": None,
    "qwen2": Qwen2Config(**SIZES, **WINDOWS, use_sliding_window=True, initializer_range=0.2),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOWS, head_dim=8, initializer_range=0.2),
    "gpt2": GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2),
}


@pytest.mark.parametrize("name", BASES)
def test_prefilling_once_samples_what_plain_generation_samples(name: str) -> None:
    torch.manual_seed(0)
    base = model() if BASES[name] is None else AutoModelForCausalLM.from_config(BASES[name])
    made = wrap_policy(base, tokenizer(), run_config())
    rollout = sample(made, PROMPTS, 4, 9, seed=3)
    tokens = padded(rollout)
    ids = tokens.prompt_ids.repeat_interleave(4, 0)
    mask = tokens.prompt_mask.long().repeat_interleave(4, 0)
    plain = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, max_new_tokens=9, eos_token_id=EOS, pad_token_id=PAD)
    torch.manual_seed(3)
    with torch.no_grad():
        expected = made.base.generate(input_ids=ids, attention_mask=mask, generation_config=plain)[:, ids.shape[1] :]
    assert torch.equal(tokens.completion_ids, expected)


def test_what_is_cached_of_the_prompt_is_not_copied_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    made, places = policy(), []
    update = _PreallocatedLayer.update

    def spy(layer: _PreallocatedLayer, *states: torch.Tensor, **others: object) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = update(layer, *states, **others)
        places.append((id(layer), keys.data_ptr(), values.data_ptr(), keys.shape[2]))
        return keys, values

    monkeypatch.setattr(_PreallocatedLayer, "update", spy)
    width = max(map(len, sample(made, PROMPTS, 4, 9, seed=3).completions))
    longest = max(map(len, PROMPTS))
    assert [place[3] for place in places] == [n for n in range(longest, longest + width) for _layer in range(2)]
    assert len({place[:3] for place in places}) == 2


def test_sampling_repeats_with_its_seed_and_leaves_the_global_state_alone() -> None:
    made = policy()
    before = torch.get_rng_state()
    first, second = (sample(made, PROMPTS, 4, 9, seed=3).completions for _ in range(2))
    assert first == second
    assert first != sample(made, PROMPTS, 4, 9, seed=4).completions
    assert torch.equal(before, torch.get_rng_state())


def test_one_token_prompts_and_one_new_token() -> None:
    rollout = sample(policy(), [[5], [6]], 2, 1, seed=0)
    tokens = padded(rollout)
    assert tokens.completion_ids.shape == (4, 1)
    assert tokens.prompt_ids[tokens.prompt_index].tolist() == [[5], [5], [6], [6]]


def test_sampling_defaults_of_the_models_page_are_dropped() -> None:
    base = model()
    base.generation_config = GenerationConfig(
        do_sample=True, top_p=0.1, top_k=3, repetition_penalty=5.0, temperature=0.1, eos_token_id=[EOS, 7]
    )
    made = wrap_policy(base, tokenizer(), run_config())
    assert made.eos_ids == [EOS, 7]
    rollout = sample(made, PROMPTS, 64, 9, seed=0)
    assert len({completion[0] for completion in rollout.completions[:64]}) > 3


def oracle(made, rollout, temperature: float) -> torch.Tensor:
    """Log-probs from full logits, one unpadded row at a time."""
    rows = []
    tokens = padded(rollout)
    for row in range(len(tokens)):
        place = tokens.prompt_index[row]
        prompt = tokens.prompt_ids[place][tokens.prompt_mask[place]]
        completion = tokens.completion_ids[row][tokens.completion_mask[row]]
        logits = made.base(input_ids=torch.cat([prompt, completion])[None]).logits[0]
        scores = (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)
        rows.append(scores.gather(1, completion[:, None])[:, 0])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def test_scores_are_the_models_own_for_left_padded_prompts_at_the_sampling_temperature() -> None:
    made = policy(run_config(temperature=0.7))
    rollout = sample(made, PROMPTS, 4, 9, seed=3)
    with torch.no_grad():
        scores = made.logprobs(padded(rollout))
        expected = oracle(made, rollout, 0.7)
        assert torch.allclose(scores.double()[:, : expected.shape[1]], expected, atol=1e-5)
        with made.reference():
            reference = made.logprobs(padded(rollout))
            assert torch.allclose(reference.double()[:, : expected.shape[1]], oracle(made, rollout, 0.7), atol=1e-5)
    assert not torch.allclose(scores, reference, atol=1e-2)


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_completions_given_as_ids_become_a_rollout(pad_is_eos: bool) -> None:
    """One that was cut shorter than the longest ends where it ends, though its padding may read as EOS."""
    made = policy(pad_is_eos=pad_is_eos)
    completions = [[40, 41, EOS], [42, 43], [44, EOS, 45, 46], [EOS]]
    logprobs = [[-1.0, -2.0, -3.0], [-4.0, float("nan")], [-5.0, -6.0, -7.0, -8.0], [-9.0]]
    rollout = make_rollout(made, PROMPTS[:2], completions, logprobs, [False, True, False, False])
    tokens = padded(rollout)
    assert tokens.completion_mask.sum(1).tolist() == [3, 2, 2, 1]
    assert rollout.truncated == [False, True, False, False]
    assert tokens.prompt_index.tolist() == [0, 0, 1, 1]
    assert [ids[mask].tolist() for ids, mask in zip(tokens.prompt_ids, tokens.prompt_mask, strict=True)] == PROMPTS[:2]
    assert rollout.texts == ["E F", "G H", "I", ""]
    assert rollout.logprobs[0] == [-1, -2, -3]
    assert rollout.logprobs[2:] == [[-5, -6], [-9]]
    assert rollout.unusable == [False, True, False, False]
    config = run_config(num_generations=2)
    batch = make_batch(rollout, torch.rand(4, 1), config, pad_id=made.pad_id)
    assert batch.sampled_logprobs.isnan().sum(1).tolist() == [0, 2, 1, 2]
    assert torch.equal(batch.tokens.completion_mask, tokens.completion_mask)


def test_kept_groups_of_several_rollouts_are_one_rollout() -> None:
    made = policy()
    first, second = sample(made, PROMPTS, 4, 9, seed=3), sample(made, PROMPTS[:1], 4, 5, seed=4)
    both = concatenate([first.select([True, False, True]), second.select([True])])
    assert both.prompts == [PROMPTS[0], PROMPTS[2], PROMPTS[0]]
    assert both.texts == first.texts[:4] + first.texts[8:] + second.texts
    assert both.truncated == first.truncated[:4] + first.truncated[8:] + second.truncated
    with torch.no_grad():
        scores = made.logprobs(padded(both))
        firsts = made.logprobs(padded(first))
        parts = [firsts[:4], firsts[8:], made.logprobs(padded(second))]
    for row, expected in zip(scores, [row for part in parts for row in part], strict=True):
        kept = expected != 0
        assert torch.allclose(row[: len(expected)][kept], expected[kept], atol=1e-5)
    assert both.logprobs is None
    assert both.unusable is None


def known(rollout: Rollout) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in row] for row in rollout.logprobs]


def test_log_probs_that_a_sampler_does_not_give_are_missing_where_they_are() -> None:
    made = policy()
    completions = [[40, 41, EOS], [42, 43], [44, EOS], [EOS]]
    some = make_rollout(made, PROMPTS[:2], completions, [[-1.0, None, -3.0], None, [None, math.nan], [-9.0]])
    assert known(some) == [[-1, None, -3], [None, None], [None, None], [-9]]
    none = make_rollout(made, PROMPTS[:2], completions)
    assert none.logprobs is None
    for rounds, expected in (
        ([none, some], [[None, None], [None], [None, None], [-9]]),
        ([some, none], [[None, None], [-9], [None, None], [None]]),
    ):
        assert known(concatenate([rollout.select([False, True]) for rollout in rounds])) == expected
    assert concatenate([none, none]).logprobs is None
    with pytest.raises(RunStopped, match="1 log-probs for a completion of 3 tokens; expected one per token"):
        make_rollout(made, PROMPTS[:2], completions, [[-1.0], None, None, None])


def test_each_sampler_is_made_by_its_name(tmp_path) -> None:
    made = policy()
    plain = make_sampler(run_config(), made, tmp_path, print)
    assert plain.sample(PROMPTS, 2, 5, seed=3) == sample(made, PROMPTS, 2, 5, seed=3)
    assert type(make_sampler(run_config(sampler={"name": "paged"}), made, tmp_path, print)).__name__ == "Paged"
