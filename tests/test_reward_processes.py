"""A user's reward function runs as it would in its author's Python: processes, signals, event loops, scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amir.config import RewardSettings
from amir.errors import ConfigError
from amir.rewards import Rewards
from amir.rewards.processes import RewardContext
from amir.tasks import Example

BY_CHILDREN = """
import asyncio, concurrent.futures, multiprocessing, os, signal, subprocess, sys, threading
from dataclasses import dataclass

@dataclass
class Verdict:
    value: float

def judge(text):
    return Verdict(float(len(text)))

def into(queue, text):
    queue.put(judge(text))

def one_by_one(context, completions):
    out = []
    for text in completions:
        queue = context.SimpleQueue()
        process = context.Process(target=into, args=(queue, text))
        process.start()
        process.join(60)
        out.append(0.0 if queue.empty() else queue.get().value)
    return out

def process(completions):
    return one_by_one(multiprocessing, completions)

def spawned(completions):
    return one_by_one(multiprocessing.get_context("spawn"), completions)

def forkserver(completions):
    return one_by_one(multiprocessing.get_context("forkserver"), completions)

def closure(completions):
    '''A local function reaches a process by fork only.'''
    queue = multiprocessing.get_context("fork").SimpleQueue()
    def work():
        for text in completions: queue.put(float(len(text)))
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start(); process.join(60)
    return [queue.get() for _ in completions]

def pool(completions):
    with multiprocessing.Pool(2) as workers:
        return [verdict.value for verdict in workers.map(judge, completions)]

def executor(completions):
    with concurrent.futures.ProcessPoolExecutor(2) as workers:
        return [verdict.value for verdict in workers.map(judge, completions)]

def spawning_executor(completions):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as workers:
        return [verdict.value for verdict in workers.map(judge, completions)]

def threads(completions):
    with concurrent.futures.ThreadPoolExecutor(2) as workers:
        return [verdict.value for verdict in workers.map(judge, completions)]

def interpreter(completions):
    code = "import sys; print(len(sys.argv[1]))"
    return [float(subprocess.check_output([sys.executable, "-c", code, text])) for text in completions]

def forked(completions):
    out = []
    for text in completions:
        process = os.fork()
        if process == 0:
            os._exit(len(text))
        out.append(float(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])))
    return out

def alarm(completions):
    class Late(Exception): pass
    def late(*_): raise Late
    signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while True: pass
    except Late:
        return [float(len(text)) for text in completions]

turns = asyncio.Semaphore(1)

async def one_loop(completions):
    async def one(text):
        async with turns:
            await asyncio.sleep(0)
            return float(len(text))
    return await asyncio.gather(*(one(text) for text in completions))
"""
FUNCTIONS = ("process", "spawned", "forkserver", "closure", "pool", "executor", "spawning_executor")
FUNCTIONS += ("threads", "interpreter", "forked", "alarm", "one_loop")
EXAMPLES = [Example("q", "a")] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("author")
    (path / "child_rewards.py").write_text(BY_CHILDREN)
    return path


@pytest.mark.parametrize(("place", "names"), [("file", FUNCTIONS), ("module", FUNCTIONS[:3])])
def test_functions_that_start_processes_give_what_they_give_in_plain_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, names: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    where = str(folder / "child_rewards.py") if place == "file" else "child_rewards"
    with Rewards([RewardSettings(function=f"{where}:{name}") for name in names]) as rewards:
        for completions in (["one", "seven"], ["", "x"]):
            scores = rewards(EXAMPLES, completions, [[1], [1]])
            expected = [float(len(text)) for text in completions]
            assert dict(zip(names, scores.values, strict=True)) == dict.fromkeys(names, expected)
            assert scores.notes == []


def test_a_file_whose_name_another_module_has_keeps_both(tmp_path: Path) -> None:
    (tmp_path / "math.py").write_text(
        "import math, multiprocessing\n"
        "def into(queue): queue.put(math.sqrt(1))\n"
        "def reward(completions):\n"
        "    queue = multiprocessing.get_context('fork').SimpleQueue()\n"
        "    process = multiprocessing.get_context('fork').Process(target=into, args=(queue,))\n"
        "    process.start(); process.join(60)\n"
        "    return [float(queue.get())] * len(completions)\n"
    )
    with Rewards([RewardSettings(function=f"{tmp_path / 'math.py'}:reward")]) as rewards:
        assert rewards(EXAMPLES, ["", ""], [[1], [1]]).values == [[1.0, 1.0]]


SCRIPT = """
import sys
print("runs as", __name__)
from amir.config import RewardSettings
from amir.rewards import Rewards
from amir.tasks import Example
with Rewards([RewardSettings(function="child_rewards.py:spawned"), RewardSettings(name="correctness")]) as rewards:
    print(rewards([Example("q", "x^2-1")] * 2, ["\\\\boxed{(x-1)(x+1)}", "\\\\boxed{x}"], [[1], [1]]).values)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("how", ["script", "module"])
def test_a_script_that_computes_rewards_needs_no_guard(folder: Path, how: str) -> None:
    """The script runs once, and the functions' processes and computer algebra's serve it."""
    (folder / "script.py").write_text(SCRIPT)
    done = run(folder, *{"script": ["script.py"], "module": ["-m", "script"]}[how])
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["runs as __main__", "[[18.0, 9.0], [1.0, 0.0]]"]


def test_a_script_that_is_its_own_rewards_file_is_refused_and_told_of_the_guard(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from amir.config import RewardSettings\n"
        "from amir.rewards import Rewards\n"
        "def reward(completions): return [1.0] * len(completions)\n"
        "Rewards([RewardSettings(function='own.py:reward')])\n"
    )
    done = run(tmp_path, "own.py")
    assert done.returncode == 1
    assert "ConfigError: rewards: function 'own.py:reward': importing own.py raised ConfigError" in done.stderr
    assert "put what starts the run under `if __name__ == '__main__':`" in done.stderr


def test_the_main_module_has_its_name_again_after_a_start() -> None:
    main = sys.modules["__main__"]
    before = main.__spec__, getattr(main, "__file__", None)
    process = RewardContext().Process(target=print)
    process.start()
    assert (main.__spec__, getattr(main, "__file__", None)) == before
    process.join(60)
    assert process.exitcode == 0
    with pytest.raises(ConfigError, match="no such file"):
        Rewards([RewardSettings(function="nowhere.py:f")])


def test_a_functions_process_loads_what_the_function_needs_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "loaded.py").write_text(
        "import sys\n"
        "def reward(completions):\n"
        "    return [float(name in sys.modules) for name in ('torch', 'pydantic', 'transformers', 'amir')]\n"
    )
    with Rewards([RewardSettings(function=f"{tmp_path / 'loaded.py'}:reward")]) as rewards:
        assert rewards(EXAMPLES * 2, [""] * 4, [[1]] * 4).values == [[0.0, 0.0, 0.0, 1.0]]


def test_a_signal_ends_forked_children_as_in_plain_python(tmp_path: Path) -> None:
    """With another handler, `multiprocessing.Pool` waited for its workers forever in one call of fifty."""
    (tmp_path / "signals.py").write_text(
        "import multiprocessing, signal, time\n"
        "def reward(completions):\n"
        "    process = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "    process.start(); process.terminate(); process.join()\n"
        "    return [float(-process.exitcode), float(signal.SIGTERM)]\n"
    )
    with Rewards([RewardSettings(function=f"{tmp_path / 'signals.py'}:reward")]) as rewards:
        assert rewards(EXAMPLES, ["", ""], [[1], [1]]).values == [[15.0, 15.0]]
