"""Processes that rewards run in: multiprocessing's `spawn`, without importing the script of the caller again.

Otherwise every script that computes a reward would need a `__main__` guard, although the processes call functions of
this package only.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess, current_process
from typing import Any

_STARTS = threading.Lock()


class RewardProcess(SpawnProcess):
    """A spawned process that does not know the main module of its parent."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        with _unnamed_main_module():
            return SpawnProcess._Popen(process_obj)


class RewardContext(SpawnContext):
    """The context whose processes are `RewardProcess`."""

    Process = RewardProcess


def in_reward_process() -> bool:
    """Whether this process is one that rewards run in."""
    return isinstance(current_process(), RewardProcess)


@contextlib.contextmanager
def _unnamed_main_module() -> Iterator[None]:
    """Without name and file of the main module, by which `spawn` would import it in the new process."""
    attributes = vars(sys.modules["__main__"])
    with _STARTS:
        named: dict[str, Any] = {name: attributes[name] for name in ("__spec__", "__file__") if name in attributes}
        attributes.update(dict.fromkeys(named))
        try:
            yield
        finally:
            attributes.update(named)
