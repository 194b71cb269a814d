"""What a run is made of beyond its settings, what it leaves of its origin, and which run and checkpoints are found."""

import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from amir.config import RunConfig
from amir.config_reader import config_yaml, load_config, resolved
from amir.errors import ConfigError
from amir.policy.checkpoint import keep_checkpoints
from amir.policy.load import wrap_policy
from amir.run.contents import contents
from amir.run.directory import RunDirectory, check_run_directory, choose_output_dir
from amir.run.machine import commit
from amir.tasks import Example, load_task
from amir.tasks.prompts import Prompt
from amir.trainer import Trainer
from amir.update.gradient import make_objective
from test_rundir import amir_train, written_run
from test_trainer import Lines, ParityGrader, rows
from tiny import model, policy, run_config, tokenizer


@pytest.fixture(autouse=True)
def _parity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", ParityGrader)


def on_rows(folder: Path, **changes: object) -> RunConfig:
    """A run on FOLDER/rows.jsonl, with a reward of FOLDER/mine.py."""
    task = {"name": "dataset", "path": str(folder / "rows.jsonl"), "prompt": "{q}", "held_out_path": None}
    if (folder / "held.jsonl").exists():
        task["held_out_path"] = str(folder / "held.jsonl")
    settings = {"task": task, "max_steps": 2, "save_steps": 1, "eval_prompts": 0, "prompts_per_step": 2}
    return run_config(**(settings | changes))


def write_rows(path: Path, *questions: str) -> None:
    path.write_text("".join(json.dumps({"q": q, "answer": "1", "level": 2}) + "\n" for q in questions))


def trainer(folder: Path, config: RunConfig, *, resume: bool = False, change: Callable | None = None) -> Trainer:
    """The run in FOLDER/run; `change` is done to its model and tokenizer."""
    base, words = model(), tokenizer()
    if change is not None:
        change(base, words)
    directory = RunDirectory(folder / "run", config, resume=resume)
    made = Trainer(config, wrap_policy(base, words, config), load_task(config.task), directory, Lines())
    if resume:
        try:
            made.resume()
        finally:
            directory.close()
    return made


def finished(folder: Path, config: RunConfig) -> None:
    made = trainer(folder, config)
    made.train()
    made.directory.close()


def scale_embeddings(base: torch.nn.Module, words: object) -> None:
    base.get_input_embeddings().weight.data[5, 3] += 1e-3


def swap_neurons(base: torch.nn.Module, words: object) -> None:
    weight = base.model.layers[1].mlp.up_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]]


def stretch_positions(base: torch.nn.Module, words: object) -> None:
    base.config.rope_parameters["rope_theta"] = 5e5


def end_sooner(base: torch.nn.Module, words: object) -> None:
    base.generation_config.eos_token_id = [1, 40]


def other_template(base: torch.nn.Module, words: object) -> None:
    words.chat_template = "Q: " + words.chat_template


def other_tokens(base: torch.nn.Module, words: object) -> None:
    words.add_tokens(["1+1"])


REPLACED = {
    "a weight": (scale_embeddings, r"^model = 'tiny': its weights are not those that the run began with; restore"),
    "the order of weights": (swap_neurons, "^model = 'tiny': its weights are not those"),
    "its positions": (
        stretch_positions,
        r"^model = 'tiny': its config\.json .* \(.*rope_parameters.*\); restore the model",
    ),
    "its end of sequence": (end_sooner, r"^model = 'tiny': .*\(eos_ids\)"),
    "the tokenizer's template": (
        other_template,
        "^chat_template = None: the tokenizer's chat template is another one;",
    ),
    "its tokens": (other_tokens, "^chat_template = None: the tokenizer or its chat template gives other tokens for"),
}


@pytest.mark.parametrize("what", REPLACED)
def test_a_model_that_was_replaced_is_refused_by_name(tmp_path, what: str) -> None:
    write_rows(tmp_path / "rows.jsonl", "1+1", "2+1", "3+1")
    finished(tmp_path, on_rows(tmp_path))
    change, words = REPLACED[what]
    with pytest.raises(ConfigError, match=words) as refused:
        trainer(tmp_path, on_rows(tmp_path, max_steps=3), resume=True, change=change)
    assert str(refused.value).endswith(", or start a new run without --resume")


