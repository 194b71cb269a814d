"""vLLM's dialect: token ids both ways, log-probs of the sampled tokens, adapters loaded by name at run time.

The server needs `--enable-lora`, `--max-lora-rank` of at least `lora.r`, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its
environment, `--logprobs-mode processed_logprobs` (otherwise its log-probs are those at temperature 1), and read access
to `sampler.adapter_dir`.
"""

import math
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig, ServerSampling
from ..errors import AdapterUnknown, ConfigError, RequestRefused
from ..policy.policy import Policy
from ..tokens import pad_tokens
from .http_client import Client
from .server import Completion, Probe

TOKEN = "token_id:"
"""vLLM's prefix of a token with `return_tokens_as_token_ids`."""

NO_LOGPROB = -9999.0
"""vLLM's value for minus infinity, which JSON does not have."""

CANDIDATES = 5

REJECTED = "Call to add_lora method failed"
"""Part of the answer of status 500 if the engine cannot load an adapter: too high a rank, or no `--enable-lora`."""

UNSEEN = "No adapter found"
"""Part of the answer of status 404 if the folder has no adapter; any other 404 means that the endpoint is missing."""


class Vllm:
    """See `Dialect`."""

    concurrent = True

    def __init__(self, policy: Policy, client: Client, config: RunConfig) -> None:
        assert isinstance(config.sampler, ServerSampling)
        base, url = config.sampler.model or config.model, config.sampler.url
        self._policy, self._client, self._name = policy, client, base
        served = {model["id"]: model.get("max_model_len") for model in client.get("/v1/models")["data"]}
        if base not in served:
            raise ConfigError(
                f"sampler.model = {base!r}: the server {url} has the models {', '.join(served)}; set sampler.model "
                "to the name of the base model there"
            )
        context, longest = served[base], config.max_prompt_length + config.max_completion_length
        if context is not None and context < longest:
            raise ConfigError(
                f"max_prompt_length + max_completion_length = {longest}: the context of {url} is {context} tokens, "
                f"so it would cut completions; lower one of the two, or start vLLM with --max-model-len {longest}"
            )

    def load(self, name: str, folder: Path) -> None:
        """See `Dialect`."""
        served = {model["id"] for model in self._client.get("/v1/models")["data"]}
        if name not in served:
            try:
                body = {"lora_name": name, "lora_path": str(folder)}
                self._client.post("/v1/load_lora_adapter", body, refusal=REJECTED)
            except RequestRefused as refused:
                if refused.status != 404:
                    raise
                if UNSEEN in str(refused):
                    raise ConfigError(
                        f"sampler.adapter_dir: the server finds no adapter in {folder} ({refused}); set adapter_dir "
                        "to a folder that both machines see under one path"
                    ) from None
                raise ConfigError(
                    f"sampler.url: the server has no endpoint /v1/load_lora_adapter ({refused}); start vLLM with "
                    "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
                ) from None
        self._name = name

    def unload(self, name: str, folder: Path) -> None:
        """See `Dialect`."""
        try:
            self._client.post("/v1/unload_lora_adapter", {"lora_name": name})
        except RequestRefused as refused:
            if refused.status not in (400, 404):
                raise

    def complete(self, prompt: list[int], count: int, max_new_tokens: int, seed: int) -> list[Completion]:
        """See `Dialect`."""
        answer = self._request(prompt, n=count, max_tokens=max_new_tokens, seed=seed, logprobs=0)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != count:
            raise RequestRefused(200, f"the answer has {len(choices)} completions; expected {count}")
        return [self._completion(choice, max_new_tokens) for choice in choices]

    def probe(self, prompts: list[list[int]]) -> Probe:
        """See `Dialect`: the most likely first tokens of a few prompts."""
        probe: Probe = {}
        for place, prompt in enumerate(prompts):
            answer = self._request(prompt, n=1, max_tokens=1, seed=0, logprobs=CANDIDATES)
            server_logprobs = {
                _token(name): value for name, value in answer["choices"][0]["logprobs"]["top_logprobs"][0].items()
            }
            tokens = pad_tokens(
                [prompt], [[token] for token in server_logprobs], self._policy.pad_id, self._policy.device
            )
            with torch.no_grad():
                trainer_logprobs = self._policy.logprobs(tokens)[:, 0].tolist()
            probe |= {
                (place, token): (server_logprobs[token], value)
                for token, value in zip(server_logprobs, trainer_logprobs, strict=True)
            }
        return probe

    def _request(self, prompt: list[int], **options: Any) -> Any:
        """Requests completions of the unfiltered distribution: every default filter and penalty of a server is off."""
        body = {
            "model": self._name,
            "prompt": prompt,
            "temperature": self._policy.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": self._policy.eos_ids,
            "return_tokens_as_token_ids": True,
            **options,
        }
        try:
            return self._client.post("/v1/completions", body)
        except RequestRefused as refused:
            if refused.status == 404:
                raise AdapterUnknown from None
            raise

    def _completion(self, choice: dict[str, Any], max_new_tokens: int) -> Completion:
        ids = [_token(name) for name in choice["logprobs"]["tokens"]]
        logprobs = choice["logprobs"]["token_logprobs"]
        at_length = choice["finish_reason"] == "length" and len(ids) == max_new_tokens
        ended = bool(ids) and (ids[-1] in self._policy.eos_ids or at_length)
        if not ended or len(ids) > max_new_tokens or len(ids) != len(logprobs):
            raise RequestRefused(
                200,
                f"a completion of {len(ids)} tokens with {len(logprobs)} log-probs and finish_reason "
                f"{choice['finish_reason']!r}; expected 1 to {max_new_tokens} tokens, each with its log-prob, and "
                f"the end at that length or at one of the tokens {self._policy.eos_ids}",
            )
        return Completion(ids, [math.nan if v is None or v <= NO_LOGPROB else v for v in logprobs])


def _token(name: str) -> int:
    if not name.startswith(TOKEN):
        raise RequestRefused(
            200, f"token {name!r}: expected {TOKEN}N, so the server ignores return_tokens_as_token_ids; update vLLM"
        )
    return int(name.removeprefix(TOKEN))
