"""`--check`, what every run refuses before it loads weights, evaluating only, and what the output shows."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

from amir.config_reader import config_yaml
from amir.errors import ConfigError
from amir.run import display
from tiny import Command, Grader, model, run_config, tokenizer
from vllm_like import BASE, VllmLike

FIELDS = yaml.safe_load(config_yaml(run_config(max_steps=2, output_dir="run")))


@pytest.fixture
def amir_train(command: Command, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `amir train` on the tiny model, with changed settings; gives exit code, stdout and stderr."""
    model().save_pretrained("tiny")
    tokenizer().save_pretrained("tiny")
    capsys.readouterr()

    def run(*options: str, **changes: object) -> tuple[int, str, str]:
        Path("run.yaml").write_text(yaml.safe_dump(FIELDS | {"model": "./tiny"} | changes))
        return command("train", "run.yaml", *options)

    return run


def test_a_check_needs_no_weights_and_writes_nothing(amir_train) -> None:
    Path("tiny/model.safetensors").unlink()
    Path("mine.py").write_text("def length(completions):\n    return [float(len(text)) for text in completions]\n")
    code, out, err = amir_train("--check", rewards=["correctness", "mine.py:length"])
    assert (code, err) == (0, "")
    assert out.startswith(
        "run directory: run\ndata: 71 training examples, 29 held out\nmodel: LlamaForCausalLM, 101 tok"
    )
    assert "\ntraining prompts: 71, " in out
    assert "\nheld-out prompts: 2, " in out
    assert "\nfirst prompt, " in out
    assert "\nsteps: 2; one pass over the training prompts takes 24\n" in out
    assert "to the first example: correctness 1, length " in out
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_prompt_length": 3}, "no training prompt is left of 71 examples"),
        ({"max_completion_length": 999}, "the model has 256 positions"),
        ({"lora": {"target_modules": ["nonsense"]}}, "lora.target_modules = ['nonsense']"),
        ({"chat_template": "{{ broken"}, "chat_template"),
        ({"lora": {"adapter": "./none"}}, "lora.adapter = './none': expected a folder with a LoRA adapter"),
        ({"eval_prompts": 1, "task": {"name": "gsm8k", "path": "rows.jsonl"}}, "no held-out examples"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("options", [["--check"], []], ids=["check", "run"])
def test_what_needs_no_weights_is_refused_without_them(amir_train, options, changes, words) -> None:
    Path("tiny/model.safetensors").unlink()
    Path("rows.jsonl").write_text(json.dumps({"question": "1+1", "answer": "#### 2"}) + "\n")
    code, _, err = amir_train(*options, **changes)
    assert code == 2, err
    assert words in err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('gold')", "rewards: reward score (mine.py:score) raised KeyError: 'gold'"),
        ("return [1.0, 2.0]", "returned 2 rewards for 1 completions"),
        ("return None", "returned a NoneType; expected a list of 1 numbers"),
    ],
)
def test_a_check_calls_each_reward_once(amir_train, body: str, words: str) -> None:
    Path("mine.py").write_text(f"def score(completions):\n    {body}\n")
    code, _, err = amir_train("--check", rewards=["mine.py:score"])
    assert code == 2
    assert words in err
    assert "Traceback" not in err


class Strict(Grader):
    """Finds no answer right."""

    def __call__(self, completions: list[str], golds: list[str]) -> list[float]:
        return [0.0] * len(completions)


def test_an_answer_that_does_not_equal_itself_is_reported(amir_train, monkeypatch) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", Strict)
    code, out, _ = amir_train("--check")
    assert code == 0
    assert "warning: correctness gives 0 to the answer '0' of the first example itself" in out


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("task={name: dataset, path: none.jsonl, prompt: '{q}'}", "task.path = 'none.jsonl': no such file"),
        ("rewards=[none.py:score]", "none.py: no such file"),
        ("rewards=[{name: integer, arguments: {x: 1}}]", "takes no argument 'x'"),
    ],
)
def test_data_and_rewards_are_tried_before_torch_is_imported(tmp_path: Path, setting: str, words: str) -> None:
    arguments = ["amir", "train", "quickstart", "--set", "eval_prompts=0", "--set", setting]
    script = f"import sys; sys.argv = {arguments}\nfrom amir.__main__ import main\n"
    script += "try: main()\nexcept SystemExit as e: print('exit', e.code, 'torch' in sys.modules)"
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("exit 2 False\n")
    assert words in done.stderr


