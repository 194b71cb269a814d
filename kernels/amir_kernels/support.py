"""Which causal language models the head ops serve, and with which arguments. Imports no model library."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

# For each family the config fields of its softcap and of its logit scale, which it applies to `hidden @ weight.T`.
_PLAIN: tuple[str | None, str | None] = (None, None)
FAMILIES: dict[str, tuple[str | None, str | None]] = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "phi": _PLAIN,
    "phi3": _PLAIN,
    "gpt2": _PLAIN,
    "gpt_neox": _PLAIN,
    "gemma": _PLAIN,
    "gemma2": ("final_logit_softcapping", None),
    "gemma3_text": ("final_logit_softcapping", None),
    "gemma3": _PLAIN,  # its class with images leaves the text configuration's softcap out
    "granite": (None, "logits_scaling"),
    "cohere": (None, "logit_scale"),
    "cohere2": (None, "logit_scale"),
}
DIVIDING_FAMILIES = {"granite"}
"""Families that divide by their logit scale."""
_SKIPPED = "which is skipped when only the body is called"
WHOLE_MODEL_ADAPTERS = {"XLORA": "mixes its experts in an extra forward", "POLY": "mixes its skills by task_ids"}


class _Refused(Exception):
    """The reason why a model is not served, and the remedy."""


class _Head(NamedTuple):
    """The modules that compute the logits at this moment."""

    linear: nn.Linear
    lora: tuple[Tensor, Tensor, float] | None


@dataclass(frozen=True)
class Support:
    """Whether the head ops serve a model, and with which arguments.

    `refusal` is None if the model is served, and else says why not. If it is served, `linear_logprob(
    body(...).last_hidden_state, weight, target, **head_arguments)` equals the model's own log-probs; `body` returns
    hidden states after the final norm.

    `weight` and `head_arguments` are read at each access: under PEFT's `disable_adapter()` they are the base model's.
    They raise ValueError if the head is not served at that moment, for instance with two adapters active on it.
    """

    family: str | None
    refusal: str | None
    body: nn.Module | None = None
    head: nn.Module | None = None
    """the output embeddings, including a wrapper by PEFT"""
    softcap: float | None = None
    logit_scale: float = 1.0
    tied: bool = False
    """whether the head shares its weight with the input embeddings"""

    @property
    def weight(self) -> Tensor:
        """The head's weight `[V, H]`, without a LoRA."""
        return self._current_head().linear.weight

    @property
    def head_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `linear_logprob` that reproduce this model's head."""
        linear, lora = self._current_head()
        return {"bias": linear.bias, "softcap": self.softcap, "logit_scale": self.logit_scale, "lora": lora}

    def _current_head(self) -> _Head:
        try:
            if self.refusal is not None:
                raise _Refused(self.refusal)
            return _read_head(self.head)
        except _Refused as refused:
            raise ValueError(f"this model is not served: {refused}") from None


