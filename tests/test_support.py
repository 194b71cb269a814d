"""Which models are served, and that what is served equals the model's own forward."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from amir.batch import Tokens
from amir.load import wrap_policy
from amir_kernels import linear_logprob, supports
from tiny import model, policy, run_config, tokenizer

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2_SIZES = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "phi3": Phi3Config(**SIZES),
    "gpt2": GPT2Config(**GPT2_SIZES),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "gemma2": Gemma2Config(**SIZES, head_dim=8),
    "gemma3-capped": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=16, final_logit_softcapping=30.0),
    "granite": GraniteConfig(**SIZES, logits_scaling=8.0, embedding_multiplier=12.0),
    "cohere": CohereConfig(**SIZES, logit_scale=0.0625),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_from_hidden_states_equal_the_models_own(name: str) -> None:
    made = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    made.get_output_embeddings().weight.data *= 100  # a forgotten cap or scale must show
    found = supports(made)
    assert found.refusal is None
    ids = torch.randint(3, 97, (2, 9))
    target = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        expected = made(ids).logits.float().log_softmax(-1).gather(2, target[..., None])[..., 0]
        hidden = found.body(ids).last_hidden_state
        ours = linear_logprob(hidden, found.weight, target, **found.head_arguments)
        plain = linear_logprob(hidden, found.weight, target)
    assert torch.allclose(ours, expected, atol=1e-5, rtol=1e-5)
    if found.softcap is not None or found.logit_scale != 1:
        assert (plain - expected).abs().max() > 0.1
    assert found.tied == CONFIGS[name].tie_word_embeddings


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_computed_once_scores_and_trains_as_if_each_row_had_its_own(name: str) -> None:
    """Prompts of 3 and 20 tokens under a window of 16, completions of 1 to 12."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    base.get_output_embeddings().weight.data *= 10
    made = wrap_policy(base, tokenizer(), run_config())
    for parameter in made.trainable().values():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    prompt_mask = torch.arange(20) >= torch.tensor([[17], [0]])
    completion_mask = torch.arange(12) < torch.tensor([12, 1, 7, 12, 5])[:, None]
    prompt_of = torch.tensor([0, 0, 1, 1, 1])
    tokens = Tokens(
        torch.randint(3, 97, (2, 20)), prompt_mask, prompt_of, torch.randint(3, 97, (5, 12)), completion_mask
    )
    upstream = torch.randn(5, 12)

    ours = made.logprobs(tokens)
    ours.backward(upstream)
    gradients = [p.grad.clone() for p in made.trainable().values()]
    made.model.zero_grad()

    ids = torch.cat([tokens.prompt_ids[prompt_of], tokens.completion_ids], 1)
    mask = torch.cat([prompt_mask[prompt_of], completion_mask], 1).long()
    logits = base(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    scores = logits[:, 19:-1].log_softmax(-1).gather(2, tokens.completion_ids[..., None])[..., 0]
    expected = torch.where(completion_mask, scores, 0)
    expected.backward(upstream)
    assert torch.allclose(ours, expected, atol=1e-5, rtol=1e-5)
    for left, right in zip(gradients, [p.grad for p in made.trainable().values()], strict=True):
        assert (left - right).norm() <= 1e-4 * right.norm()


def test_the_wrapped_policy_is_served() -> None:
    found = policy().support
    assert (found.family, found.refusal, found.tied) == ("llama", None, True)


def refused(made: torch.nn.Module, words: str) -> None:
    found = supports(made)
    assert found.refusal is not None
    assert words in found.refusal
    with pytest.raises(ValueError, match="not served"):
        _ = found.weight


def test_unknown_families_and_strange_heads_are_refused_by_name() -> None:
    falcon = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
    refused(AutoModelForCausalLM.from_config(FalconConfig(**falcon)), "'falcon'")
    refused(torch.nn.Linear(2, 2), "None")

    sharded = model()
    sharded.lm_head.weight = torch.nn.Parameter(torch.empty(0))
    refused(sharded, "gather it")

    quantized = model()
    quantized.lm_head = type("Linear4bit", (torch.nn.Linear,), {})(32, 101, bias=False)
    refused(quantized, "Linear4bit")


def test_adapters_that_the_head_op_would_skip_are_refused() -> None:
    lora = {"r": 2, "task_type": TaskType.CAUSAL_LM}
    virtual = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    refused(get_peft_model(model(), virtual), "virtual tokens")
    saved = LoraConfig(**lora, target_modules=["q_proj"], modules_to_save=["lm_head"])
    refused(get_peft_model(model(), saved), "modules_to_save")
    on_head = LoraConfig(**lora, target_modules=["q_proj", "lm_head"])
    refused(get_peft_model(model(), on_head), "LoRA on its head")


def test_a_disabled_dora_adapter_is_the_base_model() -> None:
    made = model().eval()
    ids = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        expected = made(ids).logits.clone()
        wrapped = get_peft_model(made, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"))
        for name, parameter in wrapped.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.5)
        assert not torch.allclose(wrapped(ids).logits, expected, atol=1e-3)
        with wrapped.disable_adapter():
            assert torch.equal(wrapped(ids).logits, expected)
