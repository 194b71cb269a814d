"""From rollouts to the tensors a loss sees: sampled groups, their loss masks and denominators, and micro-batches.

N prompts of padded length P; B completions of padded length C.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amir_kernels import group_advantage, pair_logits

from .config import RunConfig


@dataclass(frozen=True)
class Tokens:
    """Completions and the prompts that they share: a prompt is held once, whatever the size of its group."""

    prompt_ids: Tensor  # int64 [N, P], left-padded
    prompt_mask: Tensor  # bool [N, P]
    prompt_of: Tensor  # int64 [B], the prompt of each completion
    completion_ids: Tensor  # int64 [B, C], right-padded
    completion_mask: Tensor  # bool [B, C]; the first EOS included, nothing after it

    def __len__(self) -> int:
        return len(self.completion_ids)

    @property
    def prompt_lengths(self) -> Tensor:
        """int64 `[N]`."""
        return self.prompt_mask.sum(1)

    @property
    def completion_lengths(self) -> Tensor:
        """int64 `[B]`."""
        return self.completion_mask.sum(1)

    def rows(self, rows: Tensor) -> "Tokens":
        """The given completions with their prompts, trimmed to the longest of each."""
        prompts, prompt_of = self.prompt_of[rows].unique(return_inverse=True)
        p = int(self.prompt_lengths[prompts].max())
        c = int(self.completion_lengths[rows].max())
        return Tokens(
            self.prompt_ids[prompts, -p:],
            self.prompt_mask[prompts, -p:],
            prompt_of,
            self.completion_ids[rows, :c],
            self.completion_mask[rows, :c],
        )


@dataclass(frozen=True)
class Batch:
    """Everything one optimizer step needs, for all its groups."""

    tokens: Tokens
    group: Tensor  # int64 [B], group ids
    rewards: Tensor  # float32 [B], NaN where nothing could be scored
    advantages: Tensor  # float32 [B]
    truncated: Tensor  # bool [B]
    loss_mask: Tensor  # bool [B, C], completion_mask less masked truncated rows
    paired: Tensor  # bool [B], rows that some pair holds
    num_pairs: Tensor  # float32 scalar, pairs of the whole step
    live: Tensor  # bool [B], rows whose gradient can be other than zero
    ref_logprobs: Tensor | None = None  # float32 [B, C]
    old_logprobs: Tensor | None = None  # float32 [B, C]

    @property
    def num_tokens(self) -> Tensor:
        """Tokens in the loss mask, dead rows included: the token divisor of the whole step."""
        return self.loss_mask.sum().float()

    @property
    def num_sequences(self) -> Tensor:
        """Completions of the whole step, masked and dead ones included."""
        return torch.tensor(float(len(self.tokens)), device=self.loss_mask.device)


def make_batch(tokens: Tokens, rewards: Tensor, truncated: Tensor, config: RunConfig) -> Batch:
    """Advantages, pairs and masks of sampled groups, one a prompt; `rewards` float32 `[B]`."""
    group = tokens.prompt_of
    scale = {"group": "std"}.get(config.scale_rewards, config.scale_rewards)
    baseline = "leave_one_out" if config.loss_type == "reinforce" else "mean"
    advantages = group_advantage(rewards, group, baseline=baseline, scale=scale)
    masked = truncated & config.mask_truncated_completions
    loss_mask = tokens.completion_mask & ~masked[:, None]
    scorable = ~masked & ~rewards.isnan()
    paired = torch.zeros_like(scorable)
    num_pairs = torch.zeros((), device=rewards.device)
    if config.lambda_reg > 0:
        pairs = pair_logits(torch.zeros_like(rewards), rewards, group, valid=scorable, **pair_options(config))
        paired[pairs.chosen] = paired[pairs.rejected] = True
        num_pairs += len(pairs.logit)
    everywhere = config.beta > 0 or config.entropy_coef > 0
    live = ~masked & ((advantages != 0) | paired | everywhere)
    return Batch(tokens, group, rewards, advantages, truncated, loss_mask, paired, num_pairs, live)


def pair_options(config: RunConfig) -> dict[str, Any]:
    """The run's choice of pairs, as keywords of the preference ops."""
    return {
        "beta_dpo": config.beta_dpo,
        "reward_margin": config.reward_margin,
        "pair_mining": config.pair_mining,
        "max_pairs_per_group": config.max_pairs_per_group,
    }


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch that go through the model together. `whole`: it holds every row of each group it touches."""

    rows: Tensor  # int64
    whole: bool


def micro_batches(batch: Batch, token_budget: int) -> Iterator[MicroBatch]:
    """Splits the live rows into micro-batches of at most `token_budget` padded tokens, longest first.

    A group stays together where it fits, since its rows share a prompt and the pair term couples them; one that does
    not is split into micro-batches of its own, marked `whole=False`. A single row is never split, however long.
    """
    tokens = batch.tokens
    live = torch.nonzero(batch.live.cpu()).flatten()
    lengths = (tokens.prompt_lengths[tokens.prompt_of] + tokens.completion_lengths).cpu()
    order = live[torch.argsort(lengths[live], descending=True, stable=True)]
    group = batch.group.cpu()[order]
    groups = [order[group == g] for g in dict.fromkeys(group.tolist())]
    small = [rows for rows in groups if padded_tokens(tokens, rows) <= token_budget]
    large = [rows for rows in groups if padded_tokens(tokens, rows) > token_budget]
    yield from (MicroBatch(rows, True) for rows in _pack(tokens, small, token_budget))
    for rows in large:
        yield from (MicroBatch(part, False) for part in _pack(tokens, list(rows.split(1)), token_budget))


def padded_tokens(tokens: Tokens, rows: Tensor) -> int:
    """Tokens that the model computes for these rows: each prompt once and each completion, padded to the longest."""
    part = tokens.rows(rows)
    return part.prompt_ids.numel() + part.completion_ids.numel()


def _pack(tokens: Tokens, units: list[Tensor], token_budget: int) -> Iterator[Tensor]:
    """Joins consecutive units while they stay within the budget; rows in ascending order."""
    held: list[Tensor] = []
    for unit in units:
        if held and padded_tokens(tokens, torch.cat([*held, unit])) > token_budget:
            yield torch.cat(held).sort().values
            held = []
        held.append(unit)
    if held:
        yield torch.cat(held).sort().values
