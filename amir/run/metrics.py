"""The metrics of a step: names, units and formulas.

All metrics except times, memory, the gradient's norm and the learning rate are computed from sums and counts
(`batch_sums` and those of the loss), which are added over micro-batches and ranks.
"""

import math
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor

from amir_kernels import sequence_logprob

from ..config import RunConfig
from ..update.batch import Batch
from ..update.correction import mismatch_sums
from ..update.gradient import Sums
from ..update.optimizer import learning_rate

METRICS = {
    "step": "optimizer steps so far; with num_iterations > 1, batches so far",
    "reward": "mean reward of the scored completions, the weighted sum of the functions",
    "success": "share of sampled completions whose answer is right; null without the correctness reward",
    "reward_std": "standard deviation of the rewards",
    "unscored_share": "share of completions that no reward function scored",
    "reward_timeouts": "reward calls and answer comparisons that reached their time limit since the process started",
    "loss": "policy loss + lambda_reg * preference loss; zero-gradient rows count in every divisor",
    "preference_loss": "-J_pref: mean over pairs of -log sigmoid(z); null without pairs",
    "grad_norm": "norm of the trained parameters' gradient before clipping",
    "policy_grad_norm": "norm of the policy term's gradient with respect to token log-probs, not trained parameters",
    "pair_grad_norm": "the same for the pair term, lambda_reg included",
    "pair_grad_share": "pair_grad_norm / (pair_grad_norm + policy_grad_norm)",
    "policy_parameter_grad_norm": "norm of the policy term's gradient with respect to the trained parameters, before "
    "clipping; in every `term_gradient_steps`-th step, otherwise null",
    "pair_parameter_grad_norm": "the same for the pair term, lambda_reg included",
    "learning_rate": "learning rate of this step",
    "pairs": "preference pairs of all groups",
    "pair_accuracy": "share of pairs whose better completion has the higher log-ratio",
    "chosen_logprob": "mean over pairs of the better completion's mean token log-prob when sampled, nats",
    "rejected_logprob": "the same for the worse completion",
    "zero_variance_share": "share of groups whose rewards are all equal, so that every advantage is 0",
    "groups_sampled": "groups sampled for the step, including those that dynamic sampling replaced",
    "sampling_rounds": "rounds of sampling; more than one only with dynamic sampling",
    "unusable_share": "share of sampled completions whose tokens cannot be recovered from a server's text",
    "zero_gradient_share": "share of completions that skipped the training forward because their gradient is zero",
    "truncated_share": "share of completions that reached max_completion_length without EOS",
    "completion_tokens": "mean tokens of a completion, EOS included",
    "right_tokens": "mean tokens of completions whose answer is right",
    "wrong_tokens": "mean tokens of completions whose answer is wrong",
    "tokens_trained": "completion tokens in the loss of this step, in the last of num_iterations",
    "tokens_computed": "tokens computed by the model in their training forward, prompts and padding included",
    "clip_share": "share of trained tokens whose ratio was clipped, from below or above",
    "clip_low_share": "share of trained tokens whose ratio was clipped from below",
    "clip_high_share": "share of trained tokens whose ratio was clipped from above",
    "ratio": "mean policy ratio over trained tokens",
    "kl": "mean KL estimate to the reference over trained tokens, nats; null if no reference log-probs were needed",
    "entropy": "mean entropy of the next-token distributions over trained tokens, nats; without zero-gradient rows",
    "mismatch": "mean |trainer's log-prob - sampler's| over trained tokens, nats; null if the trainer itself samples",
    "mismatch_max": "largest |trainer's log-prob - sampler's|, nats",
    "effective_sample_share": "(sum c)^2 / (n sum c^2), c = exp(trainer - sampler) per token, or at `correction.level`",
    "missing_logprob_share": "share of trained tokens without a log-prob of the sampler; their ratio is 1",
    "corrected_share": "share of the importance weights that `correction` bounded or dropped",
    "tokens_per_second": "completion tokens sampled and trained on, per second of the whole step",
    "step_seconds": "seconds of the step",
    "rollout_seconds": "seconds of sampling",
    "reward_seconds": "seconds of the reward functions",
    "reference_seconds": "seconds of advantages, pairs and reference log-probs",
    "update_seconds": "seconds of forward, backward and optimizer",
    "peak_memory_mb": "peak memory so far, MB (10^6 bytes): allocated on the GPU, or else resident in this process",
}
"""The metrics and their meanings. Each reward function adds `reward/NAME`, its mean over the completions it scored."""

