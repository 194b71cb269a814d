"""TRL's `GRPOTrainer` with log-probs and entropies from `linear_logprob`, and optionally AMIR-GRPO's pair term.

Before its first step TRL gives the policy and the reference a fused head by `add_fused_lm_head`; every log-prob and
entropy of a run (old, reference, new) comes from it. `add_fused_lm_head` here has the same signature and meaning, and
the trainer that `grpo_trainer` returns uses it instead. TRL itself is not modified.

Legend: B completions, L padded length, T length of prompt and completion. Log-probs are in nats.
"""

import functools
import importlib
import math
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_choice, check_flag, check_number
from ..linear_logprob import linear_logprob, linear_logprob_entropy
from ..preference_loss import PairRule, preference_terms
from ..sequence_logprob import sequence_logprob
from ..support import Support, supports

SUPPORTED_TRL = "1.16"
"""The minor version of TRL whose trainer this is written for and tested with; other versions are refused."""


def _trl_module(module: str) -> types.ModuleType:
    """A module of TRL, if its version is the supported one."""
    version = importlib.import_module("trl").__version__
    if ".".join(version.split(".")[:2]) != SUPPORTED_TRL:
        raise ValueError(
            f"TRL {version} is not supported: its trainer may differ from that of {SUPPORTED_TRL}; install "
            f"trl=={SUPPORTED_TRL}.*"
        )
    return importlib.import_module(module)


@contextmanager
def _plain_head(model: nn.Module) -> Iterator[None]:
    """Takes off the forward that TRL gives the head for `cast_lm_head_to_fp32`: float32, as it is computed here too."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    patched = [part for part in head.modules() if _is_float32_forward(vars(part).get("forward"))] if head else []
    forwards = [vars(part).pop("forward") for part in patched]
    try:
        yield
    finally:
        for part, forward in zip(patched, forwards, strict=True):
            part.forward = forward


def _is_float32_forward(forward: object) -> bool:
    name = getattr(forward, "__name__", None), getattr(forward, "__module__", None)
    return name == ("cast_forward_to_fp32", "trl.trainer.grpo_trainer")


def _served(model: nn.Module) -> Support:
    support = supports(model)
    if support.refusal is not None:
        raise ValueError(f"this model is not served by linear_logprob: {support.refusal}; or use TRL's own head")
    return support


# ---- the head ------------------------------------------------------------------------------------------------------


def add_fused_lm_head(
    model: nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    *,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> None:
    """Makes `model(..., labels=..., fused_lm_head=True)` return log-probs of the labels instead of logits, like TRL's.

    Args:
        model: a causal LM that `supports` serves (with PEFT: the base model), not sharded.
        temperature: divides the logits.
        cast_lm_head_to_fp32: head products in float32, outside autocast; tied heads too.
        outputs: of "log_probs" and "entropy". TRL's other three are refused.
        workspace_bytes, backend: as in `linear_logprob`.

    The result is TRL's `FusedCausalLMOutput`: `log_probs` and `entropy` (None unless requested) float32 `[B, T - 1]`,
    or `[B, T]` for `shift_labels`, 0 where the label is -100, with gradients; `loss` and `label_mask`. A model with
    router losses is refused, and so are TRL versions other than `SUPPORTED_TRL`. Without `fused_lm_head=True` the
    forward is the one that the model had.
    """
    output_type = _trl_module("trl.trainer.utils").FusedCausalLMOutput
    for name in outputs:
        check_choice("outputs", name, ("log_probs", "entropy"))
    plain_head = _plain_head if cast_lm_head_to_fp32 else nullcontext
    with plain_head(model):
        _served(model)
    plain_forward = model.forward
    options = {"temperature": temperature, "workspace_bytes": workspace_bytes, "backend": backend}

    @functools.wraps(type(model).forward)  # generate checks its keywords against the forward's signature
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return plain_forward(*args, **kwargs)
        labels, shift_labels, num_items = (
            kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch")
        )
        if kwargs.get("output_router_logits"):
            raise ValueError(
                "output_router_logits=True is not supported, since it adds router losses; use TRL's own head"
            )
        with plain_head(self):
            body = _served(self).body
        hidden = body(*args, **kwargs | {"use_cache": False}).last_hidden_state  # type: ignore[misc]
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        with plain_head(self):
            logprob, entropy = _scores(self, hidden, shift_labels, "entropy" in outputs, cast_lm_head_to_fp32, options)
        counted = shift_labels != -100
        divisor = counted.sum().clamp(min=1) if num_items is None else num_items
        return output_type(loss=-logprob.sum() / divisor, log_probs=logprob, entropy=entropy, label_mask=counted)

    model.forward = types.MethodType(forward, model)


def _scores(
    model: nn.Module, hidden: Tensor, target: Tensor, with_entropy: bool, in_float32: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies of the head as it is now: wrappers may replace it after the patch."""
    support = _served(model)
    device = support.weight.device
    hidden, target = hidden.to(device), target.to(device)
    precision: AbstractContextManager[None] = nullcontext()
    if in_float32:
        hidden, precision = hidden.float(), torch.autocast(device.type, enabled=False)
    options = options | support.head_arguments
    with precision:
        if with_entropy:
            return linear_logprob_entropy(hidden, support.weight, target, **options)[:2]
        return linear_logprob(hidden, support.weight, target, **options), None


