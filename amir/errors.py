"""Every exception that the trainer raises on purpose, and how messages are worded.

    Exception
    ├── ValueError
    │   ├── ConfigError            invalid settings, files or arguments (exit code 2)
    │   └── NotExactNumber         a text is not an exact number, or a number that is too large
    ├── RuntimeError
    │   ├── RunStopped             a started run cannot continue as it is; `--resume` continues it later (exit code 1)
    │   │   └── RunDirectoryLost   the run's folder was deleted or moved while it ran
    │   ├── MicroBatchTooLarge     a micro-batch ran out of memory; the step is repeated in smaller ones
    │   └── CannotPack             a model's attention cannot be replaced by packed attention; padded rows are used
    ├── RewardError                a reward function cannot be imported or called, or returned no list of rewards
    └── ServerError                a sampling server answered without completions
        ├── RequestRefused         the server rejects this request; sending it again does not help
        ├── AdapterUnknown         the server does not have the adapter, because it was restarted
        └── ServerBusy             the server is overloaded or restarting: the same request may succeed later

ConfigError and RunStopped reach the user as one message. The others are caught inside the package and become one of
them or are handled. A message says what was found, what is expected, and what to do. This module imports nothing else
of the package, so that the process of a reward function starts quickly.
"""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Invalid settings, files or arguments; the message names the key, the value and what is expected."""


class NotExactNumber(ValueError):
    """A text is not an exact number, or a number that is too large."""


class RunStopped(RuntimeError):
    """A started run cannot continue as it is. `--resume` continues it from its latest checkpoint."""


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
    """A reward function cannot be imported or called, or returned no list of rewards."""


class ServerError(Exception):
    """A sampling server answered without completions."""


class RequestRefused(ServerError):
    """The server rejects this request; sending it again does not help."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


class AdapterUnknown(ServerError):
    """The server does not have the adapter, because it was restarted."""


class ServerBusy(ServerError):
    """The server is overloaded or restarting: the same request may succeed later."""


DIVERGED = "start a new run with a smaller learning_rate or max_grad_norm, or with dtype: float32"
"""What to do when weights or gradients are NaN or infinite."""


def summary(error: BaseException, length: int = 500) -> str:
    """Type and message of an error of a library or of the user's code on one line, at most `length` characters."""
    text = " ".join(f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode().split())
    return shortened(text, length)


def shortened(line: str, length: int) -> str:
    """The line, or its start if it has more than `length` characters."""
    return line if len(line) <= length else f"{line[: length - 4]} ..."


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word closest to a misspelt one, as a suffix for a message; empty if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; nearest: {close[0]!r}" if close else ""
