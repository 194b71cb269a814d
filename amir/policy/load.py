"""Loads a policy: model, tokenizer and adapter; refuses models and settings that this machine cannot train."""

import copy
import re
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from amir_kernels import Support, supports

from ..config import LoraSettings, RunConfig
from ..distributed import SINGLE_PROCESS, Ranks
from ..errors import ConfigError, summary
from .memory import (
    apply_liger_layers,
    checkpoint_layers,
    keep_differentiable,
    quantization_arguments,
    refuse_unavailable,
)
from .policy import REFERENCE, Policy
from .smollm2 import MODEL_NAME, smollm2_folder


def load_policy(config: RunConfig, ranks: Ranks = SINGLE_PROCESS) -> Policy:
    """Loads model and tokenizer and adds the adapter. ConfigError if this machine or the head op does not support them.

    For full fine-tuning on several ranks the model is loaded on the CPU, in float32, and then sharded.
    """
    with ranks.raise_on_all_ranks():
        policy, dtype = _load(config, sharded=ranks.size > 1 and config.lora is None)
    policy.distribute(ranks, dtype)
    return policy


def _load(config: RunConfig, *, sharded: bool) -> tuple[Policy, torch.dtype]:
    if sharded and config.sampler.name == "paged":
        raise ConfigError(
            "sampler.name = 'paged': not supported for full fine-tuning (lora: null) on several ranks, where each "
            "holds a shard of every weight; use sampler 'generate', LoRA, or run one rank"
        )
    if sharded and config.term_gradient_steps:
        raise ConfigError(
            f"term_gradient_steps = {config.term_gradient_steps}: not supported for full fine-tuning (lora: null) on "
            "several ranks; set it to 0, use LoRA, or run one rank"
        )
    device = torch.device(_device(config.device))
    refuse_unavailable(config, device)
    dtype = _dtype(config.dtype, device)
    source = model_source(config.model)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, padding_side="left")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32 if sharded else dtype,
            attn_implementation=config.attn_implementation,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **quantization_arguments(config, dtype, device),
        )
    except (OSError, ValueError, LookupError, ImportError, SafetensorError) as error:
        raise ConfigError(
            f"model = {config.model!r}: cannot be loaded ({summary(error)}); expected a folder with config.json, "
            "weights and tokenizer files of a causal language model, or a hub name"
        ) from None
    base, report = loaded
    _refuse_other_weights(config.model, report)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    if config.quantization is None and not sharded:
        base = nn.Module.to(base, device)
    if config.liger_layers:
        apply_liger_layers(base)
    return wrap_policy(base, tokenizer, config), dtype


def wrap_policy(base: Any, tokenizer: Any, config: RunConfig) -> Policy:
    """The policy of a loaded model, without the model's own sampling defaults; an adapter or every weight is trained.

    For full fine-tuning, the model is copied if the loss needs a reference policy.
    """
    _refuse_too_long(base.config, config)
    eos_ids = _eos_ids(base, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    base.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=pad_id)
    frozen = None
    if config.lora is None:
        model, frozen = base.requires_grad_(True), _frozen_copy(base, config) if needs_reference(config) else None
    elif config.lora.adapter is None:
        model = _fresh_adapter(base, config.lora, config.seed)
    else:
        folder = str(Path(config.lora.adapter).expanduser())
        model = _loaded_adapter(base, config.lora, folder, with_reference=needs_reference(config))
    policy = Policy(
        model.eval(), tokenizer, _checked_support(model, config), pad_id, eos_ids, config.temperature, frozen
    )
    if config.quantization is not None:
        keep_differentiable(base)
    if config.gradient_checkpointing:
        checkpoint_layers(policy.support.body, offload=config.offload_activations)
    return policy


def needs_reference(config: RunConfig) -> bool:
    """Whether the loss of this run compares the policy with a reference policy."""
    return config.beta > 0 or (config.lambda_reg > 0 and not config.ref_free)


def _fresh_adapter(base: Any, lora: LoraSettings, seed: int) -> PeftModel:
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
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


def _loaded_adapter(base: Any, lora: LoraSettings, folder: str, *, with_reference: bool) -> PeftModel:
    """A saved adapter to continue from, and a frozen second copy of it if the loss needs a reference policy."""
    try:
        saved: Any = PeftConfig.from_pretrained(folder)
        if saved.peft_type != "LORA":
            raise ValueError(f"it is a PEFT adapter of type {saved.peft_type}")
        if (saved.r, saved.lora_alpha) != (lora.r, lora.alpha):
            raise ValueError(
                f"it has r = {saved.r} and alpha = {saved.lora_alpha:g}, and the run has lora.r = {lora.r} and "
                f"lora.alpha = {lora.alpha:g}"
            )
        model = PeftModel.from_pretrained(base, folder, is_trainable=True)
        if with_reference:
            model.load_adapter(folder, REFERENCE)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"lora.adapter = {folder!r}: {error}; expected a folder with a LoRA adapter of this model in PEFT's "
            "format, and lora.r and lora.alpha equal to the adapter's"
        ) from None
    return _in_compute_dtype(model, base.dtype)


def _frozen_copy(base: Any, config: RunConfig) -> Support:
    return _checked_support(copy.deepcopy(base).requires_grad_(False).eval(), config)


def _checked_support(model: nn.Module, config: RunConfig) -> Support:
    support = supports(model)
    if support.refusal:
        raise ConfigError(f"model = {config.model!r}: {support.refusal}")
    return support


def model_source(model: str) -> str:
    """A folder or hub name for Transformers; for the packaged model, the folder of its converted files."""
    if model == MODEL_NAME:
        return str(smollm2_folder())
    if model.startswith((".", "/", "~")) and not (Path(model).expanduser() / "config.json").is_file():
        raise ConfigError(f"model = {model!r}: expected a folder with config.json and weights, or a hub name")
    return str(Path(model).expanduser()) if model.startswith("~") else model


def machine_settings(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """The settings `device`, `dtype` and `threads` with the values that they have for a policy on this device."""
    dtype = str(_dtype(config.dtype, device)).removeprefix("torch.")
    return {"device": device.type, "dtype": dtype, "threads": torch.get_num_threads()}


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': torch finds no GPU on this machine; expected 'cpu' or 'auto'")
    return device


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, dtype)


def _refuse_other_weights(model: str, report: dict[str, Any]) -> None:
    """ConfigError if weights are missing or have another shape: Transformers would initialize them at random."""
    wrong = sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"])
    if wrong:
        raise ConfigError(
            f"model = {model!r}: in its files {wrong[0]} is missing or has another shape than in config.json (and so "
            f"have {len(wrong) - 1} other tensors); expected the weights that belong to this config.json"
        )


def _refuse_too_long(model_config: Any, config: RunConfig) -> None:
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    longest = config.max_prompt_length + config.max_completion_length
    if positions is not None and longest > positions:
        raise ConfigError(
            f"max_prompt_length + max_completion_length = {longest}: the model has {positions} positions; lower one of "
            "the two so that their sum is at most that"
        )


def _eos_ids(base: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion; the generation config may list more than the tokenizer."""
    listed = base.generation_config.eos_token_id if base.generation_config else None
    ids = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError(
            "model: neither its generation config nor its tokenizer names an end-of-sequence token, so no completion "
            "could end; set eos_token in the tokenizer's files"
        )
    return ids
