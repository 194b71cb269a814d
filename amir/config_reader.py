"""Reads the settings of a run from a YAML file or a shipped recipe, and words each mistake as one line."""

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .config import (
    CALL_SECONDS,
    JUDGE_SECONDS,
    LOSS_TYPES,
    SHORTHANDS,
    ArithmeticTask,
    CorrectionSettings,
    DatasetTask,
    DynamicSamplingSettings,
    GenerateSampling,
    Gsm8kTask,
    LoraSettings,
    PagedSampling,
    RewardSettings,
    RunConfig,
    ServerSampling,
    Settings,
)
from .errors import ConfigError, nearest
from .other_names import OTHER_NAMES, other_value


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
        raise ConfigError("\n".join(line for e in error.errors() for line in _explain(e))) from None


def resolved(config: RunConfig, **of_machine: Any) -> RunConfig:
    """The configuration with the values that its null and auto settings have in a run.

    `of_machine`: those that depend on where it runs (`device`, `dtype`, `threads`, `output_dir`). A null that remains
    means that there is none of it: no limit, no adapter, no clipping.
    """
    changes: dict[str, Any] = {"rewards": [_with_time_limit(reward) for reward in config.rewards]}
    bounds = LOSS_TYPES[config.loss_type]
    if bounds is not None:
        low, high = (config.epsilon, config.epsilon) if config.epsilon is not None else bounds
        changes |= {"epsilon": low, "epsilon_high": high if config.epsilon_high is None else config.epsilon_high}
    return config.model_copy(update=changes | of_machine)


def _with_time_limit(reward: RewardSettings) -> RewardSettings:
    default = CALL_SECONDS if reward.function is not None else JUDGE_SECONDS if reward.name == "correctness" else None
    return reward.model_copy(update={"timeout_seconds": reward.timeout_seconds or default})


def config_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML, in the order of definition; reading it back gives the same configuration."""
    return yaml.safe_dump(config.model_dump(exclude_unset=False, mode="json"), sort_keys=False)


def _read(run: str, extending: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings of a run, with those of the run that it extends below them; `extending`: the runs that led here."""
    path = Path(run)
    if run in recipe_names():
        text, here = (resources.files("amir.recipes") / f"{run}.yaml").read_text(), run
    elif path.suffix.lower() in (".yaml", ".yml") and path.is_file():
        text, here = read_utf8(path), str(path.resolve())
    else:
        near = nearest(run, recipe_names())
        origin = f"{extending[-1]}: extends" if extending else "run"
        raise ConfigError(
            f"{origin} {run!r}: expected a YAML file or one of the recipes {', '.join(recipe_names())}{near}"
        )
    if here in extending:
        raise ConfigError(f"{here}: it extends itself, by {' -> '.join([*extending, here])}; remove one `extends`")
    fields = _parse_yaml(text, run)
    if not isinstance(fields, dict):
        raise ConfigError(f"{run}: expected a mapping of settings (key: value), got {type(fields).__name__}")
    if "extends" not in fields:
        return fields
    base = fields.pop("extends")
    if not isinstance(base, str):
        raise ConfigError(f"{run}: extends = {base!r}: expected the name of a recipe or the path of a YAML file")
    return _read(base if base in recipe_names() else str(path.parent / base), (*extending, here)) | fields


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings have no duplicate key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                message = f"key {key.value!r} is a duplicate; remove one of the two"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            keys.add(str(key.value))
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
    fields.update({name: SHORTHANDS[name](fields[name]) for name in SHORTHANDS.keys() & fields.keys()})
    *parents, leaf = key.strip().split(".")
    place: Any = fields
    for parent in parents:
        place = _inside(place, parent, override)
    place[_position(place, leaf, override)] = _parse_yaml(value, f"--set {override}")


def _inside(place: Any, name: str, override: str) -> Any:
    """The mapping or list at a key; what is missing or null becomes one."""
    position = _position(place, name, override)
    if isinstance(place, dict) and place.get(name) is None:
        place[name] = _default(name)
    if not isinstance(place[position], dict | list):
        raise ConfigError(f"--set {override!r}: {name} is a single value and has no keys; expected {name}=VALUE")
    return place[position]


def _default(name: str) -> Any:
    """A list's default, so that an override can reach into it; otherwise an empty mapping."""
    default = RunConfig.model_fields[name].default if name in RunConfig.model_fields else None
    return [entry.model_dump(exclude_unset=True) for entry in default] if isinstance(default, list) else {}


def _position(place: dict[str, Any] | list[Any], name: str, override: str) -> Any:
    if isinstance(place, dict):
        return name
    if name.isdecimal() and int(name) < len(place):
        return int(name)
    raise ConfigError(
        f"--set {override!r}: {name!r} is not a place in a list of {len(place)}; places are counted from 0, as in "
        "rewards.0.weight=2"
    )


GROUPS: dict[str, tuple[type[Settings], ...]] = {
    "lora": (LoraSettings,),
    "task": (ArithmeticTask, Gsm8kTask, DatasetTask),
    "rewards": (RewardSettings,),
    "sampler": (GenerateSampling, PagedSampling, ServerSampling),
    "correction": (CorrectionSettings,),
    "dynamic_sampling": (DynamicSamplingSettings,),
}
"""Keys with settings of their own, and the kinds of these."""

