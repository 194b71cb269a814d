"""Numerics against float64, the fused loss's gradients, the same bits in every form, groups and pairs."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amir_kernels import (
    group_advantage,
    linear_logprob,
    linear_logprob_entropy,
    linear_policy_loss,
    policy_loss,
    preference_loss,
    reference,
)

from .judging import Results, compare, judge, same_bits
from .rates import count_launches, event_seconds, predict, rates_of
from .sizes import Sizes
from .stage import Part, Row, make_row

GROUP_ERROR = 1e-5
"""Relative error in norm of float32 advantages and pair gradients."""
COMPARED_GROUPS = 64
"""The reference loops over groups."""
GROUP_BYTES = 24
"""Read and written for a row: group id, score and reward, and the result."""


def parts(sizes: Sizes) -> list[Part]:
    """The parts, the most informative dtype first."""
    first, *others = sizes.dtypes
    stage_parts = [Part(f"{name_of(first)} {options}", partial(numerics, sizes, first, options)) for options in OPTIONS]
    stage_parts.append(Part("same bits", partial(bits, sizes)))
    stage_parts.append(Part("fused loss", partial(fused_loss, sizes)))
    stage_parts.append(Part("groups", partial(groups, sizes)))
    stage_parts += [
        Part(f"{name_of(dtype)} {options}", partial(numerics, sizes, dtype, options))
        for dtype in others
        for options in OPTIONS
    ]
    return stage_parts


OPTIONS = ("plain", "all options")


def name_of(dtype: torch.dtype) -> str:
    """ "bfloat16" and the like."""
    return str(dtype).removeprefix("torch.")


# ---- numerics ------------------------------------------------------------------------------------------------------


def numerics(sizes: Sizes, dtype: torch.dtype, options: str) -> Iterator[Row]:
    """Log-prob, entropy, log-sum-exp and every gradient."""
    inputs, target = head_inputs(sizes, dtype, options != "plain")
    exact = {name: value.double() for name, value in inputs.items()}
    truth = with_gradients(partial(eager_head, target=target), exact)
    eager = with_gradients(partial(eager_head, target=target), inputs)
    kernel = with_gradients(partial(our_head, target=target, backend=sizes.backend), inputs)
    case = f"{sizes.checked_head}, {name_of(dtype)}, {options}"
    yield from judge("linear_logprob", case, kernel, eager, truth, target)


def head_inputs(sizes: Sizes, dtype: torch.dtype, rich: bool) -> tuple[Results, Tensor]:
    """Logits of standard deviation 4, or 60 under a cap of 30; targets at both ends of the vocabulary among them."""
    torch.manual_seed(0)
    head, rows, device, rank = sizes.checked_head, sizes.checked_rows, sizes.device, 8

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=device) * scale).to(dtype)

    spread = (60 if rich else 4) * head.hidden**-0.5
    inputs = {"hidden": draw(rows, head.hidden), "weight": draw(head.vocabulary, head.hidden, scale=spread)}
    if rich:
        inputs |= {"bias": draw(head.vocabulary), "lora_a": draw(rank, head.hidden, scale=head.hidden**-0.5)}
        inputs |= {"lora_b": draw(head.vocabulary, rank), "temperature": draw(rows).abs() + 0.5}
    target = torch.randint(head.vocabulary, (rows,), device=device)
    target[0], target[1] = 0, head.vocabulary - 1
    return inputs, target


def eager_head(inputs: Results, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plain torch in the inputs' dtype: log-prob, entropy, log-sum-exp."""
    z = inputs["hidden"] @ inputs["weight"].T
    if "bias" in inputs:
        z = z + 2.0 * (inputs["hidden"] @ inputs["lora_a"].T) @ inputs["lora_b"].T + inputs["bias"]
        z = 30.0 * torch.tanh(0.9 * z / 30.0) / inputs["temperature"][:, None]
    log_p = z.log_softmax(-1)
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), z.logsumexp(-1)


