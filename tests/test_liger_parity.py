"""Losses against Liger's chunked GRPO loss, where it is installed, from hidden states; differences by name."""

from importlib.metadata import version

import pytest
import torch

from amir_kernels import OBJECTIVES, linear_logprob, policy_loss

chunked_loss = pytest.importorskip("liger_kernel.chunked_loss", reason="needs liger-kernel, of the extra `gpu`")

PEER = f"Liger {version('liger-kernel')}"
B, L, H, V = 5, 6, 16, 37
FLOAT32 = 3e-5
"""Liger takes log-probs in float32, also of float64 logits: good to about 4e-6 absolute for logits of 30."""
DR_GRPO = OBJECTIVES["dr_grpo"].replace(max_completion_length=13)
RAW_CISPO = OBJECTIVES["cispo"].replace(clip_bounds="raw", clip_low=0.0, clip_high=1.3)
CASES = [
    (loss_type, level)
    for level in ("token", "sequence")
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
    if not (level == "sequence" and loss_type in ("sapo", "cispo", "vespo"))  # Liger refuses these
    and not (level == "token" and loss_type == "luspo")  # an expected difference, below
]


def head():
    """Peaked logits, tokens drawn from them, ratios around 1; a row without tokens; zeros where the mask is off."""
    hidden, weight = torch.randn(B, L, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64)
    target = torch.distributions.Categorical(logits=hidden @ weight.T / 0.7).sample()
    mask = torch.rand(B, L) > 0.25
    mask[2] = False
    lp = torch.log_softmax(hidden @ weight.T / 0.7, dim=-1).gather(-1, target[..., None])[..., 0]
    old, ref = (torch.where(mask, lp + 0.3 * torch.randn(B, L, dtype=torch.float64), 0) for _ in range(2))
    return hidden.requires_grad_(), weight.requires_grad_(), target, mask, torch.randn(B, dtype=torch.float64), old, ref


def both(loss_type, level, *, beta=0.0, **options):
    """(loss, gradients) of Liger and of ours, with the same weights of the caller."""
    hidden, weight, target, mask, advantages, old, ref = head()
    correction = torch.rand(B, L, dtype=torch.float64) + 0.5 if options.pop("weighted", False) else None
    high = 1.3 if loss_type == "cispo" else 0.28
    liger = chunked_loss.LigerFusedLinearGRPOLoss(
        beta=beta,
        compiled=False,
        use_ref_model=beta != 0,
        epsilon_high=high,
        loss_type=loss_type,
        max_completion_length=13,
        importance_sampling_level=level,
        temperature=0.7,
        **options,
    )
    theirs, _ = liger(
        hidden,
        weight,
        target,
        mask.long(),
        advantages,
        ref_per_token_logps=ref,
        old_per_token_logps=old,
        vllm_is_ratio=correction,
    )
    objective = {"dr_grpo": DR_GRPO, "cispo": RAW_CISPO}.get(loss_type, OBJECTIVES[loss_type])
    if loss_type not in ("vespo", "sapo", "cispo"):
        objective = objective.replace(ratio_level=level, clip_low=0.2, clip_high=high, dual_clip=options.get("delta"))
    objective = objective.replace(kl_coef=beta, kl_bias_correction=options.get("use_bias_correction_kl", False))
    logprobs = linear_logprob(hidden, weight, target, temperature=0.7)
    ours = policy_loss(
        logprobs, old, advantages, mask, ref_logprobs=ref, objective=objective, importance_weight=correction
    ).loss
    return [(loss, *torch.autograd.grad(loss, (hidden, weight))) for loss in (theirs, ours)]


def error(results):
    """Largest difference, each tensor's against its own size."""
    return max(((a - b).abs().max() / (1e-3 + b.abs().max())).item() for a, b in zip(*results, strict=True))


OPTIONS = {
    "beta 0": {},
    "beta 0.04": {"beta": 0.04},
    "delta": {"delta": 1.4},
    "importance weights": {"weighted": True, "beta": 0.04},
    "corrected KL": {"beta": 0.04, "use_bias_correction_kl": True},
}


def measured(loss_type, level, option):
    """Whether Liger has that, and not as an expected difference below or a refusal of `FusedGRPOLoss`."""
    if option == "delta":
        return loss_type not in ("sapo", "cispo", "vespo")
    if option != "beta 0":
        return loss_type not in ("luspo", *["vespo"] * (option != "beta 0.04"))
    return True


@pytest.mark.parametrize(
    ("loss_type", "level", "option"), [(*case, o) for o in OPTIONS for case in CASES if measured(*case, o)]
)
def test_loss_and_gradients(parity, loss_type, level, option):
    found = error(both(loss_type, level, **OPTIONS[option]))
    parity(PEER, f"`{loss_type}`, {level}", option, found, FLOAT32)


@pytest.mark.parametrize(("level", "beta"), [("token", 0.0), ("sequence", 0.04)])
def test_expected_difference_luspo_per_token(level, beta):
    """Liger divides what luspo has per token (a token ratio, the KL) by the padded width; the row sum is meant."""
    assert error(both("luspo", level, beta=beta)) > 1e-3
