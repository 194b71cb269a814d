"""The policy: a causal LM with LoRA, its hidden states without logits, and its log-probs through the fused head op."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from amir_kernels import LogprobEntropy, Support, linear_logprob, linear_logprob_entropy

from .batch import Tokens


@dataclass
class Policy:
    """A PEFT model with what sampling and scoring need beside it."""

    model: PeftModel
    tokenizer: Any
    support: Support
    pad_id: int
    eos_ids: list[int]
    temperature: float

    @property
    def base(self) -> Any:
        """The Transformers model with the adapter's layers in it."""
        return self.model.get_base_model()

    @property
    def device(self) -> torch.device:
        """Where inputs belong."""
        return self.support.weight.device

    @property
    def cache_argument(self) -> str:
        """The name under which this Transformers release takes a key-value cache."""
        return "cache" if "cache" in inspect.signature(self.base.forward).parameters else "past_key_values"

    def trainable(self) -> dict[str, Tensor]:
        """The trained parameters by name, in a fixed order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def logprobs(self, tokens: Tokens) -> Tensor:
        """Log-prob of each completion token at the sampling temperature, float32 `[B, C]`; 0 where masked."""
        hidden, target = self._hidden_and_target(tokens)
        return linear_logprob(hidden, self.support.weight, target, temperature=self.temperature, **self._head)

    def logprobs_entropy(self, tokens: Tokens) -> LogprobEntropy:
        """The same with the entropy of each next-token distribution, both with gradients."""
        hidden, target = self._hidden_and_target(tokens)
        return linear_logprob_entropy(hidden, self.support.weight, target, temperature=self.temperature, **self._head)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Within it the policy is the reference policy: the adapter is off and nothing is recorded for backward."""
        with torch.no_grad(), self.model.disable_adapter():
            yield

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
        """Hidden states `[B, C, H]` that predict the completion tokens, and those tokens with -100 where masked.

        A prompt is computed once; its completions continue its cache, and their gradients meet in it.
        """
        prompt_hidden, cache = self.prefill(tokens.prompt_ids, tokens.prompt_mask)
        hidden = prompt_hidden[tokens.prompt_of, -1:]
        if tokens.completion_ids.shape[1] > 1:
            cache.batch_select_indices(tokens.prompt_of)
            mask = torch.cat([tokens.prompt_mask[tokens.prompt_of], tokens.completion_mask[:, :-1]], dim=1).long()
            positions = (mask.cumsum(1) - 1)[:, tokens.prompt_ids.shape[1] :]
            continued = self.support.body(  # type: ignore[misc]
                input_ids=tokens.completion_ids[:, :-1],
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{self.cache_argument: cache},
            ).last_hidden_state
            hidden = torch.cat([hidden, continued], dim=1)
        return hidden, tokens.completion_ids.masked_fill(~tokens.completion_mask, -100)
