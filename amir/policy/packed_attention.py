"""Attention over a packed row, for Transformers' attention interface: a completion attends to its prompt and itself.

T: tokens of a row; q, k: queries and keys of one segment; D: head size.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers.utils import is_flash_attn_greater_or_equal

from ..errors import CannotPack

NAME = "amir_packed"
"""The name of this attention in Transformers' registry."""

HARMLESS = {"position_ids", "position_embeddings", "cache_position", "use_cache", "output_hidden_states", "return_dict"}
"""Keywords that a model may pass to its attention and that need no handling; any other keyword is refused."""


class Segment(NamedTuple):
    """Consecutive tokens of one sequence; `prompt` is the index of the segment that they continue, if any."""

    length: int
    prompt: int | None


@dataclass(frozen=True)
class Segments:
    """A row of segments.

    `windows` records the sliding window of each layer, `masks` caches the masks, which the layers share.
    """

    segments: list[Segment]
    windows: dict[int, int | None] = field(default_factory=dict)
    masks: dict[Any, Tensor] = field(default_factory=dict)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each segment."""
        return [segment.length for segment in self.segments]

    @cached_property
    def contexts(self) -> list[int]:
        """Tokens of the prompt that each segment attends to, 0 for a prompt."""
        return [0 if s.prompt is None else self.segments[s.prompt].length for s in self.segments]

    @cached_property
    def key_lengths(self) -> list[int]:
        """Keys of each segment: its prompt's and its own."""
        return [length + context for length, context in zip(self.lengths, self.contexts, strict=True)]

    def mask(self, place: int, window: int | None, like: Tensor) -> Tensor:
        """Additive mask `[q, k]`: 0 where key j is visible to query i, 0 <= i + context - j < window, else -inf.

        The masks of all segments are slices of one band matrix: the first q rows, the columns shifted by the context.
        """
        length, context, widest = self.lengths[place], self.contexts[place], max(self.contexts)
        key = (window, like.dtype, like.device)
        if key not in self.masks:
            longest = max(self.lengths)
            ahead = torch.arange(longest, device=like.device)[:, None] + widest
            ahead = ahead - torch.arange(widest + longest, device=like.device)
            hidden = (ahead < 0) if window is None else (ahead < 0) | (ahead >= window)
            band = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self.masks[key] = band.masked_fill_(hidden, float("-inf"))
        return self.masks[key][:length, widest - context : widest + length]

    def ends(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cumulative queries and keys, int32 `[segments + 1]` each."""
        if device not in self.masks:
            ends = [[0, *accumulate(lengths)] for lengths in (self.lengths, self.key_lengths)]
            self.masks[device] = torch.tensor(ends, dtype=torch.int32, device=device)
        return self.masks[device][0], self.masks[device][1]


class Scores(NamedTuple):
    """How a layer computes its scores: scale, sliding window and soft cap."""

    scaling: float
    window: int | None
    softcap: float | None


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    packed_row: Segments | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention within each segment and from it to its prompt, with the signature of Transformers' attention interface.

    query `[1, heads, T, D]`, key and value `[1, key heads, T, D]`; returns `[1, T, heads, D]`. `sliding_window` is the
    number of keys that a query attends to, its own included; `softcap` bounds scores by `softcap * tanh(score /
    softcap)`. CannotPack for a feature that this attention does not have.
    """
    if packed_row is None:
        raise CannotPack("its body does not pass keywords on to its attention")
    if attention_mask is not None:
        raise CannotPack("it builds an attention mask of its own")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise CannotPack("its attention is not causal")
    if dropout:
        raise CannotPack(f"its attention has a dropout of {dropout}")
    unknown = {name for name, value in others.items() if value is not None and value is not False} - HARMLESS
    if unknown:
        raise CannotPack(f"its attention takes {', '.join(sorted(unknown))}")
    row = packed_row
    row.windows[getattr(module, "layer_idx", id(module))] = sliding_window
    window = None if sliding_window is None or sliding_window >= max(row.key_lengths) else sliding_window
    how = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap)
    keys, values = _after_prompts(key, row), _after_prompts(value, row)
    kernel = varlen_kernel(query, how)
    if kernel is not None:
        return _attend_at_once(kernel, query, keys, values, row, how), None
    attend = _attend if softcap is None else _attend_capped
    parts = zip(query.split(row.lengths, dim=2), keys, values, strict=True)
    return torch.cat([attend(*part, row, place, how) for place, part in enumerate(parts)], dim=2).transpose(1, 2), None


