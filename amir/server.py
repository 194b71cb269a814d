"""Sampling by an OpenAI-compatible server, which gets the adapter after each update and must prove that it has it.

An adapter is named by its content, so a server never answers with other weights under a known name. A server that was
restarted does not know the name, and the adapter is pushed again. What differs between servers is in a dialect:
`server_vllm.py`, `server_transformers.py`.
"""

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx2
from torch import Tensor

from .checkpoint import save_result
from .config import ConfigError, RunConfig, RunStopped, ServerSampling
from .model import Policy
from .rollout import Rollout, rollout_of

CONNECT_SECONDS, FIRST_DELAY, LONGEST_DELAY = 10.0, 0.5, 30.0
"""Seconds to get a connection, and between attempts: doubled from the first to the longest."""

PROBED_PROMPTS = 4

MOVED, STOOD_STILL = 0.05, 0.1
"""Once the trainer's probed log-probs have moved by 0.05 nats, the server's must have moved by a tenth of that."""

PUSHES = 3
"""A server that forgets an adapter this often in one rollout has no use."""


class Refused(Exception):
    """The server's answer to a request that it will not serve, however often it is asked."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


class AdapterGone(Exception):
    """The server does not know the adapter any more: it was restarted."""


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
        """`count` completions of a prompt. AdapterGone where the server does not know the adapter."""

    def probe(self, prompts: list[list[int]]) -> Probe:
        """A few log-probs, as the server and as the trainer computes them."""


class Server:
    """The sampler `server`."""

    def __init__(self, policy: Policy, config: RunConfig, folder: Path, say: Callable[[str], None]) -> None:
        assert isinstance(config.sampler, ServerSampling)
        self._policy, self._settings, self._say = policy, config.sampler, say
        self._folder = Path(config.sampler.adapter_dir or folder).expanduser().absolute()
        self._client = Client(config.sampler, say)
        try:
            self._dialect = _dialect(config, policy, self._client)
        except Refused as refused:
            raise ConfigError(f"sampler.url: {config.sampler.url} refuses: {refused}") from None
        self._served: str | None = None
        self._probed: list[list[int]] = []
        self._known: Probe = {}

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        """See `Sampler`. RunStopped where the server stays away or keeps other weights than the policy's."""
        self._probed = self._probed or prompts[:PROBED_PROMPTS]
        for _ in range(PUSHES):
            try:
                self._push()
                return self._rollout(prompts, group_size, max_new_tokens, seed)
            except AdapterGone:
                self._served = None
            except Refused as refused:
                raise RunStopped(f"sampler server: {self._settings.url} refuses: {refused}") from None
        raise RunStopped(f"sampler server: {self._settings.url} forgot the adapter {PUSHES} times in one rollout")

    def _rollout(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        def complete(place: int) -> list[Completion]:
            own = random.Random(f"{seed}/{place}").getrandbits(31)
            return self._dialect.complete(prompts[place], group_size, max_new_tokens, own)

        workers = self._settings.concurrent_requests if self._dialect.concurrent else 1
        with ThreadPoolExecutor(workers) as pool, self._client.abandoned_on_error():
            made = [completion for group in pool.map(complete, range(len(prompts))) for completion in group]
        unusable = [not c.usable for c in made]
        return rollout_of(self._policy, prompts, [c.ids for c in made], [c.logprobs for c in made], unusable)

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
        """RunStopped where the server's log-probs are far from the trainer's, or stood still while those moved."""
        probe = self._dialect.probe(self._probed)
        weights = [math.exp(trainer) for _, trainer in probe.values()]
        weighted = [w * abs(server - trainer) for w, (server, trainer) in zip(weights, probe.values(), strict=True)]
        off = sum(weighted) / max(sum(weights), 1e-30)
        if off > self._settings.tolerance:
            raise RunStopped(
                f"sampler server: its log-probs are {off:.3f} nats from the trainer's (mean of {len(probe)} by "
                f"probability), expected at most sampler.tolerance = {self._settings.tolerance}: it has other weights, "
                "another dtype, or (vLLM) was started without --logprobs-mode processed_logprobs"
            )
        shared = probe.keys() & self._known.keys()
        moved_there, moved_here = (_mean(abs(probe[key][i] - self._known[key][i]) for key in shared) for i in (0, 1))
        if moved_here > MOVED and moved_there < STOOD_STILL * moved_here:
            raise RunStopped(
                f"sampler server: its log-probs moved by {moved_there:.4f} nats while the trainer's moved by "
                f"{moved_here:.4f}: it still samples from older weights"
            )
        if moved_here > MOVED or not shared:
            self._known = probe


class Client:
    """JSON over HTTP to one server: what may pass is tried again until `wait_seconds` are over, then RunStopped."""

    def __init__(self, settings: ServerSampling, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        try:
            self._http = httpx2.Client(
                base_url=settings.url.rstrip("/").removesuffix("/v1"),
                headers=_authorization(settings),
                timeout=httpx2.Timeout(
                    settings.timeout_seconds, connect=min(CONNECT_SECONDS, settings.timeout_seconds)
                ),
                limits=httpx2.Limits(max_connections=settings.concurrent_requests),
                trust_env=False,
            )
        except httpx2.InvalidURL as error:
            raise ConfigError(f"sampler.url = {settings.url!r}: {error}") from None
        self._away = False
        self._abandoned = threading.Event()
        self._lock = threading.Lock()

    def get(self, path: str) -> Any:
        """The JSON answer; Refused for an answer from 400 to 499."""
        return self._insistently(lambda: _answer(self._http.get(path)))

    def post(self, path: str, body: dict[str, Any], refusal: str | None = None) -> Any:
        """The JSON answer, None where it is other text; Refused for an answer from 400 to 499, or with `refusal`."""
        return self._insistently(lambda: _answer(self._http.post(path, json=body), refusal))

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer's server-sent events, as JSON."""

        def attempt() -> list[dict[str, Any]]:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code >= 400:
                    response.read()
                    _answer(response)
                events = [json.loads(line[5:]) for line in response.iter_lines() if line.startswith("data:")]
            if failed := [event["error"] for event in events if "error" in event]:
                raise _Passing(str(failed[0]))
            return events

        return self._insistently(attempt)

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Ends the waiting of every thread where the work inside fails or is interrupted."""
        self._abandoned.clear()
        try:
            yield
        except BaseException:
            self._abandoned.set()
            raise

    def _insistently(self, attempt: Callable[[], Any]) -> Any:
        began, delay, url = time.monotonic(), FIRST_DELAY, self._settings.url
        while True:
            try:
                result = attempt()
            except (httpx2.TransportError, _Passing, json.JSONDecodeError) as error:
                reason = f"{type(error).__name__.lstrip('_')}: {error}"
            else:
                self._tell(None)
                return result
            waited = time.monotonic() - began
            if waited >= self._settings.wait_seconds:
                raise RunStopped(f"sampler server: {url} has not answered for {waited:.0f} s ({reason})")
            self._tell(reason)
            if self._abandoned.wait(min(delay, self._settings.wait_seconds - waited)):
                raise RunStopped(f"sampler server: given up after another request failed ({reason})")
            delay = min(2 * delay, LONGEST_DELAY)

    def _tell(self, reason: str | None) -> None:
        """Says once that the server is away, and once that it is back."""
        with self._lock:
            if reason is not None and not self._away:
                url, limit = self._settings.url, self._settings.wait_seconds
                self._say(f"the server {url} does not answer ({reason}): waiting for it, {limit:.0f} s at most")
            elif reason is None and self._away:
                self._say(f"the server {self._settings.url} answers again")
            self._away = reason is not None


class _Passing(Exception):
    """A failure that may pass: overload, a restart."""


def _answer(response: httpx2.Response, refusal: str | None = None) -> Any:
    passing = response.status_code >= 500 or response.status_code == 429
    if passing and (refusal is None or refusal not in response.text):
        raise _Passing(f"status {response.status_code}: {response.text[:300]}")
    if response.status_code >= 400:
        raise Refused(response.status_code, response.text)
    return response.json() if "json" in response.headers.get("content-type", "") else None


def _authorization(settings: ServerSampling) -> dict[str, str]:
    if settings.api_key_env is None:
        return {}
    key = os.environ.get(settings.api_key_env)
    if key is None:
        raise ConfigError(f"sampler.api_key_env = {settings.api_key_env!r}: no such environment variable")
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"sampler.api_key_env = {settings.api_key_env!r}: empty, or no text that a header can hold")
    return {"Authorization": f"Bearer {key}"}


def _dialect(config: RunConfig, policy: Policy, client: Client) -> Dialect:
    assert isinstance(config.sampler, ServerSampling)
    if config.sampler.dialect == "transformers":
        from .server_transformers import TransformersServe

        return TransformersServe(policy, client)
    from .server_vllm import Vllm

    return Vllm(policy, client, config)


def _digest(named: dict[str, Tensor]) -> str:
    """Names the adapter by its content."""
    digest = hashlib.sha256()
    for name, parameter in named.items():
        digest.update(name.encode())
        digest.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
