"""The benchmarks of the head: bars from rows, and what they refuse. Nothing is timed."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich")

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
SCRIPTS = ("bars", "bench_linear_logprob", "contenders", "machine", "meter", "rows", "table")

pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="the sources are not here: a wheel is tested")


@pytest.fixture
def bench(monkeypatch):
    """The scripts of bench/, imported as they import each other."""
    monkeypatch.syspath_prepend(BENCH)
    modules = {name: importlib.import_module(name) for name in SCRIPTS}
    yield SimpleNamespace(**modules)
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def problem(bench):
    return bench.contenders.make_problem(bench.contenders.HeadSize("tiny", 16, 300), 2, 8, torch.float32)


# ---- bars ----------------------------------------------------------------------------------------------------------


def row(contender, seconds, memory, mode="frozen head", tokens=16, date="2026-01-02T00:00:00Z"):
    return {
        "bench": "linear_logprob",
        "contender": contender,
        "workload": {"model": "Tiny", "hidden_size": 16, "vocabulary": 300, "mode": mode, "tokens": tokens},
        "case": f"Tiny 16 x 300, {mode}, {tokens} tokens, float32",
        "seconds": {"median": seconds, "min": seconds, "max": seconds, "n": 3},
        "peak_memory_mb": memory,
        "ratio_to": None,
        "ratio": None,
        "machine": {"cpu": "A processor", "cores": 2, "memory_gib": 24.0},
        "versions": {"torch": "2.0"},
        "commit": "abc",
        "date": date,
        "command": "python bench/bench_linear_logprob.py",
    }


RUN = [
    row("full logits", 8.0, 900.0),
    row("TRL, best chunk", 16.0, 90.0),
    row("Liger", 10.0, 200.0),
    row("bare GEMMs, 6 T H V", 7.5, None),
    row("bare GEMMs, 4 T H V", 5.0, None),
    row("linear_logprob", 9.0, 40.0),
    row("linear_logprob, 30% dead rows", 8.0, 40.0),
    row("linear_policy_loss", 6.0, 60.0),
]


def test_the_bars_take_the_best_peer_in_each_respect(bench):
    found = {(bar.contender, bar.name): (round(bar.figure, 3), bar.met) for bar in bench.bars.bars(RUN)}
    ours, fused, bars = bench.bars.OURS, bench.bars.FUSED, bench.bars
    assert found == {
        (ours, bars.PEER_TIME): (0.9, True),
        (ours, bars.DEAD_TIME): (0.8, False),
        (ours, bars.BARE_TIME): (1.2, False),
        (ours, bars.PEER_MEMORY): (round(40 / 90, 3), True),
        (fused, bars.PEER_TIME): (0.6, True),
        (fused, bars.FULL_TIME): (0.75, True),
        (fused, bars.BARE_TIME): (1.2, True),
        (fused, bars.PEER_MEMORY): (round(60 / 90, 3), False),
    }


def test_a_newer_run_of_a_case_replaces_the_older_one_whole(bench):
    newer = [row("linear_logprob", 3.0, 40.0, date="2026-02-02T00:00:00Z")]
    assert bench.bars.bars([*RUN, *newer]) == []
    (kept,) = bench.bars.latest_runs([*newer, *RUN]).values()
    assert list(kept) == ["linear_logprob"]


def test_growth_is_linear_and_flat_or_not(bench):
    def grown(tokens, seconds, memory):
        return row("linear_logprob", seconds, memory, mode="growth", tokens=tokens)

    found = bench.bars.bars([grown(256, 1.0, 5.0), grown(1024, 4.2, 20.0), grown(4096, 16.0, 20.0)])
    assert [(bar.figure, bar.met) for bar in found] == [(1.0, True), (1.0, True)]
    assert not any(bar.met for bar in bench.bars.bars([grown(256, 1.0, 5.0), grown(1024, 8.0, 20.0)]))


def test_the_documents_show_what_was_missed(bench):
    text = bench.table.head_tables(RUN)
    assert "0.90 ≤ 1 " in text
    assert "**1.20 > 1.15**" in text
    assert "| Tiny 16 x 300 | frozen head | 6 s, 60 MB | 9 s, 40 MB | 8 s, 40 MB | 8 s, 900 MB | 16 s, 90 MB |" in text
    assert "Made at commit `abc`, 2026-01-02: `python bench/bench_linear_logprob.py`" in text


# ---- contenders ----------------------------------------------------------------------------------------------------


def contenders_here(bench):
    here = {"ours": bench.contenders.ours, "fused": bench.contenders.ours_fused}
    if importlib.util.find_spec("trl"):
        here["TRL"] = bench.contenders.trl_chunked(128)
    if importlib.util.find_spec("liger_kernel"):
        here["Liger"] = bench.contenders.liger(compiled=False)
    return here


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_the_contenders_agree(bench, problem, trained):
    problem = problem.with_trained_head() if trained else problem
    bench.bench_linear_logprob.refuse_disagreement(contenders_here(bench), problem)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda loss, problem: loss * 0.999,
        lambda loss, problem: loss + 0.001 * (problem.hidden - problem.hidden.detach()).sum(),
        lambda loss, problem: loss.detach() + 0 * problem.hidden.sum(),
    ],
    ids=["scaled", "tilted", "no gradient"],
)
def test_another_loss_is_refused(bench, problem, wrong):
    cheat = {"cheat": lambda p: wrong(bench.contenders.full_logits(p), p)}
    with pytest.raises(ValueError, match=r"cheat: .* differs from full logits"):
        bench.bench_linear_logprob.refuse_disagreement(cheat, problem)


def test_dead_rows_have_no_gradient_and_the_others_keep_theirs(bench, problem):
    torch.manual_seed(1)
    dead = problem.with_zero_gradient_rows(0.5)
    moved = dead.old != problem.old
    assert 0 < moved.sum() < moved.numel()
    _, (alive,) = bench.contenders.gradients(bench.contenders.full_logits, problem)
    _, (found,) = bench.contenders.gradients(bench.contenders.full_logits, dead)
    assert alive.norm(dim=-1).gt(0).all()
    assert found[moved].eq(0).all()
    torch.testing.assert_close(found[~moved], alive[~moved])


def test_the_bare_products_are_those_of_the_head(bench, problem, monkeypatch):
    """Each block once: what they write is checked, not the seconds."""
    script = bench.bench_linear_logprob
    written = []

    def run(work, device):
        work()
        written.append(work)
        return 1.0, None, None

    monkeypatch.setattr(script, "measure", run)
    products = script.Products(problem.hidden.detach().flatten(0, 1), problem.weight, rows=5, columns=128)
    assert products.seconds() == (1.0, 1.0, 1.0)
    assert len(written) == 3
    sums = [
        script.bare_seconds((1.0, 2.0, 4.0), op, mode)
        for op in ("linear_logprob", "linear_policy_loss")
        for mode in (bench.bars.FROZEN, bench.bars.TRAINED)
    ]
    assert sums == [4.0, 8.0, 3.0, 7.0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read on Linux")
def test_the_meter_sees_what_a_piece_of_work_holds_at_its_peak(bench):
    def work():
        return torch.ones(20_000_000).sum() + torch.ones(5_000_000).sum()

    seconds, peak, result = bench.meter.measure(work, torch.device("cpu"))
    assert seconds > 0
    assert result == 25_000_000
    assert 75 < peak < 110
