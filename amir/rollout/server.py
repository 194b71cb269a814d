"""The sampler `server`: an OpenAI-compatible server, which gets the adapter after each update.

An adapter is named by a digest of its content, so a name never refers to other weights. A restarted server does not
know the name, and the adapter is pushed again. After each push, some log-probs of the server are compared with the
trainer's. The differences between servers are in the dialects: `vllm.py`, `transformers_serve.py`.
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
"""If the trainer's probed log-probs change by more than 0.05 nats, the server's must change by a tenth of that."""

PUSHES = 3
"""How often an adapter is pushed for one rollout before the run ends because the server loses it."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion: its tokens, and the server's log-probs of them in nats (None if it returns none)."""

    ids: list[int]
    logprobs: list[float] | None
    usable: bool = True


Probe = dict[Any, tuple[float, float]]
"""The server's and the trainer's log-prob in nats, by prompt and token or by answer."""


class Dialect(Protocol):
    """The requests of one kind of server."""

    concurrent: bool
    """whether the answers do not depend on concurrent requests"""

    def load(self, name: str, folder: Path) -> None:
        """Loads the adapter in `folder` into the server; later requests sample from it."""

    def unload(self, name: str, folder: Path) -> None:
        """Unloads an adapter from the server."""

    def complete(self, prompt: list[int], count: int, max_new_tokens: int, seed: int) -> list[Completion]:
        """`count` completions of a prompt. AdapterUnknown if the server does not have the adapter."""

    def probe(self, prompts: list[list[int]]) -> Probe:
        """A few log-probs, each computed by the server and by the trainer."""


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
        """See `Sampler`. RunStopped if the server stays down or has other weights than the policy."""
        self._probed = self._probed or prompts[:PROBED_PROMPTS]
        for _ in range(PUSHES):
            try:
                self._push()
                return self._rollout(prompts, group_size, max_new_tokens, seed)
            except AdapterUnknown:
                self._served = None
            except RequestRefused as refused:
                raise RunStopped(
                    f"sampler.url = {self._settings.url!r}: the server refuses a request ({refused}); correct the "
                    "server's settings, then resume the run"
                ) from None
        raise RunStopped(
            f"sampler.url = {self._settings.url!r}: the server lost the adapter {PUSHES} times in one rollout; see the "
            "server's log, then resume the run"
        )

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
        """Pushes the policy's adapter to the server unless it has it, and checks that the server uses it."""
        name = f"amir-{_digest(self._policy.trainable())}-{os.getpid()}"
        if name == self._served:
            return
        folder, before = self._folder / name, self._served
        save_result(folder, self._policy.model)
        self._dialect.load(name, folder)
        self._check_arrival()
        if before is not None:
            self._dialect.unload(before, self._folder / before)
        for old in self._folder.glob(f"amir-*-{os.getpid()}"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        self._served = name

    def _check_arrival(self) -> None:
        """RunStopped if the server's log-probs are far from the trainer's, or did not change when those did."""
        probe = self._dialect.probe(self._probed)
        weights = [math.exp(trainer) for _, trainer in probe.values()]
        weighted = [w * abs(server - trainer) for w, (server, trainer) in zip(weights, probe.values(), strict=True)]
        distance = sum(weighted) / max(sum(weights), 1e-30)
        if distance > self._settings.tolerance:
            raise RunStopped(
                f"sampler.url = {self._settings.url!r}: the server's log-probs differ from the trainer's by "
                f"{distance:.3f} nats (mean of {len(probe)}, weighted by probability); expected at most "
                f"sampler.tolerance = {self._settings.tolerance}. Check its weights and dtype, and start vLLM with "
                "--logprobs-mode processed_logprobs"
            )
        shared = probe.keys() & self._known.keys()
        change_there, change_here = (_mean(abs(probe[key][i] - self._known[key][i]) for key in shared) for i in (0, 1))
        if change_here > CHANGED and change_there < LEAST_SHARE * change_here:
            raise RunStopped(
                f"sampler.url = {self._settings.url!r}: the server's log-probs changed by {change_there:.4f} nats "
                f"while the trainer's changed by {change_here:.4f}, so it still samples from older weights; restart "
                "it, then resume the run"
            )
        if change_here > CHANGED or not shared:
            self._known = probe


def _digest(named: dict[str, Tensor]) -> str:
    """A digest of the adapter's content, for its name."""
    digest = hashlib.sha256()
    for name, parameter in named.items():
        digest.update(name.encode())
        digest.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _mean(values: Iterator[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
