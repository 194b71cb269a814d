"""The ops on a GPU: numerics against float64, batch invariance, times and memory beside the peers; under 8 minutes.

    PYTHONPATH=kernels python bench/gpu_check.py --out rows.jsonl

Each stage has its own process, so a crash or a bad state of the GPU costs one stage only. A peer that is missing or
fails, and a stage that does not fit into the time budget, becomes a row with the reason. A case that ends in
"; at most x" has the bound x for its `ratio`. `--rehearse` runs everything on a CPU with tiny sizes: kernels in
Triton's interpreter, times with the torch backend; its figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amir_kernels import (
    group_advantage,
    linear_logprob,
    linear_logprob_entropy,
    linear_policy_loss,
    policy_loss,
    preference_loss,
    reference,
)
from amir_kernels._backend import interpreting
from amir_kernels._interpreter import use_torch_products
from contenders import (
    Contender,
    HeadSize,
    Problem,
    cut_cross_entropy,
    full_logits,
    gradients,
    liger,
    make_problem,
    ours,
    ours_fused,
    trl_chunked,
    trl_default_chunk,
    verl_triton,
)
from machine import birth_certificate
from meter import measure
from rows import timing

try:
    from triton.errors import TritonError
except ImportError:
    TritonError = RuntimeError

FAILURES = (RuntimeError, ImportError, ValueError, TypeError, AttributeError, KeyError, OSError, TritonError)
"""Errors of a peer or an op that become a row and do not end the stage."""
BUDGET_SECONDS = 460
LEAST_SECONDS = 15
"""A stage is not started with less time left in the budget."""
TURNS, SLOW_SECONDS, SLOW_TURNS = 7, 0.5, 2
LOGPROB_BOUND = {torch.float32: 1.5, torch.float16: 0.5, torch.bfloat16: 0.5}
"""Error of log-probs over that of eager torch in the same dtype."""
GRADIENT_BOUND = 1.5
AGREEMENT = 0.05
"""Largest relative difference, in norm, between a peer's bfloat16 gradients and ours."""
VERL_BOUND = 1 / 1.2
GOAL_TFLOPS = 600
MEMORY_BOUND_MB = 300
OWN = ("stage", "linear_logprob", "linear_policy_loss", "group_advantage", "preference_loss")
"""Contenders whose failure fails the check."""
GROUPS = ((4096, 16), (4096, 512), (65_536, 8))
"""(rows, group size)"""

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a check."""

    device: str
    backend: str
    """of the numerics"""
    heads: tuple[HeadSize, ...]
    tokens: tuple[int, ...]
    rows: int
    """of the numerics and the same bits"""
    dtypes: tuple[torch.dtype, ...]
    timed_dtype: torch.dtype
    groups: tuple[tuple[int, int], ...]


REAL = Sizes(
    "cuda",
    "triton",
    (HeadSize("Qwen2.5-7B", 3584, 152_064), HeadSize("Llama-3-8B", 4096, 128_256)),
    (8192, 16_384),
    300,
    (torch.bfloat16, torch.float16, torch.float32),
    torch.bfloat16,
    GROUPS,
)
REHEARSAL = Sizes(
    "cpu",
    "triton",
    (HeadSize("tiny", 32, 150),),
    (64,),
    20,
    (torch.float16, torch.float32),
    torch.float32,
    ((16, 4),),
)


def main() -> int:
    """Runs all stages or the selected ones, and prints the bounds; returns 1 if one is missed or a stage failed."""
    options = parse_arguments()
    sizes = REHEARSAL if options.rehearse else REAL
    stages = stages_of(sizes)
    if options.stage:
        run_stage(stages[options.stage], options.out)
        return 0
    if not options.rehearse and not torch.cuda.is_available():
        print("gpu_check: no GPU here; --rehearse runs everything tiny on the CPU", file=sys.stderr)
        return 2
    wanted = [name for name in stages if not options.stages or any(part in name for part in options.stages)]
    if not wanted:
        print(f"gpu_check: --stages names none of {', '.join(stages)}", file=sys.stderr)
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("")
    run_all(wanted, options)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    return report(rows, judged=not options.rehearse)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", ".")) / "gpu_check.jsonl"
    parser.add_argument("--out", type=Path, default=default, help="rows go here; by default into $OUT")
    parser.add_argument("--stages", nargs="*", help="only those whose names contain one of these")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for all stages")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def stages_of(sizes: Sizes) -> dict[str, Callable[[], Iterator[Row]]]:
    """The stages by name, the most informative first."""
    first, *other_dtypes = sizes.dtypes
    stages: dict[str, Callable[[], Iterator[Row]]] = {f"numerics {name_of(first)}": partial(numerics, sizes, first)}
    stages["same bits"] = partial(same_bits, sizes)
    for tokens in sizes.tokens:
        for head in sizes.heads:
            stages[f"times {head.name} {tokens}"] = partial(times, sizes, head, tokens)
        if tokens == sizes.tokens[0]:
            stages["groups"] = partial(groups, sizes)
            stages |= {f"numerics {name_of(dtype)}": partial(numerics, sizes, dtype) for dtype in other_dtypes}
    return stages


def name_of(dtype: torch.dtype) -> str:
    """ "bfloat16" and the like."""
    return str(dtype).removeprefix("torch.")


# ---- stages and their processes ------------------------------------------------------------------------------------


def run_all(wanted: Sequence[str], options: argparse.Namespace) -> None:
    """Each stage in a process, until the budget is spent."""
    began = time.perf_counter()
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if options.rehearse else {})
    for name in wanted:
        left = options.budget - (time.perf_counter() - began)
        if left < LEAST_SECONDS:
            write(options.out, [row_of("stage", f"{name}: dropped, the time is spent")])
            continue
        command = [sys.executable, __file__, "--stage", name, "--out", str(options.out)]
        command += ["--rehearse"] if options.rehearse else []
        started = time.perf_counter()
        try:
            done = subprocess.run(command, check=False, timeout=left, env=environment, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            write(options.out, [row_of("stage", f"{name}: stopped, the time is spent")])
            continue
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            write(options.out, [row_of("stage", f"{name}: failed: exit code {done.returncode}: {last}")])
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def run_stage(stage: Callable[[], Iterator[Row]], out: Path) -> None:
    """A stage in this process; each row is written as soon as it is known."""
    if interpreting():
        use_torch_products()
    for row in stage():
        write(out, [row])


def write(out: Path, rows: Sequence[Row]) -> None:
    """Appends rows with machine, versions, commit and date."""
    with out.open("a") as file:
        for row in rows:
            file.write(json.dumps(row | birth_certificate()) + "\n")


def row_of(
    contender: str,
    case: str,
    *,
    seconds: Sequence[float] = (),
    memory: float | None = None,
    ratio_to: str | None = None,
    ratio: float | None = None,
    at_most: float | None = None,
) -> Row:
    """A row without machine, versions, commit and date."""
    return {
        "bench": "gpu_check",
        "contender": contender,
        "workload": {"check": case},
        "case": case if at_most is None else f"{case}; at most {at_most:.3g}",
        "seconds": timing(seconds) if seconds else None,
        "peak_memory_mb": memory,
        "ratio_to": ratio_to,
        "ratio": ratio,
    }


def failure(contender: str, case: str, error: BaseException) -> Row:
    """A row with the error of a failed measurement."""
    message = (str(error).strip().splitlines() or [""])[0][:200]
    return row_of(contender, f"{case}: failed: {type(error).__name__}: {message}")


def report(rows: Sequence[Row], judged: bool) -> int:
    """Prints failures, and bounds if figures are `judged`; returns 1 if a bound is missed or an op of ours failed."""
    bad = 0
    for row in rows:
        case, _, bound = row["case"].partition("; at most ")
        if bound and judged:
            met = row["ratio"] <= float(bound)
            bad += not met
            verdict = "met" if met else "MISSED"
            print(f"{verdict:7} {row['ratio']:.3g} <= {bound}  {case}: {row['contender']} / {row['ratio_to']}")
        elif row["seconds"] is None and row["ratio"] is None:
            bad += row["contender"] in OWN
            print(f"no row  {row['contender']}: {case}")
    print(f"{len(rows)} rows")
    return int(bad > 0)


# ---- numerics ------------------------------------------------------------------------------------------------------


def numerics(sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    """Errors against float64 of the same inputs, over those of eager torch in their dtype: values and all gradients."""
    for options in ("plain", "all options"):
        case = f"numerics, {sizes.heads[0]}, {name_of(dtype)}, {options}"
        try:
            yield from errors(sizes, dtype, options != "plain", case)
        except FAILURES as error:
            yield failure("linear_logprob", case, error)


def errors(sizes: Sizes, dtype: torch.dtype, rich: bool, case: str) -> Iterator[Row]:
    """The rows of one dtype, with or without options."""
    inputs, target = head_inputs(sizes, dtype, rich)
    exact = {name: value.double() for name, value in inputs.items()}
    truth = with_gradients(partial(eager_head, target=target), exact)
    plain = with_gradients(partial(eager_head, target=target), inputs)
    kernel = with_gradients(partial(our_head, target=target, backend=sizes.backend), inputs)
    for name, value in truth.items():
        bound = LOGPROB_BOUND[dtype] if name == "logprob" else GRADIENT_BOUND
        for part, rows in parts_of(name, value, target):
            theirs, own = (float(rms((found[name].double() - value)[rows])) for found in (plain, kernel))
            floor = torch.finfo(dtype).eps * float(rms(value[rows])) / 8
            ratio = own / max(theirs, floor) if floor else own
            what = f"{case}: {name}{part}"
            yield row_of("linear_logprob", what, ratio_to=f"eager {name_of(dtype)}", ratio=ratio, at_most=bound)


def parts_of(name: str, value: Tensor, target: Tensor) -> list[tuple[str, Tensor]]:
    """The rows of a gradient `[V, ...]` at targets are measured separately from the other rows."""
    if name not in ("gradient of weight", "gradient of bias", "gradient of lora_b"):
        return [("", torch.ones(len(value), dtype=torch.bool, device=value.device))]
    at_target = torch.zeros(len(value), dtype=torch.bool, device=value.device)
    at_target[target] = True
    return [(", at targets", at_target), (", elsewhere", ~at_target)]


def rms(values: Tensor) -> Tensor:
    """Root mean square."""
    return values.pow(2).mean().sqrt()


def head_inputs(sizes: Sizes, dtype: torch.dtype, rich: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Logits of standard deviation 4, or 60 under a cap of 30; targets at both ends of the vocabulary among them."""
    torch.manual_seed(0)
    head, rows, device, rank = sizes.heads[0], sizes.rows, sizes.device, 8

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=device) * scale).to(dtype)

    spread = (60 if rich else 4) * head.hidden**-0.5
    inputs = {"hidden": draw(rows, head.hidden), "weight": draw(head.vocabulary, head.hidden, scale=spread)}
    if rich:
        inputs |= {"bias": draw(head.vocabulary), "lora_a": draw(rank, head.hidden, scale=head.hidden**-0.5)}
        inputs |= {"lora_b": draw(head.vocabulary, rank), "temperature": draw(rows).abs() + 0.5}
    target = torch.randint(head.vocabulary, (rows,), device=device)
    target[0], target[1] = 0, head.vocabulary - 1
    return inputs, target


