"""Layouts, sizes and states that tests on a CPU cannot try: each head forward and backward against float64.

Memory that nothing has written is NaN during every call, so a result that depends on it is seen.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from amir_kernels import linear_logprob

from .correctness import eager_head, our_head, with_gradients
from .judging import Results, compare, judge
from .sizes import Sizes
from .stage import Part, Ratio, Row, make_row, not_run

TRUTH_COLUMNS = 8192
HUGE_ERROR = 1e-3
"""Relative error in norm of log-probs of 16-bit inputs, whose logits are summed in float32."""
GRADIENT_ERROR = 0.02
"""Of 16-bit gradients, against those of the torch backend."""


def parts(sizes: Sizes) -> list[Part]:
    """The parts; what could leave the GPU in a bad state comes last."""
    shapes = [Part(case.name, partial(check, sizes, case)) for case in cases(sizes)]
    return [
        *shapes,
        Part("no tokens", partial(no_tokens, sizes)),
        Part("another stream", partial(another_stream, sizes)),
        Part("another GPU", partial(another_gpu, sizes)),
        Part("more than 2^31 elements", partial(huge, sizes), 30),
        Part("CUDA graphs", partial(graphs, sizes)),
    ]


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is NaN, or the largest number of an integer type, until something is written to it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# ---- layouts and sizes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Hidden states, a head and targets, made on the device."""

    name: str
    make: Callable[[], tuple[Tensor, Tensor]]
    """hidden `[T, H]` and weight `[V, H]`, in any layout"""
    autocast: torch.dtype | None = None


def cases(sizes: Sizes) -> list[Case]:
    """Each layout and size in the timed dtype; the odd head has an odd V, and an H that 8 does not divide."""
    odd, even, rows = sizes.odd_head, sizes.checked_head, sizes.checked_rows
    draw = partial(drawn, sizes.device, sizes.half)
    return [
        Case("odd sizes", lambda: (draw(rows, odd.hidden), draw(odd.vocabulary, odd.hidden))),
        Case("transposed head", lambda: (draw(rows, even.hidden), draw(even.hidden, even.vocabulary).T)),
        Case("transposed hidden states", lambda: (draw(even.hidden, rows).T, draw(even.vocabulary, even.hidden))),
        Case("sliced", lambda: (draw(rows, 2 * even.hidden)[:, ::2], draw(even.vocabulary, even.hidden + 8)[:, 8:])),
        Case("unaligned", lambda: (shifted(draw, rows, even.hidden), shifted(draw, even.vocabulary, even.hidden))),
        Case("one token", lambda: (draw(1, even.hidden), draw(even.vocabulary, even.hidden))),
        Case("float32 head", lambda: (draw(rows, even.hidden), draw(even.vocabulary, even.hidden).float())),
        Case(
            "float32 head under autocast",
            lambda: (draw(rows, even.hidden).float(), draw(even.vocabulary, even.hidden).float()),
            sizes.half,
        ),
    ]


def drawn(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers; a product over hundreds of them has a standard deviation of about 4."""
    return (torch.randn(*shape, device=device) * 2 * min(shape[-1], 4096) ** -0.25).to(dtype)


def shifted(draw: Callable[..., Tensor], rows: int, columns: int) -> Tensor:
    """`[rows, columns]` that begins one element behind the start of its memory."""
    return draw(rows * columns + 1)[1:].view(rows, columns)


def targets(rows: int, vocabulary: int, device: str) -> Tensor:
    """Random tokens, the last one of the vocabulary among them."""
    target = torch.randint(vocabulary, (rows,), device=device)
    target[-1:] = vocabulary - 1
    return target


def check(sizes: Sizes, case: Case) -> Iterator[Row]:
    """The three results and both gradients."""
    torch.manual_seed(0)
    hidden, weight = case.make()
    target = targets(hidden.shape[0], weight.shape[0], sizes.device)
    inputs = {"hidden": hidden, "weight": weight}
    rounded = {name: value if case.autocast is None else value.to(case.autocast) for name, value in inputs.items()}
    truth = with_gradients(partial(eager_head, target=target), {n: v.double() for n, v in rounded.items()})
    eager_inputs = inputs if hidden.dtype == weight.dtype else {name: value.float() for name, value in inputs.items()}
    with autocast(sizes, case):
        eager = with_gradients(partial(eager_head, target=target), eager_inputs)
        with poisoned():
            kernel = with_gradients(partial(our_head, target=target, backend=sizes.backend), inputs)
    name = f"{case.name}, hidden {tuple(hidden.shape)} x head {tuple(weight.shape)}"
    yield from judge("linear_logprob", name, kernel, as_kernel(eager, kernel), truth, target)


def autocast(sizes: Sizes, case: Case) -> AbstractContextManager[object]:
    """The autocast of a case."""
    return nullcontext() if case.autocast is None else torch.autocast(sizes.device, dtype=case.autocast)


def as_kernel(eager: Results, kernel: Results) -> Results:
    """Eager results in the dtypes of the kernel's, to which those are rounded."""
    return {name: value.to(kernel[name].dtype) for name, value in eager.items()}


def no_tokens(sizes: Sizes) -> Iterator[Row]:
    """No tokens at all, and none that counts: empty or zero results, zero gradients."""
    odd = sizes.odd_head
    draw = partial(drawn, sizes.device, sizes.half)
    for rows, fill in ((0, 0), (3, -100)):
        inputs = {"hidden": draw(rows, odd.hidden), "weight": draw(odd.vocabulary, odd.hidden)}
        target = torch.full((rows,), fill, device=sizes.device)
        with poisoned():
            results = with_gradients(partial(our_head, target=target, backend=sizes.backend), inputs)
        wrong = float(sum((value != 0).sum() for value in results.values()))
        case = f"{rows} tokens{', all ignored' if rows else ''}: results and gradients"
        zero = Ratio("entries that are not 0", wrong, 0)
        yield make_row("linear_logprob", case, {"check": case}, ratio=zero)


# ---- streams, devices, graphs --------------------------------------------------------------------------------------


def small_call(sizes: Sizes, device: str) -> tuple[Results, Tensor]:
    """Inputs of the checked head, drawn on the CPU so that they are the same on every device."""
    torch.manual_seed(1)
    head, rows = sizes.checked_head, sizes.checked_rows
    inputs = {
        "hidden": drawn("cpu", sizes.half, rows, head.hidden),
        "weight": drawn("cpu", sizes.half, head.vocabulary, head.hidden),
    }
    return {n: v.to(device) for n, v in inputs.items()}, targets(rows, head.vocabulary, "cpu").to(device)


def equal_results(case: str, measured: Results, expected: Results) -> Iterator[Row]:
    """The same numbers from the same inputs."""
    for name, value in expected.items():
        yield compare("linear_logprob", f"{case}: {name}", measured[name], value, to="the plain call", at_most=0)


def another_stream(sizes: Sizes) -> Iterator[Row]:
    """On a stream that is not the default, right after the stream's own work that makes the inputs."""
    if sizes.device != "cuda":
        yield not_run("linear_logprob", "another stream", "it needs a GPU")
        return
    inputs, target = small_call(sizes, sizes.device)
    call = partial(our_head, target=target, backend=sizes.backend)
    expected = with_gradients(call, inputs)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), poisoned():
        torch.cuda._sleep(10**8)  # a call on another stream would read the zeros
        late = {name: torch.zeros_like(value).add_(value) for name, value in inputs.items()}
        measured = with_gradients(call, late)
    stream.synchronize()
    yield from equal_results("another stream", measured, expected)


