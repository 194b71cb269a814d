"""The pair term: known numbers, the pair rule, group layouts, its gradient and memory, both backends."""

import importlib
import math
import sys
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amir_kernels import (
    pair_logits,
    preference_loss,
    preference_weights,
    reference,
    sequence_logprob,
)

NAN = math.nan
SCORES = [-0.40, -0.55, -0.31, -0.47, -0.62, -0.50, -0.38, -0.71]
REWARDS = [2.7, 0.7, 0.0, 2.7, 2.2, 0.5, 0.7, 0.0]
# margin: (pairs, J_pref). At 1.5 and 2.0 some gaps equal the margin, 2.2 - 0.7 and 2.7 - 0.7, but for rounding.
KNOWN = {0.0: (25, -0.691143524), 1.5: (13, -0.691668050), 2.0: (8, -0.690711219), 2.5: (4, -0.685881403)}
KNOWN_G = [0.023732059, 0.000115982, -0.024423926, 0.023900017, 0.012407921, -0.011975998, -0.000291931, -0.023464125]
BACKENDS = ("torch", "triton")


def run(backend, function, *arguments, **keywords):
    """One of our functions on a backend, or the reference's of the same name."""
    if backend == "reference":
        return getattr(reference, function.__name__)(*arguments, **keywords)
    return function(*arguments, backend=backend, **keywords)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (b, t)
        for b, t in product(("reference", *BACKENDS), (torch.float32, torch.float64))
        if b != "triton" or t.itemsize == 4
    ],
)
def test_known_numbers(backend, dtype):
    scores, rewards = torch.tensor(SCORES, dtype=dtype), torch.tensor(REWARDS, dtype=dtype)
    for margin, (pairs, j_pref) in KNOWN.items():
        got = run(backend, preference_loss, scores, rewards, 8, reward_margin=margin)
        assert got.pairs == pairs
        assert abs(got.loss.item() + j_pref) < 1e-6
        assert got.loss.dtype == dtype
    weights = run(backend, preference_weights, scores, rewards, 8)
    assert (weights + torch.tensor(KNOWN_G, dtype=dtype)).abs().max() < 1e-8
    assert abs(weights.sum()) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_difference_equal_to_the_margin_is_no_pair(dtype):
    # a right and a wrong answer with the same shaping rewards, summed in the dtype, in two orders, noise and all
    for parts in ([0.1, 0.5, 0.2], [0.2, 0.5, 0.1], [0.025] * 3 + [0.5], [1e3, 0.1, 0.7]):
        shaping = torch.tensor(parts, dtype=dtype)
        rewards = torch.stack([shaping.sum() + 2.0, shaping.flip(0).cumsum(0)[-1]])
        for backend in ("reference", *BACKENDS) if dtype == torch.float32 else ("reference", "torch"):
            scores = torch.zeros(2, dtype=dtype)
            assert run(backend, preference_loss, scores, rewards, 2, reward_margin=2.0).pairs == 0
            assert run(backend, preference_loss, scores, rewards, 2, reward_margin=1.99).pairs == 1


def test_low_precision_rewards_are_compared_as_given():
    for dtype in (torch.bfloat16, torch.float16):
        rewards = torch.tensor([2.5, 0.5, 0.484375], dtype=dtype)  # exact in both
        assert preference_loss(torch.zeros(3), rewards, 3, reward_margin=2.0).pairs == 1


def layouts():
    """Scores, rewards with ties, groups: one, equal, single rows, shuffled ids of uneven sizes, missing rewards."""
    generator = torch.Generator().manual_seed(2)

    def case(rows, group):
        scores = torch.randn(rows, generator=generator)
        return scores, torch.randint(0, 5, (rows,), generator=generator).float() / 2, group

    sizes = torch.tensor([1, 2, 9, 3, 1, 40])  # 40 spans two column blocks of the kernel
    uneven = torch.repeat_interleave(torch.tensor([7, -3, 100, 0, 5, 2]), sizes)
    shuffled = uneven[torch.randperm(56, generator=generator)]
    missing = case(56, shuffled)
    missing[1][::5] = NAN
    missing[1][3] = math.inf
    return {
        "one group": case(8, 8),
        "equal groups": case(36, 6),  # the second row block starts inside a group
        "single rows": case(3, 1),
        "uneven shuffled": case(56, shuffled),
        "missing rewards": missing,
        "equal rewards": (torch.randn(6), torch.ones(6), 3),
    }


