"""The reward `correctness`: numbers are compared exactly; other answers by math-verify in a worker process.

math-verify can hang for seconds on hostile text, and its own time limits are signals only. It therefore runs in
processes that are killed at a time limit.
"""

import logging
import resource
import sys
from multiprocessing import get_context
from typing import Self

from pebble import ProcessFuture, ProcessPool

from ..tasks.answer import as_number, last_answer
from .worker import end_with_parent

WORKER_BYTES = 4 * 2**30
"""Address space of a worker process. math-verify needs a tenth of it, and an answer like 9**9**9 more than exists."""


def _limit_worker() -> None:
    """Runs first in a worker: makes it end with its parent, and limits its memory."""
    end_with_parent()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))


def _math_verify(gold: str, answer: str) -> bool:
    """Compares in a worker process, because math-verify's own timeouts need the main thread."""
    from math_verify import parse, verify

    logging.disable()  # math-verify logs text that it cannot parse
    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}")))


class Correctness:
    """1.0 for a right answer, 0.0 for a wrong or missing one. Close it, or use it in `with`, to end its workers."""

    def __init__(self, timeout_seconds: float = 10.0, workers: int = 2) -> None:
        self.timeout_seconds = timeout_seconds
        self.uncompared = 0
        """number of answers that could not be compared, because time or memory ran out or math-verify failed"""
        self._workers = workers
        self._pool: ProcessPool | None = None

    def __call__(self, completions: list[str], golds: list[str]) -> list[float]:
        """Rewards of the completions, each compared with its gold answer; 0.0 if the comparison had to be killed."""
        verdicts = [self._decide(c, g) for c, g in zip(completions, golds, strict=True)]
        pending = {
            i: self._schedule(golds[i], verdict) for i, verdict in enumerate(verdicts) if isinstance(verdict, str)
        }
        return [float(self._result(pending[i]) if i in pending else v) for i, v in enumerate(verdicts)]

    def _decide(self, completion: str, gold: str) -> bool | str:
        """The verdict if numbers or equal strings decide it, otherwise the answer for math-verify."""
        answer = last_answer(completion)
        if answer is None or answer == gold:
            return answer is not None
        left, right = as_number(answer), as_number(gold)
        return left == right if left is not None and right is not None else answer

    def _schedule(self, gold: str, answer: str) -> ProcessFuture:
        if self._pool is None:
            self._pool = ProcessPool(self._workers, initializer=_limit_worker, context=get_context("spawn"))
        return self._pool.schedule(_math_verify, args=(gold, answer), timeout=self.timeout_seconds)

    def _result(self, future: ProcessFuture) -> bool:
        if future.exception() is None:
            return future.result()
        self.uncompared += 1
        return False

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
