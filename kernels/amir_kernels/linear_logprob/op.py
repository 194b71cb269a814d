"""Per-token log-probability, entropy and log-sum-exp of a language model's head, without its logits.

    s = logit_scale * (hidden @ weight.T + bias)      the head, plus scaling * (hidden @ a.T) @ b.T with LoRA
    z = softcap * tanh(s / softcap) / temperature     or s / temperature
    logprob = z[target] - lse,  lse = log sum_v e^z_v,  entropy = lse - sum_v softmax(z)_v z_v

The vocabulary is swept in tiles, forward and again in the backward; no `[N, V]` tensor exists.

Legend: N rows (tokens), H hidden size, V vocabulary, r LoRA rank. `[...]` is any shape, the same throughout a call.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._backend import use_triton
from .._checks import (
    check_count,
    check_devices,
    check_flag,
    check_float,
    check_int64,
    check_number,
    check_positive,
    check_shape,
)
from .backward import Wanted, head_grads, row_slopes
from .head import Head, Lora, Rows, default_workspace, exact_products, scratch_bytes
from .torch_backend import row_stats, torch_dlogits
from .vocabulary_shard import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LogprobEntropy(NamedTuple):
    """What `linear_logprob_entropy` returns, each shaped like `target`, in nats."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor


# ---- the op --------------------------------------------------------------------------------------------------------

CALL_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor temperature, "
    "float? softcap, float logit_scale, Tensor? lora_a, Tensor? lora_b, float lora_scaling, int ignore_index, "
    "ScalarType compute, int workspace, bool triton, str group"
)


class Call(NamedTuple):
    """The arguments of `CALL_SCHEMA`, which the forward and the backward op share."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    temperature: Tensor
    """one per row, or 0-d for all: a number would make torch.compile specialize on each value"""
    softcap: float | None
    logit_scale: float
    lora_a: Tensor | None
    lora_b: Tensor | None
    lora_scaling: float
    ignore_index: int
    compute: torch.dtype
    """of the products' inputs"""
    workspace: int
    triton: bool
    group: str
    """name of the process group that the vocabulary is split over; empty: not split"""

    @property
    def shard(self) -> Shard:
        return Shard.of(self.group, self.weight)

    @property
    def head(self) -> Head:
        lora = None
        if self.lora_a is not None and self.lora_b is not None:
            lora = Lora(self.lora_a, self.lora_b, self.lora_scaling)
        return Head(self.weight, self.bias, lora, self.softcap, self.logit_scale, self.compute)

    @property
    def row_temperature(self) -> Tensor | float:
        return self.temperature if self.temperature.dim() else self.temperature.item()

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """In the order of `Wanted`."""
        return self.hidden, self.weight, self.bias, self.lora_a, self.lora_b


