"""Starts the processes of a run on this machine, one for each rank, as torchrun does; only the run itself reports."""

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

FAILED = 1


def run_in_processes(count: int, arguments: Sequence[str]) -> int:
    """Runs `python -m amir ARGUMENTS` in `count` processes; returns 0, or the exit code of the first that failed."""
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
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else FAILED
    except SignalException:
        return FAILED
    return 0
