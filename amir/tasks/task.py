"""What every task gives: examples to train on, examples held out, each with its answer."""

from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class Example:
    """A question in the user's words, or a conversation that ends with it, and the answer that is right."""

    question: str
    answer: str | None
    messages: tuple[dict[str, str], ...] = ()
    columns: dict[str, Any] = field(default_factory=dict)
    """the row it came from, for reward functions"""
    place: str = ""
    """where that row stands"""

    def chat(self) -> list[dict[str, str]]:
        """The conversation, without the run's own system prompt."""
        return list(self.messages) or [{"role": "user", "content": self.question}]


@dataclass(frozen=True)
class Task:
    """Examples for training and for evaluation; no example is in both."""

    train: list[Example]
    held_out: list[Example]
    notes: tuple[str, ...] = ()
    """what is to be said before the run starts"""


def disjoint(train: list[Example], held_out: list[Example]) -> Task:
    """A task whose training examples ask nothing that is held out; how many had to go is noted."""
    asked = {_key(example) for example in held_out}
    kept = [example for example in train if _key(example) not in asked]
    gone = len(train) - len(kept)
    if train and not kept:
        raise ConfigError("every training example asks what a held-out one asks; expected other questions held out")
    note = f"{gone} training examples ask what a held-out one asks and are left out of training"
    return Task(kept, held_out, (note,) if gone else ())


def _key(example: Example) -> tuple[str, ...]:
    return tuple(" ".join(message["content"].split()) for message in example.chat())
