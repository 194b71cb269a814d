"""Bounds of the head ops against their contenders, computed from rows of `bench_linear_logprob.py`.

A row's workload names the head (`model`, `hidden_size`, `vocabulary`), the `mode` and the `tokens`; the contenders are
those named here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

OURS, DEAD, FUSED = "linear_logprob", "linear_logprob, 30% dead rows", "linear_policy_loss"
FULL, LIGER, LIGER_COMPILED = "full logits", "Liger", "Liger compiled"
TRL_DEFAULT, TRL_BEST = "TRL, default chunk", "TRL, best chunk"
CHUNKED_PEERS = (TRL_DEFAULT, TRL_BEST, LIGER, LIGER_COMPILED)
FROZEN, TRAINED, GROWTH = "frozen head", "trained head", "growth"
FLOPS = {(OURS, FROZEN): 6, (OURS, TRAINED): 8, (FUSED, FROZEN): 4, (FUSED, TRAINED): 6}
"""Operations of forward and backward, in units of T H V."""

GROWN_TIME = 1.1
"""Upper bound of the seconds per token at the longest T over those at the shortest; above it time is not linear."""
GROWN_SCRATCH = 1.1
"""Upper bound of the scratch at the longest T over that at a quarter of it; above it scratch grows with T."""


def bare(flops: int) -> str:
    """The contender name of the bare products with this many operations, in units of T H V."""
    return f"bare GEMMs, {flops} T H V"


@dataclass(frozen=True)
class Bar:
    """A ratio and its upper bound."""

    head: str
    mode: str
    contender: str
    name: str
    bound: float
    figure: float

    @property
    def met(self) -> bool:
        return self.figure <= self.bound

    def __str__(self) -> str:
        return f"{self.figure:.2f}, {'met' if self.met else 'missed'}"


def head_and_mode(row: Row) -> tuple[str, str]:
    """The head in words, and the mode: FROZEN, TRAINED or GROWTH."""
    workload = row["workload"]
    return f"{workload['model']} {workload['hidden_size']} x {workload['vocabulary']:,}", workload["mode"]


def latest_runs(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """For each head and mode the rows of its newest run, by contender; in `growth` by contender and tokens.

    A bar compares contenders that took turns in one run, so a newer run replaces the older one whole.
    """
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["bench"] == "linear_logprob":
            runs.setdefault(head_and_mode(row), []).append(row)
    newest = {}
    for key, all_of_them in runs.items():
        last = max(row["date"] for row in all_of_them)
        newest[key] = {name_of(row): row for row in all_of_them if row["date"] == last}
    return newest


def name_of(row: Row) -> str:
    """The contender; with the tokens where these differ between the rows of a run."""
    return f"{row['contender']}, {tokens_of(row):,}" if head_and_mode(row)[1] == GROWTH else row["contender"]


def tokens_of(row: Row) -> int:
    """T, the number of rows of hidden states."""
    return int(row["workload"]["tokens"])


def bars(rows: Iterable[Row]) -> list[Bar]:
    """Every bound whose contenders were measured."""
    measured = []
    for (head, mode), run in latest_runs(rows).items():
        if mode == GROWTH:
            measured += growth_bars(head, run)
            continue
        for contender, name, figure, bound in _figures(mode, run):
            if figure is not None:
                measured.append(Bar(head, mode, contender, name, bound, figure))
    return measured


PEER_TIME, DEAD_TIME, FULL_TIME = "time / best chunked peer", "with 30% dead rows", "time / full logits"
BARE_TIME, PEER_MEMORY = "time / bare GEMMs", "memory / best chunked peer"
LINEAR, FLAT = "time per token, longest T / shortest", "scratch, longest T / a quarter of it"


def _figures(mode: str, run: dict[str, Row]) -> list[tuple[str, str, float | None, float]]:
    seconds = {name: row["seconds"]["median"] for name, row in run.items()}
    memory = {name: row["peak_memory_mb"] for name, row in run.items() if row["peak_memory_mb"] is not None}
    peer_time = min((seconds[peer] for peer in CHUNKED_PEERS if peer in seconds), default=None)
    peer_memory = min((memory[peer] for peer in CHUNKED_PEERS if peer in memory), default=None)

    def over(values: dict[str, float], contender: str, other: float | None) -> float | None:
        return values[contender] / other if contender in values and other else None

    return [
        (OURS, PEER_TIME, over(seconds, OURS, peer_time), 1.0),
        (OURS, DEAD_TIME, over(seconds, DEAD, peer_time), 0.75),
        (OURS, BARE_TIME, over(seconds, OURS, seconds.get(bare(FLOPS[OURS, mode]))), 1.15),
        (OURS, PEER_MEMORY, over(memory, OURS, peer_memory), 0.5),
        (FUSED, PEER_TIME, over(seconds, FUSED, peer_time), 0.75),
        (FUSED, FULL_TIME, over(seconds, FUSED, seconds.get(FULL)), 1.0),
        (FUSED, BARE_TIME, over(seconds, FUSED, seconds.get(bare(FLOPS[FUSED, mode]))), 1.2),
        (FUSED, PEER_MEMORY, over(memory, FUSED, peer_memory), 0.5),
    ]


def growth_bars(head: str, run: dict[str, Row]) -> list[Bar]:
    """Two bounds: time grows linearly with the tokens, and scratch does not grow."""
    measured = []
    for contender in (OURS, FUSED):
        by_tokens = {tokens_of(row): row for row in run.values() if row["contender"] == contender}
        if len(by_tokens) < 2:
            continue
        shortest, longest = min(by_tokens), max(by_tokens)
        per_token = {t: row["seconds"]["median"] / t for t, row in by_tokens.items()}
        measured.append(Bar(head, GROWTH, contender, LINEAR, GROWN_TIME, per_token[longest] / per_token[shortest]))
        quarter = by_tokens.get(longest // 4)
        if quarter and quarter["peak_memory_mb"] and by_tokens[longest]["peak_memory_mb"]:
            grown = by_tokens[longest]["peak_memory_mb"] / quarter["peak_memory_mb"]
            measured.append(Bar(head, GROWTH, contender, FLAT, GROWN_SCRATCH, grown))
    return measured
