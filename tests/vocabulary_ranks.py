"""`python vocabulary_ranks.py WORLD`: a vocabulary split over gloo ranks against the whole. Run by a test."""

import os
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from amir_kernels import linear_logprob, linear_logprob_entropy

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


def compare(rank: int, world: int, group: dist.ProcessGroup, dtype: torch.dtype, tolerance: float) -> None:
    tensors, target = inputs(dtype)
    whole = run(tensors, target)
    first = sum(SIZES[world][:rank])
    own = slice(first, first + SIZES[world][rank])
    split = ("weight", "bias", "b")
    mine = {name: value[own] if name in split else value for name, value in tensors.items()}
    ours = run(mine, target, process_group=group)
    for name, value in ours.items():
        expected = whole[name][own] if name in split else whole[name]
        assert value.dtype == expected.dtype, name
        error = (value.double() - expected.double()).norm() / expected.double().norm()
        assert error < tolerance, f"rank {rank} of {world}, {dtype}: {name} is off by {error}"
    alone = linear_logprob(mine["hidden"][5:6], mine["weight"], target[5:6], process_group=group)
    among = linear_logprob(mine["hidden"], mine["weight"], target, process_group=group)
    assert torch.equal(alone, among[5:6]), "a row's bits depend on its company"
    with pytest.raises(ValueError, match="got 101"):
        linear_logprob(mine["hidden"], mine["weight"], target.clamp(min=0) + 1, process_group=group)


def main(rank: int, world: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    compare(rank, world, dist.group.WORLD, torch.float64, 1e-12)
    compare(rank, world, dist.group.WORLD, torch.float32, 2e-6)
    compare(rank, world, dist.group.WORLD, torch.bfloat16, 2e-3)
    dist.barrier()
    os._exit(0)  # an ordinary exit now and then aborts in gloo's threads, after all comparisons have passed


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (ranks, f"{folder}/meeting"), nprocs=ranks)
