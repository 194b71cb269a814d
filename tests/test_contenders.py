"""Each contender of each benchmark is what its name says: who forms all logits, whose head computes, who packs.

Nothing is timed. Operators are seen by a dispatch mode, and what an operator allocates inside by torch's profiler.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny

pytest.importorskip("rich")

BENCH = Path(__file__).parents[1] / "bench"
OWN = "amir_kernels::"

pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="the sources are not here: a wheel is tested")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a script of bench/ as the scripts import each other."""
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = set(sys.modules)
    yield importlib.import_module
    for name in {path.stem for path in BENCH.glob("*.py")} - before:
        sys.modules.pop(name, None)


class Seen(TorchDispatchMode):
    """Names of the operators that were called, and shapes and dtypes of what they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()
        self.formed: set[tuple[tuple[int, ...], torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators.add(func.name())
        self.formed |= {
            (tuple(leaf.shape), leaf.dtype)
            for leaf in torch.utils._pytree.tree_leaves(out)
            if isinstance(leaf, torch.Tensor)
        }
        return out

    @property
    def own(self) -> set[str]:
        """The operators of this project."""
        return {name.removeprefix(OWN).partition(".")[0] for name in self.operators if name.startswith(OWN)}


def largest_allocation(work: Callable[[], object]) -> int:
    """Bytes of the largest piece of memory that `work` allocates at once, inside of operators too."""
    work()  # what is imported or compiled at the first call is not counted
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    return max(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")


# ---- the head -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_only_full_logits_form_all_logits(script, monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    """By the largest allocation, with a vocabulary that is more than twice TRL's chunk."""
    pytest.importorskip("trl")
    bench, made = script("bench_linear_logprob"), script("contenders")
    for place in ("tiling", "forward_gradients"):
        module = importlib.import_module(f"amir_kernels.linear_logprob.{place}")
        monkeypatch.setitem(module.DEFAULT_WORKSPACE_BYTES, "cpu", 2**20)
    problem = made.make_problem(made.HeadSize("tiny", 4, 2 * made.trl_default_chunk() + 7), 3, 8, torch.float32)
    problem = problem.with_trained_head() if trained else problem
    all_logits = problem.target.numel() * problem.weight.shape[0] * 4
    contenders = bench.peers(4096) | {bench.OURS: made.ours, bench.FUSED: made.ours_fused}
    contenders.pop(bench.LIGER_COMPILED, None)  # the compiled form of the same code
    largest = {
        name: largest_allocation(lambda loss=loss: made.gradients(loss, problem)) for name, loss in contenders.items()
    }
    assert {name for name, size in largest.items() if size >= all_logits} == {bench.FULL}
    assert {bench.FULL, bench.TRL_DEFAULT, bench.TRL_BEST, bench.OURS, bench.FUSED} <= set(largest)


def test_only_ours_compute_with_our_ops(script) -> None:
    pytest.importorskip("trl")
    bench, made = script("bench_linear_logprob"), script("contenders")
    problem = made.make_problem(made.HeadSize("tiny", 8, 300), 2, 8, torch.float32)
    contenders = bench.peers(128) | {bench.OURS: made.ours, bench.FUSED: made.ours_fused}
    contenders.pop(bench.LIGER_COMPILED, None)
    own = {}
    for name, loss in contenders.items():
        with Seen() as seen:
            made.gradients(loss, problem)
        own[name] = seen.own
    assert {name for name, ops in own.items() if ops} == {bench.OURS, bench.FUSED}
    assert any("linear_logprob" in op for op in own[bench.OURS])
    assert own[bench.FUSED] != own[bench.OURS]


def test_the_contenders_for_gpus_are_those_of_the_head(script) -> None:
    """Those that run on a CPU; the others need Triton or their own packages."""
    peers, made = script("gpu_stages.op_peers").PEERS, script("contenders")
    assert peers["full logits"].make() is made.full_logits
    problem = made.make_problem(made.HeadSize("tiny", 8, 300), 2, 8, torch.float32)
    for name in ("TRL", "Liger"):
        with Seen() as seen:
            made.gradients(peers[name].make(), problem)
        assert not seen.own


# ---- memory of a step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_counted_heads_form_all_logits_or_none(script, monkeypatch: pytest.MonkeyPatch, checkpointed: bool) -> None:
    """In the reference pass and in training, whose log-probs come with an entropy."""
    pytest.importorskip("bitsandbytes")
    bench = script("bench_memory")
    setting = bench.Setting("tiny", checkpointing=checkpointed, prompt=6, completion=10, rows=4, micro_batch_tokens=200)
    logits, seen = (setting.rows * setting.completion, bench.model_config(setting).vocab_size), {}

    class Watched(bench.Live):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with seen[head]:
                return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(bench, "Live", Watched)
    for head in bench.HEADS:
        seen[head] = Seen()
        bench.count(bench.replace(setting, head=head))
    for head, dtype in (("full logits, float32", torch.float32), ("full logits, bfloat16", torch.bfloat16)):
        assert (logits, dtype) in seen[head].formed
        assert "aten::_log_softmax_backward_data" in seen[head].operators, "training must go through these logits"
        assert not {op for op in seen[head].own if op.startswith("linear_logprob")}
    assert (logits, torch.float32) not in seen["full logits, bfloat16"].formed
    assert not {shape for shape, _ in seen["amir"].formed if shape == logits}
    assert {"linear_logprob", "linear_logprob_backward"} <= seen["amir"].own
    assert set(bench.HEADS) == set(seen)


