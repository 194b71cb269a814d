"""A whole training step beside TRL's GRPOTrainer on a CPU: sampling, rewards, forward, backward, optimizer.

`trl` and `amir` do the same work: plain GRPO (dapo's token mean, no KL) on the same weights, prompts, rewards and
micro-batch of as many tokens: two groups fit where TRL has eight padded completions, since a prompt is computed once.
`amir-completions` has as many completions in a micro-batch as TRL instead, so fewer tokens. `amir-pairs` adds the pair
term and its reference log-probs; `trl-checkpointing` is `trl` with gradient checkpointing, TRL's default.

Each measurement has its own process, because peak memory belongs to a process, and the contenders take turns. A group
whose rewards are all equal has no training signal: amir leaves it out of the update, and TRL computes zero gradients.
The case has the number of such groups; `--random-rewards` makes them rare.

Parts of a step, by wrapping each trainer's own functions: rollout (sampling and rewards), scoring (passes without
gradient, for old or reference log-probs), forward, backward (including the recomputation of checkpointing).
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from amir.config import ArithmeticTask, Gsm8kTask, LoraSettings, RunConfig
from amir.policy.smollm2 import MODEL_NAME, smollm2_folder
from amir.rewards import Correctness
from amir.tasks import Example, arithmetic, gsm8k
from machine import row_origin
from rows import keep, timing

CONTENDERS = ("trl", "trl-checkpointing", "amir", "amir-pairs", "amir-completions")
RIVAL = "trl"
GROUP, MICRO_BATCH = 8, 8
LEARNING_RATE = 1e-5
SEED = 0
MAX_LENGTH_RATIO = 1.25
"""Mean completion lengths further apart than this are not the same work."""
QUIET_LOAD = 0.5
TASK = ArithmeticTask(name="arithmetic", max_operand=9)
WORKED_EXAMPLE = """She sold 48 clips in April. In May she sold half as many, which is 48 / 2 = 24 clips. Together that
is 48 + 24 = 72 clips. The answer is 72."""


@dataclass(frozen=True)
class Workload:
    """The questions, and the lengths of prompts and completions."""

    name: str
    prompts: int  # a step
    new_tokens: int


WORKLOADS = {
    "sums": Workload("one-digit sums", prompts=4, new_tokens=24),
    "gsm8k": Workload("GSM8K with a worked example before each question", prompts=2, new_tokens=100),
}


@dataclass(frozen=True)
class Settings:
    """The settings that all measurements of a run share."""

    steps: int
    threads: int
    random_rewards: bool
    workload: Workload = WORKLOADS["sums"]


@dataclass(frozen=True)
class Completion:
    """One sampled completion."""

    question: str
    reward: float
    tokens: int


@dataclass(frozen=True)
class Measurement:
    """One process's timed steps; the warm-up step is in none of the lists."""

    seconds: list[float]
    cpu_seconds: list[float]
    sampling_seconds: list[float]
    peak_memory_mb: float
    completions: list[list[Completion]]  # a list a step, each prompt's completions side by side
    parts: list[dict[str, float]]  # seconds by name, of each step
    prompt_tokens: float  # mean

    def flat(self) -> list[Completion]:
        """The completions of all steps."""
        return [completion for step in self.completions for completion in step]


def main() -> int:
    """Measures the contenders in turns, prints and keeps a row of each; returns 2 if TRL is missing."""
    options = parse_arguments()
    if any(contender.startswith("trl") for contender in options.contenders) and importlib.util.find_spec("trl") is None:
        print("bench_step: TRL is not installed: pip install -c constraints.txt -e '.[bench]'", file=sys.stderr)
        return 2
    settings = Settings(options.steps, options.threads, options.random_rewards, WORKLOADS[options.workload])
    prepare_environment(settings)
    console = Console(width=120)
    measured: dict[str, list[Measurement]] = {contender: [] for contender in options.contenders}
    for turn in range(options.rounds):
        for contender in options.contenders:
            measured[contender].append(measure_apart(contender, settings))
            latest = measured[contender][-1]
            spent = ", ".join(f"{s:.1f} ({c:.1f})" for s, c in zip(latest.seconds, latest.cpu_seconds, strict=True))
            console.print(f"round {turn + 1}, {contender}: {spent} seconds (CPU seconds) a step")
    refuse_other_work(measured)
    rows = make_rows(measured, settings)
    console.print(printed(rows, measured))
    if options.keep:
        origin = row_origin()
        for row in rows:
            path = keep(row | origin)
        console.print(f"kept in {path}")
    return 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--workload", choices=WORKLOADS, default="sums")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contender")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a process, after one warm-up step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--random-rewards",
        action="store_true",
        help="random rewards of 0 or 1, so that nearly every group has a training signal",
    )
    parser.add_argument("--no-keep", dest="keep", action="store_false", help="print only")
    return parser.parse_args(arguments)


