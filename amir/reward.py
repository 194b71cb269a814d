"""Was the answer right? Plain numbers are compared as numbers; everything else goes to math-verify in a worker process.

math-verify can hang on hostile text for seconds and guards itself with signals only, so it runs in processes that are
killed when their time is up.
"""

import logging
import multiprocessing
import re
from concurrent.futures import TimeoutError as FutureTimeout
from fractions import Fraction
from typing import Self

from pebble import ProcessExpired, ProcessPool

MAX_CHARACTERS = 2000
"""Only the end of a completion is looked at: an answer stands there, and parsing time grows with length."""

MAX_DIGITS = 400
"""Longer digit strings are no answer of any task; Python refuses to convert them beyond 4300 digits."""

_NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def last_answer(text: str) -> str | None:
    """The content of the last `\\boxed{}`, else the last number, else None."""
    tail = text.rstrip()[-MAX_CHARACTERS:].replace("\u2212", "-")
    boxed = _last_boxed(tail)
    if boxed is not None:
        return boxed.strip()
    numbers = _NUMBER.findall(tail)
    return numbers[-1] if numbers else None


def as_number(text: str) -> Fraction | None:
    """`text` as an exact number (thousands commas and a leading $ allowed), or None where it is anything else."""
    cleaned = text.strip().lstrip("$").replace(",", "")
    return Fraction(cleaned) if len(cleaned) <= MAX_DIGITS and re.fullmatch(r"-?\d+(?:\.\d+)?", cleaned) else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 0, start + len("\\boxed{")
        for position in range(begin, len(text)):
            if text[position] == "}" and depth == 0:
                return text[begin:position]
            depth += {"{": 1, "}": -1}.get(text[position], 0)
        start = text.rfind("\\boxed{", 0, start)
    return None


def _math_verify(gold: str, answer: str) -> bool:
    """Runs in a worker process: math-verify's own timeouts need its main thread."""
    from math_verify import parse, verify

    logging.disable()  # math-verify logs the text it gave up on
    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}")))


class Correctness:
    """1.0 for a right answer, 0.0 for a wrong one or none. Close it (or use it in `with`) to end its workers."""

    def __init__(self, timeout_seconds: float = 10.0, workers: int = 2) -> None:
        self.timeout_seconds = timeout_seconds
        self.timeouts = 0
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

    def _schedule(self, gold: str, answer: str):  # type: ignore[no-untyped-def]
        if self._pool is None:
            self._pool = ProcessPool(max_workers=self._workers, context=multiprocessing.get_context("spawn"))
        return self._pool.schedule(_math_verify, args=(gold, answer), timeout=self.timeout_seconds)

    def _result(self, future) -> bool:  # type: ignore[no-untyped-def]
        try:
            return future.result()
        except (FutureTimeout, ProcessExpired):
            self.timeouts += 1
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
