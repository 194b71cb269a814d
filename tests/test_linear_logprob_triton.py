"""linear_logprob's Triton kernels, interpreted, against the reference: every option, block edges, bits."""

import pytest
import torch

from amir_kernels import linear_logprob, linear_logprob_entropy, linear_policy_loss, reference
from amir_kernels.linear_logprob.triton_tiles import TABLE, Config, describable, select_config, vocabulary_splits
from closeness import assert_as_good_as
from head_cases import option_cases, options_of, run, tensors, upstream, use_tiles


@pytest.fixture(params=["pointers", "descriptors"])
def small_blocks(monkeypatch, request):
    """The shapes of the table at an eighth of their size, each by its own way to read operands."""
    shape = (16, 64, 16) if request.param == "pointers" else (16, 32, 16)
    use_tiles(monkeypatch, Config(*shape, 4, 2, descriptors=request.param == "descriptors"))


@pytest.fixture
def small_pointers(monkeypatch):
    """For rows that no tensor descriptor can read."""
    use_tiles(monkeypatch, Config(16, 64, 16, 4, 2))


def judge(ours, inputs, target, grads, **options):
    """Results and gradients against the reference in the same dtype and in float64."""
    wide = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    eager = run(reference.linear_logprob_entropy, inputs, target, grads, **options)
    truth = run(reference.linear_logprob_entropy, wide, target, grads, **options)
    for name, value in ours.items():
        whole = [tensor.reshape(1, -1) for tensor in (value, eager[name], truth[name])]
        factor = 1.5 if value.dtype == torch.float32 else 2.0
        assert_as_good_as(kernel=whole[0], eager=whole[1], truth=whole[2], factor=factor, name=name)


def judge_triton(inputs, target, grads, **options):
    ours = run(linear_logprob_entropy, inputs, target, grads, backend="triton", **options)
    judge(ours, inputs, target, grads, **options)


