"""Group advantages: the peers' numbers, group layouts, degenerate groups, both backends."""

import math
import re
from itertools import product
from math import comb
from pathlib import Path

import pytest
import torch

from amir_kernels import group_advantage, pass_at_k_advantage, reference
from amir_kernels.group_advantage import weighted_sum

EIGHT = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0])
NAN = math.nan

# (settings, advantage of a correct row, of a wrong row) for EIGHT; three of eight are correct.
PEERS = {
    "trl": ({}, 1.207381441, -0.724428864),
    "verl": ({"eps": 1e-6}, 1.207612396, -0.724567437),
    "population": ({"eps": 0.0, "unbiased": False}, 1.290994449, -0.774596669),
    "2503.06639": ({"scale": "bernoulli", "eps": 1e-5}, 1.290966908, -0.774580145),
    "rloo": ({"baseline": "leave_one_out", "scale": "none"}, 0.714285714, -0.428571429),
    "dr_grpo": ({"scale": "none"}, 0.625, -0.375),
}


@pytest.mark.parametrize("function", [group_advantage, reference.group_advantage])
@pytest.mark.parametrize("peer", PEERS)
def test_peers_numbers(function, peer):
    settings, correct, wrong = PEERS[peer]
    expected = torch.where(EIGHT == 1, correct, wrong)
    assert (function(EIGHT, 8, **settings) - expected).abs().max() < 1e-6
    assert (function(EIGHT.double(), 8, **settings) - expected).abs().max() < 1e-6


DOCUMENT = Path(__file__).parents[1] / "docs" / "objectives.md"


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the sources are not here: a wheel is tested")
def test_the_settings_of_the_documents_give_those_numbers():
    """Each line of the table that names a peer or a paper, for EIGHT (in halves for two reward functions)."""
    section = DOCUMENT.read_text().partition("## Settings that equal")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[2:]
    batch = (EIGHT.double() - 0.375) / (EIGHT.double().std() + 1e-4)
    expected = {
        "the defaults": PEERS["trl"],
        '`scale="batch"`': ({}, batch[0], batch[1]),
        '`scale="none"`': PEERS["dr_grpo"],
        "`eps=1e-6`": PEERS["verl"],
        "`eps=0.0, unbiased=False`": PEERS["population"],
        '`scale="bernoulli", eps=1e-5`': PEERS["2503.06639"],
        '`baseline="leave_one_out", scale="none"`': PEERS["rloo"],
        "`pass_at_k_advantage(..., k=1)`": PEERS["rloo"],
    }
    tested_apart = {'`combine="normalize_then_sum"`', "`pass_at_k_advantage(..., k)`"}
    assert {settings for settings, _ in rows} == expected.keys() | tested_apart
    for settings, (_, correct, wrong) in expected.items():
        call = settings.strip("`") if "pass_at_k" in settings else f"group_advantage(..., {settings.strip('`')})"
        call = call.replace("the defaults", "").replace("...", "EIGHT, 8")
        got = eval(call, globals())
        assert (got - torch.where(EIGHT == 1, correct, wrong)).abs().max() < 1e-6, settings


def torch_backend(*arguments, **options):
    return group_advantage(*arguments, **options, backend="torch")


def triton_backend(*arguments, **options):
    return group_advantage(*arguments, **options, backend="triton")


FUNCTIONS = [torch_backend, triton_backend, reference.group_advantage]
SETTINGS = [
    {"baseline": baseline, "scale": scale, "unbiased": unbiased}
    for baseline, scale, unbiased in product(
        ("mean", "leave_one_out", "none"), ("std", "batch", "bernoulli", "none"), (True, False)
    )
]


