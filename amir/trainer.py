"""The loop: sample groups, reward them, form advantages and pairs, run micro-batches, take one optimizer step.

What this GRPO leaves out: no value model, no reward model, no extra pass for old log-probs (they are the current ones,
detached, until a batch is reused), no training forward for completions whose gradient is exactly zero.
"""

import random
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jinja2 import TemplateError

from .batch import make_batch
from .checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, save_result
from .config import ConfigError, RunConfig
from .loss import TokenBudget, backward, objective_of, with_reference
from .metrics import Clock, step_metrics
from .model import Policy
from .optim import apply_update, make_optimizer
from .reward import Correctness
from .rollout import Rollout, sample
from .rundir import RunDirectory
from .tasks import Example, Task

NO_PAIR_STEPS = 20
"""A run with a pair term that has formed no pair after this many steps says so."""


class Display(Protocol):
    """Where progress is shown."""

    def begin(self, finished_steps: int) -> None:
        """Says how many steps earlier processes have finished."""

    def step(self, metrics: dict[str, Any]) -> None:
        """Shows one step's metrics."""

    def say(self, text: str) -> None:
        """Shows a line."""


@dataclass(frozen=True)
class Prompt:
    """An example and its prompt's token ids."""

    example: Example
    ids: list[int]


@dataclass
class Trainer:
    """One run: its policy, its task, its folder. `train` is the loop."""

    config: RunConfig
    policy: Policy
    task: Task
    directory: RunDirectory
    display: Display

    def __post_init__(self) -> None:
        self.objective = objective_of(self.config)
        self.named = self.policy.trainable()
        self.optimizer = make_optimizer(self.config, self.named)
        self.budget = TokenBudget(self.config.micro_batch_tokens, self.say)
        self.grader = Correctness()
        self.prompts = self._encode(self.task.train, "training")
        self.held_out = self._encode(self.task.held_out, "held-out")[: self.config.eval_prompts]
        if not self.prompts:
            raise ConfigError("no training prompt is left: the task is empty or max_prompt_length too small")
        if self.config.eval_prompts and not self.held_out:
            raise ConfigError(f"eval_prompts = {self.config.eval_prompts}: the task holds no example out; expected 0")
        self.finished_steps = 0
        self.pairs_seen = 0

    def resume(self) -> None:
        """Goes back to the latest whole checkpoint, or to the start where there is none."""
        found = latest_checkpoint(self.directory.checkpoints)
        if found:
            self.finished_steps = load_checkpoint(found, self.policy.model, self.optimizer, self.named)
        self.pairs_seen = sum(row["pairs"] for row in self.directory.rewind(self.finished_steps))
        self.say(f"resumed after step {self.finished_steps}" if found else "no checkpoint yet: starting from step 1")

    def train(self) -> None:
        """Runs to `max_steps`; evaluates before, every `eval_steps` and after; saves every `save_steps` and last."""
        c = self.config
        self.directory.start()
        self.display.begin(self.finished_steps)
        if self.finished_steps >= c.max_steps:
            self.say(f"nothing to do: step {self.finished_steps} is done and max_steps = {c.max_steps}")
        with self.grader:
            if self.finished_steps == 0:
                self._evaluate(0)
            for step in range(self.finished_steps + 1, c.max_steps + 1):
                clock = Clock()
                examples = self._examples_of(step)
                rollout = self._sample(examples, c.num_generations, step)
                rewards = self._reward(rollout, examples, c.num_generations)
                self.directory.record_completions("step", step, completion_rows(examples, rollout, rewards))
                clock.lap("rollout")

                batch = make_batch(rollout.tokens, rewards.to(self.policy.device), rollout.truncated, c)
                batch = with_reference(self.policy, batch, c, self.budget)
                clock.lap("reference")

                for _ in range(c.num_iterations):
                    batch, sums = backward(self.policy, batch, self.objective, c, self.budget)
                    grad_norm = apply_update(self.optimizer, c, step)
                clock.lap("update")

                self._report(step_metrics(c, step, batch, sums, grad_norm, clock))
                if step == c.max_steps or (c.eval_steps and step % c.eval_steps == 0):
                    self._evaluate(step)
                if step == c.max_steps or step % c.save_steps == 0:
                    self._save(step)
        save_result(self.directory.path / self.result, self.policy.model, self.policy.tokenizer)

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
            rollout = self._sample(examples, c.eval_samples, -1 - first)
            rows += completion_rows(examples, rollout, self._reward(rollout, examples, c.eval_samples))
            self.directory.record_completions("eval", step, rows)
        if rows:
            success = sum(row["reward"] == 1 for row in rows) / len(rows)
            self.directory.record("evaluations", {"step": step, "samples": len(rows), "success": success})
            self.say(f"held-out success after step {step}: {success:.3f} ({len(rows)} samples)")

    def _save(self, step: int) -> None:
        position = step * self.config.prompts_per_step
        save_checkpoint(self.directory.checkpoints, step, position, self.policy.model, self.optimizer, self.named)

    def _encode(self, examples: list[Example], name: str) -> list[Prompt]:
        """Prompts as token ids; those longer than `max_prompt_length` are left out and counted."""
        try:
            encoded = [Prompt(e, prompt_ids(self.policy.tokenizer, e.question, self.config)) for e in examples]
        except TemplateError as error:
            raise ConfigError(f"chat_template: {error}") from None
        if not all(prompt.ids for prompt in encoded):
            raise ConfigError("chat_template: renders a prompt without any token")
        kept = [prompt for prompt in encoded if len(prompt.ids) <= self.config.max_prompt_length]
        if len(kept) < len(encoded):
            self.say(f"{len(encoded) - len(kept)} of {len(encoded)} {name} prompts exceed max_prompt_length, left out")
        return kept

    def _examples_of(self, step: int) -> list[Prompt]:
        """The step's prompts: each epoch is its own permutation of the training prompts, cut into steps."""
        size, count = len(self.prompts), self.config.prompts_per_step
        places = range((step - 1) * count, step * count)
        orders = {epoch: _permutation(size, self.config.seed, epoch) for epoch in {place // size for place in places}}
        return [self.prompts[orders[place // size][place % size]] for place in places]

    def _sample(self, prompts: list[Prompt], group_size: int, stream: int) -> Rollout:
        seed = derived_seed(self.config.seed, stream)
        ids = [prompt.ids for prompt in prompts]
        return sample(self.policy, ids, group_size, self.config.max_completion_length, seed)

    def _reward(self, rollout: Rollout, prompts: list[Prompt], group_size: int) -> torch.Tensor:
        golds = [prompt.example.answer for prompt in prompts for _ in range(group_size)]
        given_up = self.grader.timeouts
        rewards = torch.tensor(self.grader(rollout.texts, golds))
        if self.grader.timeouts > given_up:
            self.say(f"{self.grader.timeouts - given_up} answers could not be judged in time and count as wrong")
        return rewards

    def _report(self, metrics: dict[str, Any]) -> None:
        self.directory.record("metrics", metrics)
        self.display.step(metrics)
        self.pairs_seen += metrics["pairs"]
        if self.config.lambda_reg > 0 and metrics["step"] == NO_PAIR_STEPS and self.pairs_seen == 0:
            self.say(
                f"warning: lambda_reg = {self.config.lambda_reg} but no pair was formed in {NO_PAIR_STEPS} steps: all "
                "rewards of each group lie within reward_margin, so the pair term trains nothing"
            )


def prompt_ids(tokenizer: Any, question: str, config: RunConfig) -> list[int]:
    """The question as the chat template renders it, ready for the answer; without a template, as it stands."""
    if tokenizer.chat_template is None:
        if config.system_prompt is not None:
            raise ConfigError(f"system_prompt = {config.system_prompt!r}: the model has no chat template to put it in")
        return tokenizer(question)["input_ids"]
    messages = [{"role": "user", "content": question}]
    if config.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def completion_rows(prompts: list[Prompt], rollout: Rollout, rewards: torch.Tensor) -> list[dict[str, Any]]:
    """What is kept of each completion; the prompts' completions stand side by side."""
    size = len(rollout.texts) // len(prompts)
    lengths = rollout.tokens.completion_mask.sum(1).tolist()
    return [
        {
            "question": prompts[row // size].example.question,
            "answer": prompts[row // size].example.answer,
            "completion": text,
            "reward": float(rewards[row]),
            "tokens": lengths[row],
            "truncated": bool(rollout.truncated[row]),
        }
        for row, text in enumerate(rollout.texts)
    ]


def derived_seed(seed: int, stream: int) -> int:
    """A seed of its own for each stream of a run (a step, an evaluation), so that resuming needs no sampler state."""
    return random.Random(f"{seed}/{stream}").getrandbits(63)


def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed}/epoch {epoch}").sample(range(size), size)
