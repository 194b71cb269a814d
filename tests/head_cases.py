"""Inputs and comparisons that the tests of linear_logprob and linear_policy_loss share."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from amir_kernels import reference

RESULTS = ("logprob", "entropy", "lse")
SMALL = 40_000
"""workspace in bytes that makes several row blocks and several vocabulary tiles of the shapes used here"""
SPLIT = 128
"""Vocabulary columns of a split: at V = 301 three splits of two or more tiles, the last one ragged."""
B, L = 4, 11
"""completions and their padded length, in the tests of losses"""


def tensors(rows=(2, 19), hidden_size=24, vocabulary=301, dtype=torch.float64, rank=0, ignored=3):
    """Inputs with peaked rows and targets drawn from them; each requires a gradient."""
    hidden = 2 * torch.randn(*rows, hidden_size, dtype=dtype)
    weight = torch.randn(vocabulary, hidden_size, dtype=dtype) / hidden_size**0.5 * 2
    probs = (hidden.double() @ weight.double().T).softmax(-1)
    target = torch.multinomial(probs.reshape(-1, vocabulary), 1).view(rows)
    if ignored:
        target.view(-1)[:: target.numel() // ignored + 1] = -100
    inputs = {"hidden": hidden, "weight": weight, "bias": torch.randn(vocabulary, dtype=dtype)}
    if rank:
        inputs["a"] = torch.randn(rank, hidden_size, dtype=dtype)
        inputs["b"] = torch.randn(vocabulary, rank, dtype=dtype) / 4
    return {name: value.requires_grad_() for name, value in inputs.items()}, target


def run(function, inputs: dict[str, Tensor], target: Tensor, upstream, **options):
    """The three results and the gradients of sum(upstream * results), by name."""
    options = dict(options)
    if "a" in inputs:
        options["lora"] = (inputs["a"], inputs["b"], 0.5)
    result = function(inputs["hidden"], inputs["weight"], target, bias=inputs.get("bias"), **options)
    loss = sum((scale * value.double()).sum() for scale, value in zip(upstream, result, strict=True))
    names = [name for name, value in inputs.items() if value.requires_grad]
    grads = torch.autograd.grad(loss, [inputs[name] for name in names])
    return dict(zip(RESULTS, result, strict=True)) | {f"d {n}": g for n, g in zip(names, grads, strict=True)}


def upstream(target: Tensor, kinds="lpe"):
    """Upstream gradients for (logprob, entropy, lse), zero for those not named in `kinds`."""
    return [torch.randn(target.shape, dtype=torch.float64) * (kind in kinds) for kind in "lep"]


def option_cases():
    """Every pair of values of two options occurs in some case."""
    temperatures, caps, scales, ranks, kinds = (1.0, 0.7, "row"), (None, 4.0), (1.0, 1.7), (0, 3), ("l", "lpe", "e")
    cases = list(itertools.product(temperatures, caps, scales, ranks, kinds))
    wanted = {(i, a, j, b) for case in cases for i, a in enumerate(case) for j, b in enumerate(case) if i < j}
    chosen = []
    while wanted:
        pairs = lambda case: {(i, a, j, b) for i, a in enumerate(case) for j, b in enumerate(case) if i < j}
        best = max(cases, key=lambda case: len(wanted & pairs(case)))
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


def options_of(temperature, softcap, scale, target, dtype):
    if temperature == "row":
        temperature = torch.rand(target.shape, dtype=dtype) + 0.5
    return {"temperature": temperature, "softcap": softcap, "logit_scale": scale}


def use_tiles(monkeypatch, config, programs=3, cache_bytes=2**13, split=SPLIT):
    """Launches of that shape: `programs` at once, groups of as many row tiles as `cache_bytes` hold."""
    pytest.importorskip("triton")
    from amir_kernels.linear_logprob import triton_backend, triton_tiles

    monkeypatch.setattr(triton_backend, "select_config", lambda head, architecture: config)
    monkeypatch.setattr(triton_backend, "_device_size", lambda device: (programs, cache_bytes))
    monkeypatch.setattr(triton_tiles, "SPLIT_COLUMNS", split)


def loss_case(dtype=torch.float64, rank=0, trained=(), **shape):
    """A batch near its old policy on both sides of the clip, one row without advantage, masked tails."""
    inputs, target = tensors(rows=(B, L), dtype=torch.float32, rank=rank, **shape)
    inputs = {name: value.detach().to(dtype) for name, value in inputs.items()}
    for name in ("hidden", *trained):
        inputs[name].requires_grad_()
    mask = torch.arange(L) < torch.tensor([L, 7, 4, 9])[:, None]
    logprob = reference.linear_logprob(inputs["hidden"].detach().double(), inputs["weight"].detach().double(), target)
    noise = torch.linspace(-0.4, 0.4, B * L).view(B, L).double()
    data = {
        "old_logprobs": (logprob + noise).to(torch.float64 if dtype == torch.float64 else torch.float32),
        "advantages": torch.tensor([1.2, -0.7, 0.0, -0.5], dtype=torch.float64).to(noise.dtype),
        "ref_logprobs": logprob + noise.flip(0) / 2,
    }
    return inputs, target, mask, data


def run_loss(function, inputs, target, mask, data, **options):
    options = {"bias": inputs["bias"]} | options
    if "a" in inputs:
        options["lora"] = (inputs["a"], inputs["b"], 0.5)
    loss, metrics = function(
        inputs["hidden"], inputs["weight"], target, data["old_logprobs"], data["advantages"], mask, **options
    )
    wanted = {name: value for name, value in inputs.items() if value.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()))
    return {"loss": loss.detach(), **metrics} | {f"d {name}": g for name, g in zip(wanted, grads, strict=True)}


class Products:
    """Counts the flops of the products inside the ops, in units of rows * hidden size * vocabulary, while it is on."""

    def __init__(self, monkeypatch, unit: int) -> None:
        self.flops, self.unit, self.seen = 0, unit, []
        mm, addmm = torch.mm, Tensor.addmm_

        def count(a, b):
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
            self.seen.append(precisions())

        monkeypatch.setattr(torch, "mm", lambda a, b, **more: (count(a, b), mm(a, b, **more))[1])
        monkeypatch.setattr(Tensor, "addmm_", lambda total, a, b: (count(a, b), addmm(total, a, b))[1])

    def spent(self) -> float:
        """Since the last call."""
        flops, self.flops = self.flops, 0
        return flops / self.unit


def precisions() -> tuple[str, str]:
    """Of float32 products, on a GPU and on a CPU."""
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


class LiveBytes(TorchDispatchMode):
    """The most bytes alive after any torch call, of storages allocated while this is on."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self.given:
                    self.live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {at: entry for at, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return out