def layouts():
    """Rewards in [0, 1] with ties in groups: equal, of single rows, shuffled ids of uneven sizes, with NaN rows."""
    generator = torch.Generator().manual_seed(1)

    def rewards(rows):
        return torch.randint(0, 5, (rows,), generator=generator).float() / 4

    uneven = torch.repeat_interleave(torch.tensor([7, -3, 100, 0, 5]), torch.tensor([1, 2, 9, 3, 1]))
    shuffle = torch.randperm(16, generator=generator)
    with_nan = rewards(16)
    with_nan[[0, 3, 4]] = NAN
    return {
        "one group": (rewards(7), 7),
        "equal groups": (rewards(12), 4),
        "single rows": (rewards(3), 1),
        "shuffled ids": (rewards(16), uneven[shuffle]),
        "shuffled ids with NaN": (with_nan, uneven[shuffle]),
        "group of NaN only": (torch.tensor([NAN, NAN, 1.0, 0.0]), 2),
    }


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_equals_reference(layout, backend):
    rewards, group = layouts()[layout]
    for settings in SETTINGS:
        expected = reference.group_advantage(rewards, group, **settings)
        got = group_advantage(rewards, group, backend=backend, **settings)
        assert got.dtype == torch.float32
        # a scale of exactly eps (one row, equal rewards without a baseline) makes advantages of 1e4: relative there
        assert ((got - expected).abs() <= 1e-6 * expected.abs().clamp(min=1)).all(), settings


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("combine", ["sum", "normalize_then_sum"])
@pytest.mark.parametrize("group", [4, torch.arange(8) // 4], ids=["size", "ids"])
def test_any_strides(function, combine, group):
    rewards = torch.rand(8, 3, generator=torch.Generator().manual_seed(3))
    expected = reference.group_advantage(rewards.double(), group, combine=combine)
    for layout in (rewards, rewards.T.contiguous().T, rewards.repeat(2, 2)[:8, 1:4].roll(1, dims=1)):
        assert (function(layout, group, combine=combine) - expected).abs().max() < 1e-6
    column = reference.group_advantage(rewards[:, 1].double(), group)
    assert (function(rewards[:, 1], group) - column).abs().max() < 1e-6
    assert function(rewards[:1, 1].expand(8), group).eq(0).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_group_longer_than_a_block(backend):
    rewards = torch.cat([torch.randn(1500), torch.randn(3)])
    ids = torch.cat([torch.zeros(1500, dtype=torch.int64), torch.ones(3, dtype=torch.int64)])
    order = torch.randperm(1503)
    got = group_advantage(rewards[order], ids[order], backend=backend)
    assert (got - reference.group_advantage(rewards, ids)[order]).abs().max() < 1e-6


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 + 0.5, -3e-20])
def test_equal_rewards_give_exact_zero(backend, value):
    # 0.1 is no float: a mean of eight of them is off by rounding, which over eps would be noise of size 1e-4
    for baseline, scale in product(("mean", "leave_one_out"), ("std", "none", "batch")):
        got = group_advantage(
            torch.tensor([value] * 7 + [1.0, 2.0, 3.0]),
            torch.tensor([0] * 7 + [1] * 3),
            baseline=baseline,
            scale=scale,
            backend=backend,
        )
        assert (got[:7] == 0).all()
        assert (got[[7, 9]] != 0).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("offset", [1e6, -1e6, 2e6])
def test_large_offsets_change_nothing(backend, offset):
    # exact in float32; the difference of squares would lose it altogether. From 2.1e6 on, a gap of 1 is rounding.
    got = group_advantage(EIGHT + offset, 8, backend=backend)
    assert (got - group_advantage(EIGHT, 8)).abs().max() < 1e-6


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nan_row_is_left_out(backend):
    rewards = torch.tensor([1.0, 0, NAN, 1, NAN, 0, 0, 1, 0])
    for settings in SETTINGS:
        got = group_advantage(rewards, 9, backend=backend, **settings)
        without = group_advantage(rewards[~rewards.isnan()], 7, backend="torch", **settings)
        assert (got[rewards.isnan()] == 0).all()
        assert (got[~rewards.isnan()] - without).abs().max() < 1e-6


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_scorable_row_gets_zero(backend):
    assert (group_advantage(torch.tensor([5.0, NAN, NAN, 3.0]), torch.tensor([0, 0, 0, 1]), backend=backend) == 0).all()