OPTIONS = [
    {},
    {"beta_dpo": 3.0, "reward_margin": 0.5},
    {"pair_mining": "topk"},
    {"pair_mining": "topk", "reward_margin": 0.5, "reduction": "group_mean"},
    {"reduction": "group_mean"},
    {"reduction": "sum"},
    {"num_pairs": 77},
    {"num_pairs": torch.tensor(77.0)},
    {"reduction": "group_mean", "num_groups": 9},
    {"max_pairs_per_group": 3},
    {"max_pairs_per_group": 1, "reduction": "group_mean"},
    {"max_pairs_per_group": 2, "pair_mining": "topk"},
]


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_reference(layout, backend):
    scores, rewards, group = layouts()[layout]
    for options in OPTIONS:
        if backend == "triton" and "max_pairs_per_group" in options and len(scores) > 8:
            continue  # bisection takes minutes in the interpreter; the next test has small groups of every kind
        expected = reference.preference_loss(scores.double(), rewards, group, **options)
        got = preference_loss(scores, rewards, group, backend=backend, **options)
        assert got.pairs == expected.pairs
        for name in ("loss", "accuracy", "mean_logit"):
            wanted = getattr(expected, name).item()
            assert abs(getattr(got, name).item() - wanted) <= 2e-6 * max(1, abs(wanted)), (name, options)
        weights = preference_weights(scores, rewards, group, backend=backend, **options)
        exact = reference.preference_weights(scores.double(), rewards, group, **options)
        assert rejects(weights, exact) is None, options


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [4, torch.arange(8) // 4], ids=["size", "ids"])
def test_any_strides(backend, group):
    table = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    for scores, rewards in ((table[:, 1], table[:, 2]), (table[0, :1].expand(8), table[:, 3])):
        exact = reference.preference_weights(scores.double(), rewards, group, beta_dpo=2.0)
        assert rejects(preference_weights(scores, rewards, group, beta_dpo=2.0, backend=backend), exact) is None
        leaf = scores.clone().requires_grad_()
        preference_loss(leaf.expand(2, 8).T[:, 1], rewards, group, beta_dpo=2.0, backend=backend).loss.backward()
        assert rejects(leaf.grad, exact) is None


def test_triton_cap_equals_reference():
    # shuffled groups of 1, 2, 4 and 20 rows, of which the last spans two column blocks; ties at every gap
    ids = torch.repeat_interleave(torch.tensor([3, 1, 0, 9]), torch.tensor([1, 2, 4, 20]))[torch.randperm(27)]
    scores, rewards = torch.randn(27), torch.randint(0, 4, (27,)) / 2
    rewards[ids == 0] = torch.tensor([1.0, NAN, 1.0, 0.0])
    for options in (
        {"max_pairs_per_group": 2},
        {"max_pairs_per_group": 40, "reward_margin": 0.5},
        {"max_pairs_per_group": 7, "pair_mining": "topk", "reduction": "group_mean"},
    ):
        exact = reference.preference_weights(scores.double(), rewards, ids, **options)
        assert rejects(preference_weights(scores, rewards, ids, backend="triton", **options), exact) is None, options


def rejects(weights, exact):
    """Why `weights` are not the gradient: a row is off by more than rounding of the largest, or has noise for 0."""
    largest = exact.abs().max()
    if ((weights - exact).abs() > 2e-6 * largest).any():
        return "a row differs"
    if (weights[exact == 0] != 0).any():
        return "a row without pairs has a weight"
    return None


def test_mutant_gradients_are_rejected():
    scores, rewards, group = layouts()["uneven shuffled"]
    exact = reference.preference_weights(scores.double(), rewards, group)
    chosen, rejected, logit = reference.pair_logits(scores.double(), rewards, group)
    slope = 0.2 * torch.sigmoid(-logit) / len(logit)
    zeros = torch.zeros_like(exact)
    mutants = {
        "zero": zeros,
        "sign": -exact,
        "beta forgotten": exact / 0.2,
        "divisor forgotten": exact * len(logit),
        "only the chosen": zeros.index_add(0, chosen, -slope),
        "only the rejected": zeros.index_add(0, rejected, slope),
        "sigmoid(z) for sigmoid(-z)": zeros.index_add(0, chosen, slope - 0.2 / len(logit)).index_add(
            0, rejected, 0.2 / len(logit) - slope
        ),
        "across groups": reference.preference_weights(scores.double(), rewards, len(scores)),
        "group mean": reference.preference_weights(scores.double(), rewards, group, reduction="group_mean"),
        "one pair lost": exact.index_add(0, chosen[:1], slope[:1]).index_add(0, rejected[:1], -slope[:1]),
        "ties paired": reference.preference_weights(scores.double(), rewards + 1e-3 * torch.rand(len(scores)), group),
    }
    assert rejects(exact.float(), exact) is None
    for name, mutant in mutants.items():
        assert rejects(mutant.float(), exact) is not None, name


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options):
    scores, rewards, group = layouts()["equal groups"]
    scores = scores.double().requires_grad_()
    for function in (preference_loss, reference.preference_loss):
        assert torch.autograd.gradcheck(lambda s, f=function: f(s, rewards, group, **options).loss, scores)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_gives_the_weights(backend):
    scores, rewards, group = layouts()["uneven shuffled"]
    leaf = scores.clone().requires_grad_()
    weights = preference_weights(leaf, rewards, group, backend=backend)
    assert not weights.requires_grad
    (gradient,) = torch.autograd.grad(-3 * preference_loss(leaf, rewards, group, backend=backend).loss, leaf)
    assert torch.equal(gradient, -3 * weights)