def another_gpu(sizes: Sizes) -> Iterator[Row]:
    """Tensors on the second GPU while the first is the current one."""
    if sizes.device != "cuda" or torch.cuda.device_count() < 2:
        yield not_run("linear_logprob", "another GPU", "it needs two GPUs")
        return
    inputs, target = small_call(sizes, "cuda:0")
    expected = with_gradients(partial(our_head, target=target, backend=sizes.backend), inputs)
    inputs, target = small_call(sizes, "cuda:1")
    measured = with_gradients(partial(our_head, target=target, backend=sizes.backend), inputs)
    yield from equal_results("another GPU", {n: v.to("cuda:0") for n, v in measured.items()}, expected)


def graphs(sizes: Sizes) -> Iterator[Row]:
    """A capture is refused by name, and the next call works."""
    if sizes.device != "cuda":
        yield not_run("linear_logprob", "CUDA graphs", "it needs a GPU")
        return
    inputs, target = small_call(sizes, sizes.device)
    call = partial(linear_logprob, inputs["hidden"], inputs["weight"], target, backend=sizes.backend)
    expected, message = call(), ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    except RuntimeError as error:
        message = f"{error} {error.__context__}"
    refused = Ratio("captures that were not refused", float("while a CUDA graph is captured" not in message), 0)
    yield make_row("linear_logprob", "a capture is refused", {"check": "capture"}, ratio=refused)
    yield compare("linear_logprob", "after a capture", call(), expected, to="the call before", at_most=0)


# ---- more than 2^31 elements ---------------------------------------------------------------------------------------


def huge(sizes: Sizes) -> Iterator[Row]:
    """A head that 32-bit offsets cannot address, with targets at its end."""
    size, rows = sizes.huge_head, 40
    needed = 12 * size.hidden * size.vocabulary  # drawn in float32, then rounded
    if sizes.device == "cuda" and torch.cuda.mem_get_info()[0] < needed:
        yield not_run("linear_logprob", f"{size}", f"it needs {needed / 1e9:.0f} GB of free memory")
        return
    torch.manual_seed(0)
    hidden = drawn(sizes.device, sizes.half, rows, size.hidden)
    weight = drawn(sizes.device, sizes.half, size.vocabulary, size.hidden)
    target = size.vocabulary - 1 - torch.arange(rows, device=sizes.device)
    truth = chunked_truth(hidden, weight, target)
    case = f"{size}, targets at the end"
    grads = {}
    for backend in (sizes.backend, "torch"):
        leaf = hidden.detach().requires_grad_()
        with poisoned():
            logprob = linear_logprob(leaf, weight, target, backend=backend)
            (grads[backend],) = torch.autograd.grad(logprob.sum(), leaf)
        contender = f"linear_logprob, {backend}"
        yield compare(contender, f"{case}: log-prob", logprob.detach(), truth, to="float64", at_most=HUGE_ERROR)
    measured, expected = grads[sizes.backend], grads["torch"]
    case = f"{case}: gradient of hidden"
    yield compare("linear_logprob", case, measured, expected, to="the torch backend", at_most=GRADIENT_ERROR)


def chunked_truth(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Log-probs in float64, some columns at a time."""
    exact = hidden.double()
    lse = torch.full(target.shape, -torch.inf, dtype=torch.float64, device=hidden.device)
    for chunk in weight.split(TRUTH_COLUMNS):
        lse = torch.logaddexp(lse, (exact @ chunk.double().T).logsumexp(-1))
    return (exact * weight[target].double()).sum(-1) - lse
