"""The drop-ins for Liger, CCE and verl beside the peers, each run where it is installed; and what they refuse."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from amir_kernels import linear_logprob
from amir_kernels.integrations import cce, liger, verl
from dropins import B, H, L, V, error, head


def test_the_kernels_and_the_integrations_import_no_peer():
    code = (
        "import sys, amir_kernels\n"
        "assert not any(name.startswith('amir_kernels.integrations') for name in sys.modules)\n"
        "import amir_kernels.integrations.cce, amir_kernels.integrations.liger\n"
        "import amir_kernels.integrations.trl, amir_kernels.integrations.verl\n"
        "peers = {'trl', 'verl', 'liger_kernel', 'cut_cross_entropy', 'transformers'} & sys.modules.keys()\n"
        "assert not peers, peers\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


DOCUMENT = Path(__file__).parents[1] / "docs" / "drop-ins.md"


def replacements():
    """Lines before and after of each diff that the documents print, by the first peer they import."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    for block in re.findall(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        before, after = ([line[1:] for line in block.splitlines() if line[0] in kept] for kept in ("- ", "+ "))
        yield pytest.param(before, after, id=re.search(r"(?:from|import) (?!amir)(\w+)", block)[1])


@pytest.mark.parametrize(("before", "after"), list(replacements()))
def test_the_printed_replacement_is_one(before, after, monkeypatch):
    """Run as printed: the names that the lines before bind are bound to ours after."""
    if any("verl" in line for line in after):
        for module in {m for line in after for m in re.findall(r"verl[.\w]*(?=[,\n]|$)", line.partition("=")[0])}:
            for depth in range(1, module.count(".") + 2):
                name = ".".join(module.split(".")[:depth])
                monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
                if depth > 1:
                    parent, _, child = name.rpartition(".")
                    setattr(sys.modules[parent], child, sys.modules[name])
    elif any("grpo_trainer" in line for line in after):
        pytest.importorskip("trl", reason="needs the extra `bench`")
    found = {}
    exec("\n".join(after), found)
    if not before:
        heads, kernel = (sys.modules[f"verl.utils.{name}"] for name in ("experimental.torch_functional", "kernel"))
        assert heads.FusedLinearForPPO is verl.FusedLinearForPPO
        assert kernel.linear_cross_entropy.linear_cross_entropy is verl.linear_cross_entropy
        return
    (name,) = re.findall(r"import (\w+)$", before[0])
    assert "amir_kernels" in found[name].__module__
    module = before[0].split()[1]
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        assert hasattr(importlib.import_module(module), name)


# ---- Liger ---------------------------------------------------------------------------------------------------------


LIGER_CASES = [
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    {"loss_type": "bnpo", "delta": 1.4, "beta": 0.0},
    {"loss_type": "dr_grpo", "max_completion_length": 13},
    {},
    {"beta": 0.1, "use_bias_correction_kl": True, "chunk_size": 2},
    {"loss_type": "cispo", "epsilon_high": 1.3},
    {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0},
    {"loss_type": "vespo", "vespo_k_pos": 1.5, "beta": 0.0},
]


def liger_inputs():
    hidden, weight, target = head()
    mask = (torch.rand(B, L) > 0.25).long()
    mask[2] = 0  # a row without tokens
    bias = torch.randn(V, requires_grad=True)
    logits = (hidden @ weight.T + bias).detach() / 0.7
    logprobs = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    old, ref = (logprobs + 0.3 * torch.randn(B, L) for _ in range(2))
    return (hidden, weight, target, mask, torch.randn(B)), bias, old, ref


def liger_results(loss, inputs, bias, **call):
    value, metrics = loss(*inputs, bias=bias, **call)
    return [value, *metrics, *torch.autograd.grad(value, (*inputs[:2], bias))]


