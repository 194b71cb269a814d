"""Draws docs/lengths.svg: the gradient of each loss by one token of a wrong answer, over the answer's length.

On policy, eight completions of one prompt: four right ones of 100 tokens, two wrong ones of 50 and two of n. The push
is 1000 * dL / d log pi of one token, from the ops' own gradients, with `lambda_reg=0.01`, `beta_dpo=0.2`. The numbers
drawn are in the picture's description as JSON, for a test.
"""

import json
from pathlib import Path

import torch

from amir_kernels import OBJECTIVES, amir_loss, group_advantage

PICTURE = Path(__file__).parents[1] / "docs" / "lengths.svg"
RIGHT, SHORT, LONGEST = 100, 50, 800
LENGTHS = (50, 100, 200, 400, 800)
LAMBDA = 0.01
LOSSES: dict[str, tuple[str | None, str | None, str]] = {
    # label: objective, form of the pair term, line
    "grpo": ("grpo", None, "C0-"),
    "dapo": ("dapo", None, "C1-"),
    f"dr_grpo, length {LONGEST}": ("dr_grpo", None, "C2-"),
    'pair term, normalize="mean"': (None, "mean", "C3-"),
    'pair term, normalize="sum"': (None, "sum", "C4-"),
    "grpo with the mean pair term": ("grpo", "mean", "C3--"),
    "grpo with the sum pair term": ("grpo", "sum", "C4--"),
}


def push(objective: str | None, pairs: str | None, length: int, longest: int = LONGEST) -> tuple[float, float]:
    """1000 * dL / d log pi of a token in a wrong answer of SHORT tokens, and in one of `length`.

    `objective` None leaves the policy loss out, `pairs` None the pair term. `longest` is dr_grpo's constant.
    """
    lengths = torch.tensor([RIGHT] * 4 + [SHORT] * 2 + [length] * 2)
    rewards = torch.tensor([1.0] * 4 + [0.0] * 4, dtype=torch.float64)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    logprobs = torch.full(mask.shape, -0.5, dtype=torch.float64, requires_grad=True)
    settings = OBJECTIVES[objective or "grpo"]
    if objective == "dr_grpo":
        settings = settings.replace(max_completion_length=longest)
    result = amir_loss(
        logprobs,
        None,
        group_advantage(rewards, 8, scale="none" if objective == "dr_grpo" else "std"),
        rewards,
        8,
        mask,
        ref_logprobs=logprobs.detach(),
        objective=settings,
        normalize=pairs or "mean",
    )
    loss = (objective is not None) * result.policy + (pairs is not None) * LAMBDA * result.preference
    gradient = 1000 * torch.autograd.grad(loss, logprobs)[0]
    return gradient[4, 0].item(), gradient[6, 0].item()


def series() -> dict[str, list[list[float]]]:
    """For each loss the pushes (short, long) at every one of LENGTHS."""
    return {label: [list(push(*loss[:2], n)) for n in LENGTHS] for label, loss in LOSSES.items()}


def main() -> None:
    """Draws the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "lengths", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    curves = series()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 4), layout="constrained")
    for label, pushes in curves.items():
        line = LOSSES[label][2]
        left.loglog(LENGTHS, [long for _, long in pushes], line, marker=".", label=label)
        right.semilogx(LENGTHS, [long / short for short, long in pushes], line, marker=".")
    for axes in (left, right):
        axes.set_xticks(LENGTHS, map(str, LENGTHS))
        axes.minorticks_off()
        axes.set_xlabel("tokens of the wrong answer")
        axes.grid(alpha=0.3)
    left.set_ylabel("push on one of its tokens, 1000 · ∂L/∂log π")
    right.set_ylabel(f"the same over that in a wrong answer of {SHORT} tokens")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None, "Description": json.dumps(curves)})


if __name__ == "__main__":
    main()
