"""The op behind `linear_logprob` and `linear_logprob_entropy`: its schema, forward, backward and autograd.

The forward sweeps the vocabulary tile by tile and keeps a few statistics of each row; the backward recomputes each tile
of logits. `torch_backend` and `triton_backend` compute the tiles, `backward` turns them into gradients.

Legend: N rows (tokens), n selected rows, H hidden size, V vocabulary, r LoRA rank. `[...]` is the shape of `target`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._backend import refuse_capture
from .._checks import check_batched_gradient
from .._double_backward import refuse_double_backward
from .backward import head_grads, row_coefficients
from .head import Head, Lora, PerInput, exact_products
from .rows import RowSelection
from .torch_backend import torch_dlogits, torch_row_stats
from .vocabulary_shard import VocabularyShard

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
    """dtype of the products' inputs"""
    workspace: int
    """bytes"""
    triton: bool
    group: str
    """name of the process group that the vocabulary is split over; empty: not split"""

    @property
    def shard(self) -> VocabularyShard:
        """This rank's part of the vocabulary."""
        return VocabularyShard.of(self.group, self.weight)

    @property
    def head(self) -> Head:
        """The head's tensors and options."""
        lora = None
        if self.lora_a is not None and self.lora_b is not None:
            lora = Lora(self.lora_a, self.lora_b, self.lora_scaling)
        return Head(self.weight, self.bias, lora, self.softcap, self.logit_scale, self.compute)

    @property
    def row_temperature(self) -> Tensor | float:
        """One temperature per row, or one number for all."""
        return self.temperature if self.temperature.dim() else self.temperature.item()

    @property
    def differentiable(self) -> PerInput[Tensor | None]:
        """The inputs that can get a gradient."""
        return PerInput(self.hidden, self.weight, self.bias, self.lora_a, self.lora_b)


def select_rows(call: Call, vocabulary: int) -> Tensor:
    """Flat positions `[n]` of the rows that are not ignored.

    Refuses targets outside the vocabulary and temperatures that are not positive. Synchronizes the device.
    """
    target, temperature = call.target, call.temperature
    refuse_capture("linear_logprob", target)
    counted = target != call.ignore_index
    bad_target = counted & ((target < 0) | (target >= vocabulary))
    bad_temperature = torch.zeros_like(counted)
    if temperature.dim():
        bad_temperature = counted & ~((temperature > 0) & (temperature < math.inf))
    if (bad_target | bad_temperature).any():
        if bad_target.any():
            name, values, bad = "target", target, bad_target
            expected = f"lie in [0, {vocabulary}) or be ignore_index={call.ignore_index}"
        else:
            name, values, bad, expected = "temperature", temperature, bad_temperature, "be finite and positive"
        position = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name} must {expected}, got {values[position].item()} at position {list(position)}")
    return counted.reshape(-1).nonzero()[:, 0]


# ---- forward -------------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logprob, entropy, lse, m, S), each shaped like `target`; entropy has no elements unless it is requested."""
    call, with_entropy = Call(*arguments[:-1]), arguments[-1]
    head, shard = call.head, call.shard
    positions, target = select_rows(call, shard.vocabulary), shard.local(call.target)
    row_stats = torch_row_stats
    if call.triton:
        from .triton_backend import triton_row_stats as row_stats
    with exact_products(target.device):
        rows = RowSelection(call.hidden, target, call.row_temperature, positions)
        stats = shard.merge(row_stats(head, rows, call.workspace, with_entropy))
    log_total = stats.total.log()
    logprob = stats.target_logit - stats.shift - log_total
    entropy = None if stats.weighted is None else log_total - stats.weighted / stats.total

    def scatter(values: Tensor | None, fill: float = 0.0) -> Tensor:
        """Values of the selected rows as `[...]`, with `fill` for the other rows."""
        if values is None:
            return log_total.new_empty(0)
        out = values.new_full((target.numel(),), fill)
        out[positions] = values
        return out.view(target.shape)

    lse = stats.shift + log_total
    return scatter(logprob), scatter(entropy), scatter(lse), scatter(stats.shift), scatter(stats.total, 1.0)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call, with_entropy = Call(*arguments[:-1]), arguments[-1]
    logprob, entropy, lse, shift, total = (
        call.hidden.new_empty(call.target.shape, dtype=call.head.accumulate) for _ in range(5)
    )
    return logprob, entropy if with_entropy else entropy.new_empty(0), lse, shift, total


