"""linear_logprob's Triton kernels, interpreted, against the reference: every option, block edges, bits."""

import pytest
import torch

from amir_kernels import linear_logprob, linear_logprob_entropy, reference
from closeness import assert_as_good_as
from head_cases import option_cases, options_of, run, tensors, upstream


@pytest.fixture
def small_blocks(monkeypatch):
    """The kernels in blocks of the interpreter's size: 3 splits of 2 tiles at V = 301, 3 row tiles of 38 rows."""
    pytest.importorskip("triton")
    from amir_kernels import _linear_triton

    monkeypatch.setattr(_linear_triton, "config_of", lambda head, architecture: _linear_triton.Config(16, 64, 16, 4, 2))
    monkeypatch.setattr(_linear_triton, "SPLIT_COLUMNS", 128)


def judge_triton(inputs, target, grads, **options):
    """Results and gradients of the kernels, against the reference in the same dtype and in float64."""
    ours = run(linear_logprob_entropy, inputs, target, grads, backend="triton", **options)
    wide = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    eager = run(reference.linear_logprob_entropy, inputs, target, grads, **options)
    truth = run(reference.linear_logprob_entropy, wide, target, grads, **options)
    for name, value in ours.items():
        whole = [tensor.reshape(1, -1) for tensor in (value, eager[name], truth[name])]
        factor = 3.0 if value.dtype == torch.float32 else 2.0
        assert_as_good_as(kernel=whole[0], eager=whole[1], truth=whole[2], factor=factor, name=name)


@pytest.mark.parametrize(("temperature", "softcap", "scale", "rank", "kinds"), option_cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("small_blocks")
def test_triton_matches_the_reference(dtype, temperature, softcap, scale, rank, kinds):
    inputs, target = tensors(rank=rank, dtype=torch.float32)
    inputs = {name: value.detach().to(dtype).requires_grad_() for name, value in inputs.items()}
    options = options_of(temperature, softcap, scale, target, torch.float32)
    judge_triton(inputs, target, upstream(target, kinds), **options)


@pytest.mark.parametrize(
    ("rows", "hidden_size", "vocabulary"), [(1, 15, 63), (15, 16, 64), (17, 17, 65), (33, 33, 129)]
)
@pytest.mark.usefixtures("small_blocks")
def test_triton_around_the_block_edges(rows, hidden_size, vocabulary):
    inputs, target = tensors(
        rows=(rows,), hidden_size=hidden_size, vocabulary=vocabulary, dtype=torch.float32, ignored=0
    )
    target[0] = vocabulary - 1
    judge_triton(inputs, target, upstream(target), temperature=0.7)


@pytest.mark.usefixtures("small_blocks")
def test_triton_row_has_the_same_bits_in_any_company():
    inputs, target = tensors(rows=(50,), dtype=torch.float32, ignored=0)
    hidden, weight = inputs["hidden"].detach(), inputs["weight"].detach()
    whole = linear_logprob_entropy(hidden, weight, target, backend="triton")
    for rows in (slice(7, 8), slice(20, 50), torch.randperm(50)):
        part = linear_logprob_entropy(hidden[rows], weight, target[rows], backend="triton")
        for one, other in zip(part, whole, strict=True):
            assert torch.equal(one, other[rows])
    assert torch.equal(linear_logprob(hidden, weight, target, backend="triton"), whole.logprob)


@pytest.mark.usefixtures("small_blocks")
def test_triton_small_upstream_gradients_do_not_underflow_in_float16():
    """Loss gradients near 1e-6 times probabilities near 1e-3 lie below float16's smallest number."""
    inputs, target = tensors(rows=(20,), dtype=torch.float32, ignored=0)
    inputs = {n: v.detach().half() for n, v in inputs.items() if n != "bias"}
    inputs["hidden"] = (inputs["hidden"] / 8).requires_grad_()
    scaled = {}
    for scale in (1.0, 2.0**-20):
        value = linear_logprob(inputs["hidden"], inputs["weight"], target, backend="triton")
        scaled[scale] = torch.autograd.grad((value * scale).sum(), inputs["hidden"])[0].double() / scale
    assert (scaled[2.0**-20] - scaled[1.0]).norm() < 0.05 * scaled[1.0].norm()


@pytest.mark.usefixtures("small_blocks")
def test_triton_float32_hidden_states_with_a_float16_head():
    """The products take the wider dtype; each gradient comes back in its input's."""
    inputs, target = tensors(rows=(20,), dtype=torch.float32)
    inputs["weight"] = inputs["weight"].detach().half().requires_grad_()
    judge_triton(inputs, target, upstream(target), temperature=0.7)


@pytest.mark.usefixtures("small_blocks")
def test_triton_reads_a_transposed_head_in_place():
    inputs, target = tensors(rows=(20,), dtype=torch.float32)
    inputs["weight"] = inputs["weight"].detach().T.contiguous().T.requires_grad_()
    judge_triton(inputs, target, upstream(target))
