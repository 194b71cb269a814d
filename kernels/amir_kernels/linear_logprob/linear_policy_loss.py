"""Policy losses straight from hidden states: `linear_logprob` and `policy_loss` in one, with fewer products.

For a loss that is local to a token the gradients can be formed in the forward, where the logits already are:
`forward_gradients.py` says how. This module decides when, leaves out the tokens whose gradient is known to be 0, and
otherwise composes the two ops.

Legend: N rows (tokens), B completions, L padded length, T packed tokens, H hidden size, V vocabulary, r LoRA rank.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .._checks import active_transforms, check_choice, check_devices, check_float, check_int64, check_shape
from .._token_layout import TokenLayout, compute_dtype, token_layout
from ..objective import Objective
from ..policy_loss import PolicyLoss, policy_loss, resolve_objective
from ..preference_loss import check_preference_weights
from ..sequence_logprob import sequence_logprob
from .arguments import checked_call
from .forward_gradients import (
    ForwardGradients,
    LossWithGradients,
    default_logits_workspace,
    logprob_with_hidden_grad_op,
)
from .head import PerInput, exact_products
from .op import Call, linear_logprob_op, select_rows
from .rows import RowSelection

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .triton_forward_gradients import TritonForwardGradients

LossFunction = Callable[..., PolicyLoss]
"""(log-probs like target, optionally entropies) -> the loss of the call"""


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
    """`policy_loss` of the head's log-probs, for objectives local to a token; other objectives are refused by name.

    Args:
        hidden: `[B, L, H]`, or packed `[T, H]` with `cu_seqlens`; `target` is int64 `[B, L]` or `[T]`.
        mask: like `target`; tokens that it leaves out, and those whose target is `ignore_index`, cost no head work.
        preference_weights: `[B]`, adds `sum(preference_weights * sequence_logprob(logprobs, normalize=normalize))`: the
            pair term's exact gradient if they are lambda_reg times the result of `preference_weights`. No gradient.
        normalize: "mean" or "sum" over a sequence's tokens, for `preference_weights`.
        old_logprobs, advantages, cu_seqlens, ref_logprobs, objective, importance_weight, num_tokens, num_sequences: as
            in `policy_loss`. The entropy is computed where the objective has an `entropy_coef`.
        weight, bias, temperature, softcap, logit_scale, lora, ignore_index, process_group, workspace_bytes, backend: as
            in `linear_logprob_entropy`; so are dtypes, numerics and which inputs get gradients.

    Without a process group and an entropy bonus the gradients are formed in the forward:

    - Tokens whose gradient is known to be 0 (advantage 0, no KL, no preference weight) cost 2 H V flops each.
    - Frozen head (only hidden needs a gradient): the others cost 4 H V flops, and one float32 `[..., H]` tensor is kept
      for the backward.
    - Trained head with float32 parameters: the others cost 6 H V flops. The gradients are kept for a backward that can
      run once; torch.compile does not trace this form. `workspace_bytes` is by default 176 MiB on a CPU, since it holds
      the logits of a row block, of at least 16 rows whatever it is. The logits of the first H tokens are stored in the
      weight's gradient and take no workspace.
    - On the Triton backend the workspace holds the logits of a row block for a frozen head too. It must hold those of
      256 rows, 4 bytes each; of 1,024 rows where the weight needs a gradient or has another dtype than the products; of
      128 rows where the products are float32. With 16-bit products H must be 1,024 or more
      (`triton_forward_gradients.py` has the reasons), and float16 products form no gradients of a trained head.

    Otherwise this is `linear_logprob` and `policy_loss`: 6 H V flops a token, 8 with a trained head. Log-probs are the
    same bits in every form. Double backward and forward mode are refused. Raises what those two functions raise.
    """
    chosen = resolve_objective(objective)
    _refuse_sequence_level(chosen)
    check_choice("normalize", normalize, ("mean", "sum"))
    check_float("hidden", hidden)
    check_int64("target", target)
    check_shape("target", target, hidden.shape[:-1], "the shape of hidden without its last dimension")
    check_devices("hidden", hidden.device, {"target": target})
    layout = token_layout(hidden.new_empty(target.shape), mask, cu_seqlens)
    if preference_weights is not None:
        check_preference_weights(preference_weights, layout.rows, hidden.device)
    counted_target = torch.where(layout.keep, target, ignore_index)
    counted = counted_target != ignore_index

    def loss_function(logprob: Tensor, entropy: Tensor | None = None) -> PolicyLoss:
        loss, metrics = policy_loss(
            logprob,
            old_logprobs,
            advantages,
            counted,
            cu_seqlens=cu_seqlens,
            ref_logprobs=ref_logprobs,
            objective=chosen,
            importance_weight=importance_weight,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            entropy=entropy,
        )
        if preference_weights is not None:
            scores = sequence_logprob(logprob, counted, cu_seqlens=cu_seqlens, normalize=normalize)
            loss = loss + (preference_weights.detach() * scores).sum()
        return PolicyLoss(loss, metrics)

    call = checked_call(
        hidden,
        weight,
        counted_target,
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
    if chosen.entropy_coef:
        return loss_function(*linear_logprob_op(*call, True)[:2])
    logits_workspace = default_logits_workspace(hidden.device) if workspace_bytes is None else workspace_bytes
    form = _choose_form(call, logits_workspace)
    if form == "recompute":
        return loss_function(linear_logprob_op(*call, False)[0])
    active = counted & _can_have_gradient(chosen, layout, advantages, preference_weights)
    with torch.no_grad():
        inactive_target = torch.where(active, ignore_index, counted_target)
        inactive_logprob = linear_logprob_op(*call._replace(target=inactive_target), False)[0]
    call = call._replace(target=torch.where(active, counted_target, ignore_index))
    if form == "hidden gradient":
        return loss_function(logprob_with_hidden_grad_op(*call)[0] + inactive_logprob)
    return _loss_with_gradients(call, logits_workspace, inactive_logprob, loss_function)


def _refuse_sequence_level(objective: Objective) -> None:
    if objective.ratio_level in ("sequence", "sequence_token"):
        raise ValueError(
            f"linear_policy_loss takes losses local to a token; ratio_level={objective.ratio_level!r} "
            f"(surrogate={objective.surrogate!r}) needs whole sequences: use linear_logprob, then policy_loss"
        )


def _can_have_gradient(
    objective: Objective, layout: TokenLayout, advantages: Tensor, preference_weights: Tensor | None
) -> Tensor:
    """False for the tokens whose loss has a gradient of exactly 0 whatever their log-prob is."""
    if objective.kl_coef or objective.mirror_coef:
        return layout.keep
    check_float("advantages", advantages)
    active = layout.per_token("advantages", advantages, compute_dtype(advantages)) != 0
    if preference_weights is not None:
        active = active | layout.broadcast(preference_weights != 0)
    return active


# ---- gradients formed in the forward, or by recomputing the logits --------------------------------------------------


def _choose_form(call: Call, logits_workspace: int) -> Literal["hidden gradient", "all gradients", "recompute"]:
    """How the gradients are computed.

    In the forward, for hidden alone or for all inputs, or by a backward that recomputes the logits.
    """
    trained = [tensor for tensor in call.differentiable[1:] if tensor is not None and tensor.requires_grad]
    if call.group or not torch.is_grad_enabled() or not (trained or call.hidden.requires_grad):
        return "recompute"
    if not trained:
        return "hidden gradient" if not call.triton or _keeps_logits(call, call.workspace) else "recompute"
    exact = all(tensor.dtype == call.head.accumulate for tensor in trained)
    # float16 dlogits need their loss scale before any gradient of the loss is known
    fits = not call.triton or (call.compute != torch.float16 and _keeps_logits(call, logits_workspace))
    traced = torch.compiler.is_compiling() or active_transforms()
    return "all gradients" if exact and fits and not traced else "recompute"


def _keeps_logits(call: Call, logits_workspace: int) -> bool:
    """Whether the Triton backend keeps a row block's logits."""
    from .triton_forward_gradients import kept_rows

    return kept_rows(call.head, call.workspace, logits_workspace, call.weight.requires_grad) > 0