def prepare_environment(settings: Settings) -> None:
    """Same threads and no network for every process started from here; warns if the machine is busy."""
    os.environ |= {"OMP_NUM_THREADS": str(settings.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(settings.threads)
    load = os.getloadavg()[0]
    if load > QUIET_LOAD:
        print(f"bench_step: the load is {load:.1f}: something else is running, the times will not count")


def measure_apart(contender: str, settings: Settings) -> Measurement:
    """`measure` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, contender, settings).result()


def measure(contender: str, settings: Settings) -> Measurement:
    """One warm-up step and the timed ones of a contender, in this process."""
    from transformers.utils import logging

    warnings.simplefilter("ignore", FutureWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(settings.threads)
    run = run_trl if contender.startswith("trl") else run_amir
    with tempfile.TemporaryDirectory() as folder:
        return run(contender, settings, Path(folder))


class Laps:
    """Wall and CPU seconds between the ends of consecutive steps, and the memory gained since the model was loaded."""

    def __init__(self) -> None:
        self._resident = psutil.Process().memory_info().rss
        self._ends: list[tuple[float, float]] = []
        self._parts: list[Counter[str]] = [Counter()]

    def end_step(self) -> None:
        """To be called at the end of every step, the warm-up step included."""
        self._ends.append((time.perf_counter(), time.process_time()))
        self._parts.append(Counter())

    def watch(self, owner: Any, function: str, part: Callable[[], str]) -> None:
        """Adds the time of every call of `owner.function` to the step's part of the name that `part()` gives."""
        original = getattr(owner, function)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*arguments, **keywords)
            finally:
                self._parts[-1][part()] += time.perf_counter() - began  # type: ignore[assignment]

        setattr(owner, function, timed)

    def measurement(
        self, sampling_seconds: list[float], completions: list[list[Completion]], prompt_tokens: float
    ) -> Measurement:
        """The measurement; its lists have one item per step, the warm-up step included."""
        wall, cpu = ([b - a for a, b in pairwise(ends)] for ends in zip(*self._ends, strict=True))
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        parts = [
            {"rollout": rollout} | dict(part) for rollout, part in zip(sampling_seconds, self._parts, strict=False)
        ]
        memory = (peak - self._resident) / 1e6
        return Measurement(wall, cpu, sampling_seconds[1:], memory, completions[1:], parts[1:], prompt_tokens)


def pass_name() -> str:
    """The part that a pass of the model belongs to."""
    return "forward" if torch.is_grad_enabled() else "scoring"


def run_trl(contender: str, settings: Settings, folder: Path) -> Measurement:
    """TRL's GRPOTrainer."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    config = trl_config(contender, settings, folder)
    model, tokenizer = load_model()
    laps = Laps()
    laps.watch(GRPOTrainer, "_get_per_token_logps_and_entropies", pass_name)
    laps.watch(torch.autograd, "backward", lambda: "backward")
    sampled: list[list[Completion]] = []
    sampling_seconds: list[float] = []
    began = 0.0

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            laps.end_step()

    def reward(prompts: Any, completions: Any, completion_ids: Any, answer: list[str], **_: Any) -> list[float]:
        rewards = grade([messages[-1]["content"] for messages in completions], answer)
        fields = zip(prompts, rewards, completion_ids, strict=True)
        sampled.append([Completion(messages[-1]["content"], r, len(ids)) for messages, r, ids in fields])
        sampling_seconds.append(time.perf_counter() - began)
        return rewards

    with make_grader(settings) as grade:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": e.question}], "answer": e.answer} for e in examples(settings)]
            ),
            peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[Steps()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    questions = [[{"role": "user", "content": example.question}] for example in examples(settings)]
    rendered = tokenizer.apply_chat_template(questions, tokenize=False, add_generation_prompt=True)
    lengths = [len(ids) for ids in tokenizer(rendered, add_special_tokens=False)["input_ids"]]
    return laps.measurement(sampling_seconds, sampled, statistics.fmean(lengths))


def trl_config(contender: str, settings: Settings, folder: Path) -> Any:
    """TRL's settings, without options that cost time."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=contender == "trl-checkpointing",
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=settings.workload.prompts * GROUP // MICRO_BATCH,
        num_generations=GROUP,
        max_completion_length=settings.workload.new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=1 + settings.steps,
        shuffle_dataset=False,
        seed=SEED,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def run_amir(contender: str, settings: Settings, folder: Path) -> Measurement:
    """Our trainer."""
    from amir.policy.load import wrap_policy
    from amir.policy.policy import Policy
    from amir.run.directory import RunDirectory
    from amir.run.display import NullDisplay
    from amir.tasks import Task
    from amir.tasks.prompts import Prompt, prompt_ids
    from amir.trainer import Trainer

    class InOrder(Trainer):
        """Takes the prompts in their order, as TRL does with `shuffle_dataset=False`."""

        def _next_prompts(self, count: int) -> list[Prompt]:
            self.data_position += count
            return self.prompts[self.data_position - count : self.data_position]

    class Steps(NullDisplay):
        """Ends the measurement of a step."""

        def step(self, metrics: dict[str, Any]) -> None:
            laps.end_step()
            sampling_seconds.append(metrics["rollout_seconds"] + metrics["reward_seconds"])

        def message(self, text: str) -> None:
            print(text)

    model, tokenizer = load_model()
    laps = Laps()
    for function in ("logprobs", "logprobs_entropy"):
        laps.watch(Policy, function, pass_name)
    laps.watch(torch.autograd, "backward", lambda: "backward")
    sampling_seconds: list[float] = []
    task = Task(examples(settings), [])
    config = amir_config(contender, settings, folder)
    lengths = [len(prompt_ids(tokenizer, example, config)) for example in task.train]
    prompts = 1 if contender == "amir-completions" else MICRO_BATCH
    budget = prompts * max(lengths) + MICRO_BATCH * settings.workload.new_tokens
    config = config.model_copy(update={"micro_batch_tokens": budget})
    directory = RunDirectory(folder / "run", config, resume=False)
    trainer = InOrder(config, wrap_policy(model, tokenizer, config), task, directory, Steps())
    trainer.rewards.correctness = make_grader(settings)
    trainer.train()
    directory.close()
    return laps.measurement(sampling_seconds, recorded_completions(directory.path), statistics.fmean(lengths))


def amir_config(contender: str, settings: Settings, folder: Path) -> RunConfig:
    """Our settings, equal to those of `trl_config`."""
    return RunConfig(
        model=MODEL_NAME,
        device="cpu",
        dtype="float32",
        lora=LoraSettings(r=16, alpha=16),
        task=TASK,
        prompts_per_step=settings.workload.prompts,
        num_generations=GROUP,
        max_completion_length=settings.workload.new_tokens,
        loss_type="dapo",
        lambda_reg=0.01 if contender == "amir-pairs" else 0.0,
        learning_rate=LEARNING_RATE,
        max_steps=1 + settings.steps,
        save_steps=1 + settings.steps,
        output_dir=str(folder / "run"),
        seed=SEED,
    )


def recorded_completions(run: Path) -> list[list[Completion]]:
    """The completions of each step, from the run directory."""
    files = sorted((run / "completions").glob("step-*.jsonl"))
    steps = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[Completion(row["question"], row["reward"], row["tokens"]) for row in step] for step in steps]


