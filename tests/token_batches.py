"""Token batches of the policy losses' tests, and how two results on one are compared."""

import math

import torch

from amir_kernels import OBJECTIVES

NAN = math.nan
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
DR_GRPO = OBJECTIVES["dr_grpo"].replace(max_completion_length=6)


def named(name):
    return DR_GRPO if name == "dr_grpo" else OBJECTIVES[name]


def fixture(dtype=torch.float64):
    """3 sequences of 4, 3 and 4 tokens; ratios on both sides of both clips; NaN where the mask is off."""
    logprobs = [[-0.20, -1.10, -0.05, -2.30], [-0.70, -0.40, -1.50, NAN], [-0.30, -0.90, -0.60, -0.10]]
    old = [[-0.25, -1.50, -0.05, -2.00], [-0.65, -0.90, -1.40, NAN], [-0.35, -0.60, -0.65, -0.10]]
    ref = [[-0.30, -1.20, -0.10, -2.20], [-0.60, -0.50, -1.45, NAN], [-0.30, -0.80, -0.70, -0.15]]
    tensors = [torch.tensor(rows, dtype=dtype) for rows in (logprobs, old, ref, [1.2, -0.7, -0.5])]
    tensors[0].requires_grad_()
    return (*tensors, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]))


def batch(dtype=torch.float64, rows=6, length=7):
    """Ratios around 1 on both sides of the clips, a mask with holes, an empty row; poison where the mask is off."""
    mask = torch.rand(rows, length) > 0.25
    mask[2] = False
    mask[:, 0] |= torch.arange(rows) != 2
    logprobs = -torch.rand(rows, length, dtype=dtype) * 2
    old, ref = (logprobs + 0.35 * torch.randn(rows, length, dtype=dtype) for _ in range(2))
    entropy = torch.rand(rows, length, dtype=dtype)
    poison = torch.tensor([NAN, math.inf, -math.inf])[torch.randint(3, (rows, length))].to(dtype)
    logprobs, old, ref, entropy = (torch.where(mask, x, poison) for x in (logprobs, old, ref, entropy))
    advantages, weights = torch.randn(rows, dtype=dtype), torch.rand(rows, dtype=dtype) + 0.5
    advantages[1] = 0.0
    return {
        "logprobs": logprobs.requires_grad_(),
        "old_logprobs": old,
        "advantages": advantages,
        "mask": mask,
        "ref_logprobs": ref,
        "entropy": entropy.requires_grad_(),
        "importance_weight": weights,
    }


def pack(inputs, lengths):
    """The same tokens packed: row i keeps its first lengths[i] places."""
    inside = torch.arange(inputs["mask"].shape[1]) < lengths[:, None]
    per_token = {"logprobs", "old_logprobs", "mask", "ref_logprobs", "entropy"}
    packed = {
        name: value.detach()[inside].requires_grad_(value.requires_grad) if name in per_token else value
        for name, value in inputs.items()
    }
    return packed | {"cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0))}, inside


def compare(got, expected, inputs, tolerance):
    """Loss, both gradients (each token against its row's largest) and metrics agree."""
    assert abs(got.loss - expected.loss) <= tolerance * (1 + abs(expected.loss))
    leaves = [inputs["logprobs"], inputs["entropy"]]
    for ours, theirs in zip(
        torch.autograd.grad(got.loss, leaves, allow_unused=True),
        torch.autograd.grad(expected.loss, leaves, allow_unused=True),
        strict=True,
    ):
        zero = torch.zeros_like(inputs["logprobs"])
        ours, theirs = (zero if g is None else g for g in (ours, theirs))
        assert ((ours - theirs).abs() <= tolerance * theirs.abs().amax()).all()
        assert (ours[~inputs["mask"]] == 0).all()
    assert got.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert abs(got.metrics[name] - value) <= 10 * tolerance * (1 + abs(value)), name
        assert not got.metrics[name].requires_grad