def live_rows(call: Call, vocabulary: int) -> Tensor:
    """Flat positions of the rows that count; refuses targets outside the vocabulary. Waits for the device."""
    target = call.target
    live = target != call.ignore_index
    outside = live & ((target < 0) | (target >= vocabulary))
    heat = call.temperature
    cold = live & ~((heat > 0) & (heat < math.inf)) if heat.dim() else torch.zeros_like(live)
    if (outside | cold).any():
        if outside.any():
            name, values, bad = "target", target, outside
            expected = f"lie in [0, {vocabulary}) or be ignore_index={call.ignore_index}"
        else:
            name, values, bad, expected = "temperature", heat, cold, "be finite and positive"
        position = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name} must {expected}, got {values[position].item()} at position {list(position)}")
    return live.reshape(-1).nonzero()[:, 0]


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logprob, entropy, lse, m, S), each shaped like `target`; entropy has no elements unless asked for."""
    call, with_entropy = Call(*arguments[:-1]), arguments[-1]
    head, shard = call.head, call.shard
    index, target = live_rows(call, shard.vocabulary), shard.local(call.target)
    statistics = row_stats
    if call.triton:
        from .triton_backend import triton_row_stats as statistics
    with exact_products(target.device):
        rows = Rows(call.hidden, target, call.row_temperature, index)
        stats = shard.merge(statistics(head, rows, call.workspace, with_entropy))
    log_total = stats.total.log()
    logprob = stats.picked - stats.shift - log_total
    entropy = None if stats.weighted is None else log_total - stats.weighted / stats.total

    def spread(values: Tensor | None, fill: float = 0.0) -> Tensor:
        if values is None:
            return log_total.new_empty(0)
        out = values.new_full((target.numel(),), fill)
        out[index] = values
        return out.view(target.shape)

    lse = stats.shift + log_total
    return spread(logprob), spread(entropy), spread(lse), spread(stats.shift), spread(stats.total, 1.0)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call, with_entropy = Call(*arguments[:-1]), arguments[-1]
    logprob, entropy, lse, shift, total = (
        call.hidden.new_empty(call.target.shape, dtype=call.head.accumulate) for _ in range(5)
    )
    return logprob, entropy if with_entropy else entropy.new_empty(0), lse, shift, total


def _backward(
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    shift: Tensor,
    total: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    """The wanted gradients, in the order of `Wanted`, from the rows with an upstream gradient that is not exactly 0."""
    call, wanted = Call(*arguments[:-1]), Wanted(*arguments[-1])
    head, shard = call.head, call.shard
    live = torch.zeros_like(call.target, dtype=torch.bool)
    for upstream in (grad_logprob, grad_entropy, grad_lse):
        if upstream is not None:
            live |= upstream != 0
    index = (live & (call.target != call.ignore_index)).reshape(-1).nonzero()[:, 0]

    def take(values: Tensor) -> Tensor:
        return values.reshape(-1)[index].to(head.accumulate)

    slopes = row_slopes(
        head,
        take(call.temperature) if call.temperature.dim() else call.row_temperature,
        take(logprob),
        take(shift),
        take(total),
        None if grad_entropy is None else take(entropy),
        take(grad_logprob),
        None if grad_entropy is None else take(grad_entropy),
        None if grad_lse is None else take(grad_lse),
    )
    half_tiles, make_form = call.compute == torch.float16 and call.hidden.is_cuda, torch_dlogits
    if call.triton:
        from .triton_backend import triton_dlogits

        half_tiles, make_form = call.compute == torch.float16, triton_dlogits
    with exact_products(call.target.device):
        grads = head_grads(
            head,
            Rows(call.hidden, shard.local(call.target), call.row_temperature, index),
            slopes,
            wanted,
            call.workspace,
            make_form,
            half_tiles,
            partial=shard.group is not None,
        )
    dtypes = [tensor.dtype if tensor is not None else head.accumulate for tensor in call.differentiable]
    hidden, lora_a = shard.sum(grads.hidden, dtypes[0]), shard.sum(grads.lora_a, dtypes[3])
    grads = grads._replace(hidden=hidden, lora_a=lora_a)
    return [grad for grad in grads if grad is not None]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    call, wanted = Call(*arguments[7:-1]), arguments[-1]
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor, want in zip(call.differentiable, wanted, strict=True)
        if want and tensor is not None
    ]


_linear_logprob = torch.library.custom_op(
    "amir_kernels::linear_logprob",
    _forward,
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, bool with_entropy) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_linear_logprob.register_fake(_fake_forward)

_linear_logprob_backward = torch.library.custom_op(
    "amir_kernels::linear_logprob_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad_logprob, Tensor? grad_entropy, Tensor? grad_lse, Tensor logprob, Tensor entropy, "
    f"Tensor shift, Tensor total, {CALL_SCHEMA}, bool[] wanted) -> Tensor[]",
)
_linear_logprob_backward.register_fake(_fake_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps the inputs and three or four numbers per row."""
    call = Call(*inputs[:-1])
    logprob, entropy, _, shift, total = output
    tensors = {name: value for name, value in call._asdict().items() if isinstance(value, Tensor)}
    ctx.set_materialize_grads(False)
    ctx.with_entropy = inputs[-1]
    ctx.saved_names = tuple(tensors)
    ctx.scalars = {name: value for name, value in call._asdict().items() if name not in tensors}
    ctx.save_for_backward(logprob, entropy, shift, total, *tensors.values())


