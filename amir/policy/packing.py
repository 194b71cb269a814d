"""The packed training pass, without padding: one row with each group's prompt once, followed by its completions.

T: tokens computed; N prompts; B completions of padded length C; K completion tokens; H hidden size.

Every linear layer gets a row `[1, T]`: the prompt of the first group, its completions, the next prompt and so on, each
token with its own position. The last token of a completion predicts nothing and is left out. The attention is
`packed_attention`, passed to the model through Transformers' attention interface.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from ..tokens import Tokens
from .packed_attention import NAME, Segment, Segments, packed_attention

PROBE_TOLERANCE, ROUGH_PROBE_TOLERANCE = 1e-4, 0.08
"""Allowed || packed - padded || / || padded || of hidden states: in float32, and in 16 bits or with quantized weights.

Measured on SmolLM2-135M: 6e-7 in float32, 1e-3 in 16 bits, 2e-3 with 4-bit and 5e-2 with 8-bit weights, whose rounding
depends on all tokens of a call. Wrong positions give 0.1, a wrong mask 0.5 and more.
"""


@dataclass(frozen=True)
class Pack:
    """A packed row of tokens."""

    ids: Tensor  # int64 [1, T]
    positions: Tensor  # int64 [1, T]
    predicts: Tensor  # int64 [K], the token whose hidden state predicts each completion token, row by row
    segments: Segments


def hidden_states(body: Any, tokens: Tokens, *, packed: bool) -> Tensor:
    """Hidden states `[K, H]` that predict the completion tokens, row by row, with gradients to the body's weights.

    Without `packed`, each completion follows its own copy of the prompt and is right-padded. Causal models do not read
    to the right, so these rows need no mask.
    """
    if not packed:
        ids, predicts = plain_rows(tokens)
        return select_states(body(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1), predicts)
    return _run(body, pack(tokens))


def select_states(states: Tensor, places: Tensor) -> Tensor:
    """Rows of `[T, H]` at `places` `[K]`, which may repeat, with the same bits of gradient in every run.

    A prompt's last token predicts the first token of each of its completions, so their gradients meet there. Indexing
    adds them on a CPU by several threads in whatever order these arrive; the backward of an embedding, in one order.
    """
    return F.embedding(places, states)


def why_unpacked(body: Any) -> str | None:
    """Why this body cannot be packed, or None if its packed hidden states equal those of padded rows.

    Checks the configuration, then runs two short forwards without gradients: the same random tokens packed and padded.
    """
    config = body.config.get_text_config()
    if not getattr(body, "_supports_attention_backend", False):
        return f"{type(body).__name__} does not attend through Transformers' attention interface"
    kinds = getattr(config, "layer_types", None) or []
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        return f"it has layers of type {', '.join(strange)}"
    tokens = _probe_tokens(config.vocab_size, body.device)
    row = pack(tokens)
    with torch.no_grad():
        plain = hidden_states(body, tokens, packed=False)
        try:
            packed = _run(body, row)
        except (RuntimeError, TypeError, ImportError) as error:
            return str(error)
    windows = row.segments.windows
    if len(windows) != config.num_hidden_layers:
        return (
            f"{len(windows)} of its {config.num_hidden_layers} layers attend through Transformers' attention interface"
        )
    wrong = [layer for layer, window in windows.items() if window != _configured_window(config, layer)]
    if wrong:
        return f"layer {wrong[0]} does not pass the sliding window of its configuration to its attention"
    difference = float((packed - plain).float().norm() / plain.float().norm())
    exact = plain.dtype in (torch.float32, torch.float64) and getattr(body.config, "quantization_config", None) is None
    allowed = PROBE_TOLERANCE if exact else ROUGH_PROBE_TOLERANCE
    if not difference <= allowed:
        return f"its packed hidden states differ from padded ones by {difference:.1e}, and {allowed:.0e} is allowed"
    return None


class UsingAttention:
    """A context in which the body uses the attention of this name; it can be entered repeatedly."""

    def __init__(self, body: Any, name: str) -> None:
        self.config = body.config.get_text_config()
        self.name = name

    def __enter__(self) -> None:
        self.before = self.config._attn_implementation
        self.config._attn_implementation = self.name

    def __exit__(self, *exception: object) -> None:
        self.config._attn_implementation = self.before


def checkpoint_contexts(body: Any) -> Callable[[], tuple[Any, Any]]:
    """`context_fn` of torch's activation checkpointing: a layer is recomputed with the attention of its forward."""

    def contexts() -> tuple[Any, Any]:
        name = body.config.get_text_config()._attn_implementation
        return contextlib.nullcontext(), UsingAttention(body, name)

    return contexts


