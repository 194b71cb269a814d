"""Gradients formed in the forward, on the torch backend, for losses that are local to a token.

Frozen head: the gradient of a log-prob to its hidden state is

    d logprob / d hidden = (logit_scale / temperature) (c_y (1 - p_y) w_y - sum_{v != y} p_v c_v w_v)

with w_v the head's rows, c_v = 1 - tanh^2 the cap's derivative (1 without a cap), p = softmax(z), y the target. Its sum
is accumulated together with the log-sum-exp, so one sweep over the vocabulary gives both: 4 n H V flops instead of 6,
and a backward that only scales rows. The loss's upstream gradient is not needed for it.

Trained head: one product forms a block's logits, stored as e^(z - m) with the m of the moment; the loss then gives
d loss / d logprob of the block's rows, which turns the logits into their gradients in place, and the products follow:
6 n H V flops instead of 8. A block's products run tile by tile with the next block's logits, which take over each
tile's memory, so that each row of the head is read once for both.

`triton_forward_gradients` does both on the Triton backend.

Legend: n selected rows, R rows of a block, H hidden size, V vocabulary, r LoRA rank.
"""

from typing import Any

import torch
from torch import Tensor

from .._checks import check_batched_gradient
from .._double_backward import refuse_double_backward
from .backward import GradientSums, LossGrad, RowCoefficients, coefficients_from_loss
from .head import ROW_MULTIPLE, Head, PerInput, add_product, exact_products, round_up
from .op import CALL_SCHEMA, Call, select_rows
from .rows import RowBlock, RowSelection, RowStats, empty_stats, gather_rows
from .tiling import Tiling, max_tile, tile_size, weight_copies
from .torch_backend import LogitTiles, TargetPlaces, fold_with_cap_grad, locate_targets

# ---- frozen head: log-prob and its gradient to hidden in one sweep -------------------------------------------------


def _block_hidden_grad(head: Head, tiles: LogitTiles, tiling: Tiling, block: RowBlock) -> tuple[RowStats, Tensor]:
    """Statistics and d logprob / d hidden of a block's real rows, without the factor logit_scale / temperature."""
    stats = empty_stats(block.padded, block.hidden, head.accumulate, with_entropy=False)
    cap_grad = torch.ones_like(stats.shift)
    others = torch.zeros(block.hidden.shape, dtype=head.accumulate, device=block.hidden.device)
    others_low_rank = torch.zeros_like(block.low_rank)
    for (start, stop), places in zip(tiling.columns, locate_targets(block.target, tiling.columns), strict=True):
        weight = head.operands(head.weight[start:stop])
        tile = tiles.tile(block, start, stop)
        tiles.raw_logits(block, weight, start, stop, tile)
        shift_before = stats.shift.clone()
        fold_with_cap_grad(tiles, block, tile, stop - start, places, stats, cap_grad)
        rescale = torch.exp(shift_before - stats.shift)[:, None]
        exps = tile[:, : stop - start].to(head.operand)
        add_product(others.mul_(rescale), exps, weight)
        if head.lora:
            add_product(others_low_rank.mul_(rescale), exps, head.operands(head.lora.b[start:stop]))
    stats = stats.select(block.real)
    own = (-torch.expm1(stats.logprob) * cap_grad[block.real])[:, None]
    target = block.target[block.real]
    hidden_grad = own * gather_rows(head.weight, target) - others[block.real] / stats.total[:, None]
    if head.lora:
        low_rank = own * gather_rows(head.lora.b, target) - others_low_rank[block.real] / stats.total[:, None]
        add_product(hidden_grad, low_rank.mul_(head.lora.scaling), head.lora.a.to(head.accumulate))
    return stats, hidden_grad


def _hidden_grad_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """logprob `[...]` and its gradient to hidden `[..., H]`, both 0 where ignored."""
    call = Call(*arguments)
    head, positions, temperature = call.head, select_rows(call, call.weight.shape[0]), call.row_temperature
    rows = RowSelection(call.hidden, call.target, temperature, positions)
    logprob = torch.zeros(call.target.numel(), dtype=head.accumulate, device=call.hidden.device)
    if call.triton:
        from .triton_forward_gradients import triton_hidden_grad

        with exact_products(call.hidden.device):
            logprob[positions], hidden_grad = triton_hidden_grad(head, rows, call.workspace)
        return logprob.view(call.target.shape), hidden_grad
    tiling = Tiling.of(head, call.workspace, rows.num_rows)
    tiles = LogitTiles(head, tiling)
    hidden_grad = logprob.new_zeros(call.target.numel(), call.hidden.shape[-1])
    with exact_products(call.hidden.device):
        for first, last in tiling.rows:
            at = positions[first:last]
            stats, grad = _block_hidden_grad(head, tiles, tiling, rows.block(head, first, last))
            logprob[at] = stats.logprob
            divisor = temperature.reshape(-1)[at, None] if isinstance(temperature, Tensor) else temperature
            hidden_grad[at] = grad.mul_(head.logit_scale / divisor)
    return logprob.view(call.target.shape), hidden_grad.view(call.hidden.shape)