def test_zero_variance_groups_beside_a_mixed_one():
    # all right, all wrong, mixed: two of three groups teach nothing and stay exactly 0, unscaled too
    rewards = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 1])
    for scale in ("std", "batch", "bernoulli", "none"):
        got = group_advantage(rewards, 4, scale=scale)
        assert (got[:8] == 0).all()
        assert (got[8:].sign() == torch.tensor([1, -1, -1, 1])).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_order_of_rows_and_names_of_groups_do_not_matter(backend):
    rewards, ids = torch.randn(30), torch.randint(0, 6, (30,))
    names = torch.tensor([40, -2, 7, 3, 11, 9])
    order = torch.randperm(30)
    plain = group_advantage(rewards, ids, backend=backend)
    assert (group_advantage(rewards[order], names[ids[order]], backend=backend) - plain[order]).abs().max() < 1e-6


def test_size_and_ids_agree_bitwise():
    rewards = torch.randn(24)
    ids = torch.arange(24) // 6
    for backend in ("torch", "triton"):
        assert torch.equal(group_advantage(rewards, 6, backend=backend), group_advantage(rewards, ids, backend=backend))


def test_several_reward_functions():
    rewards = torch.tensor(
        [[1.0, 0.2], [0.0, 0.4], [1.0, NAN], [NAN, NAN], [0.0, 0.0], [1.0, 1.0], [0.0, 0.5], [0.5, 0.1]]
    )
    weights = torch.tensor([1.0, 0.5])
    summed = torch.tensor([1.1, 0.2, 1.0, NAN, 0.0, 1.5, 0.25, 0.55])
    got = group_advantage(rewards, 4, weights=weights)
    assert (got - group_advantage(summed, 4)).abs().max() < 1e-6
    assert got[3] == 0
    for combine in ("sum", "normalize_then_sum"):
        expected = reference.group_advantage(rewards, 4, combine=combine, weights=weights)
        assert (group_advantage(rewards, 4, combine=combine, weights=weights) - expected).abs().max() < 1e-6


