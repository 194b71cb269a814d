"""From rollouts to the tensors a loss sees: sampled groups, their loss masks and denominators, and micro-batches.

N prompts of padded length P; B completions of padded length C.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amir_kernels import group_advantage, pair_logits

from .config import RunConfig, RunStopped


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

    def computed(self, *, packed: bool) -> int:
        """Tokens that the model computes to score these completions, whose last tokens predict nothing.

        Packed: each prompt once and the completions behind it. Else each completion behind its own copy of the prompt,
        padded to the longest.
        """
        continued = (self.completion_lengths - 1).clamp(min=0)
        if packed:
            return int(self.prompt_lengths.sum() + continued.sum())
        return len(self) * int((self.prompt_lengths[self.prompt_of] + continued).max())

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
    rewards: Tensor  # float32 [B], the weighted sum of the functions' rewards; NaN where none scored
    advantages: Tensor  # float32 [B]
    truncated: Tensor  # bool [B]
    loss_mask: Tensor  # bool [B, C], completion_mask less masked truncated rows
    chosen: Tensor  # float32 [B], pairs whose better completion this is
    rejected: Tensor  # float32 [B], pairs whose worse completion this is
    num_pairs: Tensor  # float32 scalar, pairs of the whole step
    live: Tensor  # bool [B], rows whose gradient can be other than zero
    ref_logprobs: Tensor | None = None  # float32 [B, C]
    old_logprobs: Tensor | None = None  # float32 [B, C]
    sampled_logprobs: Tensor | None = None  # float32 [B, C], another engine's, NaN where it gave none
    scores: Tensor | None = None  # float32 [B, F], what each reward function gave

    @property
    def paired(self) -> Tensor:
        """Rows that some pair holds, bool `[B]`."""
        return (self.chosen + self.rejected) > 0

    @property
    def num_tokens(self) -> Tensor:
        """Tokens in the loss mask, dead rows included: the token divisor of the whole step."""
        return self.loss_mask.sum().float()

    @property
    def num_sequences(self) -> Tensor:
        """Completions of the whole step, masked and dead ones included."""
        return torch.tensor(float(len(self.tokens)), device=self.loss_mask.device)


def make_batch(tokens: Tokens, rewards: Tensor, truncated: Tensor, config: RunConfig) -> Batch:
    """Advantages, pairs and masks of sampled groups, one a prompt; `rewards` `[B]`, or `[B, F]` of F functions."""
    group = tokens.prompt_of
    scale = {"group": "std"}.get(config.scale_rewards, config.scale_rewards)
    baseline = "leave_one_out" if config.loss_type == "reinforce" else "mean"
    scores, factors = rewards, [reward.weight for reward in config.rewards]
    if rewards.dim() == 1:
        scores, factors = rewards[:, None], [1.0]
    rewards = weighted_sum(scores, factors)
    if scale == "bernoulli" and len(outside := rewards[(rewards < 0) | (rewards > 1)]):
        raise RunStopped(
            f"scale_rewards = 'bernoulli': it is for rewards from 0 to 1, and a completion has {outside[0]:g}; "
            "expected scale_rewards 'group', in a run of its own"
        )
    advantages = group_advantage(
        scores, group, baseline=baseline, scale=scale, combine=config.combine_rewards, weights=factors
    ).float()
    empty = ~tokens.completion_mask.any(1)  # without a ratio to pair
    masked = truncated & config.mask_truncated_completions | empty
    loss_mask = tokens.completion_mask & ~masked[:, None]
    scorable = ~masked & ~rewards.isnan()
    chosen, rejected = torch.zeros_like(rewards), torch.zeros_like(rewards)
    num_pairs = torch.zeros((), device=rewards.device)
    if config.lambda_reg > 0:
        pairs = pair_logits(torch.zeros_like(rewards), rewards, group, valid=scorable, **pair_options(config))
        chosen += pairs.chosen.bincount(minlength=len(chosen))
        rejected += pairs.rejected.bincount(minlength=len(rejected))
        num_pairs += len(pairs.logit)
    everywhere = config.beta > 0 or config.entropy_coef > 0
    live = ~masked & ((advantages != 0) | (chosen + rejected > 0) | everywhere)
    return Batch(
        tokens, group, rewards, advantages, truncated, loss_mask, chosen, rejected, num_pairs, live, scores=scores
    )


def weighted_sum(scores: Tensor, factors: list[float]) -> Tensor:
    """The functions' rewards `[B, F]` as one, float32 `[B]`: those that are NaN left out, NaN where all are."""
    total = (scores.double() * torch.tensor(factors, dtype=torch.float64, device=scores.device)).nansum(dim=1)
    return torch.where(scores.isnan().all(dim=1), torch.nan, total).float()


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
    """Rows of a batch that go through the model together. `whole`: it holds every row of each group it touches.

    `idle`: it keeps a rank in step with the others, which have one more; its results count for nothing.
    """

    rows: Tensor  # int64
    whole: bool
    idle: bool = False


def micro_batches(batch: Batch, token_budget: int, *, packed: bool = True) -> Iterator[MicroBatch]:
    """Splits the live rows into micro-batches of at most `token_budget` computed tokens, longest first.

    `packed` says how the tokens are laid out, and so which are computed (`Tokens.computed`). A group stays together
    where it fits, since its rows share a prompt and the pair term couples them; one that does not is split into
    micro-batches of its own, marked `whole=False`. A single row is never split, however long.
    """
    tokens = batch.tokens
    live = torch.nonzero(batch.live.cpu()).flatten()
    lengths = (tokens.prompt_lengths[tokens.prompt_of] + tokens.completion_lengths).cpu()
    order = live[torch.argsort(lengths[live], descending=True, stable=True)]
    group = batch.group.cpu()[order]
    groups = [order[group == g] for g in dict.fromkeys(group.tolist())]
    fits = [tokens.rows(rows).computed(packed=packed) <= token_budget for rows in groups]
    small = [rows for rows, fit in zip(groups, fits, strict=True) if fit]
    large = [rows for rows, fit in zip(groups, fits, strict=True) if not fit]
    yield from (MicroBatch(rows, True) for rows in _fill(tokens, small, token_budget, packed))
    for rows in large:
        yield from (MicroBatch(part, False) for part in _fill(tokens, list(rows.split(1)), token_budget, packed))


def _fill(tokens: Tokens, units: list[Tensor], token_budget: int, packed: bool) -> Iterator[Tensor]:
    """Joins consecutive units while they stay within the budget; rows in ascending order."""
    held: list[Tensor] = []
    for unit in units:
        if held and tokens.rows(torch.cat([*held, unit])).computed(packed=packed) > token_budget:
            yield torch.cat(held).sort().values
            held = []
        held.append(unit)
    if held:
        yield torch.cat(held).sort().values
