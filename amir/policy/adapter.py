"""The LoRA adapter of a policy: a fresh one, or a saved one of which every tensor is used."""

import re
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.save_and_load import load_peft_weights
from safetensors import safe_open
from torch import Tensor

from ..config import LoraSettings
from ..errors import ConfigError
from .policy import REFERENCE
from .source import ADAPTER_FILES, Source, adapter_source, no_weight, stored_tensor

EXPECTED = (
    "a folder with a LoRA adapter of this model in PEFT's format, and lora.r and lora.alpha equal to the adapter's"
)
KEEP_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""PEFT's named initializations that leave the base model's weights as they are; PiSSA, OLoRA, ... change them."""


def fresh_adapter(base: Any, lora: LoraSettings, seed: int, revision: str | None) -> PeftModel:
    """A new adapter, which changes nothing yet. `revision`: the base model's commit on the hub."""
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
        revision=revision,
    )
    torch.manual_seed(seed)
    try:
        return _in_compute_dtype(get_peft_model(base, settings), base.dtype)
    except (ValueError, re.error) as error:
        raise ConfigError(
            f"lora.target_modules = {lora.target_modules!r}: {error}; expected names of the model's linear layers, "
            "or a regular expression that matches some"
        ) from None


def _in_compute_dtype(model: PeftModel, dtype: torch.dtype) -> PeftModel:
    """The adapter in bfloat16 if the model is; the optimizer keeps float32 masters.

    With PEFT's float32 adapter, each adapted layer saves a float32 copy of its input, about half of all activations.
    With float16, whose gradients could underflow, the adapter stays in float32.
    """
    if dtype == torch.bfloat16:
        for parameter in (p for name, p in model.named_parameters() if "lora_" in name):
            parameter.data = parameter.data.to(dtype)
    return model


def adapter_settings(lora: LoraSettings) -> tuple[Source, Any]:
    """Where the saved adapter is, and its settings; ConfigError if the run cannot continue from it."""
    source = adapter_source(str(lora.adapter))
    with source.reading("the adapter's settings", ADAPTER_FILES[:1], EXPECTED):
        saved: Any = PeftConfig.from_pretrained(source.location, **source.arguments)
        _refuse_other_settings(source, saved, lora)
    return source, saved


def saved_adapter(
    base: Any, lora: LoraSettings, revision: str | None, *, with_reference: bool
) -> tuple[PeftModel, list[str]]:
    """A saved adapter to continue from, and what the user should know of it.

    A frozen second copy of it is loaded if the loss needs a reference policy.
    """
    source, saved = adapter_settings(lora)
    with source.reading("the adapter's settings", ADAPTER_FILES[:1], EXPECTED):
        notes = _other_base(source, saved, base.name_or_path, revision)
    saved.base_model_name_or_path, saved.revision, saved.inference_mode = base.name_or_path or None, revision, False
    if with_reference:
        _refuse_second_copy(source, saved)
    with source.reading("the adapter's weights", ADAPTER_FILES, EXPECTED):
        model = _with_every_tensor(base, saved, source)
    if with_reference:
        weights = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
        model.add_adapter(REFERENCE, saved)
        set_peft_model_state_dict(model, weights, REFERENCE)
    return _in_compute_dtype(model, base.dtype), notes


def _refuse_other_settings(source: Source, saved: Any, lora: LoraSettings) -> None:
    if saved.peft_type != "LORA":
        raise ConfigError(f"{source.setting}: it is a PEFT adapter of type {saved.peft_type}; expected {EXPECTED}")
    if (saved.r, saved.lora_alpha) != (lora.r, lora.alpha):
        raise ConfigError(
            f"{source.setting}: it has r = {saved.r} and alpha = {saved.lora_alpha:g}, and the run has lora.r = "
            f"{lora.r} and lora.alpha = {lora.alpha:g}; expected {EXPECTED}"
        )
    if isinstance(saved.init_lora_weights, str) and saved.init_lora_weights not in KEEP_THE_BASE:
        raise ConfigError(
            f"{source.setting}: its init_lora_weights = {saved.init_lora_weights!r} changes the base model's weights "
            "whenever it is loaded; convert it to plain LoRA with PEFT's save_pretrained("
            "path_initial_model_for_weight_conversion=...)"
        )


