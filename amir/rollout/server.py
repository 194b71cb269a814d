"""Sampling by an OpenAI-compatible server, which gets the adapter after each update and must prove that it has it.

An adapter is named by its content, so a server never answers with other weights under a known name. A server that was
restarted does not know the name, and the adapter is pushed again. What differs between servers is in a dialect:
`vllm.py`, `transformers_serve.py`.
"""

import hashlib
import math
import os
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..config import ServerSampling
from ..errors import AdapterUnknown, RequestRefused, RunStopped
from ..policy.checkpoint import save_result
from ..policy.policy import Policy
from .http_client import Client
from .rollout import Rollout, make_rollout

PROBED_PROMPTS = 4

CHANGED, LEAST_SHARE = 0.05, 0.1
"""Once the trainer's probed log-probs have changed by 0.05 nats, the server's must have changed by a tenth of that."""

PUSHES = 3
"""Times that an adapter is pushed for one rollout before a server that keeps forgetting it ends the run."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion: its tokens, the server's log-probs of them (nats; None where it gives none)."""

    ids: list[int]
    logprobs: list[float] | None
    usable: bool = True


Probe = dict[Any, tuple[float, float]]
"""Log-probs in nats by what they are of: the server's and the trainer's."""


class Dialect(Protocol):
    """How one kind of server is spoken to."""

    concurrent: bool
    """several requests at once change nothing in their answers"""

    def load(self, name: str, folder: Path) -> None:
        """Makes the server take the adapter in `folder`, and sample from it from now on."""

    def unload(self, name: str, folder: Path) -> None:
        """Makes it forget an adapter."""

    def complete(self, prompt: list[int], count: int, max_new_tokens: int, seed: int) -> list[Completion]:
        """`count` completions of a prompt. AdapterUnknown where the server does not know the adapter."""

    def probe(self, prompts: list[list[int]]) -> Probe:
        """A few log-probs, as the server and as the trainer computes them."""


class Server:
    """The sampler `server`."""

    def __init__(
        self, policy: Policy, settings: ServerSampling, client: Client, dialect: Dialect, folder: Path
    ) -> None:
        self._policy, self._settings, self._client, self._dialect = policy, settings, client, dialect
        self._folder = Path(settings.adapter_dir or folder).expanduser().absolute()
        self._served: str | None = None
        self._probed: list[list[int]] = []
        self._known: Probe = {}

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        """See `Sampler`. RunStopped where the server stays down or keeps other weights than the policy's."""
        self._probed = self._probed or prompts[:PROBED_PROMPTS]
        for _ in range(PUSHES):
            try:
                self._push()
                return self._rollout(prompts, group_size, max_new_tokens, seed)
            except AdapterUnknown:
                self._served = None
            except RequestRefused as refused:
                raise RunStopped(f"sampler server: {self._settings.url} refuses: {refused}") from None
        raise RunStopped(f"sampler server: {self._settings.url} forgot the adapter {PUSHES} times in one rollout")

    def _rollout(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        def complete(place: int) -> list[Completion]:
            own = random.Random(f"{seed}/{place}").getrandbits(31)
            return self._dialect.complete(prompts[place], group_size, max_new_tokens, own)

        workers = self._settings.concurrent_requests if self._dialect.concurrent else 1
        with ThreadPoolExecutor(workers) as pool, self._client.abandoned_on_error():
            completions = [completion for group in pool.map(complete, range(len(prompts))) for completion in group]
        return make_rollout(
            self._policy,
            prompts,
            [completion.ids for completion in completions],
            [completion.logprobs for completion in completions],
            [not completion.usable for completion in completions],
        )

    def _push(self) -> None:
        """Hands the server the policy's adapter, unless it has it, and checks that it arrived."""
        name = f"amir-{_digest(self._policy.trainable())}-{os.getpid()}"
        if name == self._served:
            return
        folder, before = self._folder / name, self._served
        save_result(folder, self._policy.model, self._policy.tokenizer)
        self._dialect.load(name, folder)
        self._check_arrival()
        if before is not None:
            self._dialect.unload(before, self._folder / before)
        for old in self._folder.glob(f"amir-*-{os.getpid()}"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        self._served = name

    def _check_arrival(self) -> None:
        """RunStopped where the server's log-probs are far from the trainer's, or did not change when those did."""
        probe = self._dialect.probe(self._probed)
        weights = [math.exp(trainer) for _, trainer in probe.values()]
        weighted = [w * abs(server - trainer) for w, (server, trainer) in zip(weights, probe.values(), strict=True)]
        distance = sum(weighted) / max(sum(weights), 1e-30)
        if distance > self._settings.tolerance:
            raise RunStopped(
                f"sampler server: its log-probs are {distance:.3f} nats from the trainer's (mean of {len(probe)} by "
                f"probability), expected at most sampler.tolerance = {self._settings.tolerance}: it has other weights, "
                "another dtype, or (vLLM) was started without --logprobs-mode processed_logprobs"
            )
        shared = probe.keys() & self._known.keys()
        change_there, change_here = (_mean(abs(probe[key][i] - self._known[key][i]) for key in shared) for i in (0, 1))
        if change_here > CHANGED and change_there < LEAST_SHARE * change_here:
            raise RunStopped(
                f"sampler server: its log-probs changed by {change_there:.4f} nats while the trainer's changed by "
                f"{change_here:.4f}: it still samples from older weights; restart it, then add --resume"
            )
        if change_here > CHANGED or not shared:
            self._known = probe


def _digest(named: dict[str, Tensor]) -> str:
    """Names the adapter by its content."""
    digest = hashlib.sha256()
    for name, parameter in named.items():
        digest.update(name.encode())
        digest.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _mean(values: Iterator[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
