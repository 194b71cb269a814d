"""The policy: a causal LM, its hidden states without logits, and its log-probs through the fused head op."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amir_kernels import LogprobEntropy, Support, linear_logprob, linear_logprob_entropy

from .batch import Tokens
from .packing import hidden_states, why_unpacked
from .ranks import ALONE, Forward, Ranks, average_gradients, copied, run_whole, sharded

Result = TypeVar("Result")

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
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        self.vocabulary_size: int = self.support.weight.shape[0]
        self.forward: nn.Module = Forward(self.model)
        self.copies: DistributedDataParallel | None = None
        self.frozen_forward = Forward(self.frozen.body, self.frozen.head) if self.frozen else None  # type: ignore[arg-type]

    @property
    def base(self) -> Any:
        """The Transformers model with the adapter's layers in it."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def device(self) -> torch.device:
        """Where inputs belong."""
        return next(self.model.parameters()).device

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

    def spread(self, ranks: Ranks, compute: torch.dtype) -> None:
        """Makes the policy one of several ranks': DDP for an adapter, FSDP2 with products in `compute` for a model."""
        if ranks.size == 1:
            return
        self.ranks = ranks
        if not self.sharded:
            self.copies = copied(self.forward)  # type: ignore[arg-type]
            return
        _ = self.packed  # tried while the weights are whole
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.forward = sharded(self.forward, device, compute, ranks.size)  # type: ignore[arg-type]
        if self.frozen_forward is not None:
            self.frozen_forward = sharded(self.frozen_forward, device, compute, ranks.size)

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of every weight."""
        return self.ranks.size > 1 and not isinstance(self.model, PeftModel)

    def whole(self, run: Callable[[], Result]) -> Result:
        """`run()`, which may call the model as often as it likes, with every weight whole on this rank."""
        return run_whole(self.forward, run) if self.sharded else run()

    def average_gradients(self) -> None:
        """After a step's micro-batches: averages copies over the ranks. Parts of a model have been in each backward."""
        if self.copies is not None:
            average_gradients(self.copies)

    def logprobs(self, tokens: Tokens) -> Tensor:
        """Log-prob of each completion token at the sampling temperature, float32 `[B, C]`; 0 where masked."""
        return self._run(lambda: self._logprobs(tokens))

    def logprobs_entropy(self, tokens: Tokens) -> LogprobEntropy:
        """The same with the entropy of each next-token distribution, both with gradients."""
        return self._run(lambda: self._logprobs_entropy(tokens))

    def _run(self, run: Callable[[], Result]) -> Result:
        return self.forward(run) if torch.is_grad_enabled() else self.whole(run)

    def _logprobs(self, tokens: Tokens) -> Tensor:
        hidden, target = self._hidden_and_target(tokens)
        logprob = linear_logprob(hidden, self.support.weight, target, temperature=self.temperature, **self._head)
        return _padded(logprob, tokens)

    def _logprobs_entropy(self, tokens: Tokens) -> LogprobEntropy:
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
        trained = self.support, self.forward
        self.support, self.forward = self.frozen, self.frozen_forward  # type: ignore[assignment]
        try:
            yield
        finally:
            self.support, self.forward = trained

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
