"""The body's attention and layers: packed rows by every kernel that imports, and Liger's layers."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from amir.policy import packed_attention
from amir.policy.memory import apply_liger_layers
from amir.policy.packing import hidden_states
from amir.policy.policy import Policy
from amir.tokens import Tokens

from .judging import compare
from .rates import event_seconds, predict, rates_of
from .real_model import body_weights, make_batch, make_policy, setting_of, short
from .sizes import Sizes
from .stage import Part, Row, make_row, not_run
from .trainer_step import AGREEMENT


def parts(sizes: Sizes) -> list[Part]:
    """Each way of attention, then Liger's layers."""
    attention = {
        "segments": segments,
        "PyTorch's varlen_attn": torch_kernel,
        "flash-attn": flash_attn,
    }
    kernels = [Part(name, partial(packed, sizes, name, kernel), 20) for name, kernel in attention.items()]
    return [*kernels, Part("Liger's layers", partial(liger_layers, sizes), 20)]


Kernel = Callable[..., Tensor]


def segments(sizes: Sizes) -> Kernel | str | None:
    """One call of scaled_dot_product_attention for each segment."""
    return None


def torch_kernel(sizes: Sizes) -> Kernel | str | None:
    """PyTorch's variable-length attention, or why it does not serve."""
    if sizes.device != "cuda":
        return "it needs a GPU"
    if not packed_attention._TORCH_SERVES:
        return f"torch {torch.__version__} has it without windows and grouped heads"
    return packed_attention._torch_kernel


def flash_attn(sizes: Sizes) -> Kernel | str | None:
    """The package flash-attn, or why it does not serve."""
    if sizes.device != "cuda":
        return "it needs a GPU"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    return packed_attention._flash_attn_kernel


def packed(sizes: Sizes, name: str, choose: Callable[[Sizes], Kernel | str | None]) -> Iterator[Row]:
    """Hidden states of packed rows by one kernel against those of padded rows; seconds of both."""
    kernel = choose(sizes)
    if isinstance(kernel, str):
        yield not_run(name, "packed attention", kernel)
        return
    setting = short(setting_of(sizes))
    policy = make_policy(setting, sizes)
    tokens = make_batch(setting, sizes, policy.vocabulary_size).tokens
    with torch.no_grad():
        expected = run(policy, tokens, is_packed=False)
        with patch.object(packed_attention, "varlen_kernel", lambda query, how: kernel):
            measured = run(policy, tokens, is_packed=True)
            seconds = event_seconds(partial(run, policy, tokens, is_packed=True), sizes.device, sizes.repeats)
    case = f"{setting.model}, {len(tokens)} x ({setting.prompt} + {setting.completion}) tokens, packed"
    yield compare(name, f"{case}: hidden states", measured, expected, to="padded rows", at_most=AGREEMENT[sizes.dtype])
    workload = {"check": "packed", "model": setting.model}
    yield make_row(name, f"{case}: forward", workload, seconds=seconds, expected=forward_time(sizes, policy, tokens))


def forward_time(sizes: Sizes, policy: Policy, tokens: Tokens) -> dict[str, float]:
    """The body's products and reading its weights; attention among so few tokens is not counted."""
    weights = body_weights(policy.base)
    flops = 2 * weights * tokens.computed(packed=True)
    return predict(rates_of(sizes), flops=flops, moved=weights * sizes.dtype.itemsize)


def run(policy: Policy, tokens: Tokens, *, is_packed: bool) -> Tensor:
    """Hidden states that predict the completion tokens."""
    return hidden_states(policy.support.body, tokens, packed=is_packed)


def liger_layers(sizes: Sizes) -> Iterator[Row]:
    """Log-probs with Liger's norms, rotary embeddings and MLPs against Transformers'."""
    if sizes.device != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        reason = "it needs a GPU" if sizes.device != "cuda" else "liger-kernel is not installed"
        yield not_run("Liger's layers", "the body", reason)
        return
    setting = short(setting_of(sizes))
    policy = make_policy(setting, sizes)
    tokens = make_batch(setting, sizes, policy.vocabulary_size).tokens
    with torch.no_grad():
        expected = policy.logprobs(tokens)
        before = event_seconds(lambda: policy.logprobs(tokens), sizes.device, sizes.repeats)
        apply_liger_layers(policy.base)
        measured = policy.logprobs(tokens)
        after = event_seconds(lambda: policy.logprobs(tokens), sizes.device, sizes.repeats)
    case = f"{setting.model}: log-probs"
    yield compare("Liger's layers", case, measured, expected, to="Transformers'", at_most=AGREEMENT[sizes.dtype])
    for name, seconds in (("Transformers' layers", before), ("Liger's layers", after)):
        workload, predicted = {"check": "layers", "model": setting.model}, forward_time(sizes, policy, tokens)
        yield make_row(name, f"{case}, seconds", workload, seconds=seconds, expected=predicted)
