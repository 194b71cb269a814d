"""Tasks: the data of a run, one module per task. `load_task` loads the task that the settings name."""

from collections.abc import Callable
from typing import Any

from ..config import ArithmeticTask, DatasetTask, Gsm8kTask
from . import arithmetic, dataset, gsm8k
from .task import Example, Task

TASKS: dict[str, Callable[[Any], Task]] = {
    "arithmetic": arithmetic.load,
    "gsm8k": gsm8k.load,
    "dataset": dataset.load,
}


def load_task(settings: ArithmeticTask | Gsm8kTask | DatasetTask) -> Task:
    """The examples of a run's `task`; ConfigError if they cannot be read."""
    return TASKS[settings.name](settings)


__all__ = ["TASKS", "Example", "Task", "load_task"]
