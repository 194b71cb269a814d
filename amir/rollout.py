"""Sampling: the one method between trainer and sampler, and the sampler that is the trainer's own `generate`.

A prompt is prefilled once, its cache expanded to the group, and Transformers generates from there. The other samplers
are in `paged.py` and `server.py`.

N prompts, B = N * group_size completions of padded length C.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer

from .batch import Tokens
from .config import DIVERGED, GenerateSampling, PagedSampling, RunConfig, RunStopped
from .model import Policy


@dataclass(frozen=True)
class Rollout:
    """Sampled completions, prompts in order, each prompt's completions side by side."""

    tokens: Tokens
    texts: list[str]
    truncated: Tensor  # bool [B], no EOS within the allowed length
    logprobs: Tensor | None = None
    """float32 `[B, C]`, nats at the training temperature: the sampler's own, NaN where it gave none. None: it gives
    none, or is the trainer itself"""
    unusable: Tensor | None = None
    """bool `[B]`: rows whose tokens are not surely those that were sampled; they are kept on disk and train nothing"""


class Sampler(Protocol):
    """Where completions come from."""

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        """`group_size` completions of each prompt (token ids), of the current policy at its temperature, no filters.

        The same weights, prompts and seed give the same completions, as far as the engine behind it does.
        """


def make_sampler(config: RunConfig, policy: Policy, folder: Path, say: Callable[[str], None]) -> Sampler:
    """The run's sampler; a server gets adapters through `folder`, and its troubles are told by `say`."""
    if isinstance(config.sampler, GenerateSampling):
        return Generate(policy)
    if isinstance(config.sampler, PagedSampling):
        from .paged import Paged

        return Paged(policy, config.sampler)
    from .server import Server

    return Server(policy, config, folder, say)


@dataclass
class Generate:
    """Transformers' `generate` on the policy's own weights."""

    policy: Policy

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        """See `Sampler`."""
        return sample(self.policy, prompts, group_size, max_new_tokens, seed)


