"""The logic of the benchmark of a whole step: its rows, what it refuses, its refusal without TRL. Nothing is timed."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCH = Path(__file__).parents[1] / "bench"
SCRIPTS = ("machine", "rows", "bench_step")

pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="the sources are not here: a wheel is tested")


@pytest.fixture
def step(monkeypatch):
    """bench_step.py, imported as a script of bench/ is."""
    monkeypatch.syspath_prepend(BENCH)
    import bench_step

    yield bench_step
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def settings(step):
    return step.Settings(steps=1, threads=1, random_rewards=False)


def measurement(step, *, seconds=(2.0,), memory=100.0, rewards=(1.0, 0.0, 1.0, 1.0), tokens=20, question="1 + 1"):
    """A measurement whose groups hold `rewards[g]` alone but for a first completion of reward 1."""
    completions = [
        step.Completion(f"{question} of group {g}", 1.0 if i == 0 else reward, tokens)
        for g, reward in enumerate(rewards)
        for i in range(step.GROUP)
    ]
    parts = [{"rollout": 1.0, "backward": second / 2} for second in seconds]
    return step.Measurement(list(seconds), list(seconds), [1.0 for _ in seconds], memory, [completions], parts, 44.0)


def test_rows_hold_every_timed_step_of_every_round_and_compare_medians(step, settings):
    measured = {
        "trl": [measurement(step, seconds=[4.0, 9.0], memory=300.0), measurement(step, seconds=[5.0], memory=200.0)],
        "amir": [measurement(step, seconds=[2.0]), measurement(step, seconds=[1.0, 3.0])],
    }
    rival, ours = step.make_rows(measured, settings)
    assert rival["seconds"] == {"median": 5.0, "min": 4.0, "max": 9.0, "n": 3}
    assert rival["peak_memory_mb"] == 300.0
    assert (rival["ratio_to"], rival["ratio"]) == (None, None)
    assert (ours["ratio_to"], ours["ratio"]) == ("trl", 0.4)


def test_without_the_rival_there_is_no_ratio(step, settings):
    (ours,) = step.make_rows({"amir": [measurement(step)]}, settings)
    assert (ours["ratio_to"], ours["ratio"]) == (None, None)


def test_a_row_is_whole_once_it_has_its_origin(step, settings):
    import rows

    (row,) = step.make_rows({"trl": [measurement(step)]}, settings)
    assert set(row) | {"machine", "versions", "commit", "date", "command"} == {*rows.FIELDS, "parts", "observed"}


def test_parts_are_medians_over_all_steps(step):
    measurements = [measurement(step, seconds=[2.0, 6.0]), measurement(step, seconds=[4.0])]
    measurements[1].parts[0]["scoring"] = 3.0
    assert step.parts_of(measurements) == {"rollout": 1.0, "backward": 2.0, "scoring": 0.0}


def test_the_long_workload_asks_gsm8k_questions_behind_a_worked_example(step):
    settings = step.Settings(steps=2, threads=1, random_rewards=True, workload=step.WORKLOADS["gsm8k"])
    asked = step.examples(settings)
    assert len({example.question for example in asked}) == 2 * 3
    assert all(step.WORKED_EXAMPLE in example.question for example in asked)
    assert "GSM8K" in step.case([measurement(step)], settings)


def test_the_case_tells_dead_groups_and_lengths(step, settings):
    measurements = [measurement(step), measurement(step, rewards=[0.0, 0.0, 0.0, 0.0], tokens=10)]
    assert step.groups_without_signal(measurements) == (3, 8)
    words = step.case(measurements, settings)
    assert "3 of 8 groups without training signal" in words
    assert "(mean 15.0)" in words
    assert "last number right" in words
    assert "random rewards" in step.case(measurements, step.Settings(1, 1, random_rewards=True))


def test_other_questions_are_other_work(step):
    with pytest.raises(ValueError, match="amir and trl did not answer the same questions"):
        step.refuse_other_work({"trl": [measurement(step)], "amir": [measurement(step, question="2 + 2")]})


@pytest.mark.parametrize("rewards", [[1.0] * 3, [1.0] * 5], ids=["fewer", "more"])
def test_another_number_of_completions_is_other_work(step, rewards):
    with pytest.raises(ValueError, match="equally often"):
        step.refuse_other_work({"trl": [measurement(step)], "amir": [measurement(step, rewards=rewards)]})


def test_other_lengths_are_other_work(step):
    step.refuse_other_work({"trl": [measurement(step, tokens=20)], "amir": [measurement(step, tokens=17)]})
    with pytest.raises(ValueError, match=r"15\.0 for amir, 20\.0 for trl"):
        step.refuse_other_work({"trl": [measurement(step, tokens=20)], "amir": [measurement(step, tokens=15)]})


def test_both_get_the_same_questions_and_the_same_lots(step, settings):
    chosen = step.examples(settings)
    assert chosen == step.examples(settings)
    assert len({example.question for example in chosen}) == 2 * settings.workload.prompts
    lots = [step.Lots()(["4"] * 64, ["4"] * 64) for _ in range(2)]
    assert lots[0] == lots[1]
    assert 16 < sum(lots[0]) < 48
    assert step.make_grader(settings)(["1 + 3 = 4", "1 + 4 = 5"], ["4", "4"]) == [1.0, 0.0]


def test_our_settings_are_those_of_trl(step, settings, tmp_path):
    pytest.importorskip("trl")
    ours = step.amir_config("amir", settings, tmp_path)
    rival = step.trl_config("trl", settings, tmp_path)
    assert ours.num_generations == rival.num_generations
    assert ours.prompts_per_step * ours.num_generations == rival.generation_batch_size
    for name in ("max_completion_length", "temperature", "top_p", "top_k", "loss_type", "beta", "learning_rate"):
        assert getattr(ours, name) == getattr(rival, name), name
    for name in ("num_iterations", "max_steps", "max_grad_norm", "weight_decay", "mask_truncated_completions"):
        assert getattr(ours, name) == getattr(rival, name), name
    assert ours.lr_scheduler == rival.lr_scheduler_type
    assert ours.scale_rewards == rival.scale_rewards
    assert not rival.gradient_checkpointing
    assert step.trl_config("trl-checkpointing", settings, tmp_path).gradient_checkpointing
    assert (ours.lambda_reg, step.amir_config("amir-pairs", settings, tmp_path).lambda_reg) == (0.0, 0.01)


def test_without_trl_it_says_so_and_measures_nothing(step, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trl" else find_spec(name))
    monkeypatch.setattr(step, "measure_apart", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(sys, "argv", ["bench_step.py"])
    assert step.main() == 2
    assert "pip install -c constraints.txt -e '.[bench]'" in capsys.readouterr().err


def test_a_failed_contender_keeps_no_row(step, monkeypatch):
    def measure(contender, _):
        if contender == "amir":
            raise RuntimeError("the contender fell over")
        return measurement(step)

    monkeypatch.setattr(step, "measure_apart", measure)
    monkeypatch.setattr(step, "prepare_environment", lambda _: None)
    monkeypatch.setattr(step, "keep", lambda _: pytest.fail("kept"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "argv", ["bench_step.py"])
    with pytest.raises(RuntimeError, match="fell over"):
        step.main()
