"""Warnings about a run that is training on nothing, or on something else than it samples."""

from typing import Any

from ..config import RunConfig
from ..update.correction import LARGE_MISMATCH

NO_SIGNAL_STEPS = 20
"""Steps after which a run is warned that no group's rewards have differed yet, or that no pair has been formed."""


class Health:
    """What the steps so far say about the run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._pairs = 0
        self._rewards_differed = False
        self._warned_of_mismatch = False

    def take(self, metrics: dict[str, Any]) -> None:
        """Takes a finished step's metrics into account."""
        self._pairs += metrics.get("pairs", 0)
        self._rewards_differed |= metrics.get("zero_variance_share", 0.0) < 1

    def warnings(self, metrics: dict[str, Any]) -> list[str]:
        """Takes a new step's metrics into account; returns what the user should be told now, each once a run."""
        self.take(metrics)
        found = []
        mismatch = metrics["mismatch"] or 0.0
        if mismatch > LARGE_MISMATCH and not self._warned_of_mismatch:
            self._warned_of_mismatch = True
            found.append(
                f"warning: the sampler's log-probs differ from the trainer's by {mismatch:.3f} nats a token; compare "
                "dtype, temperature and adapter of the two. The setting `correction` weights the difference"
            )
        if metrics["step"] == NO_SIGNAL_STEPS and not self._rewards_differed:
            found.append(
                f"warning: no group had differing rewards in {NO_SIGNAL_STEPS} steps, so there was no training signal; "
                "see completions/ for what the model writes and what the rewards give"
            )
        if self._config.lambda_reg > 0 and metrics["step"] == NO_SIGNAL_STEPS and self._pairs == 0:
            found.append(
                f"warning: lambda_reg = {self._config.lambda_reg}, but no pair was formed in {NO_SIGNAL_STEPS} steps: "
                f"the rewards of every group lie within reward_margin = {self._config.reward_margin:g} of each other, "
                "so the pair term has no effect; set a smaller reward_margin"
            )
        return found
