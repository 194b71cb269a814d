"""A run's folder that goes away or cannot be written, what TensorBoard reads there, what a resumed run may change."""

import errno
import importlib
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import amir.__main__ as command
from amir.config import RunConfig
from amir.config_reader import config_yaml
from amir.errors import ConfigError
from amir.run.directory import MAY_CHANGE, RunDirectory, _changes
from amir.run.display import Terminal
from amir.run.metrics import GROUPS, METRICS, tag
from amir.tasks import TASKS
from amir.trainer import Trainer
from test_trainer import ParityGrader, rows
from tiny import crash_after, model, policy, run_config, tokenizer


@pytest.fixture(autouse=True)
def _parity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", ParityGrader)


def in_terminal(path: Path, config: RunConfig, *, resume: bool = False) -> Trainer:
    """A run with the display of the command."""
    directory = RunDirectory(path, config, resume=resume)
    display = Terminal(config.max_steps, path / "tensorboard", directory.log)
    made = Trainer(config, policy(config, moved=False), TASKS["arithmetic"](config.task), directory, display)
    if resume:
        made.resume()
    return made


def written_run(tmp_path: Path) -> Path:
    """Folder of the run that `run.yaml` beside it describes."""
    model().save_pretrained(tmp_path / "tiny")
    tokenizer().save_pretrained(tmp_path / "tiny")
    config = run_config(model=str(tmp_path / "tiny"), output_dir=str(tmp_path / "run"))
    (tmp_path / "run.yaml").write_text(config_yaml(config))
    return tmp_path / "run"


def amir_train(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["amir", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


def at_call(monkeypatch: pytest.MonkeyPatch, place: str, number: int, action: Callable[[], object]) -> None:
    """Does `action` before the `number`-th call of the function at `place`, module:name."""
    owner: object = importlib.import_module(place.partition(":")[0])
    *parents, name = place.partition(":")[2].split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), []

    def counted(*arguments: object, **keywords: object) -> object:
        calls.append(name)
        if len(calls) == number:
            action()
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, counted)