@pytest.mark.parametrize("options", [["--check"], []], ids=["check", "run"])
def test_an_overlong_prompt_is_refused_without_weights(amir_train, options: list[str]) -> None:
    Path("tiny/model.safetensors").unlink()
    rows = [{"q": "1+1", "answer": 2}, {"q": "1+" * 40 + "1", "answer": 41}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "dataset", "path": "rows.jsonl", "prompt": "{q}"}
    code, _, err = amir_train(*options, task=task, eval_prompts=0, overlong_prompts="refuse", max_prompt_length=64)
    assert code == 2
    assert "max_prompt_length = 64: rows.jsonl, line 2 has 82 tokens and overlong_prompts = 'refuse'" in err


@pytest.mark.parametrize(("serves", "line"), [(True, "server: {} answers"), (False, "warning: sampler.url = '{}'")])
def test_a_check_tries_the_server_once(amir_train, serves: bool, line: str) -> None:
    server = VllmLike()
    if not serves:
        server.close()
    settings = {"name": "server", "url": server.url, "model": BASE, "wait_seconds": 600}
    code, out, err = amir_train("--check", sampler=settings)
    if serves:
        server.close()
    assert (code, err) == (0, "")
    assert f"\n{line.format(server.url)}" in out


def test_a_refused_run_shows_the_warnings_before_it(amir_train, monkeypatch) -> None:
    def refuse(*arguments: object) -> None:
        warnings.warn("the file is odd", UserWarning, stacklevel=1)
        raise ConfigError("the file is refused")

    monkeypatch.setattr("amir.policy.load.load_policy", refuse)
    code, _, err = amir_train()
    assert code == 2
    assert err == "UserWarning: the file is odd\namir: the file is refused\n"


def test_a_run_without_steps_evaluates_and_saves_no_weights(amir_train) -> None:
    code, out, err = amir_train(max_steps=0, eval_prompts=3, eval_samples=2)
    assert code == 0, err
    (row,) = [json.loads(line) for line in Path("run/evaluations.jsonl").read_text().splitlines()]
    assert (row["step"], row["samples"]) == (0, 6)
    assert Path("run/completions/eval-000000.jsonl").is_file()
    assert not [name for name in ("adapter", "model", "checkpoints", "curves.png") if (Path("run") / name).exists()]
    assert "evaluation: run/evaluations.jsonl" in out
    assert "nothing to do" not in out
    code, _, err = amir_train("--resume", max_steps=1, eval_prompts=3, eval_samples=2)
    assert code == 0, err
    assert Path("run/adapter").is_dir()


def test_lines_without_a_terminal_have_the_number_of_steps_and_the_time_left(amir_train) -> None:
    code, out, err = amir_train(eval_prompts=0)
    assert code == 0, err
    first, last = [line for line in out.splitlines() if line.startswith("step ")]
    assert first.startswith("step    1/2 ")
    assert first.endswith(" left")
    assert last.startswith("step    2/2 ")


def test_a_run_without_a_gradient_is_not_called_trained(amir_train, monkeypatch) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", Strict)
    code, out, err = amir_train(eval_prompts=0)
    assert code == 0, err
    assert "warning: the gradient was 0 in every step, so no step trained the weights" in out
    assert "\nuntrained adapter: run/adapter" in out


def test_curves_show_what_the_run_measured(tmp_path: Path, monkeypatch) -> None:
    steps = [{"step": step, "reward": 0.1 * step, "success": None, "kl": 0.1, "entropy": 1.0} for step in (1, 2)]
    steps = [row | {"completion_tokens": 9.0, "truncated_share": 0.5, "pairs": 3, "grad_norm": 1.0} for row in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    (tmp_path / "evaluations.jsonl").write_text(json.dumps({"step": 0, "reward": 0.1, "success": None}) + "\n")
    drawn = {}
    draw = display._draw_panel

    def kept(axis, name, rows, evaluations):
        draw(axis, name, rows, evaluations)
        drawn[name] = len(axis.lines)

    monkeypatch.setattr(display, "_draw_panel", kept)
    assert display.draw_curves(tmp_path).stat().st_size > 0
    names = ["reward", "completion_tokens", "truncated_share", "kl", "entropy", "grad_norm", "pairs"]
    assert drawn == {name: 2 if name == "reward" else 1 for name in names}