def our_head(inputs: Results, target: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """The op on the same inputs."""
    options: dict[str, Any] = {}
    if "bias" in inputs:
        options = {"bias": inputs["bias"], "softcap": 30.0, "logit_scale": 0.9, "temperature": inputs["temperature"]}
        options["lora"] = (inputs["lora_a"], inputs["lora_b"], 2.0)
    return linear_logprob_entropy(inputs["hidden"], inputs["weight"], target, backend=backend, **options)


def with_gradients(head: Callable[[Results], Sequence[Tensor]], inputs: Results) -> Results:
    """The three results, and the gradient of a weighted sum of them to every input but the temperature."""
    leaves = {name: leaf_of(value).requires_grad_(name != "temperature") for name, value in inputs.items()}
    results = dict(zip(("logprob", "entropy", "lse"), head(leaves), strict=True))
    total = torch.zeros((), dtype=torch.float64, device=inputs["hidden"].device)
    for factor, value in zip((1.0, 0.3, 0.2), results.values(), strict=True):
        upstream = torch.linspace(-1, 1, len(value), dtype=torch.float64, device=value.device) + 0.1
        total = total + (factor * upstream * value).sum()
    needed = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(total, list(needed.values()))
    named = {f"gradient of {name}": grad for name, grad in zip(needed, grads, strict=True)}
    return {name: value.detach() for name, value in results.items()} | named


def leaf_of(value: Tensor) -> Tensor:
    """A leaf on the same storage: strides and alignment stay."""
    return value.detach()


# ---- the fused loss ------------------------------------------------------------------------------------------------


def fused_loss(sizes: Sizes) -> Iterator[Row]:
    """Gradients of `linear_policy_loss`, formed in the forward from kept logits or not, for each dtype and head."""
    for dtype in sizes.dtypes:
        for trained in (False, True):
            inputs, target = head_inputs(sizes, dtype, rich=False)
            names = ("hidden", "weight") if trained else ("hidden",)
            old = (reference.linear_logprob(*doubles(inputs), target) + old_noise(target)).float()
            plain = partial(plain_loss, target=target, old=old)
            truth = loss_gradients(plain, {n: v.double() for n, v in inputs.items()}, names)
            eager = loss_gradients(plain, inputs, names)
            loss = partial(kernel_loss, target=target, old=old, backend=sizes.backend)
            case = f"{sizes.checked_head}, {name_of(dtype)}, {'trained' if trained else 'frozen'} head"
            yield from judge("linear_policy_loss", case, loss_gradients(loss, inputs, names), eager, truth, target)


def doubles(inputs: Results) -> tuple[Tensor, Tensor]:
    """Hidden states and head in float64."""
    return inputs["hidden"].double(), inputs["weight"].double()


def old_noise(target: Tensor) -> Tensor:
    """Log-ratios on both sides of the clip."""
    return torch.linspace(-0.4, 0.4, len(target), dtype=torch.float64, device=target.device)


def advantages_of(target: Tensor) -> Tensor:
    """+1 and -1 in turn; each row is a completion of its own."""
    return 1 - 2 * (torch.arange(len(target), device=target.device) % 2).float()


def plain_loss(inputs: Results, target: Tensor, old: Tensor) -> Tensor:
    """GRPO's clipped loss in the inputs' dtype."""
    logprob = eager_head(inputs, target)[0]
    ratio, advantages = (logprob - old.to(logprob.dtype)).exp(), advantages_of(target).to(logprob.dtype)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def kernel_loss(inputs: Results, target: Tensor, old: Tensor, backend: str) -> Tensor:
    """The same by the fused op."""
    ends = torch.arange(len(target) + 1, device=target.device)
    fused = partial(linear_policy_loss, objective="grpo", cu_seqlens=ends, backend=backend)
    return fused(inputs["hidden"], inputs["weight"], target, old, advantages_of(target)).loss


def loss_gradients(loss: Callable[[Results], Tensor], inputs: Results, names: Sequence[str]) -> Results:
    """The gradients of a loss to the named inputs."""
    leaves = {name: value.detach().clone().requires_grad_(name in names) for name, value in inputs.items()}
    grads = torch.autograd.grad(loss(leaves), [leaves[name] for name in names])
    return {f"gradient of {name}": grad for name, grad in zip(names, grads, strict=True)}


# ---- the same bits -------------------------------------------------------------------------------------------------


def bits(sizes: Sizes) -> Iterator[Row]:
    """The log-prob of a row in other batches, and every result twice."""
    dtype = sizes.dtypes[0]
    inputs, target = head_inputs(sizes, dtype, rich=False)
    hidden, weight = inputs["hidden"], inputs["weight"]
    head = partial(linear_logprob, backend=sizes.backend)
    with torch.no_grad():
        whole = head(hidden, weight, target)
    case = f"{sizes.checked_head}, {name_of(dtype)}"
    for name, result in companies(head, hidden, weight, target, sizes.backend).items():
        yield same_bits("linear_logprob", f"{case}: log-prob, {name}", result(), whole)
    ones, ends = torch.ones(len(target), device=hidden.device), torch.arange(len(target) + 1, device=hidden.device)
    loss = partial(linear_policy_loss, objective="reinforce", cu_seqlens=ends, backend=sizes.backend)
    plain = policy_loss(whole, None, ones, objective="reinforce", cu_seqlens=ends).loss
    fused = loss(hidden.clone().requires_grad_(), weight, target, None, ones).loss.detach()
    yield same_bits("linear_policy_loss", f"{case}: loss", fused, plain)
    first, second = (with_gradients(partial(our_head, target=target, backend=sizes.backend), inputs) for _ in range(2))
    for name, value in first.items():
        yield same_bits("linear_logprob", f"{case}: {name}, again", second[name], value)


def companies(
    head: Callable[..., Tensor], hidden: Tensor, weight: Tensor, target: Tensor, backend: str
) -> dict[str, Callable[[], Tensor]]:
    """Other calls that compute the same rows."""
    order = torch.randperm(len(target), device=hidden.device)
    doubled, twice = torch.cat([hidden, hidden]), torch.cat([target, target])

    def in_parts(step: int) -> Tensor:
        return torch.cat([head(h, weight, t) for h, t in zip(hidden.split(step), target.split(step), strict=True)])

    return {
        "again": lambda: head(hidden, weight, target),
        "in sevens": lambda: in_parts(7),
        "in another order": lambda: head(hidden[order], weight, target[order])[order.argsort()],
        "after as many others": lambda: head(doubled, weight, twice)[len(target) :],
        "with gradients wanted": lambda: head(hidden.clone().requires_grad_(), weight, target).detach(),
        "with entropy": lambda: linear_logprob_entropy(hidden, weight, target, backend=backend).logprob,
    }


# ---- groups and pairs ----------------------------------------------------------------------------------------------


def groups(sizes: Sizes) -> Iterator[Row]:
    """Advantages and the pair term by their kernels: errors against float64, seconds forward and backward."""
    for rows, size in sizes.groups:
        torch.manual_seed(0)
        scores, rewards = torch.randn(rows), torch.randint(0, 5, (rows,)).float()
        ids = torch.arange(rows) // size
        some = min(rows, COMPARED_GROUPS * size, 4096 // size * size or size)
        on_device = [value.to(sizes.device) for value in (scores, rewards, ids)]
        for name, work in (("group_advantage", advantages), ("preference_loss", pairs)):
            case = f"B = {rows:,}, G = {size:,}, float32"
            measured = work(*(value[:some] for value in on_device))
            truth = work(scores[:some].double(), rewards[:some].double(), ids[:some], module=reference)
            yield compare(name, f"{case}: error", measured.cpu(), truth, to="float64", at_most=GROUP_ERROR)
            seconds = event_seconds(partial(work, *on_device), sizes.device, sizes.repeats)
            workload = {"check": "groups", "rows": rows, "group_size": size}
            launches = count_launches(partial(work, *on_device))
            expected = predict(rates_of(sizes), moved=rows * GROUP_BYTES, launches=launches)
            yield make_row(name, case, workload, seconds=seconds, expected=expected)


def advantages(scores: Tensor, rewards: Tensor, ids: Tensor, module: Any = None) -> Tensor:
    """Group advantages of the rewards."""
    return (module.group_advantage if module else group_advantage)(rewards, ids)


def pairs(scores: Tensor, rewards: Tensor, ids: Tensor, module: Any = None) -> Tensor:
    """The gradient of the pair term."""
    leaf = scores.clone().requires_grad_()
    loss = (module.preference_loss if module else preference_loss)(leaf, rewards, ids).loss
    return torch.autograd.grad(loss, leaf)[0]
