"""The head ops on a CPU beside full logits, TRL's chunked head, Liger's fused GRPO loss, and the bare matrix products.

Every contender computes the same GRPO loss from the same hidden states, forward and backward, in float32; before
anything is timed their losses and gradients are compared. Contenders take turns. Memory is the growth of the process's
peak, less the returned gradients. The bare products are of the same sizes as the op's, in the fastest of three
blockings. In "30% dead rows" the clip makes the gradient of 30% of the tokens zero; the peers' work does not depend on
that. TRL's best chunk is chosen first, on a part of the vocabulary. `growth` measures one head with growing numbers of
tokens.
"""

import argparse
import importlib.util
import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bars import (
    CHUNKED_PEERS,
    DEAD,
    FLOPS,
    FROZEN,
    FULL,
    FUSED,
    GROWTH,
    LIGER,
    LIGER_COMPILED,
    OURS,
    TRAINED,
    TRL_BEST,
    TRL_DEFAULT,
    Row,
    bare,
    bars,
)
from contenders import (
    Contender,
    HeadSize,
    Problem,
    full_logits,
    gradients,
    liger,
    make_problem,
    ours,
    ours_fused,
    trl_chunked,
    trl_default_chunk,
)
from machine import row_origin
from meter import measure
from rows import keep, timing

HEADS = {
    "smollm2": HeadSize("SmolLM2-135M", 576, 49_152),
    "qwen2.5": HeadSize("Qwen2.5-0.5B", 896, 151_936),
    "gemma3": HeadSize("Gemma-3 270M", 640, 262_144),
}
MODES = {"frozen": FROZEN, "trained": TRAINED}
BATCH, LENGTH = 8, 256
DEAD_SHARE = 0.3
CHUNKS = (1024, 2048, 4096, 8192, 16_384)
SCAN_COLUMNS = 16_384
"""The part of the vocabulary on which TRL's chunk and the blocking of the bare products are chosen."""
AGREEMENT_COLUMNS = 5_000
AGREEMENT = 1e-4
"""Largest difference from full logits: of the loss, absolute; of a gradient, relative, in norm."""
GROWTH_TOKENS = (256, 1024, 4096, 16_384)
CPU = torch.device("cpu")
console = Console(width=120)


def main() -> None:
    """Measures every head and case, prints and keeps the rows, and prints the bounds."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of compilers beside what is timed
    origin = row_origin()
    rows: list[Row] = []
    for name in options.heads:
        modes = [MODES[case] for case in options.cases if case in MODES]
        if modes:
            rows += measure_head(HEADS[name], modes, options.rounds, options.peers)
        if GROWTH in options.cases and name == options.heads[0]:
            rows += measure_growth(HEADS[name], options.rounds)
    rows = [row | origin for row in rows]
    console.print(printed_rows(rows), printed_bars(rows))
    if options.keep:
        for row in rows:
            path = keep(row)
        console.print(f"kept in {path}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--cases", nargs="+", choices=(*MODES, GROWTH), default=[*MODES, GROWTH])
    parser.add_argument("--peers", nargs="*", choices=(FULL, *CHUNKED_PEERS), default=[FULL, *CHUNKED_PEERS])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each contender")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-keep", dest="keep", action="store_false", help="print only")
    return parser.parse_args(arguments)


# ---- the contenders ------------------------------------------------------------------------------------------------


def peers(best_chunk: int | None) -> dict[str, Contender]:
    """Full logits, and the contenders that are installed; reports those that are missing."""
    contenders: dict[str, Contender] = {FULL: full_logits}
    if best_chunk:
        contenders |= {TRL_DEFAULT: trl_chunked(trl_default_chunk()), TRL_BEST: trl_chunked(best_chunk)}
    if not installed("liger_kernel"):
        return contenders
    contenders[LIGER] = liger(compiled=False)
    if shutil.which(os.environ.get("CXX", "g++")):
        contenders[LIGER_COMPILED] = liger(compiled=True)
    else:
        console.print(f"no C++ compiler: {LIGER_COMPILED} is left out")
    return contenders


def installed(package: str) -> bool:
    """Whether a peer is installed; reports it if it is not."""
    present = importlib.util.find_spec(package) is not None
    if not present:
        console.print(f"{package} is not installed: left out")
    return present


def best_trl_chunk(problem: Problem) -> int:
    """TRL's fastest chunk on a part of the vocabulary."""
    part = problem.part(SCAN_COLUMNS)
    seconds_of(trl_chunked(CHUNKS[0]), problem.part(CHUNKS[0]))  # warm
    seconds = {chunk: seconds_of(trl_chunked(chunk), part) for chunk in CHUNKS}
    console.print(f"TRL's chunks on {SCAN_COLUMNS:,} columns, seconds: {rounded(seconds)}")
    return min(seconds, key=seconds.__getitem__)


def rounded(seconds: dict[Any, float]) -> str:
    """The entries as text."""
    return ", ".join(f"{name}: {value:.2f}" for name, value in seconds.items())


