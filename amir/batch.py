"""From rollouts to the tensors a loss sees: sampled groups, their loss masks and denominators, and micro-batches.

B completions in groups of G; P prompt length (left-padded); C completion length (right-padded).
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
    """Prompts and completions side by side; every row starts with padding and ends with padding."""

    prompt_ids: Tensor  # int64 [B, P]
    prompt_mask: Tensor  # bool [B, P]
    completion_ids: Tensor  # int64 [B, C]
    completion_mask: Tensor  # bool [B, C]; the first EOS included, nothing after it

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def rows(self, rows: Tensor) -> "Tokens":
        """The given rows, trimmed to their own longest prompt and completion."""
        prompt_mask, completion_mask = self.prompt_mask[rows], self.completion_mask[rows]
        p = max(int(prompt_mask.sum(1).max()), 1)
        c = max(int(completion_mask.sum(1).max()), 1)
        return Tokens(
            self.prompt_ids[rows, -p:], prompt_mask[:, -p:], self.completion_ids[rows, :c], completion_mask[:, :c]
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
    """Advantages, pairs and masks of sampled groups; `rewards` float32 `[B]`, groups are consecutive rows."""
    group = torch.arange(len(tokens), device=rewards.device) // config.num_generations
    scale = {"group": "std"}.get(config.scale_rewards, config.scale_rewards)
    baseline = "leave_one_out" if config.loss_type == "reinforce" else "mean"
    advantages = group_advantage(rewards, config.num_generations, baseline=baseline, scale=scale)
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


def micro_batches(batch: Batch, token_budget: int, *, keep_groups: bool) -> Iterator[MicroBatch]:
    """Splits the live rows into micro-batches of at most `token_budget` padded tokens, longest first.

    With `keep_groups` (the pair term couples a group's rows) a group that fits the budget stays whole; one that does
    not is split into micro-batches of its own, marked `whole=False`. A single row is never split, however long.
    """
    lengths = _lengths(batch.tokens)
    live = torch.nonzero(batch.live.cpu()).flatten()
    order = live[torch.argsort(lengths[live].sum(1), descending=True, stable=True)]
    if len(order) == 0:
        return
    if not keep_groups:
        yield from (MicroBatch(rows, True) for rows in _pack(list(order.split(1)), lengths, token_budget))
        return
    group = batch.group.cpu()[order]
    groups = [order[group == g] for g in dict.fromkeys(group.tolist())]
    small = [rows for rows in groups if _padded_tokens(rows, lengths) <= token_budget]
    large = [rows for rows in groups if _padded_tokens(rows, lengths) > token_budget]
    yield from (MicroBatch(rows, True) for rows in _pack(small, lengths, token_budget))
    for rows in large:
        yield from (MicroBatch(part, False) for part in _pack(list(rows.split(1)), lengths, token_budget))


def _pack(units: list[Tensor], lengths: Tensor, token_budget: int) -> Iterator[Tensor]:
    """Joins consecutive units while their rows, padded to a common width, stay within the budget."""
    held: list[Tensor] = []
    for unit in units:
        if held and _padded_tokens(torch.cat([*held, unit]), lengths) > token_budget:
            yield torch.cat(held).sort().values
            held = []
        held.append(unit)
    if held:
        yield torch.cat(held).sort().values


def _lengths(tokens: Tokens) -> Tensor:
    return torch.stack([tokens.prompt_mask.sum(1), tokens.completion_mask.sum(1)], dim=1).cpu()


def _padded_tokens(rows: Tensor, lengths: Tensor) -> int:
    return len(rows) * int(lengths[rows].amax(0).sum())
