"""When two answers are equal: the table in docs/answers.md, as code.

Both texts are brought to one form. Then, in this order: choices by their letter, words as words, numbers exactly,
lists, sets, tuples and intervals by their parts, a ratio by its value. What is left is mathematics that only computer
algebra can judge: `Verdict.NEEDS_ALGEBRA`.
"""

import re
import unicodedata
from enum import Enum
from fractions import Fraction

from ..tasks.exact_numbers import exact_number

MAX_CHARACTERS = 10_000
"""An answer longer than this equals only the same text."""

MAX_PARTS = 200

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SYMBOLS = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ",
    "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ", "∈": "\\in ",
    "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "⁄": "/",
}  # fmt: skip
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:!> ]|~|\\q?quad\b|\\hspace\{[^{}]*\}")
_UNIT_NAMES = {
    "dollar": "$", "usd": "$", "euro": "€", "eur": "€", "pound": "£", "gbp": "£", "yen": "¥", "cent": "cent",
    "¢": "cent", "degree": "degree", "deg": "degree", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "gram": "g", "kilogram": "kg",
    "kilo": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "percent": "%", "inche": "inch",
    "in": "inch", "foot": "ft", "feet": "ft", "mile": "mi", "liter": "l", "litre": "l", "point": "pt", "unit": "",
}  # fmt: skip
_ARITHMETIC_LETTERS = re.compile(r"\\(?:frac|sqrt|times|cdot|div)|(?<=\d)[eE](?=[-+\d])")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?(?:[.):]\s*.*|\s*|(?<=\))\s.*)", re.DOTALL)
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'’-][^\W\d_]+)*")
_MATHS_NAMES = {"pi", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "infty", "infinity", "inf"}


class Verdict(Enum):
    """Whether two answers are equal."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NEEDS_ALGEBRA = "needs algebra"


def compare(answer: str, gold: str) -> Verdict:
    """Whether `answer` equals `gold`, symmetric but for choices: a gold letter is a choice."""
    if max(len(answer), len(gold)) > MAX_CHARACTERS:
        return _verdict(answer.strip() == gold.strip())
    answer, gold = normalized(answer), normalized(gold)
    if not answer or not gold:
        return Verdict.DIFFERENT
    choice = re.fullmatch(r"\(?([A-J])\)?\.?", gold)
    if choice:
        letter = _CHOICE.fullmatch(answer)
        return _verdict(letter is not None and letter[1].upper() == choice[1])
    return _compare_part(answer, gold)


def normalized(text: str) -> str:
    """One form of what is written in several: delimiters, text commands, thin spaces, Unicode's digits and signs."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text.strip())
    for symbol, latex in _SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = re.sub(r"√\s?(\w+|\([^()]*\)|\{[^{}]*\})", lambda m: f"\\sqrt{{{m[1].strip('(){}')}}}", text)
    text = unicodedata.normalize("NFKC", text)
    for begin, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inside = text[len(begin) : -len(end)]
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) and begin not in inside and inside:
            text = inside.strip()
    box = re.fullmatch(r"\\f?boxed\s*\{(.*)\}", text, re.DOTALL)
    if box:
        text = box[1]
    text = re.sub(r"\\(?:left|right|displaystyle|bigl|bigr|big)(?![a-zA-Z])", "", text)
    text = re.sub(r"(?<=\d)(?:\\,|\\!|\\;|\{,\}|~)(?=\d{3})", ",", text)
    text = re.sub(r"(?<=\d),\s?\\!\s?(?=\d{3})", ",", text)
    for _ in range(3):
        text = _TEXT.sub(r" \1 ", text)
    text = _SPACES.sub(" ", text)
    text = re.sub(r"\^\s?\{?\s?\\circ\s?\}?|°|\\degree", " degree ", text)
    text = text.replace("\\%", "%").replace("\\$", "$").replace("\\{", "\\lbrace ").replace("\\}", "\\rbrace ")
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace("\\varnothing", "\\emptyset")
    text = re.sub(r"(?<![\\\w])pi(?![a-zA-Z])", r"\\pi ", text)
    return " ".join(text.split()).rstrip(".").strip()