def test_normalize_then_sum_by_hand():
    # Two groups of two: each function is +-1/sqrt(2) over (1/sqrt(2) + eps) in its group; then the batch's deviation.
    rewards = torch.tensor([[1.0, 10.0], [0.0, 0.0], [1.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    first, second = 0.5 / (math.sqrt(0.5) + 1e-4), 5 / (math.sqrt(50) + 1e-4)
    summed = torch.tensor([first + second, -first - second, first - second, second - first], dtype=torch.float64)
    expected = summed / (summed.std() + 1e-4)
    assert (group_advantage(rewards, 2, combine="normalize_then_sum") - expected).abs().max() < 1e-12


def test_normalize_then_sum_keeps_equal_groups_at_zero():
    rewards = torch.tensor([[0.1, 0.3]] * 4 + [[1.0, 0.0], [0.0, 0.2], [1.0, 0.1], [0.3, 0.2]])
    got = group_advantage(rewards, 4, combine="normalize_then_sum")
    assert (got[:4] == 0).all()
    assert (got[4:] != 0).all()


def test_dtypes_and_no_graph():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        got = group_advantage(EIGHT.to(dtype).requires_grad_(), 8)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert not got.requires_grad
    for dtype in (torch.int64, torch.bool):
        assert torch.equal(group_advantage(EIGHT.to(dtype), 8), group_advantage(EIGHT, 8))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("group", [4, torch.zeros(0, dtype=torch.int64)], ids=["size", "ids"])
def test_no_rows(backend, group):
    for baseline, scale in product(("mean", "leave_one_out", "none"), ("std", "batch", "bernoulli", "none")):
        got = group_advantage(torch.zeros(0), group, baseline=baseline, scale=scale, backend=backend)
        assert (got.shape, got.dtype) == ((0,), torch.float32)
    summed = group_advantage(torch.zeros(0, 2), group, combine="normalize_then_sum", backend=backend)
    assert summed.shape == (0,)
    assert pass_at_k_advantage(torch.zeros(0), group, 2, backend=backend).shape == (0,)
    with pytest.raises(ValueError, match="group=0 must be at least 1"):
        group_advantage(torch.zeros(0), 0, backend=backend)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((torch.ones(6), 4), {}, "group=4 must be at least 1 and divide the 6 rows; unequal groups need ids"),
        ((torch.ones(6), 0), {}, "group=0 must be at least 1"),
        ((torch.ones(6), 2.0), {}, "group must be an int, .* got float"),
        ((torch.ones(6), torch.zeros(5, dtype=torch.int64)), {}, "group must have shape \\[6\\] .*, got \\[5\\]"),
        ((torch.ones(6), torch.zeros(6, dtype=torch.int32)), {}, "got torch.int32; convert it with group.long"),
        ((torch.tensor([1.0, math.inf]), 2), {}, "got \\[inf\\] in row 1; clip them, or set them to NaN"),
        ((torch.tensor([[1.0, 0.0], [0.0, -math.inf]]), 2), {}, "got \\[0.0, -inf\\] in row 1; clip them"),
        ((torch.ones(6, dtype=torch.complex64), 2), {}, "real numbers, got torch.complex64"),
        (([1.0, 0.0], 2), {}, "real numbers, got list; torch.as_tensor makes one"),
        ((torch.ones(2, 2, 2), 2), {}, "\\[B\\] or \\[B, F\\] .*, got \\[2, 2, 2\\]"),
        ((torch.ones(6), 2), {"baseline": "median"}, "baseline must be one of .*, got 'median'"),
        ((torch.ones(6), 2), {"scale": "group"}, "scale must be one of .*, got 'group'"),
        ((torch.ones(6, 0), 2), {}, "F of at least 1, got \\[6, 0\\]"),
        ((torch.ones(6), 2), {"eps": -1e-4}, "eps must be a finite number of at least 0, got -0.0001"),
        ((torch.ones(6), 2), {"unbiased": "no"}, "unbiased must be True or False, got 'no'"),
        ((torch.ones(6), 2), {"weights": [1.0]}, "got weights=\\[1.0\\] and rewards \\[6\\]; leave weights out"),
        ((torch.ones(6, 2), 2), {"weights": [1.0]}, "2 finite numbers, one per reward function, got \\[1.0\\]"),
        (
            (torch.ones(6), 2),
            {"combine": "normalize_then_sum"},
            "several reward functions .*, got rewards \\[6\\]; pass",
        ),
        (
            (torch.ones(6, 2), 2),
            {"combine": "normalize_then_sum", "scale": "none"},
            """scale="std", got .*scale='none'""",
        ),
        ((torch.tensor([2.0, 0.0]), 2), {"scale": "bernoulli"}, "rewards in \\[0, 1\\] .*, got 2; pass scale="),
        ((torch.ones(6), 2), {"backend": "cuda"}, "backend must be one of .*, got 'cuda'"),
        ((torch.ones(6, dtype=torch.float64), 2), {"backend": "triton"}, "float64 is served .* pass backend="),
    ],
)
def test_refusals(arguments, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        group_advantage(*arguments, **settings)


def test_a_weighted_sum_leaves_out_the_functions_without_a_reward():
    rewards = torch.tensor([[1.0, 0.5], [NAN, 0.5], [1.0, NAN], [NAN, NAN]])
    got = weighted_sum(rewards, [2.0, -1.0])
    assert got.dtype == torch.float64
    assert torch.equal(got.nan_to_num(9.0), torch.tensor([1.5, -0.5, 2.0, 9.0], dtype=torch.float64))
    assert torch.equal(weighted_sum(rewards, torch.tensor([2.0, -1.0]))[:3], got[:3])


ADDENDS = [[0.1, 0.2], [0.2, 0.1], [0.3, 0.0], [0.15, 0.15]]
EQUAL_UP_TO_ROUNDING = {
    "sums of float32 rewards": torch.tensor(ADDENDS),
    "sums of float64 rewards": torch.tensor(ADDENDS, dtype=torch.float64),
    "float64": torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], dtype=torch.float64),
    "large": torch.tensor([1e6, 1e6 + 0.4, 1e6, NAN], dtype=torch.float64),
    "larger": torch.tensor([2.2e6, 2.2e6 + 1, 2.2e6, 2.2e6]),
    "negative": torch.tensor([-1e6, -1e6 - 0.4, -1e6, -1e6], dtype=torch.float64),
}


