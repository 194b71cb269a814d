"""Reward functions: the shipped ones, yours in their processes, and everything such a function can do wrong."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from amir.config import NEED_ANSWERS, REWARDS, RewardSettings
from amir.errors import ConfigError, RunStopped
from amir.rewards import SHAPING, Rewards, total_reward
from amir.rewards.shaping import confidence
from amir.rewards.worker import RewardError, accepted_keywords, floats
from amir.tasks import Example
from amir.update.batch import assemble
from test_batch import tokens_of
from tiny import run_config

NAN = math.nan
FORM = "<think>\nwhy\n</think>\n<answer>\\boxed{7}</answer>"


def same(values: list[float], expected: list[float]) -> bool:
    return len(values) == len(expected) and all(
        (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b) for a, b in zip(values, expected, strict=True)
    )


def test_the_settings_know_the_shipped_rewards() -> None:
    assert set(REWARDS) == {"correctness", *SHAPING}
    assert set(REWARDS) >= NEED_ANSWERS


@pytest.mark.parametrize(
    ("text", "integer", "strict", "soft", "count"),
    [
        (FORM, 1, 1, 1, 0.1),
        (FORM + "\n", 1, 1, 1, 0.1),
        ("so " + FORM, 1, 0, 1, 0.1),
        (FORM + " 12345678", 1, 0, 1, 0.1 - 0.008),
        (FORM + "x" * 500, 1, 0, 1, 0.0),
        (FORM + FORM, 1, 0, 1, 0.0),
        ("<answer>7</answer><think>why</think>", 1, 0, 0, 0.1 - 0.018),
        ("<think>why</think>", 0, 0, 0, 0.05),
        ("\\boxed{7.5}", 0, 0, 0, 0.0),
        ("", 0, 0, 0, 0.0),
    ],
)
def test_forms(text: str, integer: float, strict: float, soft: float, count: float) -> None:
    assert SHAPING["integer"]([text]) == [integer]
    assert SHAPING["strict_format"]([text]) == [strict]
    assert SHAPING["soft_format"]([text]) == [soft]
    assert SHAPING["xml_count"]([text]) == [pytest.approx(count)]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("0.9", 0.9),
        (" 1 ", 1.0),
        ("85%", 0.85),
        ("7", 1.0),
        (".25", 0.25),
        ("-3", 0.0),
        ("+.5", 0.5),
        ("nan", 0.5),
        ("high", 0.5),
    ],
)
def test_the_calibrated_reward_is_a_brier_score_of_the_last_confidence(stated: str, expected: float) -> None:
    text = f"<confidence>0.1</confidence> no, <confidence>{stated}</confidence>"
    assert confidence(text) == pytest.approx(expected)
    right, wrong = SHAPING["calibrated_confidence"]([text, text], [1.0, 0.0])
    assert (right, wrong) == (pytest.approx(1 - (expected - 1) ** 2), pytest.approx(1 - expected**2))
    assert SHAPING["calibrated_confidence"](["none", "<confidence>0.9"], [1.0, 0.0]) == [0.75, 0.75]


def test_lengths() -> None:
    assert SHAPING["linear_length"]([5, 10, 15, 20, 99], start=10, end=20) == [0, 0, -0.5, -1, -1]
    right = SHAPING["cosine_length"]([0, 50, 100], [1.0] * 3, max_tokens=100)
    wrong = SHAPING["cosine_length"]([0, 50, 99, 100], [0.0] * 4, max_tokens=100)
    assert right == [2.0, pytest.approx(1.5), -10.0]
    assert wrong == [-10.0, pytest.approx(-5.0), pytest.approx(0, abs=0.01), -10.0]


def test_hostile_text_costs_the_forms_no_time() -> None:
    texts = ["<think>" * 200_000, "<confidence>" + "9" * 1_000_000, "9" * 1_000_000, "\\boxed{" * 100_000, "}" * 10**6]
    began = time.monotonic()
    for name, function in SHAPING.items():
        given = {"correct": [0.0] * 5} if name == "calibrated_confidence" else {}
        if not name.endswith("length"):
            assert all(math.isfinite(value) for value in function(texts, **given))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, True, None, NAN], [1.0, 1.0, NAN, NAN]),
        ((np.float32(0.5), np.int64(2), np.bool_(True), 0), [0.5, 2.0, 1.0, 0.0]),
        (np.array([0.5, NAN, 1, 2]), [0.5, NAN, 1.0, 2.0]),
        (torch.tensor([1, 0, 1, 0]), [1.0, 0.0, 1.0, 0.0]),
        ([torch.tensor(0.5), np.array(1), 0.0, -3], [0.5, 1.0, 0.0, -3.0]),
    ],
    ids=["bool, None, NaN", "numpy numbers", "array", "tensor", "0-d"],
)
def test_what_counts_as_numbers(returned: object, expected: list[float]) -> None:
    assert same(floats(returned, 4), expected)


class Odd:
    def __float__(self) -> float:
        raise ZeroDivisionError

    def __repr__(self) -> str:
        return "Odd()"


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], "1 rewards for 2 completions; expected one per completion"),
        ([1.0] * 3, "3 rewards for 2 completions; expected one per completion"),
        (0.5, "returned a float; expected a list of 2"),
        (None, "returned a NoneType; expected a list of 2"),
        ({0: 1.0, 1: 2.0}, "returned a dict; expected a list of 2"),
        ("ab", "returned a str; expected a list of 2"),
        (["1", 2], "'1' for completion 0; expected a number"),
        ([1.0, [2.0]], r"\[2.0\] for completion 1; expected a number"),
        ([1.0, math.inf], "inf for completion 1; expected a finite number"),
        ([1.0, 1e300], r"1e\+300 for completion 1; expected a finite number of at most 1e\+09"),
        ([1.0, 10**400], "1000.* for completion 1; expected a number"),
        ([1j, 0], "1j for completion 0; expected a number"),
        ([Odd(), 0], "for completion 0; expected a number"),
    ],
    ids=str,
)
def test_what_does_not(returned: object, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        floats(returned, 2)


def test_a_function_gets_what_it_names() -> None:
    offered = ["prompts", "completions", "answers", "completion_ids", "topic"]
    assert accepted_keywords(lambda completions, **rest: 0, {}, offered) == offered
    assert accepted_keywords(lambda completions, topic=None: 0, {}, offered) == ["completions", "topic"]
    assert accepted_keywords(lambda completions, *, scale: 0, {"scale": 2}, offered) == ["completions"]
    for function, arguments, words in [
        (
            lambda completions, trainer_state: 0,
            {},
            "needs trainer_state, and gets prompts, .*; set others in `arguments`",
        ),
        (
            lambda completions, /: 0,
            {},
            "'completions' by position, and is called with keywords only; make it a keyword",
        ),
        (
            lambda completions: 0,
            {"scale": 2},
            "takes no argument 'scale', only completions; remove it from `arguments`",
        ),
    ]:
        with pytest.raises(RewardError, match=words):
            accepted_keywords(function, arguments, offered)


MY_FUNCTIONS = """
import asyncio, os, sys, time
import neighbour

