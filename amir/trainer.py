"""The training loop: sample groups, reward them, form advantages and pairs, run micro-batches, take one optimizer step.

What this GRPO leaves out: there is no value model, no reward model, no extra pass for old log-probs (they are the
current ones, detached, until a batch is reused), and no training forward for completions whose gradient is zero.
"""

import random
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

from torch import Tensor

from .config import RunConfig
from .config_reader import resolved
from .errors import RunStopped
from .policy.checkpoint import (
    data_position,
    keep_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_result,
)
from .policy.load import machine_settings
from .policy.policy import Policy
from .rewards import Rewards
from .rollout.collector import Collector, completion_records
from .rollout.dynamic_sampling import Groups
from .rollout.rollout import Rollout, Sampler
from .rollout.samplers import make_sampler
from .run.card import model_card
from .run.contents import contents, refuse_changes
from .run.directory import RunDirectory
from .run.display import Display, NullDisplay
from .run.health import Health
from .run.machine import process_description
from .run.metrics import Clock, batch_sums, evaluation_metrics, step_metrics
from .run.signals import StopSignals
from .tasks import Example, Task
from .tasks.prompts import (
    Prompt,
    describe_prompts,
    encode_prompts,
    fix_date,
    refuse_foreign_tokenizer,
    refuse_missing_prompts,
)
from .update.batch import Batch, make_batch
from .update.gradient import backward, make_objective, reference_logprobs
from .update.micro_batches import TokenBudget
from .update.optimizer import apply_update, make_optimizer


