"""Dynamic sampling (DAPO, arXiv 2503.14476): replaces groups whose rewards are all equal by groups of other prompts.

Groups with equal rewards have no advantages and no pairs. The number of sampling rounds is bounded. The share of groups
that must have differing rewards is a setting: a share below 1 is GPG's threshold (arXiv 2504.02546).

N groups of G completions; F reward functions.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from amir_kernels import group_advantage

from ..config import RunConfig
from ..rewards import total_reward
from .rollout import Rollout, concatenate


def differing_groups(scores: Tensor, config: RunConfig) -> list[bool]:
    """For each group, whether its rewards differ: the weighted sum, or the reward named by `dynamic_sampling.by`.

    Rewards that are equal up to rounding do not differ, and unscored completions are ignored. `scores` `[N * G, F]`,
    groups consecutive. Without dynamic sampling, True for every group.
    """
    dynamic, size = config.dynamic_sampling, config.num_generations
    if dynamic is None:
        return [True] * (len(scores) // size)
    values = total_reward(scores, config.rewards)
    if dynamic.by is not None:
        values = scores[:, [reward.label for reward in config.rewards].index(dynamic.by)]
    advantages = group_advantage(values, size, scale="none")
    return (advantages != 0).view(-1, size).any(1).tolist()


@dataclass
class Groups:
    """The groups that the sampling rounds of a step gave, and which of them are trained on."""

    config: RunConfig
    rollouts: list[Rollout] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)  # float32 [N * G, F] each
    trained: list[list[bool]] = field(default_factory=list)  # one flag per group of each round

    def add(self, rollout: Rollout, scores: Tensor) -> list[bool]:
        """Adds a round; returns which of its groups are trained on."""
        self.rollouts.append(rollout)
        self.scores.append(scores)
        self.trained.append(differing_groups(scores, self.config))
        return self.trained[-1]

    @property
    def missing(self) -> int:
        """Groups that the next round should sample; 0 if no further round is needed or allowed."""
        dynamic, target = self.config.dynamic_sampling, self.config.prompts_per_step
        if not self.trained:
            return target
        if dynamic is None or len(self.trained) == dynamic.max_rounds:
            return 0
        count = sum(map(sum, self.trained))
        return 0 if count / target >= dynamic.min_valid_share else target - count

    def chosen(self) -> tuple[Rollout, Tensor]:
        """The groups to train on and their scores `[B, F]`; the first round if no group has differing rewards."""
        if not any(map(any, self.trained)):
            return self.rollouts[0], self.scores[0]
        size = self.config.num_generations
        scores = [
            s[torch.tensor(flags).repeat_interleave(size)] for s, flags in zip(self.scores, self.trained, strict=True)
        ]
        selected = [rollout.select(flags) for rollout, flags in zip(self.rollouts, self.trained, strict=True)]
        return concatenate(selected), torch.cat(scores)

    def sums(self) -> dict[str, int]:
        """Counts for the step's metrics."""
        return {
            "groups_sampled": sum(map(len, self.trained)),
            "sampling_rounds": len(self.trained),
            "unusable": sum(sum(rollout.unusable or []) for rollout in self.rollouts),
        }
