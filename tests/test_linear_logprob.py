"""linear_logprob against the reference: values, gradients, bits, memory, and what it refuses."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from amir_kernels import linear_logprob, linear_logprob_entropy, linear_policy_loss, reference
from amir_kernels.linear_logprob.head import exact_products
from closeness import assert_as_good_as
from head_cases import RESULTS, SMALL, Products, option_cases, options_of, precisions, run, tensors, upstream

# ---- the reference -------------------------------------------------------------------------------------------------


def test_reference_is_log_softmax_of_the_head():
    inputs, target = tensors(ignored=0)
    logits = torch.nn.functional.linear(inputs["hidden"], inputs["weight"], inputs["bias"]) / 0.7
    result = reference.linear_logprob_entropy(
        inputs["hidden"], inputs["weight"], target, bias=inputs["bias"], temperature=0.7
    )
    categorical = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(result.logprob, categorical.log_prob(target))
    torch.testing.assert_close(result.entropy, categorical.entropy())
    torch.testing.assert_close(result.lse, logits.logsumexp(-1))


@pytest.mark.parametrize(("temperature", "softcap", "scale"), [(1.0, None, 1.0), ("row", 4.0, 1.7)])
def test_reference_gradients_match_finite_differences(temperature, softcap, scale):
    inputs, target = tensors(rows=(4,), hidden_size=5, vocabulary=13, rank=2, ignored=1)
    options = options_of(temperature, softcap, scale, target, torch.float64)

    def function(hidden, weight, bias, a, b):
        return reference.linear_logprob_entropy(hidden, weight, target, bias=bias, lora=(a, b, 0.5), **options)

    assert torch.autograd.gradcheck(function, tuple(inputs.values()))


# ---- values and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "softcap", "scale", "rank", "kinds"), option_cases())
def test_float64_matches_the_reference(temperature, softcap, scale, rank, kinds):
    inputs, target = tensors(rank=rank)
    options = options_of(temperature, softcap, scale, target, torch.float64)
    grads = upstream(target, kinds)
    ours = run(linear_logprob_entropy, inputs, target, grads, workspace_bytes=SMALL, **options)
    theirs = run(reference.linear_logprob_entropy, inputs, target, grads, **options)
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=1e-9, atol=1e-12 * float(theirs[name].abs().max()), msg=name
        )


def dlogits_case(spread, shift, rows=64, vocabulary=5000):
    """Logits as hidden states under an identity head: the gradient of hidden is then dlogits itself."""
    logits = spread * torch.randn(rows, vocabulary, dtype=torch.float64) + shift
    target = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    return logits.float(), target


def eager_logprob(hidden, weight, target, *, temperature=1.0, softcap=None):
    """What trainers without a fused head do: logits in the product's dtype, log_softmax in float32."""
    logits = (hidden @ weight.T).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits / temperature, -1).gather(-1, target[..., None])[..., 0]


