"""Our head ops beside other losses, in turns; each peer is optional, and one that is missing is a row that says so."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from bars import FROZEN, OURS, TRAINED
from contenders import (
    Contender,
    HeadSize,
    cut_cross_entropy,
    full_logits,
    gradients,
    liger,
    ours,
    trl_chunked,
    trl_default_chunk,
    verl_triton,
)
from meter import measure

from .calibration import size_of
from .op_times import AGREEMENT, case_of, disagreement, problem_of
from .rates import event_seconds, predict, rates_of
from .runner import failures
from .sizes import Sizes
from .stage import Part, Ratio, Row, make_row, message_of, not_run


class Peer(NamedTuple):
    """How a peer is made, its operations, and the bound of our time over its time."""

    make: Callable[[], Contender]
    recomputes: bool
    """whether its backward forms the logits again"""
    frozen_bound: float | None = None
    trained_bound: float | None = None

    def operations(self, mode: str) -> int:
        """Forward and backward, in units of T H V."""
        return 4 + 2 * (mode == TRAINED) + 2 * self.recomputes


PEERS = {
    "full logits": Peer(lambda: full_logits, recomputes=False),
    "TRL": Peer(lambda: trl_chunked(trl_default_chunk()), True, frozen_bound=1.0, trained_bound=1.0),
    "Liger": Peer(lambda: liger(compiled=False), False, frozen_bound=1.0, trained_bound=1.0),
    "verl Triton": Peer(verl_triton, True, frozen_bound=1.0, trained_bound=1.25),
    "cut-cross-entropy": Peer(lambda: cut_cross_entropy("cce"), recomputes=True),
    "full logits, compiled": Peer(lambda: torch.compile(full_logits), recomputes=False),
}
"""A trained 16-bit head takes verl 8 T H V operations and us 10."""
SECONDS = 25
"""Limit of a peer, compilation included."""


def parts(sizes: Sizes) -> list[Part]:
    """A part for each peer."""
    return [Part(name, partial(beside, sizes, sizes.timed_heads[0], name), SECONDS, own=False) for name in PEERS]


def beside(sizes: Sizes, head: HeadSize, name: str) -> Iterator[Row]:
    """Ours and the peer with a frozen and a trained head."""
    peer = PEERS[name]
    try:
        loss = peer.make()
    except failures() as error:
        yield not_run(name, str(head), message_of(error))
        return
    for mode in (FROZEN, TRAINED):
        yield from in_turns(sizes, head, name, loss, mode)


def in_turns(sizes: Sizes, head: HeadSize, name: str, loss: Contender, mode: str) -> Iterator[Row]:
    """The peer's gradients against ours, its seconds and memory, and our time over its time."""
    tokens = sizes.tokens[0]
    problem, case = problem_of(sizes, head, tokens, mode), case_of(sizes, head, tokens, mode)
    workload = {"mode": mode, "tokens": tokens, "dtype": str(sizes.dtype), **size_of(head)}
    work = {contender: partial(gradients, function, problem) for contender, function in ((OURS, ours), (name, loss))}
    difference = disagreement(work[name]()[1], work[OURS]()[1])
    agreement = Ratio("those of ours", difference, AGREEMENT)
    yield make_row(name, f"{case}: gradients", {"check": "gradients", **workload}, ratio=agreement)
    seconds: dict[str, list[float]] = {contender: [] for contender in work}
    for _ in range(max(2, sizes.repeats // 2)):
        for contender, run in work.items():
            seconds[contender] += event_seconds(run, sizes.device, 1, warm_up=0)
    _, peak, (_, grads) = measure(work[name], problem.hidden.device)
    used = None if peak is None else peak - sum(grad.nbytes for grad in grads) / 1e6
    flops = PEERS[name].operations(mode) * tokens * head.hidden * head.vocabulary
    expected = predict(rates_of(sizes), flops=flops)
    yield make_row(name, case, {"check": "time", **workload}, seconds=seconds[name], memory=used, expected=expected)
    ratio = sorted(seconds[OURS])[len(seconds[OURS]) // 2] / sorted(seconds[name])[len(seconds[name]) // 2]
    bound = PEERS[name].frozen_bound if mode == FROZEN else PEERS[name].trained_bound
    ours_to_peer = Ratio(name, ratio, sizes.bound(bound))
    yield make_row(
        OURS, f"{case}: time beside {name}", {"check": "ratio", "peer": name, **workload}, ratio=ours_to_peer
    )
