"""`amir train` of the tiny model with completions that are a function of the prompt, alone or under torchrun.

A script of its own, which tests/test_ranks.py starts: `python ranked_run.py RUN.yaml [--resume]`.
"""

import random
import sys

import torch

import amir.__main__ as command
import amir.rewards.runner
import amir.trainer
from amir.rollout import Rollout, rollout_of
from tiny import EOS, Grader


class ParityGrader(Grader):
    """1 where the sum of a completion's characters is odd, so that groups disagree and every step trains."""

    def __call__(self, completions: list[str], golds: list[str]) -> list[float]:
        """The rewards."""
        return [float(sum(map(ord, text)) % 2) for text in completions]


class Fixed:
    """A sampler whose completions depend on the prompt alone; of different lengths, some without an end."""

    def __init__(self, policy: object) -> None:
        self.policy = policy

    def sample(self, prompts: list[list[int]], group_size: int, max_new_tokens: int, seed: int) -> Rollout:
        """See `amir.rollout.Sampler`."""
        completions = [self.completion(prompt, i, max_new_tokens) for prompt in prompts for i in range(group_size)]
        return rollout_of(self.policy, prompts, completions)

    def completion(self, prompt: list[int], place: int, longest: int) -> list[int]:
        """Token ids of one completion."""
        draw = random.Random(f"{prompt}/{place}")
        length = draw.randint(1, longest)
        ids = [draw.randint(3, 97) for _ in range(length)]
        return [*ids[:-1], EOS] if length < longest else ids


if __name__ == "__main__":
    torch.set_num_threads(1)
    amir.rewards.runner.Correctness = ParityGrader
    if "--sample" in sys.argv:
        sys.argv.remove("--sample")
    else:
        amir.trainer.make_sampler = lambda config, policy, *others: Fixed(policy)
    sys.argv = ["amir", "train", *sys.argv[1:]]
    command.main()