@pytest.mark.parametrize(("spread", "shift"), [(1, 0), (4, 0), (2, 200), (2, -200), (40, 0)])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 30.0)])
def test_dlogits_err_no_more_than_eager_float32(spread, shift, temperature, softcap):
    """`shift` of 200 costs lse digits that must not reach the gradient; `spread` of 40 gives one-hot rows.

    Where one entry outweighs its row, its error is a matter of luck; elsewhere rows are held to 1.5 times eager's.
    """
    logits, target = dlogits_case(spread, shift, rows=24, vocabulary=1500)
    grad, eye = torch.randn(24), torch.eye(1500)

    def dlogits(function, dtype):
        hidden = logits.to(dtype).requires_grad_()
        value = function(hidden, eye.to(dtype), target, temperature=temperature, softcap=softcap)
        return value.detach(), torch.autograd.grad((value * grad.to(dtype)).sum(), hidden)[0]

    ours, eager = dlogits(linear_logprob, torch.float32), dlogits(eager_logprob, torch.float32)
    truth = dlogits(reference.linear_logprob, torch.float64)
    assert_as_good_as(kernel=ours[0], eager=eager[0], truth=truth[0], factor=1.5, name="logprob")
    assert_as_good_as(kernel=ours[1], eager=eager[1], truth=truth[1], target=target, factor=1.5, name="dlogits")


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32, torch.bfloat16)])
def test_float_dtype_pairs(dtypes):
    """16-bit products are summed in float32, so results lie far nearer the truth than those from 16-bit logits."""
    inputs, target = tensors(rows=(40,), hidden_size=96, vocabulary=1003, dtype=torch.float32)
    inputs = {n: v.detach().to(dtypes[n != "hidden"]).requires_grad_() for n, v in inputs.items() if n != "bias"}
    grads = upstream(target, "l")
    ours = run(linear_logprob_entropy, inputs, target, grads, workspace_bytes=400_000)
    wide, wider = (
        {n: v.detach().to(d).requires_grad_() for n, v in inputs.items()} for d in (torch.float32, torch.float64)
    )
    eager = run(reference.linear_logprob_entropy, wide, target, grads)
    truth = run(reference.linear_logprob_entropy, wider, target, grads)
    logits = (inputs["hidden"].to(dtypes[1]) @ inputs["weight"].T).float()
    coarse = torch.log_softmax(logits, -1).gather(-1, target.clamp(min=0)[:, None])[:, 0] * (target >= 0)
    assert (ours["logprob"] - truth["logprob"]).norm() < 0.5 * (coarse - truth["logprob"]).norm()
    for name in ("d hidden", "d weight"):
        dtype = inputs[name[2:]].dtype
        assert ours[name].dtype == dtype
        assert_as_good_as(kernel=ours[name], eager=eager[name].to(dtype), truth=truth[name], name=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_262144(dtype):
    """64 tiles; a head as flat as an untrained one, where the sum has the most terms that count."""
    hidden, weight = torch.randn(16, 32).to(dtype), torch.randn(262_144, 32).to(dtype) / 6
    target = torch.randint(0, 262_144, (16,))
    target[:2] = torch.tensor([0, 262_143])
    ours = linear_logprob(hidden, weight, target)
    eager = eager_logprob(hidden, weight, target)
    truth = reference.linear_logprob(hidden.double(), weight.double(), target)
    assert_as_good_as(kernel=ours, eager=eager, truth=truth, factor=1.5 if dtype == torch.float32 else 0.5)


def test_weight_gradient_error_does_not_grow_with_tokens_in_bfloat16():
    for rows in (256, 4096):
        inputs, target = tensors(rows=(rows,), hidden_size=16, vocabulary=300, dtype=torch.float32)
        inputs = {n: v.detach().bfloat16().requires_grad_() for n, v in inputs.items() if n != "bias"}
        grads = upstream(target, "l")
        ours = run(linear_logprob_entropy, inputs, target, grads, workspace_bytes=100_000)["d weight"].double()
        wide = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
        truth = run(reference.linear_logprob_entropy, wide, target, grads)["d weight"]
        assert (ours - truth).norm() < 5e-3 * truth.norm()
        assert torch.cosine_similarity(ours.view(-1), truth.view(-1), dim=0) > 0.9999


def test_forgetting_the_cap_would_move_these_logprobs():
    """The inputs of the capped tests are large enough for the cap to matter."""
    inputs, target = tensors(ignored=0)
    capped, plain = (
        linear_logprob(inputs["hidden"], inputs["weight"], target, softcap=cap).detach() for cap in (4.0, None)
    )
    assert (capped - plain).abs().median() > 0.1


def test_minus_infinity_in_the_bias_removes_tokens():
    """Also a whole vocabulary tile of them."""
    inputs, target = tensors(ignored=0)
    bias = torch.zeros(301, dtype=torch.float64)
    bias[:96] = -torch.inf
    bias[150] = -torch.inf
    kept = bias == 0
    target = target.clamp(min=200)
    index = torch.cumsum(kept, 0) - 1
    hidden, weight = (inputs[name] for name in ("hidden", "weight"))
    ours = linear_logprob_entropy(hidden, weight, target, bias=bias, workspace_bytes=SMALL)
    scales = upstream(target)
    grads = [torch.autograd.grad(ours, [hidden, weight], scales)]
    for theirs in (
        linear_logprob_entropy(hidden, weight[kept], index[target], workspace_bytes=SMALL),
        reference.linear_logprob_entropy(hidden, weight, target, bias=bias),
    ):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
        grads.append(torch.autograd.grad(theirs, [hidden, weight], scales))
    for own, *others in zip(*grads, strict=True):
        for other in others:
            torch.testing.assert_close(own, other)


# ---- rows that do not count ----------------------------------------------------------------------------------------


def test_ignored_rows_give_zeros_whatever_they_hold():
    inputs, target = tensors()
    hidden = inputs["hidden"].detach().clone()
    hidden[target == -100] = torch.nan
    hidden.requires_grad_()
    ours = run(linear_logprob_entropy, inputs | {"hidden": hidden}, target, upstream(target))
    torch.manual_seed(0)
    for name, value in ours.items():
        assert value.isfinite().all(), name
    for name in (*RESULTS, "d hidden"):
        assert (ours[name][target == -100] == 0).all(), name


@pytest.mark.parametrize("kinds", ["l", "lpe"])
def test_rows_without_upstream_gradient_change_nothing(kinds):
    inputs, target = tensors(ignored=0)
    grads = upstream(target, kinds)
    dead = torch.rand(target.shape) < 0.5
    for grad in grads:
        grad[dead] = 0
    whole = run(linear_logprob_entropy, inputs, target, grads)
    live = {**inputs, "hidden": inputs["hidden"].detach()[~dead].requires_grad_()}
    alone = run(linear_logprob_entropy, live, target[~dead], [grad[~dead] for grad in grads])
    assert (whole["d hidden"][dead] == 0).all()
    assert torch.equal(whole["d hidden"][~dead], alone["d hidden"])
    assert torch.equal(whole["d weight"], alone["d weight"])


@pytest.mark.parametrize(("trained", "flops"), [(False, 4), (True, 6)])
def test_only_live_rows_and_wanted_gradients_have_products(monkeypatch, trained, flops):
    """Counted in T H V: 2 forward, 4 backward with a frozen head, 6 with a trained one; half for half the rows."""
    inputs, target = tensors(rows=(64,), dtype=torch.float32, ignored=0)
    hidden, weight = inputs["hidden"], inputs["weight"].detach().requires_grad_(trained)
    products = Products(monkeypatch, 64 * weight.numel())
    logprob = linear_logprob(hidden, weight, target)
    assert products.spent() == 2
    logprob.sum().backward(retain_graph=True)
    assert products.spent() == flops
    logprob[::2].sum().backward(retain_graph=True)
    assert products.spent() == flops / 2
    (0 * logprob).sum().backward()
    assert products.spent() == 0
    target[::2] = -100
    linear_logprob(hidden, weight, target)
    assert products.spent() == 1


# ---- properties ----------------------------------------------------------------------------------------------------

SHAPES = {"rows": st.integers(1, 40), "vocabulary": st.integers(2, 90), "seed": st.integers(0, 2**31)}
few = settings(max_examples=25, deadline=None)


@few
@given(**SHAPES, softcap=st.sampled_from([None, 6.0]), temperature=st.floats(0.3, 3.0))
def test_rows_of_dlogits_sum_to_zero_without_a_cap_and_to_the_upstream_of_lse(
    rows, vocabulary, seed, softcap, temperature
):
    """Under an identity head the gradient of hidden is dlogits. A cap's derivative is divided out first."""
    generator = torch.Generator().manual_seed(seed)
    hidden = (3 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    scale = torch.randn(3, rows, generator=generator, dtype=torch.float64)
    eye = torch.eye(vocabulary, dtype=torch.float64)
    result = linear_logprob_entropy(hidden, eye, target, softcap=softcap, temperature=temperature)
    (grad,) = torch.autograd.grad(sum((g * value).sum() for g, value in zip(scale, result, strict=True)), hidden)
    slope = 1 if softcap is None else 1 - torch.tanh(hidden.detach() / softcap) ** 2
    torch.testing.assert_close((grad / slope).sum(-1), scale[2] / temperature, atol=1e-10, rtol=1e-10)


@few
@given(**SHAPES)
def test_permuting_tokens_or_vocabulary_permutes_the_results(rows, vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 7, generator=generator, dtype=torch.float64) for n in (rows, vocabulary))
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    tokens, words = (torch.randperm(n, generator=generator) for n in (rows, vocabulary))
    plain = linear_logprob_entropy(hidden, weight, target)
    permuted = linear_logprob_entropy(hidden[tokens], weight[words], torch.argsort(words)[target][tokens])
    for one, other in zip(plain, permuted, strict=True):
        torch.testing.assert_close(one[tokens], other)


@few
@given(**SHAPES, padding=st.integers(1, 40))
def test_ignored_rows_change_no_gradient(rows, vocabulary, seed, padding):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 7, generator=generator) for n in (rows + padding, vocabulary))
    target = torch.randint(0, vocabulary, (rows + padding,), generator=generator)
    place = torch.randperm(rows + padding, generator=generator)[:padding].sort().values
    target[place] = -100
    live = target >= 0
    outcomes = []
    for rows_given in (slice(None), live):
        leaves = [hidden[rows_given].clone().requires_grad_(), weight.clone().requires_grad_()]
        value = linear_logprob(*leaves, target[rows_given])
        outcomes.append((value, *torch.autograd.grad(value.sum(), leaves)))
    (value, grad, grad_weight), (alone, grad_alone, grad_weight_alone) = outcomes
    assert torch.equal(value[live], alone)
    assert torch.equal(grad[live], grad_alone)
    assert torch.equal(grad_weight, grad_weight_alone)


