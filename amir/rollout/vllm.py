"""vLLM's dialect: token ids both ways, log-probs of the sampled tokens, adapters loaded by name at run time.

The server needs `--enable-lora`, `--max-lora-rank` of at least `lora.r`, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its
environment, `--logprobs-mode processed_logprobs` (else its log-probs are those at temperature 1), and must see the
folder that adapters are pushed through.
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
"""How vLLM writes a token under `return_tokens_as_token_ids`."""

NO_LOGPROB = -9999.0
"""What vLLM writes for minus infinity, which JSON does not have."""

CANDIDATES = 5

REJECTED = "Call to add_lora method failed"
"""In its answer of status 500 to an adapter that the engine cannot take: too high a rank, or no `--enable-lora`."""

UNSEEN = "No adapter found"
"""In its answer of status 404 where the folder holds no adapter; any other 404 is that of a missing endpoint."""


class Vllm:
    """See `Dialect`."""

    concurrent = True

    def __init__(self, policy: Policy, client: Client, config: RunConfig) -> None:
        assert isinstance(config.sampler, ServerSampling)
        base, url = config.sampler.model or config.model, config.sampler.url
        self._policy, self._client, self._name = policy, client, base
        served = {model["id"]: model.get("max_model_len") for model in client.get("/v1/models")["data"]}
        if base not in served:
            raise ConfigError(f"sampler.model = {base!r}: {url} serves {', '.join(served)}; expected the base's name")
        room, longest = served[base], config.max_prompt_length + config.max_completion_length
        if room is not None and room < longest:
            raise ConfigError(
                f"max_prompt_length + max_completion_length = {longest}: {url} has room for {room} tokens and would "
                f"cut completions short; expected at most that, or vLLM started with --max-model-len {longest}"
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
                        f"sampler.adapter_dir: the server finds no adapter in {folder} ({refused}); expected a folder "
                        "that both machines see under one path"
                    ) from None
                raise ConfigError(
                    f"sampler server: no /v1/load_lora_adapter there ({refused}); start vLLM with --enable-lora and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
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
        answer = self._ask(prompt, n=count, max_tokens=max_new_tokens, seed=seed, logprobs=0)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != count:
            raise RequestRefused(200, f"{len(choices)} choices came back, {count} were asked for")
        return [self._completion(choice, max_new_tokens) for choice in choices]

    def probe(self, prompts: list[list[int]]) -> Probe:
        """See `Dialect`: the likeliest first tokens of a few prompts."""
        found: Probe = {}
        for place, prompt in enumerate(prompts):
            answer = self._ask(prompt, n=1, max_tokens=1, seed=0, logprobs=CANDIDATES)
            there = {_token(name): value for name, value in answer["choices"][0]["logprobs"]["top_logprobs"][0].items()}
            tokens = pad_tokens([prompt], [[token] for token in there], self._policy.pad_id, self._policy.device)
            with torch.no_grad():
                here = self._policy.logprobs(tokens)[:, 0].tolist()
            found |= {(place, token): (there[token], value) for token, value in zip(there, here, strict=True)}
        return found

    def _ask(self, prompt: list[int], **wanted: Any) -> Any:
        """The policy's own distribution: every filter and penalty that a server may have as its default is off."""
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
            **wanted,
        }
        try:
            return self._client.post("/v1/completions", body)
        except RequestRefused as refused:
            if refused.status == 404:
                raise AdapterUnknown from None
            raise

    def _completion(self, choice: dict[str, Any], max_new_tokens: int) -> Completion:
        ids = [_token(name) for name in choice["logprobs"]["tokens"]]
        given = choice["logprobs"]["token_logprobs"]
        at_length = choice["finish_reason"] == "length" and len(ids) == max_new_tokens
        ended = bool(ids) and (ids[-1] in self._policy.eos_ids or at_length)
        if not ended or len(ids) > max_new_tokens or len(ids) != len(given):
            came = f"{len(ids)} tokens, {len(given)} log-probs, finish_reason {choice['finish_reason']!r}"
            wanted = (
                f"1 to {max_new_tokens}, each with its log-prob, ended by that length or one of {self._policy.eos_ids}"
            )
            raise RequestRefused(200, f"a completion of {came}; expected {wanted}")
        return Completion(ids, [math.nan if v is None or v <= NO_LOGPROB else v for v in given])


def _token(name: str) -> int:
    if not name.startswith(TOKEN):
        raise RequestRefused(200, f"token {name!r}: expected {TOKEN}N; the server ignores return_tokens_as_token_ids")
    return int(name.removeprefix(TOKEN))
