"""What the documents print works as printed: snippets, commands, keys and defaults, numbers, links, names of files."""

import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RUN_DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "kernels" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
"""Their snippets and commands are run here; those of bench/README.md in test_bench.py."""
DOCUMENTS = [
    *RUN_DOCUMENTS,
    ROOT / "CHANGELOG.md",
    ROOT / "LOG.md",
    ROOT / "bench" / "README.md",
    ROOT / "bench" / "RESULTS.md",
]
MAX_README_LINES = 200

if not README.exists():
    pytest.skip("the documents are not here: a wheel is tested", allow_module_level=True)


def blocks(language: str) -> list[tuple[str, str]]:
    """Name and content of each fenced block in that language."""
    return [
        (f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 2}", match[1])
        for path in RUN_DOCUMENTS
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


def test_the_documents_know_every_language_that_is_tested_here():
    """A block in a language that nothing runs or reads would go stale unseen."""
    tested = {"python", "yaml", "console", "diff", "text"}
    for path in RUN_DOCUMENTS:
        opened = re.findall(r"^```(\S*)$", path.read_text(), re.MULTILINE)[::2]
        assert set(opened) <= tested, path


# ---- tables --------------------------------------------------------------------------------------------------------


def table_under(document: str, header: str) -> list[list[str]]:
    """Cells of the document's table whose header line starts with `header`."""
    lines = (ROOT / document).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(header)) + 2
    rows = []
    while lines[start].startswith("|"):
        rows.append([cell.strip() for cell in lines[start].strip("|").split("|")])
        start += 1
    return rows


def test_keys_and_defaults_are_those_of_the_configuration():
    from amir.config import RunConfig

    for key, default, _ in table_under("docs/runs.md", "| key | default |"):
        assert str(RunConfig.model_fields[key.strip("`")].default) == default, key


def test_recipes_are_those_that_are_shipped():
    from amir.config_reader import recipe_names

    assert sorted(name.strip("`") for name, *_ in table_under("docs/runs.md", "| recipe |")) == recipe_names()


def test_metrics_that_are_named_exist():
    from amir.run.metrics import METRICS

    text = (ROOT / "docs" / "metrics.md").read_text().partition("\n## ")[0]
    named = {name for cells in text.split("|") for name in re.findall(r"`([a-z_]+)`", cells)}
    assert named - set(METRICS) == set()


def test_groups_of_tensorboard_have_their_row():
    from amir.run.metrics import GROUPS

    rows = table_under("docs/metrics.md", "| group |")
    assert {name for group, _ in rows for name in re.findall(r"`(\w+)`", group)} == {"eval", *GROUPS}


def test_settings_that_a_resumed_run_may_change_are_listed():
    from amir.run.directory import MAY_CHANGE

    text = (ROOT / "docs" / "runs.md").read_text()
    listed = re.search(r"A resumed run may change (.*?) and every setting of `sampler`", text, re.DOTALL)[1]
    assert set(re.findall(r"`([\w.]+)`", listed)) == {key for key in MAY_CHANGE if not key.startswith("sampler.")}


def test_shipped_rewards_have_their_row():
    from amir.config import REWARDS

    rows = table_under("docs/data-and-rewards.md", "| shipped reward |")
    assert {name for cells in rows for name in re.findall(r"`(\w+)`", cells[0])} == set(REWARDS)


def test_every_op_has_its_row():
    import amir_kernels

    modules = {cells[0].strip("`"): cells[1].strip("`") for cells in table_under("kernels/README.md", "| op |")}
    functions = {name for name in amir_kernels.__all__ if name.islower()}
    assert modules == {name: getattr(amir_kernels, name).__module__.split(".")[1] for name in functions}


def test_the_tested_versions_are_the_pinned_ones():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    project = (ROOT / "pyproject.toml").read_text()
    for name, minimum, tested in table_under("docs/install.md", "| | minimum |"):
        assert f'"{name}>={minimum}' in project, name
        assert f"{pins[name]}.".startswith(f"{tested}."), name


# ---- the README ----------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_says_first_what_has_not_run():
    lines = README.read_text().splitlines()
    assert len(lines) <= MAX_README_LINES
    assert "has run on a GPU yet" in "\n".join(lines[:4])


