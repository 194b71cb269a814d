"""TRL's `GRPOTrainer` with its own head and with ours, on random weights: the same loss and gradients, and seconds."""

import importlib.util
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bench_trl
from bench_memory import Setting
from meter import measure

from .judging import relative_difference
from .rates import predict, rates_of
from .real_model import body_weights, dtype_of, make_model, small_tokenizer
from .sizes import Sizes
from .stage import Part, Ratio, Row, make_row, not_run

AGREEMENT = 0.05
"""Relative difference in norm of loss and gradients."""


def parts(sizes: Sizes) -> list[Part]:
    """One part: TRL is missing, or everything is measured."""
    return [Part("TRL", partial(beside_trl, sizes), 30)]


def beside_trl(sizes: Sizes) -> Iterator[Row]:
    """A micro-batch's loss and gradient, and the pass without gradient, by both trainers in turns."""
    missing = [name for name in ("trl", "datasets", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        yield not_run("grpo_trainer()", "TRL's trainer", f"not installed: {', '.join(missing)}")
        return
    setting = Setting(sizes.drop_in_model)
    prompt, completion = sizes.drop_in_tokens
    with tempfile.TemporaryDirectory() as folder:
        trainers = bench_trl.make_trainers(
            Path(folder),
            lambda: make_model(setting, sizes),
            small_tokenizer(make_vocabulary(setting)),
            bf16=sizes.dtype == torch.bfloat16,
        )
        size = bench_trl.Size(bench_trl.ROWS, prompt, completion)
        for work, run in (("loss and gradient", bench_trl.train), ("log-probs", bench_trl.score)):
            names = {"check": "time", "work": work, "model": setting.model, "dtype": dtype_of(sizes)}
            workload = names | size._asdict()
            case = f"{setting.model}, {size}, {work}"
            expected = predict(rates_of(sizes), flops=operations(trainers[bench_trl.OURS].model, size, run))
            yield from both(sizes, trainers, partial(run, size=size), case, workload, expected)


def make_vocabulary(setting: Setting) -> int:
    """Tokens of the model."""
    from bench_memory import model_config

    return model_config(setting).vocab_size


def operations(model: torch.nn.Module, size: bench_trl.Size, work: object) -> int:
    """2 for a token and a weight of the body, 2 more in the backward; 2 H V for a completion token, 6 with it."""
    trained = work is bench_trl.train
    head = model.get_output_embeddings().weight.numel()  # type: ignore[operator]
    body = body_weights(model) * size.rows * (size.prompt + size.completion)
    return (4 if trained else 2) * body + (6 if trained else 2) * head * size.rows * size.completion


def both(
    sizes: Sizes,
    trainers: dict[str, Any],
    work: "partial[list[torch.Tensor]]",
    case: str,
    workload: dict[str, Any],
    expected: dict[str, float],
) -> Iterator[Row]:
    """Agreement, then seconds and memory of each."""
    results = {name: work(trainer) for name, trainer in trainers.items()}
    theirs, ours = results[bench_trl.RIVAL], results[bench_trl.OURS]
    flat = [torch.cat([value.double().flatten() for value in values]) for values in (ours, theirs)]
    agreement = Ratio(bench_trl.RIVAL, relative_difference(*flat), AGREEMENT)
    yield make_row(bench_trl.OURS, f"{case}: agreement", workload | {"check": "agreement"}, ratio=agreement)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    peaks: dict[str, float | None] = {}
    for _ in range(max(2, sizes.repeats // 2)):
        for name, trainer in trainers.items():
            elapsed, peaks[name], _ = measure(partial(work, trainer), torch.device(sizes.device))
            seconds[name].append(elapsed)
    for name in trainers:
        yield make_row(name, case, workload, seconds=seconds[name], memory=peaks[name], expected=expected)
