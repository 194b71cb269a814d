"""JSON over HTTP to a sampling server: retries while it is down, and an error for each request that it refuses."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2

from ..config import ServerSampling
from ..errors import ConfigError, RequestRefused, RunStopped, ServerBusy

CONNECT_SECONDS, FIRST_DELAY, LONGEST_DELAY = 10.0, 0.5, 30.0
"""Seconds: time limit of a connection; delay before the first retry, which doubles up to the longest."""


class Client:
    """JSON over HTTP to one server. Failures that may be temporary are retried for `wait_seconds`; then RunStopped."""

    def __init__(self, settings: ServerSampling, log: Callable[[str], None]) -> None:
        self._settings, self._log = settings, log
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
            raise ConfigError(
                f"sampler.url = {settings.url!r}: {error}; expected an address such as http://localhost:8000"
            ) from None
        self._down = False
        self._abandoned = threading.Event()
        self._lock = threading.Lock()

    def get(self, path: str) -> Any:
        """The JSON answer; RequestRefused for a status from 400 to 499."""
        return self._with_retries(lambda: _answer(self._http.get(path)))

    def post(self, path: str, body: dict[str, Any], refusal: str | None = None) -> Any:
        """The JSON answer, or None if it is not JSON.

        RequestRefused for a status from 400 to 499, or for an answer of status 500 that contains `refusal`.
        """
        return self._with_retries(lambda: _answer(self._http.post(path, json=body), refusal))

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The server-sent events of the answer, parsed from JSON."""

        def attempt() -> list[dict[str, Any]]:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code >= 400:
                    response.read()
                    _answer(response)
                events = [json.loads(line[5:]) for line in response.iter_lines() if line.startswith("data:")]
            if failed := [event["error"] for event in events if "error" in event]:
                raise ServerBusy(str(failed[0]))
            return events

        return self._with_retries(attempt)

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Ends the retries of every thread if the body fails or is interrupted."""
        self._abandoned.clear()
        try:
            yield
        except BaseException:
            self._abandoned.set()
            raise

    def _with_retries(self, attempt: Callable[[], Any]) -> Any:
        began, delay, url = time.monotonic(), FIRST_DELAY, self._settings.url
        while True:
            try:
                result = attempt()
            except (httpx2.TransportError, ServerBusy, json.JSONDecodeError) as error:
                reason = f"{type(error).__name__.lstrip('_')}: {error}"
            else:
                self._report(None)
                return result
            waited = time.monotonic() - began
            if waited >= self._settings.wait_seconds:
                raise RunStopped(
                    f"sampler.url = {url!r}: the server has not answered for {waited:.0f} s ({reason}); start it, then "
                    "resume the run"
                )
            self._report(reason)
            if self._abandoned.wait(min(delay, self._settings.wait_seconds - waited)):
                raise RunStopped(f"sampler.url = {url!r}: request abandoned, because another request failed ({reason})")
            delay = min(2 * delay, LONGEST_DELAY)

    def _report(self, reason: str | None) -> None:
        """Reports once that the server is down, and once that it answers again."""
        with self._lock:
            if reason is not None and not self._down:
                url, limit = self._settings.url, self._settings.wait_seconds
                self._log(f"the server {url} does not answer ({reason}): retrying for at most {limit:.0f} s")
            elif reason is None and self._down:
                self._log(f"the server {self._settings.url} answers again")
            self._down = reason is not None


def _answer(response: httpx2.Response, refusal: str | None = None) -> Any:
    passing = response.status_code >= 500 or response.status_code == 429
    if passing and (refusal is None or refusal not in response.text):
        raise ServerBusy(f"status {response.status_code}: {response.text[:300]}")
    if response.status_code >= 400:
        raise RequestRefused(response.status_code, response.text)
    return response.json() if "json" in response.headers.get("content-type", "") else None


def _authorization(settings: ServerSampling) -> dict[str, str]:
    if settings.api_key_env is None:
        return {}
    key = os.environ.get(settings.api_key_env)
    if key is None:
        raise ConfigError(
            f"sampler.api_key_env = {settings.api_key_env!r}: this environment variable is not set; set it to the "
            "server's key"
        )
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"sampler.api_key_env = {settings.api_key_env!r}: this environment variable is empty or has characters "
            "that are not allowed in an HTTP header; set it to the server's key"
        )
    return {"Authorization": f"Bearer {key}"}
