"""Policy losses straight from hidden states, with gradients formed in the forward.

Frozen head: the gradient of a log-prob to its hidden state is

    d logprob / d hidden = (logit_scale / temperature) (c_y (1 - p_y) w_y - sum_{v != y} p_v c_v w_v)

with w_v the head's rows, c_v = 1 - tanh^2 the cap's derivative (1 without a cap), p = softmax(z). Its sum runs along
with the log-sum-exp, so one sweep gives both: 4 N H V flops instead of 6, and a backward that only scales rows. What
upstream gradient the loss sends is not needed for it.

Trained head: `_linear_formed` forms each block's gradients as soon as its log-probs are known, 6 N H V instead of 8.
On the Triton backend a block's logits wait in either case (`_linear_kept`).

Legend: N rows (tokens), n live rows, R rows of a block, B completions, L padded length, T packed tokens, H hidden size,
V vocabulary, r LoRA rank.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._checks import check_choice, check_devices, check_float, check_int64, check_shape
from .._token_layout import compute_dtype, token_layout
from ..policy_loss import Objective, PolicyLoss, check_preference_weights, policy_loss, resolve_objective
from ..preference_loss import sequence_logprob
from .backward import Wanted
from .forward_gradients import FormedLoss, FormedSweep, default_room, refuse_double_backward
from .head import Head, Ranges, RowBlock, Rows, add_product, exact_products, gather_rows
from .op import CALL_SCHEMA, Call, call_of, linear_logprob, linear_logprob_entropy, live_rows
from .torch_backend import RowStats, SlopeStats, Tiles, fold_slope, owners

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .triton_forward_gradients import KeptSweep


# ---- log-prob and its slope in one sweep ---------------------------------------------------------------------------


def _block_slope(head: Head, tiles: Tiles, ranges: Ranges, block: RowBlock) -> tuple[RowStats, Tensor]:
    """Statistics and d logprob / d hidden of a block's rows, without the factor logit_scale / temperature."""
    folded = SlopeStats.empty(block, head.accumulate)
    stats = folded.stats
    others = torch.zeros(block.hidden.shape, dtype=head.accumulate, device=block.hidden.device)
    others_b = torch.zeros_like(block.low_rank)
    for (start, stop), owned in zip(ranges.columns, owners(block.target, ranges.columns), strict=True):
        weight = head.operands(head.weight[start:stop])
        tile = tiles.tile(block, start, stop)
        tiles.logits(block, weight, start, stop, tile)
        before = stats.shift.clone()
        fold_slope(tiles, block, tile, stop - start, owned, folded)
        fade = torch.exp(before - stats.shift)[:, None]
        exps = tile[:, : stop - start].to(head.operand)
        add_product(others.mul_(fade), exps, weight)
        if head.lora:
            add_product(others_b.mul_(fade), exps, head.operands(head.lora.b[start:stop]))
    real = slice(0, block.positions.shape[0])
    stats = stats.of(real)
    own = (-torch.expm1(stats.picked - stats.shift - stats.total.log()) * folded.cap_slope[real])[:, None]
    chosen = block.target[real]
    pull = own * gather_rows(head.weight, chosen) - others[real] / stats.total[:, None]
    if head.lora:
        low_rank = own * gather_rows(head.lora.b, chosen) - others_b[real] / stats.total[:, None]
        add_product(pull, low_rank.mul_(head.lora.scaling), head.lora.a.to(head.accumulate))
    return stats, pull


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """logprob `[...]` and its gradient to hidden `[..., H]`, both 0 where ignored."""
    call = Call(*arguments)
    head, index, temperature = call.head, live_rows(call, call.weight.shape[0]), call.row_temperature
    live = Rows(call.hidden, call.target, temperature, index)
    logprob = torch.zeros(call.target.numel(), dtype=head.accumulate, device=call.hidden.device)
    if call.triton:
        from .triton_forward_gradients import kept_slope

        with exact_products(call.hidden.device):
            logprob[index], slope = kept_slope(head, live, call.workspace)
        return logprob.view(call.target.shape), slope
    ranges = Ranges.of(head, call.workspace, index.shape[0])
    tiles = Tiles(head, ranges)
    slope = logprob.new_zeros(call.target.numel(), call.hidden.shape[-1])
    with exact_products(call.hidden.device):
        for first, last in ranges.rows:
            rows = index[first:last]
            stats, pull = _block_slope(head, tiles, ranges, live.block(head, first, last))
            logprob[rows] = stats.picked - stats.shift - stats.total.log()
            heat = temperature.reshape(-1)[rows, None] if isinstance(temperature, Tensor) else temperature
            slope[rows] = pull.mul_(head.logit_scale / heat)
    return logprob.view(call.target.shape), slope.view(call.hidden.shape)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = Call(*arguments)
    dtype = call.head.accumulate
    return call.hidden.new_empty(call.target.shape, dtype=dtype), call.hidden.new_empty(call.hidden.shape, dtype=dtype)


