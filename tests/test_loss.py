"""The training pass: gradients equal those of full logits in one piece, however the step is cut into micro-batches."""

import platform
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from amir.config import RunConfig
from amir.errors import ConfigError, RunStopped
from amir.policy.load import _load, checkpoint_layers
from amir.policy.policy import Policy
from amir.rollout.generate import sample
from amir.update.batch import Batch, make_batch
from amir.update.gradient import make_objective
from amir.update.micro_batches import micro_batches
from amir.update.optimizer import apply_update, make_optimizer
from amir_kernels import reference
from test_trainer import ParityGrader, run
from tiny import PAD, backward, distance, gradients, policy, run_config, sampled_batch, with_reference

PROMPTS = [[5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20]]
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
sampled = partial(sampled_batch, prompts=PROMPTS, rewards=REWARDS)
WHOLE, THREE_PARTS, ROW_BY_ROW = 10_000, 20, 1
TOLERANCE = 1e-4

OBJECTIVES = [
    {},
    {"loss_type": "dapo", "beta": 0.04},
    {"loss_type": "dr_grpo", "ref_free": True},
    {"loss_type": "gspo", "epsilon": 0.1, "normalize": "sum"},
    {"loss_type": "cispo", "lambda_reg": 0.0, "entropy_coef": 0.02},
    {"loss_type": "sapo", "reward_margin": 0.5, "temperature": 0.7},
    {"pair_mining": "topk", "max_pairs_per_group": 2},
]


def two_inner_steps(budget: int, **changes: object) -> tuple[list[list[Tensor]], list[int], list[float], Policy]:
    """Gradients of two inner steps on one batch, micro-batches of the first, loss values, the policy after both."""
    config = run_config(micro_batch_tokens=budget, num_iterations=2, **changes)
    made = policy(config)
    optimizer = make_optimizer(config, made.trainable())
    batch = sampled(made, config)
    sizes = [len(m.rows) for m in micro_batches(batch.tokens, batch.has_gradient, budget)]
    steps, values = [], []
    for _ in range(2):
        batch, sums = backward(made, batch, make_objective(config), config)
        steps.append(gradients(made))
        values += [float(sums[name]) for name in ("policy_loss", "preference_loss", "pairs", "pairs_correct", "tokens")]
        apply_update(optimizer, config, 1)
    return steps, sizes, values, made


