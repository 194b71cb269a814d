"""Every public op again in plain torch: same names and signatures, any float dtype, any device.

This file is the specification. It is written to be easy to read: it materializes `[T, V]` logits and `[B, B]` pairs and
lets autograd differentiate. The kernels are tested against it; use it to check them on your own tensors.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor

from ._checks import check_removed
from .amir_loss import AmirLoss
from .linear_logprob import LogprobEntropy
from .objective import OBJECTIVES, Objective
from .policy_loss import PolicyLoss
from .preference_loss import PairLogits, PreferenceLoss

# ---- log-probabilities from hidden states --------------------------------------------------------------------------


def _head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    lora: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """softcap * tanh(s / softcap) / temperature `[..., V]`, with s = logit_scale * (hidden @ weight.T + bias)."""
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    if lora is not None:
        lora_a, lora_b, scaling = lora
        weight = weight + scaling * lora_b.to(dtype) @ lora_a.to(dtype)
    logits = hidden @ weight.T
    if bias is not None:
        check_removed(bias, logit_scale)
        logits = logits + bias.to(dtype)
    logits = logits * logit_scale if softcap is None else softcap * torch.tanh(logits * logit_scale / softcap)
    return logits / (temperature.to(dtype)[..., None] if isinstance(temperature, Tensor) else temperature)


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: tuple[Tensor, Tensor, float] | None = None,
    ignore_index: int = -100,
    process_group: object | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
    entropy_grad: bool = True,
) -> LogprobEntropy:
    """log_softmax(z)[target], the entropy of softmax(z) and logsumexp(z) for each row, with z from `_head_logits`.

    `hidden [..., H]`, `weight [V, H]`, `target [...]`. 16-bit inputs are widened to float32 first. Rows whose target is
    `ignore_index` give 0 and zero gradients. `workspace_bytes` and `backend` have no effect here.
    """
    if process_group is not None:
        raise NotImplementedError("process_group must be None: the reference takes the whole weight; gather it first")
    counted = target != ignore_index
    outside = counted & ((target < 0) | (target >= weight.shape[0]))
    if outside.any():
        invalid = target[outside][0].item()
        raise ValueError(f"target must lie in [0, {weight.shape[0]}) or be ignore_index={ignore_index}, got {invalid}")
    hidden = torch.where(counted[..., None], hidden, 0)
    if isinstance(temperature, Tensor):
        temperature = torch.where(counted, temperature, 1)
    logits = _head_logits(hidden, weight, bias, temperature, softcap, logit_scale, lora)
    log_softmax = torch.log_softmax(logits, -1)
    logprob = log_softmax.gather(-1, torch.where(counted, target, 0)[..., None])[..., 0]
    entropy = -(log_softmax.exp() * log_softmax.masked_fill(log_softmax == -torch.inf, 0)).sum(-1)
    lse = torch.logsumexp(logits, -1)
    logprob, entropy, lse = (torch.where(counted, value, 0) for value in (logprob, entropy, lse))
    return LogprobEntropy(logprob, entropy if entropy_grad else entropy.detach(), lse)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: tuple[Tensor, Tensor, float] | None = None,
    ignore_index: int = -100,
    process_group: object | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """The first result of `linear_logprob_entropy`."""
    return linear_logprob_entropy(
        hidden,
        weight,
        target,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        lora=lora,
        ignore_index=ignore_index,
        process_group=process_group,
    ).logprob


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    objective: str | Objective = "grpo",
    importance_weight: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    preference_weights: Tensor | None = None,
    normalize: str = "mean",
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: tuple[Tensor, Tensor, float] | None = None,
    ignore_index: int = -100,
    process_group: object | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> PolicyLoss:
    """`policy_loss` of `linear_logprob_entropy`, plus sum_i preference_weights_i * sequence_logprob_i."""
    counted = target if mask is None else torch.where(mask.bool(), target, ignore_index)
    logprob, entropy, _ = linear_logprob_entropy(
        hidden,
        weight,
        counted,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        lora=lora,
        ignore_index=ignore_index,
        process_group=process_group,
    )
    mask = counted != ignore_index
    loss, metrics = policy_loss(
        logprob,
        old_logprobs,
        advantages,
        mask,
        cu_seqlens=cu_seqlens,
        ref_logprobs=ref_logprobs,
        objective=objective,
        importance_weight=importance_weight,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        entropy=entropy
        if (objective if isinstance(objective, Objective) else OBJECTIVES[objective]).entropy_coef
        else None,
    )
    if preference_weights is not None:
        scores = sequence_logprob(logprob, mask, cu_seqlens=cu_seqlens, normalize=normalize)
        loss = loss + (preference_weights.detach() * scores).sum()
    return PolicyLoss(loss, metrics)


# ---- groups and pairs ----------------------------------------------------------------------------------------------


def _group_rows(group: int | Tensor, values: Tensor) -> list[Tensor]:
    """The row indices of each group of `values` `[B]`, groups by ascending id, rows ascending."""
    ids = group if isinstance(group, Tensor) else torch.arange(len(values), device=values.device) // group
    return [(ids == number).nonzero().squeeze(1) for number in ids.unique()]


def _deviation(values: Tensor, unbiased: bool) -> Tensor:
    return values.std(correction=1 if unbiased else 0) if len(values) > 1 else values.new_zeros(())


def _all_equal(values: Tensor) -> bool:
    """Whether values are equal up to the rounding of summed float32 rewards, as in the pair rule."""
    return bool(values.max() - values.min() <= 4 * 2**-23 * max(1.0, float(values.abs().max())))


def group_advantage(
    rewards: Tensor,
    group: int | Tensor,
    *,
    baseline: str = "mean",
    scale: str = "std",
    eps: float = 1e-4,
    unbiased: bool = True,
    combine: str = "sum",
    weights: Tensor | Sequence[float] | None = None,
) -> Tensor:
    """`(r_i - baseline_i) / scale_i` within each group."""
    columns = rewards.double().reshape(len(rewards), -1)
    factors = torch.as_tensor([1.0] * columns.shape[1] if weights is None else weights).to(columns)
    scorable = ~columns.isnan().all(dim=1)

    def column_advantages(column: Tensor) -> Tensor:
        result = torch.zeros_like(column)
        known = column[~column.isnan()]
        for rows in _group_rows(group, column):
            rows = rows[~column[rows].isnan()]
            r, n = column[rows], len(rows)
            if n == 0 or (baseline != "none" and _all_equal(r)):
                continue
            a = {
                "mean": r - r.mean(),
                "leave_one_out": r - (r.sum() - r) / max(n - 1, 1),
                "none": r,
            }[baseline]
            if scale == "std":
                a = a / ((0 if _all_equal(r) else _deviation(r, unbiased)) + eps)
            if scale == "batch":
                a = a / (_deviation(known, unbiased) + eps)
            if scale == "bernoulli":
                a = a / (r.mean() * (1 - r.mean()) + eps).sqrt()
            result[rows] = a
        return result

    if combine == "sum":
        result = column_advantages(torch.where(scorable, (columns * factors).nansum(dim=1), torch.nan))
    else:
        addends = factors[:, None] * torch.stack([column_advantages(column) for column in columns.T])
        summed = addends.sum(dim=0)
        mean, deviation = summed[scorable].mean(), _deviation(summed[scorable], unbiased)
        cancel = (summed[scorable] - mean).norm() <= 4 * 2**-23 * addends.norm()
        result = torch.where(scorable & ~cancel, (summed - mean) / (deviation + eps), 0)
        for rows in _group_rows(group, columns):
            known = [column[~column.isnan()] for column in columns[rows].T]
            if all(len(r) == 0 or _all_equal(r) for r in known):
                result[rows] = 0
    return result if rewards.dtype == torch.float64 else result.float()


def pass_at_k_advantage(rewards: Tensor, group: int | Tensor, k: int) -> Tensor:
    """k * (share of k-subsets with row i that hold a correct row - share of those of the others), by enumeration."""
    result = torch.zeros_like(rewards, dtype=torch.float64)

    def share(subsets: list[tuple[float, ...]]) -> float:
        return sum(max(subset) for subset in subsets) / len(subsets)

    for rows in _group_rows(group, rewards):
        rows = rows[~rewards[rows].isnan()]
        values = rewards[rows].tolist()
        for place, row in enumerate(rows.tolist()):
            others = values[:place] + values[place + 1 :]
            if len(others) >= k:
                with_row = [(values[place], *subset) for subset in combinations(others, k - 1)]
                result[row] = k * (share(with_row) - share(list(combinations(others, k))))
    return result if rewards.dtype == torch.float64 else result.float()


def sequence_logprob(
    logprobs: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None, normalize: str = "mean"
) -> Tensor:
    """Mean or sum of each row's unmasked log-probs; 0 for a row without any."""
    totals = []
    for row in _token_rows(logprobs, mask, cu_seqlens):
        total = row(logprobs).sum()
        totals.append(total / max(len(row(logprobs)), 1) if normalize == "mean" else total)
    return torch.stack(totals) if totals else logprobs.flatten()[:0]


