"""Cut Cross Entropy's `linear_cross_entropy`: the negative log-likelihood of each target, from embeddings.

Legend: L length, D embedding size, V vocabulary. Losses are in nats.
"""

import torch
from torch import Tensor

from .._checks import check_choice, check_count
from ..linear_logprob import linear_logprob


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    backend: str = "auto",
) -> Tensor:
    """-log softmax(softcap * tanh((e @ c.T + bias) / softcap))[targets], the loss of `cut_cross_entropy`.

    Args:
        e: `[..., D]`; `c`: `[V, D]`, the classifier; `bias`: `[V]`. Each that requires a gradient gets one.
        targets: int64 `[...]`; `ignore_index` costs nothing and does not count in the mean. Any other value outside
            [0, V) raises ValueError.
        reduction: "mean" over the targets that count (NaN where none does), "sum", or "none": `[...]`, 0 where ignored.
        shift: the embedding at position i predicts the target at i + shift; True is 1. With reduction "none" the result
            is `[..., L - shift]`.
        filter_eps, filter_e_grad, filter_c_grad, accum_e_fp32, accum_c_fp32: permissions to be less exact. Accepted and
            ignored: no gradient is filtered and accumulation is always float32.
        backend: as in `linear_logprob`.

    The arguments after `targets` are keyword-only, since their order differs between CCE's versions. `impl`,
    `vocab_parallel_options` and `return_lse` are not accepted: `linear_logprob_entropy` has `process_group` and `lse`.
    The result is float32 (float64 for float64 inputs). Kept for the backward: the inputs, which `shift` does not copy,
    and O(1) per target.
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    length = targets.shape[-1] if targets.dim() else 0
    steps = int(shift) if isinstance(shift, bool) else shift
    check_count("shift", steps, at_least=None)
    if steps and not 0 < steps < length:
        raise ValueError(f"shift must lie in [0, {length}), where {length} is the length of targets, got {shift}")
    embeddings, shifted = (e[..., :-steps, :], targets[..., steps:]) if steps else (e, targets)
    nll = -linear_logprob(
        embeddings, c, shifted, bias=bias, softcap=softcap, ignore_index=ignore_index, backend=backend
    )
    if reduction == "none":
        return nll
    total = nll.sum()
    return total if reduction == "sum" else total / torch.count_nonzero(shifted != ignore_index)
