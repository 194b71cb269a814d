"""What the README prints works as printed: its snippets, its commands, its keys and defaults, its numbers."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "kernels" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

if not DOCUMENTS[0].exists():
    pytest.skip("the documents are not here: a wheel is tested", allow_module_level=True)


def blocks(language: str) -> list[tuple[str, str]]:
    """Name and content of each fenced block in that language."""
    return [
        (f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 2}", match[1])
        for path in DOCUMENTS
        for text in [path.read_text()]
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


def lines() -> list[str]:
    """Commands of the console blocks, continued lines joined."""
    return [
        line.partition("#")[0].strip()
        for _, block in blocks("console")
        for line in block.replace("\\\n", " ").splitlines()
    ]


def commands() -> list[str]:
    """Those of `amir`, whatever starts it."""
    starts = re.compile(r"^(?:torchrun --nproc-per-node \d+ -m )?(?=amir )")
    return [starts.sub("", line) for line in lines() if starts.match(line)]


def test_two_documents_start_the_same_vllm_server():
    started = [shlex.split(line) for line in lines() if "vllm serve" in line]
    flags = [words[words.index("serve") :] for words in started]
    assert len(flags) == 2
    assert flags[0] == flags[1]
    assert all("VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in words for words in started)


@pytest.mark.parametrize(("name", "code"), blocks("python"), ids=[name for name, _ in blocks("python")])
def test_snippet_runs(name, code):
    for peer in re.findall(r"^from (trl|liger_kernel|cut_cross_entropy|verl)\b", code, re.MULTILINE):
        pytest.importorskip(peer, reason=f"{name} needs it")
    exec(compile(code, name, "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize(("name", "text"), blocks("yaml"), ids=[name for name, _ in blocks("yaml")])
def test_run_is_a_valid_configuration(name, text, tmp_path):
    from amir.config_reader import load_config

    (tmp_path / "run.yaml").write_text(text)
    assert load_config(str(tmp_path / "run.yaml")), name


@pytest.mark.parametrize("command", commands())
def test_command_is_understood(command, tmp_path):
    words = shlex.split(command)[1:]
    (tmp_path / "run.yaml").write_text("model: a-model\ntask: {name: arithmetic}\n")
    if words[0] == "train" and "--dry-run" not in words:
        words.append("--dry-run")
    command = [sys.executable, "-m", "amir", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def table_under(header: str) -> list[list[str]]:
    """Cells of the README's table whose header line starts with `header`."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(header)) + 2
    rows = []
    while lines[start].startswith("|"):
        rows.append([cell.strip() for cell in lines[start].strip("|").split("|")])
        start += 1
    return rows


def test_keys_and_defaults_are_those_of_the_configuration():
    from amir.config import RunConfig

    for key, default, _ in table_under("| key | default |"):
        assert str(RunConfig.model_fields[key.strip("`")].default) == default, key


def test_recipes_are_those_that_are_shipped():
    from amir.config_reader import recipe_names

    assert sorted(name.strip("`") for name, *_ in table_under("| recipe |")) == recipe_names()


def test_every_op_has_its_row():
    import amir_kernels

    modules = {cells[0].strip("`"): cells[1].strip("`") for cells in table_under("| op |")}
    functions = {name for name in amir_kernels.__all__ if name.islower()}
    assert modules == {name: getattr(amir_kernels, name).__module__.rpartition(".")[2] for name in functions}


def test_links_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert target.startswith("https://") or (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_numbers_are_those_of_the_kept_rows():
    check = [sys.executable, ROOT / "bench" / "table.py", "--check"]
    done = subprocess.run(check, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
