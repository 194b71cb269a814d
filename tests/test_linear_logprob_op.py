"""linear_logprob as an op: the same bits in any company, a split vocabulary, torch.library and torch.compile."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amir_kernels import linear_logprob, linear_logprob_entropy, workspace_of
from amir_kernels.linear_logprob.op import _backward, _forward, linear_logprob_op
from amir_kernels.linear_logprob.tiling import MAX_TILE, MAX_TILE_GPU, choose_tile_size
from head_cases import SMALL, LiveBytes, run, tensors, upstream

# ---- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_row_has_the_same_bits_in_any_company(dtype, softcap):
    """Alone, at another position, among other numbers of rows, beside ignored rows, with and without gradients."""
    inputs, target = tensors(rows=(700,), hidden_size=40, vocabulary=1003, dtype=torch.float32, ignored=0)
    hidden, weight = (inputs[name].detach().to(dtype) for name in ("hidden", "weight"))
    temperature = torch.rand(700) + 0.5
    options = {"softcap": softcap, "workspace_bytes": 2_000_000}
    whole = linear_logprob_entropy(hidden, weight, target, temperature=temperature, **options)

    def same(rows, part_target=None, **more):
        part = linear_logprob_entropy(
            hidden[rows],
            weight,
            target[rows] if part_target is None else part_target,
            temperature=temperature[rows],
            **options,
        )
        keep = torch.ones(len(part.lse), dtype=torch.bool) if part_target is None else part_target >= 0
        return all(torch.equal(p[keep], w[rows][keep]) for p, w in zip(part, whole, strict=True))

    assert same(slice(3, 4))
    assert same(slice(0, 17))
    assert same(slice(333, 699))
    assert same(torch.randperm(700))
    assert same(slice(100, 300), torch.where(torch.arange(200) % 3 == 0, -100, target[100:300]))
    alone = linear_logprob(hidden, weight, target, temperature=temperature, **options)
    assert torch.equal(alone, whole.logprob)
    with_grad = linear_logprob(
        hidden.requires_grad_(), weight.requires_grad_(), target, temperature=temperature, **options
    )
    assert torch.equal(with_grad, whole.logprob)


def test_gradients_have_the_same_bits_on_every_run():
    inputs, target = tensors(rows=(120,), dtype=torch.float32)
    grads = upstream(target)
    first, second = (run(linear_logprob_entropy, inputs, target, grads) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# ---- a vocabulary split over ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_vocabulary_split_over_ranks(world):
    """Uneven shards, one of them a single row; targets on every edge; results, gradients, bits and refusals."""
    script = Path(__file__).with_name("vocabulary_ranks.py")
    done = subprocess.run([sys.executable, script, str(world)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- torch.library and torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_opcheck(with_entropy, rank):
    inputs, target = tensors(rows=(6,), dtype=torch.float32, rank=rank, ignored=1)
    call = [*(inputs[name] for name in ("hidden", "weight")), target, inputs["bias"], torch.rand(6) + 0.5, 5.0, 1.2]
    call += [inputs.get("a"), inputs.get("b"), 0.5, -100, torch.float32, SMALL, False, "", with_entropy]
    torch.library.opcheck(linear_logprob_op, call)


def test_compiles_as_one_graph_with_few_specializations():
    from torch._dynamo.testing import CompileCounterWithBackend

    def loss(hidden, weight, target, temperature):
        result = linear_logprob_entropy(hidden, weight, target, temperature=temperature)
        return (result.logprob + 0.1 * result.entropy).sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    inputs, _ = tensors(dtype=torch.float32)
    weight = inputs["weight"]

    def check(batch, length, temperature):
        hidden, target = torch.randn(batch, length, 24, requires_grad=True), torch.randint(0, 301, (batch, length))
        grads = [
            torch.autograd.grad(f(hidden, weight, target, temperature), [hidden, weight]) for f in (compiled, loss)
        ]
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)

    for batch, length in itertools.product((2, 3, 4), (5, 6, 7, 9)):
        check(batch, length, 0.7)
    for temperature in (0.5, 0.6, 0.8, 0.9, 1.0):
        check(2, 5, temperature)
    assert counter.frame_count <= 5


def test_fake_and_meta_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        hidden, weight = torch.empty(2, 3, 8, requires_grad=True), torch.empty(50, 8, requires_grad=True)
        result = linear_logprob_entropy(hidden, weight, torch.zeros(2, 3, dtype=torch.int64))
        result.entropy.sum().backward()
        assert hidden.grad.shape == hidden.shape
        assert weight.grad.shape == weight.shape
    meta = linear_logprob(
        torch.empty(4, 8, device="meta"), torch.empty(9, 8, device="meta"), torch.empty(4, dtype=int, device="meta")
    )
    assert (meta.shape, meta.device.type, meta.dtype) == ((4,), "meta", torch.float32)


# ---- scratch -------------------------------------------------------------------------------------------------------


@given(
    vocabulary=st.integers(1, 300_000),
    depth=st.integers(1, 9000),
    budgets=st.tuples(st.integers(1, 2**30), st.integers(1, 2**30)),
    itemsize=st.sampled_from([4, 8]),
    copies=st.integers(0, 3),
    largest=st.sampled_from([MAX_TILE["cpu"], MAX_TILE_GPU]),
)
def test_blocks_grow_with_the_workspace_and_are_never_empty(vocabulary, depth, budgets, itemsize, copies, largest):
    small, large = (
        choose_tile_size(vocabulary, depth, budget, itemsize, copies, largest) for budget in sorted(budgets)
    )
    assert small.rows >= 16
    assert small.columns >= 16
    assert large.rows >= small.rows
    assert large.columns >= small.columns
    assert small.columns <= max(16, -(-vocabulary // 16) * 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("workspace", [2**20, 2**22])
def test_scratch_stays_within_the_workspace(dtype, trained, workspace):
    """Measured at every torch call; 100 bytes a row are allowed for the O(N) numbers."""
    rows = 1000
    hidden, weight = torch.randn(rows, 48).to(dtype), torch.randn(3001, 48).to(dtype)
    target = torch.randint(0, 3001, (rows,))
    call = (
        hidden,
        weight,
        target,
        None,
        torch.tensor(0.7),
        5.0,
        1.0,
        None,
        None,
        1.0,
        -100,
        dtype,
        workspace,
        False,
        "",
    )
    with torch.no_grad(), LiveBytes(hidden, weight, target) as forward:
        logprob, entropy, lse, shift, total = _forward(*call, True)
    stats = (logprob, entropy, shift, total)
    with torch.no_grad(), LiveBytes(hidden, weight, target, lse, *stats) as backward:
        grads = _backward(logprob, entropy, None, *stats, *call, [True, trained, False, False, False])
    scratch = workspace_of(hidden, weight, workspace_bytes=workspace)
    assert scratch <= workspace
    assert forward.peak <= scratch + 100 * rows
    assert backward.peak - sum(grad.nbytes for grad in grads) <= scratch + 100 * rows


def test_scratch_does_not_grow_with_the_tokens():
    weight = torch.empty(50_000, 64, device="meta")
    sizes = {
        workspace_of(torch.empty(rows, 64, device="meta"), weight, workspace_bytes=2**22)
        for rows in (512, 2**14, 2**20)
    }
    assert len(sizes) == 1