def seconds_of(contender: Contender, problem: Problem) -> float:
    """One measurement."""
    return measure(partial(gradients, contender, problem), CPU)[0]


def refuse_disagreement(contenders: dict[str, Contender], problem: Problem) -> None:
    """ValueError if a contender's loss or gradients differ from those of full logits; this is also the warm-up."""
    part = problem.part(AGREEMENT_COLUMNS)
    expected_loss, expected = gradients(full_logits, part)
    for name, contender in contenders.items():
        loss, actual = gradients(contender, part)
        differences = {"loss": float((loss - expected_loss).abs())}
        for result, grad, truth in zip(("hidden", "weight"), actual, expected, strict=False):
            differences[f"gradient of {result}"] = float((grad - truth).norm() / truth.norm())
        for result, difference in differences.items():
            if not difference <= AGREEMENT:
                raise ValueError(
                    f"{name}: {result} differs from full logits by {difference:.2g}; expected at most {AGREEMENT}. "
                    "Correct the contender before it is timed"
                )


# ---- the bare products ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Products:
    """The three products of a head, cut into blocks: logits, gradient of hidden, gradient of weight."""

    hidden: Tensor
    weight: Tensor
    rows: int
    columns: int

    def seconds(self) -> tuple[float, float, float]:
        """Of each product, over all blocks; what they write is allocated before."""
        hidden, weight = self.hidden, self.weight
        tile = torch.rand(self.rows, self.columns)
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)

        def logits(r: slice, c: slice, block: Tensor) -> None:
            torch.mm(hidden[r], weight[c].T, out=block)

        def to_hidden(r: slice, c: slice, block: Tensor) -> None:
            grad_hidden[r].addmm_(block, weight[c])

        def to_weight(r: slice, c: slice, block: Tensor) -> None:
            grad_weight[c].addmm_(block.T, hidden[r])

        def all_blocks(product: Any) -> None:
            for r in blocks(hidden.shape[0], self.rows):
                for c in blocks(weight.shape[0], self.columns):
                    product(r, c, tile[: r.stop - r.start, : c.stop - c.start])

        forward, hidden_grad, weight_grad = (
            measure(partial(all_blocks, product), CPU)[0] for product in (logits, to_hidden, to_weight)
        )
        return forward, hidden_grad, weight_grad


