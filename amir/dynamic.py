"""Dynamic sampling (DAPO, arXiv 2503.14476): a step's groups whose rewards all agree are replaced by other prompts'.

Such groups have no advantage and no pair. Rounds of sampling are bounded, and so is the share of the step that must be
worth training: GPG's threshold (arXiv 2504.02546) is the same mechanism with another bound.

N groups of G completions; F reward functions.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from amir_kernels import group_advantage

from .batch import weighted_sum
from .config import RunConfig
from .model import Policy
from .rollout import Rollout, joined


def worth_training(scores: Tensor, config: RunConfig) -> Tensor:
    """Which groups disagree, bool `[N]`: in the weighted sum of the rewards, or in the one `dynamic_sampling.by` names.

    Equal up to rounding is equal; completions without a score say nothing. `scores` `[N * G, F]`, groups side by side.
    """
    dynamic = config.dynamic_sampling
    groups = torch.arange(len(scores) // config.num_generations, device=scores.device)
    if dynamic is None:
        return torch.ones_like(groups, dtype=torch.bool)
    values = weighted_sum(scores, [reward.weight for reward in config.rewards])
    if dynamic.by is not None:
        values = scores[:, [reward.label for reward in config.rewards].index(dynamic.by)]
    advantages = group_advantage(values, groups.repeat_interleave(config.num_generations), scale="none")
    return (advantages != 0).view(len(groups), -1).any(1)


@dataclass
class Groups:
    """What the rounds of one step have sampled, and which of it is trained on."""

    config: RunConfig
    rollouts: list[Rollout] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)  # float32 [N * G, F] each
    kept: list[Tensor] = field(default_factory=list)  # bool [N] each

    def add(self, rollout: Rollout, scores: Tensor) -> Tensor:
        """Adds a round; returns which of its groups are worth training, bool `[N]`."""
        self.rollouts.append(rollout)
        self.scores.append(scores)
        self.kept.append(worth_training(scores, self.config))
        return self.kept[-1]

    @property
    def missing(self) -> int:
        """Groups that the next round should sample; 0 where there shall be none."""
        dynamic, wanted = self.config.dynamic_sampling, self.config.prompts_per_step
        if not self.kept:
            return wanted
        if dynamic is None or len(self.kept) == dynamic.max_rounds:
            return 0
        kept = sum(int(keep.sum()) for keep in self.kept)
        return 0 if kept / wanted >= dynamic.min_valid_share else wanted - kept

    def chosen(self, policy: Policy) -> tuple[Rollout, Tensor]:
        """The groups to train on and their scores `[B, F]`; the first round as it is where no group is worth it."""
        if (len(self.kept) == 1 and self.kept[0].all()) or not any(keep.any() for keep in self.kept):
            return self.rollouts[0], self.scores[0]
        size = self.config.num_generations
        scores = [s[k.repeat_interleave(size)] for s, k in zip(self.scores, self.kept, strict=True)]
        return joined(policy, self.rollouts, self.kept), torch.cat(scores)

    def sums(self) -> dict[str, int]:
        """Counts of the step's metrics."""
        return {
            "groups_sampled": sum(len(keep) for keep in self.kept),
            "sampling_rounds": len(self.kept),
            "unusable": sum(int(r.unusable.sum()) for r in self.rollouts if r.unusable is not None),
        }
