"""The training pass of one group, packed with its prompt computed once, beside padded rows with a prompt each.

SmolLM2-135M with LoRA, float32; forward, log-probs of the completions and backward. Eight completions of unequal length
behind prompts of a tenth to four times their mean length. Log-probs and gradients are compared before anything is
timed. Contenders take turns.
"""

import argparse
from functools import partial

import torch
from torch import Tensor

from amir.config import RunConfig
from amir.policy.load import load_policy
from amir.policy.policy import Policy
from amir.policy.smollm2 import MODEL_NAME
from amir.tokens import Tokens
from machine import row_origin
from meter import measure
from rows import keep, timing

COMPLETIONS = (16, 24, 32, 40, 48, 56, 64, 72)
"""Tokens of each; their mean is 44."""
RATIOS = (0.1, 0.25, 0.5, 1, 2, 4)
"""Prompt over mean completion."""
PACKED, PADDED = "packed", "padded rows"


def main() -> None:
    """Measures every ratio, prints and keeps its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each contender")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="prompt over mean completion")
    parser.add_argument("--no-keep", dest="keep", action="store_false", help="print only")
    options = parser.parse_args()
    origin = row_origin()
    policies = make_policies()
    for ratio in options.ratios:
        for row in rows_of(policies, ratio, options.repeats):
            print(
                f"{row['case']}, {row['contender']}: {row['seconds']['median']:.2f} s ({row['seconds']['min']:.2f} to "
                f"{row['seconds']['max']:.2f}), {row['peak_memory_mb'] or 0:,.0f} MB",
                flush=True,
            )
            if options.keep:
                keep(row | origin)


def make_policies() -> dict[str, Policy]:
    """The same model twice, its adapter moved off zero so that every weight of it has a gradient."""
    config = RunConfig.model_validate({"model": MODEL_NAME, "task": {"name": "arithmetic"}})
    packed = load_policy(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in packed.trainable().values():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    if not packed.packed:
        raise RuntimeError(f"the model is not packed: {packed.why_unpacked}")
    padded = Policy(**{name: getattr(packed, name) for name in Policy.__dataclass_fields__})
    padded.__dict__["why_unpacked"] = "to compare"
    return {PADDED: padded, PACKED: packed}


def group_of(ratio: float, device: torch.device) -> Tokens:
    """One prompt and its completions, of random ids."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(COMPLETIONS)
    prompt = max(1, round(ratio * float(lengths.float().mean())))
    ids = torch.randint(1000, 40_000, (1, prompt), generator=generator)
    completions = torch.randint(1000, 40_000, (len(lengths), int(lengths.max())), generator=generator)
    mask = torch.arange(completions.shape[1]) < lengths[:, None]
    parts = (ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(lengths), completions, mask)
    return Tokens(*(tensor.to(device) for tensor in parts))


def training_pass(policy: Policy, tokens: Tokens) -> tuple[Tensor, list[Tensor]]:
    """Log-probs and the gradients of their sum."""
    logprobs = policy.logprobs(tokens)
    return logprobs.detach(), list(torch.autograd.grad(logprobs.sum(), list(policy.trainable().values())))


def rows_of(policies: dict[str, Policy], ratio: float, repeats: int) -> list[dict]:
    """The rows of one ratio."""
    tokens = group_of(ratio, policies[PACKED].device)
    work = {name: partial(training_pass, policy, tokens) for name, policy in policies.items()}
    refuse_disagreement(*(run() for run in work.values()))
    seconds: dict[str, list[float]] = {name: [] for name in work}
    peaks: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            elapsed, peak, _ = measure(run, tokens.prompt_ids.device)
            seconds[name].append(elapsed)
            peaks[name] += [] if peak is None else [peak]
    timings = {name: timing(values) for name, values in seconds.items()}
    computed = {name: tokens.computed(packed=name == PACKED) for name in work}
    prompt, shortest, longest = int(tokens.prompt_lengths), min(COMPLETIONS), max(COMPLETIONS)
    return [
        {
            "bench": "packing",
            "contender": name,
            "workload": {
                "model": "SmolLM2-135M",
                "dtype": "float32",
                "lora_r": 16,
                "prompt_tokens": prompt,
                "completions": len(COMPLETIONS),
                "shortest_completion": shortest,
                "longest_completion": longest,
                "prompt_to_completion": float(ratio),
            },
            "observed": {"tokens_computed": computed[name], "tokens_trained": sum(COMPLETIONS)},
            "case": (
                f"SmolLM2-135M float32, LoRA r 16, prompt {prompt}, {len(COMPLETIONS)} completions of {shortest} to "
                f"{longest} tokens (prompt/completion {ratio:g}): tokens computed {computed[PACKED]:,} packed, "
                f"{computed[PADDED]:,} padded, trained {sum(COMPLETIONS):,}"
            ),
            "seconds": timings[name],
            "peak_memory_mb": round(max(peaks[name]), 1) if peaks[name] else None,
            "ratio_to": None if name == PADDED else PADDED,
            "ratio": None if name == PADDED else timings[name]["median"] / timings[PADDED]["median"],
        }
        for name in work
    ]


def refuse_disagreement(first: tuple[Tensor, list[Tensor]], second: tuple[Tensor, list[Tensor]]) -> None:
    """Raises if the contenders do not compute the same; this is also their warm-up."""
    torch.testing.assert_close(first[0], second[0], rtol=1e-5, atol=1e-4)
    for left, right in zip(first[1], second[1], strict=True):
        if (left - right).norm() > 1e-4 * right.norm():
            raise ValueError(f"gradients differ by {float((left - right).norm() / right.norm()):.1e}, expected 1e-4")


if __name__ == "__main__":
    main()