linear_logprob_op = torch.library.custom_op(
    "amir_kernels::linear_logprob",
    _forward,
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, bool with_entropy) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),  # it waits for values from the GPU
)
linear_logprob_op.register_fake(_fake_forward)


# ---- backward ------------------------------------------------------------------------------------------------------


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
    """The needed gradients, in the order of `PerInput`; rows whose upstream gradients are all exactly 0 are skipped."""
    call, needs_grad = Call(*arguments[:-1]), PerInput(*arguments[-1])
    head, shard = call.head, call.shard
    refuse_capture("The backward of linear_logprob", call.target)
    active = torch.zeros_like(call.target, dtype=torch.bool)
    for upstream in (grad_logprob, grad_entropy, grad_lse):
        if upstream is not None:
            active |= upstream != 0
    positions = (active & (call.target != call.ignore_index)).reshape(-1).nonzero()[:, 0]

    def gather(values: Tensor) -> Tensor:
        return values.reshape(-1)[positions].to(head.accumulate)

    coefficients = row_coefficients(
        head,
        gather(call.temperature) if call.temperature.dim() else call.row_temperature,
        gather(logprob),
        gather(shift),
        gather(total),
        None if grad_entropy is None else gather(entropy),
        gather(grad_logprob),
        None if grad_entropy is None else gather(grad_entropy),
        None if grad_lse is None else gather(grad_lse),
    )
    float16_dlogits, dlogits_former = head.operand == torch.float16, torch_dlogits
    if call.triton:
        from .triton_backend import triton_dlogits

        float16_dlogits, dlogits_former = call.compute == torch.float16, triton_dlogits
    with exact_products(call.target.device):
        grads = head_grads(
            head,
            RowSelection(call.hidden, shard.local(call.target), call.row_temperature, positions),
            coefficients,
            needs_grad,
            call.workspace,
            dlogits_former,
            float16_dlogits,
            partial=shard.group is not None,
        )
    dtypes = [tensor.dtype if tensor is not None else head.accumulate for tensor in call.differentiable]
    hidden, lora_a = shard.sum(grads.hidden, dtypes[0]), shard.sum(grads.lora_a, dtypes[3])
    grads = grads._replace(hidden=hidden, lora_a=lora_a)
    return [grad for grad in grads if grad is not None]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    call, needs_grad = Call(*arguments[7:-1]), arguments[-1]
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor, needed in zip(call.differentiable, needs_grad, strict=True)
        if needed and tensor is not None
    ]


_linear_logprob_backward_op = torch.library.custom_op(
    "amir_kernels::linear_logprob_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad_logprob, Tensor? grad_entropy, Tensor? grad_lse, Tensor logprob, Tensor entropy, "
    f"Tensor shift, Tensor total, {CALL_SCHEMA}, bool[] needs_grad) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_linear_logprob_backward_op.register_fake(_fake_backward)


# ---- autograd ------------------------------------------------------------------------------------------------------


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
    saved = ctx.saved_tensors  # read once: a checkpoint frees what it recomputed after the first reading
    stats, tensors = saved[:4], saved[4:]
    call = Call(**dict(zip(ctx.saved_names, tensors, strict=True)), **ctx.scalars)
    names = PerInput._fields
    needed = dict(zip(Call._fields, ctx.needs_input_grad, strict=False))
    needs_grad = [needed[name] for name in names]
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(stats[0])
    if not ctx.with_entropy:
        grad_entropy = None
    upstream = (grad_logprob, grad_entropy, grad_lse)
    check_batched_gradient("linear_logprob", upstream)
    with torch.no_grad():
        results = _linear_logprob_backward_op(*upstream, *stats, *call, needs_grad)
    grads = iter([refuse_double_backward("linear_logprob", grad, *upstream, *tensors) for grad in results])
    by_name = {name: next(grads) for name, needs in zip(names, needs_grad, strict=True) if needs}
    return *(by_name.get(name) for name in Call._fields), None


linear_logprob_op.register_autograd(_differentiate, setup_context=_save)
