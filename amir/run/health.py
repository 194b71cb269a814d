"""Warnings about a run without a training signal, or with a large mismatch between sampler and trainer."""

from typing import Any

from ..config import RunConfig
from ..update.correction import LARGE_MISMATCH

NO_SIGNAL_STEPS = 20
"""The step at which a run warns that no group has had differing rewards, or that no pair has been formed."""


class Health:
    """Collects the metrics of the steps so far and warns once about each problem."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._pairs = 0
        self._rewards_differed = False
        self._warned_of_mismatch = False

    def take(self, metrics: dict[str, Any]) -> None:
        """Adds the metrics of a step, without warnings."""
        self._pairs += metrics.get("pairs", 0)
        self._rewards_differed |= metrics.get("zero_variance_share", 0.0) < 1

    def warnings(self, metrics: dict[str, Any]) -> list[str]:
        """Adds the metrics of a new step; returns new warnings, each once per run."""
        self.take(metrics)
        warnings: list[str] = []
        mismatch = metrics["mismatch"] or 0.0
        if mismatch > LARGE_MISMATCH and not self._warned_of_mismatch:
            self._warned_of_mismatch = True
            warnings.append(
                f"warning: the sampler's log-probs differ from the trainer's by {mismatch:.3f} nats a token; compare "
                "dtype, temperature and adapter of the two, or set `correction` to weight the policy term"
            )
        if metrics["step"] == NO_SIGNAL_STEPS and not self._rewards_differed:
            warnings.append(
                f"warning: no group had differing rewards in {NO_SIGNAL_STEPS} steps, so there was no training signal; "
                "see the completions and their rewards in completions/"
            )
        if self._config.lambda_reg > 0 and metrics["step"] == NO_SIGNAL_STEPS and self._pairs == 0:
            warnings.append(
                f"warning: lambda_reg = {self._config.lambda_reg}, but no pair was formed in {NO_SIGNAL_STEPS} steps: "
                f"in every group the rewards differ by at most reward_margin = {self._config.reward_margin:g}, so "
                "the pair term has no effect; set a smaller reward_margin"
            )
        return warnings
