"""The policy: a causal language model whose log-probs are computed from hidden states by the fused head op."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amir_kernels import LogprobEntropy, Support, linear_logprob, linear_logprob_entropy

from ..distributed import SINGLE_PROCESS, Forward, Ranks, average_gradients, replicated, run_gathered, sharded
from ..tokens import Tokens
from .packing import hidden_states, why_unpacked

Result = TypeVar("Result")

REFERENCE = "ref"
"""Name of the frozen second adapter that is the reference policy when training continues from an adapter."""


@dataclass
class Policy:
    """A PEFT model, or a fully trained model, with tokenizer, special tokens and temperature."""

    model: Any
    tokenizer: Any
    support: Support
    pad_id: int
    eos_ids: list[int]
    temperature: float
    frozen: Support | None = None
    """a frozen copy of the model: the reference policy of full fine-tuning"""
    revision: str | None = None
    """the commit of the model on the hub; None if it was loaded from a folder"""
    notes: list[str] = field(default_factory=list)
    """what the user should know of the files that it was loaded from"""
    ranks: Ranks = SINGLE_PROCESS

    def __post_init__(self) -> None:
        self.vocabulary_size: int = self.support.weight.shape[0]
        self.forward: nn.Module = Forward(self.model)
        self.replicas: DistributedDataParallel | None = None
        self.frozen_forward = Forward(self.frozen.body, self.frozen.head) if self.frozen else None  # type: ignore[arg-type]

    @property
    def base(self) -> Any:
        """The Transformers model, including the adapter's layers."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def device(self) -> torch.device:
        """The device of the weights, which inputs must be on."""
        return next(self.model.parameters()).device

    @property
    def cache_argument(self) -> str:
        """The keyword for the key-value cache in this release of Transformers."""
        return "cache" if "cache" in inspect.signature(self.base.forward).parameters else "past_key_values"

    @cached_property
    def why_unpacked(self) -> str | None:
        """Why the training pass cannot be packed and uses padded rows; None if it is packed."""
        return why_unpacked(self.support.body)

    @property
    def packed(self) -> bool:
        """Whether the training pass computes a prompt once for its group, without padding."""
        return self.why_unpacked is None

    def trainable(self) -> dict[str, Tensor]:
        """The trained parameters by name, in a fixed order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def distribute(self, ranks: Ranks, compute: torch.dtype) -> None:
        """Distributes the policy over ranks: adapters by DDP, full fine-tuning by FSDP2 with products in `compute`."""
        if ranks.size == 1:
            return
        self.ranks = ranks
        if not self.sharded:
            self.replicas = replicated(self.forward)  # type: ignore[arg-type]
            return
        _ = self.packed  # evaluates the cached property while the weights are not sharded yet
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.forward = sharded(self.forward, device, compute, ranks.size)  # type: ignore[arg-type]
        if self.frozen_forward is not None:
            self.frozen_forward = sharded(self.frozen_forward, device, compute, ranks.size)

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a shard of every weight."""
        return self.ranks.size > 1 and not isinstance(self.model, PeftModel)

    def run_gathered(self, run: Callable[[], Result]) -> Result:
        """`run()`, which may call the model any number of times, with every weight gathered on this rank."""
        return run_gathered(self.forward, run) if self.sharded else run()

    def average_gradients(self) -> None:
        """Averages the gradients of DDP's replicas after the micro-batches; FSDP2 reduces them in each backward."""
        if self.replicas is not None:
            average_gradients(self.replicas)

    def logprobs(self, tokens: Tokens) -> Tensor:
        """Log-prob of each completion token at the sampling temperature, float32 `[B, C]`; 0 where masked."""
        return self._run(lambda: self._logprobs(tokens))

    def logprobs_entropy(self, tokens: Tokens) -> LogprobEntropy:
        """The same with the entropy of each next-token distribution, both with gradients."""
        return self._run(lambda: self._logprobs_entropy(tokens))

    def _run(self, run: Callable[[], Result]) -> Result:
        return self.forward(run) if torch.is_grad_enabled() else self.run_gathered(run)

    def _logprobs(self, tokens: Tokens) -> Tensor:
        hidden, target = self._hidden_and_target(tokens)
        logprob = linear_logprob(hidden, self.support.weight, target, temperature=self.temperature, **self._head)
        return _padded(logprob, tokens)

    def _logprobs_entropy(self, tokens: Tokens) -> LogprobEntropy:
        hidden, target = self._hidden_and_target(tokens)
        result = linear_logprob_entropy(hidden, self.support.weight, target, temperature=self.temperature, **self._head)
        return LogprobEntropy(*(_padded(values, tokens) for values in result))

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """A context in which this policy is the reference policy, and no graph is recorded.

        The reference policy is the model without its adapter, or with the adapter that training started from, or the
        frozen copy.
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
            raise ValueError(
                "this policy has no reference model, because it was loaded with beta = 0 and without a pair term that "
                "needs one; load it with beta > 0, or with lambda_reg > 0 and ref_free: false"
            )
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
    """Values `[K]` of the completion tokens as `[B, C]`, 0 at padding."""
    return values.new_zeros(tokens.completion_mask.shape).masked_scatter(tokens.completion_mask, values)
