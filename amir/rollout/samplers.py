"""Creates the sampler of a run: `generate`, `paged`, or `server` in one of its dialects."""

from collections.abc import Callable
from pathlib import Path

from ..config import PagedSampling, RunConfig, ServerSampling
from ..errors import ConfigError, RequestRefused
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
