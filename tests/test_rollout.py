"""Sampling: EOS kept once, truncation known, prefilling changes nothing, and scores are those of the sampled tokens."""

import torch
from transformers import GenerationConfig

from amir.rollout import completion_masks, sample
from tiny import EOS, PAD, policy, run_config

PROMPTS = [[5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20]]


def test_a_completion_ends_with_its_first_eos_even_where_padding_is_eos() -> None:
    ids = torch.tensor([[9, EOS, EOS, EOS], [EOS, EOS, EOS, EOS], [9, 9, 9, EOS], [9, 9, 9, 9], [PAD, 9, EOS, 9]])
    mask, truncated = completion_masks(ids, [EOS])
    assert mask.sum(1).tolist() == [2, 1, 4, 4, 3]
    assert truncated.tolist() == [False, False, False, True, False]


def test_any_of_several_eos_ids_ends_a_completion() -> None:
    mask, truncated = completion_masks(torch.tensor([[9, 4, EOS], [9, EOS, 4], [9, 9, 9]]), [EOS, 4])
    assert mask.sum(1).tolist() == [2, 2, 3]
    assert truncated.tolist() == [False, False, True]


def test_prefilling_once_samples_what_plain_generation_samples() -> None:
    made = policy()
    rollout = sample(made, PROMPTS, 4, 9, seed=3)
    ids = rollout.tokens.prompt_ids.repeat_interleave(4, 0)
    mask = rollout.tokens.prompt_mask.long().repeat_interleave(4, 0)
    plain = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, max_new_tokens=9, eos_token_id=EOS, pad_token_id=PAD)
    torch.manual_seed(3)
    with torch.no_grad():
        expected = made.base.generate(input_ids=ids, attention_mask=mask, generation_config=plain)[:, ids.shape[1] :]
    assert torch.equal(rollout.tokens.completion_ids, expected)


def test_sampling_repeats_with_its_seed_and_leaves_the_global_state_alone() -> None:
    made = policy()
    before = torch.get_rng_state()
    first, second = (sample(made, PROMPTS, 4, 9, seed=3).tokens.completion_ids for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, sample(made, PROMPTS, 4, 9, seed=4).tokens.completion_ids)
    assert torch.equal(before, torch.get_rng_state())


def test_one_token_prompts_and_one_new_token() -> None:
    rollout = sample(policy(), [[5], [6]], 2, 1, seed=0)
    assert rollout.tokens.completion_ids.shape == (4, 1)
    assert rollout.tokens.prompt_ids[rollout.tokens.prompt_of].tolist() == [[5], [5], [6], [6]]


def test_sampling_defaults_of_the_models_page_are_dropped() -> None:
    from amir.load import wrap_policy
    from tiny import model, tokenizer

    base = model()
    base.generation_config = GenerationConfig(
        do_sample=True, top_p=0.1, top_k=3, repetition_penalty=5.0, temperature=0.1, eos_token_id=[EOS, 7]
    )
    made = wrap_policy(base, tokenizer(), run_config())
    assert made.eos_ids == [EOS, 7]
    rollout = sample(made, PROMPTS, 64, 9, seed=0)
    with torch.no_grad():
        firsts = rollout.tokens.completion_ids[:64, 0]
    assert len(set(firsts.tolist())) > 3


def oracle(made, rollout, temperature: float) -> torch.Tensor:
    """Log-probs from full logits, one unpadded row at a time."""
    rows = []
    tokens = rollout.tokens
    for row in range(len(tokens)):
        place = tokens.prompt_of[row]
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
        scores = made.logprobs(rollout.tokens)
        expected = oracle(made, rollout, 0.7)
        assert torch.allclose(scores.double()[:, : expected.shape[1]], expected, atol=1e-5)
        with made.reference():
            reference = made.logprobs(rollout.tokens)
            assert torch.allclose(reference.double()[:, : expected.shape[1]], oracle(made, rollout, 0.7), atol=1e-5)
    assert not torch.allclose(scores, reference, atol=1e-2)
