"""Creates the sampler of a run: `generate`, `paged`, or `server` in one of its dialects."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from ..config import PagedSampling, RunConfig, ServerSampling
from ..errors import ConfigError, RequestRefused, RunStopped
from ..policy.policy import Policy
from .generate import Generate
from .rollout import Sampler


def make_sampler(config: RunConfig, policy: Policy, folder: Path, log: Callable[[str], None]) -> Sampler:
    """The sampler that `config.sampler` names; a server reads adapters from `folder`; `log` reports when it is down."""
    if isinstance(config.sampler, ServerSampling):
        return _server(config, config.sampler, policy, folder, log)
    if isinstance(config.sampler, PagedSampling):
        from .paged import Paged

        return Paged(policy, config.sampler)
    return Generate(policy)


def server_state(config: RunConfig, policy: Policy) -> list[str]:
    """Whether the server of the settings answers now, as a line; ConfigError if the run would refuse it."""
    if not isinstance(config.sampler, ServerSampling):
        return []
    from .http_client import Client

    once = config.sampler.model_copy(update={"wait_seconds": 0.0})
    try:
        with contextlib.suppress(RequestRefused):
            Client(once, _unheard).get("/v1/models")
        make_sampler(config.model_copy(update={"sampler": once}), policy, Path(), _unheard)
    except RunStopped as error:
        return [f"warning: {error}"]
    return [f"server: {once.url} answers"]


def _unheard(text: str) -> None:
    """For a server that is tried once, which has nothing to report in between."""


def _server(
    config: RunConfig, settings: ServerSampling, policy: Policy, folder: Path, log: Callable[[str], None]
) -> Sampler:
    """Imported here, so that other runs load no HTTP client."""
    from .http_client import Client
    from .server import Dialect, Server
    from .transformers_serve import TransformersServe
    from .vllm import Vllm

    client = Client(settings, log)
    dialect: Dialect
    try:
        if settings.dialect == "transformers":
            dialect = TransformersServe(policy, client)
        else:
            dialect = Vllm(policy, client, config)
    except RequestRefused as refused:
        raise ConfigError(
            f"sampler.url = {settings.url!r}: the server refuses requests ({refused}); check the address, and the "
            "key in sampler.api_key_env"
        ) from None
    return Server(policy, settings, client, dialect, folder)