def test_gradient_comes_back_in_the_scores_dtype():
    scores = torch.tensor(SCORES, dtype=torch.bfloat16, requires_grad=True)
    got = preference_loss(scores, torch.tensor(REWARDS), 8)
    got.loss.backward()
    assert got.loss.dtype == torch.float32
    assert scores.grad.dtype == torch.bfloat16
    assert (scores.grad.float() + torch.tensor(KNOWN_G)).abs().max() < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0, 1.0], [NAN] * 4, [1.0, NAN, NAN, NAN]])
def test_no_pair(backend, rewards):
    for reduction in ("mean", "group_mean", "sum"):
        scores = torch.randn(4, requires_grad=True)
        got = preference_loss(scores, torch.tensor(rewards), 4, reduction=reduction, backend=backend)
        assert got[:3] == (0, 0, 0)
        assert got.mean_logit == 0
        got.loss.backward()
        assert (scores.grad == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [4, torch.zeros(0, dtype=torch.int64)], ids=["size", "ids"])
@pytest.mark.parametrize("options", [{}, {"max_pairs_per_group": 3}, {"pair_mining": "topk"}], ids=str)
def test_no_rows(backend, group, options):
    for reduction in ("mean", "group_mean", "sum"):
        scores, rewards = torch.zeros(0, requires_grad=True), torch.zeros(0)
        got = preference_loss(scores, rewards, group, reduction=reduction, backend=backend, **options)
        got.loss.backward()
        assert got == (0, 0, 0, 0)
        assert scores.grad.shape == (0,)
        weights = preference_weights(scores, rewards, group, reduction=reduction, backend=backend, **options)
        assert weights.shape == (0,)
        assert not weights.requires_grad


