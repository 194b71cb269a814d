"""Reward functions: `Rewards` calls those of a run; `SHAPING` and `Correctness` are the shipped ones.

Names are imported when they are first used, so that the process of a user's function loads nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .correctness import Correctness
    from .runner import RewardFunction, Rewards, Scores
    from .shaping import SHAPING
    from .total import total_reward

_MODULES = {
    "SHAPING": "shaping",
    "Correctness": "correctness",
    "RewardFunction": "runner",
    "Rewards": "runner",
    "Scores": "runner",
    "total_reward": "total",
}

__all__ = ["SHAPING", "Correctness", "RewardFunction", "Rewards", "Scores", "total_reward"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