def test_a_reference_that_was_replaced_is_refused_with_its_setting(tmp_path) -> None:
    write_rows(tmp_path / "rows.jsonl", "1+1", "2+1", "3+1")
    finished(tmp_path, on_rows(tmp_path))
    (tmp_path / "run").rename(tmp_path / "before")
    adapter = tmp_path / "before" / "adapter"
    config = {"lora": {"r": 4, "alpha": 8, "adapter": str(adapter)}, "beta": 0.1}
    finished(tmp_path, on_rows(tmp_path, **config))
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(
        ConfigError, match=r"lora\.adapter = '.*adapter': the weights of the model or of the adapter are"
    ):
        trainer(tmp_path, on_rows(tmp_path, max_steps=3, **config), resume=True)


ROWS = {
    "other rows": ("9+9", "8+8", "7+7"),
    "one row less": ("1+1", "2+1"),
    "another order": ("2+1", "1+1", "3+1"),
    "one letter": ("1+1", "2+1", "3-1"),
}


@pytest.mark.parametrize("way", [*ROWS, "an answer", "a column that rewards read"])
def test_rows_that_were_replaced_are_refused_by_name(tmp_path, way: str) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, "1+1", "2+1", "3+1")
    finished(tmp_path, on_rows(tmp_path))
    if way in ROWS:
        write_rows(file, *ROWS[way])
    elif way == "an answer":
        file.write_text(file.read_text().replace('"answer": "1"', '"answer": "7"', 1))
    else:
        file.write_text(file.read_text().replace('"level": 2', '"level": 3', 1))
    now = len(file.read_text().splitlines())
    words = rf"^task\.path = '.*rows\.jsonl': the training examples are not those .* \(3 then, {now} now, .*; restore"
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, on_rows(tmp_path, max_steps=3), resume=True)


def test_what_did_not_change_resumes_without_a_word(tmp_path) -> None:
    write_rows(tmp_path / "rows.jsonl", "1+1", "2+1", "3+1")
    finished(tmp_path, on_rows(tmp_path))
    moved = tmp_path / "elsewhere"
    (tmp_path / "run").rename(moved)
    moved.rename(tmp_path / "run")
    made = trainer(tmp_path, on_rows(tmp_path, max_steps=3), resume=True)
    assert made.display.messages == ["resumed after step 2"]


def test_a_date_in_the_chat_template_stays_that_of_the_first_day(tmp_path, monkeypatch) -> None:
    write_rows(tmp_path / "rows.jsonl", "1+1", "2+1", "3+1")
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}="

    def show_date(base: object, words: object) -> None:
        words.chat_template = template

    def on(day: datetime.datetime) -> type[datetime.datetime]:
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
                return day

        return Clock

    made = {}
    for day in (1, 2):
        monkeypatch.setattr("amir.run.directory.datetime", on(datetime.datetime(2026, 3, day, 23, 59)))
        config = on_rows(tmp_path, max_steps=day + 1)
        made[day] = trainer(tmp_path, config, resume=day > 1, change=show_date)
        made[day].train()
        made[day].directory.close()
    assert made[1].policy.tokenizer.decode(made[1].prompts[0].ids).replace(" ", "").startswith("01Mar2026")
    assert [prompt.ids for prompt in made[1].prompts] == [prompt.ids for prompt in made[2].prompts]
    template = template.replace("%Y", "%y")
    with pytest.raises(ConfigError, match="chat_template = None: the tokenizer's chat template is another one"):
        trainer(tmp_path, on_rows(tmp_path, max_steps=9), resume=True, change=show_date)


def test_harmless_changes_are_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", "1+1", "2+1", "3+1")
    write_rows(tmp_path / "held.jsonl", "5+5", "6+6")
    (tmp_path / "mine.py").write_text("def short(completions): return [float(len(c)) for c in completions]\n")
    settings = {"rewards": [{"function": "mine.py:short"}], "eval_prompts": 2}
    finished(tmp_path, on_rows(tmp_path, **settings))
    write_rows(tmp_path / "held.jsonl", "5+5", "7+7")
    with (tmp_path / "mine.py").open("a") as file:
        file.write("# mended\n")
    made = trainer(tmp_path, on_rows(tmp_path, max_steps=3, **settings), resume=True)
    notes = made.display.messages[:-1]
    assert [note for note in notes if note.startswith("the held-out prompts are not those of the earlier part")]
    assert [note for note in notes if note.startswith("rewards: mine.py has changed since the run began")]
    assert len(notes) == 2
    again = trainer(tmp_path, on_rows(tmp_path, max_steps=3, **(settings | {"eval_prompts": 1})), resume=True)
    assert not [note for note in again.display.messages if "held-out prompts" in note]