def _verdict(equal: bool) -> Verdict:
    return Verdict.EQUAL if equal else Verdict.DIFFERENT


def _is_words(text: str) -> bool:
    return _WORDS.fullmatch(text) is not None and text.lower() not in _MATHS_NAMES


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _without_names(answer: str, gold: str) -> tuple[str, str]:
    """Both without `x =` or `x \\in` in front, where they name the same unknown or only one of them names one."""
    pattern = r"([a-zA-Z](?:_\{?\w+\}?)?(?:\(\w\))?)\s?(?:=|\\in(?![a-zA-Z]))\s?([^=]+)"
    named, named_gold = re.fullmatch(pattern, answer), re.fullmatch(pattern, gold)
    if named and named_gold and named[1] != named_gold[1]:
        return answer, gold
    return named[2].strip() if named else answer, named_gold[2].strip() if named_gold else gold


def _compare_maths(answer: str, gold: str) -> Verdict:
    if answer == gold:
        return Verdict.EQUAL
    left, right = _quantity(answer), _quantity(gold)
    if left and right:
        return _verdict(_same_quantity(left, right))
    groups = _group(answer), _group(gold)
    if groups[0] and groups[1]:
        return _compare_groups(*groups[0], *groups[1])
    if groups[0] or groups[1]:
        return Verdict.DIFFERENT if left or right else Verdict.NEEDS_ALGEBRA
    ratio = _ratio(answer)
    if ratio is not None and ratio == _ratio(gold):
        return Verdict.EQUAL
    return Verdict.DIFFERENT if ratio is not None and _ratio(gold) is not None else Verdict.NEEDS_ALGEBRA


# ---- quantities: a number, perhaps with a unit ----------------------------------------------------------------------


def _quantity(text: str) -> tuple[Fraction, str] | None:
    """A number and its unit, empty where it has none."""
    number = exact_number(text)
    if number is not None:
        return number, ""
    match = re.fullmatch(r"([-+]?)\s?([$€£¥])\s?([^a-zA-Z]*\d[^a-zA-Z]*)(.*)", text)
    if match:
        number = exact_number(match[1] + match[3].strip())
        rest = _unit(match[4])
        return (
            None
            if number is None or (rest not in ("", match[2]) and not rest.startswith("per"))
            else (number, match[2])
        )
    match = re.fullmatch(r"(.*[\d})!])\s?([$€£¥¢%]|%?\s?[^\W\d_][^\d{}\\=<>,]*(?:\^\{?\d\}?)?)", text)
    if match is None or re.search(
        r"[a-zA-Z]", re.sub(r"\\(?:frac|sqrt|times|cdot|div)|(?<=\d)[eE](?=[-+\d])", "", match[1])
    ):
        return None
    number, unit = exact_number(match[1].strip()), _unit(match[2])
    if number is None or (re.fullmatch(r"[a-zA-Z]", match[2].strip()) and match[2].strip() not in "mgslhLJNWVAKCFtM"):
        return None
    return number, unit


def _unit(text: str) -> str:
    words = []
    for word in text.strip().rstrip(".").split():
        plain = word.lower() if len(word) > 2 else word
        single = plain.removesuffix("s") if len(plain) > 3 else plain
        words.append(_UNIT_NAMES.get(plain, _UNIT_NAMES.get(single, single)))
    return " ".join(filter(None, words))


def _same_quantity(left: tuple[Fraction, str], right: tuple[Fraction, str]) -> bool:
    """Equal numbers, of one unit or where one names none; 50% is 50 and 0.5 beside a bare number."""
    (a, unit_a), (b, unit_b) = left, right
    if "%" in (unit_a, unit_b) and "" in (unit_a, unit_b):
        percent, bare = (a, b) if unit_a == "%" else (b, a)
        return bare in (percent, percent / 100)
    return a == b and (unit_a == unit_b or not unit_a or not unit_b)


def _ratio(text: str) -> Fraction | None:
    parts = text.split(":")
    values = [exact_number(part.strip()) for part in parts]
    if len(values) == 2 and values[0] is not None and values[1]:
        return values[0] / values[1]
    return values[0] if len(parts) == 1 else None


