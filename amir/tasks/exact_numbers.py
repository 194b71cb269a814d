"""Exact numbers: what an answer's text says, as a fraction, where it is arithmetic on integers, decimals and fractions.

Read: digits with thousands separators (`1,234`, `1 234`), decimals as written, `1e-5`, fractions, mixed numbers, roots
of perfect powers, factorials, powers, the four operations, parentheses, in plain text or in LaTeX. Everything is exact:
0.1 is 1/10, and 2^99 is not rounded. None where the text is anything else, or larger than the limits here.
"""

import math
import re
from fractions import Fraction

from ..errors import NotExactNumber

MAX_CHARACTERS = 2_000
MAX_DIGITS = 400
"""Of one number; Python refuses to convert strings beyond 4,300 digits."""
MAX_BITS = 200_000
"""Of a result's numerator and denominator together: about 60,000 digits."""
MAX_FACTORIAL = 5_000
MAX_DEPTH = 50

_NUMBER = (
    r"\d{1,3}(?:[ .]\d{3})+,\d+(?![\d,])|\d{1,3}(?:_\d{3})+(?![\d_])|"
    r"\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d{1,3}(?: \d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+"
)
_TOKEN = re.compile(
    rf"\s*(?:(?P<number>(?:{_NUMBER})(?:[eE][+-]?\d{{1,6}})?)"
    r"|(?P<command>\\[dtc]?frac|\\sqrt|\\times|\\cdot|\\div)|(?P<sign>\*\*|[-+*/^!(){}\[\]×·÷]))"
)
_TIMES, _OVER = {"*", "×", "·", "\\times", "\\cdot"}, {"/", "÷", "\\div"}


_REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s?\{?(\d+)\}?|\((\d+)\))")


