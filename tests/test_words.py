"""Phrases that a reader must guess at stay out of messages, docstrings, documents and names; each has a substitute."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "kernels" / "amir_kernels"

pytestmark = pytest.mark.skipif(not KERNELS.exists(), reason="the sources are not here: tests run against a wheel")

SUBSTITUTES = {
    r"(ask|asked|asks) for": "requests, needs, sets",
    r"(go|goes|going|went) on": "continues",
    r"(lots|by lot|a fixed lot)": "random, seeded",
    r"(stand|stands|stood) twice": "is a duplicate",
    r"(judged|measured|timed|counted|taken) apart": "measured separately",
    r"a run of its own": "a new run",
    r"at hand": "available",
    r"birth certificate": "machine, versions, commit and date",
    r"blank where": "null if",
    r"count as arrived": "names the check",
    r"dead (row|group|completion|token)s?": "zero-gradient rows, groups without training signal",
    r"(has|have) said why": "see its output",
    r"holds? no|holds? nothing": "has no, is empty",
    r"how many (had to go|is said)": "the count is logged",
    r"in parts over": "sharded over",
    r"is (said|told)( so)?|are said": "is reported, is logged",
    r"(is|are) waited for": "retries for at most",
    r"is no (number|reward|tensor|list|terminal|text|python file)": "is not a",
    r"learnt": "no training signal",
    r"lost touch": "lost contact",
    r"move it away": "move it aside",
    r"the one before": "the previous checkpoint",
    r"too improbable": "does not filter low ratios",
    r"trained whole|parts of a model": "full fine-tuning, sharded model",
    r"waits? for the device": "synchronizes the device",
    r"were seen to": "after checking that",
    r"(function|file|reward|questions?) of yours|(function|object) of the user's": "your own, the user's",
}
"""Phrases, as patterns of whole words, and what to write instead."""
NO_NOUNS = frozenset({"each", "found", "given", "kept", "live", "made", "one", "said", "told"})
"""Names of variables and parameters that say nothing of the value; the value's noun does."""
KEPT_NAMES = ("30% dead rows",)
"""Names of contenders in the kept rows of bench/results."""


def strings_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string literal and docstring; `{}` stands for the values in an f-string."""
    tree = ast.parse(source)
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.lineno, node.value


def found_in(text: str) -> list[str]:
    """The banned phrases in a text, whatever its line breaks and its case."""
    plain = " ".join(text.split())
    for name in KEPT_NAMES:
        plain = plain.replace(name, "")
    return [hit[0] for phrase in SUBSTITUTES for hit in re.finditer(rf"\b(?:{phrase})\b", plain, re.IGNORECASE)]


def reported(path: Path, texts: Iterator[tuple[int, str]]) -> list[str]:
    name = path.relative_to(ROOT)
    return [f"{name}:{line}: {hit!r}" for line, text in texts for hit in found_in(text)]


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each paragraph; of LOG.md, a record of its time, the headings alone."""
    line = 1
    for paragraph in path.read_text().split("\n\n"):
        if path.name != "LOG.md" or paragraph.lstrip().startswith("#"):
            yield line, paragraph.strip().partition("\n")[0] if path.name == "LOG.md" else paragraph
        line += paragraph.count("\n") + 2


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield number, line.partition("#")[2]


SOURCES = sorted(path for folder in (ROOT / "amir", KERNELS, ROOT / "bench") for path in folder.rglob("*.py"))
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / name / "README.md" for name in ("kernels", "bench"))]
)


@pytest.mark.parametrize("folder", ["amir", "kernels", "bench"])
def test_messages_and_docstrings_are_in_plain_words(folder: str) -> None:
    paths = [path for path in SOURCES if path.is_relative_to(ROOT / folder)]
    assert paths
    assert [hit for path in paths for hit in reported(path, strings_of(path.read_text()))] == []


def test_documents_are_in_plain_words() -> None:
    assert [hit for path in DOCUMENTS for hit in reported(path, paragraphs(path))] == []


def test_comments_of_recipes_are_in_plain_words() -> None:
    recipes = sorted((ROOT / "amir" / "recipes").glob("*.yaml"))
    assert recipes
    assert [hit for path in recipes for hit in reported(path, comments(path))] == []


def bound_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every variable and parameter."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def test_variables_are_named_by_nouns() -> None:
    names = [(path.relative_to(ROOT), *bound) for path in SOURCES for bound in bound_names(path.read_text())]
    assert names
    assert [f"{path}:{line}: {name}" for path, line, name in names if name in NO_NOUNS] == []


def test_a_variable_without_a_noun_is_found() -> None:
    source = "def f(given):\n    for one in given:\n        made = one\n    return lambda found: found"
    assert sorted(name for _, name in bound_names(source)) == ["found", "given", "made", "one"]


@pytest.mark.parametrize(
    "source",
    [
        '"""A run that\n    goes on."""',
        "raise ValueError('column stands twice')",
        'print(f"{path}: holds no row of {name}")',
        'raise RuntimeError(f"{path}: damaged; move it "\n                   "away")',
        "def f():\n    'The device is waited for.'",
    ],
)
def test_an_injected_phrase_is_found(source: str) -> None:
    assert [hit for _, text in strings_of(source) for hit in found_in(text)]


def test_plain_words_pass() -> None:
    assert found_in("step 3 continues; the column is a duplicate. linear_logprob, 30% dead rows") == []
