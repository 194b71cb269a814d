"""Loading: model and tokenizer as the run's settings want them, an adapter on it, what cannot be served refused."""

import copy
import importlib.util
import logging
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from amir_kernels import Support, supports

from .config import ConfigError, LoraSettings, RunConfig
from .model import REFERENCE, Policy
from .packing import checkpoint_contexts
from .ranks import ALONE, Ranks
from .smollm2 import MODEL_NAME, smollm2_folder


def load_policy(config: RunConfig, ranks: Ranks = ALONE) -> Policy:
    """Loads model and tokenizer, adds an adapter, refuses what this machine or the head op does not serve.

    On several ranks a model that is trained whole is loaded on the CPU, in float32, and then taken apart.
    """
    policy, dtype = ranks.together(lambda: _load(config, in_parts=ranks.size > 1 and config.lora is None))
    policy.spread(ranks, dtype)
    return policy


def _load(config: RunConfig, *, in_parts: bool) -> tuple[Policy, torch.dtype]:
    if in_parts and config.sampler.name == "paged":
        raise ConfigError(
            "sampler.name = 'paged': on several ranks each holds a part of every weight where lora is null, and "
            "continuous batching needs them whole; expected sampler 'generate', lora, or one rank"
        )
    if in_parts and config.term_gradient_steps:
        raise ConfigError(
            f"term_gradient_steps = {config.term_gradient_steps}: on several ranks each holds a part of every gradient "
            "where lora is null, and only that of both terms together; expected 0, lora, or one rank"
        )
    device = torch.device(_device(config.device))
    refuse_unavailable(config, device)
    dtype = _dtype(config.dtype, device)
    source = model_source(config.model)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, padding_side="left")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32 if in_parts else dtype,
            attn_implementation=config.attn_implementation,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **_quantized(config, dtype, device),
        )
    except (OSError, ValueError, LookupError, ImportError, SafetensorError) as error:
        raise ConfigError(f"model = {config.model!r}: {_in_a_line(error)}") from None
    base, found = loaded
    _refuse_other_weights(config.model, found)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    if config.quantization is None and not in_parts:
        base = nn.Module.to(base, device)
    if config.liger_layers:
        apply_liger_layers(base)
    return wrap_policy(base, tokenizer, config), dtype