def float32_on_triton(function, rewards):
    """Triton does not serve float64; there the sums of float32 rewards are the case."""
    if function is triton_backend and rewards.dtype == torch.float64:
        pytest.skip("float64 is served by the torch backend only")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rewards", EQUAL_UP_TO_ROUNDING.values(), ids=EQUAL_UP_TO_ROUNDING)
@pytest.mark.parametrize("scale", ["std", "batch", "none"])
def test_rewards_equal_up_to_rounding_say_nothing(function, rewards, scale):
    float32_on_triton(function, rewards)
    for baseline in ("mean", "leave_one_out"):
        for eps in (0.0, 1e-4):
            assert function(rewards, 4, baseline=baseline, scale=scale, eps=eps).eq(0).all()
    if rewards.dim() == 2:
        assert function(rewards * torch.tensor([1.0, 0.0]), 4).ne(0).any()
        noisy = torch.stack([rewards.sum(dim=1), rewards.sum(dim=1)], dim=1)
        assert function(noisy, 4, combine="normalize_then_sum", eps=0.0).eq(0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("scale", ["std", "batch", "none"])
def test_a_deviation_of_0_without_eps_divides_nothing(function, scale):
    for rewards in ([2.7] * 4, [math.nan] * 4, [1.0, math.nan, math.nan, math.nan]):
        assert function(torch.tensor(rewards), 4, scale=scale, eps=0.0).eq(0).all()
    opposed = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # each function speaks, their sum does not
    assert function(opposed, 2, combine="normalize_then_sum", eps=0.0).eq(0).all()
    alike = torch.tensor([1.0, 0.0, 0.3, 0.7])[:, None].expand(4, 3)
    gdpo = {"combine": "normalize_then_sum", "weights": [0.1, 0.2, -0.3]}
    assert function(alike, 4, **gdpo, eps=0.0).eq(0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_small_differences_are_kept(function):
    for rewards, step in (
        ([1.0, 1.001, 1.0, 1.0], 1e-3),
        ([1e6, 1e6 + 1, 1e6, 1e6], 1.0),
        ([0.0, 1e-6, 0.0, 0.0], 1e-6),
    ):
        got = function(torch.tensor(rewards), 4, scale="none")
        expected = step * torch.tensor([-0.25, 0.75, -0.25, -0.25])
        assert (got - expected).abs().max() < 1e-4 * step, rewards


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_a_baseline_the_deviation_of_equal_rewards_is_0(function):
    rewards = torch.tensor(ADDENDS)
    got = function(rewards, 4, baseline="none", eps=0.5)
    assert (got - rewards.sum(dim=1) / 0.5).abs().max() < 1e-7


# ---- pass@k --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [pass_at_k_advantage, reference.pass_at_k_advantage])
def test_pass_at_k_closed_form(function):
    # n = 4, c = 2, k = 2. Pairs with a correct row: always pass. The 3 others hold 1 correct: 1 - C(2,2)/C(3,2) = 2/3.
    # Pairs with a wrong row: pass with 2 of the 3 others, 2/3. The 3 others hold 2 correct: 1.
    got = function(torch.tensor([1.0, 0, 0, 1], dtype=torch.float64), 4, 2)
    assert (got - torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3], dtype=torch.float64)).abs().max() < 1e-12
    # pass@2 itself: its unbiased estimate from all four rows is 1 - C(2,2)/C(4,2) = 5/6, the mean over the rows of
    # what the pairs with each of them give.
    assert abs((1 + 1 + 2 / 3 + 2 / 3) / 4 - (1 - comb(2, 2) / comb(4, 2))) < 1e-12


