"""When two answers are equal: the table in docs/answers.md, as code.

Both texts are brought to one form. Then, in this order: choices by their letter, words as words, numbers exactly,
lists, sets, tuples and intervals by their parts, a ratio by its value. What is left is mathematics that only computer
algebra can judge: `Verdict.NEEDS_ALGEBRA`.
"""

import re
import unicodedata
from enum import Enum

from ..tasks.exact_numbers import exact_number
from .quantities import quantity, same_based_number, same_moment, same_quantity, same_ratio

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
_SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|~|\\q?quad\b|\\hspace\{[^{}]*\}")
_CHOICE = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer):?\s+)?\(?([A-Za-z])\)?(?:[.):]\s*.*|\s*|(?<=\))\s.*)", re.DOTALL
)
_LABEL = re.compile(r"^(?:\([A-J]\)|[A-J][.)])\s(?=.)")
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
    return _compare_part(_without_label(answer, gold), _without_label(gold, answer))


def _without_label(text: str, other: str) -> str:
    """A choice's text without its letter, where it is compared with a quantity: 15 of `(A) 15`."""
    return _LABEL.sub("", text) if quantity(other) else text


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
    box = re.fullmatch(r"\\(?:boxed|fbox)\s*\{(.*)\}", text, re.DOTALL)
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
    text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text)
    return re.sub(r"(?<!\.)\.$", "", " ".join(text.split())).strip()


def _verdict(equal: bool) -> Verdict:
    return Verdict.EQUAL if equal else Verdict.DIFFERENT


def _is_words(text: str) -> bool:
    return _WORDS.fullmatch(text) is not None and text.lower() not in _MATHS_NAMES


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _without_names(answer: str, gold: str) -> tuple[str, str]:
    """Both without `x =` or `x \\in` in front, where they name the same unknown or only one of them names one."""
    pattern = r"(\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\(\w\))?)\s?(?:=|\\in(?![a-zA-Z]))\s?([^=]+)"
    named, named_gold = re.fullmatch(pattern, answer), re.fullmatch(pattern, gold)
    if named and named_gold and named[1] != named_gold[1]:
        return answer, gold
    return named[2].strip() if named else answer, named_gold[2].strip() if named_gold else gold


def _computed(text: str) -> str:
    """The last side of an equation whose sides are one number: 7 of `3 + 4 = 7`."""
    *sides, last = text.split("=")
    value = exact_number(last.strip()) if sides else None
    equal = value is not None and all(exact_number(side.strip()) == value for side in sides)
    return last.strip() if equal else text


def _compare_maths(answer: str, gold: str) -> Verdict:
    if _without_spaces(answer) == _without_spaces(gold):
        return Verdict.EQUAL
    if len(answer) == len(gold) == 1 and (answer + gold).isalpha():
        return Verdict.DIFFERENT
    for judge in (same_moment, same_based_number):
        verdict = judge(answer, gold)
        if verdict is not None:
            return _verdict(verdict)
    left, right = quantity(answer), quantity(gold)
    if left and right:
        return _verdict(same_quantity(left, right))
    groups = _group(answer), _group(gold)
    if groups[0] and groups[1]:
        return _compare_groups(*groups[0], *groups[1])
    if groups[0] or groups[1]:
        return Verdict.DIFFERENT if left or right else Verdict.NEEDS_ALGEBRA
    ratio = same_ratio(answer, gold)
    return Verdict.NEEDS_ALGEBRA if ratio is None else _verdict(ratio)


def _without_spaces(text: str) -> str:
    """Without the spaces that part no two letters or digits."""
    return re.sub(r"\s+(?!\w)|(?<!\w)\s+", "", text)


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
    if kind_a != kind_b and not {kind_a, kind_b} <= {*unordered, "()"}:
        return Verdict.DIFFERENT
    if "set" in (kind_a, kind_b) and "()" in (kind_a, kind_b):
        return Verdict.DIFFERENT
    if len(parts_a) != len(parts_b) or len(parts_a) > MAX_PARTS:
        return Verdict.DIFFERENT
    if {kind_a, kind_b} <= unordered:
        return _compare_unordered(parts_a, parts_b)
    verdicts = [_compare_part(a, b) for a, b in zip(parts_a, parts_b, strict=True)]
    return _worst(verdicts)


def _compare_part(answer: str, gold: str) -> Verdict:
    """Of two answers that are no choices, or two parts of lists: words as words, the rest as mathematics."""
    if answer == gold:
        return Verdict.EQUAL
    if _is_words(gold) or _is_words(answer):
        return _verdict(_words(answer) == _words(gold))
    return _compare_maths(*map(_computed, _without_names(answer, gold)))


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
