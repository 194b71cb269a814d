"""Equality of mathematics that only computer algebra can judge; runs in a worker process, which is killed when late.

math-verify reads the LaTeX. Two numbers are then compared to 40 digits, since its own comparison rounds; everything
else is left to it. Decimals are handed over as fractions, so that nothing is rounded on the way.
"""

import re
from typing import Any

DIGITS = 60


def warm_up() -> None:
    """Imports math-verify, and what it imports when it is first used."""
    _read("x")


def equal(answer: str, gold: str) -> bool:
    """Whether two texts, as `normalized` wrote them, mean the same."""
    from math_verify import verify

    read = [_read(text) for text in (gold, answer)]
    if not all(read):
        return False
    numbers = [_number(parsed[0]) for parsed in read]
    if any(number is not None for number in numbers):
        return all(number is not None for number in numbers) and _close(*numbers)
    return bool(verify(read[0], read[1]))


def _read(text: str) -> list[Any]:
    from math_verify import parse

    text = text.replace("\\lbrace ", "\\{").replace("\\rbrace", "\\}").replace(" degree", "^\\circ")
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"(\d+(?:\.\d+)?)\s?\^\\circ", r"(\1 \\cdot \\frac{\\pi}{180})", text)
    text = re.sub(r"(?<![\d.])(\d*)\.(\d+)", _as_fraction, text)
    return parse(f"\\boxed{{{text}}}")


def _as_fraction(match: re.Match[str]) -> str:
    return f"\\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}"


def _number(parsed: Any) -> Any | None:
    """The value of an expression without unknowns."""
    import sympy

    if not isinstance(parsed, sympy.Expr):
        return None
    parsed = parsed.subs({sympy.Symbol("i"): sympy.I, sympy.Symbol("e"): sympy.E})
    return parsed if not parsed.free_symbols and (parsed.is_number or parsed.is_infinite) else None


def _close(left: Any, right: Any) -> bool:
    if left.is_infinite or right.is_infinite:
        return left == right
    a, b = left.evalf(DIGITS), right.evalf(DIGITS)
    return bool(abs(a - b) <= 10 ** (20 - DIGITS) * max(1, abs(a)))
