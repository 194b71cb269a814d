"""A model, a tokenizer and a run small enough for any test: random Llama, 101 tokens, one character a token."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from amir.config import RunConfig
from amir.policy.load import wrap_policy
from amir.policy.policy import Policy
from amir.rollout.generate import sample
from amir.rollout.rollout import Rollout
from amir.tokens import Tokens, pad_tokens
from amir.trainer import Trainer
from amir.update import gradient
from amir.update.batch import Batch, make_batch
from amir.update.gradient import reference_logprobs
from amir.update.micro_batches import TokenBudget
from amir_kernels import Objective

PAD, EOS, BOS = 0, 1, 2
VOCAB = 101
Command = Callable[..., tuple[int, str, str]]
"""The fixture `command`: runs `amir ARGUMENTS`; gives exit code, stdout and stderr."""
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}="


def run_config(**changes: object) -> RunConfig:
    """A run of the tiny model on sums; `changes` are settings."""
    fields = {
        "model": "tiny",
        "task": {"name": "arithmetic"},
        "lora": {"r": 4, "alpha": 8},
        "prompts_per_step": 3,
        "num_generations": 4,
        "max_prompt_length": 64,
        "max_completion_length": 9,
        "lambda_reg": 0.5,
        "learning_rate": 1e-2,
        "max_steps": 3,
        "micro_batch_tokens": 200,
        "save_steps": 2,
        "eval_prompts": 2,
        "eval_samples": 2,
    }
    return RunConfig.model_validate(fields | changes)


def tokenizer(pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """Characters as tokens; unknown ones become `?`."""
    characters = [chr(c) for c in range(32, 127)]
    words = ["<pad>", "<eos>", "<bos>", *characters]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<eos>",
        pad_token="<eos>" if pad_is_eos else "<pad>",
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model() -> LlamaForCausalLM:
    """Random weights, scaled up so that the next-token distribution is far from flat; tied head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def policy(config: RunConfig | None = None, *, pad_is_eos: bool = False, moved: bool = True) -> Policy:
    """The tiny policy; `moved` gives the adapter weights that differ from the reference's zeros."""
    made = wrap_policy(model(), tokenizer(pad_is_eos), config or run_config())
    if moved:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in made.trainable().values():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def padded(rollout: Rollout) -> Tokens:
    """A rollout's tokens as tensors."""
    return pad_tokens(rollout.prompts, rollout.completions, PAD)


def sampled_batch(made: Policy, config: RunConfig, prompts: list[list[int]], rewards: Tensor) -> Batch:
    """A batch of four completions of each prompt, with reference log-probs where the loss needs them."""
    rollout = sample(made, prompts, 4, 9, seed=3)
    return with_reference(made, make_batch(rollout, rewards[:, None], config, pad_id=PAD), config)


def with_reference(made: Policy, batch: Batch, config: RunConfig, budget: TokenBudget | None = None) -> Batch:
    """The batch with reference log-probs where the loss needs them, as the loop assigns them."""
    budget = budget or TokenBudget.for_policy(config, made)
    return replace(batch, ref_logprobs=reference_logprobs(made, batch, config, budget))


def backward(
    made: Policy,
    batch: Batch,
    objective: Objective,
    config: RunConfig,
    budget: TokenBudget | None = None,
    **options: bool,
) -> tuple[Batch, Counter[str]]:
    """One training pass: the batch with its old log-probs, as the loop assigns them after the first, and the sums."""
    budget = budget or TokenBudget.for_policy(config, made)
    sums, logprobs = gradient.backward(made, batch, objective, config, budget, **options)
    return batch if batch.old_logprobs is not None else replace(batch, old_logprobs=logprobs), sums


def gradients(made: Policy) -> list[Tensor]:
    """Copies of the trained parameters' gradients."""
    return [p.grad.clone() for p in made.trainable().values()]


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """|| left - right || / || right || over all parameters."""
    difference = sum(float((a - b).detach().square().sum()) for a, b in zip(left, right, strict=True))
    return (difference / sum(float(b.detach().square().sum()) for b in right)) ** 0.5


class Grader:
    """What stands in for `Correctness`; its subclasses say what a completion earns."""

    uncompared = 0

    def __init__(self, timeout_seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


def crash_after(run: Trainer, step: int) -> None:
    """Trains until the step has been shown, where the process dies as far as the run can tell."""

    class Crash(Exception):
        pass

    show = run.display.step

    def crash(metrics: dict[str, Any]) -> None:
        show(metrics)
        if metrics["step"] == step:
            raise Crash

    run.display.step = crash
    with pytest.raises(Crash):
        run.train()
    run.directory.close()
