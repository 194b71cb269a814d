"""Which causal language models the head ops serve, and with which arguments; found by looking, importing none."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# What each family does to `hidden @ weight.T`: the config field of its softcap and of its logit scale.
_PLAIN: tuple[str | None, str | None] = (None, None)
FAMILIES: dict[str, tuple[str | None, str | None]] = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "phi3": _PLAIN,
    "gpt2": _PLAIN,
    "gpt_neox": _PLAIN,
    "gemma2": ("final_logit_softcapping", None),
    "gemma3_text": ("final_logit_softcapping", None),
    "granite": (None, "logits_scaling"),
    "cohere": (None, "logit_scale"),
}
_DIVIDES = {"granite"}


@dataclass(frozen=True)
class Support:
    """What the head ops do for a model.

    `refusal` is None where it is served. Then `linear_logprob(body(...).last_hidden_state, weight, target,
    **head_arguments)` equals the model's own log-probs. `body` returns hidden states after the final norm.
    """

    family: str | None
    refusal: str | None
    body: nn.Module | None = None
    head: nn.Module | None = None
    softcap: float | None = None
    logit_scale: float = 1.0
    tied: bool = False

    @property
    def weight(self) -> Tensor:
        """The head's weight `[V, H]`."""
        if self.refusal is not None or self.head is None:
            raise ValueError(f"this model is not served: {self.refusal}")
        return self.head.weight  # type: ignore[return-value]

    @property
    def head_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `linear_logprob` that reproduce this model's head."""
        bias = getattr(self.head, "bias", None)
        return {"bias": bias, "softcap": self.softcap, "logit_scale": self.logit_scale}


def supports(model: nn.Module) -> Support:
    """Says whether the head ops serve `model` (a Transformers causal LM, bare or wrapped by PEFT), and how.

    Looks at `config.model_type`, the output embeddings and their wrappers; imports neither Transformers nor PEFT. A
    family that is not listed in `FAMILIES` is refused rather than guessed, since an overlooked softcap or scale changes
    every log-prob silently.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config = getattr(base, "config", None)
    family = getattr(config, "model_type", None)
    body, head = _body(base), _head(base)
    refusal = _prompt_learning(model) or _family(family, base) or _head_obstacle(head) or _body_obstacle(body)
    if refusal:
        return Support(family, refusal)
    cap_field, scale_field = FAMILIES[family]  # type: ignore[index]
    softcap = getattr(config, cap_field) if cap_field else None
    scale = float(getattr(config, scale_field)) if scale_field else 1.0
    tied = head.weight is base.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    return Support(family, None, body, head, softcap, 1 / scale if family in _DIVIDES else scale, tied)


def _body(base: nn.Module) -> nn.Module | None:
    body = getattr(base, getattr(base, "base_model_prefix", None) or "model", None)
    return body if body is not base else None


def _head(base: nn.Module) -> nn.Module | None:
    return base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None  # type: ignore[operator]


def _prompt_learning(model: nn.Module) -> str | None:
    for name, peft_config in getattr(model, "peft_config", {}).items():
        if getattr(peft_config, "is_prompt_learning", False):
            return (
                f"adapter {name!r} ({peft_config.peft_type}) adds virtual tokens, which calling the body alone would "
                "skip; use LoRA"
            )
    return None


def _family(family: str | None, base: nn.Module) -> str | None:
    if family in FAMILIES:
        return None
    return f"model type {family!r} ({type(base).__name__}) is not one of {', '.join(FAMILIES)}"


def _head_obstacle(head: nn.Module | None) -> str | None:
    if head is None:
        return "it has no output embeddings"
    if hasattr(head, "modules_to_save"):
        return "its head is a copy kept by PEFT (modules_to_save); train the head's weight itself, or leave it out"
    if hasattr(head, "lora_A"):
        return "it has LoRA on its head; leave the head out of target_modules"
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a torch.nn.Linear"
    if head.weight.numel() == 0:
        return "its head's weight is empty here (sharded?); gather it before the call"
    return None


def _body_obstacle(body: nn.Module | None) -> str | None:
    return None if body is not None else "its body (base_model_prefix) was not found"
