"""From a batch to gradients: log-probs of the live rows, the objective with its pair term, one backward a micro-batch.

The loss is a function of log-probs alone, so its gradient with respect to them is taken first, each term's apart, and
one backward of the model follows: the terms' sizes by log-probs are known without a second pass. Their sizes by the
trained parameters take one, whose result is measured and dropped (`terms_apart`).
"""

import contextlib
import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from amir_kernels import OBJECTIVES, Objective, amir_loss, preference_loss, preference_weights, sequence_logprob

from .batch import Batch, MicroBatch, micro_batches, pair_options
from .config import ConfigError, RunConfig
from .correction import importance_weight
from .model import Policy
from .ranks import ALONE, Ranks

Sums = Counter[str]
"""Sums and counts over micro-batches, by name."""


def objective_of(config: RunConfig) -> Objective:
    """The run's policy objective: the named one with the run's own clip bounds and coefficients."""
    changes: dict[str, float | int] = {"kl_coef": config.beta, "entropy_coef": config.entropy_coef}
    if config.epsilon is not None:
        changes |= {"clip_low": config.epsilon, "clip_high": config.epsilon}
    if config.epsilon_high is not None:
        changes["clip_high"] = config.epsilon_high
    if config.loss_type == "dr_grpo":
        changes["max_completion_length"] = config.max_completion_length
    return OBJECTIVES[config.loss_type].replace(**changes)


Result = TypeVar("Result")


@contextlib.contextmanager
def blocks_apart() -> Iterator[None]:
    """Meanwhile glibc maps CPU blocks of 1 MB or more, for which its heap has no free room, one by one.

    They go back to the system as soon as they are free. On the common heap what a micro-batch frees at once leaves
    holes between what it keeps for its backward: a quarter of the resident memory. Afterwards blocks share the heap up
    to 32 MB, where glibc itself arrives: rollouts use the same ones again and again. Other C libraries are left as they
    are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)


M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


@dataclass(eq=False)
class NoRoom(Exception):
    """A micro-batch that ran out of memory, on this rank or on another."""

    tokens: int
    rows: int
    reason: str


class TokenBudget:
    """How many tokens a micro-batch may hold: the setting, until a GPU has no room for a micro-batch of that size.

    Then half of that micro-batch's tokens, said once, for the rest of the run, on every rank. Copies of a model speak
    to each other only between passes over the micro-batches, and there agree on it. Parts of one (`sharded`) do in
    every layer, where the others wait for a rank that has left it: that ends the run.
    """

    def __init__(
        self,
        tokens: int,
        *,
        packed: bool,
        say: Callable[[str], None] = lambda text: None,
        ranks: Ranks = ALONE,
        sharded: bool = False,
    ) -> None:
        self.tokens = tokens
        self.packed = packed
        self.ranks = ranks
        self._say = say
        self._sharded = sharded

    @classmethod
    def of(cls, config: RunConfig, policy: Policy, say: Callable[[str], None] = lambda text: None) -> "TokenBudget":
        """The run's, for the way its policy lays tokens out and the ranks it is trained on."""
        ranks, sharded = policy.ranks, policy.sharded
        return cls(config.micro_batch_tokens, packed=policy.packed, say=say, ranks=ranks, sharded=sharded)

    def each(self, batch: Batch, work: Callable[[MicroBatch], None]) -> None:
        """`work` on each of this rank's micro-batches of the batch, without a word to other ranks in between.

        NoRoom, on every rank, where memory runs out on any; ConfigError on that rank alone where the model is in parts.
        """
        shortages = [short for short in self.ranks.gather(self._shortage(batch, work)) if short is not None]
        if shortages:
            raise min(shortages, key=lambda short: short.tokens)

    def fit(self, attempt: Callable[[], Result], undo: Callable[[], None] = lambda: None) -> Result:
        """`attempt()`, which goes over `each(...)`: undone and begun again in smaller parts where memory runs out.

        ConfigError where a micro-batch of one completion does not fit.
        """
        while True:
            try:
                with blocks_apart():
                    return attempt()
            except NoRoom as error:
                short = error.with_traceback(None)
            undo()
            torch.cuda.empty_cache()
            self.ranks.together(partial(self._halve, short))

    def _shortage(self, batch: Batch, work: Callable[[MicroBatch], None]) -> NoRoom | None:
        """Goes over the micro-batches up to the first that has no room."""
        for micro in self.ranks.deal(list(micro_batches(batch, self.tokens, packed=self.packed))):
            try:
                work(micro)
                continue
            except torch.OutOfMemoryError as error:
                reason = str(error).partition(". ")[0]
            # here the micro-batch's tensors are free: the exception held its frames
            held = batch.tokens.rows(micro.rows).computed(packed=self.packed)
            if self._sharded:
                raise ConfigError(
                    f"rank {self.ranks.rank} is out of memory in a micro-batch of {held} tokens ({reason}), and the "
                    f"other ranks wait for its part of a layer; expected micro_batch_tokens below {held}"
                )
            return NoRoom(held, len(micro.rows), reason)
        return None

    def _halve(self, short: NoRoom) -> None:
        if short.rows == 1:
            raise ConfigError(
                f"one completion with its prompt ({short.tokens} tokens) does not fit into memory ({short.reason}); "
                "expected gradient_checkpointing: true, quantization: 4bit, or a smaller max_completion_length"
            )
        self.tokens = short.tokens // 2
        self._say(
            f"out of memory in a micro-batch of {short.rows} completions, {short.tokens} tokens: the step goes on in "
            f"micro-batches of at most {self.tokens} tokens; set micro_batch_tokens to that to start there"
        )


