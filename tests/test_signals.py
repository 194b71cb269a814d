"""Runs that a signal stops: the last finished step is saved, the resumed run has the undisturbed one's bits."""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from amir.config import RunConfig
from amir.config_reader import config_yaml
from amir.errors import RunStopped
from amir.run.directory import RunDirectory
from amir.run.signals import StopSignals
from amir.tasks import TASKS
from amir.trainer import Trainer
from test_trainer import Lines, ParityGrader, rows, untimed
from tiny import model, policy, run_config, tokenizer

HERE = Path(__file__).parent
AFTERWARDS = ". The run's records are kept; add --resume to the same command to continue from the latest checkpoint"


@pytest.fixture(autouse=True)
def _parity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("amir.rewards.runner.Correctness", ParityGrader)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in handlers:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def trainer(path: Path, config: RunConfig, *, resume: bool = False) -> Trainer:
    directory = RunDirectory(path, config, resume=resume)
    made = Trainer(config, policy(config, moved=False), TASKS["arithmetic"](config.task), directory, Lines())
    if resume:
        made.resume()
    return made


def signalled(owner: object, name: str, call: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends this process a signal when a function is called for the `call`-th time, before it does anything."""
    original, calls = getattr(owner, name), []

    def counted(*arguments: object, **keywords: object) -> object:
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, counted)


MOMENTS = {
    # function, call, steps that are finished
    "while the first evaluation samples": ("amir.rollout.generate.sample", 1, 0),
    "while step 1 samples": ("amir.rollout.generate.sample", 2, 0),
    "while step 3 samples": ("amir.rollout.generate.sample", 4, 2),
    "before the gradients of step 4": ("amir.trainer.backward", 4, 3),
    "in the update of step 3": ("amir.trainer.apply_update", 3, 3),
    "while the metrics of step 3 are written": ("amir.trainer.step_metrics", 3, 3),
    "while the last evaluation samples": ("amir.rollout.generate.sample", 6, 4),
    "while step 2 is saved": ("amir.trainer.save_checkpoint", 1, 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_loses_no_finished_step_and_changes_no_bit(tmp_path, monkeypatch, moment: str) -> None:
    place, call, finished = MOMENTS[moment]
    config = run_config(max_steps=4, save_steps=2)
    number = {"amir.trainer.backward": signal.SIGINT, "amir.trainer.apply_update": signal.SIGHUP}.get(
        place, signal.SIGTERM
    )
    whole = trainer(tmp_path / "whole", config)
    whole.train()
    with monkeypatch.context() as patched:
        module, _, name = place.rpartition(".")
        signalled(importlib.import_module(module), name, call, number, patched)
        cut = trainer(tmp_path / "cut", config)
        words = f"after step {finished}, which is saved" if finished else "before step 1 was done"
        with cut.directory, pytest.raises(RunStopped, match=f"^stopped by {number.name} {words}$"):
            cut.train()
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    resumed = trainer(tmp_path / "cut", config, resume=True)
    assert resumed.finished_steps == finished
    resumed.train()
    resumed.directory.close()
    for left, right in zip(whole.named.values(), resumed.named.values(), strict=True):
        assert torch.equal(left, right)
    assert untimed(rows(tmp_path / "whole" / "metrics.jsonl")) == untimed(rows(tmp_path / "cut" / "metrics.jsonl"))
    assert rows(tmp_path / "whole" / "evaluations.jsonl") == rows(tmp_path / "cut" / "evaluations.jsonl")


def test_several_ranks_stop_together_and_a_signal_that_torchrun_repeats_is_one() -> None:
    class TwoRanks:
        size, first = 2, True

        def gather(self, value: object) -> list[object]:
            return [value, self.other]

    ranks = TwoRanks()
    ranks.other = None
    with StopSignals(ranks) as signals:
        signals.allow()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM"
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            signals.allow()
    with StopSignals(ranks) as signals:
        signals.allow()
        ranks.other = "SIGINT"
        with pytest.raises(KeyboardInterrupt, match="SIGINT"):
            signals.allow()
        os.kill(os.getpid(), signal.SIGTERM)  # the first one of this rank


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as signals:
        signals.allow()
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def begun(folder: Path, *launch: str, script: str = "", **changes: object) -> subprocess.Popen[str]:
    """The script of tests/ranked_run.py, started by `launch`, as in `started`; `script` runs before it."""
    (folder / "started.py").write_text(
        script + "import runpy, sys\nrunpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    return started(folder, *launch, str(folder / "started.py"), str(HERE / "ranked_run.py"), **changes)


def started(folder: Path, *command: str, **changes: object) -> subprocess.Popen[str]:
    """Python with `command` and a run of thousands of short steps, once its first steps are recorded in FOLDER/run."""
    if not (folder / "tiny").exists():
        model().save_pretrained(folder / "tiny")
        tokenizer().save_pretrained(folder / "tiny")
    settings = {"model": str(folder / "tiny"), "output_dir": str(folder / "run"), "max_steps": 5000}
    settings |= {"save_steps": 5000, "eval_prompts": 0, "prompts_per_step": 2}
    (folder / "run.yaml").write_text(config_yaml(run_config(**(settings | changes))))
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in [*sys.path, HERE] if entry)
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *command, str(folder / "run.yaml")],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: steps(folder) >= 2, process)
    return process


def steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_signal_ends_the_command_with_a_word_and_a_checkpoint(tmp_path) -> None:
    process, number = begun(tmp_path), signal.SIGTERM
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    done = steps(tmp_path)
    assert process.returncode == 1
    assert said.splitlines() == [
        f"{number.name}: the run saves a checkpoint and stops; a second signal stops it at once",
        f"amir: stopped by {number.name} after step {done}, which is saved{AFTERWARDS}",
    ]
    state = json.loads((tmp_path / "run" / "checkpoints" / f"step-{done}" / "state.json").read_text())
    assert state["step"] == done
    assert f"stopped by {number.name} after step {done}" in (tmp_path / "run" / "log.txt").read_text()


def test_a_second_signal_ends_the_command_at_once(tmp_path) -> None:
    slow = "import time, amir.trainer\namir.trainer.save_checkpoint = lambda *_: time.sleep(300)\n"
    process = begun(tmp_path, script=slow)
    process.send_signal(signal.SIGINT)
    ready, _, _ = select.select([process.stderr], [], [], 60)
    assert ready
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.long
@pytest.mark.parametrize("whole", [False, True], ids=["adapter", "whole model"])
def test_torchrun_that_is_told_to_end_leaves_the_last_step_of_its_ranks(tmp_path, whole: bool) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = begun(tmp_path, *launch, **({"lora": None} if whole else {}))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    done = steps(tmp_path)
    assert process.returncode != 0
    assert said.count("amir: stopped by SIGTERM") == said.count("amir: ") == 1, said
    assert f"amir: stopped by SIGTERM after step {done}, which is saved" in said, said
    assert (tmp_path / "run" / "checkpoints" / f"step-{done}" / "state.json").exists()


def test_processes_that_are_told_to_end_save_their_last_step_and_say_so_once(tmp_path) -> None:
    process = started(tmp_path, "-m", "amir", "train", "--processes", "2")
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    done = steps(tmp_path)
    assert process.returncode == 1
    assert said.splitlines() == [
        "SIGTERM: the run saves a checkpoint and stops; a second signal stops it at once",
        f"amir: stopped by SIGTERM after step {done}, which is saved{AFTERWARDS}",
    ]
    assert (tmp_path / "run" / "checkpoints" / f"step-{done}" / "state.json").exists()