def test_sequences_without_rows_and_without_tokens():
    """A sequence without a token has the score 0; no row, no score."""
    for normalize in ("mean", "sum"):
        for rows in (0, 2):
            logprobs = torch.zeros(rows, 0, requires_grad=True)
            score = sequence_logprob(logprobs, normalize=normalize)
            score.sum().backward()
            assert torch.equal(score, torch.zeros(rows))
            assert logprobs.grad.shape == (rows, 0)
            packed = sequence_logprob(torch.zeros(0), cu_seqlens=torch.zeros(rows + 1).long(), normalize=normalize)
            assert torch.equal(packed, torch.zeros(rows))


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # numpy's, under the interpreter
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_do_not_count_never_leak(backend):
    scores, rewards, group = layouts()["equal groups"]
    valid = torch.rand(36) > 0.3
    rewards[5] = NAN
    clean = preference_loss(scores, rewards, group, valid=valid, backend=backend)
    for poison in (NAN, math.inf, -math.inf):
        dirty = torch.where(valid & ~rewards.isnan(), scores, poison).requires_grad_()
        got = preference_loss(dirty, torch.where(valid, rewards, poison), group, valid=valid, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(got, clean, strict=True))
        got.loss.backward()
        assert dirty.grad.isfinite().all()
        assert (dirty.grad[~valid] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_saturated_logits_stay_finite(backend):
    # won and lost by far: loss |z| and 0, weights beta and 0, no overflow of exp
    for gap, loss, weight in ((1e4, 0.0, 0.0), (-1e4, 2e3, -0.2), (100.0, math.exp(-20), -0.2 * math.exp(-20))):
        scores = torch.tensor([gap, 0.0])
        got = preference_loss(scores, torch.tensor([1.0, 0.0]), 2, backend=backend)
        assert abs(got.loss.item() - loss) <= 1e-5 * loss
        weights = preference_weights(scores, torch.tensor([1.0, 0.0]), 2, backend=backend)
        assert (weights - torch.tensor([weight, -weight])).abs().max() <= 1e-5 * abs(weight)


def test_pairs_are_the_ones_meant():
    rewards = torch.tensor([1.0, 3.0, 0.0, 3.0, 1.0, 9.0])
    ids = torch.tensor([4, 4, 4, 4, 4, 1])
    scores = torch.randn(6, requires_grad=True)

    def pairs(**options):
        for function in (pair_logits, reference.pair_logits):
            chosen, rejected, logit = function(scores, rewards, ids, **options)
            assert torch.equal(logit, 0.2 * (scores[chosen] - scores[rejected]))
            assert logit.requires_grad
            yield list(zip(chosen.tolist(), rejected.tolist(), strict=True))

    every = [(0, 2), (1, 0), (1, 2), (1, 4), (3, 0), (3, 2), (3, 4), (4, 2)]
    expected = {
        (): every,
        (("reward_margin", 1.0),): [(1, 0), (1, 2), (1, 4), (3, 0), (3, 2), (3, 4)],
        (("pair_mining", "topk"),): [(1, 0), (1, 2), (1, 4)],  # rows 1 and 3 tie for best
        (("max_pairs_per_group", 1),): [(1, 2)],
        (("max_pairs_per_group", 3),): [(1, 0), (1, 2), (3, 2)],  # gaps 3, 3, then the first of four 2s
        (("max_pairs_per_group", 99),): every,
        (("pair_mining", "topk"), ("max_pairs_per_group", 2)): [(1, 0), (1, 2)],
    }
    for options, wanted in expected.items():
        assert list(pairs(**dict(options))) == [wanted, wanted], options


def test_cap_over_many_tiles(monkeypatch):
    module = sys.modules["amir_kernels.preference_loss"]
    rewards, scores = torch.randint(0, 6, (60,)).float(), torch.randn(60)
    ids = torch.randint(0, 2, (60,))
    whole = [preference_weights(scores, rewards, ids, max_pairs_per_group=cap) for cap in (1, 40, 200)]
    monkeypatch.setattr(module, "TILE_ELEMENTS", 64)
    for cap, expected in zip((1, 40, 200), whole, strict=True):
        got = preference_weights(scores, rewards, ids, max_pairs_per_group=cap)
        assert (got - expected).abs().max() < 1e-7
        exact = reference.preference_weights(scores.double(), rewards, ids, max_pairs_per_group=cap)
        assert rejects(got, exact) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_every_time_and_for_ids_and_sizes(backend):
    scores, rewards, _ = layouts()["equal groups"]
    first = preference_weights(scores, rewards, 6, backend=backend)
    assert torch.equal(first, preference_weights(scores, rewards, 6, backend=backend))
    assert torch.equal(first, preference_weights(scores, rewards, torch.arange(36) // 6, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_group_of_hundreds(backend):
    rows = 500 if backend == "torch" else 130
    scores, rewards = torch.randn(rows), torch.randint(0, 7, (rows,)).float()
    win = rewards[:, None] > rewards[None]
    z = 0.2 * (scores[:, None] - scores[None]).double()
    got = preference_loss(scores, rewards, rows, backend=backend)
    assert got.pairs == win.sum()
    assert abs(got.loss.item() + torch.nn.functional.logsigmoid(z)[win].mean().item()) < 1e-6
    slope = torch.where(win, 0.2 * torch.sigmoid(-z), 0) / win.sum()
    assert rejects(preference_weights(scores, rewards, rows, backend=backend), slope.sum(0) - slope.sum(1)) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_group_of_4096(backend, monkeypatch):
    """The kernel in large blocks, so that the interpreter is done in seconds."""
    kernels = importlib.import_module("amir_kernels._group_kernels")
    monkeypatch.setattr(kernels, "ROW_BLOCK", 1024)
    monkeypatch.setattr(kernels, "COLUMN_BLOCK", 1024)
    rows = 4096
    scores, rewards = torch.randn(rows), torch.randint(0, 2, (rows,)).float()
    order = torch.randperm(rows)
    ids = torch.zeros(rows, dtype=torch.int64)
    win, lose = (scores[rewards == value].double() for value in (1, 0))
    z = 0.2 * (win[:, None] - lose)
    got = preference_loss(scores[order], rewards[order], ids, backend=backend)
    assert got.pairs == z.numel()
    assert abs(got.loss.item() + torch.nn.functional.logsigmoid(z).mean().item()) < 1e-6
    slope = 0.2 * torch.sigmoid(-z) / z.numel()
    exact = torch.zeros(rows, dtype=torch.float64)
    exact[rewards == 1], exact[rewards == 0] = -slope.sum(1), slope.sum(0)
    weights = preference_weights(scores[order], rewards[order], ids, backend=backend)
    assert rejects(weights, exact[order]) is None


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_no_pair_tensor_is_formed_or_kept(monkeypatch):
    module = sys.modules["amir_kernels.preference_loss"]
    monkeypatch.setattr(module, "TILE_ELEMENTS", 1024)
    rows = 200
    rewards = torch.randn(rows, dtype=torch.float64)
    where = module.segments(rows, rows, rewards.device)
    with Largest() as largest:
        module._row_sums_torch(torch.randn(rows), rewards, where, rows, module.PairRule())
    assert largest.elements <= 1024 + rows

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        preference_loss(torch.randn(rows, requires_grad=True), rewards, rows)
    assert sum(kept) <= 2 * rows


class Launches:
    """A kernel that only notes that it was launched."""

    def __init__(self, name, launched):
        self.name, self.launched = name, launched

    def __getitem__(self, grid):
        return lambda *_, **__: self.launched.append(self.name)


class NoValueRead(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*arguments, **(keywords or {}))


def test_triton_never_waits_for_the_device(monkeypatch):
    # the launches are left out: the interpreter has to read what it interprets
    kernels = importlib.import_module("amir_kernels._group_kernels")
    launched = []
    for name in ("_pair_cap_kernel", "_pair_row_sums_kernel"):
        monkeypatch.setattr(kernels, name, Launches(name, launched))
    ids, scores, rewards = torch.randint(0, 4, (27,)), torch.randn(27), torch.randn(27).double()
    body = sys.modules["amir_kernels.preference_loss"]._preference._init_fn
    for cap, reduction in ((0, "mean"), (2, "group_mean"), (2, "sum")):
        with NoValueRead():
            body(scores, rewards, ids, 0, 0.2, 0.0, True, cap, reduction, None, True)
    assert launched == ["_pair_row_sums_kernel", *["_pair_cap_kernel", "_pair_row_sums_kernel"] * 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_is_refused(backend):
    scores = torch.randn(4, requires_grad=True)
    loss = preference_loss(scores, torch.arange(4.0), 4, backend=backend).loss
    # beside a term that can be differentiated twice, so that a lost second derivative would go unnoticed
    (gradient,) = torch.autograd.grad(loss + scores.pow(3).sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match=r"preference_loss cannot be differentiated twice.*amir_kernels.reference"):
        gradient.sum().backward()


def test_registered_op():
    scores, rewards, ids = layouts()["uneven shuffled"]
    for group, size in ((ids, 0), (None, 8)):
        arguments = (scores, rewards.double(), group, size, 0.2, 0.0, False, 0, "mean", None, False)
        torch.library.opcheck(torch.ops.amir_kernels.preference.default, arguments)


@pytest.mark.parametrize("ids", [False, True])
def test_compiles_as_one_graph(ids):
    scores, rewards, group = layouts()["uneven shuffled" if ids else "equal groups"]
    scores.requires_grad_()

    def loss(s):
        return preference_loss(s, rewards, group, reward_margin=0.5)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(scores), loss(scores), strict=True):
        assert torch.equal(got, expected)
    gradients = [torch.autograd.grad(f(scores).loss, scores)[0] for f in (compiled, loss)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.ones(4), torch.ones(3), 1), {}, "rewards must have shape \\[4\\] .*, got \\[3\\]"),
        (
            (torch.ones(2, 2), torch.ones(2, 2), 1),
            {},
            "scores must be one per completion \\[B\\], got \\[2, 2\\]; sequence_logprob",
        ),
        (
            (torch.ones(4), torch.ones(4), 3),
            {},
            "group=3 must be at least 1 and divide the 4 rows; unequal groups need ids",
        ),
        (
            (torch.ones(4), torch.ones(4), torch.zeros(4)),
            {},
            "group must be an int64 tensor, got torch.float32; convert",
        ),
        (
            (torch.ones(4, dtype=torch.int64), torch.ones(4), 2),
            {},
            "scores must be a floating-point tensor, got torch.int64; convert",
        ),
        ((torch.ones(4), torch.ones(4), 2), {"beta_dpo": 0.0}, "beta_dpo must be a positive finite number, got 0.0"),
        ((torch.ones(4), torch.ones(4), 2), {"beta_dpo": NAN}, "beta_dpo must be a finite number, got nan"),
        (
            (torch.ones(4), torch.ones(4), 2),
            {"reward_margin": -0.5},
            "reward_margin must be a finite number of at least 0, got -0.5",
        ),
        ((torch.ones(4), torch.ones(4), 2), {"pair_mining": "hard"}, "pair_mining must be one of .*, got 'hard'"),
        (
            (torch.ones(4), torch.ones(4), 2),
            {"max_pairs_per_group": 0},
            "max_pairs_per_group must be at least 1, got 0",
        ),
        ((torch.ones(4), torch.ones(4), 2), {"reduction": "pairs"}, "reduction must be one of .*, got 'pairs'"),
        (
            (torch.ones(4), torch.ones(4), 2),
            {"num_pairs": 3, "reduction": "sum"},
            "num_pairs is the divisor .*reduction='sum'; leave it out",
        ),
        (
            (torch.ones(4), torch.ones(4), 2),
            {"num_groups": 3},
            "num_groups is the divisor .*reduction='mean'; leave it out",
        ),
        (
            (torch.ones(4), torch.ones(4), 2),
            {"num_pairs": -1},
            "num_pairs must be a finite number of at least 0, got -1",
        ),
        (
            (torch.ones(4), torch.ones(4), 2),
            {"num_pairs": torch.ones(2)},
            "one number, got a tensor of shape \\[2\\]; pass its sum",
        ),
        (
            (torch.ones(4), torch.ones(4), 2),
            {"valid": torch.ones(4)},
            "valid must be bool, got torch.float32; pass valid != 0",
        ),
        (
            (torch.ones(4), torch.ones(4), 2),
            {"valid": torch.ones(3, dtype=torch.bool)},
            "valid must have shape \\[4\\] .*, got \\[3\\]",
        ),
        ((torch.ones(4).double(), torch.ones(4), 2), {"backend": "triton"}, "float64 is served .* pass backend="),
    ],
)
def test_refusals(arguments, options, message):
    for function in (preference_loss, preference_weights):
        with pytest.raises((ValueError, TypeError), match=message):
            function(*arguments, **options)


