"""What the card reaches without us, and each of our kernels alone: bare products, the sweep of splits and of tiles.

Without it a missed bound elsewhere says nothing about its reason. Each kernel's numbers are compared with plain torch.

Legend: T tokens, H hidden size, V vocabulary, C columns of a tile, R rows of a block.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from amir_kernels.linear_logprob import triton_tiles
from amir_kernels.linear_logprob.backward import RowCoefficients
from amir_kernels.linear_logprob.head import Head, add_product, exact_products
from amir_kernels.linear_logprob.rows import RowBlock, RowSelection
from amir_kernels.linear_logprob.tiling import Tiling, default_workspace
from amir_kernels.linear_logprob.triton_tiles import Config, device_architecture, select_config, vocabulary_splits
from contenders import HeadSize

from .judging import relative_difference
from .rates import event_seconds, launch_microseconds, predict, rates_of
from .runner import failures
from .sizes import Sizes
from .stage import Part, Ratio, Row, failed, make_row, message_of

AGREEMENT = 0.02
"""Largest relative difference of a kernel's numbers from plain torch, in norm: 16-bit results are rounded by 0.4%."""
COMPARED_ROWS = 16
LOGIT_BYTES = 10
"""Bytes moved for a kept logit: written in float32, read, and written in 16 bits."""


def parts(sizes: Sizes) -> list[Part]:
    """The parts, the card itself first."""
    head = sizes.timed_heads[0]
    return [
        Part("bare products", partial(bare_products, sizes, head), 20),
        Part("forward kernel", partial(forward_kernel, sizes, head), 30),
        Part("backward kernels", partial(backward_kernels, sizes, head), 20),
        Part("products of the backward", partial(backward_products, sizes, head), 15),
        Part("splits", partial(sweep_splits, sizes, head), 25, own=False),
        Part("tiles", partial(sweep_tiles, sizes, head), 30, own=False),
    ]


def timed_row(
    name: str, case: str, workload: dict[str, Any], work: Callable[[], object], sizes: Sizes, **prediction: Any
) -> Row:
    """Seconds of the GPU, microseconds of the host, and the prediction."""
    seconds = event_seconds(work, sizes.device, sizes.repeats)
    expected = predict(rates_of(sizes), **prediction)
    observed = {"host_microseconds": launch_microseconds(work, sizes.device, sizes.launches)}
    if expected["flops"]:
        observed["tflops"] = expected["flops"] / min(seconds) / 1e12
    return make_row(name, case, workload, seconds=seconds, expected=expected, observed=observed)


# ---- the card ------------------------------------------------------------------------------------------------------


def bare_products(sizes: Sizes, head: HeadSize) -> Iterator[Row]:
    """The card's rates, then the head's product at each number of tokens as one bare product."""
    rates = rates_of(sizes)
    observed = {
        "tflops": rates.products / 1e12,
        "gb_per_second": rates.bandwidth / 1e9,
        "multiprocessors": rates.multiprocessors,
    }
    yield make_row("torch", "the card's rates", {"check": "rates", "edge": sizes.product}, observed=observed)
    for tokens in sizes.kernel_tokens:
        hidden, weight = inputs(sizes, head, tokens)
        out = torch.empty(tokens, head.vocabulary, dtype=sizes.dtype, device=sizes.device)
        work = partial(torch.mm, hidden, weight.T, out=out)
        flops = 2 * tokens * head.hidden * head.vocabulary
        workload = {"check": "bare product", "tokens": tokens, **size_of(head)}
        moved = sum(tensor.nbytes for tensor in (hidden, weight, out))
        yield timed_row("torch.mm", f"{head}, T = {tokens:,}", workload, work, sizes, flops=flops, moved=moved)