def _run(body: Any, row: Pack) -> Tensor:
    AttentionInterface.register(NAME, packed_attention)
    with UsingAttention(body, NAME):
        output = body(input_ids=row.ids, position_ids=row.positions, use_cache=False, packed_row=row.segments)
    return select_states(output.last_hidden_state[0], row.predicts)


def _probe_tokens(vocabulary: int, device: torch.device) -> Tokens:
    """Two prompts of 3 and 5 tokens, with completions of 4, 1, 3 and 2 tokens."""
    ids = torch.randint(vocabulary, (4, 9), generator=torch.Generator().manual_seed(0))
    prompt_mask = torch.arange(5) >= torch.tensor([[2], [0]])
    completion_mask = torch.arange(4) < torch.tensor([[4], [1], [3], [2]])
    parts = (ids[:2, :5], prompt_mask, torch.tensor([0, 0, 1, 1]), ids[:, 5:], completion_mask)
    return Tokens(*(tensor.to(device) for tensor in parts))


def _configured_window(config: Any, layer: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


def pack(tokens: Tokens) -> Pack:
    """Packs prompts and completions into one row."""
    device = tokens.prompt_ids.device
    prompt_index, completions = tokens.prompt_index.tolist(), tokens.completion_lengths.tolist()
    segments: list[Segment] = []
    ids, positions, predicts = [], [], {}
    end = 0
    for n, length in enumerate(tokens.prompt_lengths.tolist()):
        home, last = len(segments), end + length - 1
        segments.append(Segment(length, None))
        ids.append(tokens.prompt_ids[n, tokens.prompt_ids.shape[1] - length :])
        positions.append(torch.arange(length, device=device))
        end += length
        for row in (row for row, prompt in enumerate(prompt_index) if prompt == n):
            continued = max(completions[row] - 1, 0)
            places = torch.arange(end - 1, end + continued, device=device)
            places[0] = last
            predicts[row] = places[: completions[row]]
            if continued:
                segments.append(Segment(continued, home))
                ids.append(tokens.completion_ids[row, :continued])
                positions.append(torch.arange(length, length + continued, device=device))
                end += continued
    in_order = torch.cat([predicts[row] for row in range(len(tokens))])
    return Pack(torch.cat(ids)[None], torch.cat(positions)[None], in_order, Segments(segments))


def plain_rows(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Ids `[B, L]`, right-padded with 0, and the positions `[K]` in `[B * L]` that predict the completion tokens."""
    device = tokens.prompt_ids.device
    prompts = tokens.prompt_lengths[tokens.prompt_index].tolist()
    completions = tokens.completion_lengths.tolist()
    lengths = [p + max(c - 1, 0) for p, c in zip(prompts, completions, strict=True)]
    width = max(lengths)
    ids = torch.zeros(len(tokens), width, dtype=torch.int64, device=device)
    predicts = []
    for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        prompt = tokens.prompt_ids[tokens.prompt_index[row], tokens.prompt_ids.shape[1] - p :]
        ids[row, : lengths[row]] = torch.cat([prompt, tokens.completion_ids[row, : lengths[row] - p]])
        predicts.append(torch.arange(c, device=device) + row * width + p - 1)
    return ids, torch.cat(predicts)