def exact_number(text: str) -> Fraction | None:
    """The number that `text` says, or None."""
    try:
        return _Parser(_tokens(_REPEATING.sub(_repeating, text))).whole() if 0 < len(text) <= MAX_CHARACTERS else None
    except (NotExactNumber, ZeroDivisionError, RecursionError):
        return None


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, position, text = [], 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotExactNumber
        kind = match.lastgroup or ""
        tokens.append((kind, match[kind]))
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent: sum of products of signed powers of atoms."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._place, self._depth = tokens, 0, 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self._place != len(self._tokens):
            raise NotExactNumber
        return value

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._place] if self._place < len(self._tokens) else ("", "")

    def _take(self, *expected: str) -> bool:
        if self._peek()[1] in expected and self._peek()[0] != "number":
            self._place += 1
            return True
        return False

    def _sum(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotExactNumber
        value = self._product()
        while self._peek()[1] in ("+", "-"):
            sign = -1 if self._take("-") else 1
            if sign == 1:
                self._take("+")
            value = _bounded(value + sign * self._product())
        self._depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            if self._take(*_TIMES):
                value = _bounded(value * self._signed())
            elif self._take(*_OVER):
                value = _bounded(value / self._signed())
            elif self._peek()[1] in ("(", "\\sqrt"):
                value = _bounded(value * self._power())
            else:
                return value

    def _signed(self) -> Fraction:
        if self._take("-"):
            return -self._signed()
        if self._take("+"):
            return self._signed()
        return self._power()

    def _power(self) -> Fraction:
        base = self._atom()
        while self._take("!"):
            if base.denominator != 1 or not 0 <= base <= MAX_FACTORIAL:
                raise NotExactNumber
            base = Fraction(math.factorial(int(base)))
        if self._take("^", "**"):
            return _power(base, self._exponent())
        return base

    def _exponent(self) -> Fraction:
        if self._take("-"):
            return -self._power()
        return self._power()

    def _atom(self) -> Fraction:
        kind, text = self._peek()
        if kind == "number":
            self._place += 1
            return self._mixed(_fraction(text))
        if re.fullmatch(r"\\[dtc]?frac", text):
            self._place += 1
            top, bottom = self._argument()
            return _bounded(top / bottom)
        if self._take("\\sqrt"):
            return self._root()
        for opening, closing in (("(", ")"), ("{", "}"), ("[", "]")):
            if self._take(opening):
                value = self._sum()
                if not self._take(closing):
                    raise NotExactNumber
                return value
        raise NotExactNumber

    def _mixed(self, value: Fraction) -> Fraction:
        """`3 1/2` and `3\\frac{1}{2}`: a whole number, then a proper fraction."""
        if value.denominator != 1:
            return value
        if re.fullmatch(r"\\[dtc]?frac", self._peek()[1]):
            self._place += 1
            top, bottom = self._argument()
            return value + self._proper(top, bottom)
        ahead = self._tokens[self._place : self._place + 3]
        if [kind for kind, _ in ahead] == ["number", "sign", "number"] and ahead[1][1] == "/":
            self._place += 3
            return value + self._proper(_fraction(ahead[0][1]), _fraction(ahead[2][1]))
        return value

    @staticmethod
    def _proper(top: Fraction, bottom: Fraction) -> Fraction:
        if not 0 <= top < bottom:
            raise NotExactNumber
        return top / bottom

    def _argument(self) -> tuple[Fraction, Fraction]:
        """Both arguments of a LaTeX fraction: `{1}{2}`, `12`, `1{2}`."""
        kind, text = self._peek()
        if kind == "number" and len(text) == 2 and text.isdigit():
            self._place += 1
            return Fraction(int(text[0])), Fraction(int(text[1]))
        return self._group(), self._group()

    def _group(self) -> Fraction:
        kind, text = self._peek()
        if kind == "number" and len(text) == 1:
            self._place += 1
            return Fraction(int(text))
        if not self._take("{"):
            raise NotExactNumber
        value = self._sum()
        if not self._take("}"):
            raise NotExactNumber
        return value

    def _root(self) -> Fraction:
        degree = Fraction(2)
        if self._take("["):
            degree = self._sum()
            if not self._take("]"):
                raise NotExactNumber
        kind, text = self._peek()
        value = self._group() if kind != "number" or len(text) == 1 else self._atom()
        return _power(value, 1 / degree)


def _fraction(text: str) -> Fraction:
    if re.fullmatch(r"\d{1,3}(?:[ .]\d{3})+,\d+", text):
        text = text.replace(".", "").replace(",", ".")
    cleaned = re.sub("[, _]", "", text)
    if len(cleaned) > MAX_DIGITS:
        raise NotExactNumber
    mantissa, _, exponent = cleaned.lower().partition("e")
    if not mantissa.strip("."):
        raise NotExactNumber
    value = Fraction(f"0{mantissa}" if mantissa.startswith(".") else mantissa.rstrip("."))
    if exponent:
        value *= _power(Fraction(10), Fraction(int(exponent)))
    return value


def _repeating(match: re.Match[str]) -> str:
    """`0.1\\overline{6}` and `0.1(6)` as a fraction in parentheses."""
    whole, fixed, repeated = match[1], match[2], match[3] or match[4]
    if len(match[0]) > MAX_DIGITS:
        raise NotExactNumber
    nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    value = int(f"0{whole}{fixed}{repeated}") - int(f"0{whole}{fixed}")
    return f"({value}/{nines})"


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        root = _exact_root(base, exponent.denominator)
        return _power(root, Fraction(exponent.numerator))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS:
        raise NotExactNumber
    return Fraction(base ** int(exponent))


def _exact_root(base: Fraction, degree: int) -> Fraction:
    if degree > 64 or base < 0:
        raise NotExactNumber
    parts = [_integer_root(part, degree) for part in (base.numerator, base.denominator)]
    return Fraction(*parts)


def _integer_root(value: int, degree: int) -> int:
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    if low**degree != value:
        raise NotExactNumber
    return low


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise NotExactNumber
    return value