def with_reference(policy: Policy, batch: Batch, config: RunConfig, budget: TokenBudget | None = None) -> Batch:
    """The batch with reference log-probs of its live rows, where the KL or the pair term needs them."""
    pairs = config.lambda_reg > 0 and not config.ref_free and bool(batch.paired.any())
    if config.beta == 0 and not pairs:
        return batch
    with policy.reference():
        budget = budget or TokenBudget.of(config, policy)
        return replace(batch, ref_logprobs=budget.fit(lambda: _score(policy, batch, batch.live, budget)))


def backward(
    policy: Policy,
    batch: Batch,
    objective: Objective,
    config: RunConfig,
    budget: TokenBudget | None = None,
    *,
    terms_apart: bool = False,
) -> tuple[Batch, Sums]:
    """Leaves the gradient of the whole step's loss in the trained parameters' `.grad`, which was zero before.

    Returns the batch with the log-probs under which it was sampled (those of the first call, before any update) and the
    sums of what happened. Micro-batches change nothing but rounding: every divisor is the whole step's. So a step that
    runs out of memory is taken again from zero in smaller ones.

    `terms_apart`: the sums have the squared norm of each term's gradient by the trained parameters too, for one more
    backward and the memory of two more gradients; `.grad` keeps its bits.
    """
    budget = budget or TokenBudget.of(config, policy)

    def undo() -> None:
        for parameter in policy.trainable().values():
            if parameter.grad is not None:
                parameter.grad.zero_()

    return budget.fit(lambda: _backward(policy, batch, objective, config, budget, terms_apart), undo)


def _backward(
    policy: Policy, batch: Batch, objective: Objective, config: RunConfig, budget: TokenBudget, terms_apart: bool
) -> tuple[Batch, Sums]:
    sums: Sums = Counter()
    weights = _pair_weights(policy, batch, config, sums, budget)
    first_old = torch.zeros_like(batch.loss_mask, dtype=torch.float32) if batch.old_logprobs is None else None
    of_pairs = [torch.zeros_like(parameter) for parameter in policy.trainable().values()] if terms_apart else []

    def work(micro: MicroBatch) -> None:
        logprobs = _accumulate(policy, batch, micro, objective, config, weights, sums, of_pairs)
        if first_old is not None and not micro.idle:
            first_old[micro.rows, : logprobs.shape[1]] = logprobs

    budget.each(batch, work)
    policy.average_gradients()
    sums = budget.ranks.total_of_sums(sums)
    if terms_apart:
        sums.update(_term_squares(policy, of_pairs))
    return (batch if first_old is None else replace(batch, old_logprobs=budget.ranks.total(first_old))), sums


def _term_squares(policy: Policy, of_pairs: list[Tensor]) -> Sums:
    """Squares of both terms' gradients by the parameters: `.grad` is their sum, `of_pairs` this rank's part of one."""
    squares: Any = Counter()
    for parameter, part in zip(policy.trainable().values(), of_pairs, strict=True):
        pairs = policy.ranks.total(part).float()
        squares["pair_parameter_grad_square"] += pairs.square().sum()
        squares["policy_parameter_grad_square"] += (parameter.grad - pairs).square().sum()  # type: ignore[operator]
    return squares


