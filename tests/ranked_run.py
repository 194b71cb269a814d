"""`amir train` of the tiny model with completions that are a function of the prompt, alone or under torchrun.

A script of its own, which tests/test_ranks.py starts: `python ranked_run.py RUN.yaml [--resume] [--sample]
[--no-room SCORED TRAINED]`. The last lets the second rank run out of memory like CUDA in a micro-batch of more rows.
`python ranked_run.py --serve` loads everything once, then forks the ranks of each run that it reads from stdin.
"""

import json
import os
import random
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch

import amir.__main__ as command
import amir.policy.load
import amir.rewards.runner
import amir.run.display
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


def main(arguments: list[str]) -> None:
    """The command; ends with its exit code."""
    torch.set_num_threads(1)
    amir.rewards.runner.Correctness = ParityGrader
    amir.run.display.draw_curves = lambda run: run / "curves.png"  # half of the time of so small a run
    if "--no-room" in arguments:
        place = arguments.index("--no-room")
        leave_no_room(*map(int, arguments[place + 1 : place + 3]))
        del arguments[place : place + 3]
    if "--sample" in arguments:
        arguments.remove("--sample")
    else:
        amir.trainer.make_sampler = lambda config, policy, *others: Fixed(policy)
    sys.argv = ["amir", "train", *arguments]
    command.main()


def serve() -> None:
    """For each line of JSON on stdin, `{"ranks", "arguments", "folder"}`, runs and prints the first exit code but 0.

    The ranks write to stdout.txt and stderr.txt in the folder. Where one fails, the others are ended.
    """
    for line in sys.stdin:
        job = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        running = {start(rank, port, **job) for rank in range(job["ranks"])}
        code = 0
        while running:
            process, status = os.wait()
            running.remove(process)
            if code == 0 and status != 0:
                code = os.waitstatus_to_exitcode(status)
                for other in running:
                    os.kill(other, signal.SIGTERM)
        print(code, flush=True)


def start(rank: int, port: int, ranks: int, arguments: list[str], folder: str) -> int:
    """Forks a rank with the environment that torchrun would give it; its process id."""
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        for stream in (sys.stdout, sys.stderr):
            name = stream.name.strip("<>")
            os.dup2(os.open(Path(folder) / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
        os.chdir(folder)
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "forked"}
            os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command._FIRST_RANK = rank == 0
        main(arguments)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:  # noqa: BLE001 (whatever it is, it belongs to this rank)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main(sys.argv[1:])