MOMENTS = {
    "while it samples": ("amir.rollout.generate:sample", 4),
    "completions written, before the metrics": ("amir.trainer:make_batch", 2),
    "metrics written, before TensorBoard": ("amir.run.display:Terminal.step", 2),
    "inside a checkpoint": ("amir.policy.checkpoint:_sync", 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_folder_that_is_taken_away_ends_the_run_in_one_line(tmp_path, monkeypatch, capfd, moment: str) -> None:
    folder = written_run(tmp_path)
    capfd.readouterr()
    with monkeypatch.context() as patched:
        at_call(patched, *MOMENTS[moment], lambda: folder.rename(tmp_path / "elsewhere"))
        assert amir_train(patched, str(tmp_path / "run.yaml")) == 1
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert said.count("\n") == 1
    assert f"amir: {folder}: the run directory was deleted or moved. Move it back and add --resume" in said
    assert not folder.exists()

    (tmp_path / "elsewhere").rename(folder)
    assert amir_train(monkeypatch, str(tmp_path / "run.yaml"), "--resume") == 0
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == [1, 2, 3]


def test_tensorboard_shows_each_step_once_with_the_values_of_metrics_jsonl(tmp_path) -> None:
    config = run_config(max_steps=4, eval_prompts=0)
    cut = in_terminal(tmp_path, config)
    crash_after(cut, step=3)
    resumed = in_terminal(tmp_path, config, resume=True)
    cut.display._events.rename(cut.display._events.with_name("events.out.tfevents.1.cut"))
    resumed.train()
    resumed.directory.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("reward", "pairs", "grad_norm", "reward/correctness"):
        recorded = [(row["step"], pytest.approx(row[name])) for row in rows(tmp_path / "metrics.jsonl")]
        assert [(event.step, event.value) for event in shown.Scalars(tag(name))] == recorded
    assert "sampler/mismatch" not in shown.Tags()["scalars"]


def test_every_metric_has_a_group_in_tensorboard() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(METRICS.keys() - {"step"})
    assert (tag("kl"), tag("reward/correctness")) == ("train/kl", "rewards/correctness")


def test_tensorboard_shows_each_evaluation_once_also_after_a_start_over(tmp_path) -> None:
    config = run_config(max_steps=2, save_steps=9)
    cut = in_terminal(tmp_path, config)
    crash_after(cut, step=1)
    resumed = in_terminal(tmp_path, config, resume=True)
    cut.display._events.rename(cut.display._events.with_name("events.out.tfevents.1.cut"))
    resumed.train()
    resumed.directory.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("success", "reward", "pass@2"):
        recorded = [(row["step"], pytest.approx(row[name])) for row in rows(tmp_path / "evaluations.jsonl")]
        assert [step for step, _ in recorded] == [0, 2]
        assert [(event.step, event.value) for event in shown.Scalars(f"eval/{name}")] == recorded


def test_a_view_that_was_deleted_comes_back(tmp_path) -> None:
    made = in_terminal(tmp_path, run_config(eval_prompts=0))
    show = made.display.step

    def delete(metrics: dict[str, object]) -> None:
        show(metrics)
        if metrics["step"] == 1:
            shutil.rmtree(tmp_path / "tensorboard")

    made.display.step = delete
    made.train()
    made.directory.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("train/reward")] == [2, 3]


def test_the_time_left_is_that_of_the_latest_steps_whatever_the_first_evaluation_took(tmp_path, capsys) -> None:
    trainer = in_terminal(tmp_path, run_config(max_steps=3))
    seconds = iter([10.0, 20.0, 5.0])
    show = trainer.display.step
    trainer.display.step = lambda metrics: show(metrics | {"step_seconds": next(seconds)})
    with trainer.directory, trainer.display:
        trainer.train()
    left = [line.split("s  ")[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert left[:2] == ["0:00:20 left", "0:00:15 left"]
    assert "left" not in left[2]


def test_a_view_that_cannot_be_written_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = in_terminal(tmp_path, run_config(eval_prompts=0))
    at_call(monkeypatch, "amir.run.display:RecordWriter.write", 4, full)
    made.train()
    made.directory.close()
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    words = "cannot be written (No space left on device); the run continues without TensorBoard, and metrics.jsonl"
    for text in (capsys.readouterr().out, (tmp_path / "log.txt").read_text()):
        assert text.count(words) == 1
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("train/reward")] == [1]


FUNCTION = {"function": "mine.py:short", "timeout_seconds": 1.0}
SERVER = {"name": "server", "url": "http://one:8000", "api_key_env": "KEY"}
MAY_CHANGE_FROM_TO = {
    "max_steps": (3, 9),
    "save_steps": (2, 1),
    "save_total_limit": (None, 2),
    "eval_steps": (0, 2),
    "eval_prompts": (2, 0),
    "eval_samples": (2, 4),
    "threads": (None, 1),
    "term_gradient_steps": (0, 2),
    "micro_batch_tokens": (200, 60),
    "gradient_checkpointing": (False, True),
    "rewards": ([{"name": "integer"}, FUNCTION], [{"name": "integer"}, FUNCTION | {"timeout_seconds": 90.0}]),
    "sampler": (
        SERVER,
        SERVER | {"url": "http://two:8000", "api_key_env": None, "model": "tiny", "adapter_dir": "here"},
    ),
    "sampler (waiting)": (SERVER, SERVER | {"timeout_seconds": 1.0, "wait_seconds": 0.0, "concurrent_requests": 1}),
    "sampler (tolerance)": (SERVER, SERVER | {"tolerance": 1.0}),
    "sampler (paged)": ({"name": "paged"}, {"name": "paged", "cache_tokens": 4096, "batch_tokens": 64}),
}
STAYS = {
    "seed": (0, 1),
    "learning_rate": (1e-2, 1e-3),
    "rewards.weight": ([{"name": "integer"}, FUNCTION], [{"name": "integer"}, FUNCTION | {"weight": 2.0}]),
    "rewards.function": ([FUNCTION], [FUNCTION | {"function": "mine.py:long"}]),
    "rewards.arguments.scale": ([FUNCTION], [FUNCTION | {"arguments": {"scale": 2}}]),
    "rewards": ([FUNCTION], [FUNCTION, {"name": "integer"}]),
    "sampler.name": ({"name": "generate"}, SERVER),
    "sampler.dialect": (SERVER, SERVER | {"dialect": "transformers"}),
    "lora.r": ({"r": 4}, {"r": 8}),
    "lora": ({"r": 4}, None),
    "task.max_operand": ({"name": "arithmetic"}, {"name": "arithmetic", "max_operand": 5}),
    "temperature": (1.0, 0.9),
    "max_completion_length": (9, 10),
    "dynamic_sampling": (None, {"max_rounds": 2}),
}


def resumed_with(path: Path, name: str, values: tuple[object, object]) -> None:
    """Opens a run's folder that was made with one value of a setting, with the other one."""
    before, now = (run_config(**{name.split()[0].partition(".")[0]: value}) for value in values)
    with RunDirectory(path, before, resume=False) as directory:
        directory.start()
    RunDirectory(path, now, resume=True).close()


@pytest.mark.parametrize("name", MAY_CHANGE_FROM_TO)
def test_a_resumed_run_may_change(tmp_path, name: str) -> None:
    resumed_with(tmp_path, name, MAY_CHANGE_FROM_TO[name])


@pytest.mark.parametrize("name", STAYS)
def test_a_resumed_run_keeps(tmp_path, name: str) -> None:
    words = (
        rf"^{name} = .*: the run in .* has .*, and a resumed run must keep it; it may change .*rewards\.timeout_seconds"
    )
    with pytest.raises(ConfigError, match=words):
        resumed_with(tmp_path, name, STAYS[name])


def test_each_setting_that_may_change_was_changed_above_and_is_in_the_documents() -> None:
    tried = {"output_dir", "offload_activations"}  # a folder that moved; is for GPUs only
    for name, (before, now) in MAY_CHANGE_FROM_TO.items():
        settings = ({name.split()[0]: value} for value in (before, now))
        tried |= {key for key, _, _ in _changes(*settings)}
    assert tried == MAY_CHANGE
    document = (Path(__file__).parents[1] / "docs" / "runs.md").read_text()
    (sentence,) = [line for line in document.split("\n\n") if line.startswith("A resumed run may change")]
    documented = set(re.findall(r"`([^`]+)`", sentence)) - {"sampler", "name", "dialect"}
    assert documented == {name for name in MAY_CHANGE if not name.startswith("sampler.")}


def test_what_is_saved_shown_and_fits_into_memory_changes_no_bit_of_the_result(tmp_path) -> None:
    config = run_config(max_steps=4)
    whole = in_terminal(tmp_path / "whole", config)
    whole.train()
    crash_after(in_terminal(tmp_path / "cut", config), step=3)
    other = {"save_steps": 1, "eval_steps": 1, "eval_prompts": 3, "eval_samples": 1, "gradient_checkpointing": True}
    cut = in_terminal(tmp_path / "cut", run_config(max_steps=4, **other), resume=True)
    cut.train()
    for left, right in zip(whole.named.values(), cut.named.values(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions", "log.txt"])
def test_a_record_that_cannot_be_written_ends_the_run_with_its_name(tmp_path, monkeypatch, capfd, name: str) -> None:
    unwritable = written_run(tmp_path) / name
    capfd.readouterr()

    def replace() -> None:
        shutil.rmtree(unwritable) if unwritable.is_dir() else unwritable.unlink(missing_ok=True)
        unwritable.symlink_to("/dev/full")

    at_call(monkeypatch, "amir.run.display:Terminal.begin", 1, replace)
    assert amir_train(monkeypatch, str(tmp_path / "run.yaml")) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert name in said
    assert "add --resume to the same command to continue from the latest checkpoint" in said
