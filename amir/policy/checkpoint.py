"""Checkpoints, written atomically: weights in PEFT's or Transformers' format, the other state as safetensors."""

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
    """Writes `folder/step-N` on the first rank: under a temporary name, forced to disk, then renamed.

    Sharded weights and moments are gathered first, so the run can be resumed with any number of ranks.
    """
    target = folder / f"step-{step}"
    weights, moments = _gathered_weights(model, named, ranks), _optimizer_tensors(optimizer, named, ranks)
    if ranks.first:
        with _atomic_folder(target) as staging:
            _save_weights(staging, model, weights, own_names=True)
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
    """The complete checkpoint of the highest step, or None; folders with other names than `step-N` are ignored."""
    return next(iter(_complete_checkpoints(folder)), None)


def keep_checkpoints(folder: Path, limit: int, scores: dict[int, float]) -> None:
    """Removes all but the `limit` latest complete checkpoints and the one whose step has the best score, if any has.

    A checkpoint is renamed before it is removed, so none is ever seen in part. What killed processes left half-written
    or half-removed is removed too.
    """
    for leftover in folder.glob(".step-*.tmp"):
        shutil.rmtree(leftover)
    complete = _complete_checkpoints(folder)
    scored = [path for path in complete if _step(path) in scores]
    best = max(scored, key=lambda path: scores[_step(path)], default=None)
    for path in complete[limit:]:
        if path != best:
            shutil.rmtree(path.rename(_staging(path)))


def _complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, latest first."""
    named = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted((path for path in named if (path / "state.json").is_file()), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def load_checkpoint(path: Path, model: Any, optimizer: torch.optim.Optimizer, named: dict[str, Tensor]) -> int:
    """Restores weights, optimizer and random state in place; returns the number of finished steps.

    ConfigError if the checkpoint is that of another model or adapter, or if its files changed after they were saved.
    """
    state = _checked_state(path, list(named))
    try:
        if isinstance(model, PeftModel):
            set_peft_model_state_dict(model, load_file(path / "adapter_model.safetensors"))
        else:
            _load_model_weights(path / "model.safetensors", named)
    except (RuntimeError, KeyError) as error:  # a weight has another shape or name
        raise ConfigError(f"checkpoint {path}: {_FOREIGN} ({error})") from None
    tensors = load_file(path / "optimizer.safetensors")
    for name, parameter in named.items():
        parts = {key.removeprefix(f"{name}|"): t for key, t in tensors.items() if key.startswith(f"{name}|")}
        if parts:
            optimizer.state[parameter] = {
                key: _step_value(t) if key == "step" else sharded_like(t, parameter) for key, t in parts.items()
            }
    torch.set_rng_state(tensors["rng|cpu"])
    if "rng|cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng|cuda"])
    return state["step"]


def data_position(path: Path) -> int:
    """The number of prompts consumed before the checkpoint was saved; `load_checkpoint` must have validated it."""
    return json.loads((path / "state.json").read_text())["data_position"]


def _checked_state(path: Path, parameters: list[str]) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text())
        identity = (state["format"], state["parameters"])
        damaged = [name for name, digest in dict(state["files"]).items() if _digest(path / name) != digest]
        counts_are_valid = all(isinstance(state[name], int) for name in ("step", "data_position"))
        counts_are_valid = counts_are_valid and state["step"] >= 1 and state["data_position"] >= 0
        if not counts_are_valid or "optimizer.safetensors" not in state["files"]:
            raise ValueError("state.json has no valid step, data_position and files")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"checkpoint {path}: damaged ({type(error).__name__}: {error}); {_WAY_OUT}") from None
    if identity != (FORMAT, parameters):
        raise ConfigError(f"checkpoint {path}: {_FOREIGN}")
    if damaged:
        raise ConfigError(f"checkpoint {path}: damaged ({', '.join(damaged)} changed after saving); {_WAY_OUT}")
    return state


_WAY_OUT = "move it aside to resume from the previous checkpoint"

_FOREIGN = "saved by another version of amir, or for another model or adapter; resume with those that saved it"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_result(
    folder: Path,
    model: Any,
    tokenizer: Any = None,
    named: dict[str, Tensor] | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    *,
    card: str | None = None,
) -> None:
    """Writes the adapter in PEFT's format, or after full fine-tuning the model, with its tokenizer and model card.

    `named`: the trained parameters, needed if they are sharded over the ranks.
    """
    weights = _gathered_weights(model, named or {}, ranks)
    if ranks.first:
        with _atomic_folder(folder) as staging:
            _save_weights(staging, model, weights, own_names=False)
            if tokenizer is not None:
                _save_tokenizer(staging, tokenizer)
            if card is not None:
                (staging / "README.md").write_text(card, encoding="utf-8")
    ranks.wait()


def _gathered_weights(model: Any, named: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor] | None:
    """Sharded weights, gathered on the CPU of the first rank; None if the model is not sharded."""
    if ranks.size == 1 or isinstance(model, PeftModel):
        return None
    weights = {}
    for name, parameter in named.items():
        value = gathered(parameter.detach())
        if ranks.first:
            weights[name] = value.cpu()
    return weights


def _save_weights(folder: Path, model: Any, weights: dict[str, Tensor] | None, *, own_names: bool) -> None:
    """`own_names`: those of the model's parameters, instead of those that its family has in files on the hub."""
    if isinstance(model, PeftModel):
        # PEFT would otherwise ask the hub, at each save, whether the vocabulary was resized.
        model.save_pretrained(str(folder), selected_adapters=["default"], save_embedding_layers=False)
    else:
        names: Any = {"save_original_format": not own_names}
        model.save_pretrained(str(folder), max_shard_size=_ONE_FILE, state_dict=weights, **names)


_ONE_FILE = "10000GB"


def _save_tokenizer(folder: Path, tokenizer: Any) -> None:
    """OSError if it cannot be written, for which the library tokenizers raises Exception itself."""
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(f"{error}, while writing the tokenizer") from None


def _load_model_weights(file: Path, named: dict[str, Tensor]) -> None:
    tensors = load_file(file)
    with torch.no_grad():
        for name, parameter in named.items():
            if tensors[name].shape != parameter.shape:
                raise RuntimeError(f"{name} has shape {list(tensors[name].shape)}, expected {list(parameter.shape)}")
            parameter.copy_(sharded_like(tensors[name], parameter))


def _staging(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp")


@contextlib.contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target`; afterwards forces its files to disk and renames it to `target`.

    OSError if the files cannot be written; an earlier folder at `target` is then unchanged.
    """
    staging = _staging(target)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    except (SafetensorError, OSError) as error:
        shutil.rmtree(staging, ignore_errors=True)  # frees its share of a full disk
        raise OSError(f"{target} cannot be saved ({error}); free disk space or make the folder writable") from None
    give_usual_modes(staging)
    for path in (p for p in staging.iterdir() if p.is_file()):
        _sync(path)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    _sync(target.parent)


def give_usual_modes(folder: Path) -> None:
    """Makes each file as readable as its new folder, by the umask; safetensors writes files for their owner alone."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        path.chmod(folder.stat().st_mode & 0o666)


def _optimizer_tensors(optimizer: torch.optim.Optimizer, named: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The optimizer's state by parameter. bitsandbytes' int step becomes int64; its shared code tables are copied."""
    tensors = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensor = gathered(value.clone() if key.startswith("qmap") else torch.as_tensor(value))
            if ranks.first:
                tensors[f"{name}|{key}"] = tensor.cpu()
    return tensors


def _step_value(step: Tensor) -> Tensor | int:
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
