"""The task `arithmetic`: every pair of small operands, a bounded choice of large ones, and the same ones every time."""

import hashlib
import json
import time

import pytest

from amir.config import ArithmeticTask
from amir.tasks import Task
from amir.tasks.arithmetic import MOST_PAIRS, load

DIGESTS = {4: "5f160e04176d05e9", 9: "f750dcbb7e4c7d1b", 30: "29123ffcd1ce8af5"}
"""Digests of the questions by `max_operand`: runs that were made with them can be repeated."""


def task(**settings: object) -> Task:
    return load(ArithmeticTask.model_validate({"name": "arithmetic"} | settings))


def operands(question: str) -> tuple[int, int]:
    words = question.removesuffix("? Answer with just the number.").split()
    return int(words[2]), int(words[4])


@pytest.mark.parametrize("largest", DIGESTS)
def test_the_questions_are_those_of_earlier_runs(largest: int) -> None:
    made = task(max_operand=largest)
    content = json.dumps([[e.question, e.answer] for e in [*made.train, *made.held_out]])
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == DIGESTS[largest]


@pytest.mark.parametrize("largest", [4, 9, 150, 198, 199, 999, 99_999, 10**40])
def test_it_is_linear_bounded_and_without_repeats(largest: int) -> None:
    began = time.monotonic()
    made = task(max_operand=largest)
    assert time.monotonic() - began < 5
    train, held_out = ([operands(e.question) for e in part] for part in (made.train, made.held_out))
    every = [*train, *held_out]
    assert len(set(every)) == len(every) <= 2 * MOST_PAIRS
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in held_out}
    assert all((b, a) in set(train) for a, b in train[:50])
    assert max(max(pair) for pair in every) <= largest
    assert [e.answer for e in made.train[:50]] == [str(a + b) for a, b in train[:50]]
    assert len(held_out) / len(every) == pytest.approx(0.3, abs=0.06)
    if largest < 199:
        assert len(every) == (largest + 1) ** 2
        assert {a for a, _ in train} == set(range(largest + 1))
        assert made.notes == ()
    else:
        assert max(max(pair) for pair in every) > 0.98 * largest
        assert made.notes[0].startswith(f"max_operand = {largest} gives ")
        assert "a seeded choice of 20000 of them" in made.notes[0]


def test_a_choice_is_the_same_every_time() -> None:
    assert task(max_operand=5000) == task(max_operand=5000)
    assert len(task(max_operand=5000, held_out=0.01).held_out) == pytest.approx(2 * 200, abs=2)
