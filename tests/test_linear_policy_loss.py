"""linear_policy_loss against the reference: gradients formed in the forward, and the two-pass form elsewhere."""

import sys

import pytest
import torch

from amir_kernels import OBJECTIVES, PolicyLoss, linear_logprob, linear_policy_loss, reference
from amir_kernels.linear_logprob.arguments import checked_call
from amir_kernels.linear_logprob.forward_gradients import (
    ForwardGradients,
    _hidden_grad_forward,
    logprob_with_hidden_grad_op,
)
from amir_kernels.linear_logprob.head import PerInput
from amir_kernels.linear_logprob.rows import RowSelection
from closeness import assert_as_good_as
from head_cases import B, L, LiveBytes, Products, loss_case, run_loss, tensors

LOCAL = ["grpo", "bnpo", "dapo", "sapo", "gpg", "reinforce"]


@pytest.mark.parametrize("objective", LOCAL)
@pytest.mark.parametrize(("softcap", "rank", "temperature"), [(None, 0, 1.0), (4.0, 3, 0.7), (4.0, 0, "row")])
def test_frozen_head_matches_the_reference(objective, softcap, rank, temperature):
    """Hidden alone needs a gradient: the slope is formed in the forward."""
    inputs, target, mask, data = loss_case(rank=rank)
    if temperature == "row":
        temperature = torch.rand(B, L, dtype=torch.float64) + 0.5
    options = {"objective": objective, "softcap": softcap, "temperature": temperature, "logit_scale": 1.3}
    ours = run_loss(linear_policy_loss, inputs, target, mask, data, workspace_bytes=40_000, **options)
    theirs = run_loss(reference.linear_policy_loss, inputs, target, mask, data, **options)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"kl_coef": 0.04},
        {"entropy_coef": 0.01},
        {"mirror_coef": 0.1},
        {"kl_coef": 0.04, "kl_bias_correction": True},
        {"dual_clip": 3.0},
    ],
)
@pytest.mark.parametrize("trained", [(), ("weight", "bias"), ("a", "b")])
def test_parts_of_the_objective_and_trained_heads(changes, trained):
    inputs, target, mask, data = loss_case(rank=2, trained=trained)
    options = {"objective": OBJECTIVES["grpo"].replace(**changes), "ref_logprobs": data["ref_logprobs"]}
    weights = torch.tensor([0.3, 0.0, -0.1, 0.0], dtype=torch.float64)
    options |= {"preference_weights": weights, "num_sequences": 9, "workspace_bytes": 40_000}
    ours = run_loss(linear_policy_loss, inputs, target, mask, data, **options)
    theirs = run_loss(reference.linear_policy_loss, inputs, target, mask, data, **options)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.parametrize("trained", [("weight",), ("bias",), ("weight", "bias", "a", "b")])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_trained_head_formed_in_the_forward(trained, softcap):
    """Several row blocks, each needing its own slopes before the next; a temperature per token; a scaled loss."""
    inputs, target, mask, data = loss_case(rank=2 if "a" in trained else 0, trained=trained)
    options = {
        "softcap": softcap,
        "temperature": torch.rand(B, L, dtype=torch.float64) + 0.5,
        "workspace_bytes": 40_000,
    }
    outcomes = []
    for function in (linear_policy_loss, reference.linear_policy_loss):
        scaled = lambda *args, f=function, **kw: f(*args, **kw)._replace(loss=3 * f(*args, **kw).loss)
        outcomes.append(run_loss(scaled, inputs, target, mask, data, **options))
    for name, value in outcomes[0].items():
        torch.testing.assert_close(value, outcomes[1][name], rtol=1e-9, atol=1e-13, msg=name)


def test_formed_gradients_are_handed_over_once():
    inputs, target, mask, data = loss_case(trained=("weight",))
    loss = linear_policy_loss(
        inputs["hidden"], inputs["weight"], target, data["old_logprobs"], data["advantages"], mask
    ).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"used them up.* call linear_policy_loss again"):
        loss.backward()


def test_trained_float32_head_errs_no_more_than_eager():
    """As a whole: a row of the weight owes its gradient to the one or two tokens that make its entry likely."""
    inputs, target, mask, data = loss_case(dtype=torch.float32, trained=("weight",), vocabulary=1003, hidden_size=48)
    options = {"objective": "reinforce"}
    ours = run_loss(linear_policy_loss, inputs, target, mask, data, workspace_bytes=400_000, **options)
    eager = run_loss(reference.linear_policy_loss, inputs, target, mask, data, **options)
    wide = {name: value.detach().double().requires_grad_(value.requires_grad) for name, value in inputs.items()}
    truth = run_loss(
        reference.linear_policy_loss, wide, target, mask, {n: v.double() for n, v in data.items()}, **options
    )
    for name in ("d hidden", "d weight"):
        flat = [outcome[name].reshape(-1) for outcome in (ours, eager, truth)]
        assert_as_good_as(kernel=flat[0], eager=flat[1], truth=flat[2], factor=1.5, name=name)


