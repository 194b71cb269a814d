"""What a run is made of beyond its settings: digests of its data, prompts, weights and reward files, for `--resume`.

A setting names a file, a model or a template, and what stands behind the name may change between a run's start and its
resumption. `run.json` keeps the digests; `refuse_changes` compares them.
"""

import datetime
import decimal
import hashlib
import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import RunConfig
from ..distributed import gathered
from ..errors import ConfigError
from ..policy.policy import Policy
from ..tasks.prompts import Prompt

_VOLATILE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Entries of a model's configuration that say nothing of what it computes."""


def contents(config: RunConfig, policy: Policy, training: list[Prompt], held_out: list[Prompt]) -> dict[str, Any]:
    """The digests, as run.json has them; every rank must call this if the weights are sharded."""
    template = policy.tokenizer.chat_template
    return {
        "training_examples": {"count": len(training), "digest": _examples_digest(training)},
        "training_prompts": _digest([prompt.ids for prompt in training]),
        "held_out_examples": {"count": len(held_out), "digest": _examples_digest(held_out)},
        "held_out_prompts": _digest([prompt.ids for prompt in held_out]),
        "chat_template": None if template is None else _digest([template]),
        "model_config": _model_config(policy),
        "frozen_weights": _weights_digest(policy),
        "reward_files": _reward_files(config),
    }


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The names whose contents are no longer those of the run; names that either side does not have are left out."""
    return [name for name in now if name in before and before[name] != now[name]]


def refuse_changes(before: dict[str, Any], now: dict[str, Any], config: RunConfig) -> list[str]:
    """ConfigError if what the run trains on changed since it began; returns notes on changes that are harmless."""
    for name, value in now.items():
        if isinstance(value, dict) and not isinstance(before.get(name, {}), dict):
            raise ConfigError(
                f"run.json: damaged (contents.{name} = {before[name]!r:.60}); restore it, or remove the file to resume "
                "without it"
            )
    names = changed(before, now)
    for name, reason in _refusals(before, now, config, names).items():
        if name in names:
            raise ConfigError(f"{reason}, or start a new run without --resume")
    notes = []
    counts = [entry.get("held_out_examples", {}).get("count") for entry in (before, now)]
    if counts[0] == counts[1] and {"held_out_prompts", "held_out_examples"} & set(names):
        notes.append(
            "the held-out prompts are not those of the earlier part of this run, so its evaluations before and after "
            "this point cannot be compared"
        )
    if "reward_files" in names:
        files = before["reward_files"], now["reward_files"]
        for file in sorted(file for file in files[1] if file in files[0] and files[0][file] != files[1][file]):
            notes.append(f"rewards: {file} has changed since the run began; the steps from here on use it as it is now")
    return notes


def _refusals(before: dict[str, Any], now: dict[str, Any], config: RunConfig, names: list[str]) -> dict[str, str]:
    """By name, in the order of causes before their effects: what was found and what to do."""
    counts = [entry.get("training_examples", {}).get("count") for entry in (before, now)]
    source = getattr(config.task, "path", None)
    rows = f"task.path = {source!r}" if source else f"task.name = {config.task.name!r}"
    cause = (
        "the tokenizer's chat template is another one; restore it, for instance by setting chat_template to the text "
        "the run began with"
        if "chat_template" in names
        else "the tokenizer or its chat template gives other tokens for the same rows; restore the tokenizer's files"
    )
    frozen = f"model = {config.model!r}: its weights are"
    if config.lora is not None and config.lora.adapter is not None:
        frozen = (
            f"model = {config.model!r} and lora.adapter = {config.lora.adapter!r}: the weights of the model or of the "
            "adapter are"
        )
    return {
        "training_examples": (
            f"{rows}: the training examples are not those that the run began with ({counts[0]} then, {counts[1]} now, "
            "in this order and with these columns); restore the data"
        ),
        "training_prompts": f"chat_template = {config.chat_template!r}: {cause}",
        "model_config": (
            f"model = {config.model!r}: its config.json is not the one that the run began with "
            f"({_differing(before, now)}); restore the model"
        ),
        "frozen_weights": f"{frozen} not those that the run began with; restore the files",
    }


def _differing(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The keys of the two model configurations whose values differ."""
    configs = [entry.get("model_config") or {} for entry in (before, now)]
    keys = sorted(configs[0].keys() | configs[1].keys())
    return ", ".join(key for key in keys if configs[0].get(key) != configs[1].get(key))


def _examples_digest(prompts: Iterable[Prompt]) -> str:
    examples = (prompt.example for prompt in prompts)
    return _digest([example.question, example.answer, example.messages, example.columns] for example in examples)


def _digest(items: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for item in items:
        text = json.dumps(item, default=_plain, skipkeys=True)
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """A value of a column that JSON does not have; of an object with other types of its own, the type alone."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal | uuid.UUID):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def _model_config(policy: Policy) -> dict[str, Any]:
    entries = {key: value for key, value in policy.base.config.to_diff_dict().items() if key not in _VOLATILE}
    return json.loads(json.dumps(entries | {"eos_ids": policy.eos_ids, "pad_id": policy.pad_id}, default=str))


def _weights_digest(policy: Policy) -> str | None:
    """Of the weights that are not trained, which no checkpoint has; None if every weight is."""
    digest, any_frozen = hashlib.sha256(), False
    for name, weight in _frozen_weights(policy):
        values, any_frozen = gathered(weight.detach()), True
        if policy.ranks.first:
            digest.update(f"{name} {values.dtype} {list(values.shape)}".encode())
            digest.update(values.reshape(-1).contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest() if any_frozen else None


def _frozen_weights(policy: Policy) -> Iterable[tuple[str, Tensor]]:
    yield from ((name, p) for name, p in policy.model.named_parameters() if not p.requires_grad)
    if policy.frozen is not None:
        yield from policy.frozen.body.named_parameters()  # type: ignore[union-attr]


def _reward_files(config: RunConfig) -> dict[str, str]:
    """Digests of the files of the user's reward functions, where those can be found without importing anything."""
    digests = {}
    for reward in config.rewards:
        place = (reward.function or "").rpartition(":")[0]
        file = Path(place if place.endswith(".py") else f"{place.replace('.', '/')}.py").expanduser()
        if file.is_file():
            digests[place] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests
