"""The recurrence of the success probability: published numbers, derivatives, cycles, and GRPO on a bandit."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from amir.errors import ConfigError
from amir.theory import Recurrence, contrastive_weights
from amir.theory.recurrence import log_odds, probability
from amir_kernels import Objective, policy_loss
from tiny import Command

PAGE = Path(__file__).parents[1] / "docs" / "dynamics.md"
UNCLIPPED = Objective(clip_low=1.0, clip_high=1e9)
STABLE = [
    # beta, p_ref, p*, |h'(p*)|, p_1 from p_ref
    (5, 0.2, 0.28066003, 0.0976, 0.291872),
    (5, 0.5, 0.60069417, 0.0411, 0.598686),
    (5, 0.8, 0.88127645, 0.2357, 0.868331),
    (1, 0.2, 0.68128344, 0.3890, 0.752805),
]


@pytest.mark.parametrize(("beta", "p_ref", "p", "derivative", "first"), STABLE)
def test_the_papers_fixed_points(beta: float, p_ref: float, p: float, derivative: float, first: float) -> None:
    recurrence = Recurrence(beta, p_ref)
    point = recurrence.fixed_points()[0]
    assert point.stable
    assert point.p == pytest.approx(p, abs=5e-9)
    assert abs(point.derivative) == pytest.approx(derivative, abs=5e-5)
    assert recurrence.trajectory(p_ref, 1)[1] == pytest.approx(first, abs=5e-7)
    assert recurrence.limit(0.1) == pytest.approx((p,), abs=5e-9)  # where the paper's figure starts


@pytest.mark.parametrize(
    ("beta", "p_ref", "roots"),
    [
        (1, 0.2, [(0.68128, 0.389), (0.93471, 1.759)]),
        (5, 0.2, [(0.28066, -0.0976), (0.99952, None)]),
        (5, 0.5, [(0.60069, None), (0.99923, None)]),
        (5, 0.8, [(0.88128, None), (0.99846, None)]),
        (5, 0.001, [(0.00862, -1.061)]),
        (1, 0.5, []),
    ],
)
def test_every_root_below_the_last_one_near_1(beta: float, p_ref: float, roots: list) -> None:
    points = Recurrence(beta, p_ref).fixed_points()
    below = [point for point in points if point.p < 0.9999]
    assert points[-1].p > 0.9999
    assert [point.p for point in below[: len(roots)]] == pytest.approx([p for p, _ in roots], abs=1e-5)
    for point, (_, derivative) in zip(below, roots, strict=False):
        if derivative is not None:
            assert point.derivative == pytest.approx(derivative, abs=1e-3)
            assert point.stable == (abs(derivative) < 1)


@pytest.mark.parametrize(
    ("beta", "p_ref", "epsilon", "cycle"),
    [
        (3, 0.001, 1e-5, (0.001995, 0.633012)),
        (5, 0.001, 1e-5, (0.002338, 0.058716)),
        (3, 0.001, 1e-3, (0.002079, 0.290110)),
        (1, 0.003, 1e-2, (0.020973, 0.479206)),
    ],
)
def test_two_cycles(beta: float, p_ref: float, epsilon: float, cycle: tuple[float, float]) -> None:
    assert Recurrence(beta, p_ref, epsilon=epsilon).limit(0.1) == pytest.approx(cycle, abs=1e-6)


def test_the_start_decides_where_iterations_end() -> None:
    recurrence = Recurrence(5, 1e-4)
    assert recurrence.trajectory(1e-4, 1)[1] == pytest.approx(0.999948, abs=1e-6)
    assert recurrence.limit(1e-4)[0] > 1 - 1e-12
    assert len(recurrence.limit(0.1)) != 1 or recurrence.limit(0.1)[0] < 0.99


def test_the_mirror_grows_without_bound() -> None:
    mirror = Recurrence(5, 0.05, alpha=0)
    expected = [0.11641, 0.197293, 0.288897, 0.387105, 0.487776, 0.58691, 0.680785, 0.766096, 0.840084, 0.900652]
    assert mirror.trajectory(0.05, 10)[1:] == pytest.approx(expected, abs=1e-6)
    assert mirror.fixed_points() == []
    assert mirror.limit(0.05) == (1.0,)
    centered = Recurrence(5, 0.05, alpha=0, normalization="none").trajectory(0.05, 4)
    assert [log_odds(p) for p in centered] == pytest.approx([log_odds(0.05) + n / 5 for n in range(5)])


@pytest.mark.parametrize(("p", "first"), [(0.05, 0.060401), (0.2, 0.233922), (0.5, 0.549834), (0.8, 0.830094)])
def test_centered_advantages_reach_their_fixed_point_in_one_step(p: float, first: float) -> None:
    recurrence = Recurrence(5, p, normalization="none")
    assert recurrence.trajectory(p, 3)[1:] == pytest.approx([first] * 3, abs=5e-7)
    assert [point.p for point in recurrence.fixed_points()] == pytest.approx([first], abs=5e-7)


def test_two_penalties_with_centered_advantages_by_hand() -> None:
    alpha, beta, p = 0.3, 2.0, 0.2
    ends = [log_odds(q) for q in Recurrence(beta, p, alpha, normalization="none").trajectory(p, 6)]
    hand = [log_odds(p) + (1 - (1 - alpha) ** n) / (alpha * beta) for n in range(7)]
    assert ends == pytest.approx(hand)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("level", [-9.0, -1.0, 0.0, 0.7, 12.0])
def test_the_derivative_is_that_of_differences(alpha: float, level: float) -> None:
    recurrence = Recurrence(0.7, 0.3, alpha)
    difference = (recurrence.step(level + 1e-5) - recurrence.step(level - 1e-5)) / 2e-5
    assert recurrence.derivative(level) == pytest.approx(difference, rel=1e-6, abs=1e-6)


def test_weights_are_the_advantages_and_their_sum_the_recurrences_weight() -> None:
    success, failure = contrastive_weights(0.25, epsilon=1e-2)
    assert (success, failure) == pytest.approx((0.75 / math.sqrt(0.1975), 0.25 / math.sqrt(0.1975)))
    assert success + failure == pytest.approx(Recurrence(1, 0.5, epsilon=1e-2).weight(log_odds(0.25)))
    assert contrastive_weights(0.25, normalization="none") == (0.75, 0.25)


def test_log_odds_stay_exact_where_probabilities_round_to_1() -> None:
    assert probability(log_odds(1e-300)) == pytest.approx(1e-300)
    assert math.isfinite(Recurrence(0.01, 0.5).fixed_points()[-1].log_odds)
    assert Recurrence(0.01, 0.5).fixed_points()[-1].log_odds == pytest.approx(1 / math.sqrt(1e-5) / 0.01)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0: expected a number above 0"),
        ({"beta": float("nan")}, "beta = nan: expected a number above 0"),
        ({"p_ref": 0.0}, "p_ref = 0.0: expected a probability between 0 and 1"),
        ({"alpha": 1.5}, r"alpha = 1.5: expected a share from 0 \(mirror\) to 1"),
        ({"epsilon": 0.0}, "epsilon = 0.0: expected a number above 0 and at most 1"),
        ({"normalization": "mean"}, "normalization = 'mean': expected 'std' or 'none'"),
    ],
)
def test_refusals(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recurrence(**({"beta": 1.0, "p_ref": 0.5} | values))
    with pytest.raises(ConfigError, match=r"success probability 1\.0: expected a number between 0 and 1"):
        Recurrence(1.0, 0.5).limit(1.0)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("normalization", ["std", "none"])
def test_exact_grpo_on_a_bandit_follows_the_recurrence(alpha: float, normalization: str) -> None:
    """A softmax over 12 completions, 3 of them right, trained by gradients of the expected GRPO objective."""
    beta, right = 1.5, torch.arange(12) < 3
    torch.manual_seed(0)
    reference = torch.randn(12).double().log_softmax(0)
    policy = reference.clone()
    p_ref = float(reference.exp()[right].sum())
    expected = Recurrence(beta, p_ref, alpha, normalization=normalization).trajectory(p_ref, 3)
    for p_next in expected[1:]:
        old, p = policy, float(policy.exp()[right].sum())
        success, failure = contrastive_weights(p, normalization=normalization)
        advantages = torch.where(right, success, -failure).double() * old.exp() * 12

        def loss(logits: torch.Tensor, old: torch.Tensor = old, advantages: torch.Tensor = advantages) -> torch.Tensor:
            current = logits.log_softmax(0)
            term = policy_loss(current[:, None], old[:, None], advantages, objective=UNCLIPPED).loss
            to_reference, to_old = ((current.exp() * (current - other)).sum() for other in (reference, old))
            return term + beta * (alpha * to_reference + (1 - alpha) * to_old)

        logits = old.clone().requires_grad_()
        exact = {"tolerance_grad": 1e-10, "tolerance_change": 1e-13, "line_search_fn": "strong_wolfe"}
        optimizer = torch.optim.LBFGS([logits], max_iter=100, **exact)

        def closure(logits: torch.Tensor = logits, loss: object = loss) -> torch.Tensor:
            logits.grad = None
            value = loss(logits)
            value.backward()
            return value

        optimizer.step(closure)
        policy = logits.detach().log_softmax(0)
        assert float(policy.exp()[right].sum()) == pytest.approx(p_next, abs=1e-6)


def test_the_command_prints_the_trajectory_and_where_it_ends(command: Command) -> None:
    code, out, _ = command("dynamics", "--beta", "5", "--p-ref", "0.2", "--steps", "2")
    lines = out.splitlines()
    assert code == 0
    assert lines[1:3] == ["        0  0.200000", "        1  0.291872"]
    assert "fixed point 0.280660 (log-odds -0.941): stable, derivative -0.098" in lines
    assert lines[-1] == "from 0.2 the iterations converge to 0.280660"
    code, out, _ = command("dynamics", "--beta", "3", "--p-ref", "0.001", "--start", "0.1")
    assert code == 0
    assert "from 0.1 the iterations alternate between 0.001995 and 0.633012" in out
    code, out, _ = command("dynamics", "--beta", "5", "--p-ref", "0.05", "--alpha", "0")
    assert code == 0
    assert "from 0.05 the probability approaches 1: no penalty to the reference" in out


def test_the_command_writes_json_and_a_picture(command: Command, tmp_path: Path) -> None:
    picture = tmp_path / "theory.svg"
    code, out, err = command("dynamics", "--beta", "1", "--p-ref", "0.2", "--json", "--plot", str(picture))
    assert code == 0
    description = json.loads(out)
    assert description["limit"] == pytest.approx([0.68128344], abs=5e-9)
    assert [point["stable"] for point in description["fixed_points"]] == [True, False, True]
    assert err == f"picture: {picture}\n"
    assert picture.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--beta", "-1", "--p-ref", "0.2"], 2, "beta = -1.0: expected a number above 0"),
        (["--beta", "1", "--p-ref", "0.2", "--start", "1"], 2, "success probability 1.0: expected a number between"),
        (["--beta", "1", "--p-ref", "0.2", "--normalization", "mean"], 2, "expected 'std' or 'none'"),
        (["--beta", "1", "--p-ref", "0.2", "--plot", "a.gif"], 2, "expected a file name that ends in .png, .svg, .pdf"),
        (["--beta", "1", "--p-ref", "0.2", "--plot", "/nowhere/a.svg"], 1, "cannot be written (No such file"),
    ],
)
def test_the_command_refuses(words: list[str], code: int, message: str, command: Command) -> None:
    exit_code, _, err = command("dynamics", *words)
    assert exit_code == code
    assert message in err


@pytest.mark.skipif(not PAGE.exists(), reason="the documents are not here: tests run against a wheel")
def test_the_page_shows_what_the_command_prints(command: Command) -> None:
    example = re.search(r"\$ amir dynamics ([^\n]*)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert example
    code, out, _ = command("dynamics", *example[1].split())
    assert code == 0
    assert out == example[2]
