"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all equal are replaced by other prompts' groups.

Such groups have no advantage and no pair. Rounds of sampling are bounded, and so is the share of the step's groups that
must have differing rewards: GPG's threshold (arXiv 2504.02546) is the same mechanism with another bound.

N groups of G completions; F reward functions.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from amir_kernels import group_advantage

from ..config import RunConfig
from ..rewards import total_reward
from .rollout import Rollout, concatenate


def groups_that_differ(scores: Tensor, config: RunConfig) -> list[bool]:
    """Of each group whether its rewards differ, in their weighted sum or in the one that `dynamic_sampling.by` names.

    Equal up to rounding is equal; completions without a score do not count. `scores` `[N * G, F]`, groups side by side.
    Without dynamic sampling every group counts as differing.
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
    """What the rounds of one step have sampled, and which of it is trained on."""

    config: RunConfig
    rollouts: list[Rollout] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)  # float32 [N * G, F] each
    kept: list[list[bool]] = field(default_factory=list)  # one flag a group each

    def add(self, rollout: Rollout, scores: Tensor) -> list[bool]:
        """Adds a round; returns which of its groups are trained on."""
        self.rollouts.append(rollout)
        self.scores.append(scores)
        self.kept.append(groups_that_differ(scores, self.config))
        return self.kept[-1]

    @property
    def missing(self) -> int:
        """Groups that the next round should sample; 0 where no further round is needed or allowed."""
        dynamic, wanted = self.config.dynamic_sampling, self.config.prompts_per_step
        if not self.kept:
            return wanted
        if dynamic is None or len(self.kept) == dynamic.max_rounds:
            return 0
        kept = sum(map(sum, self.kept))
        return 0 if kept / wanted >= dynamic.min_valid_share else wanted - kept

    def chosen(self) -> tuple[Rollout, Tensor]:
        """The groups to train on and their scores `[B, F]`; the first round where no group's rewards differ."""
        if not any(map(any, self.kept)):
            return self.rollouts[0], self.scores[0]
        size = self.config.num_generations
        scores = [s[torch.tensor(kept).repeat_interleave(size)] for s, kept in zip(self.scores, self.kept, strict=True)]
        selected = [rollout.select(kept) for rollout, kept in zip(self.rollouts, self.kept, strict=True)]
        return concatenate(selected), torch.cat(scores)

    def sums(self) -> dict[str, int]:
        """Counts of the step's metrics."""
        return {
            "groups_sampled": sum(map(len, self.kept)),
            "sampling_rounds": len(self.kept),
            "unusable": sum(sum(rollout.unusable or []) for rollout in self.rollouts),
        }
