"""Dynamic sampling: which groups are replaced, up to where, what stays on disk, and the same bits after a resume."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from amir.config import RunConfig
from amir.rewards.shaping import linear_length
from amir.rollout.dynamic_sampling import Groups, differing_groups
from amir.rollout.rollout import Rollout, make_rollout
from amir.run.directory import RunDirectory
from amir.tasks import TASKS
from amir.trainer import Trainer
from test_trainer import Lines, ParityGrader, rows, untimed
from tiny import EOS, crash_after, policy, run_config

NAN = math.nan
LETTERS = range(36, 60)


class Drawn:
    """A sampler whose completions are a pure function of prompt and seed; a digit in the prompt makes a group agree."""

    def __init__(self, made: object, agree: str = "") -> None:
        self.policy, self.agree, self.seen = made, agree, []

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        self.seen.append((prompts, seed))
        completions = []
        for place, prompt in enumerate(prompts):
            chance = torch.Generator().manual_seed((seed + 31 * place + sum(prompt)) % 2**62)
            text = self.policy.tokenizer.decode(prompt)
            for row in range(group_size):
                size = int(torch.randint(1, max_new_tokens, (1,), generator=chance))
                first = 40 if any(digit in text for digit in self.agree) else 40 + row % 2
                completions.append([first, *torch.randint(36, 60, (size - 1,), generator=chance).tolist(), EOS])
        return make_rollout(self.policy, prompts, completions)


class FirstLetter(ParityGrader):
    """Rewards an even first letter."""

    def __call__(self, completions: list[str], golds: list[str]) -> list[float]:
        return [float(ord(text[0]) % 2 == 0) for text in completions]


@pytest.fixture(autouse=True)
def _letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", FirstLetter)


def config(**changes: object) -> RunConfig:
    return run_config(
        **{"eval_prompts": 0, "save_steps": 1, "dynamic_sampling": {"max_rounds": 4, "min_valid_share": 1.0}, **changes}
    )


def trainer(path: Path, c: RunConfig, agree: str, *, resume: bool = False) -> Trainer:
    made = policy(c, moved=False)
    task = TASKS[c.task.name](c.task)
    run = Trainer(c, made, task, RunDirectory(path, c, resume=resume), Lines(), sampler=Drawn(made, agree))
    if resume:
        run.resume()
    return run


def test_groups_that_agree_are_known() -> None:
    third = 0.1 + 0.2
    scores = torch.tensor(
        [[1.0, 1, 1, 1], [0, 1, 0, 0], [0.3, third, 0.3, third], [NAN, 1, 1, NAN], [NAN, 1, 0, 1], [NAN] * 4]
    ).view(-1, 1)
    assert differing_groups(scores, config()) == [False, True, False, False, True, False]
    assert all(differing_groups(scores, run_config()))
    two = [{"name": "correctness"}, {"name": "linear_length", "arguments": {"start": 5, "end": 9}}]
    both = torch.cat([torch.zeros(24, 1), torch.rand(24, 1)], dim=1)
    assert all(differing_groups(both, config(rewards=two)))
    by = config(rewards=two, dynamic_sampling={"by": "correctness"})
    assert not any(differing_groups(both, by))


@pytest.mark.parametrize(
    ("settings", "kept", "missing"),
    [
        ({"max_rounds": 4}, [[0, 1, 1]], 1),
        ({"max_rounds": 4}, [[1, 1, 1]], 0),
        ({"max_rounds": 4, "min_valid_share": 0.6}, [[0, 1, 1]], 0),
        ({"max_rounds": 4, "min_valid_share": 0.7}, [[0, 1, 1]], 1),
        ({"max_rounds": 2}, [[0, 0, 0], [0, 0, 0]], 0),
        ({"max_rounds": 3}, [[0, 0, 1], [0, 0]], 2),
        (None, [[0, 0, 0]], 0),
    ],
    ids=str,
)
def test_rounds_end_when_enough_is_groups_that_differ_or_their_number_is_up(settings, kept, missing) -> None:
    groups = Groups(run_config(dynamic_sampling=settings))
    assert groups.missing == 3
    groups.trained = [list(map(bool, flags)) for flags in kept]
    assert groups.missing == missing


def test_agreeing_groups_are_replaced_and_stay_on_disk(tmp_path) -> None:
    run = trainer(tmp_path, config(), agree="12")
    run.train()
    metrics = rows(tmp_path / "metrics.jsonl")
    assert any(row["sampling_rounds"] > 1 for row in metrics)
    assert all(row["sampling_rounds"] <= 4 for row in metrics)
    for row in metrics:
        kept = rows(tmp_path / "completions" / f"step-{row['step']:06d}.jsonl")
        assert len(kept) == 4 * row["groups_sampled"]
        trained = [c for c in kept if c["trained"]]
        assert row["zero_variance_share"] == 0
        assert row["completion_tokens"] == pytest.approx(sum(c["tokens"] for c in trained) / len(trained))
        assert {c["question"] for c in kept if not c["trained"]} == {
            c["question"] for c in kept if any(d in c["question"] for d in "12")
        }
        assert row["sampling_rounds"] == 4 or len(trained) == 12
    asked = [len(prompts) for prompts, _ in run.sampler.seen]
    assert sum(asked) == sum(row["groups_sampled"] for row in metrics) == run.data_position
    assert len({seed for _, seed in run.sampler.seen}) == len(asked)


def test_prompts_are_consumed_in_order_whatever_was_replaced(tmp_path) -> None:
    run = trainer(tmp_path, config(), agree="12")
    run.train()
    seen = [tuple(ids) for prompts, _ in run.sampler.seen for ids in prompts]
    other = trainer(tmp_path / "other", config(), agree="")
    assert seen == [tuple(p.ids) for p in other._next_prompts(len(seen))]


def test_a_resumed_run_ends_as_the_undisturbed_one(tmp_path) -> None:
    c = config(max_steps=4)
    whole = trainer(tmp_path / "whole", c, agree="123")
    whole.train()
    assert whole.data_position > 4 * c.prompts_per_step
    cut = trainer(tmp_path / "cut", c, agree="123")
    crash_after(cut, step=3)
    resumed = trainer(tmp_path / "cut", c, agree="123", resume=True)
    resumed.train()
    assert resumed.data_position == whole.data_position
    assert untimed(rows(tmp_path / "cut" / "metrics.jsonl")) == untimed(rows(tmp_path / "whole" / "metrics.jsonl"))
    for name in ("step-000003.jsonl", "step-000004.jsonl"):
        assert (tmp_path / "cut" / "completions" / name).read_text() == (
            tmp_path / "whole" / "completions" / name
        ).read_text()
    for left, right in zip(whole.named.values(), resumed.named.values(), strict=True):
        assert torch.equal(left, right)


def test_where_nothing_ever_disagrees_the_step_has_no_gradient_and_the_run_goes_on(tmp_path) -> None:
    run = trainer(tmp_path, config(max_steps=2), agree="0123456789")
    before = {name: p.detach().clone() for name, p in run.named.items()}
    run.train()
    metrics = rows(tmp_path / "metrics.jsonl")
    assert [(row["groups_sampled"], row["zero_gradient_share"], row["grad_norm"]) for row in metrics] == [
        (12, 1, 0)
    ] * 2
    assert all(torch.equal(before[name], p) for name, p in run.named.items())


def test_the_step_is_that_of_the_kept_groups_alone(tmp_path) -> None:
    """Replaced groups leave no trace in the gradient: neither in a divisor nor in the pairs."""
    c = config(max_steps=1, loss_type="dapo")
    run = trainer(tmp_path / "a", c, agree="12")
    run.train()
    kept = [r for r in rows(tmp_path / "a" / "completions" / "step-000001.jsonl") if r["trained"]]
    plain = trainer(tmp_path / "b", config(max_steps=1, loss_type="dapo", dynamic_sampling=None), agree="12")
    questions = list(dict.fromkeys(r["question"] for r in kept))
    prompts = {p.example.question: p for p in plain.prompts}
    plain._next_prompts = lambda count: [prompts[q] for q in questions]

    class Replayed:
        def sample(self, ids: list[list[int]], *settings: int) -> Rollout:
            encoded = [plain.policy.tokenizer(r["completion"].replace(" ", ""))["input_ids"] + [EOS] for r in kept]
            return make_rollout(plain.policy, ids, encoded)

    plain.collector = replace(plain.collector, sampler=Replayed())
    plain.train()
    for left, right in zip(run.named.values(), plain.named.values(), strict=True):
        assert torch.equal(left, right)


def test_overlong_punishment_is_the_reward_linear_length() -> None:
    """DAPO, equation 13: L_max 20, L_cache 8, and never below -1."""
    lengths = [1, 12, 13, 16, 19, 20, 25]
    expected = [0.0, 0.0, *((12 - n) / 8 for n in (13, 16, 19, 20)), -1.0]
    assert linear_length(lengths, start=12, end=20) == pytest.approx(expected)