@dataclass
class Trainer:
    """One run: its policy, its task and its run directory. `train` is the loop."""

    config: RunConfig
    policy: Policy
    task: Task
    directory: RunDirectory
    display: Display = field(default_factory=NullDisplay)
    sampler: Sampler | None = None
    """by default the one that `config.sampler` names"""
    reward_functions: Rewards | None = None
    """by default those that `config.rewards` names"""

    def __post_init__(self) -> None:
        self.ranks = self.policy.ranks
        self.objective = make_objective(self.config)
        self.named = self.policy.trainable()
        self.optimizer = make_optimizer(self.config, self.named)
        self.budget = TokenBudget.for_policy(
            self.config, self.policy, log=self.log, show_progress=self.display.progress
        )
        fix_date(self.policy.tokenizer, self.ranks.gather(self.directory.began)[0])
        special = [self.policy.pad_id, *self.policy.eos_ids]
        refuse_foreign_tokenizer(self.policy.tokenizer, special, self.policy.vocabulary_size)
        for note in (*self.policy.notes, *self.task.notes):
            self.log(note)
        self.prompts = self._encode(self.task.train, "training")
        self.held_out = self._encode(self.task.held_out, "held-out", self.config.eval_prompts)
        refuse_missing_prompts(self.prompts, self.held_out, self.task, self.config)
        self.rewards = self.reward_functions or Rewards(self.config.rewards, self.task.columns)
        adapters = self.directory.path / "server-adapters"
        sampler = self.sampler or make_sampler(self.config, self.policy, adapters, self.log)
        self.collector = Collector(self.config, self.policy, sampler, self.rewards, self.log)
        self.signals = StopSignals(self.ranks)
        self.health = Health(self.config)
        self.finished_steps = self.saved_steps = 0
        self.data_position = self.finished_position = 0
        self.evaluated = False
        machine = machine_settings(self.config, self.policy.device)
        self.resolved = resolved(self.config, **machine, output_dir=str(self.directory.path.absolute()))

    def resume(self) -> None:
        """Restores the latest complete checkpoint; without one the run starts at step 1."""
        now = self.contents
        with self.ranks.raise_on_all_ranks():
            self.directory.check(self.resolved)
            for note in refuse_changes(self.directory.description().get("contents", {}), now, self.config):
                self.log(note)
        checkpoint = latest_checkpoint(self.directory.checkpoints)
        with self.ranks.raise_on_all_ranks():
            if checkpoint:
                self.finished_steps = load_checkpoint(checkpoint, self.policy.model, self.optimizer, self.named)
                self.saved_steps = self.finished_steps
                self.data_position = self.finished_position = data_position(checkpoint)
            rows = self.directory.rewind(self.finished_steps)
            for metrics in rows:
                self.health.take(metrics)
        self.evaluated = self.ranks.gather(self.finished_steps in self.directory.evaluations())[0]
        self.log(f"resumed after step {self.finished_steps}" if checkpoint else "no checkpoint yet: starting at step 1")
        if lost := sorted({*range(1, self.finished_steps + 1)} - {row["step"] for row in rows}):
            self.log(
                f"metrics.jsonl has no row for {len(lost)} of the {self.finished_steps} steps before this point, the "
                f"first of them step {lost[0]}; the run continues without them"
            )

    def train(self) -> None:
        """Runs to `max_steps`; evaluates first, every `eval_steps` and last; saves every `save_steps` and last.

        With `max_steps` 0 it evaluates and saves nothing. RunStopped after a signal to stop, with the last finished
        step saved.
        """
        self._begin()
        with self.rewards, self.signals:
            try:
                self._take_steps()
            except KeyboardInterrupt:
                if self.signals.received is None:
                    raise
                self._stop()
        if self.config.max_steps == 0:
            return
        self._save_result()
        for warning in self.health.closing():
            self.log(warning)

    def _take_steps(self) -> None:
        c = self.config
        self.signals.allow()
        if not self.evaluated:
            self._evaluate_if_due(self.finished_steps)
        for step in range(self.finished_steps + 1, c.max_steps + 1):
            clock = Clock()
            groups = self._collect(step, clock)
            with self.ranks.raise_on_all_ranks():
                batch = self._batch(groups)
            self.display.phase("reference log-probs")
            batch = replace(batch, ref_logprobs=reference_logprobs(self.policy, batch, c, self.budget))
            clock.lap("reference")

            self.display.phase("training pass")
            measure = c.term_gradient_steps > 0 and step % c.term_gradient_steps == 0
            for _ in range(c.num_iterations):
                sums, logprobs = backward(self.policy, batch, self.objective, c, self.budget, measure_terms=measure)
                if batch.old_logprobs is None:
                    batch = replace(batch, old_logprobs=logprobs)
                self.signals.defer()  # until here a signal drops the step; once its weights change, it is finished
                with self.ranks.raise_on_all_ranks():
                    grad_norm = apply_update(self.optimizer, c, step)
            clock.lap("update")

            sums.update(batch_sums(batch, c))
            sums.update(groups.sums(), reward_timeouts=sum(self.ranks.gather(self.rewards.timeouts)))
            self._report(step_metrics(c, step, sums, grad_norm, clock))
            self.finished_steps, self.finished_position = step, self.data_position
            self.signals.allow()
            self._evaluate_if_due(step)
            if step == c.max_steps or step % c.save_steps == 0:
                self._save()

    def _stop(self) -> NoReturn:
        """Saves the last finished step if it is not saved yet, and ends the run on all ranks."""
        self.signals.defer()
        with self.ranks.raise_on_all_ranks():
            if self.finished_steps > self.saved_steps:
                self._save()
            last = (
                f"after step {self.finished_steps}, which is saved" if self.finished_steps else "before step 1 was done"
            )
            raise RunStopped(f"stopped by {self.signals.received} {last}")

    def _save_result(self) -> None:
        policy, run = self.policy, self.directory.path
        card = model_card(self.config, policy.tokenizer, policy.base.name_or_path, policy.revision, run)
        save_result(run / self.result, policy.model, policy.tokenizer, self.named, self.ranks, card=card)

    @property
    def result(self) -> str:
        """Name of the folder for the trained weights."""
        return "model" if self.config.lora is None else "adapter"

    @cached_property
    def contents(self) -> dict[str, Any]:
        """Digests of what the run is made of; if the weights are sharded, every rank must read it."""
        return contents(self.config, self.policy, self.prompts, self.held_out)

    def log(self, text: str) -> None:
        """Shows a line and writes it to log.txt."""
        self.directory.log(text)
        self.display.message(text)

    def _begin(self) -> None:
        process = process_description(self.ranks.size, self.finished_steps)
        self.directory.start(self.resolved, process, self.contents)
        self.display.begin(self.finished_steps)
        for line in [*describe_prompts(self.prompts, self.policy.tokenizer, self.config), *self.rewards.notes]:
            self.log(line)
        if self.policy.why_unpacked:
            self.log(
                "training without packing, each completion with its own copy of the prompt, because "
                f"{self.policy.why_unpacked}"
            )
        if self.finished_steps and self.finished_steps >= self.config.max_steps:
            self.log(
                f"nothing to do: step {self.finished_steps} is done and max_steps = {self.config.max_steps}; set a "
                "larger max_steps to continue"
            )

    def _collect(self, step: int, clock: Clock) -> Groups:
        """The step's groups, from one or several rounds of sampling; all completions are written to disk."""
        c, groups, records = self.config, Groups(self.config), []
        while count := groups.missing:
            stream = f"{step}/round {len(groups.trained)}" if groups.trained else step
            prompts = self._next_prompts(count)
            rollout, scores = self._sample_and_reward(prompts, c.num_generations, stream, clock)
            trained = groups.add(rollout, scores)
            for row, record in enumerate(completion_records(prompts, rollout, scores, c)):
                records.append(record | {"trained": trained[row // c.num_generations]})
            self.directory.record_completions("step", step, records)
        return groups

    def _sample_and_reward(
        self, prompts: list[Prompt], group_size: int, stream: int | str, clock: Clock
    ) -> tuple[Rollout, Tensor]:
        self.display.phase(f"sampling {len(prompts)} x {group_size} completions")
        rollout = self.collector.sample(prompts, group_size, stream)
        clock.lap("rollout")
        self.display.phase(f"rewarding {len(prompts)} x {group_size} completions")
        rewarded = self.collector.reward(prompts, rollout)
        clock.lap("reward")
        return rewarded

    def _batch(self, groups: Groups) -> Batch:
        rollout, scores = groups.chosen()
        return make_batch(rollout, scores, self.config, pad_id=self.policy.pad_id, device=self.policy.device)

    def _evaluate_if_due(self, step: int) -> None:
        c = self.config
        if step in (0, c.max_steps) or (c.eval_steps and step % c.eval_steps == 0):
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        """Samples `eval_samples` completions of the first `eval_prompts` held-out prompts each; changes no state."""
        c = self.config
        records: list[dict[str, Any]] = []
        for first in range(0, len(self.held_out), c.prompts_per_step):
            prompts = self.held_out[first : first + c.prompts_per_step]
            rollout, scores = self._sample_and_reward(prompts, c.eval_samples, -1 - first, Clock())
            records += completion_records(prompts, rollout, scores, c)
            self.directory.record_completions("eval", step, records)
        if records:
            summary = evaluation_metrics(step, records, c.eval_samples)
            self.directory.record("evaluations", summary)
            self.display.evaluation(summary)
            name = "reward" if summary["success"] is None else "success"
            shown = "unscored" if summary[name] is None else format(summary[name], ".3f")
            self.log(f"held-out {name} after step {step}: {shown} ({len(records)} samples)")

    def _save(self) -> None:
        step, position, model = self.finished_steps, self.finished_position, self.policy.model
        folder, limit = self.directory.checkpoints, self.config.save_total_limit
        save_checkpoint(folder, step, position, model, self.optimizer, self.named, self.ranks)
        self.saved_steps = step
        if limit is not None and self.ranks.first:
            keep_checkpoints(folder, limit, self.directory.evaluations())

    def _report(self, metrics: dict[str, Any]) -> None:
        self.directory.record("metrics", metrics)
        self.display.step(metrics)
        for warning in self.health.take(metrics):
            self.log(warning)

    def _next_prompts(self, count: int) -> list[Prompt]:
        """The next training prompts, in a seeded permutation of each epoch; advances `data_position`."""
        size = len(self.prompts)
        places = range(self.data_position, self.data_position + count)
        self.data_position += count
        orders = {epoch: _permutation(size, self.config.seed, epoch) for epoch in {place // size for place in places}}
        return [self.prompts[orders[place // size][place % size]] for place in places]

    def _encode(self, examples: list[Example], name: str, limit: int | None = None) -> list[Prompt]:
        policy = self.policy
        return encode_prompts(
            examples, policy.tokenizer, self.config, name, policy.vocabulary_size, self.log, limit, policy.eos_ids
        )


def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed}/epoch {epoch}").sample(range(size), size)
