"""Token tensors in two layouts, padded `[B, L]` with a mask and packed `[T]` with `cu_seqlens`, behind one interface.

Legend: B sequences (rows), L padded length, T packed tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import check_devices, check_float, check_shape, check_tensor, check_values


@dataclass(frozen=True)
class TokenLayout:
    """Which tokens belong to which row, and which of them count. Nothing in here synchronizes the device."""

    keep: Tensor
    """bool `[B, L]` or `[T]`: True for the tokens that count"""
    rows: int
    packed_row: Tensor | None
    """int64 `[T]`: the row of each packed token; None where padded"""
    cu_seqlens: Tensor | None

    def clean(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """`values` in `dtype`, with exact zeros and zero gradients where the mask is off, whatever they hold there."""
        return torch.where(self.keep, values.to(dtype), torch.zeros((), dtype=dtype, device=values.device))

    def sum(self, values: Tensor) -> Tensor:
        """Sum of each row's tokens, `[B]`, in a fixed order. Masked tokens must be clean."""
        if self.cu_seqlens is None:
            return values.sum(dim=1)
        return torch.segment_reduce(values, "sum", offsets=self.cu_seqlens, initial=0.0)

    def counts(self, dtype: torch.dtype) -> Tensor:
        """Tokens that count in each row, `[B]`."""
        return self.sum(self.keep.to(dtype))

    def broadcast(self, per_row: Tensor) -> Tensor:
        """Values per row `[B]` as values per token."""
        return per_row[self.packed_row] if self.packed_row is not None else per_row[:, None].expand(self.keep.shape)

    def per_token(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Clean values per token of an argument that is per row `[B]` or per token. If T = B, it is read per row."""
        check_float(name, values)
        check_devices("logprobs", self.keep.device, {name: values})
        if tuple(values.shape) == (self.rows,):
            return self.clean(self.broadcast(values), dtype)
        if values.shape != self.keep.shape:
            raise ValueError(
                f"{name} must be one value per row {[self.rows]} or per token {list(self.keep.shape)}, "
                f"got {list(values.shape)}"
            )
        return self.clean(values, dtype)


def token_layout(logprobs: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> TokenLayout:
    """The layout of `logprobs`, `[B, L]`, or `[T]` with `cu_seqlens`. Tokens past `cu_seqlens[-1]` do not count."""
    check_float("logprobs", logprobs)
    check_devices("logprobs", logprobs.device, {"mask": mask, "cu_seqlens": cu_seqlens})
    if mask is None:
        keep = torch.ones_like(logprobs, dtype=torch.bool)
    else:
        check_shape("mask", mask, logprobs.shape, "one entry per log-prob")
        if mask.dtype != torch.bool:
            binary = (mask == 0) | (mask == 1)
            check_values(
                binary.all(),
                f"a mask of {mask.dtype} must hold 0 and 1 only (weights of tokens go into importance_weight)",
                lambda: mask[~binary][0].item(),
            )
        keep = mask != 0
    if cu_seqlens is None:
        if logprobs.dim() != 2:
            raise ValueError(f"logprobs must be [B, L], got {list(logprobs.shape)}; packed tokens [T] need cu_seqlens")
        return TokenLayout(keep, logprobs.shape[0], None, None)
    if logprobs.dim() != 1:
        raise ValueError(
            f"logprobs must be packed [T] with cu_seqlens, got {list(logprobs.shape)}; padded tokens take a mask"
        )
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [B + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}; "
            "it holds the bounds of the rows, from 0 to the number of tokens"
        )
    offsets, tokens = cu_seqlens.to(torch.int64), logprobs.shape[0]
    rising = (offsets[0] == 0) & (offsets.diff() >= 0).all() & (offsets[-1] <= tokens)
    message = "cu_seqlens must start with 0, not decrease, and end at most with the number of tokens"
    check_values(rising, message, lambda: f"{offsets.tolist()} for {tokens} tokens")
    position = torch.arange(tokens, device=logprobs.device)
    rows = offsets.numel() - 1
    packed_row = torch.searchsorted(offsets[1:], position, right=True)
    keep = keep & (packed_row < rows)
    return TokenLayout(keep, rows, packed_row.clamp(max=max(rows - 1, 0)), offsets)


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where an input is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
