"""The answer of a completion, found in its text: what it marks as its answer, else the last number that it names.

Of the marks `\\boxed{...}`, `<answer>...</answer>` and `#### ...` the one that ends last counts; without a mark, the
last "the answer is ...". The whole text is searched, in time linear in its length.
"""

import re
from collections.abc import Iterator

_SPACE = r"[ \t\u00a0]"
_BOX = re.compile(r"\\f?boxed\s{0,9}\{")
_BLOCK = re.compile(r"</?answer>", re.IGNORECASE)
_HASHES = re.compile(rf"^{_SPACE}{{0,9}}####{_SPACE}{{0,9}}([^\n]{{1,200}})$", re.MULTILINE)
_SAID = re.compile(
    r"\banswer\b(?: \w{1,20}){0,3}?\s{0,3}(?:is|are|:|=)(?:\s{1,3}(?:now|simply|exactly|just))?\s{0,3}:?\s{0,3}"
    r"([^\n]{1,200})",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?;](?=\s|$)")

_GROUPED = r"\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d{1,3}(?:[ \u00a0\u202f]\d{3})+(?!\d)"
_DIGITS = rf"(?:{_GROUPED}|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+"
_BRACES = r"\{[^{}]{1,60}\}"
_LATEX = rf"\\[dtc]?frac{_BRACES}{_BRACES}|\\[dtc]?frac\d\d|\\sqrt{_BRACES}|√\d+"
_ATOM = rf"(?:[$€£¥]\s?)?(?:{_DIGITS})!?%?|{_LATEX}"
_OPERATOR = r"\s?(?:\*\*|\^|[+*/×·÷:]|\\times|\\cdot|\\div)|\s[-−](?=\s)"
_JOIN = rf"(?:{_OPERATOR})\s?[-−]?(?:{_BRACES}|\()?"
_SCIENTIFIC = re.compile(r"\s?(?:[*×·]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)")
_UNFINISHED = re.compile(r"\S\s?(?:[+×·÷]|(?<!\*)\*(?!\*)|\\times|\\cdot|\\div|\s[-−])")
"""A sum or product without its result, such as a question repeated: no answer, unless it is marked as one."""
_EXPRESSION = re.compile(rf"(?<![\w.,\\])[-−+]?(?:{_ATOM})(?:\^?{_BRACES}|{_JOIN}(?:{_ATOM})?\)?)*")
_MATHS = re.compile(r"\$([^$\n]{1,300})\$|\\\(([^\n]{1,300}?)\\\)|\\\[([^\n]{1,300}?)\\\]")
_NUMBER_AHEAD = re.compile(r"[-−+]?\s?(?:[$€£¥]|\\\$)?\s?(?:\d|\.\d|\\[dtc]?frac|\\sqrt|\\boxed)")


def last_answer(text: str) -> str | None:
    """What the completion gives as its answer, as written, else None.

    A `\\boxed{` or `<answer>` that is never closed is an answer cut short: it holds none, nor does what follows it.
    """
    text = _before_open_mark(text.replace("\u2212", "-"))
    marks = [mark for mark in (_last_box(text), _last_block(text), _last_hashes(text)) if mark is not None]
    if marks:
        return max(marks)[1]
    stated = _last_stated(text)
    return stated if stated is not None else _last_expression(text)


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
    boxed = last_boxed(block[1])
    if boxed is not None:
        return block[0], boxed
    stated = _last_stated(block[1])
    return block[0], block[1] if stated is None else stated


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
    maths = _MATHS.match(sentence)
    if maths:
        return maths[maths.lastindex or 0].strip()
    expression = _EXPRESSION.match(sentence)
    if expression and _NUMBER_AHEAD.match(sentence):
        rest = sentence[expression.end() :].strip()
        return sentence if len(rest.split()) <= 2 and not re.search(r"[=]", rest) else _trimmed(expression[0])
    return sentence if 0 < len(sentence.split()) <= 6 and not re.match(r"not\b", sentence, re.IGNORECASE) else None


def _last_expression(text: str) -> str | None:
    """The last number, or the arithmetic that it stands in."""
    expression = _last(_EXPRESSION.finditer(text))
    if expression is None:
        return None
    for maths in _MATHS.finditer(text):
        if maths.start() <= expression.start() and expression.end() <= maths.end():
            return maths[maths.lastindex or 0].rpartition("=")[2].strip()
    return None if _UNFINISHED.search(_SCIENTIFIC.sub("", expression[0])) else _trimmed(expression[0])


def _trimmed(expression: str) -> str:
    return expression.strip().rstrip("-−+*/×·÷:^( ").strip()


def _last(matches: Iterator[re.Match[str]]) -> re.Match[str] | None:
    match = None
    for match in matches:  # noqa: B007 (the last one is what counts)
        pass
    return match
