"""`amir train` of the tiny model with completions that are a function of the prompt, alone or under torchrun.

A script of its own, which tests/test_ranks.py starts: `python ranked_run.py RUN.yaml [--resume] [--sample]
[--no-room SCORED TRAINED]`. The last lets the second rank run out of memory like CUDA in a micro-batch of more rows.
"""

import random
import sys

import torch

import amir.__main__ as command
import amir.rewards.runner
import amir.trainer
import amir.update.gradient
from amir.policy.policy import Policy
from amir.rollout.rollout import Rollout, make_rollout
from amir.tokens import Tokens
from amir.update.batch import Batch
from amir.update.micro_batches import MicroBatch
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
        """See `amir.Sampler`."""
        completions = [self.completion(prompt, i, max_new_tokens) for prompt in prompts for i in range(group_size)]
        return make_rollout(self.policy, prompts, completions)

    def completion(self, prompt: list[int], place: int, longest: int) -> list[int]:
        """Token ids of one completion."""
        draw = random.Random(f"{prompt}/{place}")
        length = draw.randint(1, longest)
        ids = [draw.randint(3, 97) for _ in range(length)]
        return [*ids[:-1], EOS] if length < longest else ids


def leave_no_room(scored: int, trained: int) -> None:
    """For more rows on the second rank: in a pass without gradients, or when a backward has left its own behind."""
    logprobs, accumulate = Policy.logprobs, amir.update.gradient._accumulate

    def tight(rows: int, most: int) -> None:
        if torch.distributed.get_rank() == 1 and rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    def scores(policy: Policy, tokens: Tokens) -> torch.Tensor:
        tight(len(tokens), scored)
        return logprobs(policy, tokens)

    def trains(policy: Policy, batch: Batch, micro: MicroBatch, *others: object) -> torch.Tensor:
        made = accumulate(policy, batch, micro, *others)
        tight(len(micro.rows), trained)
        return made

    Policy.logprobs, amir.update.gradient._accumulate = scores, trains


if __name__ == "__main__":
    torch.set_num_threads(1)
    amir.rewards.runner.Correctness = ParityGrader
    if "--no-room" in sys.argv:
        place = sys.argv.index("--no-room")
        leave_no_room(*map(int, sys.argv[place + 1 : place + 3]))
        del sys.argv[place : place + 3]
    if "--sample" in sys.argv:
        sys.argv.remove("--sample")
    else:
        amir.trainer.make_sampler = lambda config, policy, *others: Fixed(policy)
    sys.argv = ["amir", "train", *sys.argv[1:]]
    command.main()