def eager_head(inputs: dict[str, Tensor], target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plain torch in the inputs' dtype: log-prob, entropy, log-sum-exp."""
    z = inputs["hidden"] @ inputs["weight"].T
    if "bias" in inputs:
        z = z + 2.0 * (inputs["hidden"] @ inputs["lora_a"].T) @ inputs["lora_b"].T + inputs["bias"]
        z = 30.0 * torch.tanh(0.9 * z / 30.0) / inputs["temperature"][:, None]
    log_p = z.log_softmax(-1)
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), z.logsumexp(-1)


def our_head(inputs: dict[str, Tensor], target: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """The op on the same inputs."""
    options: dict[str, Any] = {}
    if "bias" in inputs:
        options = {"bias": inputs["bias"], "softcap": 30.0, "logit_scale": 0.9, "temperature": inputs["temperature"]}
        options["lora"] = (inputs["lora_a"], inputs["lora_b"], 2.0)
    return linear_logprob_entropy(inputs["hidden"], inputs["weight"], target, backend=backend, **options)


def with_gradients(
    head: Callable[[dict[str, Tensor]], Sequence[Tensor]], inputs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The three results, and the gradient of a weighted sum of them to every input but the temperature."""
    leaves = {name: value.detach().clone().requires_grad_(name != "temperature") for name, value in inputs.items()}
    results = dict(zip(("logprob", "entropy", "lse"), head(leaves), strict=True))
    total = torch.zeros((), dtype=torch.float64, device=inputs["hidden"].device)
    for factor, value in zip((1.0, 0.3, 0.2), results.values(), strict=True):
        upstream = torch.linspace(-1, 1, len(value), dtype=torch.float64, device=value.device) + 0.1
        total = total + (factor * upstream * value).sum()
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(total, list(wanted.values()))
    named = {f"gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return {name: value.detach() for name, value in results.items()} | named


# ---- the same bits -------------------------------------------------------------------------------------------------


def same_bits(sizes: Sizes) -> Iterator[Row]:
    """The log-prob of a row in other batches, and every result twice."""
    dtype = sizes.dtypes[0]
    inputs, target = head_inputs(sizes, dtype, rich=False)
    hidden, weight = inputs["hidden"], inputs["weight"]
    head = partial(linear_logprob, backend=sizes.backend)
    with torch.no_grad():
        whole = head(hidden, weight, target)
    order = torch.randperm(len(target), device=hidden.device)
    doubled, twice = torch.cat([hidden, hidden]), torch.cat([target, target])

    def apart(step: int) -> Tensor:
        return torch.cat([head(h, weight, t) for h, t in zip(hidden.split(step), target.split(step), strict=True)])

    companies: dict[str, Callable[[], Tensor]] = {
        "again": lambda: head(hidden, weight, target),
        "in sevens": lambda: apart(7),
        "in another order": lambda: head(hidden[order], weight, target[order])[order.argsort()],
        "after as many others": lambda: head(doubled, weight, twice)[len(target) :],
        "with gradients wanted": lambda: head(hidden.clone().requires_grad_(), weight, target).detach(),
        "with entropy": lambda: linear_logprob_entropy(hidden, weight, target, backend=sizes.backend).logprob,
    }
    for name, result in companies.items():
        case = f"same bits, {sizes.heads[0]}, {name_of(dtype)}: log-prob, {name}"
        try:
            yield differing(case, whole, result())
        except FAILURES as error:
            yield failure("linear_logprob", case, error)
    ones, bounds = torch.ones(len(target), device=hidden.device), torch.arange(len(target) + 1, device=hidden.device)
    loss = partial(linear_policy_loss, objective="reinforce", cu_seqlens=bounds, backend=sizes.backend)
    plain = policy_loss(whole, None, ones, objective="reinforce", cu_seqlens=bounds).loss
    fused = loss(hidden.clone().requires_grad_(), weight, target, None, ones).loss.detach()
    yield differing(f"same bits, {sizes.heads[0]}, {name_of(dtype)}: loss of linear_policy_loss", plain, fused)
    first, second = (with_gradients(partial(our_head, target=target, backend=sizes.backend), inputs) for _ in range(2))
    for name, value in first.items():
        yield differing(f"same bits, {sizes.heads[0]}, {name_of(dtype)}: {name}, again", value, second[name])


def differing(case: str, expected: Tensor, found: Tensor) -> Row:
    """The number of entries whose bits differ."""
    count = int((expected != found).sum())
    return row_of("linear_logprob", case, ratio_to="entries with other bits", ratio=count, at_most=0)


# ---- times ---------------------------------------------------------------------------------------------------------


def peers() -> dict[str, Callable[[], Contender]]:
    """Constructors of the contenders by name; one raises if its package is not installed."""
    return {
        "verl Triton": verl_triton,
        "TRL": lambda: trl_chunked(trl_default_chunk()),
        "Liger": lambda: liger(compiled=False),
        "cut-cross-entropy": lambda: cut_cross_entropy("cce"),
        "full logits": lambda: full_logits,
        "full logits, compiled": lambda: torch.compile(full_logits),
    }


def times(sizes: Sizes, head: HeadSize, tokens: int) -> Iterator[Row]:
    """Forward and backward of every contender with frozen and trained head, in turns; the forward of ours alone."""
    batch = max(1, tokens // 1024)
    frozen = make_problem(head, batch, tokens // batch, sizes.timed_dtype, sizes.device)
    case = f"{head}, T = {tokens:,}, {name_of(sizes.timed_dtype)}"
    yield from forward_alone(frozen, case, sizes)
    made: dict[str, Callable[[], Contender]] = {
        "linear_logprob": lambda: ours,
        "linear_policy_loss": lambda: ours_fused,
    }
    made |= peers()
    for mode, problem in (("frozen head", frozen), ("trained head", frozen.with_trained_head())):
        yield from in_turns(made, problem, f"{case}, {mode}")


def forward_alone(problem: Problem, case: str, sizes: Sizes) -> Iterator[Row]:
    """Seconds of the log-probs without gradient, divided by the target seconds."""

    def forward() -> Tensor:
        with torch.no_grad():
            return linear_logprob(problem.hidden, problem.weight, problem.target)

    name = f"{case}, forward"
    try:
        forward()
        measured = [measure(forward, torch.device(sizes.device)) for _ in range(TURNS)]
    except FAILURES as error:
        yield failure("linear_logprob", name, error)
        return
    seconds = [elapsed for elapsed, _, _ in measured]
    flops = 2 * problem.target.numel() * problem.weight.numel()
    goal = timing(seconds)["median"] / (flops / (GOAL_TFLOPS * 1e12))
    memory = measured[-1][1]
    reached = f"{name}, {flops / timing(seconds)['median'] / 1e12:.0f} TFLOP/s"
    goal_name = f"{GOAL_TFLOPS} TFLOP/s"
    yield row_of("linear_logprob", reached, seconds=seconds, memory=memory, ratio_to=goal_name, ratio=goal, at_most=1)


def in_turns(made: dict[str, Callable[[], Contender]], problem: Problem, case: str) -> Iterator[Row]:
    """One row per contender, and the bounds."""
    contenders: dict[str, Contender] = {}
    slow, expected = set(), None
    for name, make in made.items():
        try:
            contender = make()
            gradients(contender, problem)
            elapsed, _, (_, grads) = measure(partial(gradients, contender, problem), problem.hidden.device)
        except FAILURES as error:
            yield failure(name, case, error)
            continue
        contenders[name] = contender
        if elapsed > SLOW_SECONDS:
            slow.add(name)
        if expected is None:
            expected = grads
        difference = max(float((a - b).norm() / b.norm()) for a, b in zip(grads, expected, strict=True))
        yield row_of(name, f"{case}: gradients", ratio_to="those of ours", ratio=difference, at_most=AGREEMENT)
        del grads
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    memory: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(TURNS):
        for name, contender in contenders.items():
            if name not in slow or turn < SLOW_TURNS:
                elapsed, peak, (_, grads) = measure(partial(gradients, contender, problem), problem.hidden.device)
                seconds[name].append(elapsed)
                memory[name] += [] if peak is None else [peak - sum(grad.nbytes for grad in grads) / 1e6]
                del grads
    yield from comparisons(seconds, memory, case)


def comparisons(seconds: dict[str, list[float]], memory: dict[str, list[float]], case: str) -> Iterator[Row]:
    """The measured rows, then the bounds of ours."""
    medians = {name: timing(values)["median"] for name, values in seconds.items()}
    peaks = {name: max(values) for name, values in memory.items() if values}
    for name, values in seconds.items():
        yield row_of(name, case, seconds=values, memory=peaks.get(name))
    if "linear_logprob" not in medians:
        return
    own = medians["linear_logprob"]
    for rival, bound in (("verl Triton", VERL_BOUND), ("TRL", 1.0), ("Liger", 1.0)):
        if rival in medians:
            ratio = own / medians[rival]
            yield row_of("linear_logprob", f"{case}: time", ratio_to=rival, ratio=ratio, at_most=bound)
    for name in ("linear_logprob", "linear_policy_loss"):
        if name in peaks:
            ratio, bound_name = peaks[name] / MEMORY_BOUND_MB, f"{MEMORY_BOUND_MB} MB"
            yield row_of(name, f"{case}: memory", ratio_to=bound_name, ratio=ratio, at_most=1)


# ---- groups and pairs ----------------------------------------------------------------------------------------------


def groups(sizes: Sizes) -> Iterator[Row]:
    """Advantages and the pair term by their kernels: errors against float64, seconds forward and backward."""
    for rows, size in sizes.groups:
        for name, work in (("group_advantage", advantages), ("preference_loss", pairs)):
            case = f"B={rows:,}, G={size:,}, float32"
            try:
                yield from group_rows(name, work, case, rows, size, sizes)
            except FAILURES as error:
                yield failure(name, case, error)


def group_rows(name: str, work: Callable[..., Tensor], case: str, rows: int, size: int, sizes: Sizes) -> Iterator[Row]:
    """One op at one size, compared with the reference on at most 64 groups, because it loops over groups."""
    torch.manual_seed(0)
    scores, rewards = torch.randn(rows), torch.randint(0, 5, (rows,)).float()
    some = min(rows, 64 * size, 4096 // size * size or size)
    ids = torch.arange(rows) // size
    on_device = [value.to(sizes.device) for value in (scores, rewards, ids)]
    few = [value[:some].to(sizes.device) for value in (scores, rewards, ids)]
    truth = work(scores[:some].double(), rewards[:some].double(), ids[:some], module=reference)
    found = work(*few).double().cpu()
    error = float((found - truth).norm() / truth.norm().clamp(min=1e-300))
    yield row_of(name, f"{case}: error", ratio_to="1e-6 of its norm", ratio=error / 1e-6, at_most=10)
    work(*on_device)
    measured = [measure(partial(work, *on_device), torch.device(sizes.device)) for _ in range(TURNS)]
    yield row_of(name, case, seconds=[elapsed for elapsed, _, _ in measured], memory=measured[-1][1])


def advantages(scores: Tensor, rewards: Tensor, ids: Tensor, module: Any = None) -> Tensor:
    """Group advantages of the rewards."""
    return (module.group_advantage if module else group_advantage)(rewards, ids)


def pairs(scores: Tensor, rewards: Tensor, ids: Tensor, module: Any = None) -> Tensor:
    """The gradient of the pair term."""
    leaf = scores.clone().requires_grad_()
    loss = (module.preference_loss if module else preference_loss)(leaf, rewards, ids).loss
    return torch.autograd.grad(loss, leaf)[0]


if __name__ == "__main__":
    sys.exit(main())
