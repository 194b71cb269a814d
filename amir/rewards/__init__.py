"""Reward functions: `Rewards` calls those of a run; `SHAPING` and `Correctness` are the shipped ones."""

from .correctness import Correctness
from .runner import RewardFunction, Rewards, Scores
from .shaping import SHAPING
from .total import total_reward

__all__ = ["SHAPING", "Correctness", "RewardFunction", "Rewards", "Scores", "total_reward"]
