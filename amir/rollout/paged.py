"""The sampler `paged`: Transformers' continuous batching, which is paged attention with the policy's weights.

There is no padding: a completion that ends makes room for the next one, and a prompt is prefilled once for its group.
The engine uses the weights in memory, but its arithmetic differs from the trainer's, so it also returns log-probs.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ..config import PagedSampling
from ..errors import ConfigError, RunStopped
from ..policy.policy import Policy
from .generate import generation_config, own_random_state
from .rollout import Rollout, make_rollout

PAGE, FLASH_PAGE = 32, 256
"""Tokens of a page of the cache: FlashAttention's paged kernel needs 256; otherwise smaller pages waste less memory."""

LEAST_BATCH_TOKENS = 512


@dataclass
class Paged:
    """The sampler `paged`."""

    policy: Policy
    settings: PagedSampling

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        """See `Sampler`. RunStopped if the engine fails; it logs the reason."""
        if any(len(ids) < 2 for ids in prompts):
            raise ConfigError(
                "sampler.name = 'paged': Transformers' engine cannot share a prompt of one token between completions; "
                "set min_prompt_length: 2"
            )
        generation = generation_config(self.policy, max_new_tokens)
        generation.num_return_sequences = group_size
        engine = self._engine(prompts, group_size, max_new_tokens, seed)
        try:
            with own_random_state(self.policy.device), _without_eval_calls(self.policy.base):
                results = self.policy.base.generate_batch(prompts, generation, engine)
        except MemoryError as error:
            raise RunStopped(
                f"sampler.name = 'paged': out of memory for the key-value cache ({error}); set a smaller "
                "sampler.cache_tokens"
            ) from None
        outputs = list(results.values())
        failed = [output.error for output in outputs if output.error is not None]
        if failed or len(outputs) != len(prompts) * group_size:
            reason = failed[0] if failed else f"{len(outputs)} of {len(prompts) * group_size} completions came back"
            raise RunStopped(
                f"sampler.name = 'paged': Transformers' generate_batch failed ({reason}); see its log above, or "
                "start a new run with sampler 'generate'"
            )
        return make_rollout(
            self.policy,
            prompts,
            [output.generated_tokens for output in outputs],
            [output.logprobs for output in outputs],
        )

    def _engine(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Any:
        """A cache for the whole rollout, or for `cache_tokens`; completions wait for free pages.

        The engine must not switch to another attention than the policy's, which could be downloaded from the hub.
        """
        page = FLASH_PAGE if "flash" in self.policy.base.config._attn_implementation else PAGE
        pages = sum(group_size * (-(-(len(ids) + max_new_tokens) // page) + 1) for ids in prompts)
        if self.settings.cache_tokens is not None:
            pages = min(pages, self.settings.cache_tokens // page)
        return ContinuousBatchingConfig(
            page_size=page,
            num_blocks=pages,
            max_batch_tokens=self.settings.batch_tokens or max(LEAST_BATCH_TOKENS, len(prompts) * group_size),
            return_logprobs=True,
            seed=seed,
            auto_switch_to_flash=False,
            use_cuda_graph=False,
        )


@contextlib.contextmanager
def _without_eval_calls(model: Any) -> Iterator[None]:
    """Disables `model.eval()`, which the engine calls.

    The model is in evaluation mode already, except layers that are checkpointed or quantized: out of training mode, the
    former would save all activations and the latter would have no gradient.
    """
    model.eval = lambda: model
    try:
        yield
    finally:
        del model.eval