def pair_logits(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    *,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    valid: Tensor | None = None,
) -> PairLogits:
    """Every pair, listed one by one."""
    r = rewards.double().tolist()
    allowed = [True] * len(r) if valid is None else valid.tolist()
    usable = [ok and math.isfinite(x) for ok, x in zip(allowed, r, strict=True)]
    chosen: list[int] = []
    rejected: list[int] = []
    for rows in _group_rows(group, rewards):
        members = [row for row in rows.tolist() if usable[row]]
        pairs = [
            (i, j)
            for i in members
            for j in members
            if r[i] - r[j] - reward_margin > 4 * 2**-23 * max(1.0, abs(r[i]), abs(r[j]))
        ]
        if pair_mining == "topk" and members:
            best = max(members, key=lambda row: r[row])
            pairs = [(i, j) for i, j in pairs if i == best]
        if max_pairs_per_group is not None:
            pairs = sorted(sorted(pairs, key=lambda pair: r[pair[1]] - r[pair[0]])[:max_pairs_per_group])
        chosen += [i for i, _ in pairs]
        rejected += [j for _, j in pairs]
    i, j = (torch.tensor(rows, dtype=torch.int64, device=scores.device) for rows in (chosen, rejected))
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return PairLogits(i, j, beta_dpo * (scores[i] - scores[j]))


