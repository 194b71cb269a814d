"""What a step reports: names, units and how each is formed from the step's batch and sums."""

import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .config import RunConfig
from .loss import Sums
from .optim import learning_rate

METRICS = {
    "step": "optimizer steps so far; with num_iterations > 1, batches so far",
    "reward": "mean reward of the sampled completions",
    "success": "share of sampled completions whose answer is right (reward 1)",
    "reward_std": "standard deviation of the rewards",
    "loss": "policy loss + lambda_reg * preference loss, dead rows counted in every divisor",
    "preference_loss": "-J_pref: mean over pairs of -log sigmoid(z); blank without pairs",
    "grad_norm": "norm of the adapter's gradient before clipping",
    "learning_rate": "learning rate of this step",
    "pairs": "preference pairs formed, all groups",
    "pair_accuracy": "share of pairs whose better completion has the higher log-ratio",
    "pair_grad_share": "|| d pair term || / (|| d pair term || + || d policy term ||), by token log-probs",
    "zero_gradient_share": "share of completions that skipped the training forward since their gradient is zero",
    "truncated_share": "share of completions that reached max_completion_length without EOS",
    "completion_tokens": "mean tokens of a completion, EOS included",
    "clip_share": "share of trained tokens whose ratio was clipped",
    "ratio": "mean policy ratio over trained tokens",
    "kl": "mean KL estimate to the reference over trained tokens, nats; where reference log-probs were needed",
    "tokens_per_second": "completion tokens sampled and trained on, per second of the whole step",
    "step_seconds": "seconds of the step",
    "rollout_seconds": "seconds spent sampling and grading",
    "reference_seconds": "seconds spent on advantages, pairs and reference log-probs",
    "update_seconds": "seconds spent on forward, backward and optimizer",
    "peak_memory_mb": "peak memory so far, MB (10^6 bytes): allocated on the GPU, else resident in this process",
}


class Clock:
    """Splits a step's time into named laps."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends the lap that has been running."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap's end."""
        return self._last - self._began


def step_metrics(
    config: RunConfig, step: int, batch: Batch, sums: Sums, grad_norm: Tensor, clock: Clock
) -> dict[str, Any]:
    """The step's row of metrics.jsonl; `sums` are those of its last inner iteration."""
    total = {name: float(value) for name, value in sums.items()}
    tokens = total.get("tokens", 0.0)
    scored = batch.rewards[~batch.rewards.isnan()]
    lengths = batch.tokens.completion_mask.sum(1)
    row = {
        "step": step,
        "reward": float(scored.mean()),
        "success": float((scored == 1).float().mean()),
        "reward_std": float(scored.std(correction=0)),
        "loss": total.get("policy_loss", 0.0) + config.lambda_reg * total.get("preference_loss", 0.0),
        "preference_loss": total.get("preference_loss", 0.0) if batch.num_pairs else None,
        "grad_norm": float(grad_norm),
        "learning_rate": learning_rate(config, step),
        "pairs": int(batch.num_pairs),
        "pair_accuracy": _ratio(total.get("pairs_correct"), total.get("pairs")),
        "pair_grad_share": _share(total.get("pair_grad_square", 0.0), total.get("policy_grad_square", 0.0)),
        "zero_gradient_share": float((~batch.live).float().mean()),
        "truncated_share": float(batch.truncated.float().mean()),
        "completion_tokens": float(lengths.float().mean()),
        "clip_share": _ratio(total.get("clip_low_count", 0.0) + total.get("clip_high_count", 0.0), tokens),
        "ratio": _ratio(total.get("ratio_sum"), tokens),
        "kl": _ratio(total.get("kl_sum"), tokens),
        "tokens_per_second": int(lengths.sum()) / clock.total,
        "step_seconds": clock.total,
        **{f"{name}_seconds": seconds for name, seconds in clock.laps.items()},
        "peak_memory_mb": peak_memory_mb(batch.rewards.device),
    }
    return {name: row[name] for name in METRICS}


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MB (10^6 bytes): allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident * (1 if sys.platform == "darwin" else 1024) / 1e6


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _share(part_square: float, other_square: float) -> float:
    part, other = part_square**0.5, other_square**0.5
    return part / (part + other) if part + other > 0 else 0.0