def test_every_kind_of_column_has_the_same_digest_in_every_process(tmp_path) -> None:
    class Image:
        pass

    def columns() -> dict[object, object]:
        day = datetime.date(2026, 1, 2)
        values = {"t": datetime.datetime(2026, 1, 2), "d": day, "n": Decimal("1.5"), "b": b"\0\1", "x": float("nan")}
        return values | {"tensor": torch.tensor([1, 2]), "image": Image(), "nested": [{"day": day}], (1, 2): 3}

    made = policy()
    digests = [
        contents(run_config(), made, [Prompt(Example("q", "a", columns=columns()), [3])], [])["training_examples"]
        for _ in range(2)
    ]
    assert digests[0] == digests[1]
    other = columns() | {"b": b"\0\2"}
    changed = contents(run_config(), made, [Prompt(Example("q", "a", columns=other), [3])], [])
    assert changed["training_examples"] != digests[0]


def test_a_trained_model_without_a_reference_has_no_frozen_weights(tmp_path) -> None:
    free = run_config(lora=None, ref_free=True)
    assert contents(free, policy(free), [], [])["frozen_weights"] is None
    against_reference = run_config(lora=None)
    assert contents(against_reference, policy(against_reference), [], [])["frozen_weights"] is not None


def test_a_run_without_its_record_resumes_and_a_damaged_one_is_named(tmp_path) -> None:
    write_rows(tmp_path / "rows.jsonl", "1+1", "2+1", "3+1")
    finished(tmp_path, on_rows(tmp_path))
    record = tmp_path / "run" / "run.json"
    damaged = ["{", "[]", '{"contents": 5, "processes": []}', '{"contents": {"model_config": 4}, "processes": []}']
    for text in damaged:
        record.write_text(text)
        with pytest.raises(ConfigError, match=r"run\.json: damaged .*; restore it, or remove .* to resume without it"):
            trainer(tmp_path, on_rows(tmp_path, max_steps=3), resume=True)
    record.unlink()
    trainer(tmp_path, on_rows(tmp_path, max_steps=3), resume=True)


def test_a_run_records_its_processes(tmp_path, monkeypatch) -> None:
    written_run(tmp_path)
    arguments = str(tmp_path / "run.yaml"), "--set", "seed=7"
    assert amir_train(monkeypatch, *arguments) == 0
    assert amir_train(monkeypatch, *arguments, "--set", "max_steps=4", "--resume") == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["seed"] == 7
    first, second = record["processes"]
    assert (first["after_step"], second["after_step"]) == (0, 3)
    assert first["command"] == shlex.join(sys.orig_argv)
    assert first["versions"]["torch"] == torch.__version__
    assert first["machine"]["threads"] == torch.get_num_threads()
    assert {"cpu", "cores", "memory_gib", "system"} <= set(first["machine"])
    assert datetime.datetime.fromisoformat(first["date"]).tzinfo is not None
    assert first["ranks"] == 1
    assert "commit" in first


def test_the_commit_is_read_without_a_change_to_the_repository(tmp_path, monkeypatch) -> None:
    """A refresh of git's index takes its lock, which a killed run or a full disk would leave behind."""
    monkeypatch.setattr("amir.run.machine.PACKAGE_FOLDER", tmp_path)
    (tmp_path / "__init__.py").write_text("")
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "One."]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    os.utime(tmp_path / "__init__.py", (0, 0))
    index = (tmp_path / ".git" / "index").read_bytes()
    assert re.fullmatch(r"[0-9a-f]{40,64}", commit())
    assert (tmp_path / ".git" / "index").read_bytes() == index