def _backward(grad: Tensor, slope: Tensor, dtype: torch.dtype) -> Tensor:
    return (grad[..., None] * slope).to(dtype)


def _fake_backward(grad: Tensor, slope: Tensor, dtype: torch.dtype) -> Tensor:
    return slope.new_empty(slope.shape, dtype=dtype)


_logprob_slope = torch.library.custom_op(
    "amir_kernels::linear_logprob_slope", _forward, mutates_args=(), schema=f"({CALL_SCHEMA}) -> (Tensor, Tensor)"
)
_logprob_slope.register_fake(_fake_forward)
_scale_slope = torch.library.custom_op(
    "amir_kernels::linear_logprob_slope_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor slope, ScalarType dtype) -> Tensor",
)
_scale_slope.register_fake(_fake_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # no zeros [..., H] for the slope, which has no gradient
    ctx.save_for_backward(output[1])
    ctx.dtype = inputs[0].dtype


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    (slope,) = ctx.saved_tensors
    grad_hidden = None if grad is None else _scale_slope(grad, slope, ctx.dtype)
    return grad_hidden, *[None] * (len(Call._fields) - 1)


_logprob_slope.register_autograd(_differentiate, setup_context=_save)
_scale_slope.register_autograd(refuse_double_backward)


# ---- the public function -------------------------------------------------------------------------------------------


def _refuse_sequence_level(objective: Objective) -> None:
    if objective.ratio_level in ("sequence", "sequence_token"):
        raise ValueError(
            f"linear_policy_loss takes losses local to a token; ratio_level={objective.ratio_level!r} "
            f"(surrogate={objective.surrogate!r}) needs whole sequences: use linear_logprob, then policy_loss"
        )


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    objective: str | Objective = "grpo",
    importance_weight: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    preference_weights: Tensor | None = None,
    normalize: str = "mean",
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: tuple[Tensor, Tensor, float] | None = None,
    ignore_index: int = -100,
    process_group: "ProcessGroup | None" = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> PolicyLoss:
    """`policy_loss` of the head's log-probs, for objectives local to a token; others are refused by name.

    Args:
        hidden: `[B, L, H]`, or packed `[T, H]` with `cu_seqlens`; `target` int64 `[B, L]` or `[T]`.
        mask: like `target`; tokens it leaves out, and those whose target is `ignore_index`, cost no head work.
        preference_weights: `[B]`, adds `sum(preference_weights * sequence_logprob(logprobs, normalize=normalize))`, the
            pair term's exact gradient where they are lambda_reg times what `preference_weights` returned. No gradient.
        normalize: "mean" or "sum" over a sequence's tokens, for `preference_weights`.
        old_logprobs, advantages, cu_seqlens, ref_logprobs, objective, importance_weight, num_tokens, num_sequences: as
            in `policy_loss`. The entropy is measured where the objective has an `entropy_coef`.
        weight, bias, temperature, softcap, logit_scale, lora, ignore_index, process_group, workspace_bytes, backend: as
            in `linear_logprob_entropy`; so are dtypes, numerics and which inputs get gradients.

    Without process group and entropy bonus gradients are formed in the forward, and tokens whose gradient is known to
    be 0 (advantage 0, no KL, no preference weight) cost 2 N H V flops. Where only hidden needs a gradient (frozen
    head), the others cost 4 N H V, and one float32 `[..., H]` tensor is kept for the backward. Where float32 parameters
    of the head need one they cost 6 N H V; the gradients wait for a backward that can run once, and torch.compile does
    not trace this form, and `workspace_bytes` is by default 176 MiB on a CPU, since a row block's logits wait in it (at
    least 16 rows of them, whatever it is); those of the first H tokens wait in the weight's gradient and need no room.
    On the Triton backend the logits wait in the workspace with a frozen head too, of all tokens: it must hold those of
    256 rows, 4 bytes each, of 1,024 where the weight needs a gradient or is of another dtype than the products, of 128
    where these are float32; with 16-bit products H must be 1,024 or more (`_linear_kept` says why), and float16
    products form no gradients of a trained head. Otherwise this is `linear_logprob` and `policy_loss`: 6 N H V, 8 with
    a trained head. Log-probs are the same bits in every form.
    """
    chosen = resolve_objective(objective)
    _refuse_sequence_level(chosen)
    check_choice("normalize", normalize, ("mean", "sum"))
    check_float("hidden", hidden)
    check_int64("target", target)
    check_shape("target", target, hidden.shape[:-1], "hidden's without its last dimension")
    check_devices("hidden", hidden.device, {"target": target})
    layout = token_layout(hidden.new_empty(target.shape), mask, cu_seqlens)
    if preference_weights is not None:
        check_preference_weights(preference_weights, layout.rows, hidden.device)
    counted = torch.where(layout.keep, target, ignore_index)
    kept = counted != ignore_index
    options: dict[str, Any] = {
        "bias": bias,
        "temperature": temperature,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "lora": lora,
        "ignore_index": ignore_index,
        "process_group": process_group,
        "workspace_bytes": workspace_bytes,
        "backend": backend,
    }

    def loss_of(logprob: Tensor, entropy: Tensor | None = None) -> PolicyLoss:
        loss, metrics = policy_loss(
            logprob,
            old_logprobs,
            advantages,
            kept,
            cu_seqlens=cu_seqlens,
            ref_logprobs=ref_logprobs,
            objective=chosen,
            importance_weight=importance_weight,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            entropy=entropy,
        )
        if preference_weights is not None:
            scores = sequence_logprob(logprob, kept, cu_seqlens=cu_seqlens, normalize=normalize)
            loss = loss + (preference_weights.detach() * scores).sum()
        return PolicyLoss(loss, metrics)

    if chosen.entropy_coef:
        result = linear_logprob_entropy(hidden, weight, counted, **options)
        return loss_of(result.logprob, result.entropy)
    call = call_of(hidden, weight, counted, **options)
    room = default_room(hidden.device) if workspace_bytes is None else workspace_bytes
    form = _form(call, room)
    if form == "two passes":
        return loss_of(linear_logprob(hidden, weight, counted, **options))
    moving = kept
    if not (chosen.kl_coef or chosen.mirror_coef):
        check_float("advantages", advantages)
        moving = layout.per_token("advantages", advantages, compute_dtype(advantages)) != 0
        if preference_weights is not None:
            moving = moving | layout.spread(preference_weights != 0)
    with torch.no_grad():
        still = linear_logprob(hidden, weight, torch.where(moving, ignore_index, counted), **options)
    call = call._replace(target=torch.where(moving, counted, ignore_index))
    if form == "slope":
        return loss_of(_logprob_slope(*call)[0] + still)
    return _formed_loss(call, room, still, loss_of)


def _form(call: Call, room: int) -> str:
    """How the gradients come about: "slope" and "formed" in the forward, or "two passes"."""
    trained = [tensor for tensor in call.differentiable[1:] if tensor is not None and tensor.requires_grad]
    if call.group or not torch.is_grad_enabled() or not (trained or call.hidden.requires_grad):
        return "two passes"
    if not trained:
        return "slope" if not call.triton or _keeps(call, call.workspace) else "two passes"
    exact = all(tensor.dtype == call.head.accumulate for tensor in trained)
    # float16 dlogits need their units before any slope of the loss is known
    fits = not call.triton or (call.compute != torch.float16 and _keeps(call, room))
    return "formed" if exact and fits and not torch.compiler.is_compiling() else "two passes"


def _keeps(call: Call, room: int) -> bool:
    """Whether the Triton backend keeps a row block's logits."""
    from .triton_forward_gradients import kept_rows

    return kept_rows(call.head, call.workspace, room, call.weight.requires_grad) > 0


def _sweep_of(call: Call) -> "type[FormedSweep | KeptSweep]":
    if not call.triton:
        return FormedSweep
    from .triton_forward_gradients import KeptSweep

    return KeptSweep


def _formed_loss(call: Call, room: int, still: Tensor, loss_of: Callable[[Tensor], PolicyLoss]) -> PolicyLoss:
    """The loss with the gradients of a trained head, formed block by block; `still` has the other tokens' log-probs."""

    def loss_slope(positions: Tensor, logprob: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = still.reshape(-1).index_copy(0, positions, logprob).requires_grad_()
            (grad,) = torch.autograd.grad(loss_of(leaf.view(still.shape)).loss, leaf)
        return grad[positions]

    leaves = call.differentiable
    wanted = Wanted(*(tensor is not None and tensor.requires_grad for tensor in leaves))
    with torch.no_grad(), exact_products(call.hidden.device):
        index = live_rows(call, call.weight.shape[0])
        rows = Rows(call.hidden, call.target, call.row_temperature, index)
        sweep = _sweep_of(call)(call.head, rows, wanted, call.workspace, room, loss_slope)
        grads = sweep.run()
        loss, metrics = loss_of(still.reshape(-1).index_copy(0, index, sweep.logprob).view(still.shape))
    return PolicyLoss(FormedLoss.apply(loss, grads, *leaves), metrics)