def wrap_policy(base: Any, tokenizer: Any, config: RunConfig) -> Policy:
    """Makes a policy of a loaded model: an adapter or every weight to train, sampling defaults of its hub page dropped.

    With full fine-tuning a frozen copy of the model is made where the loss needs a reference policy.
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
    policy = Policy(model.eval(), tokenizer, _served(model, config), pad_id, eos_ids, config.temperature, frozen)
    if config.quantization is not None:
        _keep_differentiable(base)
    if config.gradient_checkpointing:
        checkpoint_layers(policy.support.body, offload=config.offload_activations)
    return policy


def needs_reference(config: RunConfig) -> bool:
    """Whether some loss of this run compares the policy with its reference."""
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
        raise ConfigError(f"lora.target_modules = {lora.target_modules!r}: {error}") from None


def _in_compute_dtype(model: PeftModel, dtype: torch.dtype) -> PeftModel:
    """The adapter in bfloat16 where the model computes in it; the optimizer keeps it in float32.

    PEFT's float32 adapter makes each of its layers keep a float32 copy of its input, about half of all activations.
    With float16, whose gradients could underflow, the adapter stays in float32.
    """
    if dtype == torch.bfloat16:
        for parameter in (p for name, p in model.named_parameters() if "lora_" in name):
            parameter.data = parameter.data.to(dtype)
    return model


def _loaded_adapter(base: Any, lora: LoraSettings, folder: str, *, with_reference: bool) -> PeftModel:
    """A saved adapter, trained further; a frozen second copy of it is the reference, where one is needed."""
    try:
        saved: Any = PeftConfig.from_pretrained(folder)
        if saved.peft_type != "LORA":
            raise ValueError(f"is {saved.peft_type}, expected LORA")
        if (saved.r, saved.lora_alpha) != (lora.r, lora.alpha):
            raise ValueError(f"has r = {saved.r} and alpha = {saved.lora_alpha}; set lora.r and lora.alpha to them")
        model = PeftModel.from_pretrained(base, folder, is_trainable=True)
        if with_reference:
            model.load_adapter(folder, REFERENCE)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"lora.adapter = {folder!r}: {error}") from None
    return _in_compute_dtype(model, base.dtype)


def _frozen_copy(base: Any, config: RunConfig) -> Support:
    return _served(copy.deepcopy(base).requires_grad_(False).eval(), config)


def _served(model: nn.Module, config: RunConfig) -> Support:
    support = supports(model)
    if support.refusal:
        raise ConfigError(f"model = {config.model!r}: {support.refusal}")
    return support


# ---- what saves memory ---------------------------------------------------------------------------------------------


def refuse_unavailable(config: RunConfig, device: torch.device) -> None:
    """Raises ConfigError for a setting that cannot work on this machine, before anything large is loaded."""
    needs_gpu = {
        "attn_implementation = 'flash_attention_2'": config.attn_implementation == "flash_attention_2",
        "liger_layers": config.liger_layers,
        "offload_activations": config.offload_activations,
    }
    for option in (option for option, wanted in needs_gpu.items() if wanted and device.type != "cuda"):
        raise ConfigError(f"{option}: is for GPUs only, and this run is on the {device.type}")
    needs_package = {
        "attn_implementation = 'flash_attention_2'": ("flash_attn", config.attn_implementation == "flash_attention_2"),
        "liger_layers": ("liger_kernel", config.liger_layers),
        f"quantization = {config.quantization!r}": ("bitsandbytes", config.quantization is not None),
        "optimizer = 'adamw_8bit'": ("bitsandbytes", config.optimizer == "adamw_8bit"),
    }
    for option, (package, wanted) in needs_package.items():
        if wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{option}: {package} is not installed; pip install 'amir-grpo[gpu]' brings it")


def _quantized(config: RunConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` for bitsandbytes: products in `dtype`; embeddings, norms and head stay in it too.

    PEFT's preparation is left out: its float32 copies of embeddings, norms and head are what the memory would go to.
    """
    if config.quantization is None:
        return {}
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    settings = (
        BitsAndBytesConfig(load_in_8bit=True)
        if config.quantization == "8bit"
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def _keep_differentiable(base: Any) -> None:
    """Keeps quantized layers out of the form that bitsandbytes gives them for inference on CPUs: it has no gradient."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for layer in (module for module in base.modules() if isinstance(module, Linear4bit | Linear8bitLt)):
        layer.training = True


def apply_liger_layers(base: Any) -> None:
    """Puts Liger's norms, rotary embeddings and MLPs into the model, and into its family's module in this process.

    Its fused loss stays out: the head op takes the hidden states.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    family = base.config.model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"liger_layers: Liger has no layers for model type {family!r}; expected liger_layers: false")
    _apply_liger_kernel_to_instance(base, cross_entropy=False, fused_linear_cross_entropy=False)


def checkpoint_layers(body: Any, *, offload: bool) -> None:
    """Makes each layer keep its input alone and compute itself again in the backward; the rest stays as it is.

    A layer checkpoints where its own `training` is true; what is in it stays in evaluation mode, so nothing is dropped
    out. `offload`: the inputs wait in pinned CPU memory.
    """
    layers: list[Any] = [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"gradient_checkpointing: {type(body).__name__} has no layers that could be checkpointed")
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=checkpoint_contexts(body))
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = partial(_offloaded, recompute) if offload else recompute


def _offloaded(recompute: Any, layer: Any, *inputs: Tensor) -> Any:
    with saved_tensors_hooks(_to_cpu, _from_cpu):
        return recompute(layer, *inputs)


def _to_cpu(tensor: Tensor) -> tuple[torch.device, Tensor]:
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, held.copy_(tensor, non_blocking=tensor.is_cuda)


def _from_cpu(held: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = held
    return tensor.to(device, non_blocking=True)


# ---- what a setting means for this model and machine ---------------------------------------------------------------


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


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, dtype)


def _refuse_other_weights(model: str, found: dict[str, Any]) -> None:
    """ConfigError where weights are missing or of another shape: Transformers would go on with random ones."""
    wrong = sorted(found["missing_keys"]) + sorted(key for key, *_ in found["mismatched_keys"])
    if wrong:
        raise ConfigError(
            f"model = {model!r}: its files do not hold {wrong[0]} in the shape that its config.json asks for (nor "
            f"{len(wrong) - 1} others); expected the weights of that model"
        )


def _in_a_line(error: Exception) -> str:
    """The beginning of what Transformers says, which may be a page."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...")


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