def inputs(sizes: Sizes, head: HeadSize, tokens: int) -> tuple[Tensor, Tensor]:
    """Hidden states and a head, with logits of standard deviation 2."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, head.hidden, device=sizes.device).to(sizes.dtype)
    weight = torch.randn(head.vocabulary, head.hidden, device=sizes.device).mul_(2 * head.hidden**-0.5)
    return hidden, weight.to(sizes.dtype)


def size_of(head: HeadSize) -> dict[str, Any]:
    """The head in a workload."""
    return {"model": head.name, "hidden_size": head.hidden, "vocabulary": head.vocabulary}


# ---- our kernels ---------------------------------------------------------------------------------------------------


def block_of(sizes: Sizes, size: HeadSize, tokens: int) -> tuple[Head, RowBlock]:
    """A head, and a block of all tokens."""
    hidden, weight = inputs(sizes, size, tokens)
    target = torch.randint(size.vocabulary, (tokens,), device=sizes.device)
    head = Head(weight, None, None, None, 1.0, sizes.dtype)
    rows = RowSelection(hidden, target, 1.0, torch.arange(tokens, device=sizes.device))
    return head, rows.block(head, 0, tokens)


def plain_logits(head: Head, block: RowBlock) -> Tensor:
    """The logits of the first rows, in float32."""
    with exact_products(head.weight.device):
        return block.hidden[:COMPARED_ROWS].float() @ head.weight.float().T


def forward_row(sizes: Sizes, size: HeadSize, tokens: int, case: str, workload: dict[str, Any]) -> Iterator[Row]:
    """The statistics of a block as they are launched now, and how far they are from plain torch."""
    from amir_kernels.linear_logprob.triton_backend import block_stats

    head, block = block_of(sizes, size, tokens)
    config = select_config(head, device_architecture(head.weight.device))
    splits, _ = vocabulary_splits(size.vocabulary, config)
    yield timed_row(
        "stats_kernel",
        f"{size}, T = {tokens:,}{case}",
        {"tokens": tokens, "splits": splits, **size_of(size), **workload},
        partial(block_stats, head, block, False),
        sizes,
        flops=2 * tokens * size.hidden * size.vocabulary,
        moved=head.weight.nbytes + block.hidden.nbytes,
        programs=math.ceil(block.padded / config.rows) * splits,
        at_once=config.programs,
    )
    stats = block_stats(head, block, False)
    rows = min(COMPARED_ROWS, tokens)
    measured, expected = (stats.shift + stats.total.log())[:rows], plain_logits(head, block)[:rows].logsumexp(-1)
    yield agreement("stats_kernel", f"log-sum-exp, {size}, T = {tokens:,}{case}", measured, expected)


def agreement(name: str, case: str, measured: Tensor, expected: Tensor) -> Row:
    """The relative difference from plain torch, and its bound."""
    difference = relative_difference(measured, expected)
    return make_row(name, case, {"check": case}, ratio=Ratio("plain torch", difference, AGREEMENT))


def forward_kernel(sizes: Sizes, head: HeadSize) -> Iterator[Row]:
    """The forward at each number of tokens."""
    for tokens in sizes.kernel_tokens:
        yield from forward_row(sizes, head, tokens, "", {"check": "forward"})


def backward_kernels(sizes: Sizes, size: HeadSize) -> Iterator[Row]:
    """A tile of dlogits, recomputed and from kept logits; both have the same bits."""
    from amir_kernels.linear_logprob.triton_backend import block_stats, empty_kept_logits, kept_dlogits, triton_dlogits

    head, _ = block_of(sizes, size, 16)
    tiling = Tiling.of(head, default_workspace(head.weight.device), sizes.kernel_tokens[-1])
    (_, tokens), (start, stop) = tiling.rows[0], tiling.columns[0]
    head, block = block_of(sizes, size, tokens)
    config = select_config(head, device_architecture(head.weight.device))
    logits = torch.full((block.padded,), 1.0, device=sizes.device)
    coefficients = RowCoefficients(3 * logits, 0.5 * logits, None, -0.25 * logits)
    workload = {"tokens": tokens, "columns": stop - start, **size_of(size)}
    case = f"{size}, a tile of {tokens:,} x {stop - start:,}"
    formed = triton_dlogits(head, tiling)
    yield timed_row(
        "dlogits_kernel",
        case,
        {"check": "dlogits", **workload},
        partial(formed, block, coefficients, head.weight, start, stop),
        sizes,
        flops=2 * tokens * size.hidden * (stop - start),
        programs=math.ceil(block.padded / config.rows) * math.ceil((stop - start) / config.columns),
        at_once=config.programs,
    )
    dlogits = formed(block, coefficients, head.weight, start, stop)
    rows, target = min(COMPARED_ROWS, tokens), block.target[:COMPARED_ROWS]
    expected = 0.5 * (plain_logits(head, block)[:rows, start:stop] - 3).exp()
    inside = (target >= start) & (target < stop)
    expected[inside[:rows], (target[inside] - start)] = -0.25
    yield agreement("dlogits_kernel", f"dlogits, {case}", dlogits[:rows, : stop - start].float(), expected)
    dlogits = dlogits.clone()
    kept_rows = min(block.padded, 384)
    head, block = block_of(sizes, size, tokens)
    kept_logits = empty_kept_logits(head, block.padded)
    block_stats(head, block, False, kept_logits)
    from_kept = kept_dlogits(head, tiling, kept_logits)
    yield timed_row(
        "kept_dlogits_kernel",
        case,
        {"check": "kept dlogits", **workload},
        partial(from_kept, block, coefficients, head.weight, start, stop),
        sizes,
        moved=block.padded * (stop - start) * (4 + sizes.dtype.itemsize),
    )
    again = from_kept(block, coefficients, head.weight, start, stop)
    count = float((again[:kept_rows] != dlogits[:kept_rows]).sum())
    bits = Ratio("entries with other bits", count, 0)
    yield make_row("kept_dlogits_kernel", f"the same dlogits, {case}", {"check": "kept bits", **workload}, ratio=bits)


def backward_products(sizes: Sizes, size: HeadSize) -> Iterator[Row]:
    """The vendor's products of a tile, as the backward calls them: into hidden's gradient, and into the weight's."""
    head, _ = block_of(sizes, size, 16)
    tiling = Tiling.of(head, default_workspace(head.weight.device), sizes.kernel_tokens[-1])
    rows, (start, stop) = tiling.tallest, tiling.columns[0]
    columns = stop - start
    hidden, weight = inputs(sizes, size, rows)
    dlogits = torch.randn(rows, columns, device=sizes.device).to(head.operand)
    flops = 2 * rows * columns * size.hidden
    products: dict[str, tuple[Tensor, Tensor]] = {
        "dlogits @ weight": (dlogits, weight[start:stop]),
        "dlogits.T @ hidden": (dlogits.T, hidden),
    }
    for name, (left, right) in products.items():
        total = torch.zeros(left.shape[0], size.hidden, device=sizes.device)

        def work(total: Tensor = total, left: Tensor = left, right: Tensor = right) -> None:
            with exact_products(total.device):
                add_product(total, left, right)

        workload = {"check": name, "rows": rows, "columns": columns, **size_of(size)}
        moved = left.nbytes + right.nbytes + 2 * total.nbytes
        yield timed_row(
            "the vendor", f"{name}, {size}, {rows:,} x {columns:,}", workload, work, sizes, flops=flops, moved=moved
        )


