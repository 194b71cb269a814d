"""What the house's files say of each other: pinned versions, the words of the Makefile, the archives' content."""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

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
    found = {normal(item.metadata["Name"]): item.version.partition("+")[0] for item in distributions()}
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
    for path in [*ROOT.glob("*.md"), ROOT / "kernels" / "README.md", ROOT / "bench" / "README.md"]:
        spoken = set(re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", path.read_text(), re.MULTILINE))
        assert {a or b for a, b in spoken} <= words, path


def test_the_archives_hold_what_they_should(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    folders = {name.partition("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"amir", "amir_kernels"}
    assert {"amir/recipes/quickstart.yaml", "amir/py.typed", "amir_kernels/py.typed"} <= names
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        inner = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "tests/test_house.py", "bench/table.py", ".ci/run", "LICENSE"} <= inner
