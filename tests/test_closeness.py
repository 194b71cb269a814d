"""The comparison itself: gradients wrong in known ways must be rejected, right ones accepted, in every dtype."""

import pytest
import torch
from torch import Tensor

from closeness import assert_as_good_as

N, V, TEMPERATURE, CAP = 48, 3001, 0.7, 20.0
TARGETS = slice(0, N - 6)
"""the last six rows are masked"""


class Case:
    """Peaked rows, tokens drawn from the policy, gradients of both signs; logits so low that padding by 0 counts."""

    def __init__(self) -> None:
        self.logits = 2 * torch.randn(N, V, dtype=torch.float64) - 8
        z = CAP * torch.tanh(self.logits / CAP) / TEMPERATURE
        self.target = torch.multinomial(z.softmax(-1), 1)[:, 0]
        self.target[N - 6 :] = -1
        self.grad = torch.randn(N, dtype=torch.float64) / N

    def dlogits(self, dtype: torch.dtype, mutant: str = "none") -> Tensor:
        """d sum(grad * logprob) / d logits by the formula, in `dtype`, right or wrong in one way."""
        x = self.logits.to(dtype)
        z = CAP * torch.tanh(x / CAP) / TEMPERATURE
        if mutant == "tail columns counted":
            padded = torch.cat([z, z.new_zeros(N, 39)], dim=1)
            probs = padded.softmax(-1)[:, :V]
        else:
            probs = z.softmax(-1)
        onehot = torch.zeros_like(z).scatter_(1, self.target.clamp(min=0)[:, None], 1.0)
        grad = self.grad.to(dtype)[:, None]
        if mutant != "mask ignored":
            grad = grad * (self.target >= 0)[:, None]
        softmax = 0 if mutant == "softmax term dropped" else probs
        slope = 1 if mutant == "cap's derivative dropped" else 1 - torch.tanh(x / CAP) ** 2
        temperature = 1 if mutant == "temperature forgotten" else TEMPERATURE
        out = grad / temperature * (onehot - softmax) * slope
        return {"zero": 0 * out, "sign flipped": -out}.get(mutant, out)

    def judge(self, dtype: torch.dtype, mutant: str) -> None:
        assert_as_good_as(
            kernel=self.dlogits(torch.float64, mutant).to(dtype),
            eager=self.dlogits(dtype),
            truth=self.dlogits(torch.float64),
            target=self.target,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "mutant",
    [
        "zero",
        "sign flipped",
        "mask ignored",
        "temperature forgotten",
        "softmax term dropped",
        "tail columns counted",
        "cap's derivative dropped",
    ],
)
def test_wrong_gradients_are_rejected(dtype, mutant):
    with pytest.raises(AssertionError, match="allowed"):
        Case().judge(dtype, mutant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gradient_rounded_once_is_accepted(dtype):
    Case().judge(dtype, "none")


def test_one_bad_entry_that_is_not_finite_is_rejected():
    truth = torch.ones(4, 8, dtype=torch.float64)
    kernel = truth.float()
    kernel[2, 3] = float("nan")
    with pytest.raises(AssertionError, match="not finite"):
        assert_as_good_as(kernel=kernel, eager=truth.float(), truth=truth)


def test_error_in_one_small_row_is_not_hidden_by_large_ones():
    truth = torch.ones(4, 8, dtype=torch.float64)
    truth[3] *= 1e-6
    kernel = truth.float()
    kernel[3] *= 1.001
    with pytest.raises(AssertionError, match="row 3"):
        assert_as_good_as(kernel=kernel, eager=truth.float(), truth=truth)


def test_peaked_rows_are_judged_together_and_the_others_alone():
    """On one entry of a peaked row eager is right by luck; a kernel that errs there as eager elsewhere is right."""
    truth = torch.full((32, 64), 1e-9, dtype=torch.float64)
    truth[:, 5] = 1.0
    target = torch.full((32,), -1)
    off = truth.clone()
    off[:, 5] += 1e-5
    lucky = off.clone()
    lucky[7, 5] = 1.0
    parts = {"truth": truth, "target": target, "factor": 1.5}
    assert_as_good_as(kernel=off.float(), eager=lucky.float(), **parts)
    wrong = off.clone()
    wrong[7, 5] += 1e-4
    with pytest.raises(AssertionError, match="peaked rows"):
        assert_as_good_as(kernel=wrong.float(), eager=lucky.float(), **parts)
    flat = truth.clone()
    flat[7] = 1e-9
    wrong = flat.clone()
    wrong[7] *= 1.001
    with pytest.raises(AssertionError, match="rest of row 0"):
        assert_as_good_as(kernel=wrong.float(), eager=flat.float(), truth=flat, target=target)