# ---- which gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [{"hidden"}, {"weight"}, {"bias"}, {"a"}, {"b"}, {"hidden", "b"}, {"weight", "a"}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_subset_of_gradients_has_the_values_of_all(wanted, dtype):
    """16-bit column gradients take a second sweep when the rows need several blocks; the sums must not notice."""
    inputs, target = tensors(rank=3, dtype=torch.float32)
    inputs = {name: value.detach().to(dtype).requires_grad_() for name, value in inputs.items()}
    grads = upstream(target)
    everything = run(linear_logprob_entropy, inputs, target, grads, workspace_bytes=SMALL)
    some = {name: value.detach().requires_grad_(name in wanted) for name, value in inputs.items()}
    ours = run(linear_logprob_entropy, some, target, grads, workspace_bytes=SMALL)
    assert {name[2:] for name in ours if name.startswith("d ")} == wanted
    for name, value in ours.items():
        assert torch.equal(value, everything[name]), name


@pytest.mark.parametrize("rank", [0, 3])
def test_frozen_head_allocates_nothing_of_its_size(rank):
    """Neither its gradient nor, with LoRA, the sum: no torch call inside the op sees an allocation near [V, H]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(value, Tensor) and value._base is None:
                    self.seen = max(self.seen, value.numel())
            return out

    inputs, target = tensors(rows=(8,), vocabulary=4001, hidden_size=64, rank=rank)
    hidden, weight = inputs["hidden"], inputs["weight"].detach()
    lora = [inputs[name].detach() if rank else None for name in "ab"]
    from amir_kernels.linear_logprob.op import _backward, _forward

    call = (hidden.detach(), weight, target, None, torch.tensor(1.0), None, 1.0, *lora, 1.0, -100, torch.float64)
    with Largest() as mode, torch.no_grad():
        logprob, entropy, _, shift, total = _forward(*call, 400_000, False, "", False)
        grads = _backward(
            torch.ones_like(logprob),
            None,
            None,
            logprob,
            entropy,
            shift,
            total,
            *call,
            400_000,
            False,
            "",
            [True, False, False, bool(rank), bool(rank)],
        )
    assert len(grads) == (3 if rank else 1)
    assert 0 < mode.seen < weight.numel() // 4


def test_tied_embedding_gets_both_gradients():
    inputs, target = tensors(rows=(12,), ignored=0)
    weight, ids = inputs["weight"], torch.randint(0, 301, (12,))

    def gradient(function):
        return torch.autograd.grad(function(torch.tanh(weight[ids]), weight, target).sum(), weight)[0]

    torch.testing.assert_close(gradient(linear_logprob), gradient(reference.linear_logprob))


def test_a_view_into_a_flat_parameter_gets_its_gradient():
    """As FSDP1 holds its weights."""
    inputs, target = tensors(rows=(12,))
    flat = torch.randn(7 + 301 * 24, dtype=torch.float64, requires_grad=True)

    def gradient(function):
        return torch.autograd.grad(function(inputs["hidden"], flat[7:].view(301, 24), target).sum(), flat)[0]

    torch.testing.assert_close(gradient(linear_logprob), gradient(reference.linear_logprob))


def test_entropy_can_be_a_constant():
    inputs, target = tensors()
    result = linear_logprob_entropy(inputs["hidden"], inputs["weight"], target, entropy_grad=False)
    assert not result.entropy.requires_grad
    grads = [
        torch.autograd.grad(value.sum(), inputs["hidden"], retain_graph=True)[0]
        for value in (result.logprob, result.logprob + result.entropy)
    ]
    assert torch.equal(*grads)


def test_double_backward_is_refused():
    inputs, target = tensors()
    value = linear_logprob(inputs["hidden"], inputs["weight"], target).sum()
    (grad,) = torch.autograd.grad(value, inputs["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*amir_kernels.reference.linear_logprob"):
        grad.sum().backward()


def test_forward_mode_is_refused():
    inputs, target = tensors(rank=2)
    given = {name: value.detach() for name, value in inputs.items()}

    def function(hidden, weight, bias, a, b):
        return linear_logprob(hidden, weight, target, bias=bias, lora=(a, b, 0.5))

    with forward_ad.dual_level():
        for name, value in given.items():
            moved = given | {name: forward_ad.make_dual(value, torch.ones_like(value))}
            with pytest.raises(NotImplementedError, match=r"an input carries a tangent; use .*amir_kernels.reference"):
                function(**moved)
    with pytest.raises(NotImplementedError, match=r"an input carries a tangent; use .*amir_kernels.reference"):
        torch.func.jvp(function, tuple(given.values()), tuple(given.values()))


def test_backward_can_be_repeated_and_leaves_the_inputs_alone():
    inputs, target = tensors()
    before = {name: value.detach().clone() for name, value in inputs.items()}
    value = linear_logprob(inputs["hidden"], inputs["weight"], target).sum()
    first, second = (torch.autograd.grad(value, list(inputs.values())[:2], retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    for name, kept in before.items():
        assert torch.equal(inputs[name], kept)


# ---- shapes, strides, precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 0), (3, 1, 5), (17,)])
@pytest.mark.parametrize(
    ("hidden_size", "vocabulary"), [(0, 9), (1, 1), (7, 2), (24, 15), (24, 16), (24, 17), (33, 301)]
)
def test_any_shape(rows, hidden_size, vocabulary):
    inputs, target = tensors(
        rows=(max(1, torch.Size(rows).numel()),), hidden_size=hidden_size, vocabulary=vocabulary, ignored=0
    )
    hidden = inputs["hidden"].detach()[: torch.Size(rows).numel()].view(*rows, hidden_size).requires_grad_()
    target = target[: torch.Size(rows).numel()].view(rows)
    inputs = inputs | {"hidden": hidden}
    grads = upstream(target)
    ours = run(linear_logprob_entropy, inputs, target, grads, workspace_bytes=SMALL)
    theirs = run(reference.linear_logprob_entropy, inputs, target, grads)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=name)


def test_seventy_thousand_rows():
    hidden, weight = torch.randn(70_000, 8, requires_grad=True), torch.randn(11, 8)
    target = torch.randint(0, 11, (70_000,))
    grads = []
    for function in (linear_logprob, reference.linear_logprob):
        value = function(hidden, weight, target)
        grads.append((value, *torch.autograd.grad(value.sum(), hidden)))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_strided_and_expanded_inputs():
    base = torch.randn(3, 9, 48, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(24, 50, dtype=torch.float64, requires_grad=True).T
    target = torch.randint(0, 50, (9,)).expand(3, 9)[:, :-1]
    for hidden in (
        base[:, :-1, ::2],
        base[:1, :-1, :24].expand(3, 8, 24),
        base.transpose(0, 1)[:3, :, :24].repeat(1, 3, 1)[:, :8],
    ):
        ours, theirs = (
            f.linear_logprob(
                hidden, weight, target[:, :8], temperature=torch.rand(3, 1, dtype=torch.float64).expand(3, 8) * 0 + 0.7
            )
            for f in (__import__("amir_kernels"), reference)
        )
        torch.testing.assert_close(ours, theirs)
        for one, other in zip(*(torch.autograd.grad(f.sum(), [base, weight]) for f in (ours, theirs)), strict=True):
            torch.testing.assert_close(one, other)


def test_the_default_device_changes_nothing():
    """The temperature as a tensor belongs to the call, not there: on "meta" the results were whatever memory held."""
    inputs, target = tensors()
    loss = {"old_logprobs": None, "advantages": torch.ones(2)}
    for weight in (inputs["weight"], inputs["weight"].detach()):
        results = []
        for device in ("cpu", "meta"):
            with torch.device(device):
                value = linear_logprob(inputs["hidden"], weight, target, temperature=0.7)
                total = linear_policy_loss(inputs["hidden"], weight, target, **loss).loss
                results.append((value, total, *torch.autograd.grad(value.sum() + total, inputs["hidden"])))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_autocast_takes_its_dtype_for_the_products_and_float32_for_the_rest():
    inputs, target = tensors(rows=(16,), dtype=torch.float32)
    hidden, weight = inputs["hidden"], inputs["weight"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_logprob(hidden, weight, target)
    rounded = linear_logprob(hidden.bfloat16(), weight.bfloat16(), target)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, rounded)
    assert torch.autograd.grad(ours.sum(), weight)[0].dtype == torch.float32


@pytest.fixture
def set_precision():
    """Sets the precision of float32 products by the old or the new interface; afterwards all is as by default."""
    yield {
        "old": lambda: torch.set_float32_matmul_precision("medium"),
        "cuda": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        "cpu": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    }
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        backend.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("interface", ["old", "cuda", "cpu"])
def test_products_are_float32_whatever_the_global_precision(monkeypatch, set_precision, interface):
    """Every product, of the forward and the backward, sees the strict setting; the user's stands again afterwards."""
    inputs, target = tensors(rows=(8,), dtype=torch.float32)
    products = Products(monkeypatch, 1)
    set_precision[interface]()
    before = precisions()
    assert "ieee" not in before or interface != "old"
    run(linear_logprob_entropy, inputs, target, upstream(target))
    assert precisions() == before
    assert len(products.seen) > 3
    assert not {"tf32", "bf16"} & {setting for pair in products.seen for setting in pair}