def test_the_configuration_of_a_run_is_resolved(tmp_path, monkeypatch) -> None:
    folder = written_run(tmp_path)
    assert amir_train(monkeypatch, str(tmp_path / "run.yaml"), "--set", "loss_type=dapo") == 0
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["dtype"], saved["device"], saved["threads"]) == ("float32", "cpu", torch.get_num_threads())
    assert (saved["epsilon"], saved["epsilon_high"]) == (0.2, 0.28)
    assert saved["output_dir"] == str(folder)
    assert saved["rewards"][0]["timeout_seconds"] == 10
    again = load_config(str(folder / "config.yaml"))
    assert resolved(again) == again
    assert amir_train(monkeypatch, str(tmp_path / "run.yaml"), "--set", "loss_type=dapo", "--resume") == 0
    assert amir_train(monkeypatch, str(folder / "config.yaml"), "--resume") == 0
    for change in ("epsilon=0.3", "dtype=bfloat16"):
        arguments = str(tmp_path / "run.yaml"), "--set", "loss_type=dapo", "--set", change, "--resume"
        assert amir_train(monkeypatch, *arguments) == 2


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "gspo", "sapo", "reinforce", "dr_grpo"])
@pytest.mark.parametrize("bounds", [{}, {"epsilon": 0.1}, {"epsilon_high": 0.4}, {"epsilon": 0.1, "epsilon_high": 0.3}])
def test_resolving_changes_no_objective(loss_type: str, bounds: dict[str, float]) -> None:
    bounds = {} if loss_type in ("sapo", "reinforce") else bounds
    config = run_config(loss_type=loss_type, **bounds)
    assert make_objective(resolved(config)) == make_objective(config)
    assert RunConfig.model_validate(yaml.safe_load(config_yaml(resolved(config)))) == resolved(config)


def started(path: Path, config: RunConfig) -> None:
    with RunDirectory(path, config) as directory:
        directory.start()


def test_resuming_without_a_folder_takes_the_last_run_of_these_settings(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("tiny", 0), ("tiny-2", 1), ("tiny-3", 0), ("tiny-4", 1)):
        started(Path("runs") / name, run_config(seed=seed))
    chosen = [choose_output_dir("tiny", run_config(seed=seed, max_steps=9), resume=True) for seed in (0, 1, 2)]
    assert chosen == [Path("runs/tiny-3"), Path("runs/tiny-4"), Path("runs/tiny-4")]
    with pytest.raises(ConfigError, match="seed = 2: the run in 'runs/tiny-4' has 1"):
        check_run_directory(chosen[2], run_config(seed=2), resume=True)
    fresh = choose_output_dir("tiny", run_config(seed=2), resume=True, if_present=True)
    assert fresh == choose_output_dir("tiny", run_config(), resume=False) == Path("runs/tiny-5")
    assert choose_output_dir("tiny", run_config(seed=1), resume=True, if_present=True) == Path("runs/tiny-4")
    assert choose_output_dir("other", run_config(), resume=True) == Path("runs/other")


def test_one_command_starts_a_run_and_continues_it(tmp_path, monkeypatch, capfd) -> None:
    folder = written_run(tmp_path)
    command = str(tmp_path / "run.yaml"), "--resume-if-present"
    assert amir_train(monkeypatch, *command) == 0
    assert "resum" not in capfd.readouterr().out
    assert amir_train(monkeypatch, *command, "--set", "max_steps=4") == 0
    shown = capfd.readouterr().out
    assert "(resuming)" in shown
    assert "resumed after step 3" in shown
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == [1, 2, 3, 4]


KEPT = [
    # limit, scores by step, kept
    (1, {}, [6]),
    (2, {}, [5, 6]),
    (9, {}, [1, 2, 3, 4, 5, 6]),
    (2, {0: 1.0, 2: 0.5, 4: 0.3}, [2, 5, 6]),
    (2, {2: 0.5, 4: 0.5, 5: 0.1}, [4, 5, 6]),
    (1, {6: 0.9, 3: 0.8}, [6]),
    (1, {7: 0.9, 3: float("-inf")}, [3, 6]),
]


@pytest.mark.parametrize(("limit", "scores", "kept"), KEPT)
def test_the_last_checkpoints_and_the_best_are_kept(tmp_path, limit: int, scores: dict, kept: list[int]) -> None:
    for step in range(1, 7):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "state.json").write_text("{}")
    for other in ("step-2-backup", "step-9", ".step-8.tmp"):
        (tmp_path / other).mkdir()
    keep_checkpoints(tmp_path, limit, scores)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*(f"step-{step}" for step in kept), "step-2-backup", "step-9"]
    )


def test_a_run_keeps_its_last_checkpoints_and_the_best(tmp_path) -> None:
    config = run_config(max_steps=6, save_steps=1, save_total_limit=2, eval_steps=1)
    finished(tmp_path, config)
    scores = {row["step"]: row["success"] for row in rows(tmp_path / "run" / "evaluations.jsonl") if row["step"]}
    left = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir())
    best = max(score for score in scores.values())
    assert left[-2:] == [5, 6]
    assert len(left) <= 3
    assert best in [scores[step] for step in left]
    assert trainer(tmp_path, run_config(max_steps=7, save_steps=1, eval_steps=1), resume=True).finished_steps == 6
