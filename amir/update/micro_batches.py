"""Splits completions into micro-batches by a budget of tokens, and halves their size when one runs out of memory."""

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


@dataclass(frozen=True)
class MicroBatch:
    """Completions that go through the model together."""

    rows: Tensor  # int64, their rows in the step's batch
    complete_groups: bool
    """whether it has every needed completion of its groups"""
    tokens: int = 0
    """tokens that the model computes for it"""
    idle: bool = False
    """a rank with one micro-batch less than others computes an idle one instead; its results are not used"""


def micro_batches(tokens: Tokens, needed: Tensor, token_budget: int, *, packed: bool = True) -> Iterator[MicroBatch]:
    """Micro-batches of the `needed` completions (bool `[B]`), longest first, of at most `token_budget` tokens computed.

    `packed` is the layout of the tokens, which determines how many are computed (`Tokens.computed`). A group that fits
    is not split, because its rows share a prompt and the pair term couples them; a larger group is split into
    micro-batches of its own, with `complete_groups=False`. A single row is never split, however long.
    """
    rows = torch.nonzero(needed.cpu()).flatten()
    lengths = (tokens.prompt_lengths[tokens.prompt_index] + tokens.completion_lengths).cpu()
    order = rows[torch.argsort(lengths[rows], descending=True, stable=True)]
    group = tokens.prompt_index.cpu()[order]
    groups = [order[group == g] for g in dict.fromkeys(group.tolist())]
    fits = [tokens.rows(rows).computed(packed=packed) <= token_budget for rows in groups]
    small = [group for group, fit in zip(groups, fits, strict=True) if fit]
    large = [group for group, fit in zip(groups, fits, strict=True) if not fit]
    yield from _fill(tokens, small, token_budget, packed, complete_groups=True)
    for rows in large:
        yield from _fill(tokens, list(rows.split(1)), token_budget, packed, complete_groups=False)


def _fill(
    tokens: Tokens, units: list[Tensor], token_budget: int, packed: bool, *, complete_groups: bool
) -> Iterator[MicroBatch]:
    """Fills micro-batches with consecutive units up to the budget; the rows of each are in ascending order."""
    filled: list[Tensor] = []
    size = 0
    for unit in units:
        joined = tokens.rows(torch.cat([*filled, unit])).computed(packed=packed)
        if filled and joined > token_budget:
            yield MicroBatch(torch.cat(filled).sort().values, complete_groups, size)
            filled, joined = [], tokens.rows(unit).computed(packed=packed)
        filled.append(unit)
        size = joined
    if filled:
        yield MicroBatch(torch.cat(filled).sort().values, complete_groups, size)


def assign(micros: Sequence[MicroBatch], ranks: Ranks) -> list[MicroBatch]:
    """Every `ranks.size`-th of `micros`, equally many on each rank: ranks with one less get an idle micro-batch."""
    if not micros:
        return []
    shortest = MicroBatch(micros[-1].rows[-1:], complete_groups=False, tokens=micros[-1].tokens, idle=True)
    return [*micros, *[shortest] * (-len(micros) % ranks.size)][ranks.rank :: ranks.size]


class TokenBudget:
    """The number of tokens that a micro-batch may have: `micro_batch_tokens`, until one runs out of memory.

    Then it is half the tokens of that micro-batch, for the rest of the run and on every rank; this is reported once.
    DDP's replicas communicate only between passes over the micro-batches and agree on the new budget there. FSDP2
    communicates in every layer, so the other ranks would wait for the rank that failed: there the run ends.
    """

    def __init__(
        self,
        tokens: int,
        *,
        packed: bool,
        log: Callable[[str], None] = lambda text: None,
        show_progress: Callable[[int, int], None] = lambda done, total: None,
        ranks: Ranks = SINGLE_PROCESS,
        sharded: bool = False,
    ) -> None:
        """`log` reports a new budget; `show_progress` gets the finished and total number of a pass's micro-batches."""
        self.tokens = tokens
        self.packed = packed
        self.ranks = ranks
        self._log, self._show_progress = log, show_progress
        self._sharded = sharded

    @classmethod
    def for_policy(cls, config: RunConfig, policy: Policy, **callbacks: Any) -> "TokenBudget":
        """The budget of a run, for the layout of tokens and the ranks of its policy."""
        ranks, sharded = policy.ranks, policy.sharded
        return cls(config.micro_batch_tokens, packed=policy.packed, ranks=ranks, sharded=sharded, **callbacks)

    def split(self, tokens: Tokens, needed: Tensor) -> list[MicroBatch]:
        """The micro-batches of all ranks."""
        return list(micro_batches(tokens, needed, self.tokens, packed=self.packed))

    def assigned(self, tokens: Tokens, needed: Tensor) -> Iterator[MicroBatch]:
        """This rank's micro-batches in order, with progress."""
        micros = assign(self.split(tokens, needed), self.ranks)
        for done, micro in enumerate(micros):
            self._show_progress(done, len(micros))
            yield micro

    @contextlib.contextmanager
    def limits(self, micro: MicroBatch) -> Iterator[None]:
        """A context for one micro-batch: running out of memory raises MicroBatchTooLarge.

        ConfigError if the model is sharded, because the other ranks wait for this one inside a layer.
        """
        try:
            yield
            return
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[0]
        if self._sharded:
            raise ConfigError(
                f"rank {self.ranks.rank} ran out of memory in a micro-batch of {micro.tokens} tokens ({reason}), which "
                f"a sharded model cannot repeat; set micro_batch_tokens below {micro.tokens}, then resume the run"
            )
        raise MicroBatchTooLarge(micro.tokens, len(micro.rows), reason)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """A context for a pass over the micro-batches: MicroBatchTooLarge on all ranks if it is raised on any."""
        shortage: MicroBatchTooLarge | None = None
        try:
            yield
        except MicroBatchTooLarge as error:
            shortage = error.with_traceback(None)
        shortages = [error for error in self.ranks.gather(shortage) if error is not None]
        if shortages:
            raise min(shortages, key=lambda error: error.tokens)

    def halve(self, tokens: int, rows: int, reason: str) -> None:
        """Halves the budget on every rank, after a micro-batch of so many tokens and rows ran out of memory.

        ConfigError if that micro-batch had only one completion. Frees cached memory first, so no frame of the failed
        pass may be alive.
        """
        torch.cuda.empty_cache()
        with self.ranks.raise_on_all_ranks():
            if rows == 1:
                raise ConfigError(
                    f"one completion with its prompt ({tokens} tokens) does not fit into memory ({reason}); set "
                    "gradient_checkpointing: true, quantization: 4bit, or a smaller max_completion_length"
                )
        self.tokens = tokens // 2
        self._log(
            f"out of memory in a micro-batch of {rows} completions, {tokens} tokens: the step continues in "
            f"micro-batches of at most {self.tokens} tokens; set micro_batch_tokens: {self.tokens} to avoid this"
        )