def preference_loss(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    *,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    reduction: str = "mean",
    num_pairs: float | Tensor | None = None,
    num_groups: float | Tensor | None = None,
    valid: Tensor | None = None,
) -> PreferenceLoss:
    """`-J_pref`: minus the mean (or sum) of log sigmoid over the listed pairs."""
    chosen, _, logit = pair_logits(
        scores,
        rewards,
        group,
        beta_dpo=beta_dpo,
        reward_margin=reward_margin,
        pair_mining=pair_mining,
        max_pairs_per_group=max_pairs_per_group,
        valid=valid,
    )
    losses = -torch.nn.functional.logsigmoid(logit)
    if reduction == "group_mean":
        in_group = [torch.isin(chosen, rows) for rows in _group_rows(group, scores)]
        means = [losses[pairs].mean() for pairs in in_group if pairs.any()]
        loss = sum(means, start=losses[:0].sum()) / ((len(means) if num_groups is None else num_groups) or 1)
    else:
        divisor = {"sum": 1, "mean": len(losses) if num_pairs is None else num_pairs}[reduction]
        loss = losses.sum() / (divisor or 1)
    shares = [(logit > 0).to(logit.dtype), logit.detach()]
    accuracy, mean_logit = (share.sum() / max(len(logit), 1) for share in shares)
    return PreferenceLoss(loss, torch.tensor(len(logit), device=loss.device), accuracy, mean_logit)


