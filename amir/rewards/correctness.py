"""The reward `correctness`: exact where it can be (`grading.py`), by computer algebra in a worker process elsewhere.

Computer algebra can hang for seconds on hostile text, and math-verify's own time limits are signals only. It therefore
runs in processes that are killed at a time limit.
"""

import logging
import resource
import sys
from typing import Self

from pebble import ProcessFuture, ProcessPool

from ..tasks.answer import last_answer
from . import algebra
from .grading import Verdict, compare, normalized
from .processes import RewardContext
from .worker import end_with_parent

WORKER_BYTES = 4 * 2**30
"""Address space of a worker process. math-verify needs a tenth of it, and an answer like 9**9**9 more than exists."""


def _limit_worker() -> None:
    """Runs first in a worker: makes it end with its parent, limits its memory, and imports what takes seconds.

    So the time limit of the first answer does not include the import.
    """
    end_with_parent()
    algebra.warm_up()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))


def _equal_by_algebra(answer: str, gold: str) -> bool:
    logging.disable()  # math-verify logs text that it cannot parse
    return algebra.equal(answer, gold)


class Correctness:
    """1.0 for a right answer, 0.0 for a wrong or missing one. Close it, or use it in `with`, to end its workers."""

    def __init__(self, timeout_seconds: float = 10.0, workers: int = 2) -> None:
        self.timeout_seconds = timeout_seconds
        self.uncompared = 0
        """number of answers that could not be compared, because time or memory ran out or computer algebra failed"""
        self._workers = workers
        self._pool: ProcessPool | None = None

    def __call__(self, completions: list[str], golds: list[str]) -> list[float]:
        """Rewards of the completions, each compared with its gold answer; 0.0 if the comparison had to be killed."""
        answers = [last_answer(completion) for completion in completions]
        verdicts = [
            Verdict.DIFFERENT if answer is None else compare(answer, gold)
            for answer, gold in zip(answers, golds, strict=True)
        ]
        pending = {
            i: self._schedule(answers[i] or "", golds[i])
            for i, verdict in enumerate(verdicts)
            if verdict is Verdict.NEEDS_ALGEBRA
        }
        return [
            float(self._result(pending[i]) if i in pending else verdict is Verdict.EQUAL)
            for i, verdict in enumerate(verdicts)
        ]

    def _schedule(self, answer: str, gold: str) -> ProcessFuture:
        if self._pool is None:
            self._pool = ProcessPool(self._workers, initializer=_limit_worker, context=RewardContext())
        texts = (normalized(answer), normalized(gold))
        return self._pool.schedule(_equal_by_algebra, args=texts, timeout=self.timeout_seconds)

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
