"""What a GPU asks of the ops, without one: the device of a launch, old cards, graphs, and the flags of products.

A GPU is stood in for by what the code asks of it: guards, capabilities and flags are recorded or replaced.
"""

import ast
import contextlib
import importlib
import itertools
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import amir_kernels._backend as backend
from amir_kernels import (
    group_advantage,
    linear_logprob,
    linear_logprob_entropy,
    linear_policy_loss,
    pair_logits,
    pass_at_k_advantage,
    preference_loss,
    reference,
)
from amir_kernels.linear_logprob import op as op_module
from amir_kernels.linear_logprob.head import Head, exact_products
from amir_kernels.linear_logprob.op import linear_logprob_op
from amir_kernels.linear_logprob.triton_tiles import TABLE, device_architecture, family, select_config
from amir_kernels.linear_logprob.vocabulary_shard import VocabularyShard
from head_cases import Products, precisions, run, tensors, upstream

# ---- the device of a launch ----------------------------------------------------------------------------------------


class Guards:
    """Stands in for `device_guard`: which tensor's device is the current one."""

    def __init__(self):
        self.current = None

    @contextlib.contextmanager
    def __call__(self, tensor):
        before, self.current = self.current, tensor.device
        try:
            yield
        finally:
            self.current = before


def launching_modules():
    """Those of the package with a call of the form `kernel[grid](...)`, whatever they are called."""
    import amir_kernels

    folder = Path(amir_kernels.__file__).parent
    for path in folder.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if any(isinstance(call.func, ast.Subscript) for call in calls):
            yield importlib.import_module(".".join(path.relative_to(folder.parent).with_suffix("").parts))