@pytest.mark.parametrize("normalize", ["mean", "sum"])
def test_packed_tokens_with_preference_weights(normalize):
    inputs, target, mask, data = loss_case()
    weights = torch.tensor([0.3, -0.2, -0.1, 0.0], dtype=torch.float64)
    options = {"preference_weights": weights, "normalize": normalize}
    padded = run_loss(linear_policy_loss, inputs, target, mask, data, **options)
    packed = {**inputs, "hidden": inputs["hidden"].detach()[mask].requires_grad_()}
    cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    short = {name: value[mask] if value.dim() == 2 else value for name, value in data.items()}
    ours = run_loss(linear_policy_loss, packed, target[mask], None, short, cu_seqlens=cu_seqlens, **options)
    torch.testing.assert_close(ours["loss"], padded["loss"])
    torch.testing.assert_close(ours["d hidden"], padded["d hidden"][mask])


@pytest.mark.parametrize("spread", [1, 4, 40])
def test_slope_errs_no_more_than_eager_float32(spread):
    """An identity head, so that the gradient of hidden is dlogits itself; 40 gives one-hot rows."""
    logits = spread * torch.randn(24, 1500, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    eye, advantages = torch.eye(1500), torch.randn(24)
    cu_seqlens = torch.arange(25)

    def dlogits(function, dtype):
        hidden = logits.to(dtype).requires_grad_()
        loss = function(
            hidden, eye.to(dtype), target, None, advantages.to(dtype), objective="reinforce", cu_seqlens=cu_seqlens
        ).loss
        return torch.autograd.grad(loss, hidden)[0]

    ours, eager = (dlogits(f.linear_policy_loss, torch.float32) for f in (__import__("amir_kernels"), reference))
    truth = dlogits(reference.linear_policy_loss, torch.float64)
    assert_as_good_as(kernel=ours, eager=eager, truth=truth, target=target, factor=1.5, name="dlogits")


@pytest.mark.parametrize(
    ("dtype", "trained"), [(torch.float32, ()), (torch.bfloat16, ()), (torch.float32, ("weight",))]
)
def test_logprobs_are_the_bits_of_linear_logprob(dtype, trained):
    """Seen through a loss that is the negative mean of the log-probs."""
    inputs, target, _, _ = loss_case(dtype=dtype, trained=trained, ignored=0)
    arguments = (inputs["hidden"], inputs["weight"], target, None, torch.ones(B))
    fused = linear_policy_loss(*arguments, objective="reinforce").loss
    plain = reference.policy_loss(
        linear_logprob(inputs["hidden"], inputs["weight"], target), None, torch.ones(B), objective="reinforce"
    ).loss
    assert torch.equal(fused, plain)
    assert torch.autograd.grad(fused, inputs["hidden"])[0].dtype == dtype


def test_a_formed_row_has_the_bits_of_linear_logprob_row_by_row():
    """Its blocks hold other numbers of rows than those of linear_logprob."""
    inputs, target = tensors(rows=(300,), hidden_size=64, vocabulary=2100, dtype=torch.float32, ignored=0)
    hidden, weight = inputs["hidden"].detach(), inputs["weight"].detach()
    call = checked_call(hidden, weight, target, None, 0.7, 8.0, 1.0, None, -100, None, None, "torch")
    rows = RowSelection(hidden, target, 0.7, torch.arange(300))
    arguments = (call.head, rows, PerInput(True, True, False, False, False))
    for space in (400_000, 3_000_000):
        sweep = ForwardGradients(*arguments, call.workspace, space, lambda _, logprob: torch.ones_like(logprob))
        sweep.run()
        assert torch.equal(sweep.logprob, linear_logprob(hidden, weight, target, temperature=0.7, softcap=8.0))


@pytest.mark.parametrize(("trained", "flops"), [((), 4), (("weight",), 6)])
def test_flops_and_tokens_that_cannot_move(monkeypatch, trained, flops):
    """Counted in T H V, forward and backward. Advantage 0 on two of four rows: they cost their log-probs only."""
    inputs, target, _, _ = loss_case(dtype=torch.float32, trained=trained, ignored=0)
    hidden, weight = (inputs[name].detach() for name in ("hidden", "weight"))
    hidden, target = hidden.repeat(1, 32, 1)[:, :32].requires_grad_(), target.repeat(1, 32)[:, :32]
    weight.requires_grad_(bool(trained))
    products = Products(monkeypatch, target.numel() * weight.numel())
    for advantages, share in ((torch.ones(B), 1.0), (torch.tensor([1.0, 0.0, 1.0, 0.0]), 0.5)):
        linear_policy_loss(hidden, weight, target, None, advantages).loss.backward()
        assert products.spent() == share * flops + (1 - share) * 2


@pytest.mark.parametrize(("rows", "hidden_size", "vocabulary"), [(0, 4, 5), (1, 1, 1), (5, 0, 9), (1, 4, 2)])
@pytest.mark.parametrize("trained", [False, True])
def test_sizes_of_nothing_and_one(rows, hidden_size, vocabulary, trained):
    hidden = torch.randn(rows, hidden_size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, dtype=torch.float64, requires_grad=trained)
    target, bounds = torch.zeros(rows, dtype=torch.int64), torch.tensor([0, rows])
    grads = []
    for function in (linear_policy_loss, reference.linear_policy_loss):
        loss = function(
            hidden, weight, target, None, torch.ones(1).double(), objective="reinforce", cu_seqlens=bounds
        ).loss
        grads.append((loss, *torch.autograd.grad(loss, [hidden, weight][: 1 + trained], allow_unused=rows == 0)))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)


