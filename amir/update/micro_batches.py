"""Rows of a batch that go through the model together, and how many tokens of them fit into memory."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import RunConfig
from ..distributed import SINGLE_PROCESS, Ranks
from ..errors import ConfigError, MicroBatchTooLarge
from ..policy.policy import Policy
from ..tokens import Tokens
from .batch import Batch


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch that go through the model together."""

    rows: Tensor  # int64
    whole: bool
    """it holds every row of each group it touches"""
    tokens: int = 0
    """that the model computes for it"""
    idle: bool = False
    """it keeps a rank in step with the others, which have one more; its results count for nothing"""


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
    yield from _fill(tokens, small, token_budget, packed, whole=True)
    for rows in large:
        yield from _fill(tokens, list(rows.split(1)), token_budget, packed, whole=False)


def _fill(tokens: Tokens, units: list[Tensor], token_budget: int, packed: bool, *, whole: bool) -> Iterator[MicroBatch]:
    """Joins consecutive units while they stay within the budget; rows in ascending order."""
    held: list[Tensor] = []
    size = 0
    for unit in units:
        joined = tokens.rows(torch.cat([*held, unit])).computed(packed=packed)
        if held and joined > token_budget:
            yield MicroBatch(torch.cat(held).sort().values, whole, size)
            held, joined = [], tokens.rows(unit).computed(packed=packed)
        held.append(unit)
        size = joined
    if held:
        yield MicroBatch(torch.cat(held).sort().values, whole, size)


def assign(micros: Sequence[MicroBatch], ranks: Ranks) -> list[MicroBatch]:
    """Every `ranks.size`-th of `micros`, equally many on each rank: ranks with one less get an idle one."""
    if not micros:
        return []
    shortest = MicroBatch(micros[-1].rows[-1:], whole=False, tokens=micros[-1].tokens, idle=True)
    return [*micros, *[shortest] * (-len(micros) % ranks.size)][ranks.rank :: ranks.size]


class TokenBudget:
    """How many tokens a micro-batch may hold: the setting, until a micro-batch of that size runs out of memory.

    Then half of that micro-batch's tokens for the rest of the run, on every rank, reported once. DDP's replicas
    communicate only between passes over the micro-batches, and agree on the new budget there. FSDP2's shards do so in
    every layer, where the others wait for a rank that has left it: there it ends the run.
    """

    def __init__(
        self,
        tokens: int,
        *,
        packed: bool,
        say: Callable[[str], None] = lambda text: None,
        show_progress: Callable[[int, int], None] = lambda done, total: None,
        ranks: Ranks = SINGLE_PROCESS,
        sharded: bool = False,
    ) -> None:
        """`say` reports a new budget; `show_progress` gets how many of a pass's micro-batches are done."""
        self.tokens = tokens
        self.packed = packed
        self.ranks = ranks
        self._say, self._show_progress = say, show_progress
        self._sharded = sharded

    @classmethod
    def of(cls, config: RunConfig, policy: Policy, **callbacks: Any) -> "TokenBudget":
        """The run's, for its policy's layout of tokens and the ranks it is trained on."""
        ranks, sharded = policy.ranks, policy.sharded
        return cls(config.micro_batch_tokens, packed=policy.packed, ranks=ranks, sharded=sharded, **callbacks)

    def split(self, batch: Batch) -> list[MicroBatch]:
        """The micro-batches of all ranks."""
        return list(micro_batches(batch, self.tokens, packed=self.packed))

    def assigned(self, batch: Batch) -> Iterator[MicroBatch]:
        """This rank's micro-batches, one after the other."""
        micros = assign(self.split(batch), self.ranks)
        for done, micro in enumerate(micros):
            self._show_progress(done, len(micros))
            yield micro

    @contextlib.contextmanager
    def limits(self, micro: MicroBatch) -> Iterator[None]:
        """Around the work on one micro-batch: running out of memory there raises MicroBatchTooLarge.

        ConfigError where the model is sharded: the other ranks wait for this one inside a layer.
        """
        try:
            yield
            return
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[0]
        if self._sharded:
            raise ConfigError(
                f"rank {self.ranks.rank} ran out of memory in a micro-batch of {micro.tokens} tokens ({reason}), and "
                f"the other ranks wait for its shard of a layer; expected micro_batch_tokens below {micro.tokens}"
            )
        raise MicroBatchTooLarge(micro.tokens, len(micro.rows), reason)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Around a pass over the micro-batches: where one is too large on any rank, MicroBatchTooLarge on all."""
        shortage: MicroBatchTooLarge | None = None
        try:
            yield
        except MicroBatchTooLarge as error:
            shortage = error.with_traceback(None)
        shortages = [one for one in self.ranks.gather(shortage) if one is not None]
        if shortages:
            raise min(shortages, key=lambda one: one.tokens)

    def halve(self, tokens: int, rows: int, reason: str) -> None:
        """Halves the budget after a micro-batch of so many tokens and rows ran out of memory, on every rank.

        ConfigError where it held one completion. Frees the cached memory first: no frame of the failed pass may be
        alive.
        """
        torch.cuda.empty_cache()
        with self.ranks.raise_on_all_ranks():
            if rows == 1:
                raise ConfigError(
                    f"one completion with its prompt ({tokens} tokens) does not fit into memory ({reason}); expected "
                    "gradient_checkpointing: true, quantization: 4bit, or a smaller max_completion_length"
                )
        self.tokens = tokens // 2
        self._say(
            f"out of memory in a micro-batch of {rows} completions, {tokens} tokens: the step continues in "
            f"micro-batches of at most {self.tokens} tokens; set micro_batch_tokens to that to start there"
        )
