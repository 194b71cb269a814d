"""`Rollout`, the result of sampling, and `Sampler`, the protocol of every sampler.

A rollout has lists of token ids; `update/batch.py` pads them. N prompts; B = N * group size completions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..errors import RunStopped
from ..policy.policy import Policy
from ..tasks.decoding import decode_continuation


@dataclass(frozen=True)
class Rollout:
    """Sampled completions, in the order of the prompts; the completions of a prompt are consecutive."""

    prompts: list[list[int]]  # N token id lists
    completions: list[list[int]]  # B token id lists, each with the EOS that ended it
    texts: list[str]  # B, what was sampled, special tokens included, without the EOS at the end
    truncated: list[bool]  # B, no EOS within the allowed length
    logprobs: list[list[float]] | None = None
    """the sampler's log-probs of each completion's tokens, nats at the training temperature; NaN for a missing one.
    None if the sampler returns no log-probs, or is the trainer itself"""
    unusable: list[bool] | None = None
    """B flags: completions whose tokens may differ from the sampled ones; they are recorded but not trained on"""

    @property
    def group_size(self) -> int:
        """Completions per prompt."""
        return len(self.completions) // len(self.prompts)

    def select(self, groups: Sequence[bool]) -> "Rollout":
        """The groups whose flag is True; one flag per prompt."""
        rows = [row for row in range(len(self.completions)) if groups[row // self.group_size]]
        return Rollout(
            [prompt for prompt, selected in zip(self.prompts, groups, strict=True) if selected],
            [self.completions[row] for row in rows],
            [self.texts[row] for row in rows],
            [self.truncated[row] for row in rows],
            None if self.logprobs is None else [self.logprobs[row] for row in rows],
            None if self.unusable is None else [self.unusable[row] for row in rows],
        )


class Sampler(Protocol):
    """Samples completions of the current policy."""

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        """`group_size` completions of each prompt (token ids), at the policy's temperature and without filters.

        The same weights, prompts and seed give the same completions if the engine is deterministic.
        """


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """Several rollouts as one, in order. If only some of them have log-probs, those of the others are NaN."""
    logprobs, unusable = None, None
    if any(rollout.logprobs is not None for rollout in rollouts):
        logprobs = [row for r in rollouts for row in r.logprobs or [[math.nan] * len(ids) for ids in r.completions]]
    if any(rollout.unusable is not None for rollout in rollouts):
        unusable = [flag for r in rollouts for flag in r.unusable or [False] * len(r.completions)]
    return Rollout(
        [prompt for r in rollouts for prompt in r.prompts],
        [completion for r in rollouts for completion in r.completions],
        [text for r in rollouts for text in r.texts],
        [flag for r in rollouts for flag in r.truncated],
        logprobs,
        unusable,
    )


def make_rollout(
    policy: Policy,
    prompts: list[list[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float | None] | None] | None = None,
    unusable: list[bool] | None = None,
) -> Rollout:
    """The rollout of an engine's completions, which are consecutive for each prompt; cuts them after the first EOS.

    `logprobs` may be None for a token, a completion or all completions. RunStopped if a completion has another number
    of log-probs than of tokens.
    """
    known = None
    if logprobs is not None and any(row is not None for row in logprobs):
        known = [_known_logprobs(row, len(ids)) for row, ids in zip(logprobs, completions, strict=True)]
    lengths = [completion_length(ids, policy.eos_ids) for ids in completions]
    trimmed = [list(ids[:length]) for ids, length in zip(completions, lengths, strict=True)]
    truncated = [not ids or ids[-1] not in policy.eos_ids for ids in trimmed]
    group_size = len(trimmed) // len(prompts)
    texts = [
        decode_continuation(policy.tokenizer, prompts[row // group_size], ids if truncated[row] else ids[:-1])
        for row, ids in enumerate(trimmed)
    ]
    rollout = Rollout(
        prompts,
        trimmed,
        texts,
        truncated,
        unusable=unusable,
    )
    if known is None:
        return rollout
    return replace(rollout, logprobs=[row[:length] for row, length in zip(known, lengths, strict=True)])


def completion_length(ids: Sequence[int], eos_ids: Sequence[int]) -> int:
    """Tokens up to and including the first EOS; later tokens are padding, whatever their ids."""
    return next((place + 1 for place, token in enumerate(ids) if token in eos_ids), len(ids))


def _known_logprobs(row: Sequence[float | None] | None, tokens: int) -> list[float]:
    if row is not None and len(row) != tokens:
        raise RunStopped(
            f"the sampler returned {len(row)} log-probs for a completion of {tokens} tokens; expected one per token. "
            "Correct the sampler or use another one"
        )
    return [math.nan if value is None else value for value in (row if row is not None else [None] * tokens)]
