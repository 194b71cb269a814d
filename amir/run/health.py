"""Warnings while a run trains: no training signal, no gradient, cut completions, a sampler that disagrees.

The steps are looked at in windows of `WINDOW`; what is wrong in a whole window is reported at its end, and again only
after a window without it. A run that ends before its first window is full is looked at as far as it got.
"""

from collections.abc import Callable
from statistics import fmean
from typing import Any

from ..config import RunConfig
from ..update.correction import LARGE_MISMATCH

WINDOW = 10
"""Steps that are looked at together."""

Rows = list[dict[str, Any]]


class Health:
    """Collects the metrics of the steps and words what is wrong with them."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._steps = 0
        self._rows: Rows = []
        self._found: set[str] = set()
        self._had_gradient = False
        self._warned_of_mismatch = False

    def take(self, metrics: dict[str, Any]) -> list[str]:
        """Adds the metrics of a step; returns the warnings that are due."""
        self._steps += 1
        self._rows.append(metrics)
        self._had_gradient |= metrics.get("grad_norm") != 0
        warnings = self._mismatch(metrics)
        if len(self._rows) == WINDOW:
            warnings += self._window()
        return warnings

    def closing(self) -> list[str]:
        """What to say after the last step: the warnings of a short run, and whether any step had a gradient."""
        warnings = self._window() if 0 < self._steps < WINDOW else []
        if self._steps and not self._had_gradient:
            decayed = ", and only weight decay changed them" if self._config.weight_decay else ""
            warnings.append(f"warning: the gradient was 0 in every step, so no step trained the weights{decayed}")
        return warnings

    @property
    def trained(self) -> bool:
        """Whether a step had a gradient."""
        return self._had_gradient

    def _window(self) -> list[str]:
        """The warnings of the window, which is then empty."""
        rows, self._rows = self._rows, []
        steps = f"steps {rows[0]['step']} to {rows[-1]['step']}" if len(rows) > 1 else f"step {rows[0]['step']}"
        problems = {name: text for name, check in CHECKS.items() if (text := check(rows, self._config))}
        warnings = [f"warning: in {steps} {text}" for name, text in problems.items() if name not in self._found]
        self._found = set(problems)
        return warnings

    def _mismatch(self, metrics: dict[str, Any]) -> list[str]:
        mismatch = metrics.get("mismatch") or 0.0
        if mismatch <= LARGE_MISMATCH or self._warned_of_mismatch:
            return []
        self._warned_of_mismatch = True
        return [
            (
                f"warning: the sampler's log-probs differ from the trainer's by {mismatch:.3f} nats a token; compare "
                "dtype, temperature and adapter of the two, or set `correction` to weight the policy term"
            )
        ]


def _unscored(rows: Rows, config: RunConfig) -> str | None:
    share = fmean(row["unscored_share"] for row in rows)
    if share <= 0.5:
        return None
    return (
        f"{share:.0%} of the completions have no reward: every reward function returned None or NaN for them, or "
        "reached its time limit; see the completions and their rewards in completions/"
    )


def _equal_rewards(rows: Rows, config: RunConfig) -> str | None:
    if any(row["zero_variance_share"] < 1 for row in rows) or _unscored(rows, config):
        return None
    mean = fmean(row["reward"] for row in rows if row["reward"] is not None)
    return (
        f"no group had differing rewards (their mean is {mean:.3g}), so rewards gave no training signal; see the "
        "completions and their rewards in completions/, and choose other questions, another reward, or a larger "
        "num_generations"
    )


def _no_gradient(rows: Rows, config: RunConfig) -> str | None:
    differed = any(row["zero_variance_share"] < 1 for row in rows)
    if not differed or any(row["grad_norm"] != 0 for row in rows):
        return None
    masked = " and mask_truncated_completions leaves cut completions out" if config.mask_truncated_completions else ""
    return (
        f"the gradient was 0 although rewards differed: {fmean(row['truncated_share'] for row in rows):.0%} of the "
        f"completions were cut at max_completion_length{masked}; see completions/"
    )


def _no_pairs(rows: Rows, config: RunConfig) -> str | None:
    differed = any(row["zero_variance_share"] < 1 for row in rows)
    if not differed or config.lambda_reg == 0 or any(row["pairs"] for row in rows):
        return None
    return (
        f"no pair was formed, so lambda_reg = {config.lambda_reg:g} has no effect: in every group the rewards differ "
        f"by at most reward_margin = {config.reward_margin:g}; set a smaller reward_margin"
    )


def _truncated(rows: Rows, config: RunConfig) -> str | None:
    share = fmean(row["truncated_share"] for row in rows)
    if share <= 0.5:
        return None
    return (
        f"{share:.0%} of the completions were cut at max_completion_length = {config.max_completion_length} before "
        "they ended; set a larger max_completion_length, or prompt for shorter answers"
    )


CHECKS: dict[str, Callable[[Rows, RunConfig], str | None]] = {
    "unscored": _unscored,
    "equal rewards": _equal_rewards,
    "no gradient": _no_gradient,
    "no pairs": _no_pairs,
    "truncated": _truncated,
}
"""What is looked for in a window of steps; each gives a text if it is found."""