def _hidden_grad_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = Call(*arguments)
    dtype = call.head.accumulate
    return call.hidden.new_empty(call.target.shape, dtype=dtype), call.hidden.new_empty(call.hidden.shape, dtype=dtype)


def _hidden_grad_backward(grad: Tensor, hidden_grad: Tensor, dtype: torch.dtype) -> Tensor:
    return (grad[..., None] * hidden_grad).to(dtype)


def _hidden_grad_fake_backward(grad: Tensor, hidden_grad: Tensor, dtype: torch.dtype) -> Tensor:
    return hidden_grad.new_empty(hidden_grad.shape, dtype=dtype)


logprob_with_hidden_grad_op = torch.library.custom_op(
    "amir_kernels::linear_logprob_hidden_grad",
    _hidden_grad_forward,
    mutates_args=(),
    schema=f"({CALL_SCHEMA}) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
logprob_with_hidden_grad_op.register_fake(_hidden_grad_fake)
_scale_hidden_grad_op = torch.library.custom_op(
    "amir_kernels::linear_logprob_hidden_grad_backward",
    _hidden_grad_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor hidden_grad, ScalarType dtype) -> Tensor",
)
_scale_hidden_grad_op.register_fake(_hidden_grad_fake_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # no zeros [..., H] for the second output, which has no gradient
    ctx.save_for_backward(output[1])
    ctx.dtype = inputs[0].dtype


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    (hidden_grad,) = ctx.saved_tensors
    if grad is not None:
        with torch.no_grad():
            result = _scale_hidden_grad_op(grad, hidden_grad, ctx.dtype)
        grad = refuse_double_backward("linear_policy_loss", result, grad, hidden_grad)
    return grad, *[None] * (len(Call._fields) - 1)


logprob_with_hidden_grad_op.register_autograd(_differentiate, setup_context=_save)


# ---- trained head: each block's gradients as soon as its log-probs are known ---------------------------------------

DEFAULT_WORKSPACE_BYTES = {"cpu": 176 * 2**20}
DEFAULT_WORKSPACE_BYTES_GPU = 256 * 2**20
"""The workspace by default, which holds the logits: on a CPU those of 144 rows of a vocabulary of 262,144, beside the
rows that borrow the weight's gradient, which itself takes 671 MB there."""
MAX_ROWS = {"cpu": 448}
"""Rows of a block beyond which the products gain nothing where a block's logits are stored for the whole vocabulary."""
MAX_ROWS_GPU = 2**20


def default_logits_workspace(device: torch.device) -> int:
    """Bytes of the default workspace where logits are stored."""
    return DEFAULT_WORKSPACE_BYTES.get(device.type, DEFAULT_WORKSPACE_BYTES_GPU)


def forward_tiling(head: Head, workspace: int, logits_workspace: int, rows: int, borrows: bool) -> tuple[Tiling, int]:
    """Row blocks, and the rows of the first one if its logits are stored in the weight's gradient (`borrows`).

    The other blocks have as many rows as the rest of `logits_workspace` bytes holds the logits of, at least 16. The
    tiles are those of `workspace`, so that log-probs are the bits of `linear_logprob`.
    """
    size, vocabulary, itemsize = tile_size(head, workspace), head.weight.shape[0], head.accumulate.itemsize
    columns, max_rows = size.column_tiles(vocabulary), MAX_ROWS.get(head.weight.device.type, MAX_ROWS_GPU)
    beside = itemsize * (2 * (size.columns + len(columns)) + 5 * head.depth)
    space = max(logits_workspace - weight_copies(head) * size.columns * head.depth * itemsize, 0)
    borrowed = 0
    if borrows:
        fit = min(head.weight.shape[1] * (b - a) // round_up(b - a, ROW_MULTIPLE) for a, b in columns)
        borrowed = min(fit, max_tile(head.weight.device).rows, space // (4 * beside)) // ROW_MULTIPLE * ROW_MULTIPLE
    per_row = beside + itemsize * round_up(vocabulary, ROW_MULTIPLE)
    tall = max(space - borrowed * beside, 0) // (per_row * ROW_MULTIPLE) * ROW_MULTIPLE
    borrowed = min(borrowed, rows)
    others = size._replace(rows=min(max(tall, ROW_MULTIPLE), max_rows)).row_blocks(rows - borrowed)
    first = [(0, borrowed)] if borrowed else []
    return Tiling(first + [(borrowed + a, borrowed + b) for a, b in others], columns), borrowed


class _PendingBlock:
    """A row block in progress: its logits are folded tile by tile, then its coefficients turn them into gradients.

    The logits are stored in `logits` `[V or more, rows]`, which is the weight's gradient where that is `borrowed`.
    """

    def __init__(
        self, head: Head, block: RowBlock, columns: list[tuple[int, int]], logits: Tensor, borrowed: bool
    ) -> None:
        self.block, self.logits, self.borrowed = block, logits, borrowed
        self.places = locate_targets(block.target, columns)
        self.stats = empty_stats(block.padded, block.hidden, head.accumulate, with_entropy=False)
        self.cap_grad = torch.ones_like(self.stats.shift)
        """1 - tanh^2 at the target"""
        self.shifts: list[Tensor] = []
        """m after each tile"""
        self.total = torch.zeros(block.hidden.shape, dtype=head.accumulate, device=block.hidden.device)
        self.low_rank = torch.zeros_like(block.low_rank)
        self.factors = self.at_target = self.cap_grad

    def set_coefficients(self, coefficients: RowCoefficients) -> None:
        """dL/dx is e^(z - m_tile) (1 - tanh^2) times e^(m_tile - m) a, and has its own value at the target."""
        self.factors = torch.exp(torch.stack(self.shifts) - self.stats.shift).mul_(coefficients.a)
        self.at_target = coefficients.at_target * self.cap_grad

    def tile(self, start: int, stop: int) -> Tensor:
        """Each tile is contiguous: the products are slower into rows that lie a whole vocabulary apart."""
        rows, width = self.block.padded, round_up(stop - start, ROW_MULTIPLE)
        return self.logits[start:].view(-1)[: rows * width].view(rows, width)


class ForwardGradients(GradientSums):
    """The gradients of a loss that is known from each block's log-probs, which are then in `logprob` `[n]`."""

    def __init__(
        self,
        head: Head,
        rows: RowSelection,
        needs_grad: PerInput[bool],
        workspace: int,
        logits_workspace: int,
        loss_grad: LossGrad,
    ) -> None:
        tiling, self._borrowed = forward_tiling(head, workspace, logits_workspace, rows.num_rows, needs_grad.weight)
        self._loss_grad = loss_grad
        self._tiles = LogitTiles(head, tiling)
        self.logprob = torch.zeros(rows.num_rows, dtype=head.accumulate, device=rows.hidden.device)
        tallest = tiling._replace(rows=[(a, b) for a, b in tiling.rows if a >= self._borrowed]).tallest
        self._logits = self.logprob.new_empty(round_up(head.weight.shape[0], ROW_MULTIPLE), tallest)
        super().__init__(head, rows, None, needs_grad, tiling, False)

    def run(self) -> PerInput[Tensor | None]:
        """Sweeps over the blocks; each sweep folds one block's logits and uses those of the block before."""
        before: _PendingBlock | None = None
        for rows in (*self.tiling.rows, None):
            block = None if rows is None else self._pending_block(*rows)
            for number, (start, stop) in enumerate(self.tiling.columns if before or block else ()):
                weight = self.operands(start, stop)
                if before:
                    self._use(before, weight, number, start, stop)
                if block:
                    self._fold(block, weight, block.places[number], start, stop)
            if before:
                self.store_rows(before.block, before.total, before.low_rank)
            if block and rows:
                self.logprob[slice(*rows)], coefficients = coefficients_from_loss(
                    self.head, block.block, block.stats, self._loss_grad
                )
                block.set_coefficients(coefficients)
            before = block
        return self.grads()

    def _pending_block(self, first: int, last: int) -> _PendingBlock:
        weight_grad, borrowed = self.column_grads[0], last <= self._borrowed
        logits = weight_grad.matrix if weight_grad and borrowed else self._logits
        return _PendingBlock(self.head, self.rows.block(self.head, first, last), self.tiling.columns, logits, borrowed)

    def _fold(self, block: _PendingBlock, weight: Tensor, places: TargetPlaces, start: int, stop: int) -> None:
        tile = self._tiles.raw_logits(block.block, weight, start, stop, block.tile(start, stop))
        fold_with_cap_grad(self._tiles, block.block, tile, stop - start, places, block.stats, block.cap_grad)
        block.shifts.append(block.stats.shift.clone())

    def _use(self, block: _PendingBlock, weight: Tensor, number: int, start: int, stop: int) -> None:
        stored, places = block.tile(start, stop), block.places[number]
        tile = self._tiles.tile(block.block, start, stop) if block.borrowed else stored
        torch.mul(stored, block.factors[number][:, None], out=tile)
        if places:
            tile[places] = block.at_target[places[0]]
        if block.borrowed:
            block.logits[start:stop] = 0.0
        dlogits = tile[:, : stop - start].to(self.head.operand)
        self.add_to_rows(block.total, block.low_rank, dlogits, weight, start, stop)
        self.add_to_columns(block.block, dlogits, start, stop, first=False, last=False)


class LossWithGradients(torch.autograd.Function):
    """A loss whose gradients to `leaves` are known already; one backward scales them and hands them over."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: PerInput[Tensor | None], *leaves: Tensor | None) -> Tensor:
        ctx.grads = grads
        out = loss.clone()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_batched_gradient("linear_policy_loss", (upstream,))
        if ctx.grads is None:
            raise RuntimeError(
                "linear_policy_loss computed its gradients in the forward and a first backward has used them up, so a "
                "second one cannot run; call linear_policy_loss again"
            )
        (loss,) = ctx.saved_tensors
        grads, ctx.grads = ctx.grads, None
        with torch.no_grad():
            scaled = [None if grad is None else grad.mul_(upstream.to(grad.dtype)) for grad in grads]
        return (
            None,
            None,
            *(
                None if grad is None else refuse_double_backward("linear_policy_loss", grad, upstream, loss)
                for grad in scaled
            ),
        )