def test_every_launch_of_the_package_stands_under_a_device_guard(monkeypatch):
    """The launches are recorded instead of run, with the device that is the current one.

    The head's kernels get 16-bit operands whatever the vendor's products take, and no sums that the compiler fuses.
    """
    pytest.importorskip("triton")
    from amir_kernels.linear_logprob import triton_forward_gradients

    guards, launched, head = Guards(), {}, []
    modules = [module for module in launching_modules() if any(name.endswith("_kernel") for name in vars(module))]
    assert len(modules) >= 2
    for module in modules:
        monkeypatch.setattr(module, "device_guard", guards)
        for name in [name for name in vars(module) if name.endswith("_kernel")]:

            def launcher(*arguments, name=name, **options):
                launched.setdefault(name, set()).add(guards.current)
                if name in ("stats_kernel", "dlogits_kernel"):
                    head.append((arguments[0].dtype, options["enable_fp_fusion"]))
                elif name == "kept_dlogits_kernel":
                    head.append((torch.bfloat16, options["enable_fp_fusion"]))

            kernel = type("Kernel", (), {"__getitem__": lambda self, grid, launcher=launcher: launcher})()
            monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(triton_forward_gradients, "MIN_HIDDEN", 0)
    monkeypatch.setattr(triton_forward_gradients, "MIN_ROWS", 128)
    hidden, weight = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True), torch.randn(50, 16).bfloat16()
    target, options = torch.randint(50, (40,)), {"backend": "triton"}
    linear_logprob_entropy(hidden, weight, target, **options).entropy.sum().backward()
    rows = {"advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, 40]), "objective": "reinforce"}
    linear_policy_loss(hidden, weight, target, None, **rows, **options)
    group_advantage(torch.arange(8.0), 4, **options)
    pass_at_k_advantage(torch.tensor([0.0, 1, 0, 1]), 4, 2, **options)
    preference_loss(torch.zeros(8), torch.arange(8.0), 4, max_pairs_per_group=2, **options)
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert set(head) == {(torch.bfloat16, False)}
    assert launched == {name: {torch.device("cpu")} for name in kernels}


def test_the_guard_is_the_tensors_device():
    seen = backend.device_guard(SimpleNamespace(is_cuda=True, get_device=lambda: 3))
    assert isinstance(seen, torch.cuda.device)
    assert seen.idx == 3
    with backend.device_guard(torch.zeros(1)):
        pass


# ---- old cards -----------------------------------------------------------------------------------------------------


@pytest.fixture
def turing(monkeypatch):
    """A tensor on a card of compute capability 7.5."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    backend._log_once.cache_clear()
    return SimpleNamespace(is_cuda=True, dtype=torch.float16, device=torch.device("cuda:0"))


def test_triton_is_refused_below_ampere(turing):
    with pytest.raises(ValueError, match=r'backend="triton" .*: Tesla T4 has compute capability 7\.5, .* 8\.0 .*torch'):
        backend.use_triton("triton", turing)


def test_auto_takes_torch_below_ampere_and_says_so_once(turing, caplog):
    with caplog.at_level(logging.WARNING, "amir_kernels"):
        assert [backend.use_triton("auto", turing) for _ in range(3)] == [False] * 3
        assert not backend.use_triton("torch", turing)
    (record,) = caplog.records
    assert "Tesla T4 has compute capability 7.5" in record.message


def test_each_card_of_a_machine_has_its_own_capability(turing, monkeypatch):
    cards = {torch.device("cuda:0"): (7, 5), torch.device("cuda:1"): (10, 3)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: cards[device])
    newer = SimpleNamespace(is_cuda=True, dtype=torch.float16, device=torch.device("cuda:1"))
    assert [backend.use_triton("auto", tensor) for tensor in (turing, newer)] == [False, True]
    assert [device_architecture(device) for device in cards] == ["sm_75", "sm_103"]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 1)])
def test_auto_takes_triton_from_ampere_on(turing, monkeypatch, caplog, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert backend.use_triton("auto", turing)
    assert not caplog.records


def test_auto_takes_triton_on_rocm(turing, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert backend.use_triton("auto", turing)


def test_the_torch_backend_needs_no_bfloat16_for_float16(monkeypatch):
    """As on a card without it: anything of that dtype fails."""
    to = torch.Tensor.to

    def checked(tensor, *arguments, **options):
        assert torch.bfloat16 not in (*arguments, *options.values())
        return to(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", checked)
    inputs, target = tensors(dtype=torch.float32)
    half = {name: value.detach().half().requires_grad_() for name, value in inputs.items()}
    results = run(linear_logprob_entropy, half, target, upstream(target), backend="torch")
    assert all(value.isfinite().all() for value in results.values())


# ---- CUDA graphs ---------------------------------------------------------------------------------------------------


def test_the_ops_are_marked_as_unsafe_for_cuda_graphs():
    ops = [name for name in dir(torch.ops.amir_kernels) if name.startswith(("linear_logprob", "preference"))]
    assert len(ops) >= 4
    unsafe = {name for name in ops if torch.Tag.cudagraph_unsafe in getattr(torch.ops.amir_kernels, name).default.tags}
    assert set(ops) - unsafe == {"linear_logprob_hidden_grad_backward"}  # a product of two tensors
    assert linear_logprob_op._opoverload.tags


def test_a_capture_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tensor = SimpleNamespace(is_cuda=True)
    with pytest.raises(
        RuntimeError, match=r"^linear_logprob is called while a CUDA graph is captured, .*; capture the"
    ):
        backend.refuse_capture("linear_logprob", tensor)
    backend.refuse_capture("linear_logprob", torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backend.refuse_capture("linear_logprob", tensor)


def test_every_op_that_waits_for_the_gpu_asks_for_a_capture(monkeypatch):
    """`refuse_capture` is replaced in each module by one that always refuses."""
    import sys

    def refuse(op, tensor):
        raise RuntimeError(op)

    for name, module in list(sys.modules.items()):
        if name.startswith("amir_kernels") and "refuse_capture" in vars(module):
            monkeypatch.setattr(module, "refuse_capture", refuse)
    hidden, weight, target = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8), torch.arange(4)
    ids, rewards = torch.tensor([0, 0, 1, 1]), torch.tensor([0.0, 1, 0, 1])
    rows = {"advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, 4])}
    waiting = {
        "linear_logprob": lambda: linear_logprob(hidden, weight, target),
        "linear_logprob ": lambda: linear_policy_loss(hidden, weight, target, None, **rows),
        "group_advantage": lambda: group_advantage(rewards, 2),
        "pass_at_k_advantage": lambda: pass_at_k_advantage(rewards, 2, 1),
        "pair_logits": lambda: pair_logits(rewards, rewards, 2),
        "linear_logprob with a process_group": lambda: VocabularyShard.of("a group", weight),
        "preference_loss with group ids": lambda: preference_loss(rewards, rewards, ids),
        "preference_loss with max_pairs_per_group": lambda: preference_loss(rewards, rewards, 2, max_pairs_per_group=1),
    }
    for op, call in waiting.items():
        with pytest.raises(RuntimeError, match=f"^{op.strip()}$"):
            call()
    preference_loss(rewards, rewards, 2)  # it does not wait
    monkeypatch.undo()
    logprob = linear_logprob(hidden, weight, target)
    monkeypatch.setattr(op_module, "refuse_capture", refuse)
    with pytest.raises(RuntimeError, match=r"^The backward of linear_logprob$"):
        logprob.sum().backward()


@pytest.mark.parametrize("options", [{"backend": "inductor"}, {"backend": "inductor", "mode": "reduce-overhead"}])
def test_inductor_compiles_a_loss_with_the_ops(options):
    torch._dynamo.reset()
    weight, target = torch.randn(31, 8), torch.randint(31, (4, 3))

    def loss(hidden):
        return (linear_logprob_entropy(hidden * 2, weight, target).entropy * 0.5).sum()

    hidden = torch.randn(4, 3, 8, requires_grad=True)
    try:
        compiled = torch.compile(loss, fullgraph=True, **options)
        (got,) = torch.autograd.grad(compiled(hidden), hidden)
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"there is no C++ compiler: {error}")
    assert torch.allclose(got, torch.autograd.grad(loss(hidden), hidden)[0], atol=1e-6)


# ---- flags of products ---------------------------------------------------------------------------------------------

FLAGS = {
    "allow_fp16_accumulation": True,
    "allow_fp16_reduced_precision_reduction": True,
    "allow_bf16_reduced_precision_reduction": True,
}


class FlagsOf211:
    """torch.backends.cuda.matmul as older versions have it: without split_k, or without some of the flags."""

    def __init__(self, *absent):
        self.fp32_precision = "none"
        vars(self).update({name: value for name, value in FLAGS.items() if name not in absent})


def flags_now():
    flags = torch.backends.cuda.matmul
    split_k = [f"{name}_split_k" for name in FLAGS if "reduction" in name]
    return {name: getattr(flags, name) for name in (*FLAGS, *split_k, "fp32_precision", "allow_tf32")}


@pytest.fixture
def flags():
    """The flags that a user may have set; afterwards all are as by default."""
    before = {name: getattr(torch.backends.cuda.matmul, name) for name in FLAGS}
    yield torch.backends.cuda.matmul
    for name, value in before.items():
        setattr(torch.backends.cuda.matmul, name, value)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("accumulation", [False, True])
@pytest.mark.parametrize("reduction", [False, True, (False, False), (True, True)])
@pytest.mark.parametrize("tf32", [False, True])
def test_the_ops_neutralize_every_flag_and_put_it_back(flags, accumulation, reduction, tf32):
    flags.allow_fp16_accumulation = accumulation
    flags.allow_fp16_reduced_precision_reduction = flags.allow_bf16_reduced_precision_reduction = reduction
    flags.allow_tf32 = tf32
    before, other = flags_now(), torch.backends.mkldnn.matmul.fp32_precision
    with exact_products(torch.device("cpu")):
        inside = flags_now()
        assert not any(inside[name] for name in (*FLAGS, "allow_tf32")), inside
        assert inside["fp32_precision"] == "ieee"
    assert flags_now() == before
    assert torch.backends.mkldnn.matmul.fp32_precision == other


HEAD_OPS = {
    "linear_logprob": lambda hidden, weight, **options: linear_logprob(hidden, weight, torch.arange(4), **options),
    "linear_logprob_entropy": lambda hidden, weight, **options: (
        linear_logprob_entropy(hidden, weight, torch.arange(4), **options).entropy
    ),
    "linear_policy_loss": lambda hidden, weight, **options: (
        linear_policy_loss(
            hidden, weight, torch.arange(4), None, torch.ones(1), cu_seqlens=torch.tensor([0, 4]), **options
        ).loss
    ),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("op", HEAD_OPS)
def test_every_product_of_every_op_is_exact(flags, monkeypatch, op, trained, backend):
    """Forward and backward; what the user has set stands before and after them."""
    if backend == "triton":
        pytest.importorskip("triton")
    products = Products(monkeypatch, 1)
    torch.set_float32_matmul_precision("medium")
    before = precisions()
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=trained)
    HEAD_OPS[op](hidden, weight, backend=backend).sum().backward()
    assert precisions() == before
    assert products.seen
    assert set(products.seen) == {("ieee", "ieee")}


@pytest.mark.parametrize("later", ["ieee", "tf32"])
@pytest.mark.parametrize("outer", ["fp32_precision", "cudnn.fp32_precision"])
def test_what_a_backend_inherits_is_not_made_its_own(flags, outer, later):
    """A setting for all backends, or for all of CUDA, still reaches the products when it is changed after an op."""
    *path, name = outer.split(".")
    owner = getattr(torch.backends, path[0]) if path else torch.backends
    flags.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
    try:
        setattr(owner, name, {"ieee": "tf32", "tf32": "ieee"}[later])
        with exact_products(torch.device("cpu")):
            assert flags.fp32_precision == "ieee"
        setattr(owner, name, later)
        assert flags.fp32_precision == later
    finally:
        setattr(owner, name, "none")
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        flags.fp32_precision = "ieee"


def test_they_are_put_back_after_an_error_and_by_the_last_of_several_threads(flags):
    flags.allow_fp16_accumulation = True
    with contextlib.suppress(ZeroDivisionError), exact_products(torch.device("cpu")):
        raise ZeroDivisionError
    assert flags.allow_fp16_accumulation
    entered, left = threading.Barrier(2), threading.Event()

    def other():
        with exact_products(torch.device("cpu")):
            entered.wait(10)
            left.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    with exact_products(torch.device("cpu")):
        entered.wait(10)
    assert not flags.allow_fp16_accumulation
    left.set()
    thread.join()
    assert flags.allow_fp16_accumulation


@pytest.mark.parametrize("absent", [n for k in range(4) for n in itertools.combinations(FLAGS, k)])
def test_versions_without_a_flag_are_served(monkeypatch, absent):
    """The older interface of float32 products is not reached from here, so its part is left out."""
    from amir_kernels.linear_logprob import head

    older = FlagsOf211(*absent)
    monkeypatch.setattr(torch.backends.cuda, "matmul", older)
    with head._float32_sums():
        assert not any(getattr(older, name) for name in FLAGS if name not in absent)
    assert {name: getattr(older, name, None) for name in FLAGS} == {n: None if n in absent else True for n in FLAGS}


# ---- architectures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "member"),
    {
        "sm_80": "sm_80",
        "sm_86": "sm_86",
        "sm_89": "sm_89",
        "sm_90": "sm_90",
        "sm_100": "sm_100",
        "sm_101": "sm_100",
        "sm_103": "sm_100",
        "sm_110": "sm_100",
        "sm_120": "sm_120",
        "sm_121": "sm_120",
        "gfx940": "gfx942",
        "gfx942": "gfx942",
        "gfx950": "gfx942",
        "gfx1100": "gfx1100",
        "gfx1151": "gfx1100",
        "gfx1200": "gfx1100",
        "gfx1201": "gfx1100",
        "gfx90a": "gfx90a",
        "other": "other",
    }.items(),
)
def test_a_family_shares_the_rows_of_the_table(architecture, member):
    assert family(architecture) == member
    weight = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    for softcap in (None, 30.0):
        head = Head(weight, None, None, softcap, 1.0, torch.bfloat16)
        assert select_config(head, architecture) == select_config(head, member)
    known = any(name == member for name, _, _ in TABLE)
    assert known or select_config(head, architecture) == select_config(head, "other")


@pytest.mark.parametrize(("hidden_size", "hints"), [(2048, 2), (8192, 1)])
def test_inspect_compiles_a_head_above_2_gib_with_wide_offsets_on_amd(hidden_size, hints):
    """As Triton's launcher does: it looks at the bytes of each tensor."""
    pytest.importorskip("triton")
    from triton.backends.amd.compiler import HIPBackend

    from amir_kernels.inspect import specialization
    from amir_kernels.inspect.launches import VOCABULARY, head_launches

    weight = torch.empty(VOCABULARY, hidden_size, dtype=torch.bfloat16, device="meta")
    assert HIPBackend.is_within_2gb(weight) == (hints == 2)
    for launch in head_launches("gfx942", torch.bfloat16, hidden_size, VOCABULARY):
        if "weight" in launch.kernel.arg_names:
            found = specialization(launch, nvidia=False)[2]
            assert len(found[(launch.kernel.arg_names.index("weight"),)]) == hints
            assert len(found[(launch.kernel.arg_names.index("hidden"),)]) == 2


# ---- ROCm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_rocm_forms_no_product_of_16_bits_with_a_float32_result(monkeypatch, hip):
    """Operands are widened there, as on a CPU; the rounding to 16 bits before stays."""
    monkeypatch.setattr(torch.version, "hip", hip)
    head = Head(torch.empty(4, 4, dtype=torch.bfloat16), None, None, None, 1.0, torch.bfloat16)
    on_a_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    object.__setattr__(head, "weight", on_a_gpu)
    assert head.operand == (torch.float32 if hip else torch.bfloat16)
    assert head.compute == torch.bfloat16


# ---- removed tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_removed_token_needs_a_positive_scale(scale):
    """0 * -inf has no value, and a negative scale would make a removed token the only one."""
    inputs, target = tensors(dtype=torch.float32)
    bias = torch.zeros(inputs["weight"].shape[0])
    for ops in (linear_logprob, linear_logprob_entropy, reference.linear_logprob, reference.linear_logprob_entropy):
        assert torch.isfinite(ops(inputs["hidden"], inputs["weight"], target, bias=bias, logit_scale=scale)[0]).all()
        removed = bias.index_fill(0, torch.tensor([5]), -torch.inf)
        with pytest.raises(ValueError, match=r"bias must be finite where logit_scale is not positive, .*leave .* out"):
            ops(inputs["hidden"], inputs["weight"], target, bias=removed, logit_scale=scale)
