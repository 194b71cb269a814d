"""`python vocabulary_ranks.py WORLD`: a vocabulary split over gloo ranks against the whole; FSDP2. Run by a test."""

import importlib.util
import os
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from amir_kernels import linear_logprob, linear_logprob_entropy, linear_policy_loss

SIZES = {2: (51, 50), 3: (40, 1, 60)}
H, T = 12, 23


def inputs(dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same on every rank; the first targets lie on both sides of each shard's edges."""
    torch.manual_seed(0)
    tensors = {
        "hidden": torch.randn(T, H),
        "weight": torch.randn(101, H),
        "bias": torch.randn(101),
        "a": torch.randn(2, H),
        "b": torch.randn(101, 2),
    }
    target = torch.randint(0, 101, (T,))
    target[:8] = torch.tensor([0, 39, 40, 41, 50, 51, 100, -100])
    return {name: value.to(dtype) for name, value in tensors.items()}, target


def run(tensors: dict[str, torch.Tensor], target: torch.Tensor, **options: object) -> dict[str, torch.Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in tensors.items()}
    hidden, weight, bias, a, b = leaves.values()
    options |= {"bias": bias, "lora": (a, b, 0.5), "softcap": 5.0, "temperature": torch.linspace(0.5, 1.5, T)}
    result = linear_logprob_entropy(hidden, weight, target, **options)
    upstream = torch.linspace(-1, 1, 3 * T).view(3, T).double()
    loss = sum((scale * value.double()).sum() for scale, value in zip(upstream, result, strict=True))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(result._fields, result, strict=True)) | dict(zip(leaves, grads, strict=True))


def compare(
    rank: int, world: int, group: dist.ProcessGroup, dtype: torch.dtype, tolerance: float, backend: str = "torch"
) -> None:
    tensors, target = inputs(dtype)
    whole = run(tensors, target)
    first = sum(SIZES[world][:rank])
    own = slice(first, first + SIZES[world][rank])
    split = ("weight", "bias", "b")
    mine = {name: value[own] if name in split else value for name, value in tensors.items()}
    ours = run(mine, target, process_group=group, backend=backend)
    for name, value in ours.items():
        expected = whole[name][own] if name in split else whole[name]
        assert value.dtype == expected.dtype, name
        error = (value.double() - expected.double()).norm() / expected.double().norm()
        assert error < tolerance, f"rank {rank} of {world}, {dtype}: {name} is off by {error}"
    if backend == "triton":
        return
    alone = linear_logprob(mine["hidden"][5:6], mine["weight"], target[5:6], process_group=group)
    among = linear_logprob(mine["hidden"], mine["weight"], target, process_group=group)
    assert torch.equal(alone, among[5:6]), "a row's bits depend on its company"
    with pytest.raises(ValueError, match="got 101"):
        linear_logprob(mine["hidden"], mine["weight"], target.clamp(min=0) + 1, process_group=group)


def compare_losses(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """linear_policy_loss over a split vocabulary, beside the whole."""
    tensors, target = inputs(torch.float64)
    first = sum(SIZES[world][:rank])
    own, bounds = slice(first, first + SIZES[world][rank]), torch.tensor([0, 9, T])
    outcomes = []
    for rows, options in ((slice(None), {}), (own, {"process_group": group})):
        hidden, weight = tensors["hidden"].clone().requires_grad_(), tensors["weight"][rows].clone().requires_grad_()
        advantages = torch.tensor([1.0, -0.5]).double()
        loss = linear_policy_loss(hidden, weight, target, None, advantages, cu_seqlens=bounds, **options).loss
        outcomes.append((loss, *torch.autograd.grad(loss, [hidden, weight])))
    (loss, grad, grad_weight), ours = outcomes
    for one, other in zip(ours, (loss, grad, grad_weight[own]), strict=True):
        torch.testing.assert_close(one, other)


class Model(torch.nn.Module):
    """A head behind a layer, whose forward calls the op as a model's would."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(H, H), torch.nn.Linear(H, 101, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return linear_logprob(self.body(x), self.head.weight, target)


def compare_fsdp2() -> None:
    """Inside the sharded module's forward the weights are whole; outside, sharded or replicated, they are refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    plain, (tensors, target) = Model(), inputs(torch.float32)
    sharded = Model()
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=mesh, reshard_after_forward=False)
    for model in (plain, sharded):
        model(tensors["hidden"], target).sum().backward()
    torch.testing.assert_close(sharded.head.weight.grad.full_tensor(), plain.head.weight.grad)
    sharded.reshard()
    replicated = distribute_tensor(plain.head.weight.detach(), mesh, [Replicate()])
    for weight in (sharded.head.weight, replicated):
        with pytest.raises(
            ValueError, match=r"DTensor, expected the whole tensor; gather it first: weight.full_tensor\(\)"
        ):
            linear_logprob(tensors["hidden"], weight, target)
        gathered = linear_logprob(tensors["hidden"], weight.full_tensor(), target)
        assert torch.equal(gathered, linear_logprob(tensors["hidden"], plain.head.weight, target))


def main(rank: int, world: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    compare(rank, world, dist.group.WORLD, torch.float64, 1e-12)
    compare(rank, world, dist.group.WORLD, torch.float32, 2e-6)
    compare(rank, world, dist.group.WORLD, torch.bfloat16, 2e-3)
    if importlib.util.find_spec("triton"):
        compare(rank, world, dist.group.WORLD, torch.float32, 2e-6, backend="triton")
    compare_losses(rank, world, dist.group.WORLD)
    compare_fsdp2()
    dist.barrier()
    # A thread of gloo may still hold the last collective's tensors, and aborts where it frees them as the interpreter
    # ends. destroy_process_group does not join it: DTensor keeps its plans, and they the group.
    os._exit(0)


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        # Forks have loaded everything already, which takes longer than what they do.
        mp.start_processes(main, (ranks, f"{folder}/meeting"), nprocs=ranks, start_method="fork")
