"""The answer of a completion, found in its text: what it marks as its answer, else the last number that it names.

Of the marks `\\boxed{...}`, `<answer>...</answer>` and `#### ...` the one that ends last counts; without a mark, the
last "the answer is ..."; without that, the last number, with the expression that it is a part of. What stands in
`<think>...</think>` is no answer. The rest of the text is searched, in time linear in its length.
"""

import re
from collections.abc import Iterator

MOST_NESTED = 3
"""Marks inside a mark that are looked into."""

_SPACE = r"[ \t\u00a0]"
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{")
_BLOCK = re.compile(r"</?answer>", re.IGNORECASE)
_HASHES = re.compile(rf"^{_SPACE}{{0,9}}####{_SPACE}{{0,9}}([^\n]{{1,200}})$", re.MULTILINE)
_THINK = re.compile(r"(</?think>)")
_SPECIAL = re.compile(r"<\|[\w ]{1,40}\|>|</?s>")
_EMPHASIS = re.compile(r"(?<![\w*\\])(\*{1,3}|_{1,3})(?=[^\s*_])([^*_\n]{1,200}?)(?<=\S)\1(?![\w*])")
_FILLERS = "now|simply|exactly|just|then|thus|therefore|hence|indeed|clearly|also|equal to"
_SAID = re.compile(
    rf"\b(?:answers?|(?:correct|right) (?:option|choice))\b[\"']?(?:,? (?!not\b|cannot\b)\w{{1,20}}){{0,3}}?"
    r",?\s{0,3}(?:is|are|be|:|=)"
    rf"(?:\s{{1,3}}(?:{_FILLERS}))?\s{{0,3}}[:}}]?\s{{0,3}}(?=([^\n]{{1,200}}))",
    re.IGNORECASE,
)
_CHOSEN = re.compile(r"\b(?:option|choice)\s{1,3}(\([A-J]\)|[A-J])(?!\w)", re.IGNORECASE)
_NEGATED = re.compile(r"(?:\b(?:not|cannot|never)|n['’]t)(?: \w{1,20}){0,2}\s?$", re.IGNORECASE)
_ONE_WORD = re.compile(r"\W{0,9}([^\W\d_][\w'’-]{0,40})\W{0,9}")
_LABELLED = re.compile(r"\W{0,4}\(?[A-J][.):]\s[^\n]{1,200}")
_SENTENCE_END = re.compile(
    r"(?<!\\)[.!?;](?=\s|$)|,?\s(?:not|because|since|rather than|instead of)\s|[\"'][},\]]|,\s?[\"']"
)

_GROUPED = r"\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d{1,3}(?:[ \u00a0\u202f]\d{3})+(?!\d)"
_MOMENT = r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{4}|\d{1,2}:[0-5]\d(?::[0-5]\d)?(?:\s?[aApP]\.?[mM]\b)?"
_DIGITS = rf"(?:{_GROUPED}|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+"
_BRACES = r"\{[^{}]{1,60}\}"
_LATEX = rf"\\[dtc]?frac{_BRACES}{_BRACES}|\\[dtc]?frac\d\d|\\sqrt{_BRACES}|√\d+"
_ATOM = rf"{_MOMENT}|(?:[$€£¥]\s?)?(?:{_DIGITS})!?%?|{_LATEX}"
_OPERATOR = r"[^\S\n]?(?:\*\*|\^|[+*/×·÷]|:(?!\s)|\\times|\\cdot|\\div)|[^\S\n](?:[-−](?=\s)|:)"
_JOIN = rf"(?:{_OPERATOR})\s?[-−]?(?:{_BRACES}|\()?"
_SCIENTIFIC = re.compile(r"\s?(?:[*×·]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)")
_UNFINISHED = re.compile(r"\S\s?(?:[+×·÷]|(?<!\*)\*(?!\*)|\\times|\\cdot|\\div|\s[-−])")
"""A sum or product without its result, such as a question repeated: no answer, unless it is marked as one."""
_EXPRESSION = re.compile(rf"(?<![\w.,\\])[-−+]?(?:{_ATOM})(?:\^?{_BRACES}|{_JOIN}(?:{_ATOM})?\)?)*")
_MATHS = re.compile(r"\$((?:\\[^\n]|[^$\\\n]){1,300})\$|\\\(([^\n]{1,300}?)\\\)|\\\[([^\n]{1,300}?)\\\]")
_TERM = re.compile(
    rf"(?P<unit>(?<=\d)\s?[a-zA-Z]{{1,4}}(?:/[a-zA-Z]{{1,4}})?\^\{{?-?\d\}}?)|(?P<number>{_ATOM})"
    r"|(?P<function>\\(?!boxed|(?:times|cdot|div)(?![a-z]))[a-zA-Z]{1,30}\s?|(?:sin|cos|tan|log|ln|exp|sqrt)\s?(?![a-z]))"
    r"|(?P<word>[^\W\d_]{2,}['’]?)"
    r"|(?P<letter>[^\W\d_](?!['’])|[√∞])|(?P<comma>,\s?)|(?P<range>(?<=\d)[-−](?=\d)|\s?[-=]>\s?)"
    r"|(?P<sign>\s?(?:\\(?:times|cdot|div)(?![a-z])|\*\*|(?<![<>])[<>](?![<>])=?|[≤≥≠+*/·×÷^_−-])\s?)|(?P<open>[({\[])|(?P<close>[)}\]])|(?P<other>.)",
    re.DOTALL,
)
_SCALE = re.compile(r"\s(?:hundred|thousand|million|billion|trillion)\b")
_DIGIT = re.compile(r"[-−+]?[$€£¥]?\.?\d")
_WINDOW = 300
"""Characters on each side of the last number in which its expression is looked for."""
_REMARK = re.compile(r"^\s{1,3}\([^()]*\)$")
_NUMBER_AHEAD = re.compile(r"[-−+]?\s?(?:[$€£¥]|\\\$)?\s?(?:\d|\.\d|\\[dtc]?frac|\\sqrt|\\boxed)")


def last_answer(text: str) -> str | None:
    """What the completion gives as its answer, as written, else None.

    A `\\boxed{` or `<answer>` that is never closed is an answer cut short: it holds none, nor does what follows it. A
    `<think>` that is never closed holds none but a marked one.
    """
    text = _EMPHASIS.sub(r"\2", _SPECIAL.sub("\n", text.replace("\u2212", "-")))
    text, thinking = _without_thinking(text)
    whole, text = _before_open_mark(text + thinking), _before_open_mark(text)
    marks = [mark for mark in (_last_box(whole), _last_block(whole), _last_hashes(whole)) if mark is not None]
    if marks:
        return _inner_answer(max(marks)[1])
    return _last_stated(text) or _last_unmarked(text)


def _without_thinking(text: str) -> tuple[str, str]:
    """The text outside `<think>...</think>`, and what follows a `<think>` that is never closed.

    Text before a `</think>` that was never opened is thinking as well: a prompt may have opened it.
    """
    outside: list[str] = []
    start: int | None = None
    for piece in _THINK.split(text):
        if piece == "<think>" and start is None:
            start = len(outside)
        elif piece == "</think>":
            del outside[start or 0 :]
            start = None
        else:
            outside.append(piece)
    start = len(outside) if start is None else start
    return "".join(outside[:start]), "".join(outside[start:])


def _inner_answer(content: str) -> str:
    """The answer inside a mark: that of a box in it, or what follows "the answer is", or all of it."""
    for _ in range(MOST_NESTED):
        inner = last_boxed(content) or _last_stated(content)
        if inner is None:
            break
        content = inner
    return content


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{}` whose braces close, else None."""
    box = _last_box(text)
    return None if box is None else box[1]


def _boxes(text: str) -> tuple[list[tuple[int, int]], int | None]:
    """Begin and end of the content of every closed box, and where the first unclosed one begins; in one pass."""
    opened = {match.end() - 1: match.start() for match in _BOX.finditer(text)}
    if not opened:
        return [], None
    closed, braces = [], []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        place = match.end() - 1
        if match[0] == "{":
            braces.append(place)
        elif match[0] == "}" and braces:
            begin = braces.pop()
            if begin in opened:
                closed.append((begin + 1, place))
    unclosed = [opened[place] for place in braces if place in opened]
    return closed, min(unclosed, default=None)


def _before_open_mark(text: str) -> str:
    _, box = _boxes(text)
    block = _last(_BLOCK.finditer(text))
    cuts = [] if box is None else [box]
    if block and block[0][1] != "/":
        cuts.append(block.start())
    return text[: min(cuts)] if cuts else text


def _last_box(text: str) -> tuple[int, str] | None:
    """Where the last closed box ends, and its content."""
    closed, _ = _boxes(text)
    if not closed:
        return None
    begin, end = max(closed, key=lambda span: span[1])
    return end, text[begin:end].strip()


def _last_block(text: str) -> tuple[int, str] | None:
    block, begin = None, None
    for match in _BLOCK.finditer(text):
        if match[0][1] != "/":
            begin = match.end()
        elif begin is not None:
            block, begin = (match.end(), text[begin : match.start()].strip()), None
    if block is None or not block[1]:
        return None
    return block


def _last_hashes(text: str) -> tuple[int, str] | None:
    """GSM8K's mark; a heading of four hashes in Markdown is none."""
    answers = [match for match in _HASHES.finditer(text) if _NUMBER_AHEAD.match(match[1]) or len(match[1].split()) == 1]
    return (answers[-1].end(), answers[-1][1].strip()) if answers else None


def _last_stated(text: str) -> str | None:
    """What follows the last "the answer is", up to the end of its sentence."""
    match = _last(_SAID.finditer(text))
    if match is None:
        return None
    sentence = _SENTENCE_END.split(match[1].strip(), maxsplit=1)[0].strip(" *_")
    sentence = sentence[1:] if sentence[:1] in ("'", '"') else sentence
    maths = _MATHS.match(match[1].strip(" *_"))
    if maths:
        return maths[maths.lastindex or 0].strip()
    expression = _EXPRESSION.match(sentence)
    if expression and _NUMBER_AHEAD.match(sentence):
        rest = _REMARK.sub("", sentence[expression.end() :]).strip("}\"' ")
        return sentence if 0 < len(rest.split()) <= 2 and not re.search(r"[=]", rest) else _trimmed(expression[0])
    return sentence if 0 < len(sentence.split()) <= 6 and not re.match(r"not\b", sentence, re.IGNORECASE) else None


def _last_unmarked(text: str) -> str | None:
    """The option that is named last, the last number with its expression, or the only word of the text."""
    if _LABELLED.fullmatch(text.strip()):
        return text.strip()
    number, chosen = _last(_EXPRESSION.finditer(text)), _last(_CHOSEN.finditer(text))
    if chosen and (number is None or number.end() <= chosen.end()):
        return chosen[1]
    if number is None:
        word = _ONE_WORD.fullmatch(text.strip())
        return word and word[1]
    return _expression(text, number)


def _expression(text: str, number: re.Match[str]) -> str | None:
    """What a number stands in: mathematics in LaTeX, an expression with letters, a list, or arithmetic."""
    for maths in _MATHS.finditer(text):
        if maths.start() <= number.start() and number.end() <= maths.end():
            return maths[maths.lastindex or 0].rpartition("=")[2].strip()
    if _NEGATED.search(text[max(0, number.start() - _WINDOW) : number.start()]):
        return None
    whole = _surrounding(text, number)
    if whole is not None:
        return whole
    if scale := _SCALE.match(text, number.end()):
        return number[0].strip() + scale[0]
    return None if _UNFINISHED.search(_SCIENTIFIC.sub("", number[0])) else _trimmed(number[0])


def _surrounding(text: str, number: re.Match[str]) -> str | None:
    """The run of terms around a number, if it has more than numbers and signs, such as `2x + 1` or `(3, 5)`."""
    first = max(text.rfind("\n", 0, number.start()) + 1, number.start() - _WINDOW)
    kinds: list[str] = []
    depth, begin, last = 0, first, number.end() - 1
    for term in _TERM.finditer(text, first, number.end() + _WINDOW):
        kind = term.lastgroup or "other"
        depth = max(0, depth + (kind == "open") - (kind == "close"))
        numbers = kinds[-1:] == ["number"] and _DIGIT.match(text, term.end()) is not None
        if kind in ("other", "range", "word") or (kind == "comma" and not depth and not numbers):
            if begin <= last < term.start():
                return _with_meaning(text[begin : term.start()], kinds)
            kinds, depth, begin = [], 0, term.end()
        else:
            kinds.append(kind)
    return _with_meaning(text[begin : number.end() + _WINDOW], kinds)


def _with_meaning(run: str, kinds: list[str]) -> str | None:
    """A run without loose signs and brackets around it; None if it has numbers and arithmetic only."""
    run = re.sub(r"^(?:[-+*/·×÷^_>,\s]*[*/·×÷^_>,\s])+|[-+*/·×÷^_<>,\s]+$", "", run)
    while (
        run
        and (run[0] in "({[") != (run[-1] in ")}]")
        and run.count("(") + run.count("[") + run.count("{") != (run.count(")") + run.count("]") + run.count("}"))
    ):
        run = run[1:] if run[0] in "({[" else run[:-1]
    has_more = {"letter", "function", "comma", "unit"} & set(kinds) or re.search(r"[<>≤≥≠√]|\\(?!times|cdot|div)", run)
    return run if has_more and re.search(r"\d", run) else None


def _trimmed(expression: str) -> str:
    return expression.strip().rstrip("-−+*/×·÷:^( ").strip()


def _last(matches: Iterator[re.Match[str]]) -> re.Match[str] | None:
    match = None
    for match in matches:  # noqa: B007 (the last one is what counts)
        pass
    return match
