"""Was the answer right? Plain numbers are compared as numbers; everything else goes to math-verify in a worker process.

math-verify can hang on hostile text for seconds and guards itself with signals only, so it runs in processes that are
killed when their time is up.
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
"""Address space of a worker: math-verify needs a tenth of it, 9**9**9 more than any machine has."""


def _limit_worker() -> None:
    """Runs first in a worker: it ends with its parent, and a number too large to write down is no memory of others."""
    end_with_parent()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))


def _math_verify(gold: str, answer: str) -> bool:
    """Runs in a worker process: math-verify's own timeouts need its main thread."""
    from math_verify import parse, verify

    logging.disable()  # math-verify logs the text it gave up on
    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}")))


class Correctness:
    """1.0 for a right answer, 0.0 for a wrong one or none. Close it (or use it in `with`) to end its workers."""

    def __init__(self, timeout_seconds: float = 10.0, workers: int = 2) -> None:
        self.timeout_seconds = timeout_seconds
        self.given_up = 0
        """answers that could not be judged, for want of time or memory, or since math-verify failed"""
        self._workers = workers
        self._pool: ProcessPool | None = None

    def __call__(self, completions: list[str], golds: list[str]) -> list[float]:
        """Rewards of the completions, each against its gold answer; a grader that had to be killed counts as wrong."""
        verdicts = [self._decide(c, g) for c, g in zip(completions, golds, strict=True)]
        pending = {
            i: self._schedule(golds[i], verdict) for i, verdict in enumerate(verdicts) if isinstance(verdict, str)
        }
        return [float(self._result(pending[i]) if i in pending else v) for i, v in enumerate(verdicts)]

    def _decide(self, completion: str, gold: str) -> bool | str:
        """The verdict where numbers or equal strings decide, else the answer that math-verify must judge."""
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
        self.given_up += 1
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