# ---- lists, sets, tuples, intervals ---------------------------------------------------------------------------------

_BRACKETS = {"(": ")", "[": "]", "\\lbrace": "\\rbrace"}


def _group(text: str) -> tuple[str, list[str]] | None:
    """Kind and parts of several values: `list`, `set`, or the brackets of a tuple or interval."""
    if text.startswith("{") and text.endswith("}") and "," in text and _balanced(text[1:-1]):
        return "set", _parts(text[1:-1])
    opening = next((mark for mark in _BRACKETS if text.startswith(mark)), None)
    if opening is not None:
        for closing in _BRACKETS.values():
            inside = text[len(opening) : -len(closing)]
            if text.endswith(closing) and _balanced(inside):
                parts = _parts(inside)
                if opening == "\\lbrace" and closing == "\\rbrace":
                    return "set", parts
                if len(parts) > 1 and "\\lbrace" not in opening and "\\rbrace" not in closing:
                    return opening + closing, parts
    parts = _parts(re.sub(r"\s(?:and|or)\s", ", ", text))
    expanded = [sign + part[3:].strip() for part in parts if part.startswith("\\pm") for sign in ("", "-")]
    if expanded or len(parts) > 1:
        return "list", expanded + [part for part in parts if not part.startswith("\\pm")]
    return None


def _balanced(text: str) -> bool:
    depth = 0
    for mark in re.findall(r"\\lbrace|\\rbrace|[()\[\]{}]", text):
        depth += 1 if mark in ("(", "[", "{", "\\lbrace") else -1
        if depth < 0:
            return False
    return depth == 0


def _parts(text: str) -> list[str]:
    """Split at the commas outside brackets, of `1,234` none."""
    if exact_number(text) is not None:
        return [text.strip()]
    depth, begin, parts = 0, 0, []
    for match in re.finditer(r"\\lbrace|\\rbrace|[()\[\]{},;]", text):
        if match[0] in ("(", "[", "{", "\\lbrace"):
            depth += 1
        elif match[0] in (",", ";"):
            if depth == 0:
                parts.append(text[begin : match.start()].strip())
                begin = match.end()
        else:
            depth -= 1
    parts.append(text[begin:].strip())
    return [part for part in parts if part]


def _compare_groups(kind_a: str, parts_a: list[str], kind_b: str, parts_b: list[str]) -> Verdict:
    unordered = {"list", "set"}
    if kind_a != kind_b and not {kind_a, kind_b} <= unordered:
        return Verdict.DIFFERENT if {kind_a, kind_b} & {"[)", "(]", "[]"} else Verdict.NEEDS_ALGEBRA
    if len(parts_a) != len(parts_b) or len(parts_a) > MAX_PARTS:
        return Verdict.DIFFERENT
    if kind_a in unordered:
        return _compare_unordered(parts_a, parts_b)
    verdicts = [_compare_part(a, b) for a, b in zip(parts_a, parts_b, strict=True)]
    return _worst(verdicts)


def _compare_part(answer: str, gold: str) -> Verdict:
    """Of two answers that are no choices, or two parts of lists: words as words, the rest as mathematics."""
    if answer == gold:
        return Verdict.EQUAL
    if _is_words(gold) or _is_words(answer):
        return _verdict(_words(answer) == _words(gold))
    return _compare_maths(*_without_names(answer, gold))


def _compare_unordered(answers: list[str], golds: list[str]) -> Verdict:
    unmatched, open_question = list(golds), False
    for answer in answers:
        verdicts = [_compare_part(answer, gold) for gold in unmatched]
        if Verdict.EQUAL in verdicts:
            unmatched.pop(verdicts.index(Verdict.EQUAL))
        elif Verdict.NEEDS_ALGEBRA in verdicts:
            open_question = True
        else:
            return Verdict.DIFFERENT
    return Verdict.NEEDS_ALGEBRA if open_question else Verdict.EQUAL


def _worst(verdicts: list[Verdict]) -> Verdict:
    if Verdict.DIFFERENT in verdicts:
        return Verdict.DIFFERENT
    return Verdict.NEEDS_ALGEBRA if Verdict.NEEDS_ALGEBRA in verdicts else Verdict.EQUAL