def _refuse_second_copy(source: Source, saved: Any) -> None:
    """ConfigError for settings of which PEFT serves one adapter only."""
    for name in ("bias", "layer_replication"):
        if (value := getattr(saved, name)) not in ("none", None):
            raise ConfigError(
                f"{source.setting}: it has {name} = {value!r}, with which a model can have one adapter only, and this "
                "run needs a frozen second one as its reference policy; set beta: 0 and ref_free: true, or continue "
                f"from one without {name}"
            )


def _with_every_tensor(base: Any, saved: Any, source: Source) -> PeftModel:
    """The base model with the saved adapter; ConfigError if a tensor of either has no counterpart in the other.

    So has an adapter's file that brings weights of the base model, as for a resized vocabulary, with other values.
    """
    file = load_peft_weights(source.location, device="cpu", **source.arguments)
    for key, tensor in file.items():
        if problem := no_weight(tensor):
            raise ConfigError(f"{source.setting}: {key} has {problem}; expected finite floating-point weights")
    own = dict(base.named_parameters(remove_duplicate=False))
    names = {key: key.removeprefix("base_model.model.").replace(".base_layer.", ".") for key in file}
    before = {key: own[name].detach().clone() for key, name in names.items() if name in own}
    model: Any = get_peft_model(base, saved)
    loaded = model.load_adapter(source.location, "default", is_trainable=True, **source.arguments)
    adapter = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    missing = [*loaded.missing_keys, *(key for key in adapter.keys() - file.keys() if "lora_" not in key)]
    _refuse_keys(source, missing, "a tensor of the adapter is missing in its file")
    _refuse_keys(source, loaded.unexpected_keys, "its file has a tensor that this model's adapter does not have")
    replaced = [key for key in before.keys() - adapter.keys() if not _equal(before[key], file[key])]
    _refuse_keys(source, replaced, "its file has a tensor of the base model, with other values than the run's model")
    return model


def _refuse_keys(source: Source, keys: list[str], problem: str) -> None:
    if keys:
        others = f" (and so are {len(keys) - 1} others)" if len(keys) > 1 else ""
        raise ConfigError(f"{source.setting}: {problem}: {min(keys)}{others}; expected {EXPECTED}")


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.cpu(), second.to(first.dtype))


def _other_base(source: Source, saved: Any, model: str, revision: str | None) -> list[str]:
    """A note if the adapter was made for another base model than the run's, or may have been.

    ConfigError if both are folders with tensors of the same names, shapes and dtypes, and other values.
    """
    made_for = saved.base_model_name_or_path
    if not made_for or not model:
        return []
    made_for_folder = Path(made_for).expanduser().resolve()
    if model in (made_for, str(made_for_folder)):
        if revision is None or saved.revision in (None, revision):
            return []
        made_for, model = f"{made_for} at {saved.revision}", f"{model} at {revision}"
    elif (same := _same_weights(made_for_folder, Path(model))) is not None:
        if same:
            return []
        raise ConfigError(
            f"{source.setting}: it was made for the base model {made_for!r}, whose weights differ from those of "
            f"{model!r}; set model to the adapter's base model"
        )
    note = (
        f"{source.setting}: it was made for the base model {made_for!r}, and the run's model is {model!r}; nothing "
        "here tells whether their weights are the same, so make sure that they are"
    )
    return [note]


def _same_weights(first: Path, second: Path) -> bool | None:
    """Whether two folders hold the same tensors; None if names, shapes or dtypes differ, or if one has none."""
    files = [_tensor_files(folder) for folder in (first, second)]
    if not files[0] or files[0].keys() != files[1].keys():
        return None
    for name in files[0]:
        tensors = [stored_tensor(file[name], name) for file in files]
        if tensors[0].shape != tensors[1].shape or tensors[0].dtype != tensors[1].dtype:
            return None
        if not torch.equal(*tensors):
            return False
    return True


def _tensor_files(folder: Path) -> dict[str, Path]:
    """The safetensors file of each tensor of a model's folder."""
    files = {}
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    return files
