"""What a newcomer gets wrong, through the command itself: exit code 1 or 2, one clear message, nothing left behind."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock
from safetensors.torch import load_file, save_file

from amir.config_reader import config_yaml
from tiny import Command, model, run_config, tokenizer

FIELDS = yaml.safe_load(config_yaml(run_config(eval_prompts=0, max_steps=1, save_steps=1, num_generations=2)))


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _key_with_a_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_KEY", "a\nb")


def write(path: Path, **changes: object) -> str:
    path.write_text(yaml.safe_dump({key: value for key, value in (FIELDS | changes).items() if value is not ...}))
    return str(path)


def refused(told: tuple[int, str, str], words: str, code: int = 2) -> None:
    """One clear message: short, without a traceback, with the parts of `words` in order."""
    assert told[0] == code, told
    assert re.search(".*".join(map(re.escape, words.split("..."))), told[2], re.DOTALL), told
    assert "Traceback" not in told[2] + told[1]
    assert len(told[2]) < 900, told[2]


DATA = {
    "empty.jsonl": "",
    "broken.jsonl": '{"question": "1+1", "answer": "2"}\n{"question": "1+',
    "column.jsonl": '{"question": "1+1", "answer": "2"}\n{"problem": "1+1", "answer": "2"}\n',
    "good.jsonl": '{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": "3"}\n',
    "long.jsonl": json.dumps({"question": "1" * 500, "answer": "2"}) + "\n",
}


def rows(name: str, **settings: object) -> dict[str, object]:
    return {"name": "dataset", "path": name, "prompt": "{question}", **settings}


CASES: dict[str, tuple[dict[str, object], str]] = {
    "misspelt key": ({"learning_rat": 1}, "unknown key 'learning_rat' (value 1); nearest: 'learning_rate'"),
    "misspelt task key": (
        {"task": rows("good.jsonl", promt="x")},
        "unknown key 'task.promt' (value 'x'); nearest: 'task.prompt'",
    ),
    "misspelt reward": ({"rewards": [{"name": "corectness"}]}, "name 'corectness': expected one of ...nearest: 'corr"),
    "misspelt reward key": (
        {"rewards": [{"name": "integer", "waight": 2}]},
        "unknown key 'rewards.0.waight' (value 2); nearest: 'rewards.weight'",
    ),
    "no reward": ({"rewards": []}, "rewards = []: ...at least 1 item"),
    "same reward twice": ({"rewards": [{"name": "integer"}] * 2}, "two are called 'integer'; expected different names"),
    "a reward of neither kind": ({"rewards": [{"weight": 1}]}, "{'weight': 1}: expected either name ...neither is set"),
    "a function that is none": ({"rewards": [{"function": "mine.py"}]}, "function 'mine.py': expected module:function"),
    "a function that is not there": (
        {"rewards": [{"function": "mine.py:score"}]},
        "'mine.py:score': ...mine.py: no such file; expected a function that takes `completions`",
    ),
    "temperature 0": ({"temperature": 0}, "temperature = 0: expected greater than 0"),
    "temperature below 0": ({"temperature": -1}, "temperature = -1: expected greater than 0"),
    "a group of one with pairs": ({"num_generations": 1}, "num_generations = 1: expected greater than or equal to 2"),
    "a group of one without": (
        {"num_generations": 1, "lambda_reg": 0},
        "num_generations = 1: expected greater than or equal to 2",
    ),
    "not a number": ({"learning_rate": float("nan")}, "learning_rate = nan: expected a finite number"),
    "infinity": ({"max_grad_norm": float("inf")}, "max_grad_norm = inf: expected a finite number"),
    "words for a number": ({"max_steps": "many"}, "max_steps = 'many': expected a valid integer"),
    "a list for a number": ({"max_steps": [1]}, "max_steps = [1]: expected a valid integer"),
    "null for a number": ({"max_steps": None}, "max_steps = None: expected a valid integer"),
    "a huge count": ({"prompts_per_step": 10**30}, "prompts_per_step = 1000...: expected less than 2147483648"),
    "a negative count": (
        {"max_completion_length": -5},
        "max_completion_length = -5: expected greater than or equal to 1",
    ),
    "no reward with weight": (
        {"rewards": [{"name": "integer", "weight": 0}]},
        "every weight is 0, ...expected one weight other than 0",
    ),
    "a weight beyond float32": (
        {"rewards": [{"name": "integer", "weight": 1e300}]},
        "rewards.0.weight = 1e+300: expected less than or equal to 1000000",
    ),
    "a template that fails": (
        {"chat_template": "{{ messages + 1 }}"},
        "chat_template: it fails for 'What is ...: can only concatenate list...; correct the template",
    ),
    "a broken pattern of modules": (
        {"lora": {"target_modules": "("}},
        "lora.target_modules = '(': ...expected names of the model's linear layers, or a regular expression",
    ),
    "tags that are one word": (
        {"rewards": [{"name": "strict_format", "arguments": {"tags": "think"}}]},
        "strict_format: tags must be a list of names such as ['think', 'answer'], got 'think'",
    ),
    "no tags": (
        {"rewards": [{"name": "xml_count", "arguments": {"tags": []}}]},
        "xml_count: tags must be a list of names ...got []",
    ),
    "no model": ({"model": ...}, "model: missing; it has no default, so set it"),
    "a model that is not there": (
        {"model": "./nowhere"},
        "model = './nowhere': expected a folder with config.json and weights, or a hub name",
    ),
    "a model without weights": (
        {"model": "weightless"},
        "model = 'weightless': cannot be loaded (...expected a folder",
    ),
    "a model of another kind": (
        {"model": "other kind"},
        "model = 'other kind': cannot be loaded (ValueError: Unrecognized configuration...of a causal language model",
    ),
    "a model cut short": (
        {"model": "cut"},
        "model = 'cut': cannot be loaded (SafetensorError...expected a folder with config.json, weights and tokenizer",
    ),
    "a layer's weights missing": (
        {"model": "layerless"},
        "model.layers.1.input_layernorm.weight is missing ...expected the weights that belong to this config.json",
    ),
    "the weights of another model": (
        {"model": "foreign"},
        "model.layers.0.mlp.up_proj.weight is missing or has another shape ...expected the weights that belong to",
    ),
    "a tokenizer without tokens": (
        {"model": "tokenless"},
        "'tokenless': cannot be loaded (KeyError...and tokenizer files",
    ),
    "a model of a smaller vocabulary": (
        {"model": "small"},
        "have 40 tokens, but the tokenizer has 98 tokens; expected the model's own tokenizer, or resized embeddings",
    ),
    "empty dataset": ({"task": rows("empty.jsonl")}, "task.path = 'empty.jsonl': it has 0 rows; expected at least 1"),
    "broken line": ({"task": rows("broken.jsonl")}, "broken.jsonl, line 2: not JSON (...); correct or remove it"),
    "missing column": (
        {"task": rows("column.jsonl")},
        "line 2: no column 'question'; expected one of 'problem', 'answer'",
    ),
    "missing file": (
        {"task": rows("absent.jsonl")},
        "task.path = 'absent.jsonl': no such file; expected an existing file",
    ),
    "a folder for a file": (
        {"task": rows("folder.jsonl")},
        "task.path = 'folder.jsonl': no such file; expected an existing file",
    ),
    "no prompt": (
        {"task": {"name": "dataset", "path": "good.jsonl"}},
        "'path': 'good.jsonl'}: expected either prompt (a template) or messages ...neither is set",
    ),
    "prompts too long": (
        {"task": rows("long.jsonl")},
        "max_prompt_length = 64, min_prompt_length = 1: no training prompt is left of 1 examples; set bounds",
    ),
    "prompts too long, refused": (
        {"task": rows("long.jsonl"), "overlong_prompts": "refuse"},
        "long.jsonl, line 1 has 501 tokens ...raise max_prompt_length, or set overlong_prompts: drop",
    ),
    "nothing held out": (
        {"task": rows("good.jsonl"), "eval_prompts": 1},
        "eval_prompts = 1: the task has no held-out examples; set eval_prompts: 0",
    ),
    "no answers": (
        {"task": rows("good.jsonl", answer=None)},
        "task.answer = None: the reward correctness compares answers; set it to the column of the right answer",
    ),
    "more positions than the model has": (
        {"max_prompt_length": 9999},
        "max_prompt_length + max_completion_length = 10008: the model has 256 positions; lower one of the two",
    ),
    "a name too long": ({"output_dir": "o" * 300}, "ooo': File name too long; name another output_dir"),
    "a NUL in a path": ({"output_dir": "a\0b"}, "output_dir = 'a\\x00b': a path has no NUL character; remove it"),
    "a home that is not there": (
        {"output_dir": "~nobody.here/x"},
        "output_dir = '~nobody.here/x': there is no home folder of that user; expected an existing user",
    ),
    "a port that is none": (
        {"sampler": {"name": "server", "url": "http://x:abc"}},
        "sampler.url = 'http://x:abc': ...expected an address such as http://localhost:8000",
    ),
    "a key that is none": (
        {"sampler": {"name": "server", "url": "http://localhost:9", "api_key_env": "NO_KEY"}},
        "sampler.api_key_env = 'NO_KEY': ...not allowed in an HTTP header; set it to the server's key",
    ),
    "folder not to be made": (
        {"output_dir": "/proc/run"},
        "output_dir = '/proc/run': cannot be written to (...); expected a writable folder",
    ),
    "folder not to be written": (
        {"output_dir": "good.jsonl/x"},
        "output_dir = 'good.jsonl/x': ...good.jsonl' is not a writable folder; name another output_dir",
    ),
}
"""A run's changes, and parts of its refusal in order, separated by `...`: the value that was found, and the remedy."""