GROUPS = {
    "train": ("reward", "success", "reward_std", "loss", "grad_norm", "learning_rate", "kl", "entropy"),
    "rewards": ("unscored_share", "reward_timeouts", "zero_variance_share"),
    "completions": (
        "completion_tokens",
        "right_tokens",
        "wrong_tokens",
        "truncated_share",
        "unusable_share",
        "zero_gradient_share",
        "groups_sampled",
        "sampling_rounds",
        "tokens_trained",
        "tokens_computed",
    ),
    "pairs": ("pairs", "pair_accuracy", "chosen_logprob", "rejected_logprob", "preference_loss"),
    "gradients": (
        "policy_grad_norm",
        "pair_grad_norm",
        "pair_grad_share",
        "policy_parameter_grad_norm",
        "pair_parameter_grad_norm",
    ),
    "ratio": ("ratio", "clip_share", "clip_low_share", "clip_high_share"),
    "sampler": ("mismatch", "mismatch_max", "effective_sample_share", "missing_logprob_share", "corrected_share"),
    "performance": (
        "tokens_per_second",
        "step_seconds",
        "rollout_seconds",
        "reward_seconds",
        "reference_seconds",
        "update_seconds",
        "peak_memory_mb",
    ),
}
"""The groups in which TensorBoard shows the metrics; those of evaluations are in `eval`."""

_TAGS = {name: f"{group}/{name}" for group, names in GROUPS.items() for name in names}


def tag(name: str) -> str:
    """TensorBoard's tag of a metric, such as `train/reward`; that of a reward function is `rewards/NAME`."""
    return _TAGS.get(name, f"rewards/{name.removeprefix('reward/')}")


class Clock:
    """Splits a step's time into named laps."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends the current lap; its time is added to earlier laps of that name."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the start to the end of the last lap."""
        return self._last - self._began


def batch_sums(batch: Batch, config: RunConfig) -> dict[str, float]:
    """Sums and counts over a step's completions and groups."""
    lengths = batch.tokens.completion_lengths.double()
    group = batch.group.unique(return_inverse=True)[1]
    advantages = torch.zeros(int(group.max()) + 1, device=group.device).index_add(0, group, batch.advantages.abs())
    rewards = batch.rewards[~batch.rewards.isnan()].double()
    sums = {
        "completions": len(batch.tokens),
        "completion_tokens": float(lengths.sum()),
        "scored": len(rewards),
        "reward_sum": float(rewards.sum()),
        "reward_square_sum": float(rewards.square().sum()),
        "groups": len(advantages),
        "zero_variance_groups": int((advantages == 0).sum()),
        "zero_gradient_rows": int((~batch.has_gradient).sum()),
        "truncated": int(batch.truncated.sum()),
        "pairs_formed": float(batch.pairs.total),
    }
    if batch.old_logprobs is not None:
        mean = sequence_logprob(batch.old_logprobs, batch.loss_mask).double()
        sums["better_logprob_sum"] = float((batch.pairs.chosen * mean).sum())
        sums["worse_logprob_sum"] = float((batch.pairs.rejected * mean).sum())
        if batch.sampled_logprobs is not None:
            trained = batch.loss_mask & batch.has_gradient[:, None]
            sums |= mismatch_sums(batch.old_logprobs, batch.sampled_logprobs, trained, config.correction)
    return sums | _score_sums(batch.scores.double(), lengths, config)


def _score_sums(scores: Tensor, lengths: Tensor, config: RunConfig) -> dict[str, float]:
    """Sums of `scores` `[B, F]`, by reward function, and of the lengths `[B]` of right and wrong answers."""
    sums: dict[str, float] = {}
    for reward, values in zip(config.rewards, scores.unbind(1), strict=True):
        sums[f"reward_sum/{reward.label}"] = float(values.nansum())
        sums[f"reward_count/{reward.label}"] = int((~values.isnan()).sum())
        if reward.name == "correctness":
            for name, rows in (("right", values == 1), ("wrong", values == 0)):
                sums[f"{name}_count"] = int(rows.sum())
                sums[f"{name}_tokens"] = float(lengths[rows].sum())
    return sums