# ---- whole passes --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model with its tokenizer, in place of SmolLM2."""
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_trls_trainer_has_its_own_head_and_ours_has_the_op(script, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    bench = script("bench_trl")
    size, own = bench.Size(bench.ROWS, 4, 6), {}
    for name, trainer in bench.make_trainers(tmp_path, tiny.model, tiny.tokenizer()).items():
        for part, work in (("loss", lambda t: bench.train(t, 0, size)), ("log-probs", lambda t: bench.score(t, size))):
            with Seen() as seen:
                work(trainer)
            own[name, part] = bool(seen.own)
    assert own == {
        (name, part): name == bench.OURS for name in (bench.RIVAL, bench.OURS) for part in ("loss", "log-probs")
    }


def test_a_step_of_trl_is_trls_and_a_step_of_amir_is_ours(script, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("trl")
    bench = script("bench_step")
    workload = bench.replace(bench.WORKLOADS["sums"], prompts=2, new_tokens=5)
    settings = bench.Settings(steps=1, threads=1, random_rewards=True, workload=workload)
    monkeypatch.setitem(bench.WORKLOADS, "sums", workload)

    def load_model() -> tuple[Any, Any]:
        made = tiny.model()
        made.config.max_position_embeddings = 2048
        return made, tiny.tokenizer()

    monkeypatch.setattr(bench, "load_model", load_model)
    own, rows = {}, {}
    for contender in bench.CONTENDERS:
        with Seen() as seen, forward_rows() as largest:
            run = bench.run_trl if contender.startswith("trl") else bench.run_amir
            run(contender, settings, tmp_path / contender)
        own[contender], rows[contender] = seen.own, max(largest)
    assert not own["trl"] | own["trl-checkpointing"]
    assert all(any("linear_logprob" in op for op in own[name]) for name in own if name.startswith("amir"))
    assert {name for name, ops in own.items() if any("preference" in op for op in ops)} == {"amir-pairs"}
    assert rows["amir-completions"] < rows["amir"]


@contextmanager
def forward_rows() -> Iterator[list[int]]:
    """Tokens of each pass of a Llama that records a graph."""
    from transformers import LlamaModel

    forward, seen = LlamaModel.forward, [0]

    def watched(self: Any, input_ids: Any = None, **options: Any) -> Any:
        seen.append(input_ids.numel() if torch.is_grad_enabled() else 0)
        return forward(self, input_ids=input_ids, **options)

    LlamaModel.forward = watched
    try:
        yield seen
    finally:
        LlamaModel.forward = forward


def test_packed_and_padded_rows_compute_the_tokens_of_their_names(script, monkeypatch) -> None:
    bench = script("bench_packing")
    monkeypatch.setattr(bench, "load_policy", lambda _: tiny.policy())
    policies = bench.make_policies()
    tokens = tiny.pad_tokens([[5, 6, 7]], [[8, 9], [10, 11, 12, 13], [14]], tiny.PAD)
    for name, policy in policies.items():
        with forward_rows() as seen:
            bench.training_pass(policy, tokens)
        assert max(seen) == tokens.computed(packed=name == bench.PACKED)
    assert tokens.computed(packed=True) < tokens.computed(packed=False)


# ---- pairs ---------------------------------------------------------------------------------------------------------


def test_only_pairs_at_once_form_every_pair(script) -> None:
    bench, group = script("bench_preference_loss"), 512
    scores, rewards = torch.randn(group, requires_grad=True), torch.randint(5, (group,)).float()
    largest = {
        name: largest_allocation(lambda loss=loss: torch.autograd.grad(loss(scores, rewards, group), scores))
        for name, loss in bench.CONTENDERS.items()
    }
    assert {name for name, size in largest.items() if size >= 4 * group * group} == {bench.RIVAL}


def test_the_authors_method_runs_both_sequences_of_each_pair_again(script, folder: Path, monkeypatch) -> None:
    bench = script("bench_preference_loss")
    monkeypatch.setattr(bench, "smollm2_folder", lambda: folder)
    made, group = bench.smollm2_group(4, "cpu"), 4
    length = bench.PROMPT + bench.COMPLETION
    for work, tokens in ((bench.train, group * length), (bench.authors_pair_term, 2 * group**2 // 4 * length)):
        with forward_rows() as seen, Seen() as ops:
            work(made)
        assert sum(seen) == tokens
        assert any("linear_logprob" in op for op in ops.own) == (work is bench.train)
        assert any(len(shape) == 3 and shape[-1] == tiny.VOCAB for shape, _ in ops.formed) == (work is not bench.train)


# ---- the suite of the ops ------------------------------------------------------------------------------------------


def test_the_suite_compares_the_ops_with_the_plain_versions(script) -> None:
    """`reference` calls no operator of ours; of ours those with a kernel call theirs."""
    ops = script("ops")
    called = {}
    for implementation, module in (("ours", ops.amir_kernels), ("reference", ops.reference)):
        for case, (op, make) in ops.CASES.items():
            torch.manual_seed(0)
            with Seen() as seen:
                ops.differentiated(getattr(module, op)(**make(ops.TINY)))
            called[implementation, case] = seen.own
    assert not any(own for (implementation, _), own in called.items() if implementation == "reference")
    assert all(called["ours", case] for case in ops.CASES if case.startswith(("linear_", "preference_", "amir_loss")))
