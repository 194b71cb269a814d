"""Guards of the tree: what may import what, what the README's map lists, how long a file gets, what no file names."""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "kernels" / "amir_kernels"
MAX_LINES = 600
UNLISTED = "tests"
"""The one folder whose files the README's map does not list: each is named after what it tests."""
# Written in parts, so that this file does not name what it looks for.
MACHINE_FOLDERS = "|".join(("tm" + "p", "wor" + "k", "roo" + "t", "hom" + "e"))
MACHINE_PATH = re.compile(rf"(^|[^A-Za-z0-9_.~-])/({MACHINE_FOLDERS})/[a-z]")
HOST = re.compile("|".join(("python" + "hosted", "npm" + "js", "pypi" + r"\.org")))

in_checkout = pytest.mark.skipif(not KERNELS.exists(), reason="the sources are not here: tests run against a wheel")


@cache
def tracked() -> tuple[str, ...]:
    """What git tracks or would track, so that a file is held to the rules before its first commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(path for path in listing.splitlines() if (ROOT / path).is_file())


def modules_after(statement: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter by `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@in_checkout
def test_kernels_is_a_folder_and_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide Hugging Face's package of that name"


@in_checkout
@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.name)
def test_kernels_import_only_torch_and_triton_and_themselves_relatively(path):
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found = {(node.module or "").partition(".")[0]}
        else:
            continue
        assert found <= allowed, f"line {node.lineno} imports {sorted(found - allowed)}"


@in_checkout
@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.name)
def test_kernel_functions_are_annotated_except_triton_kernels(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef) or any("jit" in ast.unparse(mark) for mark in node.decorator_list):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        bare = [argument.arg for argument in arguments if argument.annotation is None]
        assert set(bare) <= {"self", "cls", "ctx"}, f"{node.name} (line {node.lineno}): {bare} without a type"
        assert node.returns is not None, f"{node.name} (line {node.lineno}) without a result type"


def test_importing_the_kernels_loads_nothing_of_the_trainer():
    loaded = modules_after("import amir_kernels")
    assert "amir_kernels" in loaded
    assert not loaded & {"amir", "transformers", "peft", "kernels", "pydantic"}


def test_a_configuration_is_read_without_torch():
    pytest.importorskip("pydantic", reason="needs the extra `train`")
    loaded = modules_after("import amir.config, amir.__main__")
    assert "amir" in loaded
    assert not loaded & {"torch", "triton", "transformers", "peft", "amir_kernels"}


def test_no_module_is_longer_than_one_idea():
    long = {path: n for path in tracked() if path.endswith(".py") and (n := lines_of(path)) > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines: {long}"


def lines_of(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


def test_no_second_home_for_odds_and_ends():
    placed_nowhere = re.compile(r"(^|/)(utils?|misc|helpers?|common|legacy|old_[^/]*)(\.py)?(/|$)|\.ipynb$")
    assert [path for path in tracked() if placed_nowhere.search(path)] == []


def test_no_file_names_a_machine_path_or_a_registry_host():
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in tracked()
        if Path(path).suffix in {"", ".py", ".md", ".toml", ".yaml", ".yml", ".txt"} or path.startswith(".ci/")
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if MACHINE_PATH.search(line) or HOST.search(line)
    ]
    assert found == []


def tree_in_readme() -> list[str]:
    """The paths in the README's map, patterns among them.

    Nesting by two spaces; one or two spaces between the names of a line, three before their
    description; folders end in a slash.
    """
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"^## Map of the tree\n.*?^```text\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block, "the README has no `## Map of the tree` with a ```text block"
    folders: list[str] = []
    paths = []
    for line in filter(str.strip, block[1].splitlines()):
        indent = len(line) - len(line.lstrip())
        names = line.strip().partition("   ")[0].split()
        del folders[indent // 2 :]
        paths += ["".join(folders) + name for name in names]
        if names[-1].endswith("/"):
            folders.append(names[-1])
    return paths


def two_levels() -> set[str]:
    """What the map must list: everything at the root, and in each folder there but UNLISTED; folders end in a slash."""
    parts = [path.split("/") for path in tracked()]
    first = {part[0] + "/" * (len(part) > 1) for part in parts}
    second = {"/".join(part[:2]) + "/" * (len(part) > 2) for part in parts if len(part) > 1 and part[0] != UNLISTED}
    return first | second


def test_the_readme_lists_what_is_there():
    there, listed = two_levels(), tree_in_readme()
    gone = {path for path in listed if not any(fnmatchcase(found, path) for found in there)}
    assert not gone, f"in the README's map, not in the tree: {sorted(gone)}"
    assert len(listed) == len(set(listed)), "the README's map lists a path twice"
    assert {path for path in listed if "*" in path} <= {"bench/bench_*.py", "docs/*.svg"}, (
        "a pattern lists whatever comes"
    )


def test_the_readme_lists_all_of_two_levels():
    there, listed = two_levels(), tree_in_readme()
    missing = {found for found in there if not any(fnmatchcase(found, path) for path in listed)}
    assert not missing, f"not in the README's map: {sorted(missing)}"
