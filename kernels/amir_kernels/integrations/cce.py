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
    impl: str | None = None,
    return_lse: bool = False,
    vocab_parallel_options: object = None,
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
        impl: CCE's choice among its own engines, which compute the same loss. Accepted and ignored: see `backend`.
        return_lse, vocab_parallel_options: refused unless False and None: `linear_logprob_entropy` has `lse` and
            `process_group`.
        backend: as in `linear_logprob`.

    The arguments after `targets` are keyword-only, since their order differs between CCE's versions.
    The result is float32 (float64 for float64 inputs). Kept for the backward: the inputs, which `shift` does not copy,
    and O(1) per target.
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    if return_lse or vocab_parallel_options is not None:
        raise ValueError(
            "return_lse=True and vocab_parallel_options are not supported; call linear_logprob_entropy, which returns "
            "lse and takes process_group, and negate its logprob"
        )
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