def load_model() -> tuple[Any, Any]:
    """The model in float32 and its tokenizer, the same for every contender."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer


def examples(settings: Settings) -> list[Example]:
    """Questions for the warm-up step and the timed ones, in a fixed order."""
    count, draw = settings.workload.prompts * (1 + settings.steps), random.Random(SEED)
    if settings.workload == WORKLOADS["sums"]:
        return draw.sample(arithmetic.load(TASK).train, count)
    shown, *asked = gsm8k.load(Gsm8kTask(name="gsm8k", path="sample")).train
    before = f"Question: {shown.question}\nAnswer: {WORKED_EXAMPLE}\n\nQuestion: "
    return [replace(example, question=before + example.question) for example in draw.sample(asked, count)]


class Lots(Correctness):
    """Random rewards of 0 or 1, the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(SEED)

    def __call__(self, completions: list[str], golds: list[str]) -> list[float]:
        """A reward for each completion, independent of its text."""
        return [float(self._random.random() < 0.5) for _ in completions]


def make_grader(settings: Settings) -> Correctness:
    """1 if the last number is right, otherwise 0; or random rewards."""
    return Lots() if settings.random_rewards else Correctness()


def refuse_other_work(measured: dict[str, list[Measurement]]) -> None:
    """ValueError if contenders did not do the same work: other questions, or mean lengths that differ too much."""
    questions = {name: [[c.question for c in m.flat()] for m in ms] for name, ms in measured.items()}
    lengths = {name: mean_tokens(ms) for name, ms in measured.items()}
    first, *others = measured
    for name in others:
        if questions[name] != questions[first]:
            raise ValueError(f"{name} and {first} did not answer the same questions equally often")
        if max(lengths[name], lengths[first]) > MAX_LENGTH_RATIO * min(lengths[name], lengths[first]):
            raise ValueError(
                f"mean tokens of a completion: {lengths[name]:.1f} for {name}, {lengths[first]:.1f} for {first}; "
                f"expected within a factor of {MAX_LENGTH_RATIO}"
            )


