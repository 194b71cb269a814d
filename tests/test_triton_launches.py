"""How often Triton would compile the kernels anew: launches are recorded instead of run, and their keys counted."""

from collections import defaultdict

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from amir_kernels import (
    _group_kernels,
    group_advantage,
    linear_logprob,
    linear_logprob_entropy,
    linear_policy_loss,
    pass_at_k_advantage,
    preference_loss,
)
from amir_kernels.inspect import launches as inspected_launches
from amir_kernels.inspect import specialization
from amir_kernels.linear_logprob import triton_backend, triton_forward_gradients

H, V = 40, 2001
TOKENS = (1, 2, 7, 16, 33, 100, 255, 1000, 2047, 4096, 9999, 16_384)
TEMPERATURES = (0.5, 0.6, 0.7, 1.0, 1.3)
NVIDIA, AMD = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)


def key_of(arguments, options):
    """Of (type, hint) or ("constexpr", value) by argument: D a multiple of 16, S within 2 GiB."""
    return (*((kind, "" if hint is None else hint) for kind, hint in arguments), tuple(sorted(options.items())))


class Launches:
    """In the kernels' place. A key is what Triton's launcher compiles by: types, constants, 1s and multiples of 16."""

    def __init__(self, monkeypatch, target: GPUTarget) -> None:
        self.keys: defaultdict[str, set[tuple[object, ...]]] = defaultdict(set)
        self.count = 0
        backend = make_backend(target)
        for module in (triton_backend, _group_kernels):
            for name, kernel in vars(module).copy().items():
                if name.endswith("_kernel"):
                    function = JITFunction(kernel.fn)
                    bind = create_function_from_signature(function.signature, function.params, backend)
                    monkeypatch.setattr(module, name, self._recording(name, bind, kernel.arg_names))

    def _recording(self, name, bind, argument_names):
        def launch(*arguments, **options):
            _, arguments, options = bind(*arguments, **options)
            self.keys[name].add(key_of(arguments, options))
            self.count += 1

        class Recording:
            arg_names = argument_names
            kernel_name = name

            def __getitem__(self, grid):
                return launch

        return Recording()

    def counted(self) -> dict[str, int]:
        return {name: len(keys) for name, keys in self.keys.items()}


def head_losses(dtype, tokens, temperature):
    """Each op, frozen and trained; the entropy's gradient and none."""
    hidden = torch.randn(tokens, H).to(dtype).requires_grad_()
    target = torch.randint(0, V, (tokens,))
    for trained in (False, True):
        weight = torch.randn(V, H).to(dtype).requires_grad_(trained)
        options = {"temperature": temperature, "backend": "triton"}
        result = linear_logprob_entropy(hidden, weight, target, **options)
        yield (result.logprob + result.entropy).sum()
        yield linear_logprob(hidden, weight, target, **options).sum()
        rows = {"advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, tokens]), "objective": "reinforce"}
        yield linear_policy_loss(hidden, weight, target, None, **rows, **options).loss


@pytest.mark.parametrize(
    ("architecture", "target", "dtype"),
    [
        ("sm_90", NVIDIA, torch.float16),
        ("sm_90", NVIDIA, torch.float32),
        ("gfx942", AMD, torch.float16),
    ],
)
def test_the_heads_kernels_are_compiled_a_handful_of_times(monkeypatch, architecture, target, dtype):
    """Twelve numbers of tokens, five temperatures and one for each token; the vocabulary's last tile is ragged."""
    launches = Launches(monkeypatch, target)
    monkeypatch.setattr(triton_backend, "device_architecture", lambda device: architecture)
    monkeypatch.setattr(triton_forward_gradients, "MIN_HIDDEN", 0)
    cases = [(tokens, 1.0) for tokens in TOKENS] + [(33, temperature) for temperature in TEMPERATURES]
    for tokens, temperature in [*cases, (33, torch.rand(33) + 0.5)]:
        for loss in head_losses(dtype, tokens, temperature):
            loss.backward()
    # forward: with entropy, without, keeping logits; backward: with entropy's slope or not, full tiles or the last
    assert launches.counted() == {"stats_kernel": 3, "merge_kernel": 1, "dlogits_kernel": 4, "kept_dlogits_kernel": 2}
    assert launches.count > 300


LETTERS = {"tt.divisibility": "D", "tt.pointer_range": "S"}


def inspected(launch, nvidia):
    """The key of what `inspect` compiles."""
    types, constants, hints = specialization(launch, nvidia)
    arguments = [
        (
            kind,
            constants[(place,)]
            if kind == "constexpr"
            else "".join(LETTERS[name] for name, _ in hints.get((place,), ())),
        )
        for place, kind in enumerate(types.values())
    ]
    return key_of(arguments, launch.resources)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("architecture", "target"), [("sm_90", NVIDIA), ("gfx942", AMD)])
def test_inspect_compiles_what_the_launcher_would(monkeypatch, architecture, target, dtype):
    """Plain and with every option, by pointers and by descriptors: types, constants, hints and resources."""
    launches = Launches(monkeypatch, target)
    monkeypatch.setattr(triton_backend, "device_architecture", lambda device: architecture)
    monkeypatch.setattr(triton_backend, "_device_size", lambda device: (132, 50 * 10**6))
    monkeypatch.setattr(triton_forward_gradients, "MIN_HIDDEN", 0)
    tokens, vocabulary, rank = 256, 2000, inspected_launches.RANK
    hidden = torch.randn(tokens, H).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, H).to(dtype)
    target = torch.randint(0, vocabulary, (tokens,))
    linear_logprob(hidden, weight, target, backend="triton").sum().backward()
    lora = (torch.randn(rank, H).to(dtype), torch.randn(vocabulary, rank).to(dtype), 1.0)
    options = {"bias": torch.zeros(vocabulary, dtype=dtype), "softcap": 30.0, "lora": lora, "backend": "triton"}
    linear_logprob_entropy(hidden, weight, target, **options).entropy.sum().backward()
    rows = {"advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, tokens]), "objective": "reinforce"}
    linear_policy_loss(hidden, weight, target, None, **rows, **options)
    rewards = torch.arange(inspected_launches.COMPLETIONS) % 2
    scores = torch.zeros(inspected_launches.COMPLETIONS)
    group_advantage(rewards, inspected_launches.GROUP, backend="triton")
    pass_at_k_advantage(rewards, inspected_launches.GROUP, 4, backend="triton")
    for more in ({}, {"max_pairs_per_group": 20}):
        preference_loss(scores, rewards, inspected_launches.GROUP, **more, backend="triton")

    known = defaultdict(set)
    for launch in (
        *inspected_launches.head_launches(architecture, dtype, H, vocabulary),
        *inspected_launches.group_launches(),
    ):
        known[launch.kernel.kernel_name].add(inspected(launch, architecture == "sm_90"))
    assert launches.keys.keys() == known.keys()
    for name, keys in launches.keys.items():
        assert keys <= known[name], name


def test_the_groups_kernels_are_compiled_a_handful_of_times(monkeypatch):
    """Twelve batches of groups of 8, five factors of the logits; the number of rows is a multiple of 16 or is not."""
    launches = Launches(monkeypatch, NVIDIA)
    for groups in range(1, 13):
        for beta in (0.1, 0.2, 0.3, 0.5, 1.0):
            rewards = torch.arange(8.0 * groups)
            group_advantage(rewards, 8, backend="triton")
            preference_loss(torch.zeros_like(rewards), rewards, 8, beta_dpo=beta, backend="triton")
    assert launches.counted() == {"_group_advantage_kernel": 1, "_pair_row_sums_kernel": 2}
