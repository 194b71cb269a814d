"""From a rollout and its scores to the tensors of a loss; the only module that pads a rollout.

N prompts of padded length P; B completions of padded length C; F reward functions.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from amir_kernels import group_advantage

from ..config import RunConfig
from ..errors import RunStopped
from ..rewards import total_reward
from ..rollout.rollout import Rollout
from ..tokens import Tokens, pad_right, pad_tokens
from .pairs import Pairs, form_pairs


@dataclass(frozen=True)
class Batch:
    """The tensors of one optimizer step, for all its groups."""

    tokens: Tokens
    group: Tensor  # int64 [B], group ids
    scores: Tensor  # float32 [B, F], of each reward function; NaN for an unscored completion
    rewards: Tensor  # float32 [B], the weighted sum of the scores; NaN if all of them are NaN
    advantages: Tensor  # float32 [B]
    truncated: Tensor  # bool [B]
    loss_mask: Tensor  # bool [B, C], completion_mask without masked truncated rows
    pairs: Pairs
    has_gradient: Tensor  # bool [B]; the other rows skip the forward, because their gradient is exactly zero
    ref_logprobs: Tensor | None = None  # float32 [B, C]
    old_logprobs: Tensor | None = None  # float32 [B, C], of the policy before this step's updates
    sampled_logprobs: Tensor | None = None  # float32 [B, C], of another engine, NaN for a missing one

    @property
    def num_tokens(self) -> Tensor:
        """Tokens in the loss mask, zero-gradient rows included: the token divisor of the whole step."""
        return self.loss_mask.sum().float()

    @property
    def num_sequences(self) -> Tensor:
        """Completions of the whole step, masked and zero-gradient rows included."""
        return torch.tensor(float(len(self.tokens)), device=self.loss_mask.device)


def make_batch(
    rollout: Rollout, scores: Tensor, config: RunConfig, *, pad_id: int, device: torch.device | str = "cpu"
) -> Batch:
    """The padded batch of a step's rollout, with advantages, pairs and masks. `scores` float32 `[B, F]`."""
    tokens = pad_tokens(rollout.prompts, rollout.completions, pad_id, device)
    batch = assemble(tokens, scores.to(device), torch.tensor(rollout.truncated, device=device), config)
    if rollout.logprobs is None:
        return batch
    return replace(batch, sampled_logprobs=pad_right(rollout.logprobs, math.nan).to(device))


def assemble(tokens: Tokens, scores: Tensor, truncated: Tensor, config: RunConfig) -> Batch:
    """Advantages, pairs and masks of padded groups, one group per prompt. `scores` `[B, F]`, `truncated` bool `[B]`."""
    group = tokens.prompt_index
    rewards = total_reward(scores, config.rewards)
    advantages = _advantages(scores, rewards, group, config)
    empty = ~tokens.completion_mask.any(1)  # without a token there is no log-ratio for a pair
    masked = truncated & config.mask_truncated_completions | empty
    pairs = form_pairs(rewards, group, ~masked & ~rewards.isnan(), config)
    every_row = config.beta > 0 or config.entropy_coef > 0
    return Batch(
        tokens=tokens,
        group=group,
        scores=scores,
        rewards=rewards,
        advantages=advantages,
        truncated=truncated,
        loss_mask=tokens.completion_mask & ~masked[:, None],
        pairs=pairs,
        has_gradient=~masked & ((advantages != 0) | pairs.participants | every_row),
    )


def _advantages(scores: Tensor, rewards: Tensor, group: Tensor, config: RunConfig) -> Tensor:
    scale = {"group": "std"}.get(config.scale_rewards, config.scale_rewards)
    if scale == "bernoulli" and len(outside := rewards[(rewards < 0) | (rewards > 1)]):
        raise RunStopped(
            f"scale_rewards = 'bernoulli': a completion has the reward {outside[0]:g}, and rewards from 0 to 1 are "
            "expected; start a new run with scale_rewards: group"
        )
    return group_advantage(
        scores,
        group,
        baseline=config.baseline,
        scale=scale,
        combine=config.combine_rewards,
        weights=[reward.weight for reward in config.rewards],
    ).float()
