"""Warnings of a run: which steps they are about, when they come again, and what is said after the last step."""

from pathlib import Path
from typing import Any

import pytest

from amir.run.health import WINDOW, Health
from test_trainer import Lines, ParityGrader, run
from tiny import Grader, run_config

GOOD = {
    "reward": 0.5,
    "unscored_share": 0.0,
    "zero_variance_share": 0.5,
    "grad_norm": 1.0,
    "pairs": 3,
    "truncated_share": 0.1,
    "mismatch": None,
}
EQUAL = {"zero_variance_share": 1.0, "grad_norm": 0.0, "pairs": 0, "reward": 0.0}
WORDS = {
    "unscored": ({"unscored_share": 0.75}, "75% of the completions have no reward"),
    "equal": (EQUAL, "no group had differing rewards (their mean is 0), so rewards gave no training signal"),
    "no gradient": ({"grad_norm": 0.0}, "the gradient was 0 although rewards differed"),
    "no pairs": ({"pairs": 0}, "no pair was formed, so lambda_reg = 0.5 has no effect"),
    "truncated": ({"truncated_share": 0.625}, "62% of the completions were cut at max_completion_length = 9"),
}
"""What is wrong with each step, and the warning."""


def said(steps: list[dict[str, Any]], **changes: object) -> list[list[str]]:
    """The warnings after each step."""
    health = Health(run_config(**changes))
    return [health.take(GOOD | row | {"step": step}) for step, row in enumerate(steps, 1)]


@pytest.mark.parametrize("name", WORDS)
def test_each_problem_is_reported_at_the_end_of_the_window_that_has_it(name: str) -> None:
    wrong, words = WORDS[name]
    after = said([wrong] * WINDOW)
    assert [bool(texts) for texts in after] == [False] * (WINDOW - 1) + [True]
    (text,) = after[-1]
    assert text.startswith(f"warning: in steps 1 to {WINDOW} {words}")


def test_a_good_run_has_no_warning() -> None:
    assert not any(said([{}] * 4 * WINDOW))


def test_one_good_step_is_a_signal() -> None:
    assert not any(said([EQUAL] * (WINDOW - 1) + [{}]))


def test_a_problem_that_stays_is_reported_once_and_one_that_returns_again() -> None:
    after = said([EQUAL] * 2 * WINDOW + [{}] * WINDOW + [EQUAL] * WINDOW)
    warned = [step for step, texts in enumerate(after, 1) if texts]
    assert warned == [WINDOW, 4 * WINDOW]


def test_plain_grpo_needs_no_pairs() -> None:
    assert not any(said([{"pairs": 0}] * WINDOW, lambda_reg=0.0))


def test_a_short_run_is_looked_at_as_far_as_it_got() -> None:
    health = Health(run_config())
    assert not any(health.take(GOOD | EQUAL | {"step": step}) for step in (1, 2))
    equal, untrained = health.closing()
    assert "in steps 1 to 2 no group had differing rewards" in equal
    assert untrained == "warning: the gradient was 0 in every step, so no step trained the weights"


def test_weight_decay_is_named_where_it_alone_changed_the_weights() -> None:
    health = Health(run_config(weight_decay=0.1))
    health.take(GOOD | EQUAL | {"step": 1})
    assert health.closing()[-1].endswith("so no step trained the weights, and only weight decay changed them")


def test_after_a_run_that_trained_nothing_is_said() -> None:
    health = Health(run_config())
    for step in range(WINDOW + 3):
        health.take(GOOD | {"step": step + 1})
    assert health.closing() == []
    assert Health(run_config()).closing() == []


class SameGrader(Grader):
    """Gives every completion the same."""

    def __call__(self, completions: list[str], golds: list[str]) -> list[float]:
        return [0.0] * len(completions)


def test_a_run_whose_rewards_never_differ_says_so_and_that_nothing_was_trained(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", SameGrader)
    made = run(tmp_path, run_config(max_steps=2, eval_prompts=0, max_completion_length=3))
    assert isinstance(made.display, Lines)
    text = "\n".join(made.display.messages)
    assert "in steps 1 to 2 no group had differing rewards (their mean is 0)" in text
    assert "so no step trained the weights" in text
    assert "of the completions were cut at max_completion_length = 3" in text
    assert not made.health.trained
    assert "no step trained the weights" in (tmp_path / "log.txt").read_text()


def test_warnings_count_the_steps_before_a_resume(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", SameGrader)
    config = {"eval_prompts": 0, "prompts_per_step": 1, "save_steps": WINDOW - 1}
    run(tmp_path, run_config(max_steps=WINDOW - 1, **config))
    resumed = run(tmp_path, run_config(max_steps=WINDOW, **config), resume=True)
    assert [text for text in resumed.display.messages if f"in steps 1 to {WINDOW} no group had differing" in text]


def test_a_run_that_trained_is_called_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", ParityGrader)
    assert run(tmp_path, run_config(eval_prompts=0)).health.trained
