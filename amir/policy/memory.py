"""Memory savings: quantized weights, gradient checkpointing and offloading, Liger's layers, glibc's allocator."""

import contextlib
import ctypes
import importlib.util
import logging
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import BitsAndBytesConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config import RunConfig, gpu_only_settings
from ..errors import ConfigError
from .packing import checkpoint_contexts


def refuse_unavailable(config: RunConfig, device: torch.device) -> None:
    """ConfigError for a setting that cannot work on this machine, before anything large is loaded."""
    for setting in gpu_only_settings(config) if device.type != "cuda" else ():
        raise ConfigError(f"{setting}: this needs a GPU, and the run's device is {device.type}; leave the setting out")
    needs_package = {
        "attn_implementation = 'flash_attention_2'": ("flash_attn", config.attn_implementation == "flash_attention_2"),
        "liger_layers": ("liger_kernel", config.liger_layers),
        f"quantization = {config.quantization!r}": ("bitsandbytes", config.quantization is not None),
        "optimizer = 'adamw_8bit'": ("bitsandbytes", config.optimizer == "adamw_8bit"),
    }
    for option, (package, in_use) in needs_package.items():
        if in_use:
            _refuse_missing_package(option, package)


def _refuse_missing_package(option: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{option}: the package {package} is not installed; run pip install 'amir-grpo[gpu]', or leave the "
            "setting out"
        )


def use_saved_quantization(config: RunConfig, model: Any, dtype: torch.dtype) -> bool:
    """Whether the model's configuration says that its weights are saved in 4 or 8 bits, by bitsandbytes.

    Their products are then set to `dtype`. ConfigError if the run cannot train such a model, or sets other bits.
    """
    holder = next((c for c in (model, model.get_text_config()) if getattr(c, "quantization_config", None)), None)
    if holder is None:
        return False
    saved = holder.quantization_config
    saved = dict(saved if isinstance(saved, dict) else saved.to_dict())
    bits = next((bits for bits in ("4bit", "8bit") if saved.get(f"load_in_{bits}")), None)
    setting = f"model = {config.model!r}: its weights are saved quantized ({bits or saved.get('quant_method')})"
    if bits is None:
        raise ConfigError(f"{setting}; expected unquantized weights, or those of bitsandbytes in 4 or 8 bits")
    if config.lora is None:
        raise ConfigError(
            f"{setting}, and lora = None trains every weight, which quantized weights cannot be; train a LoRA adapter "
            "(lora: {}), or name the unquantized model"
        )
    if config.quantization not in (None, bits):
        raise ConfigError(
            f"quantization = {config.quantization!r}: {setting}; set quantization: {bits}, or name the unquantized "
            "model"
        )
    _refuse_missing_package(setting, "bitsandbytes")
    holder.quantization_config = saved | {"bnb_4bit_compute_dtype": str(dtype).removeprefix("torch.")}
    return True


def quantization_arguments(
    config: RunConfig, dtype: torch.dtype, device: torch.device, *, saved: bool
) -> dict[str, Any]:
    """Arguments of `from_pretrained` for bitsandbytes. Products, embeddings, norms and head are in `dtype`.

    `saved`: whether the weights are quantized already, and bring their own configuration. PEFT's
    `prepare_model_for_kbit_training` is not used: it casts embeddings, norms and head to float32, which costs most of
    the memory that quantization saves.
    """
    placed = {"device_map": {"": device}}
    if saved:
        return placed
    if config.quantization is None:
        return {}
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
    return placed | {"quantization_config": settings}


def keep_differentiable(base: Any) -> None:
    """Keeps quantized layers in training mode: bitsandbytes' inference form on CPUs has no gradient."""
    if getattr(base, "quantization_method", None) is None:
        return
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for layer in (module for module in base.modules() if isinstance(module, Linear4bit | Linear8bitLt)):
        layer.training = True


def apply_liger_layers(base: Any) -> None:
    """Replaces norms, rotary embeddings and MLPs of the model, and of its family's module in this process, by Liger's.

    Liger's fused loss is not used, because the head op takes the hidden states.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    family = base.config.model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"liger_layers: Liger does not support the model type {family!r}; set liger_layers: false")
    _apply_liger_kernel_to_instance(base, cross_entropy=False, fused_linear_cross_entropy=False)


def checkpoint_layers(body: Any, *, offload: bool) -> None:
    """Makes each layer save only its input and recompute its activations in the backward.

    Transformers checkpoints a layer if its own `training` is true; its submodules stay in evaluation mode, so dropout
    is off. With `offload`, the inputs are saved in pinned CPU memory.
    """
    layers: list[Any] = [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"gradient_checkpointing = True: {type(body).__name__} has no layers that can be checkpointed; set it to "
            "false"
        )
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=checkpoint_contexts(body))
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = partial(_offloaded, recompute) if offload else recompute


def _offloaded(recompute: Any, layer: Any, *inputs: Tensor) -> Any:
    with saved_tensors_hooks(_to_cpu, _from_cpu):
        return recompute(layer, *inputs)


def _to_cpu(tensor: Tensor) -> tuple[torch.device, Tensor]:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, copy.copy_(tensor, non_blocking=tensor.is_cuda)


def _from_cpu(saved: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = saved
    return tensor.to(device, non_blocking=True)


M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


@contextlib.contextmanager
def mmap_large_allocations() -> Iterator[None]:
    """While active, glibc serves CPU allocations of 1 MiB and more by mmap when its heap has no free block for them.

    Such allocations go back to the system as soon as they are freed. On the heap, the temporary tensors of a
    micro-batch leave holes between those saved for its backward: a quarter of the resident memory. Afterwards the
    threshold is 32 MiB, glibc's own upper bound, because rollouts reuse the same blocks. Other C libraries are not
    changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