def _forward_gradients(call: Call) -> "type[ForwardGradients | TritonForwardGradients]":
    if not call.triton:
        return ForwardGradients
    from .triton_forward_gradients import TritonForwardGradients

    return TritonForwardGradients


def _loss_with_gradients(
    call: Call, logits_workspace: int, inactive_logprob: Tensor, loss_function: LossFunction
) -> PolicyLoss:
    """The loss with the gradients of a trained head, formed block by block.

    `inactive_logprob` holds the log-probs of the tokens that are not in `call`, and 0 elsewhere.
    """

    def loss_grad(positions: Tensor, logprob: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = inactive_logprob.reshape(-1).index_copy(0, positions, logprob).requires_grad_()
            (grad,) = torch.autograd.grad(loss_function(leaf.view(inactive_logprob.shape)).loss, leaf)
        return grad[positions]

    leaves = call.differentiable
    needs_grad = PerInput(*(tensor is not None and tensor.requires_grad for tensor in leaves))
    with torch.no_grad(), exact_products(call.hidden.device):
        positions = select_rows(call, call.weight.shape[0])
        rows = RowSelection(call.hidden, call.target, call.row_temperature, positions)
        sweep = _forward_gradients(call)(call.head, rows, needs_grad, call.workspace, logits_workspace, loss_grad)
        grads = sweep.run()
        logprob = inactive_logprob.reshape(-1).index_copy(0, positions, sweep.logprob)
        loss, metrics = loss_function(logprob.view(inactive_logprob.shape))
    return PolicyLoss(LossWithGradients.apply(loss, grads, *leaves), metrics)