def oracle(made: Policy, batch: Batch, config: RunConfig, old: Tensor | None, term: str = "loss") -> list[Tensor]:
    """One graph over all rows, dead ones too: full logits, plain-torch loss or a `term` of it, autograd."""

    def logits(tokens):
        ids = torch.cat([tokens.prompt_ids[tokens.prompt_index], tokens.completion_ids], 1)
        mask = torch.cat([tokens.prompt_mask[tokens.prompt_index], tokens.completion_mask], 1).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = made.base(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        return out[:, tokens.prompt_ids.shape[1] - 1 : -1] / config.temperature

    for parameter in made.trainable().values():
        parameter.grad = None
    scores = logits(batch.tokens).log_softmax(-1)
    logprobs = scores.gather(2, batch.tokens.completion_ids[..., None])[..., 0]
    with made.reference():
        ref = logits(batch.tokens).log_softmax(-1).gather(2, batch.tokens.completion_ids[..., None])[..., 0]
    loss = reference.amir_loss(
        logprobs,
        logprobs.detach() if old is None else old,
        batch.advantages,
        batch.rewards,
        batch.group,
        batch.loss_mask,
        ref_logprobs=batch.ref_logprobs if made.frozen else ref,
        objective=make_objective(config),
        lambda_reg=config.lambda_reg,
        beta_dpo=config.beta_dpo,
        reward_margin=config.reward_margin,
        pair_mining=config.pair_mining,
        max_pairs_per_group=config.max_pairs_per_group,
        ref_free=config.ref_free,
        normalize=config.normalize,
        entropy=-(scores.exp() * scores).sum(-1) if config.entropy_coef else None,
    )
    getattr(loss, term).backward()
    return gradients(made)


@pytest.mark.parametrize("changes", OBJECTIVES, ids=str)
def test_gradient_is_that_of_full_logits_and_the_plain_loss(changes: dict[str, object]) -> None:
    config = run_config(micro_batch_tokens=THREE_PARTS, num_iterations=2, **changes)
    made = policy(config)
    make_optimizer(config, made.trainable())
    batch = sampled(made, config)
    filled, sums = backward(made, batch, make_objective(config), config)
    ours = gradients(made)
    assert distance(ours, oracle(made, batch, config, None)) < TOLERANCE
    assert float(sums["pairs"]) == float(batch.pairs.total)

    generator = torch.Generator().manual_seed(5)
    for parameter in made.trainable().values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.zeros_like(parameter)
    backward(made, filled, make_objective(config), config)
    ours = gradients(made)
    assert distance(ours, oracle(made, batch, config, filled.old_logprobs)) < TOLERANCE


@pytest.mark.parametrize("budget", [WHOLE, THREE_PARTS, ROW_BY_ROW])
@pytest.mark.parametrize(
    "changes",
    [{"beta": 0.04}, {"lora": None, "beta": 0.04}, {"entropy_coef": 0.02, "gradient_checkpointing": True}],
    ids=str,
)
def test_terms_apart_are_those_of_autograd_and_leave_the_gradient_its_bits(budget: int, changes: dict) -> None:
    config = run_config(micro_batch_tokens=budget, num_iterations=2, **changes)
    made = policy(config)
    make_optimizer(config, made.trainable())
    if config.gradient_checkpointing:
        checkpoint_layers(made.support.body, offload=False)
    batch = sampled(made, config)
    backward(made, batch, make_objective(config), config)
    expected = gradients(made)
    for parameter in made.trainable().values():
        parameter.grad.zero_()
    filled, sums = backward(made, batch, make_objective(config), config, measure_terms=True)
    assert all(map(torch.equal, gradients(made), expected))
    for term, name, factor in [("policy", "policy", 1.0), ("preference", "pair", config.lambda_reg)]:
        norm = factor * sum(float(g.square().sum()) for g in oracle(made, filled, config, None, term)) ** 0.5
        measured = float(sums[f"{name}_parameter_grad_square"]) ** 0.5
        assert measured == pytest.approx(norm, rel=TOLERANCE)
        assert norm > 1e-3


def test_terms_apart_are_measured_in_every_nth_step_and_refused_where_gradients_are_in_parts(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", ParityGrader)
    runs = {}
    for every in (0, 2):
        runs[every] = run(
            tmp_path / str(every), run_config(term_gradient_steps=every, num_iterations=2, eval_prompts=0)
        )
    assert all(map(torch.equal, *(list(made.named.values()) for made in runs.values())))
    names = ("policy_parameter_grad_norm", "pair_parameter_grad_norm", "grad_norm")
    blank, (first, second, third) = (made.display.steps for made in runs.values())
    assert all(row[name] is None for row in [*blank, first, third] for name in names[:2])
    policy_norm, pair_norm, norm = (second[name] for name in names)
    assert abs(policy_norm - pair_norm) <= norm * (1 + 1e-6)
    assert norm <= (policy_norm + pair_norm) * (1 + 1e-6)
    assert min(policy_norm, pair_norm) > 0
    with pytest.raises(ConfigError, match=r"^term_gradient_steps = 2: not supported .* use LoRA, or run one rank"):
        _load(run_config(lora=None, term_gradient_steps=2), sharded=True)


@pytest.mark.parametrize("changes", OBJECTIVES, ids=str)
@pytest.mark.parametrize("budget", [THREE_PARTS, ROW_BY_ROW])
def test_micro_batch_size_changes_nothing_over_two_inner_steps(budget: int, changes: dict[str, object]) -> None:
    whole, sizes, values, expected = two_inner_steps(WHOLE, **changes)
    assert len(sizes) == 1
    parts, sizes, part_values, made = two_inner_steps(budget, **changes)
    assert len(sizes) >= 3
    assert part_values == pytest.approx(values, rel=1e-4, abs=1e-6)
    for left, right in zip(parts, whole, strict=True):
        assert distance(left, right) < TOLERANCE
    assert distance(list(made.trainable().values()), list(expected.trainable().values())) < 1e-3


def test_a_group_is_really_split_over_at_least_three_micro_batches() -> None:
    made = policy()
    batch = sampled(made, run_config())
    parts = [m.rows for m in micro_batches(batch.tokens, batch.has_gradient, THREE_PARTS) if not m.complete_groups]
    held = [rows for rows in parts if (batch.group[rows] == 2).any()]
    assert len(held) >= 3


def test_wrong_divisors_would_be_seen() -> None:
    """The comparison rejects the faults it is there for: a micro-batch's own divisor, pairs of a part only."""
    config = run_config(micro_batch_tokens=THREE_PARTS, loss_type="dapo")
    made = policy(config)
    make_optimizer(config, made.trainable())
    batch = sampled(made, config)
    truth = oracle(made, batch, config, None)
    for wrong in (
        replace(batch, pairs=replace(batch.pairs, total=batch.pairs.total / 2)),
        replace(batch, loss_mask=batch.loss_mask & batch.has_gradient[:, None]),
        replace(batch, ref_logprobs=torch.zeros_like(batch.ref_logprobs)),
        replace(
            batch,
            pairs=replace(batch.pairs, chosen=batch.pairs.chosen * 0, rejected=batch.pairs.rejected * 0),
            has_gradient=batch.has_gradient & (batch.rewards > 0),
        ),
    ):
        for parameter in made.trainable().values():
            parameter.grad = torch.zeros_like(parameter)
        backward(made, wrong, make_objective(config), config)
        assert distance(gradients(made), truth) > 10 * TOLERANCE


def test_dead_rows_never_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(micro_batch_tokens=WHOLE)
    made = policy(config)
    make_optimizer(config, made.trainable())
    batch = sampled(made, config)
    seen = []
    original = made.logprobs_entropy
    monkeypatch.setattr(made, "logprobs_entropy", lambda tokens: (seen.append(len(tokens)), original(tokens))[1])
    backward(made, batch, make_objective(config), config)
    assert seen == [8]


def test_the_first_pass_needs_no_pass_for_old_logprobs_and_the_second_reuses_them(monkeypatch) -> None:
    config = run_config(micro_batch_tokens=WHOLE, num_iterations=2)
    made = policy(config)
    make_optimizer(config, made.trainable())
    batch = sampled(made, config)
    passes = []
    original = made.logprobs_entropy
    monkeypatch.setattr(
        made, "logprobs_entropy", lambda tokens: (passes.append(torch.is_grad_enabled()), original(tokens))[1]
    )
    batch, sums = backward(made, batch, make_objective(config), config)
    assert float(sums["ratio_sum"]) == float(sums["tokens"])
    backward(made, batch, make_objective(config), config)
    assert passes == [True, True]


def test_a_batch_of_dead_groups_has_zero_gradient_and_still_steps() -> None:
    config = run_config()
    made = policy(config)
    optimizer = make_optimizer(config, made.trainable())
    rollout = sample(made, PROMPTS, 4, 9, seed=3)
    batch = make_batch(rollout, torch.ones(12)[:, None], config, pad_id=PAD)
    batch, _ = backward(made, with_reference(made, batch, config), make_objective(config), config)
    assert all((g == 0).all() for g in gradients(made))
    assert apply_update(optimizer, config, 1) == 0


def test_a_gradient_that_is_not_finite_stops_the_run() -> None:
    config = run_config()
    made = policy(config)
    optimizer = make_optimizer(config, made.trainable())
    before = {name: value.clone() for name, value in made.trainable().items()}
    next(iter(made.trainable().values())).grad.fill_(float("nan"))
    words = (
        r"step 1: the gradient is not finite \(norm nan\), .*not updated; start a new run with a smaller learning_rate"
    )
    with pytest.raises(RunStopped, match=words):
        apply_update(optimizer, config, 1)
    assert all(torch.equal(value, before[name]) for name, value in made.trainable().items())


HOLES = """
from pathlib import Path
import torch
from amir.policy.memory import mmap_large_allocations

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

def share_left():
    before = resident()
    blocks = [torch.ones(2**19) for _ in range(64)]
    full = resident()
    del blocks[::2]
    return 1 - 2 * (full - resident()) / (full - before)

with mmap_large_allocations():
    apart = share_left()
print(apart, share_left())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's heap")
def test_what_a_micro_batch_frees_leaves_no_holes() -> None:
    """Of every second block's memory, what stays resident when these are freed; in a process with a fresh heap."""
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    apart, shared = map(float, done.stdout.split())
    assert apart < 0.1
    assert shared > 0.9