@pytest.mark.parametrize("trained", [(), ("weight", "bias", "a", "b")])
def test_triton_backend_comes_to_the_same_loss(trained):
    """Interpreted; a cap, a scale, a temperature per token, a LoRA and a bias at once."""
    pytest.importorskip("triton")
    inputs, target, mask, data = loss_case(dtype=torch.float32, rank=2, trained=trained, hidden_size=16, vocabulary=70)
    options = {"softcap": 4.0, "logit_scale": 1.3, "temperature": torch.rand(B, L) + 0.5}
    ours = run_loss(linear_policy_loss, inputs, target, mask, data, backend="triton", **options)
    theirs = run_loss(linear_policy_loss, inputs, target, mask, data, backend="torch", **options)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6 * float(theirs[name].abs().max()))


@pytest.mark.parametrize("trained", [(), ("weight",)])
def test_autocast_rounds_the_products_alone(trained):
    inputs, target, mask, data = loss_case(dtype=torch.float32, trained=trained)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = run_loss(linear_policy_loss, inputs, target, mask, data)
    rounded = {
        name: value.detach().bfloat16().requires_grad_(value.requires_grad) if name != "bias" else value
        for name, value in inputs.items()
    }
    theirs = run_loss(linear_policy_loss, rounded, target, mask, data)
    assert torch.equal(ours["loss"], theirs["loss"])
    for name in ("d hidden", *(f"d {name}" for name in trained)):
        assert ours[name].dtype == torch.float32
        assert (ours[name] - theirs[name]).norm() < 0.01 * theirs[name].norm()


@pytest.mark.parametrize("objective", ["gspo", "gspo_token", "gmpo", "vespo", "luspo"])
def test_sequence_level_objectives_are_refused_by_name(objective):
    inputs, target, mask, data = loss_case()
    with pytest.raises(
        ValueError, match=r"ratio_level='sequence.*needs whole sequences: use linear_logprob, then policy_loss"
    ):
        run_loss(linear_policy_loss, inputs, target, mask, data, objective=objective)


@pytest.mark.parametrize("trained", [(), ("weight",)])
def test_double_backward_is_refused(trained):
    """Not left out of a sum in which other terms have a gradient."""
    inputs, target, mask, data = loss_case(trained=trained)
    loss = linear_policy_loss(
        inputs["hidden"], inputs["weight"], target, data["old_logprobs"], data["advantages"], mask
    ).loss

    def penalty():
        (grad,) = torch.autograd.grad(loss, inputs["hidden"], create_graph=True)
        (grad.square().sum() + inputs["hidden"].square().sum()).backward()

    with pytest.raises(
        RuntimeError, match=r"linear_policy_loss cannot be differentiated twice.*amir_kernels.reference"
    ):
        penalty()


def test_forward_mode_is_refused():
    inputs, target, mask, data = loss_case()
    weight = inputs["weight"].detach()

    def function(hidden):
        return linear_policy_loss(hidden, weight, target, data["old_logprobs"], data["advantages"], mask).loss

    with pytest.raises(NotImplementedError, match=r"an input carries a tangent; use .*amir_kernels.reference"):
        torch.func.jvp(function, (inputs["hidden"].detach(),), (inputs["hidden"].detach(),))


def test_nothing_counts():
    inputs, target, mask, data = loss_case()
    for out in (
        run_loss(linear_policy_loss, inputs, target, torch.zeros_like(mask), data),
        run_loss(linear_policy_loss, inputs, torch.full_like(target, -100), mask, data),
        run_loss(linear_policy_loss, inputs, target, mask, data | {"advantages": torch.zeros(B, dtype=torch.float64)}),
    ):
        assert out["loss"] == 0
        assert (out["d hidden"] == 0).all()