# ---- sweeps --------------------------------------------------------------------------------------------------------


def sweep_splits(sizes: Sizes, size: HeadSize) -> Iterator[Row]:
    """The forward with other numbers of columns in a work item."""
    for tokens in sizes.kernel_tokens:
        for columns in sizes.splits:
            with patch.object(triton_tiles, "SPLIT_COLUMNS", columns):
                workload = {"check": "splits", "split_columns": columns}
                yield from forward_row(sizes, size, tokens, f", splits of {columns:,}", workload)


def sweep_tiles(sizes: Sizes, size: HeadSize) -> Iterator[Row]:
    """The forward with other tiles than the table's; one that does not compile or fit is a row."""
    head, _ = block_of(sizes, size, 16)
    kind = "float32" if head.compute == torch.float32 else "plain"
    tokens = sizes.kernel_tokens[-1]
    for config in sizes.tiles:
        name = f", tile {config.rows} x {config.columns} x {config.depth}, {config.warps} warps, {config.stages} stages"
        with patch.dict(triton_tiles.TABLE, entries(head, kind, config)):
            try:
                yield from forward_row(sizes, size, tokens, name, {"check": "tiles", **described(config)})
            except failures() as error:
                yield failed("tile", f"{size}, T = {tokens:,}{name}", message_of(error))


def entries(head: Head, kind: str, config: Config) -> dict[tuple[str, str, str], Config]:
    """The rows of the table that would serve the head, replaced by `config`."""
    way = "descriptors" if config.descriptors else "pointers"
    name = triton_tiles.family(device_architecture(head.weight.device))
    ways: Sequence[str] = ["pointers", "descriptors"] if way == "pointers" else [way]
    return {(name, kind, way): config for way in ways}


def described(config: Config) -> dict[str, Any]:
    """A tile in a workload."""
    return {"tile_rows": config.rows, "tile_columns": config.columns, **config._asdict()} | {"rows": config.rows}
