"""The head in row blocks and vocabulary tiles, in torch: the forward, and the backward's sweep for both backends.

With z the `[N, V]` logits after scale, soft cap and temperature, the forward keeps per row
m = max z, S = sum e^(z - m), sum e^(z - m) (z - m) and z_target, updated tile by tile. The backward forms each tile
again:

    dL/dz_v = e^(z_v - m) (a + b (z_v - m)) + g_logprob 1[v = target]
    a = (g_lse - g_logprob + g_entropy (log S - entropy)) / S,   b = -g_entropy / S

then dL/dx_v = dL/dz_v (1 - tanh^2) logit_scale / temperature, which the products turn into the gradients.

Legend: N rows (tokens), n live rows, R rows of a block, H hidden size, V vocabulary, C columns of a tile, r LoRA rank.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DEFAULT_WORKSPACE_BYTES = {"cpu": 64 * 2**20}
DEFAULT_WORKSPACE_BYTES_GPU = 256 * 2**20
ROW_MULTIPLE = 16
"""Row blocks are padded to this multiple: BLAS then computes a row the same way whatever the number of rows."""
MAX_COLUMNS = 4096
"""Columns of a vocabulary tile: fastest for the bare products on a CPU."""
PASS_BYTES = 4 * 2**20
"""Elementwise work goes over this much of a tile at a time: little enough for the cache, enough for two threads."""
DEEPEST = {torch.float32: -87.0, torch.float64: -708.0}
"""z - m is clamped here: e^(z - m) stays a normal number, 1e-38 where the sum is 1 or more. Results that underflow make
a CPU's exp 20 times slower, and -inf times 0 cannot arise."""
LOWEST = -1e30
"""Start of the running maximum. Finite, so that a tile of -inf gives e^(-inf - m) = 0 and no NaN."""


class Lora(NamedTuple):
    """The head is weight + scaling * b @ a."""

    a: Tensor
    """[r, H]"""
    b: Tensor
    """[V, r]"""
    scaling: float


@dataclass(frozen=True)
class Head:
    """The head of a call, as every tile needs it."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    lora: Lora | None
    softcap: float | None
    logit_scale: float
    compute: torch.dtype
    """of the products' inputs; they are rounded to it first"""

    @property
    def accumulate(self) -> torch.dtype:
        """of the products' results, the statistics and the gradients under way"""
        return torch.float64 if self.compute == torch.float64 else torch.float32

    @property
    def operand(self) -> torch.dtype:
        """What the products are called with. A CPU has no 16-bit product with a float32 result: tiles are widened."""
        return self.compute if self.weight.is_cuda else self.accumulate

    def operands(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.compute).to(self.operand)


class Blocks(NamedTuple):
    """Rows of a block, columns of a tile, and rows of a tile that the elementwise work takes at a time."""

    rows: int
    columns: int
    pass_rows: int

    def columns_of(self, vocabulary: int) -> list[tuple[int, int]]:
        return [(c, min(c + self.columns, vocabulary)) for c in range(0, vocabulary, self.columns)]

    def rows_of(self, rows: int) -> list[tuple[int, int]]:
        """Equal blocks, as few as `self.rows` allows."""
        count = max(1, math.ceil(rows / self.rows))
        step = _round_up(math.ceil(rows / count), ROW_MULTIPLE)
        return [(r, min(r + step, rows)) for r in range(0, rows, step)] if rows else []


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def default_workspace(device: torch.device) -> int:
    return DEFAULT_WORKSPACE_BYTES.get(device.type, DEFAULT_WORKSPACE_BYTES_GPU)


