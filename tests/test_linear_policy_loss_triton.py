"""linear_policy_loss on Triton, interpreted: the logits of a row block wait for its slopes."""

import pytest
import torch

from amir_kernels import OBJECTIVES, linear_logprob, linear_policy_loss, reference
from amir_kernels.linear_logprob.arguments import checked_call
from amir_kernels.linear_logprob.rows import RowSelection
from amir_kernels.linear_logprob.triton_tiles import Config
from closeness import assert_as_good_as
from head_cases import B, L, LiveBytes, Products, loss_case, run_loss, tensors, use_tiles

pytest.importorskip("triton")

from amir_kernels.linear_logprob import triton_backend, triton_forward_gradients

SMALL = 75_000
"""workspace in bytes that holds the logits of 16 or 32 rows of the shapes used here: two or three row blocks"""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """An eighth of the table's tiles, and blocks as low as one of them."""
    use_tiles(monkeypatch, Config(16, 64, 16, 4, 2))
    for name in ("MIN_ROWS", "MIN_ROWS_CONVERTED", "MIN_ROWS_FLOAT32"):
        monkeypatch.setattr(triton_forward_gradients, name, 16)
    monkeypatch.setattr(triton_forward_gradients, "MIN_HIDDEN", 0)
    for module in (triton_forward_gradients, triton_backend):
        monkeypatch.setattr(module, "LARGEST_TILE", (16, 64))


class Launches:
    """Counts the rows that each kernel of the head sweeps over the vocabulary, in units of all rows."""

    def __init__(self, monkeypatch, rows: int) -> None:
        self.rows, self.swept = rows, {}
        for name in ("stats_kernel", "dlogits_kernel", "kept_dlogits_kernel"):
            monkeypatch.setattr(triton_backend, name, self._counting(name, getattr(triton_backend, name)))

    def _counting(self, name, kernel):
        launches = self

        class Counting:
            def __getitem__(self, grid):
                def launch(*args, **constants):
                    at = kernel.arg_names.index
                    start = 0 if name == "stats_kernel" else args[at("start")]
                    if start == 0:
                        swept = args[at("N")] / launches.rows
                        launches.swept[name] = launches.swept.get(name, 0) + swept
                    return kernel[grid](*args, **constants)

                return launch

        return Counting()


def judge(inputs, target, mask, data, factor=1.5, **options):
    """Loss, metrics and gradients against the reference in the same dtype and in float64."""
    ours = run_loss(linear_policy_loss, inputs, target, mask, data, backend="triton", workspace_bytes=SMALL, **options)
    eager = run_loss(reference.linear_policy_loss, inputs, target, mask, data, **options)
    wide = {name: value.detach().double().requires_grad_(value.requires_grad) for name, value in inputs.items()}
    data = {name: value.double() for name, value in data.items()}
    truth = run_loss(reference.linear_policy_loss, wide, target, mask, data, **options)
    assert ours.keys() == truth.keys()
    for name, value in ours.items():
        if name.startswith("d "):
            assert value.dtype == inputs[name[2:]].dtype
            assert truth[name].norm() > 0
            whole = [tensor.reshape(1, -1) for tensor in (value, eager[name], truth[name])]
            assert_as_good_as(kernel=whole[0], eager=whole[1], truth=whole[2], factor=factor, name=name)
        else:
            torch.testing.assert_close(value.double(), truth[name].double(), rtol=1e-3, atol=1e-4, msg=name)


CASES = [
    ("grpo", {}, None, 0, 1.0),
    ("dapo", {"kl_coef": 0.04}, 4.0, 3, 0.7),
    ("reinforce", {"mirror_coef": 0.1}, 4.0, 0, "row"),
    ("grpo", {"kl_coef": 0.04, "kl_bias_correction": True}, None, 3, "row"),
]


@pytest.mark.parametrize(("objective", "changes", "softcap", "rank", "temperature"), CASES)
@pytest.mark.parametrize(
    ("dtype", "trained"),
    [
        (torch.float32, ()),
        (torch.float16, ()),
        (torch.float32, ("weight", "bias")),
        (torch.float32, ("a", "b")),
    ],
)
def test_kept_logits_match_the_reference(monkeypatch, dtype, trained, objective, changes, softcap, rank, temperature):
    """Row blocks of a tile or two, masked tails, a row without advantage, the pair term's weights."""
    if "a" in trained and not rank:
        rank = 2
    inputs, target, mask, data = loss_case(torch.float32, rank, trained, vocabulary=301)
    inputs = {name: value.detach().to(dtype).requires_grad_(value.requires_grad) for name, value in inputs.items()}
    if temperature == "row":
        temperature = torch.rand(B, L) + 0.5
    launches = Launches(monkeypatch, B * L)
    judge(
        inputs,
        target,
        mask,
        data,
        objective=OBJECTIVES[objective].replace(**changes),
        ref_logprobs=data["ref_logprobs"].to(torch.float32),
        preference_weights=torch.tensor([0.3, 0.0, -0.1, 0.0]),
        softcap=softcap,
        temperature=temperature,
        logit_scale=1.3,
    )
    assert launches.swept["kept_dlogits_kernel"] > 0
    assert "dlogits_kernel" not in launches.swept


