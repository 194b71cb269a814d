"""The processes of a run: one alone, or several under torchrun, which share the work of each step.

Each rank samples and scores its share of the prompts, then all know the whole batch, so that advantages, pairs and
divisors are those of one process. The micro-batches are dealt out in turn. Adapters are trained under DDP, each
rank with a copy of the model; whole models under FSDP2, each rank with a part of every weight, gradient and moment.
The first rank alone writes.
"""

import contextlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from .batch import MicroBatch
from .config import ConfigError, RunStopped

Item = TypeVar("Item")
Result = TypeVar("Result")

PATIENCE = timedelta(hours=2)
"""How long a rank waits for another, which may be sampling: longer than any step should take."""
SPEECH = 10.0
"""Seconds at most that the first rank takes to say why all end."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """This rank's consecutive part of `items`; parts differ by at most one in length and may be empty."""
        each, more = divmod(len(items), self.size)
        begin = self.rank * each + min(self.rank, more)
        return items[begin : begin + each + (self.rank < more)]

    def name(self, stream: int | str) -> int | str:
        """A random stream's name on this rank; the first rank's is that of a process alone."""
        return stream if self.first else f"{stream}/rank {self.rank}"

    def deal(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Every `size`-th of `micros`, and as many on each rank: ranks that would have one less get an idle one."""
        if not micros:
            return []
        shortest = MicroBatch(micros[-1].rows[-1:], whole=False, idle=True)
        return [*micros, *[shortest] * (-len(micros) % self.size)][self.rank :: self.size]

    def gather(self, value: Any) -> list[Any]:
        """`value` of each rank, by rank; anything that can be pickled, its tensors on the CPU."""
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

    def total_of_sums(self, sums: Counter[str]) -> Counter[str]:
        """Named sums over the ranks; a name need not be on all of them."""
        if self.size == 1:
            return sums
        made: Counter[str] = Counter()
        for part in self.gather({name: float(value) for name, value in sums.items()}):
            made.update(part)
        return made

    def together(self, make: Callable[[], Result]) -> Result:
        """`make()` on every rank. Where it raises ConfigError or RunStopped on any, all end and the first says why.

        It has every message once; the others leave after it, with its exit code. `make` may speak to other ranks only
        before it raises, or where all of them raise alike.
        """
        made: Result | None = None
        error: tuple[type[ConfigError | RunStopped], str] | None = None
        try:
            made = make()
        except (ConfigError, RunStopped) as refusal:
            error = type(refusal), str(refusal)
        errors = [given for given in self.gather(error) if given is not None]
        if not errors:
            return made  # type: ignore[return-value]
        kind = errors[0][0]
        if self.first:
            raise kind("\n".join(dict.fromkeys(text for _, text in errors)))
        with contextlib.suppress(RuntimeError):
            self.gather(None)  # which fails once the first has disconnected: it speaks then
        time.sleep(SPEECH)  # torchrun ends all ranks as soon as one is, this one when the first has spoken and left
        raise SystemExit(2 if issubclass(kind, ConfigError) else 1)

    def wait(self) -> None:
        """Returns when every rank is here."""
        if self.size > 1:
            dist.barrier()


ALONE = Ranks()


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that torchrun started, connected; or this process alone.

    Where another one went away, the first raises RunStopped; the others leave in silence, since the first one or
    torchrun says why.
    """
    if not dist.is_torchelastic_launched():
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    except RuntimeError as error:
        if isinstance(error, RunStopped) or not (isinstance(error, dist.DistBackendError) or "gloo" in str(error)):
            raise
        if dist.get_rank() > 0:
            time.sleep(SPEECH)
            raise SystemExit(1) from None
        raise RunStopped("the first rank lost touch with another, which has said why or was killed") from None
    finally:
        dist.destroy_process_group()


class Forward(nn.Module):
    """Runs a function of its parts inside a module's forward, where DDP and FSDP2 do theirs."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, run: Callable[[], Result]) -> Result:
        """`run()`."""
        return run()


def copied(forward: Forward) -> DistributedDataParallel:
    """For adapters: each rank has the model and trains it by itself, until `average_gradients` of the copies."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return DistributedDataParallel(forward, broadcast_buffers=False)


def average_gradients(copies: DistributedDataParallel) -> None:
    """Averages what each rank has accumulated: DDP does so in a backward, here that of a sum of no numbers.

    So no micro-batch waits for another rank, and one that has no room in memory can be left on every rank.
    """
    trained = [parameter for parameter in copies.parameters() if parameter.requires_grad]
    copies(lambda: sum(parameter.flatten()[:0].sum() for parameter in trained)).backward()


def sharded(forward: Forward, device: torch.device, compute: torch.dtype, size: int) -> Forward:
    """For whole models: float32 weights in `size` parts, layer by layer gathered in `compute` when they are needed."""
    precision = MixedPrecisionPolicy() if compute == torch.float32 else MixedPrecisionPolicy(compute, torch.float32)
    options: Any = {"mesh": init_device_mesh(device.type, (size,)), "mp_policy": precision}
    for layer in [module for module in forward.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, **options)
    fully_shard(forward, **options)
    return forward


def run_whole(forward: nn.Module, run: Callable[[], Result]) -> Result:
    """`run()` with every weight gathered once and for as long as it takes; every rank must call this.

    Ranks may take different numbers of decoding steps: none of them waits for another once the weights are there.
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


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be in parts as one; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_parts_of(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor in the parts, and on the device, of `like`; every rank must call this."""
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)


def on_cpu(value: Any) -> Any:
    """A value whose tensors, also those inside tuples and dataclasses, are on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        return tuple(map(on_cpu, value))
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{name: on_cpu(getattr(value, name)) for name in value.__dataclass_fields__})
    return value
