"""Sampling: a prompt is prefilled once, its cache expanded to the group, and Transformers generates from there."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig

from .batch import Tokens
from .model import Policy


@dataclass(frozen=True)
class Rollout:
    """Sampled completions, prompts in order, each prompt's completions side by side."""

    tokens: Tokens
    texts: list[str]
    truncated: Tensor  # bool [B], no EOS within the allowed length


@torch.no_grad()
def sample(policy: Policy, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
    """`group_size` completions of each prompt (token ids) at the policy's temperature.

    The same policy, prompts and seed give the same completions; torch's global random state is left untouched.
    """
    ids, mask = _left_pad(prompts, policy.pad_id)
    ids, mask = ids.to(policy.device), mask.to(policy.device)
    devices = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        output = _generate(policy, ids, mask, group_size, max_new_tokens)
    completion_ids = output[:, ids.shape[1] :]
    completion_mask, truncated = completion_masks(completion_ids, policy.eos_ids)
    prompt_of = torch.arange(len(prompts), device=ids.device).repeat_interleave(group_size)
    tokens = Tokens(ids, mask, prompt_of, completion_ids, completion_mask)
    texts = [
        policy.tokenizer.decode(row[keep], skip_special_tokens=True)
        for row, keep in zip(completion_ids, completion_mask, strict=True)
    ]
    return Rollout(tokens, texts, truncated)


def completion_masks(completion_ids: Tensor, eos_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Which tokens belong to a completion, bool `[B, C]`, and which rows never ended, bool `[B]`.

    A completion ends with its first EOS, which belongs to it; what follows is padding, even where the padding id is the
    EOS id itself.
    """
    is_eos = torch.isin(completion_ids, torch.tensor(eos_ids, device=completion_ids.device))
    ended_before = is_eos.long().cumsum(1) - is_eos.long()
    return ended_before == 0, ~is_eos.any(1)


def _generate(policy: Policy, ids: Tensor, mask: Tensor, group_size: int, max_new_tokens: int) -> Tensor:
    generation = GenerationConfig(
        do_sample=True,
        temperature=policy.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=policy.eos_ids,
        pad_token_id=policy.pad_id,
    )
    cache = {}
    if ids.shape[1] > 1:
        _, prefilled = policy.prefill(ids[:, :-1], mask[:, :-1])
        prefilled.batch_repeat_interleave(group_size)
        cache = {policy.cache_argument: prefilled}
    return policy.base.generate(
        input_ids=ids.repeat_interleave(group_size, 0),
        attention_mask=mask.repeat_interleave(group_size, 0).long(),
        generation_config=generation,
        **cache,
    )


def _left_pad(prompts: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = True
    return ids, mask