def mean_tokens(measurements: list[Measurement]) -> float:
    """Mean tokens of a completion."""
    return statistics.fmean(c.tokens for m in measurements for c in m.flat())


def groups_without_signal(measurements: list[Measurement]) -> tuple[int, int]:
    """The number of groups whose rewards are all equal, and of all groups."""
    completions = [c for m in measurements for c in m.flat()]
    groups = [completions[i : i + GROUP] for i in range(0, len(completions), GROUP)]
    return sum(len({c.reward for c in group}) == 1 for group in groups), len(groups)


def make_rows(measured: dict[str, list[Measurement]], settings: Settings) -> list[dict[str, Any]]:
    """One row per contender, without machine, versions and date."""
    times = {name: timing([s for m in ms for s in m.seconds]) for name, ms in measured.items()}
    rows = []
    for name, measurements in measured.items():
        compared = name != RIVAL and RIVAL in times
        rows.append(
            {
                "bench": "step",
                "contender": name,
                "workload": workload(settings),
                "case": case(measurements, settings),
                "seconds": times[name],
                "peak_memory_mb": round(max(m.peak_memory_mb for m in measurements), 1),
                "ratio_to": RIVAL if compared else None,
                "ratio": times[name]["median"] / times[RIVAL]["median"] if compared else None,
                "parts": parts_of(measurements),
                "observed": observed(measurements),
            }
        )
    return rows


def parts_of(measurements: list[Measurement]) -> dict[str, float]:
    """Median seconds of each part of a step; 0 for a part that a step does not have."""
    steps = [step for m in measurements for step in m.parts]
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: round(statistics.median(step.get(name, 0.0) for step in steps), 3) for name in names}


def workload(settings: Settings) -> dict[str, Any]:
    """The workload of a row."""
    return {
        "model": "SmolLM2-135M",
        "dtype": "float32",
        "lora_r": 16,
        "task": settings.workload.name,
        "prompts": settings.workload.prompts,
        "group_size": GROUP,
        "max_completion_tokens": settings.workload.new_tokens,
        "micro_batch_rows": MICRO_BATCH,
        "reward": "random" if settings.random_rewards else "last number right",
    }


def observed(measurements: list[Measurement]) -> dict[str, Any]:
    """Counts and means of the measured steps."""
    without_signal, groups = groups_without_signal(measurements)
    return {
        "mean_completion_tokens": round(mean_tokens(measurements), 1),
        "groups": groups,
        "groups_without_signal": without_signal,
        "mean_prompt_tokens": round(statistics.fmean(m.prompt_tokens for m in measurements)),
    }


def case(measurements: list[Measurement], settings: Settings) -> str:
    """The case in words."""
    without_signal, groups = groups_without_signal(measurements)
    work, prompt_tokens = settings.workload, statistics.fmean(m.prompt_tokens for m in measurements)
    rewards = "random rewards" if settings.random_rewards else "reward: last number right"
    return (
        f"SmolLM2-135M float32, LoRA r 16, {work.name} (mean {prompt_tokens:.0f} tokens), {work.prompts} x {GROUP} "
        f"completions of up to {work.new_tokens} tokens (mean {mean_tokens(measurements):.1f}), micro-batch "
        f"{MICRO_BATCH}, {rewards}, {without_signal} of {groups} groups without training signal"
    )


def printed(rows: list[dict[str, Any]], measured: dict[str, list[Measurement]]) -> Table:
    """The rows as a table, with CPU seconds and memory of each contender."""
    table = Table("contender", "step s", "min to max", "n", "of trl", "CPU s", "parts, s", "peak MB", "of trl")
    memory = {row["contender"]: row["peak_memory_mb"] for row in rows}
    for row in rows:
        name, seconds = row["contender"], row["seconds"]
        table.add_row(
            name,
            f"{seconds['median']:.2f}",
            f"{seconds['min']:.2f} to {seconds['max']:.2f}",
            str(seconds["n"]),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{statistics.median(s for m in measured[name] for s in m.cpu_seconds):.2f}",
            ", ".join(f"{part} {value:.2f}" for part, value in row["parts"].items()),
            f"{memory[name]:,.0f}",
            "" if row["ratio"] is None else f"{memory[name] / memory[RIVAL]:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