# ---- sequence log-probs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [sequence_logprob, reference.sequence_logprob])
def test_sequence_logprob_by_hand(function):
    logprobs = torch.tensor([[-1.0, -2.0, NAN, -4.0], [-math.inf, NAN, NAN, math.inf], [-0.5, -0.25, -0.125, -1.0]])
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    for divisor, normalize in (([3, 1, 1], "mean"), ([1, 1, 1], "sum")):
        leaf = logprobs.clone().requires_grad_()
        got = function(leaf, mask, normalize=normalize)
        assert torch.allclose(got, torch.tensor([-7.0, 0.0, -0.5]) / torch.tensor(divisor), atol=1e-7)
        got.sum().backward()
        assert torch.equal(leaf.grad, mask / torch.tensor(divisor)[:, None])


@pytest.mark.parametrize("normalize", ["mean", "sum"])
def test_packed_equals_padded(normalize):
    mask = torch.rand(5, 7) > 0.3
    mask[2] = False
    lengths = torch.tensor([7, 2, 4, 0, 5])
    padded = torch.where(torch.arange(7) < lengths[:, None], torch.randn(5, 7), NAN)
    inside = torch.arange(7) < lengths[:, None]
    expected = sequence_logprob(padded, mask & inside, normalize=normalize)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    packed, packed_mask = padded[inside], mask[inside]
    for cu_seqlens in (bounds, bounds.int()):
        got = sequence_logprob(packed, packed_mask, cu_seqlens=cu_seqlens, normalize=normalize)
        assert (got - expected).abs().max() < 1e-6
    # a buffer longer than its sequences: what lies past the last bound does not count
    spare = torch.cat([packed, torch.tensor([NAN, math.inf])]).requires_grad_()
    spare_mask = torch.cat([packed_mask, torch.ones(2, dtype=torch.bool)])
    got = sequence_logprob(spare, spare_mask, cu_seqlens=bounds, normalize=normalize)
    assert (got - expected).abs().max() < 1e-6
    got.sum().backward()
    assert (spare.grad[-2:] == 0).all()
    assert spare.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.ones(6),), {}, "logprobs must be \\[B, L\\], got \\[6\\]; packed tokens \\[T\\] need cu_seqlens"),
        (
            (torch.ones(2, 3),),
            {"cu_seqlens": torch.tensor([0, 3, 6])},
            "packed \\[T\\] with cu_seqlens, got \\[2, 3\\]; padded",
        ),
        (
            (torch.ones(6),),
            {"cu_seqlens": torch.tensor([0.0, 6.0])},
            "cu_seqlens must be int32 or int64 \\[B \\+ 1\\], got torch.float32 \\[2\\]; it holds",
        ),
        (
            (torch.ones(2, 3), torch.ones(2, 2, dtype=torch.bool)),
            {},
            "mask must have shape \\[2, 3\\] .*, got \\[2, 2\\]",
        ),
        ((torch.ones(2, 3), torch.full((2, 3), 2.0)), {}, "must hold 0 and 1 only .*, got 2"),
        ((torch.ones(2, 3),), {"normalize": "length"}, "normalize must be one of 'mean', 'sum', got 'length'"),
    ],
)
def test_sequence_logprob_refusals(arguments, options, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        sequence_logprob(*arguments, **options)