def _differentiate(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    stats, tensors = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
    call = Call(**dict(zip(ctx.saved_names, tensors, strict=True)), **ctx.scalars)
    needed = dict(zip(Call._fields, ctx.needs_input_grad, strict=False))
    names = ("hidden", "weight", "bias", "lora_a", "lora_b")
    wanted = [needed[name] for name in names]
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(stats[0])
    if not ctx.with_entropy:
        grad_entropy = None
    grads = iter(_linear_logprob_backward(grad_logprob, grad_entropy, grad_lse, *stats, *call, wanted))
    given = {name: next(grads) for name, want in zip(names, wanted, strict=True) if want}
    return *(given.get(name) for name in Call._fields), None


def _refuse_double_backward(ctx: Any, *_: Any) -> None:
    raise RuntimeError("linear_logprob cannot be differentiated twice; amir_kernels.reference can")


_linear_logprob.register_autograd(_differentiate, setup_context=_save)
_linear_logprob_backward.register_autograd(_refuse_double_backward)


# ---- the public functions ------------------------------------------------------------------------------------------


def _refuse_shard(name: str, tensor: Tensor, empty: bool = False) -> None:
    """A DTensor, or what is left of a parameter whose values are on other ranks."""
    sharded, short = hasattr(tensor, "full_tensor"), name.split()[-1]
    if sharded or empty:
        what = "a DTensor" if sharded else f"an empty shard of shape {list(tensor.shape)}"
        raise ValueError(
            f"{name} is {what}; gather it first: {short}.full_tensor() (FSDP2, tensor parallel), "
            f"FSDP.summon_full_params (FSDP1), or deepspeed.zero.GatheredParameters([{short}]) (ZeRO-3). "
            "For a vocabulary split over ranks pass each rank's rows and process_group"
        )


def _check_weight(weight: Tensor) -> None:
    check_float("weight", weight)
    _refuse_shard("weight", weight, empty=weight.shape[:1].numel() == 0)
    if weight.dim() != 2:
        raise ValueError(f"weight must be [V, H], got {list(weight.shape)}")


def _check_lora(lora: tuple[Tensor, Tensor, float], weight: Tensor) -> None:
    parts: object = lora
    if not isinstance(parts, (tuple, list)) or len(parts) != 3:
        got = f"{len(parts)} of them" if isinstance(parts, (tuple, list)) else type(parts).__name__
        raise TypeError(f"lora must be (A [r, H], B [V, r], scaling), got {got}")
    lora_a, lora_b, scaling = lora
    for name, tensor in (("lora A", lora_a), ("lora B", lora_b)):
        check_float(name, tensor)
        _refuse_shard(name, tensor, empty=tensor.dim() == 1 and tensor.numel() == 0)
    check_shape("lora A", lora_a, (*lora_a.shape[:1], weight.shape[1]), "[r, H]")
    check_shape("lora B", lora_b, (weight.shape[0], lora_a.shape[0]), "[V, r]")
    check_number("lora scaling", scaling)


def _refuse_forward_mode(tensors: tuple[Tensor | None, ...]) -> None:
    """torch would take the results for constants."""
    for tensor in () if torch.compiler.is_compiling() else tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "linear_logprob and linear_policy_loss have no forward-mode derivatives; amir_kernels.reference has"
            )


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The wider of the two dtypes; under autocast its dtype, unless an input is float64."""
    wider = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    # torch 2.11 does not trace `is_autocast_available`
    if wider != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return wider


def _temperature(temperature: float | Tensor, target: Tensor) -> Tensor:
    if not isinstance(temperature, Tensor):
        check_positive("temperature", temperature)
        return torch.ones((), dtype=torch.float64, device="cpu") * temperature  # whatever the default device is
    check_float("temperature", temperature)
    check_shape("temperature", temperature, target.shape, "one per token, like target")
    if temperature.requires_grad:
        raise ValueError("temperature gets no gradient; pass temperature.detach()")
    return temperature if temperature.dim() else temperature[None]


def _group_name(process_group: "ProcessGroup | None") -> str:
    if process_group is None:
        return ""
    if not hasattr(process_group, "group_name"):
        raise TypeError(
            "process_group must be a ProcessGroup that this rank is in (mesh.get_group() of a DeviceMesh), "
            f"got {type(process_group).__name__}"
        )
    return process_group.group_name


def call_of(
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
    """The op's arguments from those of the public functions, checked."""
    check_float("hidden", hidden)
    _check_weight(weight)
    check_int64("target", target)
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden must be [..., H] with H = {weight.shape[1]} as in weight, got {list(hidden.shape)}")
    check_shape("target", target, hidden.shape[:-1], "hidden's without its last dimension")
    if bias is not None:
        check_float("bias", bias)
        _refuse_shard("bias", bias, empty=bias.numel() == 0)
        check_shape("bias", bias, (weight.shape[0],), "[V]")
    if softcap is not None:
        check_positive("softcap", softcap)
    if lora is not None:
        _check_lora(lora, weight)
    if workspace_bytes is not None:
        check_count("workspace_bytes", workspace_bytes)
    check_number("logit_scale", logit_scale)
    check_count("ignore_index", ignore_index, at_least=None)
    others = {"weight": weight, "target": target, "bias": bias, "temperature": temperature}
    if lora is not None:
        others |= {"lora A": lora[0], "lora B": lora[1]}
    check_devices("hidden", hidden.device, others)
    for name, value in {"hidden": hidden, **others}.items():
        if isinstance(value, Tensor):
            _refuse_shard(name, value)
    _refuse_forward_mode((hidden, weight, bias, *(lora or ())[:2]))
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
        _product_dtype(hidden, weight),
        default_workspace(hidden.device) if workspace_bytes is None else workspace_bytes,
        use_triton(backend, weight if weight.dtype == torch.float64 else hidden),
        _group_name(process_group),
    )


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: tuple[Tensor, Tensor, float] | None = None,
    ignore_index: int = -100,
    process_group: "ProcessGroup | None" = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Log-probability of each target token, `[...]` in nats: `linear_logprob_entropy` without its other two results."""
    call = call_of(
        hidden,
        weight,
        target,
        bias,
        temperature,
        softcap,
        logit_scale,
        lora,
        ignore_index,
        process_group,
        workspace_bytes,
        backend,
    )
    return _linear_logprob(*call, False)[0]


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: tuple[Tensor, Tensor, float] | None = None,
    ignore_index: int = -100,
    process_group: "ProcessGroup | None" = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
    entropy_grad: bool = True,
) -> LogprobEntropy:
    """log_softmax(z)[target], the entropy of softmax(z) and logsumexp(z), `[...]` each, in nats (z: see the module).

    Args:
        hidden: `[..., H]`, any strides; float16, bfloat16, float32 or float64, like every float argument.
        weight: `[V, H]`. A DTensor or an empty shard is refused: gather it.
        target: int64 `[...]`. `ignore_index` gives 0 in all results, zero gradients and costs no head work; what hidden
            holds there does not matter. Any other value outside [0, V): ValueError with the value and its position.
        bias: `[V]`; -inf removes a token.
        temperature: a positive number, or one per token `[...]`; gets no gradient.
        softcap: c > 0 in c * tanh(s / c), before the temperature.
        logit_scale: factor on the logits, before the cap.
        lora: (A `[r, H]`, B `[V, r]`, scaling): adds scaling * B @ A to the head without forming it.
        process_group: the vocabulary is split over its ranks, each passing its own consecutive rows of weight, bias and
            B, and the same hidden, A and (global) target. Results, and the gradients of hidden and A, are global;
            every rank must see the same upstream gradients. Those two gradients are summed in float32 over the ranks.
        workspace_bytes: bound on scratch beyond inputs, returned gradients and O(N) numbers; one 16 x 16 tile is used
            in any case. Default 20 MiB on a CPU, 256 MiB on a GPU.
        backend: "auto", "triton" or "torch".
        entropy_grad: False treats the entropy as a constant.

    Products take their inputs in the wider of the two dtypes (under autocast in its dtype) and sum in float32; float32
    products are true float32 whatever `torch.set_float32_matmul_precision` says. Logits, sums and results are float32
    (float64 where hidden or weight is). Gradients are summed in float32 and returned in each input's dtype. They go to
    hidden, weight, bias, A and B, each computed only if required; rows whose upstream gradients are all exactly zero
    are left out. Double backward and forward mode are refused. Kept for backward: the inputs, and 12 bytes per row (16
    with entropy).

    On one device, backend, thread count and workspace a row's results are the same bits whatever the other rows, its
    position, the padding, the grad mode, and whether `linear_logprob`, `linear_policy_loss` or this function computed
    it. (With backend="torch" on a GPU only as far as the vendor's products do not depend on the number of rows.)
    """
    check_flag("entropy_grad", entropy_grad)
    call = call_of(
        hidden,
        weight,
        target,
        bias,
        temperature,
        softcap,
        logit_scale,
        lora,
        ignore_index,
        process_group,
        workspace_bytes,
        backend,
    )
    result = LogprobEntropy(*_linear_logprob(*call, True)[:3])
    return result if entropy_grad else result._replace(entropy=result.entropy.detach())


def workspace_of(
    hidden: Tensor,
    weight: Tensor,
    *,
    lora: tuple[Tensor, Tensor, float] | None = None,
    workspace_bytes: int | None = None,
) -> int:
    """Bound in bytes on the scratch of a call with these tensors (meta and fake ones will do), forward or backward.

    Scratch is what a call allocates beyond its inputs, its results, the gradients it returns and O(N) numbers. With
    `process_group`, the gradient of hidden is summed in float32: 4 N H bytes more where hidden has 16 bits.
    `linear_policy_loss` uses the same; where logits wait (a trained head, Triton) up to its own `workspace_bytes`.
    """
    check_float("hidden", hidden)
    _check_weight(weight)
    if lora is not None:
        _check_lora(lora, weight)
    if workspace_bytes is not None:
        check_count("workspace_bytes", workspace_bytes)
    pair = None if lora is None else Lora(*lora)
    head = Head(weight, None, pair, None, 1.0, _product_dtype(hidden, weight))
    workspace = default_workspace(hidden.device) if workspace_bytes is None else workspace_bytes
    return scratch_bytes(head, hidden.shape[:-1].numel(), workspace)