def other_kind(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def layerless(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in held.items() if "layers.1." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def foreign(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    held["model.layers.0.mlp.up_proj.weight"] = torch.zeros(7, 32)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def small(folder: Path) -> None:
    made = model()
    made.resize_token_embeddings(40)
    made.save_pretrained(folder)


BROKEN_MODELS: dict[str, Callable[[Path], object]] = {
    "weightless": lambda folder: (folder / "model.safetensors").unlink(),
    "other kind": other_kind,
    "cut": cut,
    "layerless": layerless,
    "foreign": foreign,
    "tokenless": lambda folder: (folder / "tokenizer.json").write_text("{}"),
    "small": small,
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_run_is_refused_and_leaves_nothing(case: str, command: Command, tiny_folder: Path) -> None:
    for name, text in DATA.items():
        Path(name).write_text(text)
    Path("folder.jsonl").mkdir()
    if (broken := CASES[case][0].get("model")) in BROKEN_MODELS:
        shutil.copytree(tiny_folder, str(broken))
        BROKEN_MODELS[str(broken)](Path(str(broken)))
    changes = {"model": str(tiny_folder), "output_dir": "out/run", **CASES[case][0]}
    path = write(Path("run.yaml"), **changes)
    before = sorted(Path().rglob("*"))
    refused(command("train", path), CASES[case][1])
    assert sorted(Path().rglob("*")) == before


NOT_YAML = "run.yaml: expected YAML, and it cannot be parsed:"
FILES = {
    "not YAML": (b"model: [", NOT_YAML),
    "a key twice": (b"model: x\nmodel: y\n", NOT_YAML + " key 'model' is a duplicate; remove one of the two"),
    "a nested key twice": (
        b"model: x\nlora:\n  r: 1\n  r: 2\n",
        NOT_YAML + " key 'r' is a duplicate; remove one of the two",
    ),
    "a list": (b"- model\n", "run.yaml: expected a mapping of settings (key: value), got list"),
    "nothing": (b"", "run.yaml: expected a mapping of settings (key: value), got NoneType"),
    "not UTF-8": (b"model: \xff", "run.yaml: not UTF-8 (...0xff...); save the file as UTF-8"),
    "an impossible date": (b"model: 2020-99-99\n", NOT_YAML),
    "an endless number": (b"seed: " + b"9" * 5000, NOT_YAML),
    "no end of brackets": (b"model: " + b"[" * 5000, NOT_YAML),
    "a NUL": (b"model: a\0b", NOT_YAML),
    "a tag that would run code": (b"model: !!python/object/apply:os.getcwd []", NOT_YAML),
    "a key that is a list": (b"? [a, b]\n: 1\n", NOT_YAML),
    "a key that is a number": (b"1: 2\n", "1"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_refused(case: str, command: Command) -> None:
    Path("run.yaml").write_bytes(FILES[case][0])
    refused(command("train", "run.yaml"), FILES[case][1])


def test_bad_words_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("folder.yaml").mkdir()
    for arguments, words in [
        (["train", "quickstrat"], "run 'quickstrat': expected a YAML file or one of the recipes"),
        (["train", "quickstrat"], "nearest: 'quickstart'"),
        (["train", "folder.yaml"], "run 'folder.yaml': expected a YAML file or one of the recipes"),
        (["train", "absent.yaml"], "run 'absent.yaml': expected a YAML file"),
        (["train", "quickstart", "--set", "seed"], "--set 'seed': expected key=value"),
        (["train", "quickstart", "--set", "=1"], "unknown key '' (value 1)"),
        (["train", "quickstart", "--set", "seed=" + "9" * 5000], "expected YAML, and it cannot be parsed"),
        (["train", "quickstart", "--set", "seed.x=1"], "seed is a single value and has no keys; expected seed=VALUE"),
        (["train", "quickstart", "--resume"], "quickstart': it has no run to resume; leave out --resume to start one"),
        (["train"], "Missing argument"),
        (["train", "quickstart", "extra"], "extra"),
        (["trian", "quickstart"], "trian"),
    ]:
        told = command(*arguments)
        assert told[0] == 2, told
        assert words in told[2], told
        assert "Traceback" not in told[2]
    Path("run.yaml").write_text("model: x")
    monkeypatch.setattr(
        Path, "read_text", lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    refused(command("train", "run.yaml"), "run.yaml: cannot be read (Permission denied); expected a readable file")


def test_a_folder_in_use_and_a_folder_with_a_run_are_refused(command: Command, tiny_folder: Path) -> None:
    path = write(Path("run.yaml"), model=str(tiny_folder), output_dir="out")
    Path("out").mkdir()
    with FileLock("out/.lock"):
        refused(command("train", path), "output_dir = 'out': another process is using it; wait for that run, or name")
    assert [p.name for p in Path("out").iterdir()] == [".lock"]
    assert command("train", path)[0] == 0
    before = {p: p.stat().st_mtime_ns for p in Path("out").rglob("*")}
    refused(command("train", path), "output_dir = 'out': it already has a run; add --resume")
    refused(
        command("train", path, "--resume", "--set", "seed=3"),
        "seed = 3: the run in 'out' has 0, and a resumed run must keep it; it may change ...max_steps",
    )
    assert {p: p.stat().st_mtime_ns for p in Path("out").rglob("*")} == before


def test_a_reward_that_fails_stops_the_run_and_mending_it_lets_it_go_on(command: Command, tiny_folder: Path) -> None:
    Path("mine.py").write_text(
        "import os\n"
        "def moody(completions, answers):\n"
        "    if os.path.exists('bad'): raise ValueError('I am moody')\n"
        "    if os.path.exists('slow'): import time; time.sleep(60)\n"
        "    return [float(len(c) % 2) if i else None for i, c in enumerate(completions)]\n"
    )
    rewards = [{"function": "mine.py:moody", "timeout_seconds": 0.5}, {"name": "correctness", "weight": 0}]
    path = write(Path("run.yaml"), model=str(tiny_folder), output_dir="out", max_steps=2, rewards=rewards)
    Path("bad").touch()
    refused(
        command("train", path),
        "reward moody (mine.py:moody) raised ValueError: I am moody (mine.py, line 3, in moody). The run's records are "
        "kept; add --resume to the same command to continue",
        code=1,
    )
    Path("bad").unlink()
    assert command("train", path, "--resume")[0] == 0
    Path("slow").touch()
    told = command("train", path, "--resume", "--set", "max_steps=3")
    assert told[0] == 0, told
    words = "reward moody: the call took longer than 0.5 s and was ended, so it scored none of the 6 completions"
    assert f"{words}; a larger timeout_seconds allows more time" in told[1]
    metrics = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert 0 <= metrics[0]["reward/moody"] <= 1
    assert metrics[0]["unscored_share"] == 0
    assert metrics[2]["reward/moody"] is None
    assert metrics[2]["reward_timeouts"] == 1
    sampled = [json.loads(line) for line in Path("out/completions/step-000001.jsonl").read_text().splitlines()]
    assert sampled[0]["rewards"] == {"moody": None, "correctness": 0.0}
    assert "took longer" in Path("out/log.txt").read_text()


DIVERGED = {
    "an adapter's weights": (
        {"learning_rate": 1e30},
        "start a new run with a smaller learning_rate or max_grad_norm, or with dtype: float32",
    ),
    "every weight": ({"learning_rate": 1e30, "lora": None}, "start a new run with a smaller learning_rate"),
    "rewards beyond bernoulli's": (
        {"scale_rewards": "bernoulli", "rewards": [{"name": "linear_length", "arguments": {"start": 0, "end": 9}}]},
        "scale_rewards = 'bernoulli': a completion has the reward -...start a new run with scale_rewards: group",
    ),
}


@pytest.mark.parametrize("case", DIVERGED)
def test_a_run_that_cannot_go_on_says_why(case: str, command: Command, tiny_folder: Path) -> None:
    rewards = [{"name": "linear_length", "arguments": {"start": 0, "end": 9}}]
    changes = {"rewards": rewards, "num_generations": 8, "max_steps": 9} | DIVERGED[case][0]
    path = write(Path("run.yaml"), model=str(tiny_folder), output_dir="out", **changes)
    refused(command("train", path), DIVERGED[case][1], code=1)
    assert list(Path("out/completions").glob("step-*"))


def test_a_picture_that_cannot_be_written_is_said_after_a_whole_run(command: Command, tiny_folder: Path) -> None:
    Path("out/curves.png").mkdir(parents=True)
    told = command("train", write(Path("run.yaml"), model=str(tiny_folder), output_dir="out"))
    assert told[0] == 0, told
    assert "curves.png cannot be written (Is a directory); training is finished" in told[1]
    assert Path("out/adapter/adapter_model.safetensors").is_file()


def test_an_evaluation_that_nothing_scores(command: Command, tiny_folder: Path) -> None:
    Path("mine.py").write_text("def silent(completions): return [None] * len(completions)\n")
    rewards = [{"function": "mine.py:silent"}]
    path = write(Path("run.yaml"), model=str(tiny_folder), output_dir="out", rewards=rewards, eval_prompts=2)
    told = command("train", path)
    assert told[0] == 0, told
    assert "held-out reward after step 1: unscored (4 samples)" in told[1]


def test_pad_may_be_eos_or_absent(command: Command, tmp_path: Path) -> None:
    """The three tokenizers give one run: padding is told by position, never by token."""
    results = []
    for name in ("own", "eos", "absent"):
        folder = tmp_path / name
        model().save_pretrained(folder)
        made = tokenizer(pad_is_eos=name == "eos")
        if name == "absent":
            made.pad_token = None
        made.save_pretrained(folder)
        changes = {"rewards": [{"name": "linear_length", "arguments": {"start": 0, "end": 60}}]}
        changes |= {"max_completion_length": 60, "num_generations": 8}
        path = write(tmp_path / f"{name}.yaml", model=str(folder), output_dir=name + "-run", **changes)
        told = command("train", path)
        assert told[0] == 0, told
        row = json.loads((tmp_path / f"{name}-run" / "metrics.jsonl").read_text())
        results.append({key: row[key] for key in ("reward", "loss", "grad_norm", "pairs", "completion_tokens")})
        sampled = (tmp_path / f"{name}-run" / "completions" / "step-000001.jsonl").read_text()
        assert len({json.loads(line)["tokens"] for line in sampled.splitlines()}) > 1
    assert results[0]["grad_norm"] > 0
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[0] == pytest.approx(results[2], rel=1e-5)


def test_hostile_completions_neither_hang_nor_kill_a_step(
    command: Command, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the model says, the step ends; here the sampled texts are replaced by the worst known ones."""
    hostile = [
        "\\boxed{9**9**9}",
        "\\boxed{9^{9^{9^{9}}}}",
        "\\boxed{" + "\\frac{" * 200 + "1" + "}{2}" * 200 + "}",
        "9" * 1_000_000,
        "\\boxed{" + "{" * 50_000,
        "\\boxed{" * 100_000 + "x" + "}" * 100_000,
    ]
    import amir.trainer

    original = amir.trainer.Rewards.__call__

    def call(self, examples, completions, ids):
        return original(self, examples, hostile[: len(completions)], ids)

    monkeypatch.setattr("amir.trainer.Rewards.__call__", call)
    names = ["correctness", "integer", "strict_format", "soft_format", "xml_count", "calibrated_confidence"]
    rewards = [{"name": name} for name in names]
    rewards[0]["timeout_seconds"] = 3
    path = write(Path("run.yaml"), model=str(tiny_folder), output_dir="out", rewards=rewards)
    told = command("train", path)
    assert told[0] == 0, told
    row = json.loads(Path("out/metrics.jsonl").read_text())
    assert row["success"] == 0
    assert row["reward_seconds"] < 30


def test_the_module_is_the_command(tmp_path: Path) -> None:
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "amir", "train", "quickstart", "--set", "temperature=0"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    refused((done.returncode, done.stdout, done.stderr), "temperature = 0")
    assert list(tmp_path.iterdir()) == []