def preference_weights(
    scores: Tensor,
    rewards: Tensor,
    group: int | Tensor,
    *,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    reduction: str = "mean",
    num_pairs: float | Tensor | None = None,
    num_groups: float | Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """d preference_loss / d scores, by autograd."""
    leaf = scores.detach().requires_grad_()
    loss = preference_loss(
        leaf,
        rewards,
        group,
        beta_dpo=beta_dpo,
        reward_margin=reward_margin,
        pair_mining=pair_mining,
        max_pairs_per_group=max_pairs_per_group,
        reduction=reduction,
        num_pairs=num_pairs,
        num_groups=num_groups,
        valid=valid,
    ).loss
    return torch.autograd.grad(loss, leaf)[0]


# ---- policy losses -------------------------------------------------------------------------------------------------


def _token_rows(logprobs: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> list[Callable[[Tensor], Tensor]]:
    """One function per row: it picks the row's unmasked tokens from a tensor like `logprobs`, in float32 or float64."""
    flat_mask = torch.ones_like(logprobs, dtype=torch.bool).flatten() if mask is None else mask.bool().flatten()
    if cu_seqlens is None:
        rows, length = logprobs.shape
        bounds = [row * length for row in range(rows + 1)]
    else:
        bounds = cu_seqlens.tolist()

    def picker(first: int, last: int) -> Callable[[Tensor], Tensor]:
        keep = flat_mask[first:last]

        def pick(values: Tensor) -> Tensor:
            picked = values.flatten()[first:last][keep]
            return picked if picked.dtype == torch.float64 else picked.float()

        return pick

    return [picker(first, last) for first, last in pairwise(bounds)]


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20.0, 20.0)


def _row_ratio(lp: Tensor, old: Tensor, level: str) -> Tensor:
    """rho of one row's tokens `[n]`, n at least 1."""
    if level == "token":
        return torch.exp(_bounded(lp - old))
    if level == "none":
        return torch.exp(_bounded(lp - old)).detach()
    sequence_ratio = torch.exp(_bounded((lp - old).mean()))
    if level == "sequence":
        return sequence_ratio.expand_as(lp)
    within = (lp - old).mean().detach().abs() <= 20.0
    return sequence_ratio.detach() * torch.exp(within * (lp - lp.detach()))


def _row_gain(lp: Tensor, old: Tensor, rho: Tensor, a: Tensor, o: Objective) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The surrogate of one row's tokens, and which of them are clipped low, high and by the dual clip."""
    clip_low, clip_high = o.clip_low or 0.0, o.clip_high or 0.0
    never = torch.zeros_like(a, dtype=torch.bool)
    up, down, d = a > 0, a < 0, lp - old
    match o.surrogate:
        case "clip":
            low, high = down & (rho < 1 - clip_low), up & (rho > 1 + clip_high)
            dual_clip = math.inf if o.dual_clip is None else o.dual_clip
            dual = down & (rho > dual_clip)
            gain = torch.where(low, (1 - clip_low) * a, torch.where(high, (1 + clip_high) * a, rho * a))
            return torch.where(dual, dual_clip * a, gain), low, high, dual
        case "cispo":
            least, most = (clip_low, clip_high) if o.clip_bounds == "raw" else (1 - clip_low, 1 + clip_high)
            low, high = rho < least, rho > most
            coefficient = torch.where(low, least, torch.where(high, most, rho)).detach()
            return coefficient * a * lp, low, high, never
        case "sapo":
            tau = lp.new_tensor([o.sapo_tau_pos if x else o.sapo_tau_neg for x in up])
            return 4 / tau / (1 + torch.exp(-tau * (rho - 1))) * a, never, never, never
        case "vespo":
            log_w = d.sum().detach().clamp(math.log(1e-8), 20.0)
            k = lp.new_tensor([o.vespo_k_neg if x else o.vespo_k_pos for x in down])
            lam = lp.new_tensor([o.vespo_lambda_neg if x else o.vespo_lambda_pos for x in down])
            phi = torch.exp(lam) * torch.exp(k * log_w) * torch.exp(-lam * torch.exp(log_w))
            return phi * a * lp, never, never, never
        case "geometric":
            low, high = down & (d < -clip_low), up & (d > clip_high)
            clamped = torch.where(low, -clip_low, torch.where(high, clip_high, d))
            return torch.exp(_bounded(clamped.mean())) * a, low, high, never
        case _:
            return a * lp, never, never, never


def _row_kl(lp: Tensor, other: Tensor, rho: Tensor, o: Objective) -> Tensor:
    d = _bounded(other - lp)
    kl = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - d - 1, "abs": d.abs()}[o.kl_estimator]
    return kl * rho if o.kl_bias_correction else kl


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    objective: str | Objective = "grpo",
    importance_weight: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    entropy: Tensor | None = None,
) -> PolicyLoss:
    """The objective's formula, row by row over the unmasked tokens."""
    o = objective if isinstance(objective, Objective) else OBJECTIVES[objective]
    rows = _token_rows(logprobs, mask, cu_seqlens)
    counts = [len(row(logprobs)) for row in rows]
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    names = ("policy_sum", "ratio_sum", "clip_low_count", "clip_high_count", "dual_clip_count", "old_kl_sum")
    zero = logprobs.flatten()[:0].sum()
    metrics = {name: zero.detach() for name in names}
    metrics |= {"tokens": zero.detach() + sum(counts), "sequences": zero.detach() + len(rows)}
    if ref_logprobs is not None:
        metrics["kl_sum"] = zero.detach()
    if entropy is not None:
        metrics["entropy_sum"] = zero.detach()

    def count(name: str, values: Tensor) -> None:
        metrics[name] = metrics[name] + values.detach().sum()

    total = zero
    for index, row in enumerate(rows):
        if counts[index] == 0:
            continue
        lp, before = row(logprobs), row(old).detach()
        per_token = {
            name: row(values) if values.shape == logprobs.shape and values.shape != (len(rows),) else values[index]
            for name, values in (("a", advantages), ("w", importance_weight))
            if values is not None
        }
        a = per_token["a"].detach().to(lp.dtype).expand_as(lp)
        rho = _row_ratio(lp, before, o.ratio_level)
        gain, low, high, dual = _row_gain(lp, before, rho, a, o)
        policy = -per_token["w"].detach() * gain if "w" in per_token else -gain
        old_kl = _row_kl(lp, before, rho, o)
        loss = policy + o.mirror_coef * old_kl
        if ref_logprobs is not None:
            kl = _row_kl(lp, row(ref_logprobs).detach(), rho, o)
            loss = loss + o.kl_coef * kl
            count("kl_sum", kl)
        if entropy is not None:
            loss = loss - o.entropy_coef * row(entropy)
            count("entropy_sum", row(entropy))
        for name, values in zip(names, (policy, rho, low, high, dual, old_kl), strict=True):
            count(name, values)
        total = total + (loss.mean() if o.aggregation == "sequence_mean_token_mean" else loss.sum())

    if o.aggregation == "token_mean":
        divisor = sum(counts) if num_tokens is None else num_tokens
    else:
        divisor = len(rows) if num_sequences is None else num_sequences
    if o.max_completion_length is not None:
        total = total / o.max_completion_length
    return PolicyLoss(total / (divisor or 1), metrics)


