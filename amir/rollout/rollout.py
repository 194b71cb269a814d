"""What sampling returns, and the one method between the trainer and what samples for it.

A rollout holds lists of token ids, as sampled; `update/batch.py` pads them. N prompts, B = N * group size completions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..errors import RunStopped
from ..policy.policy import Policy


@dataclass(frozen=True)
class Rollout:
    """Sampled completions: prompts in order, each prompt's completions side by side."""

    prompts: list[list[int]]  # N token id lists
    completions: list[list[int]]  # B token id lists; the EOS that ended one is its last token
    texts: list[str]  # B, without special tokens
    truncated: list[bool]  # B, no EOS within the allowed length
    logprobs: list[list[float]] | None = None
    """of each completion's tokens, nats at the training temperature, by the sampler; NaN where it gave none. None: the
    sampler gives none, or is the trainer itself"""
    unusable: list[bool] | None = None
    """B: rows whose tokens may differ from those that were sampled; they are kept on disk and train nothing"""

    @property
    def group_size(self) -> int:
        """Completions of each prompt."""
        return len(self.completions) // len(self.prompts)

    def select(self, groups: Sequence[bool]) -> "Rollout":
        """The groups that are True; one flag a prompt."""
        rows = [row for row in range(len(self.completions)) if groups[row // self.group_size]]
        return Rollout(
            [prompt for prompt, kept in zip(self.prompts, groups, strict=True) if kept],
            [self.completions[row] for row in rows],
            [self.texts[row] for row in rows],
            [self.truncated[row] for row in rows],
            None if self.logprobs is None else [self.logprobs[row] for row in rows],
            None if self.unusable is None else [self.unusable[row] for row in rows],
        )


class Sampler(Protocol):
    """Where completions come from."""

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        """`group_size` completions of each prompt (token ids), of the current policy at its temperature, no filters.

        The same weights, prompts and seed give the same completions, as far as the engine behind the sampler does.
        """


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """Several rollouts as one, in order. Log-probs that only some of them have are NaN in the others."""
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
    """The rollout of completions as an engine returned them, each prompt's side by side: cut behind the first EOS.

    `logprobs` is None for a token, a completion or all of them where the engine gives none. RunStopped where it gives
    another number of log-probs than of tokens.
    """
    known = None
    if logprobs is not None and any(row is not None for row in logprobs):
        known = [_known_logprobs(row, len(ids)) for row, ids in zip(logprobs, completions, strict=True)]
    lengths = [completion_length(ids, policy.eos_ids) for ids in completions]
    kept = [list(ids[:length]) for ids, length in zip(completions, lengths, strict=True)]
    rollout = Rollout(
        prompts,
        kept,
        [policy.tokenizer.decode(ids, skip_special_tokens=True) for ids in kept],
        [not ids or ids[-1] not in policy.eos_ids for ids in kept],
        unusable=unusable,
    )
    if known is None:
        return rollout
    return replace(rollout, logprobs=[row[:length] for row, length in zip(known, lengths, strict=True)])


def completion_length(ids: Sequence[int], eos_ids: Sequence[int]) -> int:
    """Tokens up to the first EOS, which belongs to the completion; what follows it is padding, whatever its id."""
    return next((place + 1 for place, token in enumerate(ids) if token in eos_ids), len(ids))


def _known_logprobs(row: Sequence[float | None] | None, tokens: int) -> list[float]:
    if row is not None and len(row) != tokens:
        raise RunStopped(
            f"the sampler gave {len(row)} log-probs for a completion of {tokens} tokens; expected one a token"
        )
    return [math.nan if value is None else value for value in (row if row is not None else [None] * tokens)]
