"""Loads a policy: model, tokenizer and adapter; refuses models and settings that this machine cannot train."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from amir_kernels import Support, supports

from ..config import RunConfig
from ..distributed import SINGLE_PROCESS, Ranks
from ..errors import ConfigError
from .adapter import adapter_settings, fresh_adapter, saved_adapter
from .memory import (
    apply_liger_layers,
    checkpoint_layers,
    keep_differentiable,
    quantization_arguments,
    refuse_unavailable,
    use_saved_quantization,
)
from .policy import Policy
from .row_independence import refuse_dependent_rows
from .source import (
    CONFIG_FILES,
    IGNORED_IF_DAMAGED,
    TOKENIZER_FILES,
    WEIGHT_FILES,
    Source,
    model_source,
    no_weight,
)

EXPECTED = "a folder with config.json, weights and tokenizer files of a causal language model, or the hub name of one"


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
    source, model_config, tokenizer = _described(config)
    quantized = use_saved_quantization(config, model_config, dtype)
    base = _model(
        source,
        config=model_config,
        dtype=torch.float32 if sharded else dtype,
        attn_implementation=config.attn_implementation,
        **quantization_arguments(config, dtype, device, saved=quantized),
    )
    if not getattr(base, "is_quantized", False) and not sharded:
        base = nn.Module.to(base, device)
    if config.liger_layers:
        apply_liger_layers(base)
    policy = wrap_policy(base, tokenizer, config, source.revision)
    policy.notes[:0] = _notes(source, model_config)
    return policy, dtype


def _described(config: RunConfig) -> tuple[Source, Any, Any]:
    """Where the model's files are, its configuration and its tokenizer."""
    source = model_source(config.model)
    with source.reading("the model's settings", CONFIG_FILES, EXPECTED):
        model_config = AutoConfig.from_pretrained(source.location, trust_remote_code=False, **source.arguments)
    source.refuse_damaged(IGNORED_IF_DAMAGED, EXPECTED)
    return source, model_config, _tokenizer(source, config)


def load_without_weights(config: RunConfig) -> Policy:
    """The policy on torch's meta device; ConfigError for whatever of model and settings needs no weights to be refused.

    A saved adapter's settings are read, and a new adapter of its size represents it.
    """
    device = torch.device(_device(config.device))
    refuse_unavailable(config, device)
    source, model_config, tokenizer = _described(config)
    use_saved_quantization(config, model_config, _dtype(config.dtype, device))
    with source.reading("the model that config.json describes", CONFIG_FILES, EXPECTED), torch.device("meta"):
        base = AutoModelForCausalLM.from_config(model_config, attn_implementation=config.attn_implementation)
    if config.lora is not None and config.lora.adapter is not None:
        adapter_settings(config.lora)
        config = config.model_copy(update={"lora": config.lora.model_copy(update={"adapter": None})})
    return wrap_policy(base, tokenizer, config)


def _tokenizer(source: Source, config: RunConfig) -> Any:
    with source.reading("the tokenizer's files", TOKENIZER_FILES, EXPECTED):
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source.location, padding_side="left", trust_remote_code=False, **source.arguments
        )
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return tokenizer


def _model(source: Source, **settings: Any) -> Any:
    """The model with every tensor of its files; its configuration says whether its head is tied as it was loaded."""
    with source.reading("the weights of the model in config.json", WEIGHT_FILES, EXPECTED):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            **settings,
            **source.arguments,
        )
        types = source.other_types()
    base, report = loaded
    _refuse_other_weights(source.setting, base, report)
    _refuse_other_values(source.setting, base, types)
    if base.config.tie_word_embeddings and not base.all_tied_weights_keys:
        base.config.tie_word_embeddings = False
    return base


