"""Runs each stage in a process of its own, which reports its parts and rows as they come.

The parent (`run_stage`) stops a part at its limit and a stage at its own, writes a row that says why, and starts a new
process for the parts that are left. So a crash, a hang or a bad state of the GPU costs one part only.
"""

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from .stage import STAGES, Part, Row, Stage, failed, in_stage, message_of

MIN_SECONDS = 3
"""A process is not started with less of a stage's limit left."""
START_SECONDS = 45
"""Limit of a process until its first part begins: importing torch and transformers, making the inputs."""

Record = Callable[[Row, bool], None]
"""Takes a row, and whether it is ours: then its failure fails the check."""


def run_stage(
    name: str, command: list[str], environment: dict[str, str], record: Record, patience: float = 1.0
) -> None:
    """Runs a stage. `command` starts its process; `--skip N` is added to leave out the first N parts.

    `patience` multiplies every limit.
    """
    stage, began, skip = STAGES[name], time.monotonic(), 0
    stage = stage._replace(seconds=stage.seconds * patience)
    while True:
        seconds_left = stage.seconds - (time.monotonic() - began)
        if seconds_left < MIN_SECONDS:
            reason = f"its limit of {stage.seconds:g} s is spent; the parts from number {skip} on are missing"
            record(failed("stage", name, reason), True)
            return
        child = _Child([*command, "--skip", str(skip)], environment)
        try:
            skip_to = _follow(child, name, stage, seconds_left, patience, record)
        finally:
            child.stop()
        if skip_to is None:
            return
        skip = skip_to


def _follow(
    child: "_Child", name: str, stage: Stage, seconds_left: float, patience: float, record: Record
) -> int | None:
    """Records what a process reports; returns the number of the part to continue with, or None if there is none.

    None also if the process fails before its first part, since every repetition would fail.
    """
    part: dict[str, Any] = {"number": None, "name": "start", "own": True, "seconds": START_SECONDS, "last": True}
    stage_end = time.monotonic() + seconds_left
    part_end = time.monotonic() + START_SECONDS * patience
    while True:
        until = min(stage_end, part_end)
        try:
            message = child.messages.get(timeout=max(until - time.monotonic(), 0))
        except queue.Empty:
            seconds, of = (stage.seconds, " of the stage") if until == stage_end else (part["seconds"] * patience, "")
            record(_stopped(name, part, f"stopped at the limit of {seconds:g} s{of}"), part["own"])
            return next_after(part)
        if "part" in message:
            part = message["part"]
            part_end = time.monotonic() + part["seconds"] * patience
        elif "row" in message:
            record(message["row"], part["own"])
        elif message["exit"] == 0:
            return None
        else:
            if not message.get("reported"):
                record(_stopped(name, part, f"exit code {message['exit']}: {child.last_error()}"), part["own"])
            return next_after(part)


def next_after(part: dict[str, Any]) -> int | None:
    """The number of the part to continue with; None after the last one, and where no part was reached."""
    return None if part["last"] else part["number"] + 1


def _stopped(stage: str, part: dict[str, Any], reason: str) -> Row:
    contender = "stage" if part["own"] else part["name"]
    (row,) = in_stage([failed(contender, f"{stage}, {part['name']}", reason)], stage, part["name"])
    return row


class _Child:
    """The process of a stage, and the messages that it sends: a part begins, a row, the exit code."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=self._errors, text=True, start_new_session=True
        )
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        reported = False
        for line in self._process.stdout:
            message = json.loads(line)
            reported = "broken" in message
            if not reported:
                self.messages.put(message)
        self.messages.put({"exit": self._process.wait(), "reported": reported})

    def last_error(self) -> str:
        """The last line that the process wrote to its standard error."""
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1][:300] if lines else "no message"

    def stop(self) -> None:
        """Ends the process with all that it started; a process that hangs in a driver is left behind."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return
        self._errors.close()


# ---- inside the process --------------------------------------------------------------------------------------------


def serve(name: str, skip: int, rehearse: bool) -> int:
    """Runs the parts of a stage in this process and sends what they yield to the parent; returns the exit code."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not a message

    from amir_kernels._backend import interpreting
    from amir_kernels._interpreter import use_torch_products

    from .sizes import REHEARSAL, real_sizes

    if interpreting():
        use_torch_products()
    sizes = REHEARSAL if rehearse else real_sizes()
    module = importlib.import_module(f"{__package__}.{STAGES[name].module}")
    parts = module.parts(sizes)
    for number, part in list(enumerate(parts))[skip:]:
        begun = {"number": number, "last": number == len(parts) - 1}
        _send(channel, {"part": begun | {"name": part.name, "seconds": part.seconds, "own": part.own}})
        for row in in_stage(_caught(part, name), name, part.name):
            _send(channel, {"row": row})
        if not _healthy(sizes.device):
            _send(channel, {"broken": part.name})
            return 3
    return 0


def _send(channel: IO[str], message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def _caught(part: Part, stage: str) -> Iterator[Row]:
    """The part's rows; an error of the part becomes one more row."""
    try:
        yield from part.rows()
    except failures() as error:
        yield failed("stage" if part.own else part.name, f"{stage}, {part.name}", message_of(error))


def failures() -> tuple[type[BaseException], ...]:
    """Errors that become a row."""
    known = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return (*known, TypeError, ValueError)
    return (*known, TypeError, ValueError, TritonError)


def _healthy(device: str) -> bool:
    """Whether the GPU still answers this process: after an illegal access it does not."""
    import torch

    if device != "cuda":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
