"""The pair term, forward and backward, beside a plain vectorized one that forms every pair of a group at once.

Both get the same scores and rewards of 0 to 4, and their losses and gradients are compared before anything is timed.
Contenders take turns. Memory is measured on a GPU only.

Then the cost that it adds to a training pass of SmolLM2-135M (forward and backward of one group with LoRA, float32,
without sampling and without the optimizer), beside the method of the paper's authors: chosen and rejected completion of
each pair go through the model once more, forward and backward, with full logits. Half of the rewards are 1, so a group
of G has G^2 / 4 pairs. Their method runs in parts of 8 pairs. Both losses are compared first, without a reference
policy.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amir.policy.smollm2 import smollm2_folder
from amir_kernels import linear_logprob, policy_loss, preference_loss, sequence_logprob, supports
from machine import row_origin
from rows import keep, timing

CASES = ((512, 8), (4096, 16), (4096, 512), (4096, 4096))
"""(rows, group size)"""
BETA = 0.2
GROUPS = (8, 16)
PROMPT, COMPLETION = 16, 32
"""tokens"""
PAIRS_AT_ONCE = 8


def main() -> None:
    """Measures every case, prints and keeps its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each contender")
    parser.add_argument("--passes", type=int, default=2, help="measurements of each training pass; 0 for none")
    parser.add_argument("--no-keep", dest="keep", action="store_false", help="print only")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    origin = row_origin()
    measured = [row for rows, group in CASES for row in measure(rows, group, device, options.repeats)]
    if options.passes:
        measured += [row for group in GROUPS for row in measure_in_training(group, device, options.passes)]
    for row in measured:
        print(f"{row['case']}, {row['contender']}: {1000 * row['seconds']['median']:.2f} ms, ratio {row['ratio']}")
        if options.keep:
            keep(row | origin)


def ours(scores: Tensor, rewards: Tensor, group: int) -> Tensor:
    """The op."""
    return preference_loss(scores, rewards, group, beta_dpo=BETA).loss


def all_pairs_at_once(scores: Tensor, rewards: Tensor, group: int) -> Tensor:
    """`[groups, G, G]` of logits, autograd for the rest."""
    u, r = scores.view(-1, group), rewards.view(-1, group)
    wins = r[:, :, None] > r[:, None, :]
    z = BETA * (u[:, :, None] - u[:, None, :])
    return -(torch.nn.functional.logsigmoid(z) * wins).sum() / wins.sum()


CONTENDERS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"pairs at once": all_pairs_at_once, "ours": ours}
RIVAL = "pairs at once"


def measure(rows: int, group: int, device: str, repeats: int) -> list[dict]:
    """The rows of one case."""
    torch.manual_seed(0)
    scores = torch.randn(rows, device=device, requires_grad=True)
    rewards = torch.randint(0, 5, (rows,), device=device).float()
    refuse_disagreement(scores, rewards, group)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    peak_mb: dict[str, float | None] = dict.fromkeys(CONTENDERS)
    for _ in range(repeats):
        for name, loss in CONTENDERS.items():
            elapsed, peak_mb[name] = one_run(loss, scores, rewards, group)
            seconds[name].append(elapsed)
    timings = {name: timing(values) for name, values in seconds.items()}
    return [
        {
            "bench": "preference_loss",
            "contender": name,
            "workload": {"what": "the op", "rows": rows, "group_size": group, "dtype": "float32"},
            "case": f"B={rows:,}, G={group:,}, float32, forward and backward",
            "seconds": timings[name],
            "peak_memory_mb": peak_mb[name],
            "ratio_to": None if name == RIVAL else RIVAL,
            "ratio": None if name == RIVAL else timings[name]["median"] / timings[RIVAL]["median"],
        }
        for name in CONTENDERS
    ]


def refuse_disagreement(scores: Tensor, rewards: Tensor, group: int) -> None:
    """Raises if the contenders do not compute the same; this is also their warm-up."""
    losses = [loss(scores, rewards, group) for loss in CONTENDERS.values()]
    gradients = [torch.autograd.grad(loss, scores)[0] for loss in losses]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-9)


def one_run(
    loss: Callable[[Tensor, Tensor, int], Tensor], scores: Tensor, rewards: Tensor, group: int
) -> tuple[float, float | None]:
    """Seconds, and on a GPU the growth of the peak in MB."""
    cuda = scores.is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() if cuda else 0
    began = time.perf_counter()
    torch.autograd.grad(loss(scores, rewards, group), scores)
    if cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - began
    return elapsed, (torch.cuda.max_memory_allocated() - held) / 1e6 if cuda else None


