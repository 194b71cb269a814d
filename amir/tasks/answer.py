"""Extracts the answer from a completion: the last boxed expression, else the last number."""

import re
from fractions import Fraction

MAX_CHARACTERS = 2000
"""Only the end of a completion is searched, because the answer comes last and parsing time grows with length."""

MAX_DIGITS = 400
"""Longer digit strings are not read as numbers; Python refuses to convert more than 4,300 digits."""

_NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def last_answer(text: str) -> str | None:
    """The content of the last `\\boxed{}`, else the last number, else None."""
    tail = text.rstrip()[-MAX_CHARACTERS:].replace("\u2212", "-")
    boxed = last_boxed(tail)
    if boxed is not None:
        return boxed.strip()
    numbers = _NUMBER.findall(tail)
    return numbers[-1] if numbers else None


def as_number(text: str) -> Fraction | None:
    """`text` as an exact number (thousands commas and a leading $ are allowed), or None if it is not a number."""
    cleaned = text.strip().lstrip("$").replace(",", "")
    return Fraction(cleaned) if len(cleaned) <= MAX_DIGITS and re.fullmatch(r"-?\d+(?:\.\d+)?", cleaned) else None


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{}` whose braces close, else None."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 0, start + len("\\boxed{")
        for position in range(begin, len(text)):
            if text[position] == "}" and depth == 0:
                return text[begin:position]
            depth += {"{": 1, "}": -1}.get(text[position], 0)
        start = text.rfind("\\boxed{", 0, start)
    return None