def test_the_readmes_sentence_on_the_quick_start_is_the_newest_timed_row():
    rows = [json.loads(line) for path in (ROOT / "bench" / "results").glob("*.jsonl") for line in path.open()]
    timed = [row for row in rows if row["bench"] == "quickstart" and row["seconds"]]
    newest = max(timed, key=lambda row: row["date"])
    before, after = newest["observed"]["held_out_success"]
    assert f"rises from {before} to {after} in {newest['seconds']['median']:.0f} s" in README.read_text()


# ---- the checklist of CONTRIBUTING.md ------------------------------------------------------------------------------


def checklist() -> dict[int, str]:
    rows = table_under("CONTRIBUTING.md", "| | question |")
    assert all(question.endswith("?") and answer for _, question, answer in rows)
    return {int(number): answer for number, _, answer in rows}


def test_the_checklist_has_seventeen_answers_whose_files_and_headings_exist():
    answers = checklist()
    assert list(answers) == list(range(1, 18))
    for answer in answers.values():
        paths = re.findall(r"`([\w.-]+/[\w./-]*)`", answer) + re.findall(r"\b((?:\w+/)*[A-Z]+\.md)", answer)
        assert [path for path in paths if not (ROOT / path).exists()] == []
        for document, heading in re.findall(r'([\w/]+\.md), "([^"]+)"', answer):
            assert re.search(rf"^#+ {re.escape(heading)}$", (ROOT / document).read_text(), re.MULTILINE), heading


def test_what_the_checklist_says_of_the_tree_is_true():
    answers = checklist()
    first, last = map(int, re.search(r"README.md, lines (\d+) to (\d+)", answers[1]).groups())
    introduction = README.read_text().partition("<picture>")[0].rstrip().splitlines()
    assert (first, last) == (introduction.index("") + 2, len(introduction))
    op = re.match("for `(\\w+)`", answers[4])[1]
    assert {path for path in re.findall(r"`([\w/]+\.py)`", answers[4]) if op not in path} == {
        "kernels/amir_kernels/reference.py"
    }
    assert f"\ndef {op}(" in (ROOT / "kernels" / "amir_kernels" / "reference.py").read_text()
    skipped = {
        f"tests/{path.name}"
        for path in (ROOT / "tests").glob("test_*.py")
        if re.search(r"^@pytest.mark.skipif\(not torch.cuda", path.read_text(), re.MULTILINE)
    }
    assert set(re.findall(r"`(tests/\w+\.py)`", answers[12])) == skipped
    factors = re.search(r"`(tests/\w+\.py)`, `(\w+)`", answers[13])
    assert f"\n{factors[2]} = " in (ROOT / factors[1]).read_text()


def test_the_origin_of_each_table_is_below_it():
    tables = re.findall(r"<!-- rows: \w+ -->\n(.*?)<!-- end", (ROOT / "bench" / "RESULTS.md").read_text(), re.DOTALL)
    origins = [table.strip().rpartition("|\n")[2] for table in tables if not table.startswith("No rows")]
    assert origins
    assert all("cores" in text and "ommit `" in text and "`python bench/" in text for text in origins)


# ---- across documents ----------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def prose(path: Path) -> str:
    """The document without its code and without what a script writes into it."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    made = r"<!-- (?:rows: \w+|parity:start) -->.*?<!-- (?:end of rows|parity:end) -->"
    return re.sub(made, "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p.name != "LOG.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_are_named_exist(path):
    """LOG.md is history and may name what is gone."""
    named = re.findall(r"`((?:amir|kernels|bench|docs|tests)/[\w./-]+)`", prose(path))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_no_sentence_stands_twice():
    places = defaultdict(set)
    for path in DOCUMENTS:
        text = "\n".join(line for line in prose(path).splitlines() if not line.startswith("|"))
        for sentence in re.split(r"(?<=[.:])\s+|\n\n|\n- ", text):
            words = " ".join(sentence.split())
            if len(words.split()) >= 7:
                places[words].add(path.name)
    assert {words: names for words, names in places.items() if len(names) > 1} == {}


def test_the_numbers_are_those_of_the_kept_rows():
    check = [sys.executable, ROOT / "bench" / "table.py", "--check"]
    done = subprocess.run(check, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
