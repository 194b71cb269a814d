"""From a rollout and its scores to the tensors a loss sees: the one place that pads.

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
    """Everything one optimizer step needs, for all its groups."""

    tokens: Tokens
    group: Tensor  # int64 [B], group ids
    scores: Tensor  # float32 [B, F], what each reward function gave
    rewards: Tensor  # float32 [B], their weighted sum; NaN where no function gave a score
    advantages: Tensor  # float32 [B]
    truncated: Tensor  # bool [B]
    loss_mask: Tensor  # bool [B, C], completion_mask less masked truncated rows
    pairs: Pairs
    live: Tensor  # bool [B], rows whose gradient can be other than zero
    ref_logprobs: Tensor | None = None  # float32 [B, C]
    old_logprobs: Tensor | None = None  # float32 [B, C], of the policy that the ratio starts from
    sampled_logprobs: Tensor | None = None  # float32 [B, C], another engine's, NaN where it gave none

    @property
    def num_tokens(self) -> Tensor:
        """Tokens in the loss mask, dead rows included: the token divisor of the whole step."""
        return self.loss_mask.sum().float()

    @property
    def num_sequences(self) -> Tensor:
        """Completions of the whole step, masked and dead ones included."""
        return torch.tensor(float(len(self.tokens)), device=self.loss_mask.device)


def make_batch(
    rollout: Rollout, scores: Tensor, config: RunConfig, *, pad_id: int, device: torch.device | str = "cpu"
) -> Batch:
    """The batch of a step's rollout, padded, with its advantages, pairs and masks. `scores` are float32 `[B, F]`."""
    tokens = pad_tokens(rollout.prompts, rollout.completions, pad_id, device)
    batch = assemble(tokens, scores.to(device), torch.tensor(rollout.truncated, device=device), config)
    if rollout.logprobs is None:
        return batch
    return replace(batch, sampled_logprobs=pad_right(rollout.logprobs, math.nan).to(device))


def assemble(tokens: Tokens, scores: Tensor, truncated: Tensor, config: RunConfig) -> Batch:
    """Advantages, pairs and masks of padded groups, one a prompt. `scores` `[B, F]`, `truncated` bool `[B]`."""
    group = tokens.prompt_of
    rewards = total_reward(scores, config.rewards)
    advantages = _advantages(scores, rewards, group, config)
    empty = ~tokens.completion_mask.any(1)  # no token, so no log-ratio that a pair could compare
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
        live=~masked & ((advantages != 0) | pairs.participants | every_row),
    )


def _advantages(scores: Tensor, rewards: Tensor, group: Tensor, config: RunConfig) -> Tensor:
    scale = {"group": "std"}.get(config.scale_rewards, config.scale_rewards)
    if scale == "bernoulli" and len(outside := rewards[(rewards < 0) | (rewards > 1)]):
        raise RunStopped(
            f"scale_rewards = 'bernoulli': it is for rewards from 0 to 1, and a completion has {outside[0]:g}; "
            "expected scale_rewards 'group', in a run of its own"
        )
    return group_advantage(
        scores,
        group,
        baseline=config.baseline,
        scale=scale,
        combine=config.combine_rewards,
        weights=[reward.weight for reward in config.rewards],
    ).float()
