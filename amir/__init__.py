"""AMIR-GRPO: a lean trainer for GRPO-family objectives with a within-group preference term, on fused kernels.

The command is `amir`. From Python:

    config = amir.load_config("quickstart")
    directory = amir.RunDirectory(Path("runs/mine"), config)
    with directory:
        amir.Trainer(config, amir.load_policy(config), amir.load_task(config.task), directory).train()

Names are imported when they are first used, so that `import amir` loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import RunConfig
    from .config_reader import load_config
    from .errors import ConfigError, RunStopped
    from .policy.load import load_policy
    from .rewards import RewardFunction
    from .rollout.rollout import Rollout, Sampler
    from .run.directory import RunDirectory
    from .run.display import Display
    from .tasks import Example, Task, load_task
    from .trainer import Trainer

_MODULES = {
    "ConfigError": "errors",
    "Display": "run.display",
    "Example": "tasks",
    "RewardFunction": "rewards",
    "Rollout": "rollout.rollout",
    "RunConfig": "config",
    "RunDirectory": "run.directory",
    "RunStopped": "errors",
    "Sampler": "rollout.rollout",
    "Task": "tasks",
    "Trainer": "trainer",
    "load_config": "config_reader",
    "load_policy": "policy.load",
    "load_task": "tasks",
}

__all__ = [
    "ConfigError",
    "Display",
    "Example",
    "RewardFunction",
    "Rollout",
    "RunConfig",
    "RunDirectory",
    "RunStopped",
    "Sampler",
    "Task",
    "Trainer",
    "load_config",
    "load_policy",
    "load_task",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
