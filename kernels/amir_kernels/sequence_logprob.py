"""The log-prob of a whole sequence: the mean or the sum of its tokens' log-probs.

Legend: B sequences, L padded length, T packed tokens. Log-probs are in nats.
"""

from torch import Tensor

from ._checks import check_choice
from ._token_layout import compute_dtype, token_layout


def sequence_logprob(
    logprobs: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None, normalize: str = "mean"
) -> Tensor:
    """Log-prob of each sequence, `[B]`, in nats: `sum_t m_t lp_t / max(sum_t m_t, 1)`; "sum" omits the divisor.

    Args:
        logprobs: `[B, L]`, or packed `[T]` with `cu_seqlens`. Takes the gradient.
        mask: same shape, of 0 and 1 in any dtype; masked entries of `logprobs` may hold anything.
        cu_seqlens: int32 or int64 `[B + 1]`, the bounds of the packed sequences: from 0, not decreasing, T at most.
        normalize: "mean", AMIR-GRPO's form (arXiv 2601.03661, the authors' code), or "sum", DPO's.

    A sequence without tokens gets 0. The result is float32, or float64 for float64 inputs. Autograd keeps O(tokens).
    Raises ValueError or TypeError for shapes, dtypes and bounds that do not fit.
    """
    check_choice("normalize", normalize, ("mean", "sum"))
    layout = token_layout(logprobs, mask, cu_seqlens)
    dtype = compute_dtype(logprobs)
    total = layout.sum(layout.clean(logprobs, dtype))
    return total / layout.counts(dtype).clamp(min=1) if normalize == "mean" else total
