"""The dialect of `transformers serve`: text both ways, one completion per request, no log-probs, models loaded by path.

The server reads an adapter from a folder that also has links to the base model's files. It streams one piece of text
per token; if tokenizing the completion gives other pieces, its sampled tokens are unknown and it is unusable. The
requests of a rollout are sent one after the other, because the server seeds itself for each, so this dialect is slow.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from tokenizers.decoders import DecodeStream
from transformers.pipelines import pipeline

from ..errors import ConfigError
from ..policy.policy import Policy
from ..tasks.decoding import decode
from .generate import generation_config
from .http_client import Client
from .server import Completion, Probe

QUESTION = {
    "state": "1 + 1",
    "questions": {
        "probe": {
            "type": "choice",
            "instructions": "Which one?",
            "criteria": {"first": "one", "second": "two", "third": "three", "fourth": "four"},
        }
    },
}
"""A question for the server's decision endpoint, the only one that returns probabilities."""


class TransformersServe:
    """See `Dialect`."""

    concurrent = False

    def __init__(self, policy: Policy, client: Client) -> None:
        self._policy, self._client = policy, client
        self._base = Path(policy.base.config._name_or_path)
        if not self._base.is_dir():
            self._base = Path(snapshot_download(policy.base.config._name_or_path, local_files_only=True))
        self._path = ""

    def load(self, name: str, folder: Path) -> None:
        """See `Dialect`."""
        for file in self._base.iterdir():
            if not (folder / file.name).exists():
                (folder / file.name).symlink_to(file.resolve())
        self._path = str(folder)
        self._client.post("/reset", {})  # otherwise the server keeps earlier models for minutes
        events = self._client.events("/load_model", {"model": self._path})
        if not any(event["status"] == "ready" for event in events):
            raise ConfigError(
                f"sampler.adapter_dir: the server did not load {self._path} ({events!r:.300}); expected a folder "
                "that both machines see under one path"
            )

    def unload(self, name: str, folder: Path) -> None:
        """See `Dialect`. Does nothing, because loading another adapter unloads this one."""

    def complete(self, prompt: list[int], count: int, max_new_tokens: int, seed: int) -> list[Completion]:
        """See `Dialect`."""
        seeds = random.Random(seed)
        text = self._as_text(prompt)
        return [self._one(text, max_new_tokens, seeds.getrandbits(31)) for _ in range(count)]

    def probe(self, prompts: list[list[int]]) -> Probe:
        """See `Dialect`: the probabilities of answers to a question, by the decision endpoint and computed here."""
        answer_of_server = self._client.post("/v1/systemone", {"model": self._path, **QUESTION})
        decide = pipeline("decision", self._policy.base, tokenizer=self._policy.tokenizer, device=self._policy.device)
        answer_of_trainer = decide(QUESTION)
        server, trainer = (
            answers["probe"]["probabilities"] for answers in (answer_of_server["answers"], answer_of_trainer)
        )
        return {option: (math.log(server[option]), math.log(trainer[option])) for option in trainer}

    def _as_text(self, prompt: list[int]) -> str:
        tokenizer = self._policy.tokenizer
        text = decode(tokenizer, prompt)
        for candidate in (text, text.removeprefix(tokenizer.bos_token or "")):
            if tokenizer(candidate)["input_ids"] == prompt:
                return candidate
        raise ConfigError(
            f"sampler.dialect = 'transformers': the prompt {text!r:.60} has other tokens when it is tokenized again; "
            "use vLLM with dialect 'vllm'"
        )

    def _one(self, text: str, max_new_tokens: int, seed: int) -> Completion:
        generation = generation_config(self._policy, max_new_tokens)
        generation.eos_token_id = [self._policy.tokenizer.eos_token_id]  # text does not show which of several it was
        body = {
            "model": self._path,
            "prompt": text,
            "seed": seed,
            "stream": True,
            "generation_config": json.dumps(generation.to_diff_dict()),
        }
        *events, last = self._client.events("/v1/completions", body)
        pieces = [event["choices"][0]["text"] for event in events]
        return self._completion(pieces, last)

    def _completion(self, pieces: list[str], last: dict[str, Any]) -> Completion:
        tokenizer = self._policy.tokenizer
        ids = tokenizer("".join(pieces), add_special_tokens=False)["input_ids"]
        stream = DecodeStream([], skip_special_tokens=True)
        retokenized = [piece for token in ids if (piece := stream.step(tokenizer._tokenizer, token)) is not None]
        if last["choices"][0]["finish_reason"] == "stop":
            ids.append(tokenizer.eos_token_id)
        exact = retokenized == [piece for piece in pieces if piece] and len(ids) == last["usage"]["completion_tokens"]
        return Completion(ids or [tokenizer.eos_token_id], None, usable=exact)