@pytest.mark.parametrize(("rows", "hidden_size", "vocabulary"), [(1, 1, 1), (15, 17, 63), (17, 16, 65), (33, 15, 257)])
@pytest.mark.parametrize("trained", [(), ("weight",)])
def test_kept_logits_around_the_block_edges(trained, rows, hidden_size, vocabulary):
    inputs, target = tensors((rows,), hidden_size, vocabulary, torch.float32, ignored=0)
    target[0] = vocabulary - 1
    hidden, weight = inputs["hidden"].detach().requires_grad_(), inputs["weight"].detach()
    wanted = [hidden, weight.requires_grad_()] if trained else [hidden]
    weights = torch.randn(rows)
    bounds = torch.arange(rows + 1)
    outcomes = []
    for function, options in ((linear_policy_loss, {"backend": "triton"}), (reference.linear_policy_loss, {})):
        loss = function(hidden, weight, target, None, weights, cu_seqlens=bounds, objective="reinforce", **options).loss
        outcomes.append([loss.detach(), *torch.autograd.grad(loss, wanted)])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()) + 1e-7)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("shape", "hidden_size", "vocabulary", "ignored"),
    [((0, 4), 16, 70, 0), ((2, 0), 16, 70, 0), ((2, 3), 16, 70, 6), ((2, 3), 0, 70, 0), ((2, 3), 16, 1, 1)],
)
def test_sizes_of_nothing_and_one(monkeypatch, shape, hidden_size, vocabulary, ignored, trained, kept):
    """No completions, none with a token, none that counts, no hidden size, one token; kept logits and two passes."""
    if not kept:
        monkeypatch.setattr(triton_forward_gradients, "kept_rows", lambda *_: 0)
    hidden = torch.randn(*shape, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=trained)
    target = torch.arange(hidden.shape[:2].numel()).view(shape) % vocabulary
    target.view(-1)[:ignored] = -100
    weights = torch.linspace(-1, 2, shape[0])
    outcomes = []
    for function, options in ((linear_policy_loss, {"backend": "triton"}), (reference.linear_policy_loss, {})):
        loss, metrics = function(
            hidden, weight, target, torch.full(shape, -4.0), weights, preference_weights=weights / 3, **options
        )
        wanted = [hidden, weight][: 1 + trained]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        outcomes.append({"loss": loss.detach(), **metrics} | dict(enumerate(grads)))
    ours, theirs = outcomes
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=str(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("space", [80_000, 150_000, 2**25])
def test_logprobs_are_the_bits_of_linear_logprob_row_by_row(dtype, space):
    inputs, target = tensors(rows=(70,), dtype=torch.float32, ignored=0)
    hidden, weight = inputs["hidden"].detach().to(dtype), inputs["weight"].detach().to(dtype)
    call = checked_call(hidden, weight, target, None, 0.7, 8.0, 1.0, None, -100, None, space, "triton")
    plain = linear_logprob(hidden, weight, target, temperature=0.7, softcap=8.0, backend="triton")
    logprob, slope = triton_forward_gradients.triton_hidden_grad(
        call.head, RowSelection(hidden, target, 0.7, torch.arange(70)), space
    )
    assert torch.equal(logprob, plain)
    few_rows = RowSelection(hidden, target, 0.7, torch.arange(20, 53))
    few, few_slope = triton_forward_gradients.triton_hidden_grad(call.head, few_rows, space)
    assert torch.equal(few, plain[20:53])
    assert torch.equal(few_slope[20:53], slope[20:53])


@pytest.mark.parametrize("softcap", [None, 6.0])
def test_kept_logits_become_the_very_dlogits_that_are_formed_again(softcap):
    from amir_kernels.linear_logprob.backward import RowCoefficients
    from amir_kernels.linear_logprob.head import Head, Lora
    from amir_kernels.linear_logprob.tiling import Tiling

    inputs, target = tensors(rows=(30,), dtype=torch.float32, rank=3, ignored=0)
    inputs = {name: value.detach().half() for name, value in inputs.items()}
    lora = Lora(inputs["a"], inputs["b"], 0.5)
    head = Head(inputs["weight"], inputs["bias"], lora, softcap, 1.3, torch.float16)
    tiling = Tiling([(0, 30)], [(0, 160), (160, 301)])
    block = RowSelection(inputs["hidden"], target, torch.rand(30) + 0.5, torch.arange(30)).block(head, 0, 30)
    kept = triton_backend.empty_kept_logits(head, 32)
    stats = triton_backend.block_stats(head, block, with_entropy=False, kept_logits=kept)
    coefficients = RowCoefficients(stats.shift, torch.randn(32), None, torch.randn(32))
    for start, stop in tiling.columns:
        again, ours = (
            make(head, tiling, *more)(block, coefficients, None, start, stop)
            for make, more in ((triton_backend.triton_dlogits, ()), (triton_backend.kept_dlogits, (kept,)))
        )
        assert again.norm() > 0
        assert torch.equal(ours, again)


MUTANTS = {
    "zero": lambda dz, block, start: dz.mul_(0),
    "sign flipped": lambda dz, block, start: dz.neg_(),
    "own value at the target forgotten": lambda dz, block, start: dz.masked_fill_(_is_target(dz, block, start), 0),
    "a row's slope given to the next": lambda dz, block, start: dz.copy_(dz.roll(1, 0)),
    "the last tile dropped": lambda dz, block, start: dz.mul_(start == 0),
    "temperature forgotten": lambda dz, block, start: dz.mul_(0.7),
}


def _is_target(dz, block, start):
    return torch.arange(start, start + dz.shape[1])[None, :] == block.target[:, None]


@pytest.mark.parametrize("trained", [(), ("weight",)])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_used_here_rejects_wrong_dlogits(monkeypatch, trained, mutant):
    right = triton_forward_gradients.kept_dlogits

    def wrong(head, tiling, kept):
        form = right(head, tiling, kept)
        return lambda block, coefficients, weight, start, stop: MUTANTS[mutant](
            form(block, coefficients, weight, start, stop), block, start
        )

    monkeypatch.setattr(triton_forward_gradients, "kept_dlogits", wrong)
    case = loss_case(torch.float32, trained=trained, vocabulary=301)
    with pytest.raises(AssertionError, match="allowed"):
        judge(*case, temperature=0.7)


@pytest.mark.parametrize(("trained", "flops"), [((), 4), (("weight",), 6)])
def test_flops_and_tokens_that_cannot_move(monkeypatch, trained, flops):
    """In T H V. With advantage 0 on two of four rows, these cost their log-probs only."""
    inputs, target, _, _ = loss_case(torch.float32, trained=trained, ignored=0)
    hidden, weight = (inputs[name].detach() for name in ("hidden", "weight"))
    hidden, target = hidden.repeat(1, 2, 1)[:, :16].requires_grad_(), target.repeat(1, 2)[:, :16]
    weight.requires_grad_(bool(trained))
    launches, products = Launches(monkeypatch, target.numel()), Products(monkeypatch, target.numel() * weight.numel())
    for advantages, share in ((torch.ones(B), 1.0), (torch.tensor([1.0, 0.0, 1.0, 0.0]), 0.5)):
        loss = linear_policy_loss(hidden, weight, target, None, advantages, backend="triton", workspace_bytes=SMALL)
        loss.loss.backward()
        swept, launches.swept = launches.swept, {}
        assert products.spent() == share * (flops - 2)
        assert swept == {"stats_kernel": 1.0, "kept_dlogits_kernel": share}


@pytest.mark.parametrize("trained", [(), ("weight",)])
def test_scratch_stays_within_the_workspace(trained):
    """Beyond what is kept for the backward: the slope, or the gradients. 200 bytes a token for the O(N) numbers."""
    rows, workspace = 150, 2**18
    hidden, weight = torch.randn(rows, 48, requires_grad=True), torch.randn(301, 48)
    weight.requires_grad_(bool(trained))
    target = torch.randint(301, (rows,))
    arguments = (hidden, weight, target, None, torch.ones(1))
    options = {"cu_seqlens": torch.tensor([0, rows]), "workspace_bytes": workspace, "backend": "triton"}
    with LiveBytes(hidden, weight, target) as live:
        linear_policy_loss(*arguments, **options)
    kept = hidden.nbytes + weight.nbytes * bool(trained)
    assert live.peak - kept <= workspace + 200 * rows


def test_nothing_counts():
    inputs, target, mask, data = loss_case(torch.float32)
    for out in (
        run_loss(linear_policy_loss, inputs, target, torch.zeros_like(mask), data, backend="triton"),
        run_loss(linear_policy_loss, inputs, torch.full_like(target, -100), mask, data, backend="triton"),
        run_loss(linear_policy_loss, inputs, target, mask, data | {"advantages": torch.zeros(B)}, backend="triton"),
    ):
        assert out["loss"] == 0
        assert (out["d hidden"] == 0).all()


def test_small_advantages_do_not_underflow_in_float16():
    inputs, target, mask, data = loss_case(torch.float32)
    inputs = {name: value.detach().half() for name, value in inputs.items()}
    inputs["hidden"].requires_grad_()
    norms = []
    for scale in (1.0, 2.0**-10):
        small = data | {"advantages": data["advantages"].float() * scale}
        grad = run_loss(linear_policy_loss, inputs, target, mask, small, backend="triton")["d hidden"]
        norms.append(grad.double().norm() / scale)
    assert abs(norms[1] / norms[0] - 1) < 0.05


@pytest.mark.parametrize(
    ("dtype", "trained"), [(torch.float16, ("weight",)), (torch.float16, ("a", "b")), ("float16 head", ("a", "b"))]
)
def test_what_cannot_be_formed_takes_two_passes(monkeypatch, dtype, trained):
    """16-bit parameters, whose gradients the blocks could not add to; float16 products with trained parameters."""
    inputs, target, mask, data = loss_case(torch.float32, 2, trained, vocabulary=301)
    for name, value in inputs.items():
        if dtype == torch.float16 or name not in trained:
            inputs[name] = value.detach().half().requires_grad_(value.requires_grad)
    launches = Launches(monkeypatch, B * L)
    ours, theirs = (
        run_loss(function, inputs, target, mask, data, **options)
        for function, options in ((linear_policy_loss, {"backend": "triton"}), (reference.linear_policy_loss, {}))
    )
    for name, value in ours.items():
        assert (value - theirs[name]).norm() <= 5e-3 * theirs[name].norm(), name
    assert launches.swept["dlogits_kernel"] > 0
    assert "kept_dlogits_kernel" not in launches.swept


@pytest.mark.parametrize(
    ("vocabulary", "hidden_size", "parts", "rows"),
    [
        (151_936, 3584, {}, 384),
        (151_936, 3584, {"weight_gradient": True, "space": 2**28}, 0),
        (151_936, 3584, {"weight_gradient": True, "space": 660 * 2**20}, 1024),
        (151_936, 3584, {"space": 160 * 2**20}, 0),
        (32_000, 4096, {}, 1408),
        (32_000, 4096, {"weight_gradient": True}, 1408),
        (262_144, 2304, {}, 0),
        (151_936, 896, {}, 0),
        (151_936, 896, {"dtype": torch.float32}, 384),
    ],
)
def test_logits_are_kept_where_the_workspace_holds_enough_rows(monkeypatch, vocabulary, hidden_size, parts, rows):
    """Of a GPU's default tiles; nothing about the batch is asked."""
    from amir_kernels.linear_logprob import tiling
    from amir_kernels.linear_logprob.head import Head

    monkeypatch.undo()
    monkeypatch.setattr(tiling, "MAX_TILE", {})
    monkeypatch.setattr(Head, "operand", property(lambda head: head.compute))
    parts = {"dtype": torch.bfloat16, "space": 2**28, "weight_gradient": False} | parts
    weight = torch.empty(vocabulary, hidden_size, dtype=parts.pop("dtype"), device="meta")
    head = Head(weight, None, None, None, 1.0, weight.dtype)
    found = [
        triton_forward_gradients.kept_rows(head, 2**28, space, parts["weight_gradient"])
        for space in (parts["space"], 2**40)
    ]
    assert found[0] == rows <= found[1]


def test_compiles_as_one_graph():
    inputs, target, _, _ = loss_case(torch.float32, ignored=0)
    hidden, weight = inputs["hidden"], inputs["weight"]

    def loss(hidden):
        return linear_policy_loss(hidden, weight, target, None, torch.ones(B), backend="triton").loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours, plain = (torch.autograd.grad(f(hidden), hidden)[0] for f in (compiled, loss))
    assert torch.equal(ours, plain)


def test_opcheck_of_the_slope():
    inputs, target = tensors(rows=(20,), dtype=torch.float32, ignored=2)
    hidden, weight = inputs["hidden"].detach().requires_grad_(), inputs["weight"].detach()
    call = checked_call(hidden, weight, target, None, 0.7, 5.0, 1.0, None, -100, None, SMALL, "triton")
    torch.library.opcheck(torch.ops.amir_kernels.linear_logprob_hidden_grad, tuple(call))
