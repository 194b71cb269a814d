"""Code of a reward function's own process: imports the function, calls it, and converts its result to floats.

It does not import torch, so that a process starts quickly.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from ..errors import RewardError, summary

LARGEST_REWARD = 1e9
"""Bound of |reward|, so that sums of squares stay finite in float32."""


def prepare() -> None:
    """Prepares this process for a user's function: it ends with its parent, and starts processes as plain Python does.

    A spawned process would otherwise spawn its own as well, whatever the platform's default is.
    """
    end_with_parent()
    multiprocessing.set_start_method(None, force=True)
    _keep_handler_from_forks(signal.SIGTERM)


def _keep_handler_from_forks(number: signal.Signals) -> None:
    """Forked processes get the signal's default action instead of the handler that this process has now.

    `multiprocessing.Pool` ends its workers by SIGTERM, and waited forever for one that received it while it was being
    forked: Python drops the signals that await their handler then. The signal is therefore blocked during a fork.
    """
    handler, masks = signal.getsignal(number), threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def unblock_in_child() -> None:
        if signal.getsignal(number) == handler:
            signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock_in_child)


def end_with_parent() -> None:
    """Makes this process end when its parent process does, however that ends, and leaves the parent's process group.

    Signals to that group, as Ctrl-C and torchrun send them, are for the run, which may need this process for its step.
    """
    os.setpgid(0, 0)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def parameters(spec: str, arguments: dict[str, Any], offered: list[str], named_only: Sequence[str] = ()) -> list[str]:
    """The keywords that the function takes; RewardError if it cannot be imported or called."""
    return accepted_keywords(find(spec), arguments, offered, named_only)


def accepted_keywords(
    function: Callable[..., Any], arguments: dict[str, Any], offered: list[str], named_only: Sequence[str] = ()
) -> list[str]:
    """The `offered` keywords that a function takes in addition to its `arguments`; RewardError if it needs others.

    A function with `**` takes all of them, except those in `named_only`, which its signature must name.
    """
    signature = _signature(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    named = {name for name, p in signature.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {name for name, p in signature.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if by_position := sorted(name for name in required if name not in named):
        raise RewardError(f"takes {by_position[0]!r} by position, and is called with keywords only; make it a keyword")
    if missing := sorted(required - {*offered, *named_only} - arguments.keys()):
        raise RewardError(
            f"needs {', '.join(missing)}, and gets {', '.join(offered)}; set others in `arguments`, or give them "
            "defaults"
        )
    if (unknown := sorted(arguments.keys() - named)) and not takes_all:
        raise RewardError(
            f"takes no argument {unknown[0]!r}, only {', '.join(sorted(named))}; remove it from `arguments`"
        )
    taken = [name for name in offered if takes_all or name in named]
    taken += [name for name in named_only if name in named and name not in offered]
    return [name for name in taken if name not in arguments]


def call(spec: str, count: int, keywords: dict[str, Any]) -> list[float]:
    """The function's `count` rewards as floats, NaN for None."""
    function = find(spec)
    try:
        result = function(**keywords)
        if inspect.isawaitable(result):
            result = _event_loop().run(_awaited(result))
    except BaseException as error:  # noqa: BLE001 (a user's exception may not pickle)
        frames = traceback.extract_tb(error.__traceback__)[1:]
        where = "; ".join(f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}" for frame in frames[-3:])
        raise RewardError(f"raised {summary(error)} ({where})") from None
    return floats(result, count)


@cache
def _event_loop() -> asyncio.Runner:
    """One event loop for all calls, so that a client or a semaphore of the user's module can serve more than one."""
    return asyncio.Runner()


async def _awaited(result: Any) -> Any:
    return await result


@cache
def find(spec: str) -> Callable[..., Any]:
    """The function that module:function or file.py:function names."""
    place, _, name = spec.rpartition(":")
    function = _module(place)
    for part in name.split("."):
        if not hasattr(function, part):
            raise RewardError(f"{place} has no {name}")
        function = getattr(function, part)
    if not callable(function):
        raise RewardError(f"{name} is a {type(function).__name__}, and a function is expected")
    return function


def _module(place: str) -> Any:
    """Imports a module by name or file; modules in the working directory or beside the file can be imported."""
    path = Path(place).expanduser().absolute()
    is_file = place.endswith(".py")
    if is_file and not path.is_file():
        raise RewardError(f"{path}: no such file")
    sys.path.insert(0, str(path.parent if is_file else Path.cwd()))
    try:
        return _import_file(path) if is_file else importlib.import_module(place)
    except BaseException as error:  # noqa: BLE001 (a user's exception may not pickle)
        raise RewardError(f"importing {place} raised {summary(error)}") from None


def _import_file(path: Path) -> Any:
    """The module under the name that its folder on `sys.path` gives it: other processes import it by that name."""
    name = path.stem if path.stem not in sys.modules else f"reward_of_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _signature(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise RewardError("has no signature that Python can read; wrap it in your own function") from None


def floats(result: Any, count: int) -> list[float]:
    """A list, array or tensor of `count` numbers, bools, None or NaN as floats; RewardError for anything else."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(f"returned a {type(result).__name__}; expected a list of {count} numbers")
    if len(result) != count:
        raise RewardError(f"returned {len(result)} rewards for {count} completions; expected one per completion")
    return [_float(value, row) for row, value in enumerate(result)]


def _float(value: Any, row: int) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str | bytes):
        raise RewardError(f"returned {value!r:.60} for completion {row}; expected a number")
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except Exception:  # noqa: BLE001 (a user's object may raise anything)
        raise RewardError(f"returned {value!r:.60} for completion {row}; expected a number") from None
    if abs(number) > LARGEST_REWARD:
        raise RewardError(
            f"returned {number} for completion {row}; expected a finite number of at most {LARGEST_REWARD:g}, None "
            "or NaN"
        )
    return number
