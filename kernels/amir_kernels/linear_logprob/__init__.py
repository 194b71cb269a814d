"""Per-token log-probability, entropy and log-sum-exp of a language model's head, without its logits.

    s = logit_scale * (hidden @ weight.T + bias)      with LoRA, hidden @ weight.T + scaling * (hidden @ a.T) @ b.T
    z = softcap * tanh(s / softcap) / temperature     without a softcap, s / temperature
    logprob = z[target] - lse,  lse = log sum_v e^z_v,  entropy = lse - sum_v softmax(z)_v z_v

The vocabulary is processed in tiles, in the forward and again in the backward; no `[N, V]` tensor exists.
`linear_policy_loss` computes a policy loss of these log-probs, with its gradients formed in the forward.

The folder, from the call to the products: `arguments` checks the arguments, `op` is the torch.library op with its
autograd, `rows`, `head` and `tiling` say what is computed in which tiles, `torch_backend` and `triton_backend` compute
the tiles, `backward` turns them into gradients. `forward_gradients` and `triton_forward_gradients` form gradients in
the forward for `linear_policy_loss`; `vocabulary_shard` splits the vocabulary over ranks.

Legend: N rows (tokens), H hidden size, V vocabulary, r LoRA rank. `[...]` is any shape, the same throughout a call.
"""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .._checks import check_count, check_flag, check_float
from .arguments import check_lora, check_weight, checked_call, product_dtype
from .head import Head, Lora
from .linear_policy_loss import linear_policy_loss
from .op import linear_logprob_op
from .tiling import default_workspace, scratch_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LogprobEntropy", "linear_logprob", "linear_logprob_entropy", "linear_policy_loss", "workspace_of"]


class LogprobEntropy(NamedTuple):
    """The results of `linear_logprob_entropy`, each shaped like `target`, in nats."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor


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
    """Log-probability of each target token, `[...]` in nats: `log_softmax(z)[target]`, with z as in the module.

    It is the first result of `linear_logprob_entropy`, bit for bit, and costs less: the entropy is not computed.
    Arguments, dtypes, gradients and errors are described there. Kept for the backward: the inputs, and 12 bytes a row.
    """
    call = checked_call(
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
    return linear_logprob_op(*call, False)[0]


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
    """log_softmax(z)[target], the entropy of softmax(z) and logsumexp(z), `[...]` each, in nats; z as in the module.

    Args:
        hidden: `[..., H]`, any strides; float16, bfloat16, float32 or float64, like every float argument.
        weight: `[V, H]`. A DTensor or an empty shard is refused: gather it first.
        target: int64 `[...]`. `ignore_index` gives 0 in all results and zero gradients and costs no head work; hidden
            may hold anything there. Any other value outside [0, V) raises ValueError with the value and its position.
        bias: `[V]`; -inf removes a token where logit_scale is positive (else it is refused) and there is no softcap.
        temperature: a positive number, or one per token `[...]`; gets no gradient.
        softcap: c > 0 in c * tanh(s / c), applied before the temperature.
        logit_scale: factor on the logits, applied before the cap.
        lora: (A `[r, H]`, B `[V, r]`, scaling) adds scaling * B @ A to the head without forming it.
        ignore_index: the target value of rows to leave out.
        process_group: the vocabulary is split over its ranks, each passing its own consecutive rows of weight, bias and
            B, and the same hidden, A and (global) target. Results, and the gradients of hidden and A, are global;
            every rank must pass the same upstream gradients. Those two gradients are summed in float32 over the ranks.
        workspace_bytes: bound on scratch beyond inputs, returned gradients and O(N) numbers; one 16 x 16 tile is used
            in any case. Default 20 MiB on a CPU, 256 MiB on a GPU.
        backend: "auto", "triton" or "torch".
        entropy_grad: False treats the entropy as a constant.

    Dtypes: the products take their inputs in the wider of the two dtypes (under autocast in its dtype) and sum in
    float32; float32 products are true float32 whatever `torch.set_float32_matmul_precision` says. Logits, sums and
    results are float32 (float64 where hidden or weight is). Gradients are summed in float32 and returned in each
    input's dtype.

    Gradients go to hidden, weight, bias, A and B, each computed only if required; rows whose upstream gradients are all
    exactly zero are left out. Double backward and forward mode are refused. Kept for the backward: the inputs, and 12
    bytes a row (16 with the entropy).

    Errors: TypeError and ValueError name the argument, the value that was found, what is expected and the remedy.
    Checking the targets synchronizes the device once.

    Reproducibility: on one device, backend, thread count and workspace a row's results are the same bits whatever the
    other rows, its position, the padding and the grad mode, and whichever of `linear_logprob`, `linear_policy_loss` and
    this function computed them. (With backend="torch" on a GPU this holds as far as the vendor's products do not depend
    on the number of rows.)
    """
    check_flag("entropy_grad", entropy_grad)
    call = checked_call(
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
    result = LogprobEntropy(*linear_logprob_op(*call, True)[:3])
    return result if entropy_grad else result._replace(entropy=result.entropy.detach())


def workspace_of(
    hidden: Tensor,
    weight: Tensor,
    *,
    lora: tuple[Tensor, Tensor, float] | None = None,
    workspace_bytes: int | None = None,
) -> int:
    """Bound in bytes on the scratch of a call with these tensors, forward or backward; meta and fake tensors suffice.

    Scratch is what a call allocates beyond its inputs, its results, the gradients that it returns and O(N) numbers.
    With `process_group`, the gradient of hidden is summed in float32, which takes 4 N H bytes more where hidden has 16
    bits. `linear_policy_loss` uses the same, and up to its own `workspace_bytes` where it keeps logits (a trained head,
    or Triton).
    """
    check_float("hidden", hidden)
    check_weight(weight)
    if lora is not None:
        check_lora(lora, weight)
    if workspace_bytes is not None:
        check_count("workspace_bytes", workspace_bytes)
    head = Head(weight, None, None if lora is None else Lora(*lora), None, 1.0, product_dtype(hidden, weight))
    workspace = default_workspace(hidden.device) if workspace_bytes is None else workspace_bytes
    return scratch_bytes(head, hidden.shape[:-1].numel(), workspace)
