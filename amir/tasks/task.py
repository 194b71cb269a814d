"""What every task gives: examples to train on, examples held out, each with its answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A question in the user's words and the answer that is right."""

    question: str
    answer: str


@dataclass(frozen=True)
class Task:
    """Examples for training and for evaluation; no example is in both."""

    train: list[Example]
    held_out: list[Example]