@pytest.mark.parametrize("options", LIGER_CASES, ids=str)
def test_liger_loss_metrics_and_gradients(options):
    peer = pytest.importorskip("liger_kernel.chunked_loss", reason="needs liger-kernel, of the extra `gpu`")
    inputs, bias, old, ref = liger_inputs()
    options = {"temperature": 0.7, "compiled": False} | options
    calls = [{"old_per_token_logps": old, "ref_per_token_logps": ref}, {"ref_per_token_logps": ref}]
    if options.get("loss_type") != "vespo":
        calls.append(calls[0] | {"vllm_is_ratio": torch.rand(B, 1) + 0.5})
    if options.get("loss_type") not in ("vespo", "luspo"):
        calls.append(calls[0] | {"vllm_is_ratio": torch.rand(B, L) + 0.5})
    calls.append(calls[0] | {"num_items_in_batch": 50})
    for call in calls:
        ours = liger_results(liger.FusedGRPOLoss(**options), inputs, bias, **call)
        theirs = liger_results(peer.LigerFusedLinearGRPOLoss(**options), inputs, bias, **call)
        assert error(ours, theirs) < 3e-5, call.keys()


def test_liger_reference_from_its_own_hidden_states():
    peer = pytest.importorskip("liger_kernel.chunked_loss", reason="needs liger-kernel, of the extra `gpu`")
    inputs, bias, old, _ = liger_inputs()
    reference = {"ref_input": torch.randn(B, L, H), "ref_weight": torch.randn(V, H), "ref_bias": torch.randn(V)}
    call = {"old_per_token_logps": old} | reference
    ours = liger_results(liger.FusedGRPOLoss(beta=0.1), inputs, bias, **call)
    theirs = liger_results(peer.LigerFusedLinearGRPOLoss(beta=0.1, compiled=False), inputs, bias, **call)
    assert error(ours, theirs) < 3e-5
    without = liger_results(liger.FusedGRPOLoss(beta=0.0), inputs, bias, **call)
    assert abs(ours[0] - without[0]) > 1e-3


def test_liger_cispo_counts_what_is_bounded_with_a_positive_advantage():
    """Half the ratios above the bound, and of these one in two with a positive advantage."""
    hidden, weight, target = head()
    old = linear_logprob(hidden, weight, target).detach()
    old[:, ::2] -= 1.0
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss = liger.FusedGRPOLoss(loss_type="cispo", epsilon_high=2.0, beta=0.0, use_ref_model=False)
    _, (clipped,) = loss(hidden, weight, target, torch.ones(B, L), advantages, old_per_token_logps=old)
    assert clipped == pytest.approx(0.5 * 4 / 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of .*, got 'ppo'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of .*, got 'word'"),
        ({"loss_type": "luspo"}, "padded width"),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "padded width"),
        (
            {"loss_type": "sapo", "importance_sampling_level": "sequence"},
            'importance_sampling_level="sequence" .*Liger refuses it too; call linear_logprob and policy_loss',
        ),
        ({"loss_type": "vespo", "use_bias_correction_kl": True}, "use_bias_correction_kl"),
        (
            {"loss_type": "cispo", "delta": 2.0, "epsilon_high": 5.0},
            "delta=2.0 with loss_type='cispo' is not supported: .*; call linear_logprob",
        ),
        ({"loss_type": "dr_grpo"}, "max_completion_length, got None; pass it"),
        ({"use_ref_model": False}, "beta=0.04 with use_ref_model=False is not supported: the KL needs"),
    ],
)
def test_liger_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        liger.FusedGRPOLoss(**options)


def test_liger_refusals_in_the_call():
    inputs, bias, *_ = liger_inputs()
    with pytest.raises(TypeError, match="unknown"):
        liger.FusedGRPOLoss(unknown=1)
    with pytest.raises(ValueError, match=r"needs ref_per_token_logps, .* got neither; pass them"):
        liger.FusedGRPOLoss()(*inputs, bias=bias)
    alone = {"beta": 0.0, "use_ref_model": False}
    with pytest.raises(ValueError, match=r"vllm_is_ratio .* is not supported: .*; call linear_logprob"):
        liger.FusedGRPOLoss(loss_type="vespo", **alone)(*inputs, vllm_is_ratio=torch.ones(B))
    luspo = liger.FusedGRPOLoss(loss_type="luspo", importance_sampling_level="sequence", **alone)
    with pytest.raises(ValueError, match=r"vllm_is_ratio .* is not supported: .*; call linear_logprob"):
        luspo(*inputs, vllm_is_ratio=torch.ones(B, L))
    hidden, weight, ids, mask, advantages = inputs
    with pytest.raises(ValueError, match=r"must hold 0 and 1 only .*, got 0.5"):  # a factor on the loss in Liger
        liger.FusedGRPOLoss(**alone)(hidden, weight, ids, mask * 0.5, advantages)