def amir_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    rewards: Tensor | None,
    group: int | Tensor | None,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    objective: str | Objective = "grpo",
    lambda_reg: float = 0.01,
    beta_dpo: float = 0.2,
    reward_margin: float = 0.0,
    pair_mining: str = "all",
    max_pairs_per_group: int | None = None,
    ref_free: bool = False,
    normalize: str = "mean",
    preference_weights: Tensor | None = None,
    num_pairs: float | Tensor | None = None,
    importance_weight: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    entropy: Tensor | None = None,
) -> AmirLoss:
    """`policy_loss + lambda_reg * preference_loss` of the sequences' log-ratios."""
    policy = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        cu_seqlens=cu_seqlens,
        ref_logprobs=ref_logprobs,
        objective=objective,
        importance_weight=importance_weight,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        entropy=entropy,
    )
    sequence = sequence_logprob(logprobs, mask, cu_seqlens=cu_seqlens, normalize=normalize)
    scores = sequence
    if not ref_free and ref_logprobs is not None:
        scores = scores - sequence_logprob(ref_logprobs, mask, cu_seqlens=cu_seqlens, normalize=normalize).detach()
    metrics = dict(policy.metrics)
    if preference_weights is not None:
        preference = (preference_weights.detach() * scores).sum()
    elif rewards is not None and group is not None:
        present = [len(row(logprobs)) > 0 for row in _token_rows(logprobs, mask, cu_seqlens)]
        valid = torch.tensor(present, device=scores.device)
        keywords: dict[str, Any] = {
            "beta_dpo": beta_dpo,
            "reward_margin": reward_margin,
            "pair_mining": pair_mining,
            "max_pairs_per_group": max_pairs_per_group,
            "valid": valid,
        }
        preference = preference_loss(scores, rewards, group, num_pairs=num_pairs, **keywords).loss
        chosen, rejected, logit = pair_logits(scores.detach(), rewards, group, **keywords)
        metrics |= {
            "pairs": policy.loss.detach() * 0 + len(logit),
            "pairs_correct": (logit > 0).to(logit.dtype).sum(),
            "pair_logit_sum": logit.sum(),
            "chosen_logprob_sum": sequence.detach()[chosen].sum(),
            "rejected_logprob_sum": sequence.detach()[rejected].sum(),
        }
    return AmirLoss(policy.loss + lambda_reg * preference, policy.loss, preference, metrics)
