"""Checks the arguments of the head ops and turns them into the `Call` that the op takes."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._backend import use_triton
from .._checks import (
    check_count,
    check_devices,
    check_float,
    check_int64,
    check_number,
    check_positive,
    check_removed,
    check_shape,
    check_transforms,
)
from .op import Call
from .tiling import default_workspace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def checked_call(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    lora: tuple[Tensor, Tensor, float] | None,
    ignore_index: int,
    process_group: "ProcessGroup | None",
    workspace_bytes: int | None,
    backend: str,
) -> Call:
    """The op's arguments from those of the public functions."""
    check_float("hidden", hidden)
    check_weight(weight)
    check_int64("target", target)
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden must be [..., H] with H = {weight.shape[1]} as in weight, got {list(hidden.shape)}")
    check_shape("target", target, hidden.shape[:-1], "the shape of hidden without its last dimension")
    if bias is not None:
        check_float("bias", bias)
        _refuse_shard("bias", bias, empty=bias.numel() == 0)
        check_shape("bias", bias, (weight.shape[0],), "[V]")
    if softcap is not None:
        check_positive("softcap", softcap)
    if lora is not None:
        check_lora(lora, weight)
    if workspace_bytes is not None:
        check_count("workspace_bytes", workspace_bytes)
    check_number("logit_scale", logit_scale)
    if bias is not None:
        check_removed(bias, logit_scale)
    check_count("ignore_index", ignore_index, at_least=None)
    others = {"weight": weight, "target": target, "bias": bias, "temperature": temperature}
    if lora is not None:
        others |= {"lora A": lora[0], "lora B": lora[1]}
    check_devices("hidden", hidden.device, others)
    for name, value in {"hidden": hidden, **others}.items():
        if isinstance(value, Tensor):
            _refuse_shard(name, value)
    check_transforms("linear_logprob", (hidden, weight, bias, *(lora or ())[:2]))
    return Call(
        hidden,
        weight,
        target,
        bias,
        _temperature(temperature, target),
        None if softcap is None else float(softcap),
        float(logit_scale),
        None if lora is None else lora[0],
        None if lora is None else lora[1],
        1.0 if lora is None else float(lora[2]),
        ignore_index,
        product_dtype(hidden, weight),
        default_workspace(hidden.device) if workspace_bytes is None else workspace_bytes,
        use_triton(backend, weight if weight.dtype == torch.float64 else hidden),
        _group_name(process_group),
    )


def check_weight(weight: Tensor) -> None:
    """Refuses all but a whole `[V, H]` matrix of floats."""
    check_float("weight", weight)
    _refuse_shard("weight", weight, empty=weight.shape[:1].numel() == 0)
    if weight.dim() != 2:
        raise ValueError(f"weight must be [V, H], got {list(weight.shape)}; pass the head's matrix, one row per token")


def check_lora(lora: tuple[Tensor, Tensor, float], weight: Tensor) -> None:
    """Refuses all but (A `[r, H]`, B `[V, r]`, scaling)."""
    parts: object = lora
    if not isinstance(parts, (tuple, list)) or len(parts) != 3:
        form = f"{len(parts)} values" if isinstance(parts, (tuple, list)) else type(parts).__name__
        raise TypeError(f"lora must be the three values (A [r, H], B [V, r], scaling), got {form}")
    lora_a, lora_b, scaling = lora
    for name, tensor in (("lora A", lora_a), ("lora B", lora_b)):
        check_float(name, tensor)
        _refuse_shard(name, tensor, empty=tensor.dim() == 1 and tensor.numel() == 0)
    check_shape("lora A", lora_a, (*lora_a.shape[:1], weight.shape[1]), "[r, H]")
    check_shape("lora B", lora_b, (weight.shape[0], lora_a.shape[0]), "[V, r]")
    check_number("lora scaling", scaling)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The wider of the two dtypes; under autocast its dtype, unless an input is float64."""
    wider = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    # torch 2.11 does not trace `is_autocast_available`
    if wider != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return wider


def _refuse_shard(name: str, tensor: Tensor, empty: bool = False) -> None:
    """Refuses a DTensor, and what is left of a parameter whose values are on other ranks."""
    sharded, variable = hasattr(tensor, "full_tensor"), name.split()[-1]
    if sharded or empty:
        kind = "a DTensor" if sharded else f"an empty shard of shape {list(tensor.shape)}"
        raise ValueError(
            f"{name} is {kind}, expected the whole tensor; gather it first: {variable}.full_tensor() (FSDP2, tensor "
            "parallelism; a trained one under FSDP2 with grad_placements=[Partial('avg')], or in the forward of its "
            f"FSDP module), FSDP.summon_full_params (FSDP1), or deepspeed.zero.GatheredParameters([{variable}]) "
            "(ZeRO-3). For a vocabulary split over ranks pass each rank's rows and process_group"
        )


def _temperature(temperature: float | Tensor, target: Tensor) -> Tensor:
    if not isinstance(temperature, Tensor):
        check_positive("temperature", temperature)
        return torch.ones((), dtype=torch.float64, device="cpu") * temperature  # whatever the default device is
    check_float("temperature", temperature)
    check_shape("temperature", temperature, target.shape, "one per token, like target")
    if temperature.requires_grad:
        raise ValueError(
            "temperature requires a gradient, and these ops compute none for it; pass temperature.detach()"
        )
    return temperature if temperature.dim() else temperature[None]


def _group_name(process_group: "ProcessGroup | None") -> str:
    if process_group is None:
        return ""
    if not hasattr(process_group, "group_name"):
        raise TypeError(
            "process_group must be a ProcessGroup that this rank belongs to (mesh.get_group() of a DeviceMesh), "
            f"got {type(process_group).__name__}"
        )
    return process_group.group_name
