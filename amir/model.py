"""The policy: a causal LM with LoRA, its hidden states without logits, and its log-probs through the fused head op."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from amir_kernels import LogprobEntropy, Support, linear_logprob, linear_logprob_entropy, supports

from .batch import Tokens
from .config import ConfigError, RunConfig
from .smollm2 import MODEL_NAME, smollm2_folder


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


def load_policy(config: RunConfig) -> Policy:
    """Loads model and tokenizer, adds a fresh adapter, refuses what the head op does not serve."""
    device = torch.device(_device(config.device))
    dtype = {"auto": torch.float32 if device.type == "cpu" else torch.bfloat16}.get(config.dtype) or getattr(
        torch, config.dtype
    )
    source = model_source(config.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
        base = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=config.attn_implementation)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ConfigError(f"model = {config.model!r}: {error}") from None
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return wrap_policy(torch.nn.Module.to(base, device), tokenizer, config)


def wrap_policy(base: Any, tokenizer: Any, config: RunConfig) -> Policy:
    """Makes a policy of a loaded model: LoRA on it, sampling defaults of its hub page dropped."""
    _refuse_too_long(base.config, config)
    eos_ids = _eos_ids(base, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    base.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=pad_id)
    lora = LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]
        target_modules=config.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(config.seed)
    try:
        model = get_peft_model(base, lora)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules = {config.lora.target_modules!r}: {error}") from None
    support = supports(model)
    if support.refusal:
        raise ConfigError(f"model = {config.model!r}: {support.refusal}")
    return Policy(model.eval(), tokenizer, support, pad_id, eos_ids, config.temperature)


def model_source(model: str) -> str:
    """A folder or hub name that Transformers loads; the packaged model's name becomes its converted folder."""
    if model == MODEL_NAME:
        return str(smollm2_folder())
    if model.startswith((".", "/", "~")) and not (Path(model).expanduser() / "config.json").is_file():
        raise ConfigError(f"model = {model!r}: expected a folder with config.json and weights, or a hub name")
    return str(Path(model).expanduser()) if model.startswith("~") else model


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': torch sees no GPU here; expected 'cpu' or 'auto'")
    return device


def _refuse_too_long(model_config: Any, config: RunConfig) -> None:
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    longest = config.max_prompt_length + config.max_completion_length
    if positions is not None and longest > positions:
        raise ConfigError(
            f"max_prompt_length + max_completion_length = {longest}: expected at most the model's {positions} positions"
        )


def _eos_ids(base: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: the generation config may list more than the tokenizer knows."""
    listed = base.generation_config.eos_token_id if base.generation_config else None
    ids = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError("the model and its tokenizer name no end-of-sequence token, so no completion could end")
    return ids