def _accumulate(
    policy: Policy,
    batch: Batch,
    micro: MicroBatch,
    objective: Objective,
    config: RunConfig,
    weights: Tensor,
    sums: Sums,
    of_pairs: list[Tensor],
) -> Tensor:
    """Forward and backward of one micro-batch, whose pairs are formed here unless `weights` speak for them already.

    Returns the micro-batch's log-probs. Adds the pair term's gradient by the parameters to `of_pairs`, if not empty.
    """
    forms_pairs = micro.whole and config.lambda_reg > 0
    rows = micro.rows
    tokens = batch.tokens.rows(rows)
    mask = tokens.completion_mask
    made = policy.logprobs_entropy(tokens)
    outputs = made[:2] if config.entropy_coef > 0 else made[:1]
    if micro.idle:
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        return outputs[0].detach()
    leaves = [o.detach().requires_grad_() for o in outputs]
    logprobs = leaves[0].detach()
    old = logprobs if batch.old_logprobs is None else _cut(batch.old_logprobs, rows, mask)
    loss = amir_loss(
        leaves[0],
        old,
        batch.advantages[rows],
        batch.rewards[rows],
        batch.group[rows],
        mask,
        ref_logprobs=None if batch.ref_logprobs is None else _cut(batch.ref_logprobs, rows, mask),
        objective=objective,
        importance_weight=_correction(batch, rows, old, mask, config),
        entropy=leaves[1] if len(leaves) > 1 else None,
        lambda_reg=config.lambda_reg,
        ref_free=config.ref_free or batch.ref_logprobs is None,
        normalize=config.normalize,
        preference_weights=None if forms_pairs else weights[rows],
        num_pairs=batch.num_pairs,
        num_tokens=batch.num_tokens,
        num_sequences=batch.num_sequences,
        **pair_options(config),
    )
    from_policy = torch.autograd.grad(loss.policy, leaves, retain_graph=True)
    from_pairs = torch.autograd.grad(config.lambda_reg * loss.preference, leaves[0])[0]
    if of_pairs:
        parameters = list(policy.trainable().values())
        parts = torch.autograd.grad(outputs[0], parameters, from_pairs, retain_graph=True, materialize_grads=True)
        torch._foreach_add_(of_pairs, parts)
    ranks = policy.ranks.size  # over which gradients are averaged
    torch.autograd.backward(outputs, [ranks * (from_policy[0] + from_pairs), *(ranks * g for g in from_policy[1:])])
    sums.update(
        loss.metrics
        | {
            "entropy_sum": made.entropy.detach().sum(),
            "tokens_computed": tokens.computed(packed=policy.packed),
            "policy_loss": loss.policy.detach(),
            "preference_loss": loss.preference.detach() if forms_pairs else 0,
            "policy_grad_square": from_policy[0].square().sum(),
            "pair_grad_square": from_pairs.square().sum(),
        }
    )
    return logprobs


def _correction(batch: Batch, rows: Tensor, old: Tensor, mask: Tensor, config: RunConfig) -> Tensor | None:
    if config.correction is None or batch.sampled_logprobs is None:
        return None
    return importance_weight(old, _cut(batch.sampled_logprobs, rows, mask), mask, config.correction)


def _pair_weights(policy: Policy, batch: Batch, config: RunConfig, sums: Sums, budget: TokenBudget) -> Tensor:
    """d loss / d score `[B]` of the groups that `budget` splits over micro-batches, from a pass without gradients.

    Zero elsewhere: a whole micro-batch forms its own pairs. Adds the value of the split groups' term to `sums`.
    """
    if config.lambda_reg == 0:
        return torch.zeros_like(batch.rewards)
    parts = [micro for micro in micro_batches(batch, budget.tokens, packed=budget.packed) if not micro.whole]
    if not parts:
        return torch.zeros_like(batch.rewards)
    split = torch.zeros_like(batch.live)
    split[torch.cat([part.rows for part in parts])] = True
    mask = batch.loss_mask & split[:, None]
    score = sequence_logprob(_score(policy, batch, split, budget), mask, normalize=config.normalize)
    if not config.ref_free and batch.ref_logprobs is not None:
        score = score - sequence_logprob(batch.ref_logprobs, mask, normalize=config.normalize)
    pairs = {"valid": split, "num_pairs": batch.num_pairs, **pair_options(config)}
    term = preference_loss(score, batch.rewards, batch.group, **pairs)
    if policy.ranks.first:  # every rank knows the groups that were split
        correct = (term.accuracy * term.pairs).nan_to_num()
        sums.update({"preference_loss": term.loss, "pairs": term.pairs, "pairs_correct": correct})
    return preference_weights(score, batch.rewards, batch.group, **pairs)


@torch.no_grad()
def _score(policy: Policy, batch: Batch, needed: Tensor, budget: TokenBudget) -> Tensor:
    """Log-probs `[B, C]` of the `needed` rows, 0 elsewhere, without a graph."""
    scores = torch.zeros_like(batch.loss_mask, dtype=torch.float32)

    def work(micro: MicroBatch) -> None:
        logprobs = policy.logprobs(batch.tokens.rows(micro.rows))
        if not micro.idle:
            scores[micro.rows, : logprobs.shape[1]] = logprobs

    budget.each(replace(batch, live=needed), work)
    return budget.ranks.total(scores)


def _cut(values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """The rows of a `[B, C]` tensor at the width of their micro-batch's mask."""
    return values[rows, : mask.shape[1]]
