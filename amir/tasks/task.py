"""The data of a task: training and held-out examples, each with its answer."""

from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class Example:
    """A question, or a conversation that ends with it, and its right answer."""

    question: str
    answer: str | None
    messages: tuple[dict[str, str], ...] = ()
    columns: dict[str, Any] = field(default_factory=dict)
    """the row of the data, for reward functions"""
    place: str = ""
    """where the row is, such as "rows.jsonl, line 3", for error messages"""
    response_prefix: str = ""
    """what the chat template begins each response with, such as "<think>\\n"; known once the prompt is encoded"""

    def chat(self) -> list[dict[str, str]]:
        """The conversation, without the run's own system prompt."""
        return list(self.messages) or [{"role": "user", "content": self.question}]


@dataclass(frozen=True)
class Task:
    """Training and held-out examples; no example is in both."""

    train: list[Example]
    held_out: list[Example]
    notes: tuple[str, ...] = ()
    """lines to report before the run starts"""

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the training rows."""
        return list(dict.fromkeys(name for example in self.train for name in example.columns))


def disjoint(train: list[Example], held_out: list[Example]) -> Task:
    """A task without the training examples that repeat a held-out prompt; their count is noted."""
    held_out_prompts = {_key(example) for example in held_out}
    remaining = [example for example in train if _key(example) not in held_out_prompts]
    dropped = len(train) - len(remaining)
    if train and not remaining:
        raise ConfigError(
            f"task: all {len(train)} training examples repeat a held-out prompt; expected held-out data with other "
            "prompts"
        )
    note = f"dropped {dropped} of {len(train)} training examples, which repeat a held-out prompt"
    return Task(remaining, held_out, (note,) if dropped else ())


def _key(example: Example) -> tuple[str, ...]:
    return tuple(" ".join(message["content"].split()) for message in example.chat())
