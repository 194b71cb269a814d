"""The policy: a causal LM, its hidden states without logits, and its log-probs through the fused head op."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from amir_kernels import LogprobEntropy, Support, linear_logprob, linear_logprob_entropy

from .batch import Tokens
from .packing import hidden_states, why_unpacked

REFERENCE = "ref"
"""Name of the frozen second adapter that is the reference where training goes on from an adapter."""


@dataclass
class Policy:
    """A PEFT model, or a bare one that is trained whole, with what sampling and scoring need beside it."""

    model: Any
    tokenizer: Any
    support: Support
    pad_id: int
    eos_ids: list[int]
    temperature: float
    frozen: Support | None = None
    """a copy that is the reference of a model trained whole"""

    @property
    def base(self) -> Any:
        """The Transformers model with the adapter's layers in it."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def device(self) -> torch.device:
        """Where inputs belong."""
        return self.support.weight.device

    @property
    def cache_argument(self) -> str:
        """The name under which this Transformers release takes a key-value cache."""
        return "cache" if "cache" in inspect.signature(self.base.forward).parameters else "past_key_values"

    @cached_property
    def why_unpacked(self) -> str | None:
        """Why the training pass runs in plain rows, each completion behind its own prompt; None where it is packed."""
        return why_unpacked(self.support.body)

    @property
    def packed(self) -> bool:
        """Whether the training pass computes a prompt once for its group, and no padding."""
        return self.why_unpacked is None

    def trainable(self) -> dict[str, Tensor]:
        """The trained parameters by name, in a fixed order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def logprobs(self, tokens: Tokens) -> Tensor:
        """Log-prob of each completion token at the sampling temperature, float32 `[B, C]`; 0 where masked."""
        hidden, target = self._hidden_and_target(tokens)
        logprob = linear_logprob(hidden, self.support.weight, target, temperature=self.temperature, **self._head)
        return _padded(logprob, tokens)

    def logprobs_entropy(self, tokens: Tokens) -> LogprobEntropy:
        """The same with the entropy of each next-token distribution, both with gradients."""
        hidden, target = self._hidden_and_target(tokens)
        made = linear_logprob_entropy(hidden, self.support.weight, target, temperature=self.temperature, **self._head)
        return LogprobEntropy(*(_padded(values, tokens) for values in made))

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Within it the policy is the reference policy, and nothing is recorded for backward.

        That is the model without its adapter, or with the adapter it started from, or the frozen copy.
        """
        with torch.no_grad():
            if not isinstance(self.model, PeftModel):
                yield from self._with_frozen_copy()
            elif REFERENCE in self.model.peft_config:
                self.model.set_adapter(REFERENCE, inference_mode=True)
                try:
                    yield
                finally:
                    self.model.set_adapter("default")
            else:
                with self.model.disable_adapter():
                    yield

    def _with_frozen_copy(self) -> Iterator[None]:
        if self.frozen is None:
            raise ValueError("this policy was made without a reference: no loss of its run asked for one")
        trained, self.support = self.support, self.frozen
        try:
            yield
        finally:
            self.support = trained

    @property
    def _head(self) -> dict[str, Any]:
        return self.support.head_arguments

    def prefill(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        """Hidden states `[N, P, H]` of left-padded prompts and the key-value cache that continues them."""
        mask = mask.long()
        output = self.support.body(  # type: ignore[misc]
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=True
        )
        return output.last_hidden_state, output.past_key_values

    def _hidden_and_target(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Hidden states `[K, H]` that predict the K completion tokens, row by row, and those tokens."""
        hidden = hidden_states(self.support.body, tokens, packed=self.packed)
        return hidden, tokens.completion_ids[tokens.completion_mask]


def _padded(values: Tensor, tokens: Tokens) -> Tensor:
    """Values `[K]` of the completion tokens at their places in `[B, C]`, 0 elsewhere."""
    return values.new_zeros(tokens.completion_mask.shape).masked_scatter(tokens.completion_mask, values)
