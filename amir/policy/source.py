"""Where the files of a model or an adapter are, and the reason when they cannot be read."""

import contextlib
import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionResolutionError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.peft_utils import find_adapter_config_file

from ..errors import ConfigError, summary
from .smollm2 import MODEL_NAME, smollm2_folder

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
CONFIG_FILES = ("config.json",)
TOKENIZER_FILES = ("*token*.json", "vocab.json", "merges.txt", "*.model", "*.jinja")
WEIGHT_FILES = ("*.index.json", "*.safetensors", "*.bin")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""The files of a model's weights, in the order in which Transformers looks for one or for its index."""
SAFETENSORS_TYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
WEIGHT_TYPES = frozenset(SAFETENSORS_TYPES.values())
IGNORED_IF_DAMAGED = ("generation_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files without which Transformers loads a model all the same, with other tokens that end a completion."""

HUB_SECONDS = 10.0
"""How long the model hub may take to answer the one question whether it has a model."""


@dataclass(frozen=True)
class Source:
    """A folder, or a repository of the model hub at one commit. `setting` is how the run names it, for messages."""

    setting: str
    location: str
    arguments: dict[str, Any] = field(default_factory=dict)
    """of `from_pretrained`, beside the location"""

    @property
    def revision(self) -> str | None:
        """The commit of a repository; None for a folder."""
        return self.arguments.get("revision")

    @contextlib.contextmanager
    def reading(self, what: str, patterns: tuple[str, ...], expected: str) -> Iterator[None]:
        """Turns whatever a library raises for these files into a ConfigError that names the file and the reason.

        Libraries raise every kind of exception for damaged files; tokenizers raises Exception itself.
        """
        try:
            yield
        except (ConfigError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            self.refuse_damaged(patterns, expected)
            names = ", ".join(path.name for path in self._files(patterns)) or "none was found"
            reason = f"{_reason(error)}, while reading {what}: {names}"
            raise ConfigError(f"{self.setting}: cannot be loaded ({reason}); expected {expected}") from error

    def refuse_damaged(self, patterns: tuple[str, ...], expected: str) -> None:
        """ConfigError with the first file that cannot be read, and the reason."""
        for path in self._files(patterns):
            if problem := damage(path):
                raise ConfigError(f"{self.setting}: cannot be loaded ({problem} in {path}); expected {expected}")

    def weight_files(self) -> list[Path]:
        """The files that Transformers reads the weights from."""
        for name in WEIGHTS:
            if (self._folder / name).is_file():
                return [self._folder / name]
            if (self._folder / f"{name}.index.json").is_file():
                return sorted(self._folder / shard for shard in _shards(self._folder / f"{name}.index.json"))
        return []

    def unread_files(self) -> list[Path]:
        """Files of weights beside those that are read: shards that no index names, and those of torch.save."""
        files = self._files(("model-*-of-*.safetensors", "pytorch_model*.bin"))
        return sorted(set(files) - set(self.weight_files()))

    def other_types(self) -> dict[str, str]:
        """Name and type of each tensor in the files of the weights that is no float of 16 bits or more.

        ConfigError if two files have a tensor of the same name with other values.
        """
        others: dict[str, str] = {}
        places: dict[str, Path] = {}
        for path in self.weight_files():
            for name, kind in _stored_types(path).items():
                if name in places and not torch.equal(*(stored_tensor(file, name) for file in (path, places[name]))):
                    raise ConfigError(
                        f"{self.setting}: {places[name].name} and {path.name} both have {name}, with other values; "
                        "expected each tensor in one file"
                    )
                places[name] = path
                if kind not in WEIGHT_TYPES:
                    others[name] = kind
        return others

    def _files(self, patterns: tuple[str, ...]) -> list[Path]:
        return sorted({path for pattern in patterns for path in self._folder.glob(pattern) if path.is_file()})

    @property
    def _folder(self) -> Path:
        """The folder, or the snapshot of the repository in the local cache."""
        if self.revision is None:
            return Path(self.location)
        cached = try_to_load_from_cache(self.location, "config.json", revision=self.revision)
        return Path(cached).parent if isinstance(cached, str) else Path(os.devnull)


def no_weight(tensor: Tensor) -> str | None:
    """Why a tensor cannot be a weight of an unquantized layer; None if it can be."""
    if (kind := _kind(tensor.dtype)) not in WEIGHT_TYPES:
        return f"values of type {kind}, as of a quantized model"
    return None if tensor.isfinite().all() else f"NaN or infinity in {kind}"


def stored_tensor(path: Path, name: str) -> Tensor:
    """A tensor of a weights file."""
    if path.suffix != ".safetensors":
        return torch.load(path, map_location="cpu", weights_only=True)[name]
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _stored_types(path: Path) -> dict[str, str]:
    """The type of each tensor of a weights file, without its values."""
    if path.suffix != ".safetensors":
        stored = torch.load(path, map_location="meta", weights_only=True)
        return {name: _kind(value.dtype) for name, value in stored.items() if isinstance(value, Tensor)}
    with safe_open(path, framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in sorted(file.keys())}
    return {name: SAFETENSORS_TYPES.get(kind, kind) for name, kind in kinds.items()}


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it needs custom code from its repository (auto_map), which is never run"
    return summary(error)


def damage(path: Path) -> str | None:
    """Why a JSON or weights file cannot be read: empty, a pointer, a web page, cut short; None if it can be."""
    try:
        with path.open("rb") as file:
            head = file.read(200)
    except OSError as error:
        return summary(error)
    if not head.strip():
        return "no content"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer instead of the content (run `git lfs pull`)"
    if path.suffix not in (".jinja", ".txt") and head.lstrip().startswith(b"<"):
        return "a web page instead of the content"
    if path.suffix == ".json":
        return _json_damage(path)
    if path.suffix == ".safetensors":
        return _safetensors_damage(path)
    if path.suffix == ".bin" and not zipfile.is_zipfile(path) and not head.startswith(b"\x80"):
        return "no complete file of torch.save"
    return None


def _json_damage(path: Path) -> str | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return summary(error)
    if not isinstance(content, dict):
        return f"a JSON {type(content).__name__} instead of an object"
    if path.name.endswith(".index.json") and not isinstance(content.get("weight_map"), dict):
        return "no weight_map, which names the file of each tensor,"
    return None


def _safetensors_damage(path: Path) -> str | None:
    try:
        with safe_open(path, framework="pt"):
            return None
    except SafetensorError as error:
        return summary(error)


def model_source(model: str) -> Source:
    """The files of the setting `model`: the packaged model's converted folder, a folder, or a hub name.

    ConfigError for an adapter, for a folder without a model, and at once for a name that is neither on the hub nor in
    its cache.
    """
    setting = f"model = {model!r}"
    if model == MODEL_NAME:
        return Source(setting, str(smollm2_folder()))
    folder = Path(model).expanduser()
    if os.path.exists(folder) or model.startswith((".", "/", "~")):
        _refuse_adapter(setting, folder)
        _refuse_without_model(setting, folder)
        return Source(setting, str(folder.resolve()))
    expected = "a folder with config.json and weights, or a hub name"
    source = Source(setting, model, _hub_arguments(setting, model, expected))
    with source.reading("the adapter's settings", ADAPTER_FILES[:1], expected):
        if find_adapter_config_file(model, **source.arguments):
            raise ConfigError(f"{setting}: it is the repository of an adapter; {_USE_ADAPTER}")
    return source


def adapter_source(adapter: str) -> Source:
    """The files of the setting `lora.adapter`: a folder in PEFT's format, or the hub name of one."""
    setting = f"lora.adapter = {adapter!r}"
    folder = Path(adapter).expanduser()
    expected = "a folder with a LoRA adapter in PEFT's format (adapter_config.json and its weights)"
    if os.path.exists(folder) or adapter.startswith((".", "/", "~")):
        if not (folder / "adapter_config.json").is_file():
            raise ConfigError(f"{setting}: expected {expected}; found {_content(folder)}")
        return Source(setting, str(folder.resolve()))
    return Source(setting, adapter, _hub_arguments(setting, adapter, expected))


_USE_ADAPTER = "set model to its base model, and lora.adapter to this one"


def _refuse_adapter(setting: str, folder: Path) -> None:
    """ConfigError for an adapter, also beside a whole model: Transformers would load it without training it."""
    file = next((name for name in ADAPTER_FILES if (folder / name).is_file()), None)
    if file is None:
        return
    if (folder / "config.json").is_file():
        raise ConfigError(
            f"{setting}: it has both a model (config.json) and an adapter ({file}), so it does not say which weights "
            "are meant; move the adapter's files to another folder, and name that in lora.adapter to continue from it"
        )
    base = f", made for {name!r}" if (name := _recorded_base(folder)) else ""
    raise ConfigError(f"{setting}: it is the folder of an adapter ({file}{base}); {_USE_ADAPTER}")


def _recorded_base(folder: Path) -> str | None:
    path = folder / "adapter_config.json"
    if not path.is_file() or damage(path):
        return None
    return json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")


def _refuse_without_model(setting: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{setting}: expected a folder with config.json and weights, or a hub name; found {_content(folder)}"
        )
    index = folder / "model.safetensors.index.json"
    shards = _shards(index) if index.is_file() else set()
    if (folder / "model.safetensors").is_file() and shards - {"model.safetensors"}:
        raise ConfigError(
            f"{setting}: it has two sets of weights, model.safetensors and the shards of {index.name}; remove the "
            "one that is not meant"
        )
    source = Source(setting, str(folder))
    unread = [path.name for path in source.unread_files() if path.suffix == ".safetensors"]
    read = [path.name for path in source.weight_files()]
    if unread and (read or not index.is_file()):
        raise ConfigError(
            f"{setting}: {unread[0]} is not among the files that the weights are read from "
            f"({', '.join(read) or 'none'}); expected one complete set of files; remove those that are not meant, or "
            "restore their index"
        )


def _shards(index: Path) -> set[str]:
    """The files that an index names; none if it is damaged."""
    return set() if damage(index) else set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def _content(folder: Path) -> str:
    """What is at a path, for a message."""
    if not folder.is_dir():
        return "a file" if folder.exists() else "nothing at that path"
    names = sorted(path.name for path in folder.iterdir())
    return f"the files {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "an empty folder"


def _hub_arguments(setting: str, name: str, expected: str) -> dict[str, Any]:
    """The current commit of a repository; from the cache, without further requests, if the hub cannot be reached."""
    hub = HfApi()
    try:
        return {"revision": hub.model_info(name, timeout=HUB_SECONDS).sha}
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"{setting}: no such folder, and no model of that name on the hub that this machine may read "
            f"({summary(error, 200)}); expected {expected}"
        ) from None
    except (OSError, httpx2.HTTPError) as error:
        unreachable = summary(error, 200)
    try:
        revision = hub.resolve_revision(name, local_files_only=True).resolved
    except RevisionResolutionError:
        raise ConfigError(
            f"{setting}: no such folder, not in the hub's cache on this machine, and the hub cannot be reached "
            f"({unreachable}); expected {expected}"
        ) from None
    return {"revision": revision, "local_files_only": True}
