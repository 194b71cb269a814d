"""The sampler `generate`: Transformers' `generate` with the policy's weights.

A prompt is prefilled once, and its key-value cache is expanded to the group before `generate` continues.

N prompts; B = N * group_size completions; P: padded length of prompts; D: head size.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer

from ..errors import DIVERGED, RunStopped
from ..policy.policy import Policy
from ..tokens import pad_left
from .rollout import Rollout, make_rollout


@dataclass
class Generate:
    """The sampler `generate`."""

    policy: Policy

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        """See `Sampler`."""
        return sample(self.policy, prompts, group_size, max_new_tokens, seed)


@torch.no_grad()
def sample(policy: Policy, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
    """`group_size` completions of each prompt (token ids) at the policy's temperature.

    The same policy, prompts and seed give the same completions; torch's global random state does not change.
    """
    ids, mask = (t.to(policy.device) for t in pad_left(prompts, policy.pad_id))
    with own_random_state(policy.device), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        output = policy.run_gathered(lambda: _generate(policy, ids, mask, group_size, max_new_tokens))
    return make_rollout(policy, prompts, output[:, ids.shape[1] :].tolist())


@contextlib.contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """A context in which torch's random state may be seeded; afterwards the state is restored."""
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


class _PreallocatedLayer(DynamicLayer):
    """A cache layer whose keys and values `[B, heads, P + new tokens, D]` are allocated once for the completion.

    Transformers' own layer copies the whole cache for each new token.
    """

    def __init__(self, keys: Tensor, values: Tensor, group_size: int, new_tokens: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.storage = [_expanded(x, group_size, new_tokens) for x in (keys, values)]
        self._show(keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Appends tokens; returns the keys and values of all tokens."""
        before = self.get_seq_length()
        for stored, new in zip(self.storage, (key_states, value_states), strict=True):
            stored[:, :, before : before + new.shape[2]] = new
        return self._show(before + key_states.shape[2])

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        keys, values = (stored[:, :, :length] for stored in self.storage)
        self.keys, self.values = keys, values
        return keys, values


def _expanded(x: Tensor, group_size: int, new_tokens: int) -> Tensor:
    rows, heads, length, size = x.shape
    storage = x.new_empty(rows * group_size, heads, length + new_tokens, size)
    storage.unflatten(0, (rows, group_size))[:, :, :, :length] = x[:, None]
    return storage


def _expand(cache: Any, group_size: int, new_tokens: int) -> None:
    """Expands the cache of each prompt to its group; layers without a sliding window become preallocated ones."""
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
            cache.layers[place] = _PreallocatedLayer(layer.keys, layer.values, group_size, new_tokens)
        else:
            layer.batch_repeat_interleave(group_size)


_NOT_FINITE = f"the policy computes NaN or infinity, so it cannot be sampled from; {DIVERGED}"


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