def style(completions, topic, answers, completion_ids, scale=1.0, **rest):
    assert set(rest) == {"prompts", "level"}, rest
    return [scale * len(ids) if t == a else None for ids, t, a in zip(completion_ids, topic, answers)]

async def slow(completions):
    await asyncio.sleep(1.0)
    return [float(len(text)) for text in completions]

def as_trl(prompts, completions, **kwargs):
    return [float(p[-1]["content"] == "q" and c[0]["content"] == "a") for p, c in zip(prompts, completions)]

def moody(completions):
    mood = completions[0]
    if mood == "hang":
        while True: pass
    if mood == "power":
        return 9 ** 9 ** 9
    if mood == "raise":
        raise KeyError("lost")
    if mood == "odd":
        class Odd(Exception):
            def __init__(self, a, b): super().__init__(f"{a} and {b}")
        raise Odd(1, 2)
    if mood == "exit":
        sys.exit(3)
    if mood == "interrupt":
        raise KeyboardInterrupt
    if mood == "half":
        raise ValueError(chr(0xD800) + "x" * 10**6)
    if mood == "die":
        os._exit(7)
    if mood == "short":
        return []
    return [float(os.getpid())] * len(completions)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine")
    (path / "mine.py").write_text(MY_FUNCTIONS)
    (path / "neighbour.py").write_text("")
    return path


def mine(folder: Path, name: str, **settings: object) -> RewardSettings:
    return RewardSettings(function=f"{folder / 'mine.py'}:{name}", **settings)


ROWS = [Example("q", "x", columns={"topic": "x", "level": 1}), Example("q", "y", columns={"topic": "x", "level": 2})]


