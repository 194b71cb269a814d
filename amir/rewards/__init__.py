"""Rewards: what a completion earns. `Rewards` runs those of a run; `SHAPING` and `Correctness` are the shipped ones."""

from .correctness import Correctness
from .runner import Rewards, Scores
from .shaping import SHAPING

__all__ = ["SHAPING", "Correctness", "Rewards", "Scores"]
