"""Seconds and memory of our head ops, forward and backward, beside what their operations take at the card's rate.

Legend: T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from amir_kernels import linear_logprob, workspace_of
from amir_kernels.linear_logprob.head import Head
from amir_kernels.linear_logprob.tiling import Tiling, default_workspace
from bars import FROZEN, FUSED, OURS, TRAINED
from contenders import Contender, HeadSize, Problem, full_logits, gradients, make_problem, ours, ours_fused
from meter import measure

from .calibration import size_of
from .judging import relative_difference
from .rates import event_seconds, predict, rates_of
from .sizes import Sizes
from .stage import Part, Ratio, Row, make_row

TIME_BOUND = {"forward": 1.4, FROZEN: 1.5, TRAINED: 1.5}
"""Of a time over that of its operations at the rate of a bare product. Predicted for an H200: 1.25 to 1.4."""
MEMORY_BOUND = 1.1
"""Of the memory over what the ops say they use: the allocator rounds."""
AGREEMENT = 0.05
"""Largest relative difference, in norm, of 16-bit gradients of the ops from each other."""


def parts(sizes: Sizes) -> list[Part]:
    """Each head and number of tokens."""
    return [
        Part(f"{head.name}, T = {tokens:,}, {mode}", partial(times, sizes, head, tokens, mode), 30)
        for tokens in sizes.tokens
        for head in sizes.timed_heads
        for mode in ("forward", FROZEN, TRAINED)
    ]


def problem_of(sizes: Sizes, head: HeadSize, tokens: int, mode: str) -> Problem:
    """The inputs: completions of about 1,024 tokens."""
    batch = max(1, tokens // 1024)
    problem = make_problem(head, batch, tokens // batch, sizes.dtype, sizes.device)
    return problem.with_trained_head() if mode == TRAINED else problem


def case_of(sizes: Sizes, head: HeadSize, tokens: int, mode: str) -> str:
    """In words."""
    return f"{head}, T = {tokens:,}, {str(sizes.dtype).removeprefix('torch.')}, {mode}"


def times(sizes: Sizes, head: HeadSize, tokens: int, mode: str) -> Iterator[Row]:
    """The rows of one head, number of tokens and mode."""
    problem = problem_of(sizes, head, tokens, mode)
    case = case_of(sizes, head, tokens, mode)
    workload = {"check": "time", "mode": mode, "tokens": tokens, "dtype": str(sizes.dtype), **size_of(head)}
    if mode == "forward":
        yield timed(sizes, OURS, case, workload, partial(forward, problem), 2 * tokens, mode)
        return
    truth = gradients(full_logits, problem)[1]
    for name, contender in ((OURS, ours), (FUSED, ours_fused)):
        work = partial(gradients, contender, problem)
        difference = disagreement(work()[1], truth)
        agreement = Ratio("full logits", difference, AGREEMENT)
        yield make_row(name, f"{case}: gradients", workload | {"check": "gradients"}, ratio=agreement)
        yield timed(sizes, name, case, workload, work, operations(problem, name, mode) * tokens, mode)
        yield from memory(sizes, name, case, workload, problem, contender)


def forward(problem: Problem) -> Tensor:
    """The log-probs without gradient."""
    with torch.no_grad():
        return linear_logprob(problem.hidden, problem.weight, problem.target)


def disagreement(measured: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest relative difference of two sets of gradients."""
    return max(relative_difference(a, b) for a, b in zip(measured, expected, strict=True))


def operations(problem: Problem, contender: str, mode: str) -> int:
    """Operations of forward and backward, in units of H V for a token.

    A 16-bit gradient of the head in more than one block of rows takes the logits a third time.
    """
    weight, compute = problem.weight, problem.weight.dtype
    head = Head(weight.detach(), None, None, None, 1.0, compute)
    workspace = default_workspace(weight.device)
    from_kept_logits = contender == FUSED and keeps_logits(head, workspace, mode == TRAINED)
    if mode == FROZEN:
        return 4 if from_kept_logits else 6
    blocks = len(Tiling.of(head, workspace, problem.target.numel()).rows)
    return 6 if from_kept_logits else 10 if compute.itemsize == 2 and blocks > 1 else 8


def keeps_logits(head: Head, workspace: int, trained: bool) -> bool:
    """Whether the fused loss forms its gradients from logits that it kept, instead of computing them again."""
    if not head.weight.is_cuda:
        return True
    from amir_kernels.linear_logprob.triton_forward_gradients import kept_rows

    exact = not trained or head.weight.dtype == torch.float32
    return exact and kept_rows(head, workspace, workspace, trained) > 0


def timed(sizes: Sizes, name: str, case: str, workload: dict, work: Callable[[], object], units: int, mode: str) -> Row:
    """A row with the seconds over those of the operations; `units` of H V operations."""
    flops = units * workload["hidden_size"] * workload["vocabulary"]
    seconds = event_seconds(work, sizes.device, sizes.repeats)
    expected = predict(rates_of(sizes), flops=flops)
    observed = {"tflops": flops / min(seconds) / 1e12, "thv": units / workload["tokens"]}
    ratio = sorted(seconds)[len(seconds) // 2] / expected["seconds"]
    bound = Ratio("bare products", ratio, sizes.bound(TIME_BOUND[mode]))
    return make_row(name, case, workload, seconds=seconds, expected=expected, observed=observed, ratio=bound)


def memory(sizes: Sizes, name: str, case: str, workload: dict, problem: Problem, contender: Contender) -> Iterator[Row]:
    """The growth of the peak without the gradients, over what the op says that it uses and keeps."""
    _, peak, (_, grads) = measure(partial(gradients, contender, problem), torch.device(sizes.device))
    if peak is None:
        return
    used = peak - sum(grad.nbytes for grad in grads) / 1e6
    tokens, hidden = problem.target.numel(), problem.hidden.shape[-1]
    allowed = workspace_of(problem.hidden, problem.weight) + 64 * tokens
    allowed += 4 * tokens * hidden if name == FUSED else 0  # the gradient of hidden, kept for the backward in float32
    bound = Ratio("what the op announces", used / allowed * 1e6, sizes.bound(MEMORY_BOUND))
    workload = workload | {"check": "memory"}
    yield make_row(
        name, f"{case}: memory", workload, memory=used, expected={"peak_memory_mb": allowed / 1e6}, ratio=bound
    )
