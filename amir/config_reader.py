"""Reads the settings of a run from a YAML file or a shipped recipe, and words each mistake as one line."""

import re
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .config import (
    ArithmeticTask,
    CorrectionSettings,
    DatasetTask,
    DynamicSamplingSettings,
    Gsm8kTask,
    LoraSettings,
    PagedSampling,
    RewardSettings,
    RunConfig,
    ServerSampling,
)
from .errors import ConfigError, nearest


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(f.name.removesuffix(".yaml") for f in resources.files("amir.recipes").iterdir() if ".yaml" in f.name)


def load_config(run: str, overrides: list[str] | None = None) -> RunConfig:
    """Reads a YAML file or a shipped recipe, applies `key=value` overrides (values are YAML) and validates the result.

    Raises ConfigError with one line for each mistake.
    """
    fields = _read(run)
    for override in overrides or []:
        _override(fields, override)
    try:
        return RunConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def config_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML, in the order of definition; reading it back gives the same configuration."""
    return yaml.safe_dump(config.model_dump(exclude_unset=False, mode="json"), sort_keys=False)


def _read(run: str) -> dict[str, Any]:
    path = Path(run)
    if run in recipe_names():
        text = (resources.files("amir.recipes") / f"{run}.yaml").read_text()
    elif path.suffix.lower() in (".yaml", ".yml") and path.is_file():
        text = read_utf8(path)
    else:
        near = nearest(run, recipe_names())
        raise ConfigError(f"run {run!r}: expected a YAML file or one of the recipes {', '.join(recipe_names())}{near}")
    fields = _parse_yaml(text, run)
    if not isinstance(fields, dict):
        raise ConfigError(f"{run}: expected a mapping of settings (key: value), got {type(fields).__name__}")
    return fields


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings have no duplicate key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                message = f"key {key.value!r} is a duplicate; remove one of the two"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, name: str) -> Any:
    """The value that YAML text describes; impossible dates and numbers raise ValueError in PyYAML."""
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: expected YAML, and it cannot be parsed: {' '.join(str(error).split())}") from None


def read_utf8(path: Path) -> str:
    """A file's text without a byte order mark; ConfigError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a readable file") from None


def _override(fields: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override!r}: expected key=value, as in --set learning_rate=1e-4")
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {})
        if not isinstance(fields, dict):
            raise ConfigError(
                f"--set {override!r}: {parent} is a single value and has no keys; expected {parent}=VALUE"
            )
    fields[leaf] = _parse_yaml(value, f"--set {override}")


_UNION_TAG = re.compile(r"arithmetic$|gsm8k$|dataset$|generate$|paged$|server$|str$|constrained|list\[")
"""Parts of an error's location that name a member of a union instead of a key."""


def _explain(error: Any) -> str:
    location = [str(part) for part in error["loc"] if not _UNION_TAG.match(str(part))]
    key, value = ".".join(location), error["input"]
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r} (value {value!r}){nearest(key, [k for k in _known_keys() if k != key])}"
    if error["type"] == "missing":
        return f"{key}: missing; it has no default, so set it"
    if error["type"] == "value_error" and not key:
        return str(error["ctx"]["error"])
    return f"{key} = {value!r}: {error['msg'].replace('Input should be', 'expected').replace('Value error, ', '')}"


def _known_keys() -> list[str]:
    lora = [f"lora.{key}" for key in LoraSettings.model_fields]
    tasks = ArithmeticTask.model_fields | Gsm8kTask.model_fields | DatasetTask.model_fields
    rewards = [f"rewards.{key}" for key in RewardSettings.model_fields]
    samplers = PagedSampling.model_fields | ServerSampling.model_fields
    nested = {
        "sampler": samplers,
        "correction": CorrectionSettings.model_fields,
        "dynamic_sampling": DynamicSamplingSettings.model_fields,
    }
    sampling = [f"{parent}.{key}" for parent, keys in nested.items() for key in keys]
    return [*RunConfig.model_fields, *lora, *(f"task.{key}" for key in tasks), *rewards, *sampling]
