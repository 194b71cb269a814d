"""Runs of the tiny model in forked processes that are killed or run out of disk, then resumed; prints what came of it.

A script of its own: it loads everything once, then forks a process for each attempt, so that an attempt takes a second.
`python killed_runs.py FOLDER DEATH...` with deaths like `random,SEED,KILLS`, `point,MODULE:FUNCTION,CALL` and
`full,BYTES`; prints a line of JSON for each.
"""

import contextlib
import hashlib
import importlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

import amir.__main__ as command
import amir.policy.load
import amir.rewards.runner
import amir.run.display
import amir.trainer
from amir.config_reader import config_yaml
from ranked_run import ParityGrader
from tiny import model, run_config, tokenizer

STEPS = 8


def main() -> None:
    """The whole run, in FOLDER/whole, then for each death a run that dies of it and is resumed, in FOLDER/cut."""
    folder, deaths = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    amir.rewards.runner.Correctness = ParityGrader
    amir.run.display.draw_curves = lambda run: run / "curves.png"  # half of the time of so small a run
    write_run(folder, "whole")
    process = start(folder, "whole", first=say_when_training)
    await_training()
    began = time.time()
    assert finish(process) == 0, (folder / "whole.log").read_text()
    seconds = (folder / "whole" / "adapter").stat().st_mtime - began
    for death in deaths:
        way, *details = death.split(",")
        write_run(folder, "cut")
        (folder / "cut.log").unlink(missing_ok=True)
        died_after = {"random": at_random_moments, "point": at_a_point, "full": on_a_full_disk}[way](
            folder, seconds, *details
        )
        same = end(folder / "cut") == end(folder / "whole")
        print(json.dumps({"death": death, "died_after": died_after, "same": same}), flush=True)
        (folder / "cut").rename(folder / f"cut-{death.replace(':', '-')}")


def write_run(folder: Path, name: str) -> None:
    """The model's folder and FOLDER/NAME.yaml, whose run goes to FOLDER/NAME."""
    if not (folder / "model").exists():
        model().save_pretrained(folder / "model")
        tokenizer().save_pretrained(folder / "model")
    config = run_config(
        model=str(folder / "model"), output_dir=str(folder / name), max_steps=STEPS, micro_batch_tokens=100
    )
    (folder / f"{name}.yaml").write_text(config_yaml(config))


def start(folder: Path, name: str, *options: str, first: Callable[[], None] = lambda: None) -> int:
    """Forks `amir train`, its output to FOLDER/NAME.log; `first` runs in the new process. Returns the process's id."""
    process = os.fork()
    if process:
        return process
    with (folder / f"{name}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    code = 70
    with contextlib.suppress(SystemExit):
        first()
        sys.argv = ["amir", "train", str(folder / f"{name}.yaml"), *options]
        try:
            command.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
            raise
        finally:
            sys.stdout.flush()
            os._exit(code)
    os._exit(code)


TRAINING = os.pipe()


def say_when_training() -> None:
    """Has this process write a byte to the pipe when its loop begins."""
    train = amir.trainer.Trainer.train

    def announced(trainer: amir.trainer.Trainer) -> None:
        os.write(TRAINING[1], b".")
        train(trainer)

    amir.trainer.Trainer.train = announced  # type: ignore[method-assign]


def await_training() -> None:
    """Returns when a process that was told to say so begins its loop."""
    ready, _, _ = select.select([TRAINING[0]], [], [], 60)
    assert ready, "the run did not begin"
    os.read(TRAINING[0], 1)


def finish(process: int) -> int:
    """The exit code of a process, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def resumption(folder: Path) -> list[str]:
    """`--resume` where there is something to resume."""
    return ["--resume"] if (folder / "cut" / "config.yaml").exists() else []


def at_random_moments(folder: Path, seconds: float, seed: str, kills: str) -> list[int]:
    """Kills runs at moments within the time they take, each up to twice, then lets them finish; KILLS in all."""
    moments = random.Random(int(seed))
    deaths: list[int] = []
    while True:
        kept: set[str] = set()
        for _ in range(min(2, int(kills) - len(deaths))):
            process = start(folder, "cut", *resumption(folder), first=say_when_training)
            await_training()
            time.sleep(moments.uniform(0, seconds))
            os.kill(process, signal.SIGKILL)
            if finish(process) == -signal.SIGKILL:
                deaths.append(finished_steps(folder / "cut"))
            kept |= sampled(folder / "cut")
        assert finish(start(folder, "cut", *resumption(folder))) == 0, (folder / "cut.log").read_text()
        refuse_loss(folder / "cut", kept)
        if len(deaths) == int(kills):
            return deaths
        assert end(folder / "cut") == end(folder / "whole"), f"after deaths {deaths}"
        (folder / "cut").rename(folder / f"done-{len(deaths)}-{len(list(folder.iterdir()))}")


def at_a_point(folder: Path, seconds: float, point: str, call: str) -> list[int]:
    """Kills the run at the given call of a function, before the call does anything; then lets it finish."""
    place, name = point.split(":")
    calls = 0

    def wrap() -> None:
        owner = importlib.import_module(place)
        original = getattr(owner, name)

        def counted(*arguments: object, **keywords: object) -> object:
            nonlocal calls
            calls += 1
            if calls == int(call):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        setattr(owner, name, counted)

    code = finish(start(folder, "cut", first=wrap))
    assert code == -signal.SIGKILL, f"{point} was called fewer than {call} times (exit {code})"
    deaths, kept = [finished_steps(folder / "cut")], sampled(folder / "cut")
    assert finish(start(folder, "cut", *resumption(folder))) == 0, (folder / "cut.log").read_text()
    refuse_loss(folder / "cut", kept)
    return deaths


def on_a_full_disk(folder: Path, seconds: float, size: str) -> list[int]:
    """No file may grow beyond `size` bytes; afterwards the run goes on without that limit."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))

    code = finish(start(folder, "cut", first=limit))
    said = (folder / "cut.log").read_text()
    assert code == 1, f"exit {code}: {said}"
    assert "Traceback" not in said, said
    begun = (folder / "cut" / "config.yaml").exists()
    assert ("add --resume to the same command" if begun else "the same command starts it") in said, said
    deaths, kept = [finished_steps(folder / "cut")], sampled(folder / "cut")
    assert finish(start(folder, "cut", *resumption(folder))) == 0, (folder / "cut.log").read_text()
    refuse_loss(folder / "cut", kept)
    return deaths


def finished_steps(run: Path) -> int:
    """Steps whose metrics are on disk."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def sampled(run: Path) -> set[str]:
    """What the run's folder holds of completions, by content."""
    return {file.read_text() for file in run.rglob("*.jsonl") if file.stem.startswith(("step-", "eval-"))}


def refuse_loss(run: Path, kept: set[str]) -> None:
    """Raises where completions that were on disk once are nowhere in the run's folder now."""
    lost = kept - sampled(run)
    if lost:
        raise AssertionError(f"{len(lost)} files of completions were lost")


def end(run: Path) -> dict[str, object]:
    """What a run left: its metrics without times, its evaluations, and digests of adapter and last optimizer state."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("_seconds", "tokens_per_second", "peak_memory_mb")
    last = run / "checkpoints" / f"step-{STEPS}" / "optimizer.safetensors"
    return {
        "metrics": [{k: v for k, v in row.items() if not k.endswith(timed)} for row in metrics],
        "evaluations": (run / "evaluations.jsonl").read_text(),
        "adapter": digest(run / "adapter" / "adapter_model.safetensors"),
        "optimizer": digest(last),
        "config": sorted(yaml.safe_load((run / "config.yaml").read_text())),
    }


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
