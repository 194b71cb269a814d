"""The pair term, forward and backward, beside a plain vectorized one that forms every pair of a group at once.

Both get the same scores and rewards of 0 to 4, and their losses and gradients are compared before anything is timed.
Contenders take turns. Memory is measured on a GPU only.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from amir_kernels import preference_loss
from machine import birth_certificate
from rows import keep, timing

CASES = ((512, 8), (4096, 16), (4096, 512), (4096, 4096))
"""(rows, group size)"""
BETA = 0.2


def main() -> None:
    """Measures every case, prints and keeps its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each contender")
    parser.add_argument("--no-keep", dest="keep", action="store_false", help="print only")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    certificate = birth_certificate()
    for rows, group in CASES:
        for row in measure(rows, group, device, options.repeats):
            print(f"{row['case']}, {row['contender']}: {1000 * row['seconds']['median']:.2f} ms")
            if options.keep:
                keep(row | certificate)


def ours(scores: Tensor, rewards: Tensor, group: int) -> Tensor:
    """The op."""
    return preference_loss(scores, rewards, group, beta_dpo=BETA).loss


def all_pairs_at_once(scores: Tensor, rewards: Tensor, group: int) -> Tensor:
    """`[groups, G, G]` of logits, autograd for the rest."""
    u, r = scores.view(-1, group), rewards.view(-1, group)
    wins = r[:, :, None] > r[:, None, :]
    z = BETA * (u[:, :, None] - u[:, None, :])
    return -(torch.nn.functional.logsigmoid(z) * wins).sum() / wins.sum()


CONTENDERS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"pairs at once": all_pairs_at_once, "ours": ours}
RIVAL = "pairs at once"


def measure(rows: int, group: int, device: str, repeats: int) -> list[dict]:
    """The rows of one case."""
    torch.manual_seed(0)
    scores = torch.randn(rows, device=device, requires_grad=True)
    rewards = torch.randint(0, 5, (rows,), device=device).float()
    refuse_disagreement(scores, rewards, group)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    peak_mb: dict[str, float | None] = dict.fromkeys(CONTENDERS)
    for _ in range(repeats):
        for name, loss in CONTENDERS.items():
            elapsed, peak_mb[name] = one_run(loss, scores, rewards, group)
            seconds[name].append(elapsed)
    timings = {name: timing(values) for name, values in seconds.items()}
    return [
        {
            "bench": "preference_loss",
            "contender": name,
            "case": f"B={rows:,}, G={group:,}, float32, forward and backward",
            "seconds": timings[name],
            "peak_memory_mb": peak_mb[name],
            "ratio_to": None if name == RIVAL else RIVAL,
            "ratio": None if name == RIVAL else timings[name]["median"] / timings[RIVAL]["median"],
        }
        for name in CONTENDERS
    ]


def refuse_disagreement(scores: Tensor, rewards: Tensor, group: int) -> None:
    """Raises where the contenders do not compute the same; also their warm-up."""
    losses = [loss(scores, rewards, group) for loss in CONTENDERS.values()]
    gradients = [torch.autograd.grad(loss, scores)[0] for loss in losses]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-9)


def one_run(
    loss: Callable[[Tensor, Tensor, int], Tensor], scores: Tensor, rewards: Tensor, group: int
) -> tuple[float, float | None]:
    """Seconds, and on a GPU the growth of the peak in MB."""
    cuda = scores.is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() if cuda else 0
    began = time.perf_counter()
    torch.autograd.grad(loss(scores, rewards, group), scores)
    if cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - began
    return elapsed, (torch.cuda.max_memory_allocated() - held) / 1e6 if cuda else None


if __name__ == "__main__":
    main()