def wrap_policy(base: Any, tokenizer: Any, config: RunConfig, revision: str | None = None) -> Policy:
    """The policy of a loaded model, without the model's own sampling defaults; an adapter or every weight is trained.

    For full fine-tuning, the model is copied if the loss needs a reference policy. `revision`: the commit of the model
    on the hub.
    """
    _refuse_too_long(base.config, config)
    eos_ids = _eos_ids(base, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    base.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=pad_id)
    frozen, notes = None, list[str]()
    if config.lora is None:
        model, frozen = base.requires_grad_(True), _frozen_copy(base, config) if needs_reference(config) else None
    elif config.lora.adapter is None:
        model = fresh_adapter(base, config.lora, config.seed, revision)
    else:
        model, notes = saved_adapter(base, config.lora, revision, with_reference=needs_reference(config))
    support = _checked_support(model, config)
    policy = Policy(
        model.eval(), tokenizer, support, pad_id, eos_ids, config.temperature, frozen, revision=revision, notes=notes
    )
    keep_differentiable(base)
    if base.device.type != "meta":  # where nothing is computed
        refuse_dependent_rows(policy.support.body, config)
    if config.gradient_checkpointing:
        checkpoint_layers(policy.support.body, offload=config.offload_activations)
    return policy


def needs_reference(config: RunConfig) -> bool:
    """Whether the loss of this run compares the policy with a reference policy."""
    return config.beta > 0 or (config.lambda_reg > 0 and not config.ref_free)


def _frozen_copy(base: Any, config: RunConfig) -> Support:
    return _checked_support(copy.deepcopy(base).requires_grad_(False).eval(), config)


def _checked_support(model: nn.Module, config: RunConfig) -> Support:
    support = supports(model)
    if support.refusal:
        raise ConfigError(f"model = {config.model!r}: {support.refusal}")
    return support


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


def _refuse_other_weights(setting: str, base: Any, report: dict[str, Any]) -> None:
    """ConfigError if a tensor of model or files has no counterpart: Transformers would initialize or ignore it."""
    wrong = sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"])
    if wrong:
        raise ConfigError(
            f"{setting}: in its files {wrong[0]} is missing or has another shape than in config.json (and so "
            f"have {len(wrong) - 1} other tensors); expected the weights that belong to this config.json"
        )
    if unread := sorted(report["unexpected_keys"]):
        raise ConfigError(
            f"{setting}: its files have {unread[0]} (and {len(unread) - 1} other tensors), which the "
            f"{type(base).__name__} of config.json does not have; expected the weights that belong to this config.json"
        )


def _refuse_other_values(setting: str, base: Any, types: dict[str, str]) -> None:
    """ConfigError for weights that are not finite, or that the files do not have as floats of 16 bits or more.

    `types`: those of other tensors in the files, whose names may lack a prefix that the model's have.
    """
    for name, weight in base.named_parameters():
        if not weight.is_floating_point():
            continue
        kind = next((k for key, k in types.items() if f".{name}".endswith(f".{key}") or key.endswith(f".{name}")), None)
        if problem := f"values of type {kind}, as of a quantized model" if kind else no_weight(weight):
            raise ConfigError(f"{setting}: {name} has {problem}; expected finite floating-point weights")


def _notes(source: Source, model_config: Any) -> list[str]:
    """What the user should know of the model's files."""
    notes = []
    if custom := getattr(model_config, "auto_map", None):
        notes.append(
            f"{source.setting}: its config.json names custom code ({', '.join(custom)}), which is not run; the model "
            f"is Transformers' own {model_config.model_type}"
        )
    if unread := source.unread_files():
        read = ", ".join(path.name for path in source.weight_files())
        notes.append(f"{source.setting}: its weights are those of {read}; {unread[0].name} is not read")
    return notes


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
    ids = [] if listed is None else list(listed) if isinstance(listed, list | tuple) else [listed]
    if odd := [token for token in ids if not isinstance(token, int)]:
        raise ConfigError(
            f"model: its generation_config.json names {odd[0]!r} as an end-of-sequence token; expected token ids"
        )
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError(
            "model: neither its generation config nor its tokenizer names an end-of-sequence token, so no completion "
            "could end; set eos_token in the tokenizer's files"
        )
    return ids
