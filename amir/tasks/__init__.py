"""Tasks: where examples come from. One file a task; `load` turns its settings into a `Task`."""

from collections.abc import Callable
from typing import Any

from . import arithmetic, dataset, gsm8k
from .task import Example, Task

TASKS: dict[str, Callable[[Any], Task]] = {
    "arithmetic": arithmetic.load,
    "gsm8k": gsm8k.load,
    "dataset": dataset.load,
}

__all__ = ["TASKS", "Example", "Task"]
