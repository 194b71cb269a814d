"""The loop: sample groups, reward them, form advantages and pairs, run micro-batches, take one optimizer step.

What this GRPO leaves out: no value model, no reward model, no extra pass for old log-probs (they are the current ones,
detached, until a batch is reused), no training forward for completions whose gradient is exactly zero.
"""

import math
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from .batch import Batch, make_batch, weighted_sum
from .checkpoint import data_position, latest_checkpoint, load_checkpoint, save_checkpoint, save_result
from .config import ConfigError, RunConfig
from .correction import LARGE_MISMATCH
from .dynamic import Groups
from .loss import TokenBudget, backward, objective_of, with_reference
from .metrics import Clock, batch_sums, evaluation_metrics, step_metrics
from .model import Policy
from .optim import apply_update, make_optimizer
from .prompts import Prompt, encode_prompts, refuse_foreign_tokenizer
from .ranks import on_cpu
from .rewards import Rewards
from .rollout import Rollout, Sampler, joined, make_sampler
from .rundir import RunDirectory
from .tasks import Example, Task

NO_PAIR_STEPS = 20
"""A run whose groups have all agreed so far, or whose pair term has formed no pair, says so after this many steps."""


class Display(Protocol):
    """Where progress is shown."""

    def begin(self, finished_steps: int) -> None:
        """Says how many steps earlier processes have finished."""

    def step(self, metrics: dict[str, Any]) -> None:
        """Shows one step's metrics."""

    def say(self, text: str) -> None:
        """Shows a line."""