# ---- the trainer ---------------------------------------------------------------------------------------------------


def grpo_trainer(
    *,
    lambda_reg: float = 0.0,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    ref_free: bool = False,
    normalize: str = "mean",
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> type:
    """A subclass of `trl.GRPOTrainer` to use in its place: old, reference and new log-probs come from `linear_logprob`.

    Args:
        lambda_reg: weight of the pair term -J_pref (see `preference_loss`); 0 leaves it out.
        beta_dpo, reward_margin, pair_mining, max_pairs_per_group: as in `preference_loss`; the rewards are the weighted
            sums of TRL's reward functions, without normalization.
        ref_free: scores are l_theta instead of l_theta - l_ref, which needs a `beta` other than 0 in TRL's config.
        normalize: "mean" or "sum" over a completion's tokens, for the scores.
        workspace_bytes, backend: as in `linear_logprob`.

    LoRA on the head is supported, which TRL refuses since its head op would not train it; but not together with
    `cast_lm_head_to_fp32`, with which TRL would sample without the LoRA. A model that `supports` refuses raises
    ValueError when the trainer is constructed, or at the first log-prob for what PEFT adds to it later.

    TRL distributes a group over micro-batches, so the pairs' weights are computed once per generation, from log-probs
    of the policy that generated: TRL's old ones if it has them, else one scoring pass without gradient. They are exact
    if one optimizer step uses one generation; with the pair term other schedules are refused, and so is more than one
    process. Then `preference/loss` (-J_pref) and `preference/pairs` are logged per generation.
    """
    check_choice("normalize", normalize, ("mean", "sum"))
    check_number("lambda_reg", lambda_reg)
    check_flag("ref_free", ref_free)
    module = _trl_module("trl.trainer.grpo_trainer")
    head = functools.partial(add_fused_lm_head, workspace_bytes=workspace_bytes, backend=backend)
    rule = PairRule(beta_dpo, reward_margin, pair_mining, max_pairs_per_group)

    class AmirGRPOTrainer(module.GRPOTrainer):  # type: ignore[name-defined]
        """`trl.GRPOTrainer` on `linear_logprob`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            config = kwargs.get("args", args[2] if len(args) > 2 else None)
            served = {} if getattr(config, "cast_lm_head_to_fp32", False) else {"BaseTunerLayer": _NoTunerLayer}
            with _replaced(module, add_fused_lm_head=head, **served), _tied_head_is_named(config):
                super().__init__(*args, **kwargs)
            if lambda_reg:
                _refuse_for_pairs(self, ref_free)

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
            rewards = super()._calculate_rewards(*args, **kwargs)
            total = (rewards * self.reward_weights.to(rewards)).nansum(dim=1)
            self._pair_rewards = total.masked_fill(rewards.isnan().all(dim=1), math.nan)
            return rewards

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            if lambda_reg and self.model.training:
                batch["pair_weights"] = lambda_reg * self._pair_weights(batch)
            return batch

        def _pair_weights(self, batch: dict[str, Any]) -> Tensor:
            """d(-J_pref) / d score of each completion of the generation, `[B]`."""
            mask = _loss_mask(batch)
            logprobs = batch.get("old_per_token_logps")
            if logprobs is None:
                ids, attention_mask = (
                    torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
                )
                with torch.no_grad():
                    logprobs, *_ = super()._get_per_token_logps_and_entropies(
                        self.model, ids, attention_mask, mask.shape[1], batch_size=self.args.per_device_train_batch_size
                    )
            scores = sequence_logprob(logprobs, mask, normalize=normalize)
            if not ref_free:
                scores = scores - sequence_logprob(batch["ref_per_token_logps"], mask, normalize=normalize)
            terms = preference_terms(
                scores.detach(), self._pair_rewards, self.num_generations, rule, valid=mask.sum(dim=1) > 0
            )
            self._metrics["train"]["preference/loss"].append(terms.loss.item())
            self._metrics["train"]["preference/pairs"].append(float(terms.pairs))
            return terms.weights

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self._latest_logprobs = result[0]
            return result

        def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            loss = super()._compute_loss(model, inputs)
            if "pair_weights" in inputs:
                scores = sequence_logprob(self._latest_logprobs, _loss_mask(inputs), normalize=normalize)
                loss = loss + (inputs["pair_weights"] * scores).sum()
            del self._latest_logprobs
            return loss

    return AmirGRPOTrainer


class _NoTunerLayer:
    """Stands in for PEFT's layer class in TRL's check that refuses LoRA on the head, which TRL's head op would skip."""


@contextmanager
def _replaced(module: types.ModuleType, **values: object) -> Iterator[None]:
    """Temporarily replaces those of the names that the module has; without PEFT it lacks PEFT's."""
    before = {name: getattr(module, name) for name in values if hasattr(module, name)}
    try:
        for name in before:
            setattr(module, name, values[name])
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def _tied_head_is_named(config: Any) -> Iterator[None]:
    """Names the reason where TRL looks for the input embeddings of a tied head in the wrong place: under an adapter."""
    try:
        yield
    except AttributeError as error:
        if getattr(config, "cast_lm_head_to_fp32", False) and error.name == "embed_tokens":
            raise ValueError(
                f"TRL {SUPPORTED_TRL} does not support cast_lm_head_to_fp32=True for an adapter on a model whose head "
                "is tied to its input embeddings; untie them (config.tie_word_embeddings = False, and a copy of the "
                "weight), or set cast_lm_head_to_fp32=False"
            ) from error
        raise


def _refuse_for_pairs(trainer: Any, ref_free: bool) -> None:
    args = trainer.args
    if trainer.accelerator.num_processes > 1:
        raise NotImplementedError(
            f"the pair term needs one process, got {trainer.accelerator.num_processes}; use lambda_reg=0, or the "
            "trainer of the package amir"
        )
    if trainer.num_iterations != 1 or args.steps_per_generation != args.gradient_accumulation_steps:
        raise ValueError(
            "the pair term needs one optimizer step per generation, got "
            f"num_iterations={trainer.num_iterations}, steps_per_generation={args.steps_per_generation}, "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}; set num_iterations=1 and the other two "
            "to the same number"
        )
    if trainer.beta == 0 and not ref_free:
        raise ValueError(
            "the pair term needs reference log-probs, which TRL does not have with beta=0.0; set beta in "
            "GRPOConfig, or ref_free=True"
        )


def _loss_mask(batch: dict[str, Any]) -> Tensor:
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask
