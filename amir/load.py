"""Loading: model and tokenizer as the run's settings want them, an adapter on it, what cannot be served refused."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from amir_kernels import supports

from .config import ConfigError, RunConfig
from .model import Policy
from .smollm2 import MODEL_NAME, smollm2_folder


def load_policy(config: RunConfig) -> Policy:
    """Loads model and tokenizer, adds a fresh adapter, refuses what the head op does not serve."""
    device = torch.device(_device(config.device))
    dtype = {"auto": torch.float32 if device.type == "cpu" else torch.bfloat16}.get(config.dtype) or getattr(
        torch, config.dtype
    )
    source = model_source(config.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
        base = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=config.attn_implementation)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ConfigError(f"model = {config.model!r}: {error}") from None
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return wrap_policy(torch.nn.Module.to(base, device), tokenizer, config)


def wrap_policy(base: Any, tokenizer: Any, config: RunConfig) -> Policy:
    """Makes a policy of a loaded model: LoRA on it, sampling defaults of its hub page dropped."""
    _refuse_too_long(base.config, config)
    eos_ids = _eos_ids(base, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    base.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=pad_id)
    lora = LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]
        target_modules=config.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(config.seed)
    try:
        model = get_peft_model(base, lora)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules = {config.lora.target_modules!r}: {error}") from None
    support = supports(model)
    if support.refusal:
        raise ConfigError(f"model = {config.model!r}: {support.refusal}")
    return Policy(model.eval(), tokenizer, support, pad_id, eos_ids, config.temperature)


def model_source(model: str) -> str:
    """A folder or hub name that Transformers loads; the packaged model's name becomes its converted folder."""
    if model == MODEL_NAME:
        return str(smollm2_folder())
    if model.startswith((".", "/", "~")) and not (Path(model).expanduser() / "config.json").is_file():
        raise ConfigError(f"model = {model!r}: expected a folder with config.json and weights, or a hub name")
    return str(Path(model).expanduser()) if model.startswith("~") else model


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': torch sees no GPU here; expected 'cpu' or 'auto'")
    return device


def _refuse_too_long(model_config: Any, config: RunConfig) -> None:
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    longest = config.max_prompt_length + config.max_completion_length
    if positions is not None and longest > positions:
        raise ConfigError(
            f"max_prompt_length + max_completion_length = {longest}: expected at most the model's {positions} positions"
        )


def _eos_ids(base: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: the generation config may list more than the tokenizer knows."""
    listed = base.generation_config.eos_token_id if base.generation_config else None
    ids = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError("the model and its tokenizer name no end-of-sequence token, so no completion could end")
    return ids
