"""One micro-batch's loss and gradient in TRL's GRPOTrainer, with its own head and with ours, on SmolLM2-135M.

Both trainers get the same completions and advantages, some of them 0 as in a group of equal rewards; losses and
gradients are compared before anything is timed. `log-probs` is the pass without gradient, which computes old and
reference log-probs. Memory is the growth of the peak. Contenders take turns.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from amir_kernels.integrations.trl import grpo_trainer
from machine import row_origin
from meter import measure
from rows import keep, timing

ROWS = 8
DEAD = (0, 6)
"""of ROWS"""
RIVAL, OURS = "GRPOTrainer", "grpo_trainer()"


class Size(NamedTuple):
    """A micro-batch."""

    rows: int
    prompt: int
    completion: int
    """tokens"""

    def __str__(self) -> str:
        return f"{self.rows} x ({self.prompt} + {self.completion}) tokens"


SIZE = Size(ROWS, 16, 48)


def main() -> None:
    """Measures every case, prints and keeps its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each contender and case")
    parser.add_argument("--no-keep", dest="keep", action="store_false", help="print only")
    options = parser.parse_args()
    origin = row_origin()
    with tempfile.TemporaryDirectory() as folder:
        trainers = make_trainers(Path(folder), smollm2, smollm2_tokenizer())
        for row in measure_cases(trainers, options.repeats):
            print(f"{row['case']}, {row['contender']}: {row['seconds']['median']:.2f} s, {row['peak_memory_mb']} MB")
            if options.keep:
                keep(row | origin)


def smollm2() -> Any:
    """The packaged model."""
    from transformers import AutoModelForCausalLM

    from amir.policy.smollm2 import smollm2_folder

    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)


def smollm2_tokenizer() -> Any:
    """Its tokenizer."""
    from transformers import AutoTokenizer

    from amir.policy.smollm2 import smollm2_folder

    return AutoTokenizer.from_pretrained(smollm2_folder(), padding_side="left")


def make_trainers(folder: Path, make_model: Callable[[], Any], tokenizer: Any, *, bf16: bool = False) -> dict[str, Any]:
    """TRL's trainer unchanged, and with our head: the same weights and LoRA."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available(),
        bf16=bf16,
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
        num_generations=ROWS,
        beta=0.0,
        report_to="none",
    )
    trainers = {}
    for name, trainer_class in ((RIVAL, GRPOTrainer), (OURS, grpo_trainer())):
        torch.manual_seed(0)
        trainers[name] = trainer_class(
            model=make_model(),
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["1 + 1"]}),
            peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainers[name].current_gradient_accumulation_steps = 1
    return trainers


def inputs_of(trainer: Any, dead: int, size: Size) -> dict[str, Any]:
    """A micro-batch as the trainer's own sampling would give it: random tokens, advantages +1 and -1."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        trainer.model.config.vocab_size, (size.rows, size.prompt + size.completion), generator=generator
    )
    advantages = torch.tensor([1.0, -1.0]).repeat(size.rows // 2)
    advantages[:dead] = 0
    mask = torch.ones_like(ids)
    inputs = {
        "prompt_ids": ids[:, : size.prompt],
        "prompt_mask": mask[:, : size.prompt],
        "completion_ids": ids[:, size.prompt :],
        "completion_mask": mask[:, size.prompt :],
        "advantages": advantages,
        "num_items_in_batch": mask[:, size.prompt :].sum(),
    }
    return {name: value.to(trainer.accelerator.device) for name, value in inputs.items()}


def train(trainer: Any, dead: int = 0, size: Size = SIZE) -> list[torch.Tensor]:
    """Loss and gradients of the adapter."""
    loss = trainer._compute_loss(trainer.model, inputs_of(trainer, dead, size))
    loss.backward()
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    trainer.model.zero_grad()
    return [loss.detach(), *gradients]


def score(trainer: Any, size: Size = SIZE) -> list[torch.Tensor]:
    """Log-probs of the completions without gradient."""
    inputs = inputs_of(trainer, 0, size)
    whole = [torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")]
    with torch.no_grad():
        return [trainer._get_per_token_logps_and_entropies(trainer.model, *whole, size.completion)[0]]


def measure_cases(trainers: dict[str, Any], repeats: int) -> list[dict]:
    """Rows of every case and contender."""
    cases: dict[tuple[str, int], Callable[[Any], list[torch.Tensor]]] = {("log-probs", 0): score}
    cases |= {("loss and gradient", dead): partial(train, dead=dead) for dead in DEAD}
    rows = []
    for (name_of_work, dead), work in cases.items():
        workload = {
            "model": "SmolLM2-135M",
            "dtype": "float32",
            "lora_r": 16,
            "completions": SIZE.rows,
            "prompt_tokens": SIZE.prompt,
            "completion_tokens": SIZE.completion,
            "work": name_of_work,
            "zero_advantage_rows": dead,
        }
        case = name_of_work if work is score else f"{name_of_work}, {dead} of {ROWS} rows with advantage 0"
        theirs, ours = (work(trainers[name]) for name in (RIVAL, OURS))  # also their warm-up
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        peaks: dict[str, list[float]] = {name: [] for name in trainers}
        for _ in range(repeats):
            for name, trainer in trainers.items():
                elapsed, peak_mb, _ = measure(partial(work, trainer), trainer.accelerator.device)
                seconds[name].append(elapsed)
                peaks[name] += [] if peak_mb is None else [round(peak_mb, 1)]
        timings = {name: timing(values) for name, values in seconds.items()}
        rows += [
            {
                "bench": "trl",
                "contender": name,
                "workload": workload,
                "case": f"SmolLM2-135M, {SIZE}, float32, LoRA r 16, {case}",
                "seconds": timings[name],
                "peak_memory_mb": max(peaks[name], default=None),
                "ratio_to": None if name == RIVAL else RIVAL,
                "ratio": None if name == RIVAL else timings[name]["median"] / timings[RIVAL]["median"],
            }
            for name in trainers
        ]
    return rows


if __name__ == "__main__":
    main()
