"""Every exception that the trainer raises on purpose, and how messages are worded.

    Exception
    ├── ValueError
    │   └── ConfigError            a run cannot be what its settings, files or arguments ask for (exit code 2)
    ├── RuntimeError
    │   ├── RunStopped             a run that began cannot go on; `--resume` continues it (exit code 1)
    │   │   └── RunDirectoryLost   the run's folder was deleted or moved while it ran
    │   ├── MicroBatchTooLarge     a micro-batch ran out of memory; the step is repeated in smaller ones
    │   └── CannotPack             a model's attention cannot be replaced by packed attention; plain rows serve it
    ├── RewardError                a reward function cannot be imported or called, or returned what is no reward
    └── ServerError                a sampling server answered, but not with completions
        ├── RequestRefused         it will not serve this request, however often it is sent
        ├── AdapterUnknown         it does not know the adapter, since it was restarted
        └── ServerBusy             overload or a restart: the same request may succeed later

ConfigError and RunStopped reach the user as one message. The others are caught inside the package and become one of
them or are handled. A message says what was found, what is expected, and what to do. This module imports nothing of the
package, so that a reward's process starts quickly.
"""

import difflib
import textwrap
from collections.abc import Iterable


class ConfigError(ValueError):
    """Settings, files or arguments that no run can be made of: names the key, the value and what is expected."""


class RunStopped(RuntimeError):
    """A run that began cannot go on. `--resume` continues it from its latest checkpoint."""


class RunDirectoryLost(RunStopped):
    """The run's folder was deleted or moved while it ran."""


class MicroBatchTooLarge(RuntimeError):
    """A micro-batch that ran out of memory, on this rank or on another."""

    def __init__(self, tokens: int, rows: int, reason: str) -> None:
        super().__init__(f"out of memory in a micro-batch of {rows} completions, {tokens} tokens: {reason}")
        self.tokens, self.rows, self.reason = tokens, rows, reason

    def __reduce__(self) -> tuple[type, tuple[int, int, str]]:
        return type(self), (self.tokens, self.rows, self.reason)


class CannotPack(RuntimeError):
    """This model's attention cannot be replaced by packed attention; the message is the reason."""


class RewardError(Exception):
    """A reward function cannot be imported or called, or returned what is no reward."""


class ServerError(Exception):
    """A sampling server answered, but not with completions."""


class RequestRefused(ServerError):
    """The server will not serve this request, however often it is sent."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


class AdapterUnknown(ServerError):
    """The server does not know the adapter, since it was restarted."""


class ServerBusy(ServerError):
    """The server is overloaded or restarting: the same request may succeed later."""


DIVERGED = "expected a smaller learning_rate or max_grad_norm, or dtype 'float32', in a run of its own"
"""What to do about weights or gradients that are NaN or infinite."""


def summary(error: BaseException, length: int = 500) -> str:
    """Type and message of an error of a library or of the user's code on one line, at most `length` characters."""
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
    return textwrap.shorten(text, length, placeholder=" ...")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word closest to a misspelt one, to be appended to a message; empty where none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; nearest: {close[0]!r}" if close else ""
