"""The two fused heads of verl, `linear_cross_entropy` and `FusedLinearForPPO`: log-prob and entropy of each label.

Legend: B sequences, L length, N = B L tokens, H hidden size, V vocabulary. Results are in nats.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .._checks import check_choice, check_positive
from ..linear_logprob import linear_logprob_entropy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    process_group: "ProcessGroup | None" = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob, entropy) of softmax(hidden @ weight.T / temperature), as `verl.utils.kernel.linear_cross_entropy`.

    Despite the name the first is the log-prob itself, not its negative.

    Args:
        hidden: `[..., H]`, any H, dtype and strides; `weight`: `[V, H]`. Each that requires a gradient gets one.
        labels: int64 `[...]`, flattened or not. -100 gives 0 in both; any other value outside [0, V) raises ValueError.
        reduction: of the log-prob, "none" `[N]`, "sum" or "mean" over all N. The entropy stays `[N]`.
        process_group: None or a group of one rank. A larger group is refused: verl returns to each rank its own part of
            hidden's gradient, to be summed later, while `linear_logprob(process_group=...)` returns the sum.

    Both are float32 and flat, and both have gradients. Kept for the backward: the inputs and O(N).
    """
    check_choice("reduction", reduction.lower(), ("none", "sum", "mean"))
    if process_group is not None and process_group.size() > 1:
        raise NotImplementedError(
            f"verl.linear_cross_entropy got a process group of {process_group.size()} ranks and supports one rank; use "
            "linear_logprob_entropy(process_group=...), whose gradient for hidden is already summed over the ranks"
        )
    flat = hidden.reshape(-1, hidden.shape[-1])
    logprob, entropy, _ = linear_logprob_entropy(flat, weight, labels.reshape(-1), temperature=temperature)
    logprob, entropy = logprob.to(torch.float32), entropy.to(torch.float32)
    if reduction.lower() == "none":
        return logprob, entropy
    return logprob.sum() if reduction.lower() == "sum" else logprob.mean(), entropy


class FusedLinearForPPO(nn.Module):
    """`verl.utils.experimental.torch_functional.FusedLinearForPPO`.

    `chunk_size` and `impl_backend` ("torch" or "liger") select one of verl's implementations. They are checked and have
    no effect here: scratch is bounded whatever the number of tokens, and results do not depend on chunks.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        check_positive("chunk_size", chunk_size)
        check_choice("impl_backend", impl_backend, ("torch", "liger"))
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(log-prob in float32, entropy in the dtype of hidden_states) of the label `input_ids` `[B, L]` or `[N]`.

        `hidden_states` `[B, L, H]` or `[N, H]` and `vocab_weights` `[V, H]` get gradients, of both results.
        """
        logprob, entropy, _ = linear_logprob_entropy(
            hidden_states, vocab_weights, input_ids.to(torch.int64), temperature=temperature
        )
        return logprob.to(torch.float32), entropy.to(hidden_states.dtype)
