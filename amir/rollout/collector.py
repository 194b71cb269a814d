"""Samples and rewards completions: each rank handles a share of the prompts, then all ranks gather the results.

N prompts, B = N * group size completions, F reward functions.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import RunConfig
from ..policy.policy import Policy
from ..rewards import Rewards, total_reward
from ..tasks.prompts import Prompt
from .rollout import Rollout, Sampler, concatenate


@dataclass(frozen=True)
class Collector:
    """The sampler and the reward functions of a run."""

    config: RunConfig
    policy: Policy
    sampler: Sampler
    rewards: Rewards
    log: Callable[[str], None]

    def sample(self, prompts: list[Prompt], group_size: int, stream: int | str) -> Rollout | None:
        """Completions of this rank's share of the prompts; None if its share is empty.

        `stream` names the random stream: a step, a round of a step, or an evaluation.
        """
        ranks, own, rollout = self.policy.ranks, self._share(prompts), None
        seed = derived_seed(self.config.seed, ranks.name(stream))
        ids = [prompt.ids for prompt in own or prompts[:1]]
        with ranks.raise_on_all_ranks():
            if own or self.policy.sharded:  # a rank without a share takes part if weights are sharded
                rollout = self.sampler.sample(ids, group_size, self.config.max_completion_length, seed)
        return rollout if own else None

    def reward(self, prompts: list[Prompt], rollout: Rollout | None) -> tuple[Rollout, Tensor]:
        """The completions of all prompts and their scores, float32 `[B, F]`, NaN for an unscored completion.

        `rollout`: the result of `sample` on this rank.
        """
        ranks = self.policy.ranks
        with ranks.raise_on_all_ranks():
            part = None if rollout is None else (rollout, *self._score(rollout, self._share(prompts)))
        parts = [part for part in ranks.gather(part) if part is not None]
        rollouts, scores, notes = zip(*parts, strict=True)
        for note in [note for notes_of_rank in notes for note in notes_of_rank]:
            self.log(note)
        return concatenate(rollouts), torch.cat(scores)

    def _share(self, prompts: list[Prompt]) -> list[Prompt]:
        """This rank's share of the prompts; with a sampling server, the first rank handles all of them."""
        ranks = self.policy.ranks
        if self.config.sampler.name == "server":
            return prompts if ranks.first else []
        return list(ranks.share(prompts))

    def _score(self, rollout: Rollout, prompts: list[Prompt]) -> tuple[Tensor, list[str]]:
        """Scores of this rank's completions, float32 `[B, F]`, and notes to report."""
        examples = [prompt.example for prompt in prompts for _ in range(rollout.group_size)]
        scores = self.rewards(examples, rollout.texts, rollout.completions)
        values = torch.tensor(scores.values).T.contiguous()
        if rollout.unusable is not None:
            values = values.masked_fill(torch.tensor(rollout.unusable)[:, None], math.nan)
        return values, scores.notes


def completion_records(
    prompts: list[Prompt], rollout: Rollout, scores: Tensor, config: RunConfig
) -> list[dict[str, Any]]:
    """The rows of completions/, one per completion. `scores` `[B, F]`."""
    names = [reward.label for reward in config.rewards]
    rewards = total_reward(scores, config.rewards)
    own = [prompt for prompt in prompts for _ in range(rollout.group_size)]
    return [
        {
            "question": own[row].example.question,
            "answer": own[row].example.answer,
            "prompt": own[row].text,
            "response_prefix": own[row].example.response_prefix,
            "completion": text,
            "reward": float(rewards[row]),
            "rewards": {
                name: None if math.isnan(value) else value
                for name, value in zip(names, scores[row].tolist(), strict=True)
            },
            "tokens": len(rollout.completions[row]),
            "truncated": rollout.truncated[row],
        }
        for row, text in enumerate(rollout.texts)
    ]


def derived_seed(seed: int, stream: int | str) -> int:
    """A seed for each random stream of a run (a step, an evaluation), so that resuming needs no sampler state."""
    return random.Random(f"{seed}/{stream}").getrandbits(63)