def test_threads_that_overlap_leave_the_global_precision_as_it_was(set_precision):
    """The first to come leaves first: the other still has true float32, and the setting of before comes back."""
    set_precision["old"]()
    before, entered, left, seen = precisions(), threading.Barrier(2), threading.Barrier(2), []

    def first():
        with exact_products(torch.device("cpu")):
            entered.wait(10)
        left.wait(10)

    other = threading.Thread(target=first)
    other.start()
    with exact_products(torch.device("cpu")):
        entered.wait(10)
        left.wait(10)
        seen.append(precisions())
    other.join()
    assert not {"tf32", "bf16"} & set(seen[0])
    assert precisions() == before


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_target_outside_the_vocabulary_is_named_with_its_position():
    inputs, target = tensors()
    for value in (301, -1, -99):
        bad = target.clone()
        bad[1, 4] = value
        with pytest.raises(ValueError, match=rf"{value} at position \[1, 4\]"):
            linear_logprob(inputs["hidden"], inputs["weight"], bad)


class LikeDTensor(Tensor):
    def full_tensor(self) -> Tensor:
        return self.as_subclass(Tensor)


def test_sharded_weights_are_refused_with_the_way_out():
    inputs, target = tensors()
    with pytest.raises(ValueError, match="gather"):
        linear_logprob(inputs["hidden"], inputs["weight"][:0], target)
    with pytest.raises(ValueError, match="GatheredParameters"):
        linear_logprob(inputs["hidden"], torch.empty(0), target)
    with pytest.raises(ValueError, match=r"DTensor.*weight.full_tensor()"):
        linear_logprob(inputs["hidden"], inputs["weight"].detach().as_subclass(LikeDTensor), target)