def _after_prompts(x: Tensor, row: Segments) -> list[Tensor]:
    """Keys or values `[1, heads, k, D]` of each segment: those of its prompt, then its own."""
    parts = x.split(row.lengths, dim=2)
    return [
        own if segment.prompt is None else torch.cat([parts[segment.prompt], own], dim=2)
        for own, segment in zip(parts, row.segments, strict=True)
    ]


def _attend(query: Tensor, key: Tensor, value: Tensor, row: Segments, place: int, how: Scores) -> Tensor:
    """`[1, heads, q, D]` by PyTorch's scaled_dot_product_attention; prompts without a window need no mask tensor."""
    plain = row.contexts[place] == 0 and how.window is None
    mask = None if plain else row.mask(place, how.window, query)
    if query.device.type != "cpu":  # with a mask, only the CPU's fused kernel supports grouped key heads
        key, value = _every_head(query, key), _every_head(query, value)
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=plain, scale=how.scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def _attend_capped(query: Tensor, key: Tensor, value: Tensor, row: Segments, place: int, how: Scores) -> Tensor:
    """The same with a soft cap; holds all scores `[heads, q, k]` in memory; softmax in float32, as in Transformers."""
    assert how.softcap is not None
    scores = query @ _every_head(query, key).transpose(2, 3) * how.scaling
    scores = torch.tanh(scores / how.softcap) * how.softcap + row.mask(place, how.window, query)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ _every_head(query, value)


def _every_head(query: Tensor, x: Tensor) -> Tensor:
    """Key or value heads repeated for the query heads that share them."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _attend_at_once(
    kernel: Callable[..., Tensor], query: Tensor, keys: list[Tensor], values: list[Tensor], row: Segments, how: Scores
) -> Tensor:
    """`[1, T, heads, D]` in one call of FlashAttention, whose causal mask is aligned to each segment's last key."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, torch.cat(keys, dim=2), torch.cat(values, dim=2)))
    return kernel(q, k, v, *row.ends(query.device), max(row.lengths), max(row.key_lengths), how)[None]


def varlen_kernel(query: Tensor, how: Scores) -> Callable[..., Tensor] | None:
    """FlashAttention for segments of unequal length, of the package flash-attn or else PyTorch's; None if neither fits.

    Supported: float16 and bfloat16 on CUDA from compute capability 8.0, head sizes up to 256 that are multiples of 8.
    """
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    if query.shape[-1] > 256 or query.shape[-1] % 8 or torch.cuda.get_device_capability(query.device) < (8, 0):
        return None
    if is_flash_attn_greater_or_equal("2.6.0"):
        return _flash_attn_kernel
    return _torch_kernel if how.softcap is None and _TORCH_SERVES else None


_TORCH_SERVES = {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def _flash_attn_kernel(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int, how: Scores
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q,
        k,
        v,
        ends_q,
        ends_k,
        longest_q,
        longest_k,
        softmax_scale=how.scaling,
        causal=True,
        window_size=_window(how),
        softcap=how.softcap or 0.0,
    )


def _torch_kernel(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int, how: Scores
) -> Tensor:
    return varlen_attn(  # type: ignore[return-value]
        q,
        k,
        v,
        ends_q,
        ends_k,
        longest_q,
        longest_k,
        scale=how.scaling,
        window_size=_window(how),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _window(how: Scores) -> tuple[int, int]:
    """FlashAttention's window: keys to the left and right of the query's own; -1 is no bound."""
    return (-1, 0) if how.window is None else (how.window - 1, 0)
