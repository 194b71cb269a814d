"""A run that is killed at any moment, or runs out of disk, loses nothing and ends with the undisturbed run's bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")

KILLS = 20
DEATHS = [
    f"random,0,{KILLS}",
    "point,amir.update.gradient:_accumulate,7",  # between two micro-batches of a step
    "point,amir.policy.checkpoint:_sync,2",  # a checkpoint's files half on disk
    "point,amir.trainer:save_checkpoint,2",
    "point,amir.trainer:make_batch,4",  # completions on disk, no gradient yet
    "full,30000",  # the optimizer's state does not fit
    "full,1500",  # the completions do not
    "full,700",  # the configuration does not
]


def outcomes_of(folder: Path, deaths: list[str]) -> dict[str, dict]:
    """What tests/killed_runs.py says of each death."""
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    command = [sys.executable, str(Path(__file__).with_name("killed_runs.py")), str(folder), *deaths]
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["death"]: line for line in lines}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return outcomes_of(tmp_path_factory.mktemp("runs"), DEATHS)


@pytest.mark.parametrize("death", DEATHS)
def test_the_resumed_run_ends_as_the_undisturbed_one(outcomes, death: str) -> None:
    assert outcomes[death]["same"]


def test_the_kills_fell_all_over_the_run(outcomes) -> None:
    died_after = outcomes[DEATHS[0]]["died_after"]
    assert len(died_after) == KILLS
    assert len(set(died_after)) >= 5


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_hundred_kills_more_lose_nothing(tmp_path: Path, seed: int) -> None:
    """Each seed as many as `make test` has."""
    death = f"random,{seed},{KILLS}"
    outcome = outcomes_of(tmp_path, [death])[death]
    assert outcome["same"]
    assert len(outcome["died_after"]) == KILLS