@pytest.mark.parametrize(("temperature", "softcap", "scale", "rank", "kinds"), option_cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("small_blocks")
def test_triton_matches_the_reference(dtype, temperature, softcap, scale, rank, kinds):
    inputs, target = tensors(rank=rank, dtype=torch.float32)
    inputs = {name: value.detach().to(dtype).requires_grad_() for name, value in inputs.items()}
    options = options_of(temperature, softcap, scale, target, torch.float32)
    judge_triton(inputs, target, upstream(target, kinds), **options)


EDGES = [
    (1, 15, 63),
    (15, 16, 64),
    (16, 17, 65),
    (17, 31, 127),
    (31, 32, 128),
    (32, 33, 129),
    (33, 1, 255),
    (47, 15, 256),
    (48, 16, 257),
]


@pytest.mark.parametrize(("rows", "hidden_size", "vocabulary"), EDGES)
@pytest.mark.usefixtures("small_pointers")
def test_triton_around_the_block_edges(rows, hidden_size, vocabulary):
    inputs, target = tensors((rows,), hidden_size, vocabulary, torch.float32, ignored=0)
    target[0] = vocabulary - 1
    judge_triton(inputs, target, upstream(target), temperature=0.7)


@pytest.mark.parametrize(("rows", "hidden_size", "vocabulary"), [(1, 12, 31), (16, 16, 32), (17, 20, 33), (33, 32, 97)])
def test_triton_descriptors_around_the_block_edges(monkeypatch, rows, hidden_size, vocabulary):
    use_tiles(monkeypatch, Config(16, 32, 16, 4, 2, descriptors=True), split=64)
    inputs, target = tensors((rows,), hidden_size, vocabulary, torch.float32, ignored=0)
    target[0] = vocabulary - 1
    judge_triton(inputs, target, upstream(target), temperature=0.7)


def shapes():
    """The distinct tiles of the table, as large as they are."""
    return sorted({(row.rows, row.columns, row.depth, row.descriptors) for row in TABLE.values()})


@pytest.mark.parametrize(("rows", "columns", "depth", "descriptors"), shapes())
def test_triton_in_the_tiles_of_the_table(monkeypatch, rows, columns, depth, descriptors):
    """Two row tiles, two splits, three vocabulary tiles, two steps of depth, each with a ragged end."""
    use_tiles(monkeypatch, Config(rows, columns, depth, 4, 2, descriptors=descriptors), split=2 * columns)
    inputs, target = tensors((rows + 3,), depth + 8, 2 * columns + 5, torch.float32, rank=3)
    inputs = {name: value.detach().half().requires_grad_() for name, value in inputs.items()}
    target[1:4] = torch.tensor([2 * columns + 4, columns, 0])
    judge_triton(inputs, target, upstream(target), temperature=0.7, softcap=6.0)


def test_triton_row_has_the_same_bits_in_any_company_and_from_any_program(monkeypatch):
    inputs, target = tensors(rows=(50,), dtype=torch.float32, ignored=0)
    hidden, weight = inputs["hidden"].detach(), inputs["weight"].detach()
    for descriptors in (False, True):
        config = Config(16, 64, 16, 4, 2, descriptors=descriptors)
        use_tiles(monkeypatch, config)
        whole = linear_logprob_entropy(hidden, weight, target, backend="triton")
        for rows in (slice(7, 8), slice(20, 50), torch.randperm(50)):
            part = linear_logprob_entropy(hidden[rows], weight, target[rows], backend="triton")
            for one, other in zip(part, whole, strict=True):
                assert torch.equal(one, other[rows])
        assert torch.equal(linear_logprob(hidden, weight, target, backend="triton"), whole.logprob)
        for programs, cache_bytes in ((1, 1), (7, 2**14), (100, 2**20)):
            use_tiles(monkeypatch, config, programs, cache_bytes)
            again = linear_logprob_entropy(hidden, weight, target, backend="triton", workspace_bytes=20_000)
            assert all(torch.equal(one, other) for one, other in zip(again, whole, strict=True))


MUTANTS = [
    "zero",
    "sign flipped",
    "mask ignored",
    "temperature forgotten",
    "softmax term dropped",
    "tail columns counted",
    "cap's derivative dropped",
]


def mutated(inputs, target, grad, temperature, softcap, mutant):
    """d hidden and d weight of sum(grad * logprob) by the formula in float64, right or wrong in one way."""
    hidden, weight, bias = (inputs[name].detach().double() for name in ("hidden", "weight", "bias"))
    cap = torch.tanh((hidden @ weight.T + bias) / softcap)
    z = softcap * cap / temperature
    tail = z.new_zeros(len(z), 19 if mutant == "tail columns counted" else 0)
    probs = torch.cat([z, tail], dim=1).softmax(-1)[:, : z.shape[1]]
    onehot = torch.zeros_like(z).scatter_(1, target.clamp(min=0)[:, None], 1.0)
    keep = torch.ones_like(grad) if mutant == "mask ignored" else (target >= 0).double()
    heat = 1.0 if mutant == "temperature forgotten" else temperature
    slope = 1.0 if mutant == "cap's derivative dropped" else 1 - cap**2
    out = (grad * keep / heat)[:, None] * (onehot - (0 if mutant == "softmax term dropped" else probs)) * slope
    out = {"zero": 0 * out, "sign flipped": -out}.get(mutant, out)
    return {"d hidden": out @ weight, "d weight": out.T @ hidden}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mutant", ["none", *MUTANTS])
def test_the_comparison_used_here_rejects_wrong_gradients(dtype, mutant):
    inputs, target = tensors(rows=(38,), dtype=torch.float32)
    inputs["bias"] = inputs["bias"].detach() - 6
    inputs = {name: value.detach().to(dtype).requires_grad_() for name, value in inputs.items()}
    grads = upstream(target, "l")
    for name, value in mutated(inputs, target, grads[0], 0.7, 9.0, mutant).items():
        judged = {name: value.to(dtype)}
        if mutant == "none":
            judge(judged, inputs, target, grads, temperature=0.7, softcap=9.0)
        else:
            with pytest.raises(AssertionError, match="allowed"):
                judge(judged, inputs, target, grads, temperature=0.7, softcap=9.0)


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


@pytest.mark.usefixtures("small_pointers")
def test_triton_float32_hidden_states_with_a_float16_head():
    """The products take the wider dtype; each gradient comes back in its input's."""
    inputs, target = tensors(rows=(20,), dtype=torch.float32)
    inputs["weight"] = inputs["weight"].detach().half().requires_grad_()
    judge_triton(inputs, target, upstream(target), temperature=0.7)


@pytest.mark.usefixtures("small_pointers")
def test_triton_reads_a_transposed_head_in_place():
    inputs, target = tensors(rows=(20,), dtype=torch.float32)
    inputs["weight"] = inputs["weight"].detach().T.contiguous().T.requires_grad_()
    judge_triton(inputs, target, upstream(target))


EMPTY = [(0, 16, 70, 0), (5, 16, 70, 5), (5, 0, 70, 0), (5, 0, 70, 5), (0, 0, 70, 0), (5, 16, 1, 2), (1, 0, 1, 0)]


@pytest.mark.parametrize(("rows", "hidden_size", "vocabulary", "ignored"), EMPTY)
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.usefixtures("small_pointers")
def test_triton_sizes_of_nothing_and_one(rows, hidden_size, vocabulary, ignored, everything):
    """No rows, none that counts, no hidden size, one token: results and all gradients are the reference's."""
    inputs = {"hidden": torch.randn(rows, hidden_size), "weight": torch.randn(vocabulary, hidden_size)}
    if everything:
        inputs |= {"bias": torch.randn(vocabulary), "a": torch.randn(2, hidden_size), "b": torch.randn(vocabulary, 2)}
    inputs = {name: value.requires_grad_() for name, value in inputs.items()}
    target = torch.arange(rows) % vocabulary
    target[:ignored] = -100
    options = {"temperature": torch.rand(rows) + 0.5, "softcap": 3.0} if everything else {}
    grads = [torch.linspace(-1, 2, rows)] * 3
    ours = run(linear_logprob_entropy, inputs, target, grads, backend="triton", **options)
    theirs = run(reference.linear_logprob_entropy, inputs, target, grads, **options)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=name)
    if ignored == rows:
        assert all((value == 0).all() for value in ours.values())
    alone = linear_logprob(inputs["hidden"], inputs["weight"], target, backend="triton")
    expected = reference.linear_logprob(inputs["hidden"], inputs["weight"], target)
    torch.testing.assert_close(alone, expected)


