"""Shipped rewards other than correctness: format, calibration and length. Each needs time linear in the text.

They are called with keywords that have one value per completion: `completions`, `correct` (1.0 or 0.0, the correctness
reward) and `lengths` (tokens, EOS included), and with the settings in `arguments`. The formulas of the format and
calibration rewards are those of AMIR-GRPO's released code (arXiv 2601.03661).
"""

import math
import re
from collections.abc import Callable, Sequence

from ..tasks.answer import last_answer
from ..tasks.exact_numbers import exact_number

PLAIN_TAGS = ("think", "answer")
"""The tags in the shipped system prompt `think`; `calibrated` adds analysis and confidence."""

NO_CONFIDENCE = 0.5
"""The confidence of a completion that does not state one."""

TAG_REWARD, TRAILING_PENALTY, MOST_TRAILING = 0.025, 0.001, 0.1

MAX_CHARACTERS = 100_000
"""Format rewards read this many characters of a completion."""


def integer(completions: list[str]) -> list[float]:
    """1.0 if the answer is an integer."""
    numbers = [exact_number((last_answer(text) or "").strip("$")) for text in completions]
    return [float(number is not None and number.denominator == 1) for number in numbers]


def _marks(tags: Sequence[str]) -> list[str]:
    """Opening and closing tag of each name, in order; ValueError if `tags` is not a list of names."""
    if isinstance(tags, str) or not tags:
        raise ValueError(f"tags must be a list of names such as ['think', 'answer'], got {tags!r}")
    return [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]


def strict_format(completions: list[str], tags: Sequence[str] = PLAIN_TAGS) -> list[float]:
    """1.0 if a completion has each tag once, in order, and only white space outside them."""
    return [float(_form(text, tags) == "strict") for text in completions]


def soft_format(completions: list[str], tags: Sequence[str] = PLAIN_TAGS) -> list[float]:
    """1.0 if a completion has the tags in order, with any text outside them."""
    return [float(_form(text, tags) is not None) for text in completions]


def xml_count(completions: list[str], tags: Sequence[str] = PLAIN_TAGS) -> list[float]:
    """0.025 for each tag that occurs exactly once, minus 0.001 for each character after the last one (at most 0.1)."""
    return [_xml_count(text[:MAX_CHARACTERS], tags) for text in completions]


def calibrated_confidence(completions: list[str], correct: list[float]) -> list[float]:
    """`1 - (confidence - correct)^2`; the confidence in [0, 1] is that in the last <confidence>, by default 0.5."""
    return [1 - (confidence(text) - right) ** 2 for text, right in zip(completions, correct, strict=True)]


def cosine_length(
    lengths: list[int],
    correct: list[float],
    max_tokens: int,
    right: Sequence[float] = (2.0, 1.0),
    wrong: Sequence[float] = (-10.0, 0.0),
    exceeded: float = -10.0,
) -> list[float]:
    """Cosine from the first value of `right` or `wrong` (0 tokens) to the second (`max_tokens`).

    From `max_tokens` on, the reward is `exceeded`. Formula and defaults are those of arXiv 2502.03373: right answers
    should be short, and wrong ones may be longer.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be positive, got {max_tokens}")

    def value(tokens: int, first: float, last: float) -> float:
        if tokens >= max_tokens:
            return exceeded
        return last + (first - last) * (1 + math.cos(math.pi * tokens / max_tokens)) / 2

    return [value(tokens, *(right if is_right else wrong)) for tokens, is_right in zip(lengths, correct, strict=True)]


def linear_length(lengths: list[int], start: int, end: int) -> list[float]:
    """0 up to `start` tokens, falling linearly to -1 at `end` tokens, then -1."""
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
    """The number or percentage in the last <confidence>, clipped to [0, 1]; 0.5 if there is neither."""
    start = text.rfind("<confidence>")
    stated = text[start + len("<confidence>") :].partition("</confidence>") if start >= 0 else ("", "", "")
    number = re.fullmatch(r"\s{0,9}([+-]?(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20}))\s?(%?)\s{0,9}", stated[0][:64])
    if number is None or not stated[1]:
        return NO_CONFIDENCE
    return min(max(float(number[1]) / (100 if number[2] else 1), 0.0), 1.0)


def _form(text: str, tags: Sequence[str]) -> str | None:
    """`strict`, `soft`, or None if the tags are not in order."""
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
    tags_once = sum(text.count(mark) == 1 for mark in marks)
    return TAG_REWARD * tags_once - min(TRAILING_PENALTY * trailing, MOST_TRAILING)