AS_TYPED = {
    "lora": "{r: 16, alpha: 16}, true for the defaults, or null to train every weight",
    "task": 'gsm8k, {name: arithmetic, max_operand: 9}, or {name: dataset, path: rows.jsonl, prompt: "{question}"}',
    "rewards": 'the name of a shipped reward, or {function: "rewards.py:score", weight: 0.5}',
    "sampler": 'generate, paged, or {name: server, url: "http://localhost:8000"}',
    "correction": "{level: token, mode: truncate}, true for the defaults, or null",
    "dynamic_sampling": "{max_rounds: 4}, true for the defaults, or null",
}
"""What to type for each of these keys."""

_UNION_MEMBER = re.compile(r"str$|constrained|function-|list\[")
"""Parts of an error's location that name a type of a value instead of a key."""


def _explain(error: Any) -> Iterator[str]:
    """The lines for an error of pydantic; a mapping under an unknown key has a line for each of its entries."""
    (key, kind), value = _located([str(part) for part in error["loc"]]), error["input"]
    plain = _without_places(key)
    if error["type"] == "extra_forbidden":
        yield from _unknown(key, value, kind)
    elif error["type"] == "missing":
        yield f"{key}: missing; it has no default, so set it"
    elif error["type"] == "value_error" and not key:
        yield str(error["ctx"]["error"])
    elif error["type"] == "union_tag_invalid":
        name, names = error["ctx"]["tag"], error["ctx"]["expected_tags"]
        near = other_value(plain, name) or nearest(name, re.findall(r"'(\w+)'", names))
        yield f"{key}.name = {name!r}: expected one of {names}{near}; type {key}: {AS_TYPED[plain]}"
    elif plain in AS_TYPED and error["type"] in _NO_SETTINGS:
        yield f"{key} = {value!r}: expected {AS_TYPED[plain]}"
    else:
        near = other_value(plain, value)
        if error["type"] == "literal_error" and not near:
            near = nearest(str(value), re.findall(r"'(\w+)'", error["ctx"]["expected"]))
        message = error["msg"].removeprefix("Value error, ").partition(" after validation")[0]
        yield f"{key} = {value!r}: {_PYDANTIC_EXPECTS.sub('expected ', message)}{near}"


_PYDANTIC_EXPECTS = re.compile(r"^(?:Input|List|String) should (?:be|have) ")

_NO_SETTINGS = {"model_type", "model_attributes_type", "union_tag_not_found"}
"""Errors of a value that is not a mapping of settings, or has no `name`."""


def _located(parts: list[str]) -> tuple[str, str | None]:
    """The key of an error's location, and the task or sampler that it belongs to."""
    tagged = len(parts) > 1 and len(GROUPS.get(parts[0], ())) > 1
    kind, inner = (parts[1], parts[2:]) if tagged else (None, parts[1:])
    return ".".join([*parts[:1], *(part for part in inner if not _UNION_MEMBER.match(part))]), kind


def _unknown(key: str, value: Any, kind: str | None) -> Iterator[str]:
    """A line for an unknown key, or for each entry of a mapping that has no answer as a whole."""
    if isinstance(value, dict) and value and OTHER_NAMES.get(key, key) in [key, *_known_keys()]:
        for name, entry in value.items():
            yield from _unknown(f"{key}.{name}", entry, kind)
    else:
        yield f"unknown key {key!r} (value {value!r:.80}){_instead_of(_without_places(key), kind)}"


def _without_places(key: str) -> str:
    """A key without its places in lists: `rewards.weight` for `rewards.0.weight`."""
    return re.sub(r"\.\d+", "", key)


NESTED_CUTOFF = 0.8
"""Two keys of one group have its name in common, so they resemble each other more than their meanings do."""


def _instead_of(key: str, kind: str | None) -> str:
    """What to write instead of an unknown key, as the end of a message; `kind` is that of its task or sampler."""
    known = _known_keys()
    parts = key.split(".")
    for start in range(len(parts)):
        here = OTHER_NAMES.get(".".join(parts[start:]))
        if here is not None:
            return f"; it is called {here!r} here" if here in known else f"; {here}"
    if key in known:
        return f"; {parts[0]} {kind!r} does not have it"
    if moved := [name for name in known if name.rpartition(".")[2] == parts[-1]]:
        return f"; expected {' or '.join(map(repr, moved))}"
    siblings = [name.partition(".")[2] for name in known if name.startswith(f"{parts[0]}.")]
    if near := nearest(key, known, cutoff=NESTED_CUTOFF if siblings else 0.6):
        return near
    return f"; {parts[0]} has the keys {', '.join(dict.fromkeys(siblings))}" if siblings else ""


def _known_keys() -> list[str]:
    nested = (f"{group}.{key}" for group, kinds in GROUPS.items() for kind in kinds for key in kind.model_fields)
    return list(dict.fromkeys([*RunConfig.model_fields, *nested]))
