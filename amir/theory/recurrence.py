"""Success probability of iterated GRPO with binary rewards: recurrences, fixed points and two-cycles.

"Reinforcement Learning with Verifiable Rewards: GRPO's Effective Loss, Dynamics, and Success Amplification", Mroueh
(arXiv 2503.06639). Each iteration takes the policy that is optimal for the advantages of the previous one, without
clipping, under a KL penalty: to the reference policy, to the previous policy (mirror descent), or to both. The rewards
are binary, and a completion is one action. With p the success probability before, the log-odds L of success follow

    L_next = alpha * L_ref + (1 - alpha) * L + weight(p) / beta

where alpha is the reference's share of the KL penalty (1: reference alone, 0: mirror alone), and weight(p) is
1 / sqrt(p (1 - p) + epsilon) for advantages divided by the standard deviation, and 1 for centered ones alone. With both
penalties this holds if the first policy shares the reference's laws of completions given success and given failure, as
the reference itself does; otherwise a difference of Renyi divergences is added.

Everything is computed in log-odds: in float64 a probability of 1 - 1e-17 is 1, and log-odds of 39 are exact.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError

Normalization = Literal["std", "none"]

FINE, COARSE = 5e-3, 0.5
"""Distance of log-odds at which roots are looked for: where the weight varies, and outside."""
VARIES = 40.0
"""Log-odds beyond which p (1 - p) is below 1e-17, so that the weight is constant."""
ITERATIONS, CONVERGED = 20_000, 1e-10


def contrastive_weights(p: float, epsilon: float = 1e-5, normalization: Normalization = "std") -> tuple[float, float]:
    """(w+, w-): the advantage of a success and minus that of a failure, at success probability p.

    With "std": w+ = (1 - p) / sqrt(p (1 - p) + epsilon) and w- = p / sqrt(p (1 - p) + epsilon). With "none": 1 - p, p.
    Their sum is the weight of the recurrence.
    """
    scale = math.sqrt(p * (1 - p) + epsilon) if normalization == "std" else 1.0
    return (1 - p) / scale, p / scale


@dataclass(frozen=True)
class FixedPoint:
    """A success probability that an iteration does not change."""

    log_odds: float
    derivative: float
    """of the iteration there, the same in log-odds and in probabilities"""

    @property
    def p(self) -> float:
        """The success probability."""
        return probability(self.log_odds)

    @property
    def stable(self) -> bool:
        """Whether iterations that start near it converge to it."""
        return abs(self.derivative) < 1


@dataclass(frozen=True)
class Recurrence:
    """One setting of the recurrence of this module.

    Args:
        beta: coefficient of the KL penalty, above 0.
        p_ref: success probability of the reference policy, between 0 and 1.
        alpha: the reference's share of the penalty, from 0 (mirror) to 1 (reference alone).
        epsilon: added to the variance, from 0 (exclusive) to 1.
        normalization: "std" or "none", of the advantages.

    Raises:
        ConfigError: for values outside of these ranges.
    """

    beta: float
    p_ref: float
    alpha: float = 1.0
    epsilon: float = 1e-5
    normalization: Normalization = "std"

    def __post_init__(self) -> None:
        for name, value, valid, expected in (
            ("beta", self.beta, 0 < self.beta < math.inf, "a number above 0"),
            ("p_ref", self.p_ref, 0 < self.p_ref < 1, "a probability between 0 and 1; at 0 and 1 nothing changes"),
            ("alpha", self.alpha, 0 <= self.alpha <= 1, "a share from 0 (mirror) to 1 (reference alone)"),
            ("epsilon", self.epsilon, 0 < self.epsilon <= 1, "a number above 0 and at most 1"),
        ):
            if not valid:
                raise ConfigError(f"{name} = {value}: expected {expected}")
        if self.normalization not in ("std", "none"):
            raise ConfigError(f"normalization = {self.normalization!r}: expected 'std' or 'none'")

    def weight(self, level: float) -> float:
        """The weight at log-odds `level`, w+ + w-."""
        return 1 / math.sqrt(_variance(level) + self.epsilon) if self.normalization == "std" else 1.0

    def step(self, level: float) -> float:
        """The next log-odds."""
        return self.alpha * log_odds(self.p_ref) + (1 - self.alpha) * level + self.weight(level) / self.beta

    def derivative(self, level: float) -> float:
        """d step / d log-odds. For alpha = 1 at a fixed point it is h'(p) of the paper."""
        if self.normalization == "none":
            return 1 - self.alpha
        variance, skew = _variance(level), -math.tanh(level / 2)
        return 1 - self.alpha - skew * variance / (2 * self.beta * (variance + self.epsilon) ** 1.5)

    def trajectory(self, start: float, steps: int) -> list[float]:
        """Success probabilities from `start`, which is the first of `steps` + 1."""
        levels = [log_odds(start)]
        for _ in range(steps):
            levels.append(self.step(levels[-1]))
        return [probability(level) for level in levels]

    def fixed_points(self) -> list[FixedPoint]:
        """All of them, in rising order; none for the mirror, whose log-odds grow without bound."""
        if self.alpha == 0:
            return []
        points = []
        levels = list(self._grid())
        rises = [self._excess(level) > 0 for level in levels]
        for left, right, left_rises, right_rises in zip(levels, levels[1:], rises, rises[1:], strict=False):
            if left_rises != right_rises:
                root = self._bisect(left, right, left_rises)
                points.append(FixedPoint(root, self.derivative(root)))
        return points

    def limit(self, start: float) -> tuple[float, ...]:
        """What iterations from the probability `start` end in: one probability, the two of a cycle, or () for neither.

        The mirror's limit is 1, which it does not reach.
        """
        if self.alpha == 0:
            return (1.0,)
        level = log_odds(start)
        for _ in range(ITERATIONS):
            following = self.step(level)
            after = self.step(following)
            if abs(following - level) < CONVERGED:
                return (probability(level),)
            if abs(after - level) < CONVERGED:
                return tuple(sorted((probability(level), probability(following))))
            level = following
        return ()

    def _excess(self, level: float) -> float:
        """Positive where an iteration raises the log-odds."""
        return self.step(level) - level

    def _grid(self) -> Iterator[float]:
        """Log-odds from the reference's to above the last root, fine where the weight varies."""
        level = log_odds(self.p_ref)
        largest = 1 / math.sqrt(self.epsilon) if self.normalization == "std" else 1.0
        last = level + largest / (self.alpha * self.beta) + COARSE
        while level < last:
            yield level
            level += FINE if abs(level) < VARIES else COARSE
        yield last

    def _bisect(self, left: float, right: float, left_rises: bool) -> float:
        """The root between two log-odds, to the last bit."""
        while left < (middle := (left + right) / 2) < right:
            if (self._excess(middle) > 0) == left_rises:
                left = middle
            else:
                right = middle
        return left


def log_odds(p: float) -> float:
    """log(p / (1 - p)); ConfigError unless 0 < p < 1."""
    if not 0 < p < 1:
        raise ConfigError(f"success probability {p}: expected a number between 0 and 1, both excluded")
    return math.log(p) - math.log1p(-p)


def probability(level: float) -> float:
    """The probability with log-odds `level`."""
    return 1 / (1 + math.exp(-level)) if level >= 0 else math.exp(level) / (1 + math.exp(level))


def _variance(level: float) -> float:
    """p (1 - p), exact also where p rounds to 1."""
    small = math.exp(-abs(level))
    return small / (1 + small) ** 2
