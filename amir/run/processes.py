"""Starts the processes of a run on this machine, one for each rank, as torchrun does.

The run itself reports why it ended. A rank that a signal killed cannot, so that is reported here.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..errors import RunStopped

FAILED = 1


def run_in_processes(count: int, arguments: Sequence[str]) -> int:
    """Runs `python -m amir ARGUMENTS` in `count` processes; returns 0, or the exit code of the first that failed.

    RunStopped if a signal killed that one.
    """
    logging.disable(logging.CRITICAL)  # torch.distributed's own, in this process only
    if count > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(settings, sys.executable)("-m", "amir", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            raise RunStopped(f"rank {rank} {_killed_by(-failure.exitcode)}") from None
        return failure.exitcode
    except SignalException:
        return FAILED
    return 0


def _killed_by(number: int) -> str:
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    memory = ", which the system sends when memory runs out; set a smaller micro_batch_tokens, or use fewer processes"
    return f"was killed by {name}{memory if number == signal.SIGKILL else ''}"
