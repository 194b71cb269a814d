"""What torch promises of an op: every public op in a checkpoint, under hooks, copied, pickled and transformed.

Each works as eager torch does, or is refused by name with the way out.
"""

import copy
import pickle

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import amir_kernels
from amir_kernels import (
    OBJECTIVES,
    amir_loss,
    group_advantage,
    linear_logprob,
    linear_logprob_entropy,
    linear_policy_loss,
    pair_logits,
    pass_at_k_advantage,
    policy_loss,
    preference_loss,
    preference_weights,
    sequence_logprob,
)

WITH_ENTROPY = OBJECTIVES["grpo"].replace(entropy_coef=0.1)
generator = torch.Generator().manual_seed(3)
W, A, B = (torch.randn(*shape, generator=generator) for shape in ((31, 8), (2, 8), (31, 2)))
H = torch.randn(2, 6, 8, generator=generator)
TARGET = torch.randint(31, (2, 6), generator=generator)
OLD = torch.randn(2, 6, generator=generator) - 3
ADVANTAGES, REWARDS = torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0, 0.5, 0.0])

HEAD = {
    "linear_logprob": (lambda h: linear_logprob(h, W, TARGET), H),
    "linear_logprob, trained": (lambda w: linear_logprob(H, w, TARGET, lora=(A, B, 0.5)), W),
    "linear_logprob_entropy": (lambda h: linear_logprob_entropy(h, W, TARGET, bias=W[:, 0]), H),
    "linear_logprob_entropy, trained": (lambda w: linear_logprob_entropy(H, w, TARGET, softcap=5.0), W),
    "linear_policy_loss": (lambda h: linear_policy_loss(h, W, TARGET, OLD, ADVANTAGES), H),
    "linear_policy_loss, trained": (lambda w: linear_policy_loss(H, w, TARGET, OLD, ADVANTAGES), W),
    "linear_policy_loss, entropy": (
        lambda h: linear_policy_loss(h, W, TARGET, OLD, ADVANTAGES, objective=WITH_ENTROPY),
        H,
    ),
}
PAIRS = {
    "preference_loss": (lambda s: preference_loss(s, REWARDS, 2), OLD[0, :4]),
    "amir_loss": (lambda lp: amir_loss(lp, OLD, ADVANTAGES, REWARDS[:2], 2, ref_free=True), OLD + 0.1),
}
PLAIN = {
    "sequence_logprob": (sequence_logprob, OLD),
    "policy_loss": (lambda lp: policy_loss(lp, OLD, ADVANTAGES), OLD + 0.1),
    "pair_logits": (lambda s: pair_logits(s, REWARDS, 2), OLD[0, :4]),
}
CONSTANTS = {
    "preference_weights": (lambda s: preference_weights(s, REWARDS, 2), OLD[0, :4]),
    "group_advantage": (lambda r: group_advantage(r, 2), REWARDS),
    "pass_at_k_advantage": (lambda r: pass_at_k_advantage((r > 0).float(), 2, 1), REWARDS),
}
DIFFERENTIABLE = HEAD | PAIRS | PLAIN


def test_every_public_op_is_here():
    named = {name.partition(",")[0] for name in DIFFERENTIABLE | CONSTANTS}
    ops = {name for name in amir_kernels.__all__ if name.islower()}
    assert named == ops - {"supports", "workspace_of"}  # these return no tensors