def supports(model: nn.Module) -> Support:
    """Whether the head ops serve `model` (a Transformers causal LM, bare or wrapped by PEFT), and with which arguments.

    Reads `config.model_type`, the output embeddings and their wrappers; imports neither Transformers nor PEFT. A family
    that is not listed in `FAMILIES` is refused rather than guessed, since an overlooked softcap or scale would silently
    change every log-prob. With PEFT, any adapter in the body is served; on the head, LoRA (including rsLoRA) and
    `modules_to_save`. Never raises for a model: the result's `refusal` names the reason and the remedy.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config = getattr(base, "config", None)
    family = getattr(config, "model_type", None)
    try:
        _refuse_whole_model_adapters(model)
        _refuse_family(family, base)
        body, wrapped = _body(base), base.get_output_embeddings()  # type: ignore[operator]
        head = _read_head(wrapped)
        _refuse_shape(head.linear, config)
    except _Refused as refused:
        return Support(family, str(refused))
    cap_field, scale_field = FAMILIES[family]  # type: ignore[index]
    softcap = getattr(config, cap_field) if cap_field else None
    scale = float(getattr(config, scale_field)) if scale_field else 1.0
    tied = head.linear.weight is base.get_input_embeddings().weight  # type: ignore[operator]
    return Support(family, None, body, wrapped, softcap, 1 / scale if family in DIVIDING_FAMILIES else scale, tied)


def _body(base: nn.Module) -> nn.Module:
    body = getattr(base, getattr(base, "base_model_prefix", None) or "model", None)
    if body is None or body is base:
        raise _Refused(f"{type(base).__name__} has no body under base_model_prefix; pass the causal LM itself")
    if getattr(body, "get_output_embeddings", lambda: None)() is not None:
        name = type(base).__name__
        raise _Refused(f"{name} wraps a causal LM; pass the wrapped model (of PEFT's mixed model: .base_model.model)")
    return body


def _refuse_whole_model_adapters(model: nn.Module) -> None:
    """Refuses adapters by which PEFT changes the forward of the whole model."""
    for name, peft_config in getattr(model, "peft_config", {}).items():
        kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
        if getattr(peft_config, "is_prompt_learning", False):
            raise _Refused(f"adapter {name!r} ({kind}) adds virtual tokens, {_SKIPPED}; use LoRA")
        if kind in WHOLE_MODEL_ADAPTERS:
            raise _Refused(f"adapter {name!r} ({kind}) {WHOLE_MODEL_ADAPTERS[kind]}, {_SKIPPED}; use LoRA")
        if getattr(peft_config, "alora_invocation_tokens", None):
            raise _Refused(
                f"adapter {name!r} is an activated LoRA, which finds its start by code {_SKIPPED}; use plain LoRA"
            )


def _refuse_family(family: str | None, base: nn.Module) -> None:
    name = type(base).__name__
    if family is None and isinstance(getattr(base, "module", None), nn.Module):
        raise _Refused(
            f"{name} wraps the causal LM, and its own forward reduces gradients or gathers weights; pass its .module, "
            "and call the ops inside a forward that the wrapper runs (docs/own-loss.md)"
        )
    if family is None:
        raise _Refused(f"{name} has no config.model_type; pass the causal LM itself, without a wrapper around it")
    if family not in FAMILIES:
        raise _Refused(
            f"model type {family!r} ({name}) is not one of {', '.join(FAMILIES)}; call linear_logprob with its hidden "
            "states and its head's weight, softcap and scale, after checking that they reproduce the model's log-probs"
        )
    if getattr(base, "get_output_embeddings", lambda: None)() is None:
        raise _Refused(f"{name} has no output embeddings; pass the causal LM (AutoModelForCausalLM)")


# ---- the head ------------------------------------------------------------------------------------------------------


def _read_head(head: Any) -> _Head:
    """The linear layer and the LoRA that compute the logits at this moment."""
    _refuse_hooks(head)
    if hasattr(head, "modules_to_save"):
        disabled = head.disable_adapters or any(name not in head.modules_to_save for name in head.active_adapters)
        head = head.original_module if disabled else head.modules_to_save[head.active_adapters[0]]
    lora = None
    if hasattr(head, "base_layer") and hasattr(head, "lora_A"):
        lora, head = _read_lora(head), head.base_layer
    if type(head) is not nn.Linear:
        kind = f"{type(head).__module__}.{type(head).__name__}"
        raise _Refused(
            f"its head is a {kind}, not a torch.nn.Linear; exclude the head from what replaced it (quantization: "
            "llm_int8_skip_modules; an adapter: its target_modules, and token indices of tied embeddings)"
        )
    _refuse_hooks(head)
    if hasattr(head.weight, "placements") or hasattr(head.weight, "ds_id") or head.weight.numel() == 0:
        raise _Refused(
            "its head's weight is sharded; gather it before the call, or pass this rank's rows of it to "
            "linear_logprob(process_group=...)"
        )
    return _Head(head, lora)


def _refuse_hooks(module: nn.Module) -> None:
    if module._forward_hooks or module._forward_pre_hooks:
        raise _Refused("its head has forward hooks, which are skipped when only its weight is used; remove them")
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # Accelerate's moves data only
        raise _Refused(
            "its head has a patched forward, which is skipped when only its weight is used; delete it from the head"
        )


def _read_lora(head: Any) -> tuple[Tensor, Tensor, float] | None:
    """(A, B, scaling) of the LoRA that is active on the head; None where it is off or merged into the weight."""
    if head.disable_adapters and head.merged:
        raise _Refused("the LoRA merged into its head is disabled; call unmerge_adapter() first")
    names = [name for name in head.active_adapters if name in head.lora_A]
    if head.disable_adapters or head.merged or not names:
        return None
    if len(names) > 1:
        listed = ", ".join(map(repr, names))
        raise _Refused(
            f"adapters {listed} are active on its head; activate one, or combine them: add_weighted_adapter()"
        )
    name = names[0]
    down, up, dropout = head.lora_A[name], head.lora_B[name], head.lora_dropout[name]
    if hasattr(head, "lora_E") or name in getattr(head, "lora_variant", {}) or name in head.lora_magnitude_vector:
        raise _Refused(f"adapter {name!r} on its head is not plain LoRA (DoRA, AdaLoRA, ...); use plain LoRA there")
    if up.bias is not None:
        raise _Refused(f"adapter {name!r} has a bias on its head (lora_bias=True); set lora_bias=False")
    if getattr(dropout, "p", 0) > 0 and dropout.training:
        raise _Refused(
            f"adapter {name!r} applies dropout {dropout.p} to its head's input; set lora_dropout=0, or leave the head "
            "out of target_modules"
        )
    return down.weight, up.weight, float(head.scaling[name])


def _refuse_shape(head: nn.Linear, config: Any) -> None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    expected, rows = getattr(text, "vocab_size", None), head.weight.shape[0]
    if expected is not None and rows != expected:
        raise _Refused(
            f"its head holds {rows} of {expected} rows (tensor parallelism?); pass them to "
            "linear_logprob(process_group=...), or load the whole model on each rank"
        )