@pytest.mark.parametrize("weight", [torch.empty(0, 16), torch.empty(0)])
def test_triton_refuses_an_empty_shard_with_the_way_out(weight):
    hidden, target = torch.randn(5, 16), torch.zeros(5, dtype=torch.int64)
    rows = {"advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, 5])}
    for call in (
        lambda: linear_logprob(hidden, weight, target, backend="triton"),
        lambda: linear_logprob_entropy(hidden, weight, target, backend="triton"),
        lambda: linear_policy_loss(hidden, weight, target, None, **rows, backend="triton"),
    ):
        with pytest.raises(ValueError, match=r"empty shard of shape .*gather it first.*GatheredParameters"):
            call()


# ---- launches ------------------------------------------------------------------------------------------------------


def head_of(weight, **parts):
    from amir_kernels.linear_logprob.head import Head

    return Head(weight, None, parts.get("lora"), parts.get("softcap"), 1.0, parts.get("compute", weight.dtype))


def test_descriptors_read_what_their_alignment_allows():
    weight = torch.zeros(40, 24, dtype=torch.bfloat16)
    assert describable(head_of(weight))
    assert not describable(head_of(weight[:, :23]))
    assert not describable(head_of(weight.T))
    assert not describable(head_of(weight[:1].expand(40, 24)))
    assert not describable(head_of(weight.view(-1)[1:-23].view(39, 24)))
    assert not describable(head_of(weight, compute=torch.float32))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100", "other"])
def test_the_table_has_a_row_for_every_head_that_depends_on_nothing_else(architecture):
    weight = torch.zeros(40, 24, dtype=torch.bfloat16)
    for head in (head_of(weight), head_of(weight.T), head_of(weight, softcap=30.0), head_of(weight.float())):
        config = select_config(head, architecture)
        assert config.descriptors <= describable(head)
        splits, each = vocabulary_splits(151_936, config)
        assert (splits - 1) * each * config.columns < 151_936 <= splits * each * config.columns


def test_programs_are_no_more_than_run_at_once():
    from amir_kernels.linear_logprob.triton_backend import program_count, row_tiles_per_group

    config = Config(128, 256, 64, 8, 4)
    assert [program_count(items, config, 132) for items in (0, 1, 132, 10**9)] == [1, 1, 132, 132]
    assert [row_tiles_per_group(hidden, 2, config, 50 * 10**6) for hidden in (0, 576, 3584, 10**6)] == [
        65_104,
        113,
        18,
        1,
    ]


def test_forward_blocks_stay_in_the_workspace():
    from amir_kernels.linear_logprob.tiling import scratch_bytes
    from amir_kernels.linear_logprob.triton_backend import forward_rows

    head = head_of(torch.empty(151_936, 3584, dtype=torch.bfloat16, device="meta"))
    for workspace in (0, 10**6, 2**28):
        tall = forward_rows(head, 2**22, workspace, 38)
        assert tall >= 16
        assert tall == 16 or tall * (3584 * head.operand.itemsize + 12 * 38) <= scratch_bytes(head, 2**22, workspace)


@pytest.mark.usefixtures("small_pointers")
def test_triton_offsets_beyond_32_bits():
    """A head whose last rows start 2^31 entries away; only the pages that are read exist."""
    stride = 2**26
    storage = torch.empty(33 * stride, dtype=torch.float16)
    inputs, target = tensors(rows=(5,), hidden_size=16, vocabulary=33, dtype=torch.float32, ignored=0)
    target[0] = 32
    far = storage.as_strided((33, 16), (stride, 1))
    far.copy_(inputs["weight"].detach())
    hidden, near = inputs["hidden"].detach().half(), far.clone()
    for one, other in zip(
        *(linear_logprob_entropy(hidden, w, target, backend="triton") for w in (far, near)), strict=True
    ):
        assert torch.equal(one, other)


def test_triton_dlogits_offsets_beyond_32_bits():
    """48 rows of 2^26 columns: T * V above 2^31. Only the first tile of columns is launched."""
    pytest.importorskip("triton")
    from amir_kernels.linear_logprob import triton_backend

    rows, width, hidden_size = 48, 2**26, 16
    config = Config(16, 64, 16, 4, 2)
    weight = torch.randn(1, hidden_size, dtype=torch.float16).expand(width, hidden_size)
    hidden, numbers = torch.randn(rows, hidden_size), torch.ones(rows)
    dlogits = torch.empty(rows * width, dtype=torch.float16).view(rows, width)
    triton_backend.dlogits_kernel[(3,)](
        *(hidden, weight, hidden, numbers, numbers, torch.full((rows,), -1), numbers),
        *(numbers, numbers, numbers, numbers, dlogits, rows, hidden_size, width, 0, 1, 0, 0, width, 1.0, 1.0),
        **triton_backend.kernel_options(head_of(weight), config, False),
    )
    expected = torch.exp(hidden.half().double() @ weight[0].double() - 1).half()
    torch.testing.assert_close(dlogits[:, 0], expected, rtol=2e-3, atol=0)
    assert torch.equal(dlogits[:, :64], dlogits[:, :1].expand(rows, 64))