@pytest.mark.parametrize("trained", [(), ("weight",)])
@pytest.mark.parametrize("workspace", [2**21, 2**23])
def test_scratch_of_the_forward_stays_within_the_workspace(trained, workspace):
    """Beyond what is kept for the backward: the slope, or the gradients. 200 bytes a token for the O(N) numbers."""
    rows, vocabulary, hidden_size = 1000, 3001, 48
    hidden, weight = torch.randn(rows, hidden_size, requires_grad=True), torch.randn(vocabulary, hidden_size)
    weight.requires_grad_("weight" in trained)
    target, cu_seqlens = torch.randint(0, vocabulary, (rows,)), torch.arange(0, rows + 1, 250)
    arguments = (hidden, weight, target, None, torch.ones(4))
    call = checked_call(hidden, weight, target, None, 1.0, None, 1.0, None, -100, None, workspace, "torch")
    module = sys.modules["amir_kernels.linear_logprob.linear_policy_loss"]
    with LiveBytes(hidden, weight, target) as live:
        if trained:
            module._loss_with_gradients(
                call, workspace, torch.zeros(rows), lambda logprob: PolicyLoss(logprob.sum(), {})
            )
            kept = hidden.nbytes + weight.nbytes
        else:
            with torch.no_grad():
                _hidden_grad_forward(*call)
            kept = hidden.nbytes
    assert live.peak - kept <= workspace + 200 * rows
    assert linear_policy_loss(*arguments, cu_seqlens=cu_seqlens, workspace_bytes=workspace).loss.isfinite()


@pytest.mark.parametrize("rows", [1, 40, 96, 100, 300])
@pytest.mark.parametrize("vocabulary", [2048, 2055])  # the second ends in a tile that holds fewer rows
def test_gradients_whose_logits_wait_in_the_weights_gradient(rows, vocabulary):
    """Up to H = 96 rows are one block; the others follow in blocks of their own."""
    inputs, target = tensors(rows=(rows,), hidden_size=96, vocabulary=vocabulary, rank=2)
    names, leaves = zip(*inputs.items(), strict=True)
    options = {"bias": inputs["bias"], "lora": (inputs["a"], inputs["b"], 0.5), "softcap": 5.0, "temperature": 0.7}
    arguments = (*leaves[:2], target, None, torch.ones(1, dtype=torch.float64))
    ours, theirs = (
        torch.autograd.grad(
            f(*arguments, objective="reinforce", cu_seqlens=torch.tensor([0, rows]), **options).loss, leaves
        )
        for f in (linear_policy_loss, reference.linear_policy_loss)
    )
    for name, mine, expected in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("rows", "kept_rows"), [(64, 0), (96, 0), (112, 16)])
def test_logits_of_as_many_rows_as_the_hidden_size_need_no_room(rows, kept_rows):
    """Beyond the gradients: a tile of logits and its copy, five numbers a hidden one, and what other rows keep."""
    hidden, weight = (torch.randn(n, 96, requires_grad=True) for n in (rows, 20_000))
    target = torch.randint(0, 20_000, (rows,))
    with LiveBytes(hidden, weight, target) as live:
        linear_policy_loss(hidden, weight, target, None, torch.ones(1), cu_seqlens=torch.tensor([0, rows]))
    kept = 4 * kept_rows * 20_000
    assert kept <= live.peak - hidden.nbytes - weight.nbytes <= kept + 4 * 96 * (2 * 1024 + 5 * 96) + 2000 * rows


def test_the_backward_of_a_frozen_head_holds_the_slope_and_its_gradient_only():
    """Beside what the forward kept, `[..., H]` too."""
    hidden, weight, target = torch.randn(500, 64, requires_grad=True), torch.randn(300, 64), torch.randint(300, (500,))
    loss = linear_policy_loss(hidden, weight, target, None, torch.ones(2), cu_seqlens=torch.tensor([0, 200, 500])).loss
    with LiveBytes(hidden, weight, target) as live:
        (grad,) = torch.autograd.grad(loss, hidden)
    assert grad.norm() > 0
    assert live.peak <= 2 * hidden.nbytes + 50 * len(target)


def test_compiles_as_one_graph_and_passes_opcheck():
    inputs, target, _, _ = loss_case(dtype=torch.float32, ignored=0)
    hidden, weight = inputs["hidden"], inputs["weight"]

    def loss(hidden, temperature):
        return linear_policy_loss(hidden, weight, target, None, torch.ones(B), temperature=temperature).loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for temperature in (0.7, 0.9):
        ours, plain = (torch.autograd.grad(f(hidden, temperature), hidden)[0] for f in (compiled, loss))
        assert torch.equal(ours, plain)
    call = checked_call(hidden, weight, target, None, 0.7, 5.0, 1.0, None, -100, None, None, "torch")
    torch.library.opcheck(logprob_with_hidden_grad_op, tuple(call))