def tensors_of(result):
    """The floats of a result that have a meaning, metrics aside."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [value for value in result if isinstance(value, torch.Tensor) and value.is_floating_point()]


def total(result):
    """A number with a different gradient for each entry."""
    if hasattr(result, "loss"):
        return result.loss
    return sum((v * torch.arange(1.0, v.numel() + 1).view(v.shape) / 7).sum() for v in tensors_of(result))


def gradient(function, x, scope=torch.enable_grad):
    x = x.clone().requires_grad_()
    with scope():
        value = total(function(x))
    return torch.autograd.grad(value, x)[0]


def case(cases):
    return pytest.mark.parametrize(("function", "x"), cases.values(), ids=cases)


@case(DIFFERENTIABLE)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_gives_the_same_gradient(function, x, reentrant):
    leaf = x.clone().requires_grad_()
    checkpoint(lambda x: total(function(x)), leaf, use_reentrant=reentrant).backward()
    assert torch.equal(leaf.grad, gradient(function, x))


def test_a_checkpoint_around_two_ops_gives_the_same_gradient():
    def block(h):
        return linear_logprob_entropy(h, W, TARGET).entropy.sum() + linear_logprob(h.tanh(), W, TARGET).sum()

    leaf = H.clone().requires_grad_()
    checkpoint(block, leaf, use_reentrant=False).backward()
    assert torch.equal(leaf.grad, torch.autograd.grad(block(again := H.clone().requires_grad_()), again)[0])


@case(DIFFERENTIABLE)
def test_saved_tensors_pass_through_hooks(function, x):
    """They are packed as often as they are unpacked, at most once each, and nothing else is kept."""
    counts = {"packed": 0, "unpacked": 0}

    def pack(tensor):
        counts["packed"] += 1
        return [tensor.clone()]

    def unpack(packed):
        counts["unpacked"] += 1
        return packed.pop()  # a second reading fails

    def scope():
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    assert torch.equal(gradient(function, x, scope), gradient(function, x))
    assert counts["packed"] >= counts["unpacked"] > 0
    assert torch.equal(gradient(function, x, torch.autograd.graph.save_on_cpu), gradient(function, x))


@case(DIFFERENTIABLE | CONSTANTS)
def test_results_are_copied_and_pickled(function, x):
    result = function(x)
    for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result)), copy.copy(result)):
        assert type(other) is type(result)
        assert all(map(torch.equal, tensors_of(other), tensors_of(result)))
    with_graph = function(x.clone().requires_grad_())
    assert all(map(torch.equal, tensors_of(pickle.loads(pickle.dumps(with_graph))), tensors_of(result)))


@case(DIFFERENTIABLE)
def test_functional_call_gives_the_gradient_of_the_parameter(function, x):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.zeros_like(x))

        def forward(self):
            return total(function(self.x))

    leaf = x.clone().requires_grad_()
    value = torch.func.functional_call(Module(), {"x": leaf}, ())
    assert torch.equal(torch.autograd.grad(value, leaf)[0], gradient(function, x))


@case(HEAD | PAIRS)
def test_transforms_that_differentiate_are_refused(function, x):
    def value(x):
        return total(function(x))

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        with pytest.raises(
            NotImplementedError, match=r"(linear_logprob|preference_loss) is called inside .*; use back"
        ):
            transform(value)(x)
    with pytest.raises(NotImplementedError, match=r"is called inside torch.func.grad, .*amir_kernels.reference"):
        torch.func.vmap(torch.func.grad(value))(torch.stack([x, x]))
    with pytest.raises(NotImplementedError, match=r"is called inside torch.func.grad, .*torch.autograd.grad"):
        torch.func.vjp(value, x)


@case(HEAD | PAIRS)
def test_forward_mode_is_refused(function, x):
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"no forward-mode .*; use reverse mode, or"):
        function(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(NotImplementedError, match=r"no forward-mode .*; use reverse mode, or"):
        torch.func.jvp(lambda x: total(function(x)), (x,), (torch.ones_like(x),))


@case(PLAIN)
def test_plain_ops_take_every_transform(function, x):
    def value(x):
        return total(function(x))

    expected = gradient(function, x)
    assert torch.allclose(torch.func.grad(value)(x), expected)
    if "pair_logits" not in str(function):
        moved = torch.func.jvp(value, (x,), (torch.ones_like(x),))[1]
        assert torch.allclose(moved, expected.sum(), atol=1e-6)


@case(CONSTANTS)
def test_constants_have_no_derivative_in_any_mode(function, x):
    assert not function(x.clone().requires_grad_()).requires_grad
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent is None
    assert (torch.func.grad(lambda x: total(function(x)))(x) == 0).all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@case(HEAD | PAIRS | {name: PLAIN[name] for name in ("sequence_logprob", "policy_loss")})
def test_vmap_maps_the_op(function, x):
    batch = torch.stack([x, x + 1])
    mapped = torch.func.vmap(lambda x: total(function(x)))(batch)
    assert torch.allclose(mapped, torch.stack([total(function(x)) for x in batch]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@case(HEAD | PAIRS)
def test_gradients_outside_of_vmap(function, x):
    batch = torch.stack([x, x + 1]).requires_grad_()
    (mapped,) = torch.autograd.grad(torch.func.vmap(lambda x: total(function(x)))(batch).sum(), batch)
    assert torch.allclose(mapped, torch.stack([gradient(function, x) for x in batch.detach()]), atol=1e-6)


RECOMPUTED = {name: HEAD[name] for name in HEAD if name != "linear_policy_loss"}
"""Those whose backward computes, or scales its gradients in place; with a frozen head one product is left."""


@case({name: case for name, case in DIFFERENTIABLE.items() if name not in RECOMPUTED})
def test_a_batch_of_gradients_is_right(function, x):
    leaf, expected = x.clone().requires_grad_(), gradient(function, x)
    (batched,) = torch.autograd.grad(total(function(leaf)), leaf, torch.tensor([1.0, 2.0]), is_grads_batched=True)
    assert torch.allclose(batched, torch.stack([expected, 2 * expected]), atol=1e-6)


@case(RECOMPUTED)
def test_a_batch_of_gradients_is_refused(function, x):
    leaf = x.clone().requires_grad_()
    value = total(function(leaf))
    with pytest.raises(
        NotImplementedError, match=r"the backward of linear_\w+ is called with a batch of .*; call it once"
    ):
        torch.autograd.grad(value, leaf, torch.tensor([1.0, 2.0]), is_grads_batched=True)
    jacobian = torch.autograd.functional.jacobian(lambda x: total(function(x)), x)
    assert torch.allclose(jacobian, gradient(function, x), atol=1e-6)


@case(HEAD | PAIRS)
def test_a_second_derivative_is_refused(function, x):
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(total(function(leaf)), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice: .*; call amir_kernels.reference"):
        first.square().sum().backward()


@case(DIFFERENTIABLE)
def test_torch_compiles_the_op_in_one_graph(function, x):
    torch._dynamo.reset()
    leaf = x.clone().requires_grad_()
    value = torch.compile(lambda x: total(function(x)), backend="aot_eager", fullgraph=True)(leaf)
    assert torch.allclose(torch.autograd.grad(value, leaf)[0], gradient(function, x), atol=1e-6)


@case(DIFFERENTIABLE)
def test_hooks_on_an_input_and_inference_mode(function, x):
    leaf, seen = x.clone().requires_grad_(), []
    leaf.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)
    total(function(leaf)).backward()
    assert torch.equal(seen[0], gradient(function, x))
    assert torch.equal(leaf.grad, 2 * seen[0])
    with torch.inference_mode():
        assert torch.equal(total(function(x)), total(function(x.clone().requires_grad_())).detach())


@case({name: CONSTANTS[name] for name in ("group_advantage", "pass_at_k_advantage")})
def test_vmap_over_advantages_is_refused(function, x):
    with pytest.raises(NotImplementedError, match=r"inside torch.vmap, .*; pass all rows in one call"):
        torch.func.vmap(lambda x: total(function(x)))(torch.stack([x, x + 1]))


def test_vmap_over_the_rewards_of_listed_pairs_is_refused():
    """How many pairs there are depends on them."""
    with pytest.raises(NotImplementedError, match=r"^pair_logits is called inside torch.vmap, .*; pass all rows"):
        torch.func.vmap(lambda r: pair_logits(OLD[0, :4], r, 2).logit)(torch.stack([REWARDS, REWARDS]))


@pytest.mark.parametrize("op", ["linear_logprob", "preference_loss"])
def test_the_references_take_the_transforms_that_the_ops_refuse(op):
    function, x = (HEAD | PAIRS)[op]
    reference = {
        "linear_logprob": lambda h: amir_kernels.reference.linear_logprob(h, W, TARGET),
        "preference_loss": lambda s: amir_kernels.reference.preference_loss(s, REWARDS, 2),
    }[op]
    expected = gradient(function, x)
    assert torch.allclose(torch.func.grad(lambda x: total(reference(x)))(x), expected, atol=1e-5)
    moved = torch.func.jvp(lambda x: total(reference(x)), (x,), (torch.ones_like(x),))[1]
    assert torch.allclose(moved, expected.sum(), atol=1e-4)
