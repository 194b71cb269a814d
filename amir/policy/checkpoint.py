"""Checkpoints that are whole or absent: weights in PEFT's or Transformers' format, the rest as safetensors."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..distributed import SINGLE_PROCESS, Ranks, gathered, sharded_like
from ..errors import ConfigError

FORMAT = 1


def save_checkpoint(
    folder: Path,
    step: int,
    data_position: int,
    model: Any,
    optimizer: torch.optim.Optimizer,
    named: dict[str, Tensor],
    ranks: Ranks = SINGLE_PROCESS,
) -> Path:
    """Writes `folder/step-N` under a temporary name, forces it to disk, then renames it; the first rank does.

    What is in parts over the ranks is written whole, so that any number of ranks, one too, can go on from it.
    """
    target = folder / f"step-{step}"
    weights, moments = _whole_weights(model, named, ranks), _optimizer_tensors(optimizer, named, ranks)
    if ranks.first:
        with _whole_or_absent(target) as staging:
            _save_weights(staging, model, weights)
            save_file(moments | _random_state(), staging / "optimizer.safetensors")
            state = {
                "format": FORMAT,
                "step": step,
                "data_position": data_position,
                "parameters": list(named),
                "files": {path.name: _digest(path) for path in sorted(staging.iterdir())},
            }
            (staging / "state.json").write_text(json.dumps(state))
    ranks.wait()
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step, or None; copies under other names are passed over."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name) and (p / "state.json").is_file()]
    return max(found, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def load_checkpoint(path: Path, model: Any, optimizer: torch.optim.Optimizer, named: dict[str, Tensor]) -> int:
    """Restores weights, optimizer and random state in place; returns the step that was finished.

    A checkpoint of another model or adapter, or one whose files are not those that were saved, raises ConfigError.
    """
    state = _checked_state(path, list(named))
    try:
        if isinstance(model, PeftModel):
            set_peft_model_state_dict(model, load_file(path / "adapter_model.safetensors"))
        else:
            _load_whole(path / "model.safetensors", named)
    except (RuntimeError, KeyError) as error:  # a weight of another shape, or none of its name
        raise ConfigError(f"checkpoint {path}: {_FOREIGN}: {error}") from None
    tensors = load_file(path / "optimizer.safetensors")
    for name, parameter in named.items():
        parts = {key.removeprefix(f"{name}|"): t for key, t in tensors.items() if key.startswith(f"{name}|")}
        if parts:
            optimizer.state[parameter] = {
                key: _counted(t) if key == "step" else sharded_like(t, parameter) for key, t in parts.items()
            }
    torch.set_rng_state(tensors["rng|cpu"])
    if "rng|cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng|cuda"])
    return state["step"]


def data_position(path: Path) -> int:
    """How many prompts had been consumed when the checkpoint was saved; it must be one that `load_checkpoint` took."""
    return json.loads((path / "state.json").read_text())["data_position"]


def _checked_state(path: Path, parameters: list[str]) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text())
        made_for = (state["format"], state["parameters"])
        damaged = [name for name, digest in dict(state["files"]).items() if _digest(path / name) != digest]
        if not (state["step"] >= 1 and state["data_position"] >= 0 and "optimizer.safetensors" in state["files"]):
            raise ValueError("state.json is not that of a checkpoint")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"checkpoint {path}: damaged ({type(error).__name__}: {error}); {_WAY_OUT}") from None
    if made_for != (FORMAT, parameters):
        raise ConfigError(f"checkpoint {path}: {_FOREIGN}")
    if damaged:
        raise ConfigError(f"checkpoint {path}: damaged ({', '.join(damaged)} changed since it was saved); {_WAY_OUT}")
    return state


_WAY_OUT = "move it away to resume from the one before"

_FOREIGN = "made by another version or for another model or adapter"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_result(
    folder: Path, model: Any, tokenizer: Any, named: dict[str, Tensor] | None = None, ranks: Ranks = SINGLE_PROCESS
) -> None:
    """Writes the adapter alone, in PEFT's format, or a model that was trained whole, with its tokenizer.

    `named`: the trained parameters, needed where they are in parts over the ranks.
    """
    weights = _whole_weights(model, named or {}, ranks)
    if ranks.first:
        with _whole_or_absent(folder) as staging:
            _save_weights(staging, model, weights)
            if not isinstance(model, PeftModel):
                tokenizer.save_pretrained(str(staging))
    ranks.wait()


def _whole_weights(model: Any, named: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor] | None:
    """The model's weights on the first rank's CPU, where they are in parts; None where the model has them whole."""
    if ranks.size == 1 or isinstance(model, PeftModel):
        return None
    weights = {}
    for name, parameter in named.items():
        value = gathered(parameter.detach())
        if ranks.first:
            weights[name] = value.cpu()
    return weights


def _save_weights(folder: Path, model: Any, weights: dict[str, Tensor] | None) -> None:
    if isinstance(model, PeftModel):
        model.save_pretrained(str(folder), selected_adapters=["default"])
    else:
        model.save_pretrained(str(folder), max_shard_size=_ONE_FILE, state_dict=weights)


_ONE_FILE = "10000GB"


def _load_whole(file: Path, named: dict[str, Tensor]) -> None:
    tensors = load_file(file)
    with torch.no_grad():
        for name, parameter in named.items():
            if tensors[name].shape != parameter.shape:
                raise RuntimeError(f"{name} has shape {list(tensors[name].shape)}, expected {list(parameter.shape)}")
            parameter.copy_(sharded_like(tensors[name], parameter))


@contextlib.contextmanager
def _whole_or_absent(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target`; afterwards forces its files to disk and gives it `target`'s name.

    OSError where the disk does not take them; what stood at `target` before still does.
    """
    staging = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    except (SafetensorError, OSError) as error:
        shutil.rmtree(staging, ignore_errors=True)  # what it took of a full disk
        raise OSError(f"{target} could not be saved: {error}") from None
    for path in (p for p in staging.iterdir() if p.is_file()):
        _sync(path)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    _sync(target.parent)


def _optimizer_tensors(optimizer: torch.optim.Optimizer, named: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The state by parameter. Of bitsandbytes: its int step becomes int64, the code tables it shares are copied."""
    tensors = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensor = gathered(value.clone() if key.startswith("qmap") else torch.as_tensor(value))
            if ranks.first:
                tensors[f"{name}|{key}"] = tensor.cpu()
    return tensors


def _counted(step: Tensor) -> Tensor | int:
    return int(step) if step.dtype == torch.int64 else step


def _random_state() -> dict[str, Tensor]:
    states = {"rng|cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng|cuda"] = torch.cuda.get_rng_state()
    return states


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