def test_pass_at_one_is_leave_one_out():
    expected = group_advantage(EIGHT, 8, baseline="leave_one_out", scale="none")
    assert (pass_at_k_advantage(EIGHT, 8, 1) - expected).abs().max() < 1e-7


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_an_unbiased_gradient(k):
    # Bernoulli policy with success probability p: d log pi = 1/p for a success, -1/(1-p) for a failure. The mean of
    # (1/n) sum A_i d log pi_i over all outcomes of n = 5 rows must be d pass@k / dp = k (1-p)^(k-1).
    p, n = 0.3, 5
    outcomes = torch.tensor(list(product((0.0, 1.0), repeat=n)), dtype=torch.float64)
    advantages = pass_at_k_advantage(outcomes.flatten(), n, k).view(-1, n)
    probability = (p**outcomes * (1 - p) ** (1 - outcomes)).prod(dim=1)
    score = outcomes / p - (1 - outcomes) / (1 - p)
    gradient = (probability * (advantages * score).mean(dim=1)).sum()
    assert abs(gradient - k * (1 - p) ** (k - 1)) < 1e-12


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_pass_at_k_equals_enumeration_in_any_layout(backend):
    rewards = torch.tensor([1.0, 0, NAN, 0, 0, 1, 0, 0, 1, 1, 0, 0, NAN, 0, 0, 1])
    ids = torch.tensor([3, 1, 1, 3, 1, 1, 3, 3, 1, 3, 9, 9, 9, 9, 9, 9])
    for k in (1, 2, 3, 4):
        expected = reference.pass_at_k_advantage(rewards.double(), ids, k)
        assert (pass_at_k_advantage(rewards, ids, k, backend=backend) - expected).abs().max() < 1e-6
        assert (pass_at_k_advantage(rewards.double(), ids, k) - expected).abs().max() < 1e-12
    assert pass_at_k_advantage(torch.zeros(0), 4, 2, backend=backend).shape == (0,)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_pass_at_k_degenerate_groups(backend):
    assert (pass_at_k_advantage(torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0]), 4, 2, backend=backend) == 0).all()
    assert (pass_at_k_advantage(torch.tensor([1.0, NAN, 0.0, NAN]), 4, 2, backend=backend) == 0).all()
    longer_than_a_block = torch.cat([torch.ones(3), torch.zeros(1497)])
    expected = pass_at_k_advantage(longer_than_a_block.double(), 1500, 40)
    assert (pass_at_k_advantage(longer_than_a_block, 1500, 40, backend=backend) - expected).abs().max() < 1e-6
    large = torch.cat([torch.ones(3), torch.zeros(997)])
    got = pass_at_k_advantage(large, 1000, 500, backend=backend)
    assert got.isfinite().all()
    # with half of the rows drawn, three right ones among a thousand: the closed form in exact integers
    wrong = 500 * (comb(996, 500) / comb(999, 500) - comb(996, 499) / comb(999, 499))
    assert abs(got[3] - wrong) < 1e-5 * abs(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor([1.0, 0.5, 0, 0]), 4, 2), "rewards of 0 and 1 .*, got 0.5; apply a threshold"),
        ((torch.tensor([1.0, 0, 0, 0]), 4, 4), "k=4 needs groups of more than 4 rows.*a group has 4: pass a smaller k"),
        ((torch.tensor([1.0, 0, 0, 0]), 4, 0), "k must be at least 1, got 0"),
        ((torch.ones(4, 2), 4, 1), "must be \\[B\\], got \\[4, 2\\]; combine"),
    ],
)
def test_pass_at_k_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k_advantage(*arguments)
