"""The training pass without padding: a group's prompt computed once, its completions behind it, all in one row.

T tokens computed; N prompts, B completions of padded length C; K completion tokens; H hidden.

Every linear layer sees a row `[1, T]`: the prompt of the first group, its completions, the next prompt and so on, each
token at its own position. A completion's last token predicts nothing and is left out. Attention is ours, handed to
the model through Transformers' attention interface: a completion attends to its prompt and to itself.
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
"""Allowed || packed - plain || / || plain || of hidden states: in float32, and in 16 bits or on quantized weights.

Seen on SmolLM2-135M: 6e-7 in float32, 1e-3 in 16 bits, 2e-3 on 4-bit and 5e-2 on 8-bit weights, whose rounding depends
on all tokens of a call. Wrong positions make 0.1, a wrong mask 0.5 and more.
"""


@dataclass(frozen=True)
class Pack:
    """One row of tokens."""

    ids: Tensor  # int64 [1, T]
    positions: Tensor  # int64 [1, T]
    predicts: Tensor  # int64 [K], the token whose hidden state predicts each completion token, row by row
    segments: Segments


def hidden_states(body: Any, tokens: Tokens, *, packed: bool) -> Tensor:
    """Hidden states `[K, H]` that predict the completion tokens, row by row, with gradients to the body's weights.

    Packed, or in plain rows for a body that `why_unpacked` names: each completion after its own copy of the prompt,
    padded on the right. No token looks there, so that no mask is needed, whatever mixes the tokens.
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
    """Why this body must run in plain rows, or None where its packed hidden states are those of plain rows.

    What cannot be seen from its configuration is tried: a group of random tokens goes through it both ways, two short
    forwards without gradients.
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
    wrong = [layer for layer, window in windows.items() if window != _window_of(config, layer)]
    if wrong:
        return f"layer {wrong[0]} does not tell its attention the sliding window that its configuration has"
    difference = float((packed - plain).float().norm() / plain.float().norm())
    exact = plain.dtype in (torch.float32, torch.float64) and getattr(body.config, "quantization_config", None) is None
    allowed = PROBE_TOLERANCE if exact else ROUGH_PROBE_TOLERANCE
    if not difference <= allowed:
        return f"its packed hidden states differ from plain ones by {difference:.1e}, allowed {allowed:.0e}"
    return None


class UsingAttention:
    """Within it the body attends with the attention of this name; may be entered again and again."""

    def __init__(self, body: Any, name: str) -> None:
        self.config = body.config.get_text_config()
        self.name = name

    def __enter__(self) -> None:
        self.before = self.config._attn_implementation
        self.config._attn_implementation = self.name

    def __exit__(self, *exception: object) -> None:
        self.config._attn_implementation = self.before


def checkpoint_contexts(body: Any) -> Callable[[], tuple[Any, Any]]:
    """`context_fn` of torch's activation checkpointing: a layer is computed again with the attention it had."""

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
    """Two prompts, of 3 and 5 tokens; completions of 4, 1, 3 and 2."""
    ids = torch.randint(vocabulary, (4, 9), generator=torch.Generator().manual_seed(0))
    prompt_mask = torch.arange(5) >= torch.tensor([[2], [0]])
    completion_mask = torch.arange(4) < torch.tensor([[4], [1], [3], [2]])
    held = (ids[:2, :5], prompt_mask, torch.tensor([0, 0, 1, 1]), ids[:, 5:], completion_mask)
    return Tokens(*(tensor.to(device) for tensor in held))


def _window_of(config: Any, layer: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


def pack(tokens: Tokens) -> Pack:
    """Lays prompts and completions out in one row."""
    device = tokens.prompt_ids.device
    prompt_of, completions = tokens.prompt_of.tolist(), tokens.completion_lengths.tolist()
    segments: list[Segment] = []
    ids, positions, predicts = [], [], {}
    end = 0
    for n, length in enumerate(tokens.prompt_lengths.tolist()):
        home, last = len(segments), end + length - 1
        segments.append(Segment(length, None))
        ids.append(tokens.prompt_ids[n, tokens.prompt_ids.shape[1] - length :])
        positions.append(torch.arange(length, device=device))
        end += length
        for row in (row for row, prompt in enumerate(prompt_of) if prompt == n):
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
    """Ids `[B, L]`, right-padded with 0, and where in `[B * L]` the tokens are that predict the completions `[K]`."""
    device = tokens.prompt_ids.device
    prompts = tokens.prompt_lengths[tokens.prompt_of].tolist()
    completions = tokens.completion_lengths.tolist()
    lengths = [p + max(c - 1, 0) for p, c in zip(prompts, completions, strict=True)]
    width = max(lengths)
    ids = torch.zeros(len(tokens), width, dtype=torch.int64, device=device)
    predicts = []
    for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        prompt = tokens.prompt_ids[tokens.prompt_of[row], tokens.prompt_ids.shape[1] - p :]
        ids[row, : lengths[row]] = torch.cat([prompt, tokens.completion_ids[row, : lengths[row] - p]])
        predicts.append(torch.arange(c, device=device) + row * width + p - 1)
    return ids, torch.cat(predicts)
