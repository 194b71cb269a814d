"""What a text says in numbers besides a bare one: a quantity with its unit, a ratio, another base, a time or a date."""

import re
from fractions import Fraction
from typing import NamedTuple

from ..tasks.exact_numbers import exact_number

_CURRENCIES = r"[$€£¥₹]|(?:USD|EUR|GBP|INR)\b|Rs\b\.?"
_UNIT_NAMES = {
    "dollar": "$", "usd": "$", "euro": "€", "eur": "€", "pound": "£", "gbp": "£", "yen": "¥", "rupee": "₹", "inr": "₹",
    "rs": "₹", "cent": "cent", "¢": "cent", "degree": "degree", "deg": "degree", "meter": "m", "metre": "m",
    "kilometer": "km", "kilometre": "km", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm",
    "millimetre": "mm", "gram": "g", "kilogram": "kg", "kilo": "kg", "second": "s", "sec": "s", "minute": "min",
    "hour": "h", "hr": "h", "percent": "%", "inche": "inch", "in": "inch", "foot": "ft", "feet": "ft", "mile": "mi",
    "liter": "l", "litre": "l", "point": "pt", "unit": "", "mph": "mi per h", "kmh": "km per h", "kph": "km per h",
}  # fmt: skip
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cubed": "^3"}
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNIT_LETTERS = "mgslhLJNWVAKCFtM"
_ARITHMETIC_LETTERS = re.compile(r"\\(?:frac|sqrt|times|cdot|div)|(?<=\d)[eE](?=[-+\d])")
_PREFIXED = re.compile(rf"([-+]?)\s?({_CURRENCIES})\s?([^a-zA-Z]*\d[^a-zA-Z]*)(.*)")
_SUFFIXED = re.compile(r"(.*[\d})!])\s?([$€£¥₹¢%]|%?\s?[^\W\d_][^\d{}\\=<>,]*(?:\^\{?\d\}?)?)")

_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?(?:\s?([ap])\.?\s?m\.?)?", re.IGNORECASE)
_DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2\d{4}")
_BASED = re.compile(r"(\d[0-9A-Z]*)_\s?\{?(\d{1,2})\}?")


class Quantity(NamedTuple):
    """A number and its unit, empty where it has none."""

    number: Fraction
    unit: str


def quantity(text: str) -> Quantity | None:
    """The number and the unit of a text, None if it has anything else; `2 million` is 2,000,000."""
    number = exact_number(text)
    if number is not None:
        return Quantity(number, "")
    if match := _PREFIXED.fullmatch(text):
        _, currency = _unit(match[2])
        number, (factor, rest) = exact_number(match[1] + match[3].strip()), _unit(match[4])
        fits = rest in ("", currency) or rest.startswith("per ")
        return Quantity(number * factor, currency) if number is not None and fits else None
    match = _SUFFIXED.fullmatch(text)
    if match is None or re.search(r"[a-zA-Z]", _ARITHMETIC_LETTERS.sub("", match[1])):
        return None
    number, (factor, unit) = exact_number(match[1].strip()), _unit(match[2])
    is_letter = re.fullmatch(r"[a-zA-Z]", match[2].strip())
    if number is None or (is_letter and is_letter[0] not in _UNIT_LETTERS):
        return None
    return Quantity(number * factor, unit)


def _unit(text: str) -> tuple[int, str]:
    """The number that words such as `million` multiply by, and the unit in one spelling."""
    factor, power = 1, ""
    words: list[str] = []
    for word in re.sub(r"\^\{(\d)\}", r"^\1", text).replace("/", " per ").rstrip(". ").split():
        plain = word.lower() if len(word) > 2 or word == "Rs" else word
        single = plain.removesuffix("s") if len(plain) > 3 else plain
        if not words and (scale := _SCALES.get(plain, _SCALES.get(single))):
            factor *= scale
        elif plain in ("squared", "cubed") and words:
            words[-1] += _POWERS[plain]
        elif plain in _POWERS:
            power = _POWERS[plain]
        else:
            words.append(_UNIT_NAMES.get(plain, _UNIT_NAMES.get(single, single)) + power)
            power = ""
    return factor, " ".join(filter(None, words))


def same_quantity(left: Quantity, right: Quantity) -> bool:
    """Equal numbers, of one unit or where one names none; 50% is 50 and 0.5 beside a bare number."""
    (a, unit_a), (b, unit_b) = left, right
    if "%" in (unit_a, unit_b) and "" in (unit_a, unit_b):
        percent, bare = (a, b) if unit_a == "%" else (b, a)
        return bare in (percent, percent / 100)
    return a == b and (unit_a == unit_b or not unit_a or not unit_b)


def same_ratio(left: str, right: str) -> bool | None:
    """Whether two ratios, or a ratio and a number, have one value; None if they are anything else."""
    if ":" not in left + right:
        return None
    values = [_ratio(re.sub(r"(?<=\d) to (?=\d)", ":", text)) for text in (left, right)]
    return None if None in values else values[0] == values[1]


def _ratio(text: str) -> list[Fraction] | None:
    """The parts, divided by the last one; a number is its ratio to 1."""
    numbers = [number for part in text.split(":") if (number := exact_number(part.strip())) is not None]
    if len(numbers) <= text.count(":") or not numbers[-1]:
        return None
    return [number / numbers[-1] for number in numbers] if len(numbers) > 1 else [numbers[0], Fraction(1)]


def same_moment(left: str, right: str) -> bool | None:
    """Whether two dates or times of day are one; None if the texts are anything else.

    `3:30` may be a time as well as a ratio, so two of this form are compared as times.
    """
    if _DATE.fullmatch(left) or _DATE.fullmatch(right):
        dates = [[int(part) for part in re.findall(r"\d+", text)] for text in (left, right) if _DATE.fullmatch(text)]
        return len(dates) == 2 and dates[0] == dates[1]
    first, second = _CLOCK.fullmatch(left), _CLOCK.fullmatch(right)
    if first and second:
        same_hour = _hours(first) & _hours(second) if first[4] or second[4] else int(first[1]) == int(second[1])
        return bool(same_hour) and _minutes(first) == _minutes(second)
    return False if any(clock and clock[4] for clock in (first, second)) else None


def _hours(clock: re.Match[str]) -> set[int]:
    """The hours of the day that a time may mean; without am or pm it may mean two."""
    hour = int(clock[1])
    if clock[4]:
        return {hour % 12 + 12 * (clock[4].lower() == "p")}
    return {hour} if hour > 12 else {hour % 12, hour % 12 + 12}


def _minutes(clock: re.Match[str]) -> tuple[int, int]:
    return int(clock[2]), int(clock[3] or 0)


def same_based_number(left: str, right: str) -> bool | None:
    """Whether two numbers with a base as subscript have the same digits; None if neither has one.

    The base may be left out. The same value in another base is another answer.
    """
    based = [_BASED.fullmatch(left), _BASED.fullmatch(right)]
    if not any(based):
        return None
    digits = [match[1] if match else text for match, text in zip(based, (left, right), strict=True)]
    bases = {match[2] for match in based if match}
    return digits[0] == digits[1] and len(bases) == 1