def test_whatever_else_is_sharded_is_refused_with_the_way_out():
    inputs, target = tensors(rank=2)
    given = {name: value.detach() for name, value in inputs.items()} | {"target": target}

    def call(hidden, weight, bias, a, b, target, temperature=1.0):
        linear_logprob(hidden, weight, target, bias=bias, lora=(a, b, 0.5), temperature=temperature)

    for name, value in (given | {"temperature": torch.ones(target.shape)}).items():
        said = {"a": "lora A", "b": "lora B"}.get(name, name)
        with pytest.raises(ValueError, match=rf"^{said} is a DTensor, expected the whole .*; gather it.*full_tensor"):
            call(**given | {name: value.as_subclass(LikeDTensor)})
        if name in ("bias", "a", "b"):
            with pytest.raises(ValueError, match=rf"^{said} is an empty shard of shape \[0\], .*; gather it first"):
                call(**given | {name: torch.empty(0)})


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"temperature": 0.0}, ValueError, "temperature must be a positive finite number, got 0.0"),
        ({"temperature": torch.ones(19)}, ValueError, r"temperature must have shape \[2, 19\] .*, got \[19\]"),
        ({"temperature": torch.ones(2, 19, requires_grad=True)}, ValueError, "requires a gradient.*; pass .*detach"),
        ({"temperature": torch.zeros(2, 19)}, ValueError, "positive, got 0.0 at position"),
        ({"softcap": -1.0}, ValueError, "softcap must be a positive finite number, got -1.0"),
        ({"bias": torch.ones(300)}, ValueError, r"bias must have shape \[301\] .*, got \[300\]"),
        ({"workspace_bytes": 0}, ValueError, "workspace_bytes must be at least 1, got 0"),
        ({"backend": "cuda"}, ValueError, "backend must be one of .*, got 'cuda'"),
        ({"lora": (torch.ones(2, 24), torch.ones(301, 3), 1.0)}, ValueError, r"lora B .* \[301, 2\].*got \[301, 3\]"),
        ({"hidden": torch.ones(2, 19, 23)}, ValueError, r"hidden must be .* H = 24 as in weight, got \[2, 19, 23\]"),
        ({"target": torch.ones(2, 19, dtype=torch.int32)}, TypeError, "target must be .*, got torch.int32; convert it"),
        ({"target": torch.ones(2, 18, dtype=torch.int64)}, ValueError, r"target must .*\[2, 19\].*, got \[2, 18\]"),
        ({"weight": torch.ones(301, 24, dtype=torch.int64)}, TypeError, "weight must be .*, got torch.int64; convert"),
    ],
)
def test_wrong_arguments_are_refused(change, error, match):
    inputs, target = tensors()
    arguments = {"hidden": inputs["hidden"], "weight": inputs["weight"], "target": target} | change
    with pytest.raises(error, match=match):
        linear_logprob(**arguments)
