"""Whether what a model computes for a row depends on the rows beside it in the same call.

Rotary embeddings of the types `longrope` and `dynamic` take the frequencies of all rows from the longest row of a call.
Log-probs would then depend on how completions are divided into micro-batches, and would differ from those of sampling,
where a completion grows past the length at which the frequencies change.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..config import RunConfig
from ..errors import ConfigError

EXACT_TOLERANCE, TOLERANCE, ROUGH_TOLERANCE = 1e-5, 1e-3, 0.08
"""Allowed || difference || / || states || of a row beside others: in float32, in 16 bits, and with 8-bit weights.

The compared calls have the same shape, so rows that do not depend on each other have the same bits in most kernels.
LLM.int8 chooses the columns that it multiplies in 16 bits by all rows of a call, which gives 5e-2 on SmolLM2-135M.
"""

ROWS, WIDTH = 4, 6
"""Rows and tokens of a probe."""


def refuse_dependent_rows(body: Any, config: RunConfig) -> None:
    """ConfigError if rows of the lengths of this run depend on each other; it names the length at which they do not.

    The last token of a completion is not an input, so the longest input has one token less than the longest row.
    """
    longest = config.max_prompt_length + config.max_completion_length
    independent = longest_independent(body, longest - 1)
    if independent < longest - 1:
        remedy = (
            f"lower the two so that their sum is at most {independent + 1}"
            if independent >= WIDTH
            else "use a model without layers that mix the rows of a batch"
        )
        raise ConfigError(
            f"max_prompt_length + max_completion_length = {longest}: with rows of that length, what the model computes "
            f"for a row depends on the other rows of the batch{_rope_types(body)}, so log-probs would depend on the "
            f"micro-batch; expected rows that are independent of each other; {remedy} (docs/rollouts.md)"
        )


def longest_independent(body: Any, longest: int) -> int:
    """The greatest number of tokens, up to `longest`, with which no row depends on the others; 0 if there is none."""
    if not depends_on_company(body, longest):
        return longest
    good, bad = 0, longest
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if depends_on_company(body, middle) else (middle, bad)
    return good


@torch.no_grad()
def depends_on_company(body: Any, length: int) -> bool:
    """Whether the hidden states of a short row change when the others have other tokens and end at position `length`.

    Only the positions are those of long rows, so the probe is as cheap for 100,000 tokens as for 10.
    """
    width = min(WIDTH, length)
    ids = torch.randint(_vocabulary(body), (2, ROWS, width), generator=torch.Generator().manual_seed(0))
    ids[1, 0] = ids[0, 0]
    near = torch.arange(width).expand(ROWS, width)
    far = near.clone()
    far[1:] += length - width
    short, beside_long = (_first_row(body, *call) for call in ((ids[0], near), (ids[1], far)))
    size = float(short.float().norm())
    if not 0 < size < math.inf:
        raise ConfigError(
            f"the hidden states that the model computes for {width} tokens have the norm {size}; expected finite "
            "states that are not all zero; its weights are damaged or were never set, so save or download them again"
        )
    return not float((beside_long - short).float().norm()) <= _tolerance(body, short.dtype) * size


def _first_row(body: Any, ids: Tensor, positions: Tensor) -> Tensor:
    call = {"input_ids": ids.to(body.device), "position_ids": positions.to(body.device)}
    return body(**call, use_cache=False).last_hidden_state[0]


def _tolerance(body: Any, dtype: torch.dtype) -> float:
    if getattr(getattr(body.config, "quantization_config", None), "load_in_8bit", False):
        return ROUGH_TOLERANCE
    return TOLERANCE if dtype.itemsize == 2 else EXACT_TOLERANCE


def _vocabulary(body: Any) -> int:
    return body.config.get_text_config().vocab_size


def _rope_types(body: Any) -> str:
    """The types of the rotary embeddings that are not the default one, in parentheses."""
    types = {str(kind) for module in body.modules() for kind in _types(getattr(module, "rope_type", None))}
    return f" (its rotary embeddings are of type {', '.join(sorted(types))})" if types - {"default"} else ""


def _types(rope_type: Any) -> list[Any]:
    return list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type] if rope_type else []