def choose_blocks(vocabulary: int, depth: int, workspace: int, itemsize: int, converted: bool) -> Blocks:
    """The largest blocks whose scratch fits `workspace` bytes; at least 16 x 16. Does not depend on the number of rows.

    `depth` is H + r. A quarter is for elementwise work, another for weight tiles in a second dtype where `converted`,
    the rest for the rows. Rows and columns each grow with the workspace, or stay.
    """
    widest = min(MAX_COLUMNS, _round_up(vocabulary, ROW_MULTIPLE))
    per_column = itemsize * max(3 * ROW_MULTIPLE, 3 * depth if converted else 0)
    columns = widest
    while columns > ROW_MULTIPLE and columns * per_column > workspace // 4:
        columns = max(ROW_MULTIPLE, _round_up(columns // 2, ROW_MULTIPLE))
    for_rows = workspace - workspace // 4 * (2 if converted else 1)
    rows = for_rows // (itemsize * (widest + 3 * depth) * ROW_MULTIPLE) * ROW_MULTIPLE
    pass_rows = min(PASS_BYTES, workspace // 8) // (columns * itemsize * ROW_MULTIPLE) * ROW_MULTIPLE
    return Blocks(max(rows, ROW_MULTIPLE), columns, max(pass_rows, ROW_MULTIPLE))


def _converted(head: Head) -> bool:
    """Whether weight tiles exist a second time in another dtype, or their gradients in float32 beside it."""
    return head.weight.dtype not in (head.operand, head.accumulate) or head.operand != head.accumulate


def blocks_of(head: Head, workspace: int) -> Blocks:
    vocabulary, hidden_size = head.weight.shape
    depth = hidden_size + (head.lora.a.shape[0] if head.lora else 0)
    return choose_blocks(vocabulary, depth, workspace, head.accumulate.itemsize, _converted(head))


def scratch_bytes(head: Head, rows: int, workspace: int) -> int:
    """Bound on the scratch of a call with so many rows, forward and backward."""
    blocks = blocks_of(head, workspace)
    depth = head.weight.shape[1] + (head.lora.a.shape[0] if head.lora else 0)
    tall = min(blocks.rows, _round_up(rows, ROW_MULTIPLE))
    numbers = tall * (blocks.columns + 3 * depth) + 2 * min(blocks.pass_rows, tall) * blocks.columns
    if _converted(head):
        numbers += 3 * blocks.columns * depth
    return numbers * head.accumulate.itemsize


@contextlib.contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Float32 products in float32 (no TF32, no bfloat16) and no autocast inside the op, whatever is set outside."""
    precision = torch.get_float32_matmul_precision()
    try:
        if precision != "highest":
            torch.set_float32_matmul_precision("highest")
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)


def gather_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of `[..., H]` by flat position, without the flattened copy that a non-contiguous tensor would need."""
    if tensor.dim() == 2:
        return tensor.index_select(0, index)
    return tensor[torch.unravel_index(index, tensor.shape[:-1])]


def _padded(values: Tensor, rows: int, fill: float) -> Tensor:
    out = values.new_full((rows,), fill)
    out[: values.shape[0]] = values
    return out


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class RowBlock(NamedTuple):
    """Some live rows, padded to a multiple of 16 with rows that give zeros."""

    positions: Tensor
    """int64, among the call's rows"""
    hidden: Tensor
    """[R, H], operands"""
    low_rank: Tensor
    """scaling * hidden @ a.T `[R, r]`, float32: too small a product to be worth rounding for; r = 0 without LoRA"""
    target: Tensor
    temperature: Tensor | float

    @property
    def padded(self) -> int:
        return self.hidden.shape[0]


def row_block(head: Head, hidden: Tensor, target: Tensor, temperature: Tensor | float, index: Tensor) -> RowBlock:
    rows = _round_up(index.shape[0], ROW_MULTIPLE)
    block = torch.zeros(rows, hidden.shape[-1], dtype=head.operand, device=hidden.device)
    block[: index.shape[0]] = head.operands(gather_rows(hidden, index))
    rank = head.lora.a.shape[0] if head.lora else 0
    low_rank = torch.empty(rows, rank, dtype=head.accumulate, device=hidden.device)
    if head.lora:
        _product(block.to(head.accumulate), head.lora.a.to(head.accumulate).T, low_rank)
        low_rank.mul_(head.lora.scaling)
    if isinstance(temperature, Tensor):
        temperature = _padded(temperature.reshape(-1)[index].to(head.accumulate), rows, 1.0)
    return RowBlock(index, block, low_rank, _padded(target.reshape(-1)[index], rows, -1), temperature)


class Ranges(NamedTuple):
    """The row blocks and vocabulary tiles of a call."""

    rows: list[tuple[int, int]]
    columns: list[tuple[int, int]]
    pass_rows: int

    @classmethod
    def of(cls, head: Head, workspace: int, rows: int) -> "Ranges":
        blocks = blocks_of(head, workspace)
        return cls(blocks.rows_of(rows), blocks.columns_of(head.weight.shape[0]), blocks.pass_rows)

    @property
    def tallest(self) -> int:
        return max((_round_up(stop - start, ROW_MULTIPLE) for start, stop in self.rows), default=0)

    @property
    def widest(self) -> int:
        return max(_round_up(stop - start, ROW_MULTIPLE) for start, stop in self.columns)


class Tiles:
    """Scratch, and the logits tiles formed in it. A tile is `[R, C rounded up to 16s]`, -inf past V."""

    def __init__(self, head: Head, ranges: Ranges) -> None:
        self.head = head
        self.pass_rows = min(ranges.pass_rows, ranges.tallest)
        like = torch.empty(0, dtype=head.accumulate, device=head.weight.device)
        self._tile = like.new_empty(ranges.tallest * ranges.widest)
        self._spare = like.new_empty(2, self.pass_rows * ranges.widest)

    def logits(self, block: RowBlock, weight: Tensor, start: int, stop: int) -> Tensor:
        """logit-scale, cap and temperature still to come: hidden @ weight.T + low_rank @ b.T + bias."""
        head, width = self.head, _round_up(stop - start, ROW_MULTIPLE)
        tile = self._tile[: block.padded * width].view(block.padded, width)
        products = tile[:, : stop - start]
        _product(block.hidden, weight.T, products)
        if head.lora:
            _add_product(products, block.low_rank, head.lora.b[start:stop].to(head.accumulate).T)
        if head.bias is not None:
            products.add_(head.bias[start:stop].to(head.accumulate))
        return tile

    def passes(self, tile: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, slice]]:
        """Parts of a tile that fit the cache, each with two spares of its shape and the slice of its rows."""
        for start in range(0, tile.shape[0], self.pass_rows):
            rows = slice(start, min(start + self.pass_rows, tile.shape[0]))
            part = tile[rows]
            yield part, *self._spare[:, : part.numel()].view(2, *part.shape), rows

    def finish_logits(self, part: Tensor, slope: Tensor, block: RowBlock, rows: slice, valid: int) -> None:
        """Scale, cap and temperature, in place; under a cap, `slope` receives its derivative 1 - tanh^2."""
        head = self.head
        if head.logit_scale != 1.0:
            part.mul_(head.logit_scale)
        if head.softcap is not None:
            part.div_(head.softcap).tanh_()
            torch.mul(part, part, out=slope).neg_().add_(1.0)
            part.mul_(head.softcap)
        if isinstance(block.temperature, Tensor):
            part.div_(block.temperature[rows, None])
        elif block.temperature != 1.0:
            part.div_(block.temperature)
        if valid < part.shape[1]:
            part[:, valid:] = -math.inf


# ---- forward -------------------------------------------------------------------------------------------------------


class RowStats(NamedTuple):
    """Statistics of rows over the columns seen so far."""

    shift: Tensor
    """m"""
    total: Tensor
    """S"""
    weighted: Tensor | None
    """sum e^(z - m) (z - m)"""
    picked: Tensor
    """z_target"""

    def of(self, rows: slice) -> "RowStats":
        weighted = None if self.weighted is None else self.weighted[rows]
        return RowStats(self.shift[rows], self.total[rows], weighted, self.picked[rows])

    def take(self, rows: slice, other: "RowStats") -> None:
        """Copies the first of `other`'s rows to `rows` here."""
        for own, value in zip(self, other, strict=True):
            if own is not None and value is not None:
                own[rows] = value[: rows.stop - rows.start]


def empty_stats(rows: int, like: Tensor, dtype: torch.dtype, with_entropy: bool) -> RowStats:
    zeros = [torch.zeros(rows, dtype=dtype, device=like.device) for _ in range(3)]
    return RowStats(torch.full_like(zeros[0], LOWEST), zeros[0], zeros[1] if with_entropy else None, zeros[2])


def _fold(part: Tensor, spare: Tensor, target: Tensor, start: int, stop: int, stats: RowStats) -> None:
    """Takes the columns [start, stop) of a few rows into their statistics; destroys `part`."""
    owned = (target >= start) & (target < stop)
    column = (target - start).clamp_(0, stop - start - 1)[:, None]
    stats.picked.copy_(torch.where(owned, part.gather(1, column)[:, 0], stats.picked))
    shift = torch.maximum(stats.shift, part.amax(1))
    fade = torch.exp(stats.shift - shift)
    part.sub_(shift[:, None]).clamp_(min=DEEPEST[part.dtype])
    if stats.weighted is None:
        exps = part.exp_()
    else:
        exps = torch.exp(part, out=spare)
        moved = (stats.weighted + (stats.shift - shift) * stats.total) * fade
        stats.weighted.copy_(moved + part.mul_(exps).sum(1))
    stats.total.mul_(fade).add_(exps.sum(1))
    stats.shift.copy_(shift)


def row_stats(
    head: Head,
    hidden: Tensor,
    target: Tensor,
    temperature: Tensor | float,
    index: Tensor,
    workspace: int,
    with_entropy: bool,
) -> RowStats:
    """Statistics `[n]` of the rows at `index`."""
    ranges = Ranges.of(head, workspace, index.shape[0])
    tiles = Tiles(head, ranges)
    result = empty_stats(index.shape[0], hidden, head.accumulate, with_entropy)
    for first, last in ranges.rows:
        block = row_block(head, hidden, target, temperature, index[first:last])
        stats = empty_stats(block.padded, hidden, head.accumulate, with_entropy)
        for start, stop in ranges.columns:
            tile = tiles.logits(block, head.operands(head.weight[start:stop]), start, stop)
            for part, spare, slope, rows in tiles.passes(tile):
                tiles.finish_logits(part, slope, block, rows, stop - start)
                _fold(part, spare, block.target[rows], start, stop, stats.of(rows))
        result.take(slice(first, last), stats)
    return result


# ---- backward ------------------------------------------------------------------------------------------------------


class Slopes(NamedTuple):
    """What turns a row's logits into their gradients, `[n]` each; all but `shift` times logit_scale / temperature."""

    shift: Tensor
    """m"""
    a: Tensor
    b: Tensor | None
    at_target: Tensor
    """dL/dz_target, by itself: 1 - p is formed without the cancellation that p near 1 would bring"""

    def of(self, rows: slice, padded: int) -> "Slopes":
        """Some rows, and after them rows that give zeros."""
        b = None if self.b is None else _padded(self.b[rows], padded, 0.0)
        shift, a = _padded(self.shift[rows], padded, math.inf), _padded(self.a[rows], padded, 0.0)
        return Slopes(shift, a, b, _padded(self.at_target[rows], padded, 0.0))

    def over(self, unit: Tensor) -> "Slopes":
        return Slopes(self.shift, self.a / unit, None if self.b is None else self.b / unit, self.at_target / unit)


def row_slopes(
    head: Head,
    temperature: Tensor | float,
    logprob: Tensor,
    shift: Tensor,
    total: Tensor,
    entropy: Tensor | None,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
) -> Slopes:
    factor = head.logit_scale / temperature
    a, b = torch.zeros_like(grad_logprob) if grad_lse is None else grad_lse, None
    at_target = -torch.expm1(logprob) * grad_logprob
    if grad_entropy is not None and entropy is not None:
        log_total = total.log()
        a = a + grad_entropy * (log_total - entropy)
        b = -grad_entropy / total * factor
        at_target = at_target - torch.exp(logprob) * grad_entropy * (logprob + log_total)
    at_target = at_target + torch.exp(logprob) * a
    return Slopes(shift, (a - grad_logprob) / total * factor, b, at_target * factor)


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool
    lora_a: bool
    lora_b: bool


class _ColumnGrad:
    """A gradient `[V, k]` that gathers dlogits.T @ right over the row blocks, in float32 whatever its own dtype."""

    def __init__(self, like: Tensor, head: Head, columns: int) -> None:
        self.grad = torch.zeros_like(like, memory_format=torch.contiguous_format)
        self.matrix = self.grad.view(like.shape[0], -1)
        self.exact = like.dtype == head.accumulate
        if not self.exact:
            self._room = torch.empty(columns, self.matrix.shape[1], dtype=head.accumulate, device=like.device)

    def add(
        self, dlogits: Tensor, right: Tensor, start: int, stop: int, first: bool, last: bool, unit: Tensor | None
    ) -> None:
        """`first` and `last` say whether this is the first or last row block that this column tile sees."""
        total = self.matrix[start:stop] if self.exact else self._room[: stop - start]
        if first and not self.exact:
            total.zero_()
        _add_product(total, dlogits.T, right)
        if last:
            if unit is not None:
                total.mul_(unit)
            if not self.exact:
                self.matrix[start:stop] = total


FormDlogits = Callable[[RowBlock, Slopes, Tensor, int, int], Tensor]


def torch_dlogits(head: Head, ranges: Ranges) -> FormDlogits:
    """dL/dx of a tile, where x = hidden @ weight.T + bias, from the recomputed logits."""
    tiles = Tiles(head, ranges)

    def form(block: RowBlock, slopes: Slopes, weight: Tensor, start: int, stop: int) -> Tensor:
        valid = stop - start
        tile = tiles.logits(block, weight, start, stop)
        owned = (block.target >= start) & (block.target < stop)
        column = (block.target - start).clamp_(0, valid - 1)[:, None]
        for part, spare, slope, rows in tiles.passes(tile):
            tiles.finish_logits(part, slope, block, rows, valid)
            part.sub_(slopes.shift[rows, None]).clamp_(min=DEEPEST[part.dtype])
            if slopes.b is None:
                part.exp_().mul_(slopes.a[rows, None])
            else:
                exps = torch.exp(part, out=spare)
                part.mul_(slopes.b[rows, None]).add_(slopes.a[rows, None]).mul_(exps)
            at_target = torch.where(owned[rows], slopes.at_target[rows], part.gather(1, column[rows])[:, 0])
            part.scatter_(1, column[rows], at_target[:, None])
            if head.softcap is not None:
                part.mul_(slope)
        return tile[:, :valid].to(head.operand)

    return form


class _Sweep:
    """The backward of a call: which gradients, and the two orders in which rows and columns can be gone through."""

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        target: Tensor,
        temperature: Tensor | float,
        index: Tensor,
        slopes: Slopes,
        unit: Tensor | None,
        wanted: Wanted,
        workspace: int,
        make_form: Callable[[Head, Ranges], FormDlogits],
        partial: bool,
    ) -> None:
        self.head, self.hidden, self.target, self.temperature = head, hidden, target, temperature
        self.index, self.slopes, self.unit, self.wanted = index, slopes, unit, wanted
        self.ranges = Ranges.of(head, workspace, index.shape[0])
        self.form = make_form(head, self.ranges)
        self.grad_hidden = self.grad_a = None
        if wanted.hidden:
            dtype = head.accumulate if partial else hidden.dtype
            self.grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        if wanted.lora_a and head.lora:
            self.grad_a = torch.zeros_like(head.lora.a, dtype=head.accumulate)
        columns = (head.weight, head.bias, head.lora and head.lora.b)
        self.column_grads = [
            _ColumnGrad(tensor, head, self.ranges.widest) if want and tensor is not None else None
            for tensor, want in zip(columns, (wanted.weight, wanted.bias, wanted.lora_b), strict=True)
        ]

    def run(self) -> None:
        """One sweep, or two where 16-bit column gradients could not be summed in the workspace beside the rows' own."""
        together = all(grad.exact for grad in self.column_grads if grad) or len(self.ranges.rows) == 1
        if self.wanted.hidden or self.wanted.lora_a or together:
            self._rows_outside(with_columns=together)
        if not together:
            self._columns_outside()

    def _block(self, first: int, last: int) -> tuple[RowBlock, Slopes]:
        block = row_block(self.head, self.hidden, self.target, self.temperature, self.index[first:last])
        return block, self.slopes.of(slice(first, last), block.padded)

    def _operands(self, start: int, stop: int) -> Tensor:
        return self.head.operands(self.head.weight[start:stop])

    def _rows_outside(self, with_columns: bool) -> None:
        for first, last in self.ranges.rows:
            block, slopes = self._block(first, last)
            total = torch.zeros(block.hidden.shape, dtype=self.head.accumulate, device=self.hidden.device)
            low_rank = torch.zeros_like(block.low_rank)
            for start, stop in self.ranges.columns:
                weight = self._operands(start, stop)
                dlogits = self.form(block, slopes, weight, start, stop)
                if self.wanted.hidden:
                    _add_product(total, dlogits, weight)
                if self.head.lora and (self.wanted.hidden or self.wanted.lora_a):
                    _add_product(low_rank, dlogits, self.head.operands(self.head.lora.b[start:stop]))
                if with_columns:
                    self._add_columns(block, dlogits, start, stop, first == 0, last == self.index.shape[0])
            self._store_rows(block, total, low_rank)

    def _columns_outside(self) -> None:
        for start, stop in self.ranges.columns:
            weight = self._operands(start, stop)
            for first, last in self.ranges.rows:
                block, slopes = self._block(first, last)
                dlogits = self.form(block, slopes, weight, start, stop)
                self._add_columns(block, dlogits, start, stop, first == 0, last == self.index.shape[0])

    def _add_columns(self, block: RowBlock, dlogits: Tensor, start: int, stop: int, first: bool, last: bool) -> None:
        ones = block.hidden.new_ones(block.padded, 1)
        rights = (block.hidden, ones, block.low_rank.to(self.head.operand))
        for grad, right in zip(self.column_grads, rights, strict=True):
            if grad is not None:
                grad.add(dlogits, right, start, stop, first, last, self.unit)

    def _store_rows(self, block: RowBlock, total: Tensor, low_rank: Tensor) -> None:
        if self.head.lora:
            low_rank = (low_rank * self.head.lora.scaling).to(self.head.operand)
            if self.wanted.hidden:
                _add_product(total, low_rank, self.head.operands(self.head.lora.a))
            if self.grad_a is not None:
                _add_product(self.grad_a, low_rank.T, block.hidden)
        if self.grad_hidden is not None:
            if self.unit is not None:
                total.mul_(self.unit)
            rows = total[: block.positions.shape[0]].to(self.grad_hidden.dtype)
            self.grad_hidden.view(-1, self.hidden.shape[-1]).index_copy_(0, block.positions, rows)


class HeadGrads(NamedTuple):
    """None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None


def head_grads(
    head: Head,
    hidden: Tensor,
    target: Tensor,
    temperature: Tensor | float,
    index: Tensor,
    slopes: Slopes,
    wanted: Wanted,
    workspace: int,
    make_form: Callable[[Head, Ranges], FormDlogits] = torch_dlogits,
    half_tiles: bool = False,
    partial: bool = False,
) -> HeadGrads:
    """Gradients from the rows at `index`, each in its input's dtype; all other rows give zeros.

    Those of hidden and lora a stay in float32 where they are `partial`, to be summed over shards of the vocabulary.

    With `half_tiles` the dlogits are stored in float16: they are then formed in units of a power of two near their
    largest slope, so that small upstream gradients do not underflow, and the sums are multiplied back.
    """
    unit = None
    if half_tiles and index.shape[0]:
        largest = torch.stack([value.abs().max() for value in slopes[1:] if value is not None]).max()
        unit = torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-30))) - 12)
        slopes = slopes.over(unit)
    sweep = _Sweep(head, hidden, target, temperature, index, slopes, unit, wanted, workspace, make_form, partial)
    sweep.run()
    grad_a = sweep.grad_a
    if grad_a is not None and head.lora:
        grad_a = grad_a if unit is None else grad_a * unit
        grad_a = grad_a if partial else grad_a.to(head.lora.a.dtype)
    weight, bias, grad_b = (grad.grad if grad else None for grad in sweep.column_grads)
    return HeadGrads(sweep.grad_hidden, weight, bias, grad_a, grad_b)