@torch.no_grad()
def sample(policy: Policy, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
    """`group_size` completions of each prompt (token ids) at the policy's temperature.

    The same policy, prompts and seed give the same completions; torch's global random state is left untouched.
    """
    ids, mask = (t.to(policy.device) for t in _left_pad(prompts, policy.pad_id))
    with own_random_state(policy.device), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        output = policy.whole(lambda: _generate(policy, ids, mask, group_size, max_new_tokens))
    completion_ids = output[:, ids.shape[1] :]
    completion_mask, truncated = completion_masks(completion_ids, policy.eos_ids)
    prompt_of = _prompt_of(len(prompts), len(completion_ids)).to(ids.device)
    tokens = Tokens(ids, mask, prompt_of, completion_ids, completion_mask)
    return Rollout(tokens, _texts(policy, tokens), truncated)


def rollout_of(
    policy: Policy,
    prompts: list[list[int]],
    completions: list[list[int]],
    logprobs: Sequence[Sequence[float | None] | None] | None = None,
    unusable: list[bool] | None = None,
) -> Rollout:
    """A rollout of completions given as token ids, each prompt's side by side, with the sampler's log-probs.

    None for a token, a completion or all of them where the sampler gives none. RunStopped where it gives another number
    of log-probs than of tokens.
    """
    width = max(len(ids) for ids in completions)
    inside = torch.arange(width) < torch.tensor([[len(ids)] for ids in completions])
    not_eos = next(i for i in range(len(policy.eos_ids) + 1) if i not in policy.eos_ids)
    padded = torch.tensor([[*ids, *[not_eos] * (width - len(ids))] for ids in completions])
    mask, truncated = completion_masks(padded, policy.eos_ids)
    padded[~inside] = policy.pad_id
    parts = (*_left_pad(prompts, policy.pad_id), _prompt_of(len(prompts), len(completions)), padded, mask & inside)
    tokens = Tokens(*(part.to(policy.device) for part in parts))
    given = None
    if logprobs is not None and any(row is not None for row in logprobs):
        rows = [_logprobs_given(row, len(ids)) for row, ids in zip(logprobs, completions, strict=True)]
        given = torch.tensor([[*row, *[math.nan] * (width - len(row))] for row in rows], device=policy.device)
    left_out = None if unusable is None else torch.tensor(unusable, device=policy.device)
    return Rollout(tokens, _texts(policy, tokens), truncated.to(policy.device), given, left_out)


def _logprobs_given(row: Sequence[float | None] | None, tokens: int) -> list[float]:
    if row is not None and len(row) != tokens:
        raise RunStopped(f"the sampler gave {len(row)} log-probs of a completion of {tokens} tokens")
    return [math.nan if value is None else value for value in (row if row is not None else [None] * tokens)]


def joined(policy: Policy, rollouts: list[Rollout], kept: list[Tensor]) -> Rollout:
    """The groups `kept` (bool `[N]` each) of several rollouts as one rollout."""
    prompts: list[list[int]] = []
    completions: list[list[int]] = []
    logprobs: list[list[float] | None] = []
    unusable: list[bool] = []
    for rollout, keep in zip(rollouts, kept, strict=True):
        t = rollout.tokens
        keep = keep.to(t.prompt_of.device)
        prompts += [ids[mask].tolist() for ids, mask in zip(t.prompt_ids[keep], t.prompt_mask[keep], strict=True)]
        for row in torch.nonzero(keep[t.prompt_of]).flatten().tolist():
            mask = t.completion_mask[row]
            completions.append(t.completion_ids[row][mask].tolist())
            logprobs.append(None if rollout.logprobs is None else rollout.logprobs[row][mask].tolist())
            unusable.append(False if rollout.unusable is None else bool(rollout.unusable[row]))
    return rollout_of(policy, prompts, completions, logprobs, unusable if any(unusable) else None)


def completion_masks(completion_ids: Tensor, eos_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Which tokens belong to a completion, bool `[B, C]`, and which rows never ended, bool `[B]`.

    A completion ends with its first EOS, which belongs to it; what follows is padding, even where the padding id is the
    EOS id itself.
    """
    is_eos = torch.isin(completion_ids, torch.tensor(eos_ids, device=completion_ids.device))
    ended_before = is_eos.long().cumsum(1) - is_eos.long()
    return ended_before == 0, ~is_eos.any(1)


@contextlib.contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Within it torch's random state may be seeded; afterwards it is what it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _generate(policy: Policy, ids: Tensor, mask: Tensor, group_size: int, max_new_tokens: int) -> Tensor:
    cache = {}
    if ids.shape[1] > 1:
        hidden, prefilled = policy.prefill(ids[:, :-1], mask[:, :-1])
        if not bool(hidden[mask[:, :-1]].isfinite().all()):
            raise RunStopped(_NOT_FINITE)
        _expand(prefilled, group_size, max_new_tokens)
        cache = {policy.cache_argument: prefilled}
    try:
        return policy.base.generate(
            input_ids=ids.repeat_interleave(group_size, 0),
            attention_mask=mask.repeat_interleave(group_size, 0).long(),
            generation_config=generation_config(policy, max_new_tokens),
            **cache,
        )
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise RunStopped(_NOT_FINITE) from None


class _Reserved(DynamicLayer):
    """A prompt's keys and values `[N, heads, P, D]` for each completion of its group, with room for those to come.

    Transformers' own layer copies everything it holds for every token that is added.
    """

    def __init__(self, keys: Tensor, values: Tensor, group_size: int, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.reserved = [_with_room(x, group_size, room) for x in (keys, values)]
        self._show(keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Adds tokens behind those that are there; returns all."""
        before = self.get_seq_length()
        for reserved, new in zip(self.reserved, (key_states, value_states), strict=True):
            reserved[:, :, before : before + new.shape[2]] = new
        return self._show(before + key_states.shape[2])

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        keys, values = (reserved[:, :, :length] for reserved in self.reserved)
        self.keys, self.values = keys, values
        return keys, values


def _with_room(x: Tensor, group_size: int, room: int) -> Tensor:
    rows, heads, length, size = x.shape
    reserved = x.new_empty(rows * group_size, heads, length + room, size)
    reserved.unflatten(0, (rows, group_size))[:, :, :, :length] = x[:, None]
    return reserved


def _expand(cache: Any, group_size: int, room: int) -> None:
    """Gives each completion of a prompt's group the prompt's cache; layers that hold all tokens get room for more."""
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
            cache.layers[place] = _Reserved(layer.keys, layer.values, group_size, room)
        else:
            layer.batch_repeat_interleave(group_size)


_NOT_FINITE = f"the policy computes NaN or infinity, so nothing can be sampled; {DIVERGED}"


def generation_config(policy: Policy, max_new_tokens: int) -> GenerationConfig:
    """The policy's own distribution at its temperature: no filter, no penalty."""
    return GenerationConfig(
        do_sample=True,
        temperature=policy.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=policy.eos_ids,
        pad_token_id=policy.pad_id,
    )


def _prompt_of(prompts: int, completions: int) -> Tensor:
    return torch.arange(prompts).repeat_interleave(completions // prompts)


def _texts(policy: Policy, tokens: Tokens) -> list[str]:
    return [
        policy.tokenizer.decode(row[keep], skip_special_tokens=True)
        for row, keep in zip(tokens.completion_ids, tokens.completion_mask, strict=True)
    ]


def _left_pad(prompts: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = True
    return ids, mask