def blocks(size: int, step: int) -> list[slice]:
    """`size` cut into pieces of `step`."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def fastest_products(problem: Problem) -> Products:
    """Of three blockings the one with the least seconds on a part of the vocabulary, for the whole of it."""
    hidden, weight = problem.hidden.detach().flatten(0, 1), problem.weight.detach()
    tokens = hidden.shape[0]
    part = weight[:SCAN_COLUMNS]
    seconds = {
        (rows, columns): sum(Products(hidden, part, rows, columns).seconds())
        for rows, columns in ((tokens, 4096), (tokens, SCAN_COLUMNS), (min(tokens, 512), SCAN_COLUMNS))
    }
    console.print(f"bare products on {SCAN_COLUMNS:,} columns, seconds: {rounded(seconds)}")
    rows, columns = min(seconds, key=seconds.__getitem__)
    return Products(hidden, weight, rows, columns)


def bare_seconds(parts: tuple[float, float, float], contender: str, mode: str) -> float:
    """The products that `contender` needs: the logits twice if it recomputes them."""
    logits, to_hidden, to_weight = parts
    return logits * (2 if contender == OURS else 1) + to_hidden + (to_weight if mode == TRAINED else 0)


# ---- measurements --------------------------------------------------------------------------------------------------


def measure_head(head: HeadSize, modes: Sequence[str], rounds: int, wanted: Sequence[str]) -> list[Row]:
    """The rows of a head, one case for each mode."""
    console.print(f"[bold]{head}[/bold]")
    frozen = make_problem(head, BATCH, LENGTH, torch.float32)
    chunk = best_trl_chunk(frozen) if installed("trl") else None
    products = fastest_products(frozen)
    contenders = {name: loss for name, loss in peers(chunk).items() if name in wanted} | {OURS: ours, FUSED: ours_fused}
    problems = {mode: frozen if mode == FROZEN else frozen.with_trained_head() for mode in modes}
    seconds: dict[str, dict[str, list[float]]] = {mode: {} for mode in modes}
    memory: dict[str, dict[str, list[float]]] = {mode: {} for mode in modes}
    for problem in problems.values():
        refuse_disagreement(contenders, problem)
    for turn in range(rounds):
        parts = products.seconds()
        for mode, problem in problems.items():
            for op in (OURS, FUSED):
                seconds[mode].setdefault(bare(FLOPS[op, mode]), []).append(bare_seconds(parts, op, mode))
            dead = problem.with_zero_gradient_rows(DEAD_SHARE)
            entries = [(name, contender, problem) for name, contender in contenders.items()] + [(DEAD, ours, dead)]
            for name, contender, inputs in entries:
                one_run(name, contender, inputs, seconds[mode], memory[mode])
            spent = rounded({name: values[-1] for name, values in seconds[mode].items()})
            console.print(f"round {turn + 1}, {mode}, seconds: {spent}")
    settings = f"products by {products.rows:,} x {products.columns:,}"
    if chunk:
        settings = f"TRL's chunks {trl_default_chunk():,} and {chunk:,}, {settings}"
    work = f"{BATCH} x {LENGTH} tokens, float32, {settings}"
    observed: dict[str, Any] = {"product_block": [products.rows, products.columns]}
    if chunk:
        observed |= {"trl_default_chunk": trl_default_chunk(), "trl_best_chunk": chunk}
    return [
        row | {"workload": workload(head, mode, BATCH * LENGTH), "observed": observed}
        for mode in modes
        for row in make_rows(f"{head}, {mode}, {work}", seconds[mode], memory[mode])
    ]


def workload(head: HeadSize, mode: str, tokens: int) -> dict[str, Any]:
    """The workload of a row."""
    return {
        "model": head.name,
        "hidden_size": head.hidden,
        "vocabulary": head.vocabulary,
        "dtype": "float32",
        "mode": mode,
        "head_trained": mode == TRAINED,
        "tokens": tokens,
    }


def one_run(
    name: str,
    contender: Contender,
    problem: Problem,
    seconds: dict[str, list[float]],
    memory: dict[str, list[float]],
) -> None:
    """Adds one measurement; memory is what was there beyond inputs and returned gradients."""
    elapsed, peak, (_, grads) = measure(partial(gradients, contender, problem), CPU)
    seconds.setdefault(name, []).append(elapsed)
    if peak is not None:
        memory.setdefault(name, []).append(peak - sum(grad.nbytes for grad in grads) / 1e6)


def measure_growth(head: HeadSize, rounds: int) -> list[Row]:
    """Seconds and scratch over the number of tokens, frozen head; the longest once."""
    contenders: dict[str, Contender] = {FULL: full_logits}
    if installed("trl"):
        chunk = best_trl_chunk(make_problem(head, BATCH, LENGTH, torch.float32))
        contenders[TRL_BEST] = trl_chunked(chunk)
    contenders |= {OURS: ours, FUSED: ours_fused}
    rows = []
    for tokens in GROWTH_TOKENS:
        problem = make_problem(head, tokens // LENGTH, LENGTH, torch.float32)
        seconds: dict[str, list[float]] = {}
        memory: dict[str, list[float]] = {}
        for _ in range(1 if tokens == GROWTH_TOKENS[-1] else rounds):
            for name, contender in contenders.items():
                one_run(name, contender, problem, seconds, memory)
        console.print(f"T = {tokens:,}, seconds: {rounded({name: min(values) for name, values in seconds.items()})}")
        case_rows = make_rows(f"{head}, {GROWTH}, {FROZEN}, T = {tokens:,}, float32", seconds, memory)
        rows += [row | {"workload": workload(head, GROWTH, tokens)} for row in case_rows]
    return rows


def make_rows(case: str, seconds: dict[str, list[float]], memory: dict[str, list[float]]) -> list[Row]:
    """One row per contender, without machine, versions and date; ours are compared with the fastest chunked peer."""
    times = {name: timing(values) for name, values in seconds.items()}
    rival = min(times.keys() & set(CHUNKED_PEERS), key=lambda name: times[name]["median"], default=None)
    return [
        {
            "bench": "linear_logprob",
            "contender": name,
            "case": case,
            "seconds": times[name],
            "peak_memory_mb": round(statistics.median(memory[name]), 1) if name in memory else None,
            "ratio_to": rival if rival and name in (OURS, DEAD, FUSED) else None,
            "ratio": times[name]["median"] / times[rival]["median"] if rival and name in (OURS, DEAD, FUSED) else None,
        }
        for name in times
    ]


# ---- print ---------------------------------------------------------------------------------------------------------


def printed_rows(rows: Sequence[Row]) -> Table:
    """Seconds and memory."""
    table = Table("case", "contender", "seconds", "min to max", "n", "MB")
    for row in rows:
        seconds, memory = row["seconds"], row["peak_memory_mb"]
        spread = f"{seconds['min']:.2f} to {seconds['max']:.2f}"
        short = ", ".join(row["case"].split(", ")[:2]) if GROWTH not in row["case"] else row["case"].split(", float")[0]
        cells = (short, row["contender"], f"{seconds['median']:.2f}", spread, str(seconds["n"]))
        table.add_row(*cells, "" if memory is None else f"{memory:,.0f}")
    return table


def printed_bars(rows: Sequence[Row]) -> Table:
    """The bounds, and the measured ratios."""
    table = Table("head", "case", "op", "bar", "at most", "figure")
    for bar in bars(rows):
        table.add_row(bar.head, bar.mode, bar.contender, bar.name, f"{bar.bound:g}", str(bar))
    return table


if __name__ == "__main__":
    main()