# ---- Cut Cross Entropy ---------------------------------------------------------------------------------------------


@pytest.fixture
def cut():
    """CCE's function on its torch back end, eager: its kernels want a GPU, and compiling it would take minutes."""
    peer = pytest.importorskip("cut_cross_entropy", reason="cut-cross-entropy is not installed")
    with torch.compiler.set_stance("force_eager"):
        yield lambda *tensors, **options: peer.linear_cross_entropy(*tensors, impl="torch_compile", **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cce_loss_and_gradients(cut, reduction, shift, softcap):
    e, c, targets = head()
    targets[0, :3] = targets[1, -1] = targets[3] = -100
    options = {"reduction": reduction, "shift": shift, "softcap": softcap}
    upstream, results = torch.rand(B, L - shift), []
    for function in (cce.linear_cross_entropy, cut):
        loss = function(e, c, targets, **options)
        total = (loss * upstream).sum() if reduction == "none" else loss
        results.append([loss, *torch.autograd.grad(total, (e, c))])
    assert error(*results) < 1e-5


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cce_against_logits(reduction, shift, softcap):
    """What CCE's documents say it computes, also where CCE is not installed."""
    e, c, targets = head()
    targets[0, :3] = targets[1, -1] = targets[3] = -100
    steps = int(shift)
    logits = e[:, : L - steps] @ c.T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    plain = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets[:, steps:], reduction=reduction)
    ours = cce.linear_cross_entropy(e, c, targets, reduction=reduction, shift=shift, softcap=softcap)
    upstream = torch.rand(ours.shape)
    results = [[loss, *torch.autograd.grad((loss * upstream).sum(), (e, c))] for loss in (ours, plain)]
    assert error(*results) < 1e-5


def test_cce_bias_and_longer_shift():
    """Of CCE's later versions: against logits."""
    e, c, targets = head()
    bias = torch.randn(V, requires_grad=True)
    targets[0, 4] = -100
    ours = cce.linear_cross_entropy(e, c, targets, bias=bias, shift=2)
    logits = e[:, :-2] @ c.T + bias
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 2:].flatten())
    ours, plain = ([loss, *torch.autograd.grad(loss, (e, c, bias))] for loss in (ours, plain))
    assert error(ours, plain) < 1e-5


def test_cce_without_targets_that_count(cut):
    e, c, targets = head()
    ignored = torch.full_like(targets, -100)
    assert cce.linear_cross_entropy(e, c, ignored).isnan()
    assert cut(e, c, ignored).isnan()
    assert cce.linear_cross_entropy(e, c, ignored, reduction="sum") == 0


def test_cce_every_engine_of_the_peer_is_this_one():
    """CCE's `impl` chooses among engines that compute the same loss."""
    e, c, targets = head()
    expected = cce.linear_cross_entropy(e, c, targets)
    for impl in ("cce", "cce_exact", "torch_compile", None):
        ours = cce.linear_cross_entropy(e, c, targets, impl=impl, return_lse=False, vocab_parallel_options=None)
        assert torch.equal(ours, expected)


def test_cce_refusals():
    e, c, targets = head()
    with pytest.raises(ValueError, match=r"reduction must be one of .*, got 'median'"):
        cce.linear_cross_entropy(e, c, targets, reduction="median")
    for shift in (-1, L):
        with pytest.raises(ValueError, match=rf"shift must lie in .*, got {shift}"):
            cce.linear_cross_entropy(e, c, targets, shift=shift)
    with pytest.raises(TypeError, match=r"shift must be an int, got float"):
        cce.linear_cross_entropy(e, c, targets, shift=1.5)
    for options in ({"return_lse": True}, {"vocab_parallel_options": object()}):
        with pytest.raises(
            ValueError, match=r"not supported; call linear_logprob_entropy, which returns lse and takes"
        ):
            cce.linear_cross_entropy(e, c, targets, **options)
    with pytest.raises(TypeError, match="positional"):
        cce.linear_cross_entropy(e, c, targets, -100)


