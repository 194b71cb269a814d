"""What is checked of a run before the weights are loaded: its data, prompts, rewards and model configuration.

`amir train RUN --check` reports all of it. Every run makes the checks that take seconds before it loads the weights.
"""

import math
from collections.abc import Callable, Iterator
from statistics import median

from ..config import RunConfig
from ..errors import ConfigError, RewardError, RunStopped
from ..policy.load import load_without_weights
from ..policy.policy import Policy
from ..rewards import Rewards
from ..rollout.samplers import server_state
from ..tasks import Example, Task
from ..tasks.prompts import Prompt, describe_prompts, encode_prompts, refuse_foreign_tokenizer, refuse_missing_prompts


def refuse_without_weights(config: RunConfig, task: Task) -> None:
    """ConfigError for a model that cannot be trained, or for prompts that the run would refuse.

    One prompt within the run's bounds is enough, unless overlong prompts are refused, which every prompt may be.
    """
    limit = None if config.overlong_prompts == "refuse" else 1
    for _ in _prompts(config, task, load_without_weights(config), lambda text: None, limit):
        pass


def findings(config: RunConfig, task: Task, rewards: Rewards) -> Iterator[str]:
    """The lines of the check; ConfigError for what the run would refuse. `rewards` are closed by the caller."""
    yield f"data: {len(task.train)} training examples, {len(task.held_out)} held out"
    yield from task.notes
    policy = load_without_weights(config)
    base = policy.base
    trained = sum(p.numel() for p in policy.trainable().values())
    yield (
        f"model: {type(base).__name__}, {policy.vocabulary_size} tokens, {base.num_parameters() / 1e6:,.1f} million "
        f"weights with the adapter's, {trained / 1e6:,.2f} million of them trained"
    )
    yield from policy.notes
    notes: list[str] = []
    for name, prompts in _prompts(config, task, policy, notes.append):
        lengths = [len(prompt.ids) for prompt in prompts]
        yield (
            f"{name} prompts: {len(prompts)}, {min(lengths)} to {max(lengths)} tokens (median {median(lengths):g}), "
            f"of at most {config.max_prompt_length}"
        )
        if name == "training":
            steps = math.ceil(len(prompts) / config.prompts_per_step)
            yield f"steps: {config.max_steps}; one pass over the training prompts takes {steps}"
            notes += [*describe_prompts(prompts, policy.tokenizer, config), *rewards.notes]
    yield from notes
    yield from server_state(config, policy)
    yield from _graded(task.train[0], policy, rewards)


def _prompts(
    config: RunConfig, task: Task, policy: Policy, log: Callable[[str], None], limit: int | None = None
) -> Iterator[tuple[str, list[Prompt]]]:
    """The training and held-out prompts as the run would encode them, at most `limit` of each."""
    special = [policy.pad_id, *policy.eos_ids]
    refuse_foreign_tokenizer(policy.tokenizer, special, policy.vocabulary_size)
    bounds = {"training": limit, "held-out": config.eval_prompts if limit is None else min(limit, config.eval_prompts)}
    prompts = {
        name: encode_prompts(
            examples, policy.tokenizer, config, name, policy.vocabulary_size, log, bounds[name], policy.eos_ids
        )
        for name, examples in (("training", task.train), ("held-out", task.held_out))
    }
    refuse_missing_prompts(prompts["training"], prompts["held-out"], task, config)
    yield from ((name, encoded) for name, encoded in prompts.items() if encoded)


def _graded(example: Example, policy: Policy, rewards: Rewards) -> Iterator[str]:
    """What each reward gives to a completion that consists of an example's own answer."""
    text = f"\\boxed{{{example.answer}}}" if example.answer is not None else ""
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    try:
        scores = rewards([example], [text], [ids])
    except (RewardError, RunStopped) as error:
        raise ConfigError(f"rewards: {error}") from None
    shown = {name: values[0] for name, values in zip(rewards.names, scores.values, strict=True)}
    values = ", ".join(f"{name} {'none' if math.isnan(value) else f'{value:g}'}" for name, value in shown.items())
    yield f"rewards of the completion {text!r:.80} to the first example: {values}"
    yield from scores.notes
    if shown.get("correctness") == 0:
        yield (
            f"warning: correctness gives 0 to the answer {example.answer!r:.80} of the first example itself; see "
            "task.answer and task.answer_format"
        )