@dataclass
class Trainer:
    """One run: its policy, its task, its folder. `train` is the loop."""

    config: RunConfig
    policy: Policy
    task: Task
    directory: RunDirectory
    display: Display
    sampler: Sampler | None = None
    """by default the one that the configuration names"""

    def __post_init__(self) -> None:
        self.ranks = self.policy.ranks
        self.objective = objective_of(self.config)
        self.named = self.policy.trainable()
        self.optimizer = make_optimizer(self.config, self.named)
        self.budget = TokenBudget.of(self.config, self.policy, self.say)
        special = [self.policy.pad_id, *self.policy.eos_ids]
        refuse_foreign_tokenizer(self.policy.tokenizer, special, self.policy.vocabulary_size)
        for note in self.task.notes:
            self.say(note)
        self.prompts = self._encode(self.task.train, "training")
        self.held_out = self._encode(self.task.held_out, "held-out", self.config.eval_prompts)
        if not self.prompts:
            raise ConfigError("no training prompt is left: the task is empty or max_prompt_length too small")
        if self.config.eval_prompts and not self.held_out:
            raise ConfigError(f"eval_prompts = {self.config.eval_prompts}: the task holds no example out; expected 0")
        columns = dict.fromkeys(name for example in self.task.train for name in example.columns)
        self.rewards = Rewards(self.config.rewards, list(columns))
        self._sampler = self.sampler or make_sampler(
            self.config, self.policy, self.directory.path / "server-adapters", self.say
        )
        self.finished_steps = 0
        self.data_position = 0
        self.warned_of_mismatch = False
        self.pairs_seen = 0
        self.groups_disagreed = False

    def resume(self) -> None:
        """Goes back to the latest whole checkpoint, or to the start where there is none."""
        found = latest_checkpoint(self.directory.checkpoints)
        if found:
            self.finished_steps = load_checkpoint(found, self.policy.model, self.optimizer, self.named)
            self.data_position = data_position(found)
        rows = self.directory.rewind(self.finished_steps)
        self.pairs_seen = sum(row.get("pairs", 0) for row in rows)
        self.groups_disagreed = any(row.get("zero_variance_share", 0.0) < 1 for row in rows)
        self.say(f"resumed after step {self.finished_steps}" if found else "no checkpoint yet: starting from step 1")

    def train(self) -> None:
        """Runs to `max_steps`; evaluates before, every `eval_steps` and after; saves every `save_steps` and last."""
        c = self.config
        self.directory.start()
        self.display.begin(self.finished_steps)
        if self.policy.why_unpacked:
            self.say(f"training in plain rows, each completion behind its own prompt: {self.policy.why_unpacked}")
        if self.finished_steps >= c.max_steps:
            self.say(f"nothing to do: step {self.finished_steps} is done and max_steps = {c.max_steps}")
        with self.rewards:
            if self.finished_steps == 0:
                self._evaluate(0)
            for step in range(self.finished_steps + 1, c.max_steps + 1):
                clock = Clock()
                groups = self._collect(step, clock)
                batch = self.ranks.together(partial(self._batch, groups))
                batch = with_reference(self.policy, batch, c, self.budget)
                clock.lap("reference")

                apart = c.term_gradient_steps > 0 and step % c.term_gradient_steps == 0
                for _ in range(c.num_iterations):
                    batch, sums = backward(self.policy, batch, self.objective, c, self.budget, terms_apart=apart)
                    grad_norm = self.ranks.together(partial(apply_update, self.optimizer, c, step))
                clock.lap("update")

                sums.update(batch_sums(batch, c))
                sums.update(groups.sums(), reward_timeouts=sum(self.ranks.gather(self.rewards.timeouts)))
                self._report(step_metrics(c, step, sums, grad_norm, clock))
                if step == c.max_steps or (c.eval_steps and step % c.eval_steps == 0):
                    self._evaluate(step)
                if step == c.max_steps or step % c.save_steps == 0:
                    self._save(step)
        folder = self.directory.path / self.result
        save_result(folder, self.policy.model, self.policy.tokenizer, self.named, self.ranks)

    @property
    def result(self) -> str:
        """Name of the folder that the run leaves what it trained in."""
        return "model" if self.config.lora is None else "adapter"

    def say(self, text: str) -> None:
        """Shows a line and keeps it in log.txt."""
        self.directory.log(text)
        self.display.say(text)

    def _evaluate(self, step: int) -> None:
        """Samples `eval_samples` completions of the first `eval_prompts` held-out examples; changes no state."""
        c = self.config
        rows: list[dict[str, Any]] = []
        for first in range(0, len(self.held_out), c.prompts_per_step):
            examples = self.held_out[first : first + c.prompts_per_step]
            rollout, scores = self._sample_and_reward(examples, c.eval_samples, -1 - first)
            rows += completion_rows(examples, rollout, scores, c)
            self.directory.record_completions("eval", step, rows)
        if rows:
            summary = evaluation_metrics(step, rows, c.eval_samples)
            self.directory.record("evaluations", summary)
            name = "reward" if summary["success"] is None else "success"
            shown = "unscored" if summary[name] is None else format(summary[name], ".3f")
            self.say(f"held-out {name} after step {step}: {shown} ({len(rows)} samples)")

    def _save(self, step: int) -> None:
        position, model = self.data_position, self.policy.model
        save_checkpoint(self.directory.checkpoints, step, position, model, self.optimizer, self.named, self.ranks)

    def _encode(self, examples: list[Example], name: str, limit: int | None = None) -> list[Prompt]:
        vocabulary = self.policy.vocabulary_size
        return encode_prompts(examples, self.policy.tokenizer, self.config, name, vocabulary, self.say, limit)

    def _collect(self, step: int, clock: Clock) -> Groups:
        """The step's groups, in one round of sampling or in those that dynamic sampling asks for; all are on disk."""
        c, groups, rows = self.config, Groups(self.config), []
        while count := groups.missing:
            stream = f"{step}/round {len(groups.kept)}" if groups.kept else step
            prompts = self._next_prompts(count)
            rollout, scores = self._sample_and_reward(prompts, c.num_generations, stream, clock)
            kept = groups.add(rollout, scores).repeat_interleave(c.num_generations).tolist()
            made = completion_rows(prompts, rollout, scores, c)
            rows += [row | {"trained": keep} for row, keep in zip(made, kept, strict=True)]
            self.directory.record_completions("step", step, rows)
        return groups

    def _batch(self, groups: Groups) -> Batch:
        """The groups to train on as a batch, with the sampler's log-probs."""
        rollout, scores = groups.chosen(self.policy)
        batch = make_batch(rollout.tokens, scores.to(self.policy.device), rollout.truncated, self.config)
        return replace(batch, sampled_logprobs=rollout.logprobs)

    def _next_prompts(self, count: int) -> list[Prompt]:
        """The next prompts, which count as consumed: each epoch is its own permutation of the training prompts."""
        size = len(self.prompts)
        places = range(self.data_position, self.data_position + count)
        self.data_position += count
        orders = {epoch: _permutation(size, self.config.seed, epoch) for epoch in {place // size for place in places}}
        return [self.prompts[orders[place // size][place % size]] for place in places]

    def _sample_and_reward(
        self, prompts: list[Prompt], group_size: int, stream: int | str, clock: Clock | None = None
    ) -> tuple[Rollout, torch.Tensor]:
        """Completions of the prompts and their scores `[B, F]`: each rank makes those of its share, and gets all."""
        clock = clock or Clock()
        part = self.ranks.together(partial(self._own_part, prompts, group_size, stream, clock))
        parts = [part] if self.ranks.size == 1 else self.ranks.gather(on_cpu(part))
        rollouts, scores, notes = zip(*[given for given in parts if given is not None], strict=True)
        everything = [torch.ones(len(rollout.tokens.prompt_ids), dtype=torch.bool) for rollout in rollouts]
        rollout = rollouts[0] if self.ranks.size == 1 else joined(self.policy, list(rollouts), everything)
        for note in [note for given in notes for note in given]:
            self.say(note)
        clock.lap("reward")
        return rollout, torch.cat(scores)

    def _own_part(
        self, prompts: list[Prompt], group_size: int, stream: int | str, clock: Clock
    ) -> tuple[Rollout, torch.Tensor, list[str]] | None:
        """This rank's completions, their scores and what to say of them; None where it has no share of the prompts."""
        mine = list(self.ranks.share(prompts))
        if self.config.sampler.name == "server":  # one rank talks to it for all
            mine = prompts if self.ranks.first else []
        if mine or self.policy.sharded:  # a rank without a share samples along, since its part of the weights is needed
            rollout = self._sample(mine or prompts[:1], group_size, self.ranks.name(stream))
        clock.lap("rollout")
        return (rollout, *self._reward(rollout, mine, group_size)) if mine else None

    def _sample(self, prompts: list[Prompt], group_size: int, stream: int | str) -> Rollout:
        seed = derived_seed(self.config.seed, stream)
        ids = [prompt.ids for prompt in prompts]
        return self._sampler.sample(ids, group_size, self.config.max_completion_length, seed)

    def _reward(self, rollout: Rollout, prompts: list[Prompt], group_size: int) -> tuple[torch.Tensor, list[str]]:
        """What each function gives each completion, float32 `[B, F]`, NaN where nothing; and what to say of it."""
        examples = [prompt.example for prompt in prompts for _ in range(group_size)]
        tokens = rollout.tokens
        ids = [row[keep].tolist() for row, keep in zip(tokens.completion_ids, tokens.completion_mask, strict=True)]
        scores = self.rewards(examples, rollout.texts, ids)
        values = torch.tensor(scores.values).T.contiguous()
        if rollout.unusable is not None:
            values = values.masked_fill(rollout.unusable.cpu()[:, None], math.nan)
        return values, scores.notes

    def _report(self, metrics: dict[str, Any]) -> None:
        self.directory.record("metrics", metrics)
        self.display.step(metrics)
        self.pairs_seen += metrics["pairs"]
        self.groups_disagreed |= metrics["zero_variance_share"] < 1
        if (metrics["mismatch"] or 0.0) > LARGE_MISMATCH and not self.warned_of_mismatch:
            self.warned_of_mismatch = True
            self.say(
                f"warning: the sampler's log-probs are {metrics['mismatch']:.3f} nats a token from the trainer's: "
                "compare the two's dtype, temperature and adapter; `correction` weighs the difference within its bounds"
            )
        if metrics["step"] == NO_PAIR_STEPS and not self.groups_disagreed:
            self.say(
                f"warning: in {NO_PAIR_STEPS} steps the rewards of no group differed, or there were none: nothing was "
                "learnt from them; look at completions/ for what is rewarded"
            )
        if self.config.lambda_reg > 0 and metrics["step"] == NO_PAIR_STEPS and self.pairs_seen == 0:
            self.say(
                f"warning: lambda_reg = {self.config.lambda_reg} but no pair was formed in {NO_PAIR_STEPS} steps: all "
                "rewards of each group lie within reward_margin, so the pair term trains nothing"
            )


def completion_rows(
    prompts: list[Prompt], rollout: Rollout, scores: torch.Tensor, config: RunConfig
) -> list[dict[str, Any]]:
    """What is kept of each completion; the prompts' completions stand side by side. `scores` `[B, F]`."""
    size = len(rollout.texts) // len(prompts)
    lengths = rollout.tokens.completion_mask.sum(1).tolist()
    names = [reward.label for reward in config.rewards]
    rewards = weighted_sum(scores, [reward.weight for reward in config.rewards])
    return [
        {
            "question": prompts[row // size].example.question,
            "answer": prompts[row // size].example.answer,
            "completion": text,
            "reward": float(rewards[row]),
            "rewards": {
                name: None if math.isnan(value) else value
                for name, value in zip(names, scores[row].tolist(), strict=True)
            },
            "tokens": lengths[row],
            "truncated": bool(rollout.truncated[row]),
        }
        for row, text in enumerate(rollout.texts)
    ]


def derived_seed(seed: int, stream: int | str) -> int:
    """A seed of its own for each stream of a run (a step, an evaluation), so that resuming needs no sampler state."""
    return random.Random(f"{seed}/{stream}").getrandbits(63)


def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed}/epoch {epoch}").sample(range(size), size)
