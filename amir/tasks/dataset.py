"""The task `dataset`: the user's rows, with a prompt template or chat messages, answers, and a held-out part."""

import math
import random
import string
from decimal import Decimal
from typing import Any

from ..config import DatasetTask
from ..errors import ConfigError
from .answer import last_boxed
from .rows import Row, read_rows
from .task import Example, Task, disjoint

ROLES = ("system", "user", "assistant")


Template = list[tuple[str, str | None]]
"""Pieces of text, each with the column that follows it."""


def load(settings: DatasetTask) -> Task:
    """Reads the rows and splits off the held-out ones; the split of a share is seeded."""
    rows = read_rows(settings.path, subset=settings.subset, split=settings.split)
    if settings.held_out_path is not None:
        held_out_rows = read_rows(settings.held_out_path, "task.held_out_path")
        return disjoint(make_examples(rows, settings), make_examples(held_out_rows, settings))
    if settings.held_out_split is not None:
        held_out_rows = read_rows(settings.path, subset=settings.subset, split=settings.held_out_split)
        return disjoint(make_examples(rows, settings), make_examples(held_out_rows, settings))
    return _drawn(make_examples(rows, settings), settings.held_out or 0.0)


def _drawn(examples: list[Example], share: float) -> Task:
    count = round(share * len(examples))
    if share and not 0 < count < len(examples):
        raise ConfigError(
            f"task.held_out = {share}: that is {count} of {len(examples)} rows; expected a share that leaves rows for "
            "training and for evaluation"
        )
    drawn = set(random.Random(0).sample(range(len(examples)), count))
    return disjoint(
        [example for row, example in enumerate(examples) if row not in drawn], [examples[row] for row in sorted(drawn)]
    )


def make_examples(rows: list[Row], settings: DatasetTask) -> list[Example]:
    """One example per row; ConfigError names the first row that cannot be converted."""
    template = None if settings.prompt is None else _template(settings.prompt)
    return [_example(place, row, template, settings) for place, row in rows]


def _template(prompt: str) -> Template:
    try:
        parts = list(string.Formatter().parse(prompt))
    except ValueError as error:
        raise ConfigError(
            f"task.prompt = {prompt!r}: {error}; write a literal brace of the text as {{{{ or }}}}"
        ) from None
    for _, column, form, conversion in parts:
        if column == "" or form or conversion:
            raise ConfigError(
                f"task.prompt = {prompt!r}: expected only the name of a column in braces; write a literal brace of the "
                "text as {{ or }}"
            )
    if all(column is None for _, column, _, _ in parts):
        raise ConfigError(
            f"task.prompt = {prompt!r}: it names no column, so every prompt would be the same; put the name of a "
            "column in braces, such as {question}"
        )
    return [(text, column) for text, column, _, _ in parts]


def _example(place: str, row: dict[str, Any], template: Template | None, settings: DatasetTask) -> Example:
    answer = None if settings.answer is None else _answer(place, row, settings)
    if template is None:
        messages = _messages(place, row, settings.messages or "")
        question = filled = messages[-1]["content"]
    else:
        messages = ()
        cells = ["" if column is None else _text(place, row, column) for _, column in template]
        question = "".join(text + cell for (text, _), cell in zip(template, cells, strict=True))
        filled = "".join(cells)
    if not filled.strip():
        raise ConfigError(f"{place}: its prompt is empty ({question!r:.60}); correct or remove the row")
    return Example(question, answer, messages, row, place)


def _value(place: str, row: dict[str, Any], column: str) -> Any:
    """The value of a column, or of a field in it, as in `reward_model.ground_truth` or `choices.0`."""
    value: Any = row
    for name in [column] if column in row else column.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            raise ConfigError(f"{place}: no column {column!r}; expected one of {', '.join(map(repr, _names(row)))}")
    if missing := [part for part in (value if isinstance(value, list) else [value]) if _is_missing(part)]:
        raise ConfigError(f"{place}: column {column!r} is {missing[0]}; expected text or a finite number")
    return value


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float | Decimal) and not math.isfinite(value))


def _names(row: dict[str, Any]) -> list[str]:
    """The columns of a row; of a column with fields, its fields."""
    return [
        full
        for name, value in row.items()
        for full in ([f"{name}.{field}" for field in _names(value)] if isinstance(value, dict) and value else [name])
    ]


def _text(place: str, row: dict[str, Any], column: str) -> str:
    """A cell as text; the entries of a list become lines."""
    value = _value(place, row, column)
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, str | int | float | Decimal) for part in parts):
        names = ", ".join(_names({column: value})) if isinstance(value, dict) and value else ""
        raise ConfigError(
            f"{place}: column {column!r} is a {type(value).__name__}; expected text, a number, or a list of those"
            + f"; name one of its fields, {names:.200}" * bool(names)
        )
    return "\n".join(map(_plain, parts))


def _plain(part: str | float | Decimal) -> str:
    """Text, or a number without an exponent: 0.00001, and not Python's 1e-05."""
    return format(Decimal(str(part)), "f") if isinstance(part, float | Decimal) else str(part)


def _answer(place: str, row: dict[str, Any], settings: DatasetTask) -> str:
    column = settings.answer or ""
    text = _text(place, row, column)
    if settings.answer_format == "plain":
        answer = ", ".join(text.split("\n")) if isinstance(_value(place, row, column), list) else text.strip()
    elif settings.answer_format == "gsm8k":
        answer = text.rpartition("####")[2].strip().replace(",", "") if "####" in text else ""
    else:
        answer = (last_boxed(text) or "").strip()
    if not answer:
        expected = {"plain": "text", "gsm8k": "'####' and a final answer", "boxed": "an answer in \\boxed{}"}
        raise ConfigError(
            f"{place}: column {column!r} is {text[:60]!r}; answer_format = {settings.answer_format!r} expects "
            f"{expected[settings.answer_format]}"
        )
    return answer


def _messages(place: str, row: dict[str, Any], column: str) -> tuple[dict[str, str], ...]:
    messages = _value(place, row, column)
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"{place}: column {column!r} is {messages!r:.60}; expected a list of messages with role and content"
        )
    for number, message in enumerate(messages):
        valid = isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        if not valid:
            raise ConfigError(
                f"{place}: column {column!r}, message {number} is {message!r:.60}; expected a role "
                f"({', '.join(ROLES)}) and a content that is text"
            )
        if others := [key for key, value in message.items() if value and key not in ("role", "content")]:
            raise ConfigError(
                f"{place}: column {column!r}, message {number} has {', '.join(map(repr, others))} beside role and "
                "content; prompts are text only, so write what the model should see into content, or remove it"
            )
    if messages[-1]["role"] != "user":
        raise ConfigError(
            f"{place}: column {column!r} ends with a message of role {messages[-1]['role']!r}; expected the user's last"
        )
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)
