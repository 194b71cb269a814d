"""The success probability that GRPO's optimal updates predict (arXiv 2503.06639)."""

from . import report
from .recurrence import FixedPoint, Recurrence, contrastive_weights

__all__ = ["FixedPoint", "Recurrence", "contrastive_weights", "report"]
