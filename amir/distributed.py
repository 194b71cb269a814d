"""Data parallelism: the processes of a run, one by default, or several under torchrun that share the work of a step.

Each rank samples and rewards its share of the prompts. Then the completions are gathered on all ranks, so advantages,
pairs and divisors are those of one process. The micro-batches are assigned to the ranks in turn. Adapters are trained
with DDP, each rank with a copy of the model; full fine-tuning uses FSDP2, each rank with a shard of every weight,
gradient and moment. Only rank 0 writes files.
"""

import contextlib
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from .errors import ConfigError, RunStopped

Item = TypeVar("Item")
Result = TypeVar("Result")

TIMEOUT = timedelta(hours=2)
"""How long a rank waits for another one, which may be sampling: longer than any step should take."""
FIRST_RANK_EXIT_SECONDS = 10.0
"""How long the other ranks wait before they exit, so that the first one can report why: torchrun ends all ranks as soon
as one of them has exited."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the number of ranks."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and reports to the user."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """This rank's consecutive share of `items`; the lengths of shares differ by at most one and may be 0."""
        quotient, remainder = divmod(len(items), self.size)
        begin = self.rank * quotient + min(self.rank, remainder)
        return items[begin : begin + quotient + (self.rank < remainder)]

    def name(self, stream: int | str) -> int | str:
        """The name of a random stream on this rank; on the first rank it is that of a single process."""
        return stream if self.first else f"{stream}/rank {self.rank}"

    def gather(self, value: Any) -> list[Any]:
        """`value` of each rank, in the order of ranks: anything that pickles, with its tensors on the CPU."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def total_sums(self, sums: Counter[str]) -> Counter[str]:
        """Sums over the ranks, by name; a name may be missing on some ranks."""
        if self.size == 1:
            return sums
        total: Counter[str] = Counter()
        for part in self.gather({name: float(value) for name, value in sums.items()}):
            total.update(part)
        return total

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """If the body raises ConfigError or RunStopped on any rank, all ranks end and the first one reports the error.

        The first rank raises every message once; the others exit after it, with its exit code. The body may communicate
        with other ranks only before it raises, or if all of them raise alike.
        """
        error: tuple[type[ConfigError | RunStopped], str] | None = None
        try:
            yield
        except (ConfigError, RunStopped) as refusal:
            error = type(refusal), str(refusal)
        errors = [raised for raised in self.gather(error) if raised is not None]
        if not errors:
            return
        kind = errors[0][0]
        if self.first:
            raise kind("\n".join(dict.fromkeys(text for _, text in errors)))
        with contextlib.suppress(RuntimeError):
            self.gather(None)  # fails once the first rank has disconnected, which then reports the error
        _exit_after_first_rank(2 if issubclass(kind, ConfigError) else 1)

    def wait(self) -> None:
        """Returns once every rank has called it."""
        if self.size > 1:
            dist.barrier()


SINGLE_PROCESS = Ranks()


def _exit_after_first_rank(code: int) -> NoReturn:
    with contextlib.suppress(ValueError):  # outside the main thread
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torchrun ends this rank
    time.sleep(FIRST_RANK_EXIT_SECONDS)
    raise SystemExit(code) from None


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Connects the ranks that torchrun started; without torchrun, yields this single process.

    If the connection to a rank breaks, the first rank raises RunStopped; the others exit without a message, because the
    first rank or torchrun reports the reason.
    """
    if not dist.is_torchelastic_launched():
        yield SINGLE_PROCESS
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    except RuntimeError as error:
        if isinstance(error, RunStopped) or not (isinstance(error, dist.DistBackendError) or "gloo" in str(error)):
            raise
        if dist.get_rank() > 0:
            _exit_after_first_rank(1)
        raise RunStopped("rank 0 lost contact with another rank; see that rank's output for the reason") from None
    finally:
        dist.destroy_process_group()


class Forward(nn.Module):
    """Runs a function inside a module's forward, which DDP and FSDP2 hook into; `parts` are the modules it uses."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, run: Callable[[], Result]) -> Result:
        """`run()`."""
        return run()


def replicated(forward: Forward) -> DistributedDataParallel:
    """DDP, for adapters: each rank has a copy of the model and its own gradients until `average_gradients`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return DistributedDataParallel(forward, broadcast_buffers=False)


def average_gradients(replicas: DistributedDataParallel) -> None:
    """Averages the gradients that the ranks have accumulated. DDP does so in a backward, here that of an empty sum.

    No micro-batch waits for another rank, so a pass that runs out of memory can be abandoned on every rank.
    """
    trained = [parameter for parameter in replicas.parameters() if parameter.requires_grad]
    replicas(lambda: sum(parameter.flatten()[:0].sum() for parameter in trained)).backward()


def sharded(forward: Forward, device: torch.device, compute: torch.dtype, size: int) -> Forward:
    """FSDP2, for full fine-tuning: float32 weights in `size` shards, gathered layer by layer in the dtype `compute`."""
    precision = MixedPrecisionPolicy() if compute == torch.float32 else MixedPrecisionPolicy(compute, torch.float32)
    options: Any = {"mesh": init_device_mesh(device.type, (size,)), "mp_policy": precision}
    for layer in [module for module in forward.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, **options)
    fully_shard(forward, **options)
    return forward


def run_gathered(forward: nn.Module, run: Callable[[], Result]) -> Result:
    """`run()` with every weight gathered once and kept until it returns; every rank must call this.

    Ranks may need different numbers of decoding steps: once the weights are gathered, no rank waits for another.
    """
    shards = [module for module in forward.modules() if isinstance(module, FSDPModule)]
    for module in shards:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        return forward(run)
    finally:
        for module in shards:
            module.reshard()
        for module in shards[1:]:
            module.set_reshard_after_forward(True, recurse=False)


def gathered(tensor: Tensor) -> Tensor:
    """The gathered tensor, if it is sharded, otherwise the tensor; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` on the device of `like`, and sharded if `like` is; every rank must call this."""
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)