def step_metrics(config: RunConfig, step: int, sums: Sums, grad_norm: Tensor, clock: Clock) -> dict[str, Any]:
    """The step's row of metrics.jsonl; `sums` are those of its batch and of the last of its `num_iterations`."""
    total = {name: float(value) for name, value in sums.items()}
    tokens, scored, pairs = (total.get(name, 0.0) for name in ("tokens", "scored", "pairs_formed"))
    completions = total["completions"]
    mean = _ratio(total["reward_sum"], scored)
    policy_norm, pair_norm = (total.get(f"{term}_grad_square", 0.0) ** 0.5 for term in ("policy", "pair"))
    low, high = (_ratio(total.get(f"clip_{side}_count"), tokens) for side in ("low", "high"))
    row = {
        "step": step,
        "reward": mean,
        "success": _ratio(total.get("right_count"), total.get("right_count", 0.0) + total.get("wrong_count", 0.0)),
        "reward_std": None if mean is None else max(total["reward_square_sum"] / scored - mean**2, 0.0) ** 0.5,
        "unscored_share": 1 - scored / completions,
        "reward_timeouts": int(total.get("reward_timeouts", 0)),
        "loss": total.get("policy_loss", 0.0) + config.lambda_reg * total.get("preference_loss", 0.0),
        "preference_loss": total.get("preference_loss", 0.0) if pairs else None,
        "grad_norm": float(grad_norm),
        "policy_grad_norm": policy_norm,
        "pair_grad_norm": pair_norm,
        "pair_grad_share": pair_norm / (pair_norm + policy_norm) if pair_norm else 0.0,
        "policy_parameter_grad_norm": _root(total.get("policy_parameter_grad_square")),
        "pair_parameter_grad_norm": _root(total.get("pair_parameter_grad_square")),
        "learning_rate": learning_rate(config, step),
        "pairs": int(pairs),
        "pair_accuracy": _ratio(total.get("pairs_correct"), total.get("pairs")),
        "chosen_logprob": _ratio(total.get("better_logprob_sum"), pairs),
        "rejected_logprob": _ratio(total.get("worse_logprob_sum"), pairs),
        "zero_variance_share": total["zero_variance_groups"] / total["groups"],
        "groups_sampled": int(total["groups_sampled"]),
        "sampling_rounds": int(total["sampling_rounds"]),
        "unusable_share": total["unusable"] / (total["groups_sampled"] * config.num_generations),
        "zero_gradient_share": total["zero_gradient_rows"] / completions,
        "truncated_share": total["truncated"] / completions,
        "completion_tokens": total["completion_tokens"] / completions,
        "right_tokens": _ratio(total.get("right_tokens"), total.get("right_count")),
        "wrong_tokens": _ratio(total.get("wrong_tokens"), total.get("wrong_count")),
        "tokens_trained": int(total.get("tokens", 0)),
        "tokens_computed": int(total.get("tokens_computed", 0)),
        "clip_share": None if low is None or high is None else low + high,
        "clip_low_share": low,
        "clip_high_share": high,
        "ratio": _ratio(total.get("ratio_sum"), tokens),
        "kl": _ratio(total.get("kl_sum"), tokens),
        "entropy": _ratio(total.get("entropy_sum"), tokens),
        "mismatch": _ratio(total.get("mismatch_sum"), total.get("logprobs_known")),
        "mismatch_max": total["mismatch_max"] if total.get("logprobs_known") else None,
        "effective_sample_share": _effective_share(total),
        "missing_logprob_share": _ratio(
            total.get("logprobs_missing"), total.get("logprobs_missing", 0) + total.get("logprobs_known", 0)
        ),
        "corrected_share": _ratio(total.get("weights_bounded"), total.get("importance_weights")),
        "tokens_per_second": total["completion_tokens"] / clock.total,
        "step_seconds": clock.total,
        **{f"{name}_seconds": seconds for name, seconds in clock.laps.items()},
        "peak_memory_mb": peak_memory_mb(torch.device(grad_norm.device)),
    }
    means = {
        f"reward/{reward.label}": _ratio(
            total.get(f"reward_sum/{reward.label}"), total.get(f"reward_count/{reward.label}")
        )
        for reward in config.rewards
    }
    return {name: row[name] for name in METRICS} | means


def evaluation_metrics(step: int, rows: list[dict[str, Any]], samples: int) -> dict[str, Any]:
    """The row of evaluations.jsonl, from the rows of its completions; the `samples` of a prompt are consecutive.

    A mean is null if nothing was scored. pass@k for k = 2, 4, 8, ... up to `samples`; pass@1 is `success`.
    """
    judged = [row["rewards"].get("correctness") for row in rows]
    prompts = [judged[first : first + samples] for first in range(0, len(rows), samples)]
    right = [score for score in judged if score is not None]
    rewards = [row["reward"] for row in rows if row["reward"] == row["reward"]]
    return {
        "step": step,
        "samples": len(rows),
        "success": sum(right) / len(right) if right else None,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        **{f"pass@{k}": pass_at_k(prompts, k) for k in (2**n for n in range(1, samples.bit_length()))},
    }


def pass_at_k(prompts: list[list[float | None]], k: int) -> float | None:
    """Mean over prompts of 1 - C(n - c, k) / C(n, k), c of n completions right: unbiased (arXiv 2107.03374).

    Prompts with fewer than k scored completions are left out; None if all are.
    """
    counts = [(len(scores), scores.count(1.0)) for scores in ([s for s in p if s is not None] for p in prompts)]
    passed = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k]
    return sum(passed) / len(passed) if passed else None


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MB (10^6 bytes): allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident * (1 if sys.platform == "darwin" else 1024) / 1e6


def _effective_share(total: dict[str, float]) -> float | None:
    square = total.get("importance_weights", 0.0) * total.get("weight_square_sum", 0.0)
    return total["weight_sum"] ** 2 / square if square else None


def _root(square: float | None) -> float | None:
    return None if square is None else square**0.5


def _ratio(part: float | None, total: float | None) -> float | None:
    return part / total if part is not None and total else None
