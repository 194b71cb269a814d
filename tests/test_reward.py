"""Grading: what counts as the answer, plain numbers, symbolic answers, hostile text in bounded time."""

import re
import time
from fractions import Fraction

import pytest

from amir.rewards import Correctness
from amir.rewards.grading import compare
from amir.tasks import TASKS
from amir.tasks.answer import last_answer
from amir.tasks.exact_numbers import exact_number
from answer_pairs import BOXED, TEXTS
from tiny import run_config

ANSWERS = [
    ("1 + 7 = 8", "8"),
    ("so 10-12", "12"),
    ("it is -3.", "-3"),
    ("the total is 1,234.50 dollars", "1,234.50"),
    ("1,2 and 3", "3"),
    ("\\boxed{7} then 9", "7"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed{7", None),  # cut short: it may have become 72
    ("\\boxed{5} and \\boxed{6", "5"),
    ("the answer is 5" + " " * 3000, "5"),
    ("so \u22125", "-5"),
    ("no number", None),
    ("", None),
    ("5 " + "x" * 5000, "5"),
    ("\\boxed{5}" + " and so on" * 5000, "5"),
]


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_last_answer(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer


def test_numbers_are_exact_and_bounded() -> None:
    assert exact_number("1,234.50") == exact_number("1234.5") == Fraction(2469, 2)
    assert exact_number("9007199254740993") != exact_number("9007199254740992")
    assert exact_number("-0") == exact_number("0") == 0
    known = {
        "1e5": 100_000,
        "1e-05": Fraction(1, 100_000),
        "1/2": Fraction(1, 2),
        "3 1/2": Fraction(7, 2),
        "-3\\frac{1}{2}": Fraction(-7, 2),
        "\\frac12": Fraction(1, 2),
        "2^{10}": 1024,
        "2^3^2": 512,
        "5!": 120,
        "\\sqrt{16}": 4,
        "\\sqrt[3]{27}": 3,
        "2 \\times 10^5": 200_000,
        "(1+2)(3)": 9,
        "0.1\\overline{6}": Fraction(1, 6),
        "1 234 567": 1_234_567,
    }
    assert {text: exact_number(text) for text in known} == known
    unknown = (
        "9" * 5000,
        "x",
        "",
        "1,2",
        "12,34",
        "3.2.1",
        "1 2",
        "1/0",
        "9^9^9^9",
        "9!!!!",
        "(" * 500,
        "\\sqrt2",
        "2e9999999",
    )
    assert [text for text in unknown if exact_number(text) is not None] == []


@pytest.fixture(scope="module")
def grader():
    with Correctness(timeout_seconds=20) as made:
        yield made


def test_what_counts_as_the_right_answer(grader: Correctness) -> None:
    pairs = [(gold, f"So the answer is \\boxed{{{content}}}.", right) for gold, content, right in BOXED] + TEXTS
    verdicts = grader([text for _, text, _ in pairs], [gold for gold, _, _ in pairs])
    wrong = [(*pair, verdict) for pair, verdict in zip(pairs, verdicts, strict=True) if verdict != pair[2]]
    assert wrong == []
    assert grader.uncompared == 0


def test_the_verdict_does_not_depend_on_which_of_two_texts_is_gold(grader: Correctness) -> None:
    """But for choices, where a gold letter says that letters are compared."""
    choice = re.compile(r"(\\text\{)?\(?[A-J]\)?\}?")
    pairs = [pair for pair in BOXED if not any(map(choice.fullmatch, pair[:2]))]
    verdicts = grader([f"\\boxed{{{gold}}}" for gold, _, _ in pairs], [content for _, content, _ in pairs])
    assert [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict != pair[2]] == []


HOSTILE = [
    "{",
    "\\boxed{",
    "<answer>",
    "1 ",
    "1,",
    "-",
    "9",
    "$",
    "1/",
    "(1",
    "\\frac{",
    "answer is ",
    "#### ",
    "1 000 ",
]


@pytest.mark.parametrize("piece", [*HOSTILE, "\\boxed{1}", "5^{", "\n#### 1", "1.1.1.", "\\pm ", "x=", "\\sqrt{"])
def test_hostile_completions_are_searched_in_time_linear_in_their_length(piece: str) -> None:
    seconds = []
    for length in (20_000, 80_000):
        began = time.process_time()
        compare(last_answer(piece * (length // len(piece))) or "", "5")
        seconds.append(time.process_time() - began)
    assert seconds[1] < 10 * max(seconds[0], 0.05)


def test_plain_numbers_need_no_worker() -> None:
    with Correctness() as grader:
        assert grader(["8", "7.0", "-3", "none", "10 apples", "y"], ["8", "7", "3", "1", "10", "x"]) == [
            1,
            1,
            0,
            0,
            1,
            0,
        ]
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
