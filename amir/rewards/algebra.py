"""Equality of mathematics that only computer algebra can judge; runs in a worker process, which is killed when late.

latex2sympy reads a whole text, or nothing: a number is never cut out of what it cannot read. math-verify compares. Two
numbers are compared to 380 digits here, since its own comparison rounds. Decimals are handed over as fractions, so that
nothing is rounded on the way.
"""

import re
from typing import Any

from ..errors import summary

DIGITS = 400
"""Numbers are computed to these digits, and are equal if all but the last 20 agree."""


def warm_up() -> None:
    """Imports math-verify, and what it imports when it is first used."""
    equal("x", "y")


def equal(answer: str, gold: str) -> bool:
    """Whether two texts, as `normalized` wrote them, mean the same; RuntimeError where that cannot be computed."""
    try:
        return _equal(answer, gold)
    except Exception as error:  # noqa: BLE001 (sympy raises anything, some of which does not pickle)
        raise RuntimeError(summary(error)) from None


def _equal(answer: str, gold: str) -> bool:
    from math_verify import verify

    read = [_read(text) for text in (gold, answer)]
    if None in read:
        return False
    numbers = [_number(parsed) for parsed in read]
    if any(number is not None for number in numbers):
        return all(number is not None for number in numbers) and _close(*numbers)
    return bool(verify(*read, float_rounding=DIGITS, numeric_precision=DIGITS, allow_set_relation_comp=True))


def _read(text: str) -> Any | None:
    """The mathematics of a whole text, None if it is anything else, or has no value; letters keep their case.

    `I` is a letter like any other, and the imaginary unit is `i`; the parser, which knows the reverse, reads another
    letter in its place.
    """
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    text = text.replace("\\lbrace ", "\\{").replace("\\rbrace", "\\}").replace(" degree", "^\\circ")
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"(\d+(?:\.\d+)?)\s?\^\\circ", r"(\1 \\cdot \\frac{\\pi}{180})", text)
    text = re.sub(r"(?<![\d.])(\d*)\.(\d+)", _as_fraction, text)
    text = re.sub(r"(?<![\\a-zA-Z])I(?![a-zA-Z])", r"\\Upsilon ", text)
    cleaning = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="none")
    letters = ConversionConfig(lowercase_symbols=False)
    try:
        parsed = latex2sympy(text, normalization_config=cleaning, conversion_config=letters)
    except Exception:  # noqa: BLE001 (the parser raises bare exceptions)
        return None
    return None if parsed.has(sympy.zoo, sympy.nan) else parsed


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
    return bool(abs(a - b) * 10 ** (DIGITS - 20) <= max(1, abs(a)))