# ---- in a training pass --------------------------------------------------------------------------------------------

TRAINING, PAIRS, AUTHORS = "training pass without pairs", "preference_loss in it", "authors' method in it"


class Group(NamedTuple):
    """One prompt's completions, and the policy."""

    model: nn.Module
    ids: Tensor
    """int64 [G, PROMPT + COMPLETION]"""
    rewards: Tensor
    """[G], every other one 1"""

    @property
    def size(self) -> int:
        return len(self.rewards)


def measure_in_training(size: int, device: str, repeats: int) -> list[dict]:
    """Rows of the training pass and of the two methods to add the pair term to it."""
    group = smollm2_group(size, device)
    refuse_other_loss(group)
    logprobs = policy_logprobs(group).detach().requires_grad_()
    pairs = size * size // 4
    work: dict[str, tuple[Callable[[], object], int]] = {
        TRAINING: (lambda: train(group), repeats),
        AUTHORS: (lambda: authors_pair_term(group), repeats),
        PAIRS: (lambda: pair_term(logprobs, group.rewards).backward(), 20 * repeats),
    }
    timings = {}
    train(group)  # warm-up; the other two were run for their losses
    for name, (run, number) in work.items():
        timings[name] = timing([seconds_of(run, device) for _ in range(number)])
    case = f"SmolLM2-135M, G={size}, {PROMPT} + {COMPLETION} tokens, float32, LoRA r 16, K={pairs} pairs"
    extra = {TRAINING: "", PAIRS: "", AUTHORS: f", {2 * pairs} sequences more"}
    workload = {
        "what": "a training pass",
        "model": "SmolLM2-135M",
        "dtype": "float32",
        "lora_r": 16,
        "group_size": size,
        "prompt_tokens": PROMPT,
        "completion_tokens": COMPLETION,
        "pairs": pairs,
    }
    return [
        {
            "bench": "preference_loss",
            "contender": name + extra[name],
            "workload": workload,
            "case": case,
            "seconds": timings[name],
            "peak_memory_mb": None,
            "ratio_to": None if name == TRAINING else TRAINING,
            "ratio": None if name == TRAINING else timings[name]["median"] / timings[TRAINING]["median"],
        }
        for name in (TRAINING, PAIRS, AUTHORS)
    ]


def smollm2_group(group: int, device: str) -> Group:
    """The policy with LoRA, and random tokens: their content does not change the time."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    ids = torch.randint(base.config.vocab_size, (group, PROMPT + COMPLETION), device=device)
    ids[:, :PROMPT] = ids[0, :PROMPT]
    return Group(model.to(device).eval(), ids, (torch.arange(group, device=device) % 2).float())


def policy_logprobs(group: Group) -> Tensor:
    """[G, COMPLETION] from hidden states."""
    support = supports(group.model)
    hidden = support.body(group.ids).last_hidden_state[:, PROMPT - 1 : -1]  # type: ignore[misc]
    return linear_logprob(hidden, support.weight, group.ids[:, PROMPT:], **support.head_arguments)


def train(group: Group) -> None:
    """Forward and backward of the group's policy loss."""
    policy_loss(policy_logprobs(group), None, group.rewards - group.rewards.mean()).loss.backward()


def pair_term(logprobs: Tensor, rewards: Tensor) -> Tensor:
    """The pair term of a pass whose log-probs are given."""
    return preference_loss(sequence_logprob(logprobs), rewards, len(rewards), beta_dpo=BETA).loss


def authors_pair_term(group: Group) -> Tensor:
    """Both sequences of each pair through the model again; backward at once, part by part."""
    chosen, rejected = (group.rewards[:, None] > group.rewards).nonzero(as_tuple=True)
    total = torch.zeros((), device=group.ids.device)
    for part in torch.arange(len(chosen), device=group.ids.device).split(PAIRS_AT_ONCE):
        ids = group.ids[torch.cat([chosen[part], rejected[part]])]
        logits = group.model(input_ids=ids).logits[:, PROMPT - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]
        chosen_scores, rejected_scores = logprobs.mean(1).chunk(2)
        loss = -nn.functional.logsigmoid(BETA * (chosen_scores - rejected_scores)).sum() / len(chosen)
        loss.backward()
        total += loss.detach()
    return total


def refuse_other_loss(group: Group) -> None:
    """Raises if the two methods do not give the same loss."""
    with torch.no_grad():
        ours = pair_term(policy_logprobs(group), group.rewards)
    torch.testing.assert_close(authors_pair_term(group), ours, rtol=1e-4, atol=0)


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
