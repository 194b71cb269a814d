"""The trainer's step on random weights of a real model: numbers, seconds, and peak memory measured beside counted.

LoRA, packed, checkpointed layers; in 4 bits where bitsandbytes imports; and sampling.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from amir.config import RunConfig
from amir.policy.policy import Policy
from amir.rollout.generate import sample
from amir.tokens import Tokens
from amir.update.batch import Batch
from amir.update.gradient import backward, make_objective, reference_logprobs
from amir.update.micro_batches import TokenBudget
from amir.update.optimizer import make_optimizer, update
from bench_memory import Setting, count
from meter import measure

from .judging import compare
from .rates import count_launches, predict, rates_of
from .real_model import body_weights, config_of, make_batch, make_policy, setting_of, short
from .runner import failures
from .sizes import Sizes
from .stage import Part, Ratio, Row, make_row, message_of, not_run

AGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Relative difference in norm of log-probs and LoRA gradients from those of full logits, by dtype."""
MEMORY_BOUND = 1.15
"""Of the measured peak over the counted one."""
FLOPS_PER_WEIGHT = 8
"""For a token and a weight of the body with checkpointed layers: forward, again in the backward, and the gradient of
the inputs, 2 each; the reference pass, 2. The weights themselves are frozen."""


def parts(sizes: Sizes) -> list[Part]:
    """The step without and with quantized weights, and sampling."""
    return [
        Part("numbers", partial(numbers, sizes, None), 30),
        Part("step", partial(steps, sizes, None), 40),
        Part("4-bit numbers", partial(quantized, sizes, numbers), 25),
        Part("4-bit step", partial(quantized, sizes, steps), 40),
        Part("sampling", partial(sampling, sizes), 30),
    ]


def quantized(sizes: Sizes, work: Callable[[Sizes, str | None], Iterator[Row]]) -> Iterator[Row]:
    """The same with 4-bit weights, if bitsandbytes is there."""
    if importlib.util.find_spec("bitsandbytes") is None:
        yield not_run("amir", "4-bit weights", "bitsandbytes is not installed")
        return
    yield from work(sizes, "4bit")


# ---- numbers -------------------------------------------------------------------------------------------------------


def numbers(sizes: Sizes, quantization: str | None) -> Iterator[Row]:
    """Log-probs and LoRA gradients of a short batch, packed and by the head op, against full logits of padded rows."""
    setting = short(setting_of(sizes, quantization))
    policy = make_policy(setting, sizes)
    tokens = make_batch(setting, sizes, policy.vocabulary_size).tokens
    weights = torch.linspace(-1, 1, tokens.completion_ids.numel(), device=sizes.device).view(len(tokens), -1)
    measured, expected = (
        [logprob, *torch.autograd.grad((weights * logprob).sum(), list(policy.trainable().values()))]
        for logprob in (policy.logprobs(tokens), plain_logprobs(policy, tokens))
    )
    bound = AGREEMENT[sizes.dtype]
    yield compare("amir", f"{setting.case}: log-probs", measured[0], expected[0], to="full logits", at_most=bound)
    flat = [torch.cat([grad.double().flatten() for grad in grads[1:]]) for grads in (measured, expected)]
    yield compare("amir", f"{setting.case}: gradient of the adapter", *flat, to="full logits", at_most=bound)


def plain_logprobs(policy: Policy, tokens: Tokens) -> Tensor:
    """Log-probs of the completions from all logits, each completion behind its own copy of the prompt."""
    prompts = tokens.prompt_ids[tokens.prompt_index]
    ids = torch.cat([prompts, tokens.completion_ids], dim=1)
    logits = policy.base(input_ids=ids, use_cache=False).logits[:, prompts.shape[1] - 1 : -1].float()
    logprob = (logits / policy.temperature).log_softmax(-1)
    return logprob.gather(-1, tokens.completion_ids[..., None])[..., 0]


# ---- the step ------------------------------------------------------------------------------------------------------


def steps(sizes: Sizes, quantization: str | None) -> Iterator[Row]:
    """Two optimizer steps; the second is timed. The peak is that of the process's tensors, weights included."""
    setting = setting_of(sizes, quantization)
    policy = make_policy(setting, sizes)
    config = config_of(setting, sizes)
    batch = make_batch(setting, sizes, policy.vocabulary_size)
    optimizer = make_optimizer(config, policy.trainable())
    one_step(policy, batch, optimizer, config)
    held = torch.cuda.memory_allocated() / 1e6 if sizes.device == "cuda" else 0.0
    seconds, growth, _ = measure(partial(one_step, policy, batch, optimizer, config), torch.device(sizes.device))
    expected = predict(rates_of(sizes), flops=operations(policy, batch.tokens))
    peak, bound = None if growth is None else held + growth, None
    try:
        counted = count(setting).peak / 1e6
    except failures() as error:
        yield not_run("amir", f"{setting.case}: counted memory", message_of(error))
    else:
        expected["peak_memory_mb"] = counted
        if peak is not None:
            bound = Ratio("counted memory", peak / counted, sizes.bound(MEMORY_BOUND))
    yield make_row(
        "amir",
        setting.case,
        {"check": "step", **setting.workload},
        seconds=[seconds],
        memory=peak,
        expected=expected,
        observed={"tokens_per_second": batch.tokens.computed(packed=True) / seconds},
        ratio=bound,
    )


def one_step(policy: Policy, batch: Batch, optimizer: torch.optim.Optimizer, config: RunConfig) -> None:
    """Reference pass, forward, backward and update, in one micro-batch."""
    budget = TokenBudget.for_policy(config, policy)
    batch = replace(batch, ref_logprobs=reference_logprobs(policy, batch, config, budget))
    backward(policy, batch, make_objective(config), config, budget)
    update(optimizer, optimizer.param_groups[0]["params"])
    optimizer.zero_grad(set_to_none=False)


def operations(policy: Policy, tokens: Tokens) -> float:
    """Operations of a step: the body's products for each packed token, and 8 H V for each completion token."""
    predicted = int(tokens.completion_mask.sum()) * FLOPS_PER_WEIGHT * policy.support.weight.numel()
    return FLOPS_PER_WEIGHT * body_weights(policy.base) * tokens.computed(packed=True) + predicted


# ---- sampling ------------------------------------------------------------------------------------------------------


def sampling(sizes: Sizes) -> Iterator[Row]:
    """Completions of one prompt, without an end token, so all of full length; bytes of the weights for each token."""
    setting: Setting = setting_of(sizes)
    policy, step = make_policy(setting, sizes), sizes.step
    policy.eos_ids = [policy.vocabulary_size - 1]
    prompt = torch.arange(2, 2 + step.prompt).remainder(policy.vocabulary_size).tolist()
    short, longer = (count_launches(partial(sample, policy, [prompt], step.rows, n, seed=0)) for n in (2, 3))
    began = time.perf_counter()
    rollout = sample(policy, [prompt], step.rows, step.new_tokens, seed=0)
    seconds = time.perf_counter() - began
    tokens = sum(len(completion) for completion in rollout.completions)
    moved = step.new_tokens * sum(weight.nbytes for weight in policy.base.parameters())
    yield make_row(
        "amir",
        f"{step.model}, {step.rows} x {step.new_tokens} sampled tokens, prompt of {step.prompt}",
        {"check": "sampling", "model": step.model, "completions": step.rows, "completion_tokens": step.new_tokens},
        seconds=[seconds],
        expected=predict(rates_of(sizes), moved=moved, launches=short + (step.new_tokens - 2) * (longer - short)),
        observed={"tokens_per_second": tokens / seconds},
    )
