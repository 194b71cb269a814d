"""A replacement for Liger's `LigerFusedLinearGRPOLoss`, a policy loss from hidden states: same arguments and metrics.

Legend: B completions (rows), L padded length, H hidden size, V vocabulary. Log-probs are in nats.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_choice
from ..linear_logprob import linear_logprob
from ..policy_loss import OBJECTIVES, Objective, policy_loss

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
_IGNORED = -100


def _refuse(options: str, reason: str) -> None:
    raise ValueError(
        f"{options} is not supported: {reason}; call linear_logprob and policy_loss with the objective that you mean"
    )


class FusedGRPOLoss(nn.Module):
    """`FusedGRPOLoss(**keywords)(...) -> (loss, metrics)`, the same as `LigerFusedLinearGRPOLoss(**keywords)(...)`.

    Args:
        beta: weight of the k3 KL to the reference.
        compiled, chunk_size: of Liger's implementation; accepted, and without effect here.
        use_ref_model: whether the call brings a reference; needed where beta is not 0.
        epsilon_low, epsilon_high: clip bounds around 1. "cispo" bounds the ratio by epsilon_high itself.
        loss_type: one of `LOSS_TYPES`.
        max_completion_length: divisor of "dr_grpo", needed by it alone.
        importance_sampling_level: "token" or "sequence"; as in Liger, cispo, sapo and vespo need "token".
        delta: upper bound of the ratio where the advantage is negative.

    Combinations where Liger deviates from the objective's formula, or silently ignores an argument, raise ValueError:
    luspo with the token level, a KL or weights per token (Liger divides by the padded width), weights or corrected KL
    with vespo, delta where nothing is clipped, beta without a reference model.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        check_choice("loss_type", loss_type, LOSS_TYPES)
        check_choice("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
        if beta and not use_ref_model:
            _refuse(f"beta={beta} with use_ref_model=False", "the KL needs a reference model")
        soft = loss_type in ("cispo", "sapo", "vespo")
        if soft and importance_sampling_level == "sequence":
            _refuse(f'importance_sampling_level="sequence" with loss_type={loss_type!r}', "Liger refuses it too")
        if loss_type == "luspo" and (beta or importance_sampling_level == "token"):
            _refuse('loss_type="luspo" with the token level or a KL', "Liger divides these by the padded width")
        if loss_type == "vespo" and use_bias_correction_kl:
            _refuse(
                'use_bias_correction_kl with loss_type="vespo"',
                "Liger corrects by the token's ratio, not by the sequence's weight W",
            )
        if delta is not None and soft:
            _refuse(f"delta={delta} with loss_type={loss_type!r}", "nothing is clipped, and Liger ignores it")
        clips = {"ratio_level": importance_sampling_level, "clip_low": epsilon_low, "clip_high": epsilon_high}
        others: dict[str, dict[str, Any]] = {
            "cispo": {"clip_bounds": "raw", "clip_low": 0.0, "clip_high": epsilon_high},
            "sapo": {"sapo_tau_pos": sapo_temperature_pos, "sapo_tau_neg": sapo_temperature_neg},
            "vespo": {
                "vespo_k_pos": vespo_k_pos,
                "vespo_lambda_pos": vespo_lambda_pos,
                "vespo_k_neg": vespo_k_neg,
                "vespo_lambda_neg": vespo_lambda_neg,
            },
        }
        own = others.get(loss_type, clips)
        if loss_type == "dr_grpo":
            if max_completion_length is None:
                raise ValueError('loss_type="dr_grpo" divides by max_completion_length, got None; pass it')
            own["max_completion_length"] = max_completion_length
        self.loss_type = loss_type
        self.use_ref_model = use_ref_model
        self.temperature = temperature
        self.objective: Objective = OBJECTIVES[loss_type].replace(
            kl_coef=beta, kl_bias_correction=use_bias_correction_kl, dual_clip=delta, **own
        )

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """(loss, metrics); metrics: the mean KL where beta is not 0, then the share of clipped tokens.

        Args:
            _input: `[B, L, H]`, the hidden state that predicts each token; `lin_weight` `[V, H]` and `bias` `[V]`.
                Each that requires a gradient gets one.
            selected_token_ids: int64 `[B, L]`.
            attention_mask: `[B, L]` of 0 and 1, the loss mask; a masked token costs no head work.
            advantages: `[B]`, or also `[B, L]`.
            ref_per_token_logps: `[B, L]`; if None, it is computed from `ref_input`, `ref_weight` and `ref_bias`.
            old_per_token_logps: `[B, L]`; None: on policy.
            vllm_is_ratio: `[B]`, `[B, 1]` or `[B, L]`, factor on the policy term.
            num_items_in_batch: tokens of the whole step over all processes, for dapo, cispo and vespo.
        """
        mask = attention_mask != 0
        target = torch.where(mask, selected_token_ids, _IGNORED)
        logprobs = linear_logprob(_input, lin_weight, target, bias=bias, temperature=self.temperature)
        reference = None
        if self.use_ref_model:
            reference = ref_per_token_logps
            if reference is None:
                reference = self._reference(ref_input, ref_weight, ref_bias, target)
        loss, sums = policy_loss(
            logprobs,
            old_per_token_logps,
            advantages,
            attention_mask,
            ref_logprobs=reference,
            objective=self.objective,
            importance_weight=self._importance_weight(vllm_is_ratio),
            num_tokens=self._num_tokens(mask, num_items_in_batch),
        )
        clipped = sums["clip_low_count"] + sums["clip_high_count"]
        if self.loss_type == "cispo" and old_per_token_logps is not None:
            clipped = self._count_bounded(logprobs.detach(), old_per_token_logps, advantages, mask)
        tokens = sums["tokens"].clamp(min=1)
        metrics = [sums["kl_sum"] / tokens] if self.objective.kl_coef else []
        return loss, [*metrics, clipped / tokens]

    def _reference(
        self, ref_input: Tensor | None, ref_weight: Tensor | None, ref_bias: Tensor | None, target: Tensor
    ) -> Tensor:
        if ref_input is None or ref_weight is None:
            raise ValueError(
                "use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight, and got neither; "
                "pass them, or use_ref_model=False with beta=0"
            )
        with torch.no_grad():
            return linear_logprob(ref_input, ref_weight, target, bias=ref_bias, temperature=self.temperature)

    def _importance_weight(self, ratio: Tensor | None) -> Tensor | None:
        if ratio is None:
            return None
        if self.loss_type == "vespo":
            _refuse(
                'vllm_is_ratio with loss_type="vespo"',
                "Liger multiplies it into W, and here it is a factor on the loss",
            )
        per_row = ratio[:, 0] if ratio.dim() == 2 and ratio.shape[1] == 1 else ratio
        if self.loss_type == "luspo" and per_row.dim() == 2:
            _refuse('vllm_is_ratio per token with loss_type="luspo"', "Liger divides it by the padded width")
        return per_row

    def _num_tokens(self, mask: Tensor, num_items: float | Tensor | None) -> float | Tensor | None:
        """The divisor of this process: its share of the step's tokens, as Liger and TRL count them."""
        if self.loss_type not in ("dapo", "cispo", "vespo"):
            return None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        world = torch.distributed.get_world_size() if distributed else 1
        if num_items is not None:
            return num_items / world
        if world == 1:
            return None
        tokens = mask.sum().to(torch.float32)
        torch.distributed.all_reduce(tokens)
        return tokens / world

    def _count_bounded(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Number of tokens whose ratio exceeds cispo's bound and whose advantage is positive, as Liger counts them."""
        high = self.objective.clip_high or 0.0
        positive = advantages > 0 if advantages.dim() == 2 else (advantages > 0)[:, None]
        return (((logprobs - old).exp() > high) & positive & mask).sum()