# ---- verl ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl_functional():
    """verl's file of the torch head by its path: importing verl itself needs ray."""
    spec = importlib.util.find_spec("verl")
    if spec is None:
        pytest.skip("verl is not installed")
    path = Path(spec.submodule_search_locations[0]) / "utils" / "experimental" / "torch_functional.py"
    spec = importlib.util.spec_from_file_location("verl_torch_functional", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat", [False, True])
def test_verl_fused_linear_for_ppo(verl_functional, dtype, flat):
    hidden, weight, labels = head(dtype)
    upstream, results = torch.rand(2, B, L), []
    if flat:
        labels, upstream = labels.flatten().to(torch.int32), upstream.flatten(1)
    for module in (verl, verl_functional):
        states = hidden.flatten(0, 1) if flat else hidden
        logprob, entropy = module.FusedLinearForPPO(chunk_size=5)(states, weight, labels, 0.7)
        loss = (upstream[0] * logprob).sum() + (upstream[1] * entropy).sum()
        results.append([logprob, entropy, *torch.autograd.grad(loss, (hidden, weight))])
    assert error(*results) < (1e-5 if dtype == torch.float32 else 3e-2)


def test_verl_linear_cross_entropy(verl_functional):
    """verl's kernel needs a GPU; its torch head is the same function, so results are flat and float32 here."""
    hidden, weight, labels = head()
    upstream, results = torch.rand(2, B * L), []
    theirs = verl_functional.FusedLinearForPPO()(hidden, weight, labels, 0.7)
    for logprob, entropy in (
        verl.linear_cross_entropy(hidden, weight, labels, 0.7, "none", None),
        tuple(value.flatten() for value in theirs),
    ):
        loss = (upstream[0] * logprob).sum() + (upstream[1] * entropy).sum()
        results.append([logprob, entropy, *torch.autograd.grad(loss, (hidden, weight))])
    assert error(*results) < 1e-5
    for reduction, expected in (("sum", theirs[0].sum()), ("MEAN", theirs[0].mean())):
        logprob, entropy = verl.linear_cross_entropy(hidden, weight, labels.flatten(), 0.7, reduction)
        assert error([logprob, entropy], [expected, theirs[1].flatten()]) < 1e-5


def test_verl_heads_against_logits():
    """Log-prob and entropy, shapes and dtypes, also where verl is not installed."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        hidden, weight, labels = head(dtype)
        log_p = ((hidden.float() @ weight.float().T) / 0.7).log_softmax(-1)
        plain = [log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)]
        upstream, results = torch.rand(2, B, L), []
        for logprob, entropy in (
            [plain[0], plain[1].to(dtype)],
            verl.FusedLinearForPPO()(hidden, weight, labels, 0.7),
            [x.view(B, L) for x in verl.linear_cross_entropy(hidden, weight, labels, 0.7)],
        ):
            loss = (upstream[0] * logprob).sum() + (upstream[1] * entropy).sum()
            results.append([logprob, entropy, *torch.autograd.grad(loss, (hidden, weight), retain_graph=True)])
        results[2][1] = results[2][1].to(dtype)  # float32 from this one, as from verl's kernel
        assert max(error(found, results[0]) for found in results[1:]) < tolerance


def test_verl_refusals():
    hidden, weight, labels = head()
    with pytest.raises(ValueError, match=r"reduction must be one of .*, got 'max'"):
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, "max")
    with pytest.raises(NotImplementedError, match=r"2 ranks and supports one rank; use linear_logprob_entropy"):
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, "none", SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match=r"impl_backend must be one of .*, got 'triton'"):
        verl.FusedLinearForPPO(impl_backend="triton")
    with pytest.raises(ValueError, match="target must lie in"):
        verl.FusedLinearForPPO()(hidden, weight, labels + V)
