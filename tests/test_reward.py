"""Grading: what counts as the answer, plain numbers, symbolic answers, hostile text in bounded time."""

import time

import pytest

from amir.rewards import Correctness
from amir.tasks import TASKS
from amir.tasks.answer import as_number, last_answer
from tiny import run_config

ANSWERS = [
    ("1 + 7 = 8", "8"),
    ("so 10-12", "12"),
    ("it is -3.", "-3"),
    ("the total is 1,234.50 dollars", "1,234.50"),
    ("1,2 and 3", "3"),
    ("\\boxed{7} then 9", "7"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed{7", "7"),
    ("\\boxed{5} and \\boxed{6", "5"),
    ("the answer is 5" + " " * 3000, "5"),
    ("so \u22125", "-5"),
    ("no number", None),
    ("", None),
    ("5 " + "x" * 5000, None),
]


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_last_answer(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer


def test_numbers_are_exact_and_bounded() -> None:
    assert as_number("1,234.50") == as_number("1234.5")
    assert as_number("9007199254740993") != as_number("9007199254740992")
    assert as_number("-0") == as_number("0")
    for text in ("9" * 5000, "x", "1e5", "1/2", "", "--1"):
        assert as_number(text) is None


@pytest.fixture(scope="module")
def grader():
    with Correctness(timeout_seconds=20) as made:
        yield made


def test_plain_numbers_need_no_worker() -> None:
    with Correctness() as grader:
        assert grader(["8", "7.0", "-3", "none", "10 apples"], ["8", "7", "3", "1", "10"]) == [1, 1, 0, 0, 1]
        assert grader._pool is None


def test_symbolic_answers_go_to_math_verify(grader: Correctness) -> None:
    texts = ["\\boxed{\\frac{1}{2}}", "\\boxed{x+1}", "\\boxed{2\\cdot 6}", "\\boxed{\\sqrt{12}}", "\\boxed{y}"]
    assert grader(texts, ["0.5", "1+x", "12", "2\\sqrt{3}", "x"]) == [1, 1, 1, 1, 0]


def test_hostile_text_is_wrong_in_bounded_time_and_the_next_answer_is_still_graded() -> None:
    with Correctness(timeout_seconds=4) as grader:
        texts = ["\\boxed{" + "\\frac{" * 200 + "1" + "}{2}" * 200 + "}", "\\boxed{9^{9^{9^{9}}}}", "9" * 1_000_000]
        began = time.monotonic()
        assert grader(texts, ["1", "2", "3"]) == [0, 0, 0]
        assert time.monotonic() - began < 30
        assert grader(["\\boxed{x+1}"], ["1+x"]) == [1]


def test_sums_are_split_by_unordered_pair_and_training_sees_every_operand() -> None:
    task = TASKS["arithmetic"](run_config().task)

    def pairs(examples):
        found = [tuple(sorted(map(int, e.question.split("What is ")[1].split("?")[0].split(" + ")))) for e in examples]
        assert [str(a + b) for a, b in found] == [e.answer for e in examples]
        return set(found)

    train, held_out = pairs(task.train), pairs(task.held_out)
    assert not train & held_out
    assert len(task.train) + len(task.held_out) == 100
    assert {operand for pair in train for operand in pair} == set(range(10))
    assert len(task.held_out) * 5 >= 128