def test_functions_of_yours_run_beside_each_other_and_get_the_rows_columns(folder: Path) -> None:
    settings = [
        mine(folder, "style", weight=0.5, arguments={"scale": 10}),
        mine(folder, "slow"),
        mine(folder, "as_trl", conversational=True),
        mine(folder, "moody"),
        RewardSettings(name="correctness"),
    ]
    with Rewards(settings, ["topic", "level"]) as rewards:
        began = time.monotonic()
        scores = rewards(ROWS, ["a", "\\boxed{y}"], [[5, 6], [7]])
        assert time.monotonic() - began < 1.9
        assert rewards.names == ["style", "slow", "as_trl", "moody", "correctness"]
        style, slow, as_trl, pids, correct = scores.values
        assert same(style, [20.0, NAN])
        assert same(slow, [1.0, 9.0])
        assert as_trl == [1.0, 0.0]
        assert correct == [0.0, 1.0]
        assert os.getpid() not in pids
        assert scores.notes == []
        process = int(pids[0])
    time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_hanging_call_is_ended_said_counted_and_the_next_one_served(folder: Path) -> None:
    with Rewards([mine(folder, "moody", timeout_seconds=0.5)]) as rewards:
        first = rewards(ROWS, ["fine", ""], [[1], [2]]).values[0]
        began = time.monotonic()
        for mood in ("hang", "power"):
            scores = rewards(ROWS, [mood, ""], [[1], [2]])
            assert same(scores.values[0], [NAN, NAN])
            assert "moody: the call took longer than 0.5 s and was ended" in scores.notes[0]
            assert "none of the 2 completions; a larger timeout_seconds allows more time" in scores.notes[0]
        assert time.monotonic() - began < 15
        assert rewards.timeouts == 2
        again = rewards(ROWS, ["fine", ""], [[1], [2]]).values[0]
        assert again[0] != first[0]
        with pytest.raises(ProcessLookupError):
            os.kill(int(first[0]), 0)


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        ("raise", "moody .*mine.py:moody.* raised KeyError: 'lost'"),
        ("odd", "raised Odd: 1 and 2"),
        ("exit", r"moody .*mine.py:moody.* raised SystemExit: 3"),
        ("interrupt", "moody .*mine.py:moody.* raised KeyboardInterrupt"),
        ("half", r"raised ValueError: \\ud800x* \.\.\. \(mine.py"),
        ("die", r"ended its process \(exit code 7\); expected a returned list of rewards"),
        ("short", "returned 0 rewards for 2 completions; expected one per completion"),
    ],
)
def test_a_failing_call_stops_the_run_and_names_the_function(folder: Path, mood: str, words: str) -> None:
    with Rewards([mine(folder, "moody")]) as rewards, pytest.raises(RunStopped, match=words):
        rewards(ROWS, [mood, ""], [[1], [2]])


def test_a_function_of_a_module_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graders").mkdir()
    (tmp_path / "graders" / "__init__.py").write_text("")
    (tmp_path / "graders" / "by_length.py").write_text(
        "def score(completions):\n    return [len(c) for c in completions]\n"
    )
    with Rewards([RewardSettings(function="graders.by_length:score", weight=2.0)], []) as rewards:
        assert rewards.names == ["score"]
        assert rewards(ROWS, ["abc", ""], [[1], [2]]).values == [[3.0, 0.0]]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nowhere.py:f", "nowhere.py: no such file"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("math:nothing", "math has no nothing"),
        ("math:pi", "pi is a float, and a function is expected"),
        ("json:dumps", "needs obj, and gets prompts"),
        ("broken.py:f", "broken.py raised ZeroDivisionError"),
        ("leaves.py:f", "leaves.py raised SystemExit: 3"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=f"'{function}': .*{words}.*; expected a function that takes `completions`"):
        Rewards([RewardSettings(function=function)])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "linear_length"}, "needs end, start, and gets .*; set others in `arguments`"),
        (
            {"name": "linear_length", "arguments": {"start": 9, "end": 3}},
            "end must be above start, got start = 9, end = 3",
        ),
        ({"name": "cosine_length", "arguments": {"max_tokens": "x"}}, "cosine_length: .*'str' and 'int'"),
        ({"name": "cosine_length", "arguments": {"max_tokens": 0}}, "max_tokens must be positive, got 0"),
        ({"name": "integer", "arguments": {"tags": []}}, "takes no argument 'tags', only completions; remove it"),
        (
            {"name": "correctness", "arguments": {"x": 1}},
            "correctness takes no arguments, got x; leave `arguments` out",
        ),
    ],
)
def test_arguments_of_shipped_rewards_are_checked_at_the_start(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Rewards([RewardSettings.model_validate(settings)])


def test_several_rewards_make_one_batch() -> None:
    config = run_config(
        rewards=[{"name": "correctness", "weight": 2.0}, {"name": "integer", "weight": -0.5}], reward_margin=1.5
    )
    scores = torch.tensor([[1, 1], [0, 1], [1, NAN], [NAN, NAN]] * 2)
    batch = assemble(tokens_of([2, 3], [5] * 8), scores, torch.zeros(8, dtype=torch.bool), config)
    assert same(batch.rewards.tolist(), [1.5, -0.5, 2.0, NAN] * 2)
    assert same(total_reward(scores, config.rewards).tolist(), batch.rewards.tolist())
    assert batch.advantages[3] == batch.advantages[7] == 0
    assert batch.pairs.total == 4
    assert batch.pairs.chosen.tolist() == [1, 0, 1, 0] * 2
    assert batch.pairs.rejected.tolist() == [0, 2, 0, 0] * 2
    other = assemble(
        tokens_of([2, 3], [5] * 8),
        scores,
        torch.zeros(8, dtype=torch.bool),
        run_config(rewards=[r.model_dump() for r in config.rewards], combine_rewards="normalize_then_sum"),
    )
    assert not torch.allclose(other.advantages, batch.advantages)


def test_a_worker_ends_with_a_killed_parent(folder: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from amir.config import RewardSettings\n"
        "from amir.rewards import Rewards\n"
        "from amir.tasks.task import Example\n"
        "if __name__ == '__main__':\n"
        f"    rewards = Rewards([RewardSettings(function={str(folder / 'mine.py') + ':moody'!r})])\n"
        "    print(int(rewards([Example('q', 'a')], ['fine'], [[1]]).values[0][0]), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(folder / "script.py")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 10
    while Path(f"/proc/{done.stdout.strip()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
