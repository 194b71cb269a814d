"""What a model computes for a row, alone and beside others: log-probs, sampling, and the refusal of what depends."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig, PreTrainedModel

from amir.errors import ConfigError
from amir.policy.load import wrap_policy
from amir.policy.policy import Policy
from amir.policy.row_independence import depends_on_company, longest_independent
from amir.rollout.generate import sample
from amir.rollout.rollout import make_rollout
from test_support import CONFIGS, SIZES
from tiny import padded, run_config, tokenizer

SWITCH = 16
"""Tokens above which the models of this file take other frequencies for all rows of a call."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": SWITCH,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 1.5],
}
SWITCHING = {
    "longrope": Phi3Config(
        **SIZES, original_max_position_embeddings=SWITCH, max_position_embeddings=64, rope_parameters=LONGROPE
    ),
    "longrope in llama": LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=LONGROPE),
}
DYNAMIC = LlamaConfig(
    **SIZES, max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
)
SHORT, LONG = [5, 6, 7], list(range(30, 44))


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    """With weights that make the model sensitive to positions."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config.get_text_config().initializer_range = 0.3
    return AutoModelForCausalLM.from_config(config).eval()


def policy_of(config: PreTrainedConfig, prompt: int = 14, completion: int = 3, **settings: object) -> Policy:
    made = model_of(config)
    lengths = {"max_prompt_length": prompt, "max_completion_length": completion}
    return wrap_policy(made, tokenizer(), run_config(lora={"r": 2, "alpha": 4}, **lengths, **settings))


def logprobs(policy: Policy, prompts: list[list[int]], completions: list[list[int]]) -> list[float]:
    """Of the first completion."""
    with torch.no_grad():
        return policy.logprobs(padded(make_rollout(policy, prompts, completions)))[0, : len(completions[0])].tolist()


def greedy(policy: Policy, prompts: list[list[int]], tokens: int) -> list[int]:
    """Of the first prompt."""
    policy.temperature = 1e-4
    return sample(policy, prompts, 1, tokens, 0).completions[0]


@pytest.mark.parametrize("name", [*CONFIGS, "dynamic"])
def test_rows_are_independent_of_their_company(name: str) -> None:
    """Each family: log-probs of a completion, packed and in plain rows, and its sampling, beside longer rows."""
    policy = policy_of(DYNAMIC if name == "dynamic" else CONFIGS[name], prompt=24, completion=24)
    completions = [[8, 9, 10], list(range(20, 40))]
    own = logprobs(policy, [SHORT], completions[:1])
    assert logprobs(policy, [SHORT], completions) == pytest.approx(own, abs=2e-5)
    policy.__dict__["why_unpacked"] = "to compare"
    assert logprobs(policy, [SHORT], completions) == pytest.approx(own, abs=2e-5)
    alone, beside = greedy(policy, [SHORT], 12), greedy(policy, [SHORT, [*LONG, *LONG[:8]]], 12)
    assert alone == beside


@pytest.mark.parametrize("name", SWITCHING)
def test_frequencies_of_the_longest_row_are_refused_for_lengths_that_reach_them(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"max_prompt_length \+ max_completion_length = 46: .*depends on the other rows of the batch "
        r"\(its rotary embeddings are of type longrope\).*; lower the two so that their sum is at most 17",
    ):
        policy_of(SWITCHING[name], 16, 30)
    with pytest.raises(ConfigError, match=r"= 18: .*at most 17"):
        policy_of(SWITCHING[name], 14, 4)


@pytest.mark.parametrize("name", SWITCHING)
def test_up_to_the_named_length_the_rows_are_independent(name: str) -> None:
    policy = policy_of(SWITCHING[name])
    assert policy.packed
    completion, other = [8, 9], [20, 21, 22]
    own = logprobs(policy, [SHORT], [completion])
    assert logprobs(policy, [SHORT, LONG], [completion, other]) == pytest.approx(own, abs=2e-5)
    assert greedy(policy, [SHORT], 3) == greedy(policy, [SHORT, LONG], 3)
    longer = logprobs(policy, [SHORT, [*LONG, *LONG]], [completion, other])
    assert longer != pytest.approx(own, abs=1e-2), "the test must see the other frequencies"


def test_a_model_with_one_set_of_frequencies_is_served_at_every_length() -> None:
    config = copy.deepcopy(SWITCHING["longrope"])
    config.rope_parameters["short_factor"] = config.rope_parameters["long_factor"]
    policy = policy_of(config, 16, 30)
    completion, other = [8, 9], list(range(20, 40))
    own = logprobs(policy, [SHORT], [completion])
    assert logprobs(policy, [SHORT], [completion, other]) == pytest.approx(own, abs=2e-5)
    assert greedy(policy, [SHORT], 20) == greedy(policy, [SHORT, LONG], 20)


def test_growing_frequencies_are_found() -> None:
    """`dynamic` changes with every length above the model's positions, and its first call leaves no trace."""
    body = model_of(DYNAMIC).model
    before = body.rotary_emb.inv_freq.clone()
    assert longest_independent(body, 200) == 64
    assert not depends_on_company(body, 40)
    assert torch.equal(body.rotary_emb.inv_freq, before)


class Mixing(torch.nn.Module):
    """A layer in which each row gets a part of the mean over the batch, as routing with a capacity has it."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out = self.layer(states)
        return out + 0.01 * out.mean(0, keepdim=True)


def test_a_layer_that_mixes_the_rows_is_refused_at_every_length() -> None:
    made = model_of(CONFIGS["llama"])
    made.model.layers[1].mlp = Mixing(made.model.layers[1].mlp)
    assert longest_independent(made.model, 20) == 0
    with pytest.raises(ConfigError, match=r"depends on the other rows of the batch, so .*; use a model without layers"):
        wrap_policy(made, tokenizer(), run_config(lora={"r": 2, "alpha": 4, "target_modules": ["q_proj"]}))


def test_looking_leaves_the_random_state_alone() -> None:
    body = model_of(CONFIGS["llama"]).model
    state = torch.get_rng_state()
    assert not depends_on_company(body, 20)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("value", "norm"), [(0.0, "0.0"), (float("nan"), "nan")])
def test_weights_that_compute_nothing_are_named(value: float, norm: str) -> None:
    """All rows are alike then, so the probe of rows cannot tell."""
    model = model_of(CONFIGS["llama"])
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(value)
    with pytest.raises(ConfigError, match=rf"have the norm {norm}; expected finite states that are not all zero; its"):
        depends_on_company(model.model, 8)
