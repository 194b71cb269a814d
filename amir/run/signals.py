"""The signals that ask a run to stop: Ctrl-C (SIGINT), SIGTERM, and SIGHUP, which a closed terminal sends."""

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

from ..distributed import SINGLE_PROCESS, Ranks

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

REPEATED_SECONDS = 2.0
"""torchrun passes on to its ranks a signal that they may have received themselves: within this time it is the same."""


class StopSignals:
    """A context in which the first of these signals raises KeyboardInterrupt where a run can stop.

    A single process is interrupted at once, or in the next `allow` if that was deferred. Several ranks stop together,
    in the first `allow` after any of them received a signal. A second signal ends the process at once. Signals that the
    process ignores remain ignored, and outside the main thread, where Python receives no signals, nothing changes.
    """

    def __init__(self, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.received: str | None = None
        """the name of the signal, once there was one"""
        self._ranks = ranks
        self._deferred = True
        self._received_at: float | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def defer(self) -> None:
        """Until the next `allow`, a signal is remembered only."""
        self._deferred = True

    def allow(self) -> None:
        """Raises KeyboardInterrupt if a signal was received, on any rank; later ones may interrupt this process."""
        self._deferred = self._ranks.size > 1
        received = next(filter(None, self._ranks.gather(self.received)), None)
        if received is not None:
            self.received = received
            raise KeyboardInterrupt(received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._received_at
        self._received_at = now
        if before is not None:
            if self._ranks.size == 1 or now - before > REPEATED_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.received = signal.Signals(number).name
        if self._ranks.first:
            self._announce()
        if not self._deferred:
            raise KeyboardInterrupt(self.received)

    def _announce(self) -> None:
        """Writes to the descriptor itself: a handler may have interrupted a write of Python's own streams."""
        with contextlib.suppress(OSError):
            text = f"{self.received}: the run saves a checkpoint and stops; a second signal stops it at once\n"
            os.write(2, text.encode())
