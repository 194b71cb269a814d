"""Shipped rewards beside correctness: form, calibration, length. Each reads text in linear time.

All are called with keywords, a value a completion: `completions`, `correct` (1.0 or 0.0, of the correctness reward) and
`lengths` (tokens, EOS included), and take the settings named in `arguments`. Formulas of the forms and of the
calibration are those of AMIR-GRPO's released code (arXiv 2601.03661).
"""

import math
import re
from collections.abc import Callable, Sequence

from ..tasks.answer import as_number, last_answer

PLAIN_TAGS = ("think", "answer")
"""The tags that the shipped system prompt `think` asks for; `calibrated` adds analysis and confidence."""

NO_CONFIDENCE = 0.5
"""The confidence of a completion that states none."""

TAG_REWARD, TRAILING_PENALTY, MOST_TRAILING = 0.025, 0.001, 0.1

MAX_CHARACTERS = 100_000
"""Forms are read up to here."""


def integer(completions: list[str]) -> list[float]:
    """1.0 where the answer is an integer."""
    numbers = [as_number(last_answer(text) or "") for text in completions]
    return [float(number is not None and number.denominator == 1) for number in numbers]


def _marks(tags: Sequence[str]) -> list[str]:
    """Opening and closing tag of each name, in order; ValueError where `tags` is no list of names."""
    if isinstance(tags, str) or not tags:
        raise ValueError(f"tags must be a list of names, got {tags!r}")
    return [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]


def strict_format(completions: list[str], tags: Sequence[str] = PLAIN_TAGS) -> list[float]:
    """1.0 where a completion is the tags in order, each once, and nothing but white space around them."""
    return [float(_form(text, tags) == "strict") for text in completions]


def soft_format(completions: list[str], tags: Sequence[str] = PLAIN_TAGS) -> list[float]:
    """1.0 where the tags stand in order, whatever is around them."""
    return [float(_form(text, tags) is not None) for text in completions]


def xml_count(completions: list[str], tags: Sequence[str] = PLAIN_TAGS) -> list[float]:
    """0.025 for each opening and closing tag that stands exactly once, less 0.001 a character (at most 0.1) behind."""
    return [_xml_count(text[:MAX_CHARACTERS], tags) for text in completions]


def calibrated_confidence(completions: list[str], correct: list[float]) -> list[float]:
    """`1 - (confidence - correct)^2`, confidence in [0, 1] as the last <confidence> states it, 0.5 where none does."""
    return [1 - (confidence(text) - right) ** 2 for text, right in zip(completions, correct, strict=True)]


def cosine_length(
    lengths: list[int],
    correct: list[float],
    max_tokens: int,
    right: Sequence[float] = (2.0, 1.0),
    wrong: Sequence[float] = (-10.0, 0.0),
    exceeded: float = -10.0,
) -> list[float]:
    """Cosine from the first value (no tokens) to the second (`max_tokens`), of `right` or `wrong` answers.

    `exceeded` from `max_tokens` on. Formula and defaults of arXiv 2502.03373: right answers should be short, wrong ones
    may think longer.
    """

    if max_tokens < 1:
        raise ValueError(f"max_tokens must be positive, got {max_tokens}")

    def value(tokens: int, first: float, last: float) -> float:
        if tokens >= max_tokens:
            return exceeded
        return last + (first - last) * (1 + math.cos(math.pi * tokens / max_tokens)) / 2

    return [value(tokens, *(right if is_right else wrong)) for tokens, is_right in zip(lengths, correct, strict=True)]


def linear_length(lengths: list[int], start: int, end: int) -> list[float]:
    """0 up to `start` tokens, falling to -1 at `end` tokens and staying there."""
    if end <= start:
        raise ValueError(f"end must be above start, got start = {start}, end = {end}")
    return [-min(max((tokens - start) / (end - start), 0.0), 1.0) for tokens in lengths]


SHAPING: dict[str, Callable[..., list[float]]] = {
    function.__name__: function
    for function in (
        integer,
        strict_format,
        soft_format,
        xml_count,
        calibrated_confidence,
        cosine_length,
        linear_length,
    )
}


def confidence(text: str) -> float:
    """What the last <confidence> holds, as a number or a percentage, clipped to [0, 1]; 0.5 where it holds neither."""
    start = text.rfind("<confidence>")
    stated = text[start + len("<confidence>") :].partition("</confidence>") if start >= 0 else ("", "", "")
    found = re.fullmatch(r"\s{0,9}([+-]?(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20}))\s?(%?)\s{0,9}", stated[0][:64])
    if found is None or not stated[1]:
        return NO_CONFIDENCE
    return min(max(float(found[1]) / (100 if found[2] else 1), 0.0), 1.0)


def _form(text: str, tags: Sequence[str]) -> str | None:
    """`strict`, `soft`, or None where the tags do not stand in order."""
    marks, text = _marks(tags), text[:MAX_CHARACTERS]
    position, only_tags = 0, True
    for tag in tags:
        opened = text.find(f"<{tag}>", position)
        closed = text.find(f"</{tag}>", opened)
        if opened < 0 or closed < 0:
            return None
        only_tags &= not text[position:opened].strip()
        position = closed + len(f"</{tag}>")
    once = all(text.count(mark) == 1 for mark in marks)
    return "strict" if only_tags and once and not text[position:].strip() else "soft"


def _xml_count(text: str, tags: Sequence[str]) -> float:
    marks = _marks(tags)
    _, closed, behind = text.rpartition(marks[-1])
    trailing = len(behind.strip()) if closed else 0
    found = sum(text.count(mark) == 1 for mark in marks)
    return TAG_REWARD * found - min(TRAILING_PENALTY * trailing, MOST_TRAILING)
