"""What the house's files say of each other: pinned versions, the words of the Makefile, the archives' content."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

import amir_kernels

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="the sources are not here: a wheel is tested")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_requirement_but_the_gpu_extra_is_pinned():
    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *(line for name, lines in extras.items() if name != "gpu" for line in lines)]
    names = {normal(re.match(r"[A-Za-z0-9._-]+", line)[0]) for line in wanted}
    assert names - {normal(name) for name in pins()} == set()


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="the environment is not the one of `make install`")
def test_what_is_installed_is_what_is_pinned():
    pinned = {normal(name): version for name, version in pins().items()}
    found = {
        normal(item.metadata["Name"]): item.version.partition("+")[0]
        for item in distributions(path=[sysconfig.get_path("purelib")])
    }
    of_torch = {name for name in found if name.startswith(("nvidia-", "cuda-"))}
    others = found.keys() - of_torch - {"pip", "amir-grpo"}
    assert {name: found[name] for name in others} == {name: pinned.get(name) for name in others}


def test_the_kernels_ask_for_torch_and_triton_only():
    assert {re.match(r"\w+", line)[0] for line in project()["dependencies"]} == {"torch", "triton"}


def test_the_trainer_declares_what_it_imports():
    extras = project()["optional-dependencies"]
    lines = [*project()["dependencies"], *extras["train"], *extras["gpu"]]
    declared = {normal(re.match(r"[A-Za-z0-9._-]+", line)[0]) for line in lines}
    imported = set()
    for path in (ROOT / "amir").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add((node.module or "").partition(".")[0])
    foreign = {normal(name) for name in imported - sys.stdlib_module_names - {"amir", "amir_kernels"}}
    other_name = {"yaml": "pyyaml"}
    assert {other_name.get(name, name) for name in foreign} - declared == set()


def test_pre_commit_uses_the_pinned_ruff():
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.search(r"ruff-pre-commit\n    rev: v(\S+)", text)[1] == pins()["ruff"]


def test_ci_says_the_words_of_the_makefile():
    words = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spoken = set(re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    assert "test" in spoken
    assert spoken <= words
    assert "bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_documents_speak_words_the_makefile_knows():
    words = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md"), ROOT / "kernels" / "README.md"]:
        spoken = set(re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", path.read_text(), re.MULTILINE))
        assert {a or b for a, b in spoken} <= words, path


def test_help_lists_every_word():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)", makefile.replace("\\\n", " "), re.MULTILINE)[1]
    assert re.findall(r"^([a-z-]+):.*  ## .+$", makefile, re.MULTILINE) == phony.split()


def test_every_tool_of_the_bench_folder_has_a_word():
    makefile = (ROOT / "Makefile").read_text()
    tools = {path.name for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()} | {"ops.py"}
    called = set(re.findall(r"bench/(\w+\.py)", makefile))
    assert {tool for tool in tools if not tool.startswith("bench_")} == called
    assert "bench/bench_*.py" in makefile


def test_a_fast_selection_has_tests_of_every_room():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    chosen = re.search(r"^FAST := (.*)", makefile, re.MULTILINE)[1]
    paths = [ROOT / "tests" / f"test_{name}.py" for name in chosen.split()]
    imported = set(re.findall(r"^from (amir_kernels|amir\.\w+)", "".join(p.read_text() for p in paths), re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "amir").glob("*/*.py")} - {"recipes"}
    assert {"amir_kernels", *(f"amir.{room}" for room in rooms)} - imported == set()


@pytest.mark.parametrize("start", [["-c"], ["-P", "-c"]], ids=["from another folder", "without the working directory"])
def test_an_editable_install_does_not_offer_the_folder_kernels(start, tmp_path):
    """bitsandbytes and Transformers would take it for Hugging Face's package."""
    code = "import importlib.util as u, json; spec = u.find_spec('kernels')\n"
    code += "print(json.dumps(list(spec.submodule_search_locations) if spec else []))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *start, code]
    cwd = ROOT if "-P" in start else tmp_path
    printed = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True).stdout
    assert [place for place in json.loads(printed) if Path(place).is_relative_to(ROOT / "kernels")] == []


def test_the_archives_hold_what_they_should(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    folders = {name.partition("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"amir", "amir_kernels"}
    assert {"amir/recipes/quickstart.yaml", "amir/py.typed", "amir_kernels/py.typed"} <= names
    assert f"\nVersion: {amir_kernels.__version__}\n" in metadata
    for field in ("Classifier: Typing :: Typed", "Description-Content-Type: text/markdown", "Project-URL: "):
        assert f"\n{field}" in metadata
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        inner = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "tests/test_house.py", "bench/table.py", ".ci/run", "LICENSE"} <= inner
