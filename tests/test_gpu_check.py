"""The check for GPUs: faults of a stage are reported and the rest runs; bounds, predictions, wheels, rehearsals."""

import importlib
import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
MODULES = (
    "carried",
    "correctness",
    "judging",
    "odd_shapes",
    "op_peers",
    "op_times",
    "rates",
    "runner",
    "sizes",
    "stage",
)
MINUTES = 8

pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="the sources are not here: a wheel is tested")


@pytest.fixture
def check(monkeypatch):
    """The modules of bench/gpu_stages, and those beside it, imported as the script imports them."""
    monkeypatch.syspath_prepend(BENCH)
    before = set(sys.modules)
    stages = {name: importlib.import_module(f"gpu_stages.{name}") for name in MODULES}
    others = {name: importlib.import_module(name) for name in ("contenders", "gather_wheels", "rows")}
    yield SimpleNamespace(**stages, **others)
    ours = {path.stem for path in BENCH.glob("*.py")} | {"gpu_stages"}
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ours:
            sys.modules.pop(name)


# ---- a stage and its processes -------------------------------------------------------------------------------------

CHILD = """
import json, os, sys, time
skip = int(sys.argv[sys.argv.index("--skip") + 1])
for number in range(skip, 3):
    part = {"number": number, "name": f"part {number}", "seconds": 0.5, "own": number != 2, "last": number == 2}
    print(json.dumps({"part": part}), flush=True)
    if number == 1:
        print("some library's words", file=sys.stderr)
        FAULT
    print(json.dumps({"row": {"case": f"row {number}"}}), flush=True)
"""
FAULTS = {
    "raise ValueError('no such number')": "exit code 1: ValueError: no such number",
    "time.sleep(60)": "stopped at the limit of 0.5 s",
    "os.abort()": "exit code -6: some library's words",
    "sys.exit(7)": "exit code 7: some library's words",
}


def run(check, source, monkeypatch, seconds=20):
    """The rows of a stage whose process runs this source, and whether each is ours."""
    monkeypatch.setitem(check.stage.STAGES, "test", check.stage.Stage("none", seconds))
    found = []
    command = [sys.executable, "-c", source]
    check.runner.run_stage("test", command, dict(os.environ), lambda row, own: found.append((row["case"], own)))
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_fails_is_a_row_and_the_parts_after_it_run(check, monkeypatch, fault):
    found = run(check, CHILD.replace("FAULT", fault), monkeypatch)
    failed = f"test, part 1: failed: {FAULTS[fault]}"
    assert found == [("row 0", True), (failed, True), ("row 2", False)]


def test_a_part_that_reported_its_error_and_broke_the_gpu_is_reported_once(check, monkeypatch):
    broken = 'print(json.dumps({"broken": "part 1"}), flush=True); sys.exit(3)'
    assert [case for case, _ in run(check, CHILD.replace("FAULT", broken), monkeypatch)] == ["row 0", "row 2"]


def test_a_stage_that_cannot_start_is_tried_once(check, monkeypatch):
    found = run(check, "import sys; sys.exit('torch is too old')", monkeypatch)
    assert found == [("test, start: failed: exit code 1: torch is too old", True)]


def test_a_stage_is_stopped_at_its_limit(check, monkeypatch):
    monkeypatch.setattr(check.runner, "MIN_SECONDS", 0.5)
    slow = CHILD.replace('"seconds": 0.5', '"seconds": 60').replace("FAULT", "time.sleep(60)")
    found = run(check, slow, monkeypatch, seconds=1)
    assert [case for case, _ in found] == [
        "row 0",
        "test, part 1: failed: stopped at the limit of 1 s of the stage",
        "test: failed: its limit of 1 s is spent; the parts from number 2 on are missing",
    ]


def test_what_a_part_raises_is_a_row_and_the_rows_before_it_stay(check):
    def rows():
        yield check.stage.make_row("ours", "first", {"check": "a"})
        raise KeyError("lost")

    part = check.stage.Part("p", rows, own=False)
    cases = [(row["contender"], row["case"]) for row in check.runner._caught(part, "times")]
    assert cases == [("ours", "first"), ("p", "times, p: failed: KeyError: 'lost'")]


def test_all_limits_together_leave_time_for_another_try(check):
    assert sum(stage.seconds for stage in check.stage.STAGES.values()) <= 60 * MINUTES


def test_every_stage_has_parts_with_names_of_their_own(check):
    for stage in check.stage.STAGES.values():
        module = importlib.import_module(f"gpu_stages.{stage.module}")
        for sizes in (check.sizes.REAL, check.sizes.REHEARSAL):
            names = [part.name for part in module.parts(sizes)]
            assert names
            assert len(names) == len(set(names))


# ---- rows ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def report(check):
    said = []
    made = check.stage.Report(said.append)
    made.said = said
    return made


def row(check, **fields):
    return check.stage.make_row("linear_logprob", "a case", {"check": "a"}, **fields)


def test_a_missed_bound_fails_the_check_and_a_met_one_does_not(check, report):
    report.add(row(check, ratio=check.stage.Ratio("TRL", 0.8, 1.0)))
    assert report.bad == 0
    for ratio in (1.2, float("nan"), float("inf")):
        report.add(row(check, ratio=check.stage.Ratio("TRL", ratio, 1.0)))
    assert report.bad == 3
    assert report.said[:2] == [
        "met     0.8 <= 1  linear_logprob: a case / TRL",
        "MISSED  1.2 <= 1  linear_logprob: a case / TRL",
    ]


def test_failures_of_ours_count_and_those_of_a_peer_are_shown(check, report):
    report.add(check.stage.failed("verl", "times", "out of memory"), own=False)
    report.add(check.stage.not_run("verl", "times", "not installed"), own=True)
    assert (report.rows, report.bad) == (2, 0)
    report.add(check.stage.failed("stage", "times", "out of memory"), own=True)
    assert report.bad == 1
    assert report.said == [
        "FAILED  verl: times: failed: out of memory",
        "not run verl: times: not run: not installed",
        "FAILED  stage: times: failed: out of memory",
    ]


@pytest.mark.parametrize(("seconds", "flagged"), [(0.9, None), (1.14, None), (0.8, "0.80"), (1.3, "1.30")])
def test_a_measurement_far_from_its_prediction_is_flagged(check, report, seconds, flagged):
    report.add(row(check, seconds=[seconds], memory=100.0, expected={"seconds": 1.0, "peak_memory_mb": 100.0}))
    flags = [line for line in report.said if line.startswith("DIFFERS")]
    assert flags == ([f"DIFFERS {flagged} times the predicted seconds: linear_logprob: a case"] if flagged else [])


def test_a_row_of_the_check_can_be_kept(check, monkeypatch, tmp_path):
    monkeypatch.setattr(check.rows, "RESULTS", tmp_path)
    origin = {"machine": {"cpu": "a"}, "versions": {}, "commit": "c", "date": "2026-01-02", "command": "x"}
    made = row(check, seconds=[1.0], expected={"flops": 2.0}, observed={"tflops": 3.0})
    (staged,) = check.stage.in_stage([made], "times", "first")
    check.rows.keep(staged | origin)
    assert staged["workload"] == {"stage": "times", "part": "first", "check": "a"}


# ---- predictions ---------------------------------------------------------------------------------------------------


def test_a_prediction_takes_the_larger_of_operations_and_bytes(check):
    rates = check.rates.Rates(products=100.0, bandwidth=10.0, multiprocessors=4, launch_seconds=0.01)
    assert check.rates.predict(rates, flops=200, moved=10)["seconds"] == 2
    assert check.rates.predict(rates, flops=200, moved=50)["seconds"] == 5


def test_a_part_of_a_wave_takes_as_long_as_a_whole_one(check):
    rates = check.rates.Rates(products=100.0, bandwidth=10.0, multiprocessors=4, launch_seconds=0.01)
    whole = check.rates.predict(rates, flops=100, programs=8)
    ragged = check.rates.predict(rates, flops=100, programs=5)
    assert (whole["waves"], whole["seconds"]) == (2, 1)
    assert ragged["seconds"] == pytest.approx(1 / (1.25 / 2))
    assert check.rates.predict(rates, flops=100, programs=5, at_once=2)["seconds"] == pytest.approx(1 / 0.625)


def test_launches_take_the_hosts_time_however_little_they_move(check):
    rates = check.rates.Rates(products=100.0, bandwidth=10.0, multiprocessors=4, launch_seconds=0.01)
    values = torch.zeros(2)
    launches = check.rates.count_launches(lambda: values.view(2, 1).add_(1).mul_(2))
    assert launches == 2
    assert check.rates.predict(rates, moved=0.1, launches=launches)["seconds"] == pytest.approx(0.02)
    assert check.rates.predict(rates, moved=50, launches=launches)["seconds"] == 5


# ---- comparisons ---------------------------------------------------------------------------------------------------


def numerics(check):
    sizes, head = check.sizes.REHEARSAL, check.correctness.our_head
    torch_head = lambda inputs, target, backend: head(inputs, target, "torch")
    check.correctness.our_head = torch_head
    rows = list(check.correctness.numerics(sizes, torch.float32, "all options"))
    return {row["workload"]["result"]: row for row in rows}


def test_the_op_meets_the_bounds_of_the_tests(check, report):
    found = numerics(check)
    assert {"logprob", "gradient of hidden", "gradient of lora_b, at targets"} <= set(found)
    for one in found.values():
        report.add(one)
    assert report.bad == 0


def test_the_errors_of_a_mutant_miss_them(check, monkeypatch):
    """A head without its entropy gradient."""
    honest = check.correctness.our_head

    def mutant(inputs, target, backend):
        logprob, entropy, lse = honest(inputs, target, backend)
        return logprob, entropy.detach(), lse

    monkeypatch.setattr(check.correctness, "our_head", mutant)
    assert numerics(check)["gradient of hidden"]["ratio"] > 1000


def test_memory_that_nothing_wrote_is_seen(check):
    with check.odd_shapes.poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.zeros(3).new_empty(2, 2).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("make", ["raises", "fails later"])
def test_a_peer_that_cannot_be_made_is_a_row(check, monkeypatch, make):
    def missing():
        raise ImportError("no module named verl")

    monkeypatch.setitem(check.op_peers.PEERS, "verl Triton", check.op_peers.Peer(missing, True))
    sizes = check.sizes.REHEARSAL
    (found,) = check.op_peers.beside(sizes, sizes.timed_heads[0], "verl Triton")
    assert found["case"] == "tiny 32 x 150: not run: ImportError: no module named verl"


def test_a_peer_is_compared_and_timed(check, report):
    sizes = check.sizes.REHEARSAL
    found = list(check.op_peers.beside(sizes, sizes.timed_heads[0], "full logits"))
    for one in found:
        report.add(one)
    assert report.bad == 0
    assert [(one["contender"], one["workload"]["check"]) for one in found[:3]] == [
        ("full logits", "gradients"),
        ("full logits", "time"),
        ("linear_logprob", "ratio"),
    ]


# ---- wheels --------------------------------------------------------------------------------------------------------


def test_only_wheels_for_this_python_are_unpacked(check, tmp_path):
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    names = {"good-1.0-py3-none-any.whl": True, "other-1.0-cp27-cp27mu-manylinux1_x86_64.whl": False}
    for name in names:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"{name.partition('-')[0]}/__init__.py", "")
            archive.writestr(f"{name.partition('-')[0]}-1.0.data/purelib/inner.py", "")
            archive.writestr(f"{name.partition('-')[0]}-1.0.data/scripts/tool", "")
    (tmp_path / "torn-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 and no end")
    folder = tmp_path / "made"
    folder.mkdir()
    paths, left_out = check.carried.import_path(ROOT, tmp_path, folder)
    assert [path.name for path in paths] == ["packages", "unpacked"]
    assert sorted(path.name for path in paths[0].iterdir()) == ["amir", "amir_kernels"]
    assert sorted(path.name for path in paths[1].iterdir()) == ["good", "inner.py"]
    assert list(left_out) == ["other-1.0-cp27-cp27mu-manylinux1_x86_64.whl", "torn-1.0-py3-none-any.whl"]
    assert "damaged" in left_out["torn-1.0-py3-none-any.whl"]
    assert check.carried.suits(f"x-1-{tag}-{tag}-any.whl") or tag


def test_the_needs_of_a_package_are_those_of_the_other_machine(check):
    gather = check.gather_wheels
    machine = gather.Machine("3.12", "x86_64", "cuda130")

    def names(package):
        return {pin.partition("==")[0] for pin in gather.pins(package, machine, {"torch"})}

    assert names("jinja2") == {"jinja2", "markupsafe"}
    assert names("tqdm") == {"tqdm"}  # colorama on Windows alone
    assert {"accelerate", "transformers"} <= names("peft")
    assert "torch" not in names("peft")
    with pytest.raises(PackageNotFoundError):
        list(gather.pins("no-such-package", machine, set()))


def test_a_package_that_does_not_fit_is_left_out_and_the_next_one_tried(check, monkeypatch, tmp_path):
    gather, sizes = check.gather_wheels, {"small": 100, "large": 10_000, "last": 200}
    monkeypatch.setattr(gather, "pins", lambda name, machine, there: iter([f"{name}==1", "shared==2"]))

    def download(pinned, machine, folder):
        for pin in pinned:
            name = pin.partition("==")[0]
            with zipfile.ZipFile(folder / f"{name}.whl", "w") as archive:
                archive.writestr("module.py", "x" * sizes.get(name, 5))

    monkeypatch.setattr(gather, "download", download)
    left_out = gather.gather(
        ["small", "large", "last"], gather.Machine("3.12", "x86_64", "cuda130"), set(), tmp_path, limit=3000
    )
    assert set(left_out) == {"large"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.whl", "shared.whl", "small.whl"]


def test_libraries_for_another_toolkit_are_taken_out_of_a_wheel(check, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        for name in ("lib_cuda118.so", "lib_cuda130.so", "lib_rocm70.so", "lib_cpu.so", "x.py"):
            archive.writestr(f"x/{name}", name)
    trimmed = check.gather_wheels.trim(tmp_path / "x.whl", "cuda130")
    assert trimmed == tmp_path / "x.whl"
    with zipfile.ZipFile(trimmed) as archive:
        assert sorted(archive.namelist()) == ["x/lib_cpu.so", "x/lib_cuda130.so", "x/x.py"]
        assert archive.read("x/lib_cuda130.so") == b"lib_cuda130.so"


# ---- rehearsals ----------------------------------------------------------------------------------------------------


def rehearse(tmp_path, *options, script=BENCH / "gpu_check.py", fault=None):
    """Runs the script on the CPU with tiny sizes; what it returned and the rows in its file."""
    out = tmp_path / "rows.jsonl"
    other = tmp_path / "other"
    for package in ("amir", "amir_kernels"):
        (other / package).mkdir(parents=True)
        (other / package / "__init__.py").write_text("raise ImportError('the packages of the tree come first')")
    environment = os.environ | {"FAULT": fault or "", "PYTHONPATH": str(other)}
    command = [sys.executable, str(script), "--rehearse", "--out", str(out), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path)
    return done, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def assert_no_row_hides_another(check, rows):
    keys = [check.rows.key(row) for row in rows]
    assert [key for key in keys if keys.count(key) > 1] == []


def test_an_unknown_stage_is_refused_and_the_rows_of_before_stay(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"case": "kept"}\n')
    done, rows = rehearse(tmp_path, "--stage", "numerisc")
    assert done.returncode == 2
    assert "invalid choice: 'numerisc' (choose from" in done.stderr
    assert rows == [{"case": "kept"}]


def test_the_stage_of_odd_shapes_rehearsed(check, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"case": "kept"}\n')
    done, rows = rehearse(tmp_path, "--stage", "odd-shapes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows.pop(0) == {"case": "kept"}
    assert all(set(check.rows.FIELDS) <= set(row) for row in rows)
    assert len({row["date"] for row in rows}) == 1  # machine, versions and commit are asked once
    assert_no_row_hides_another(check, rows)
    cases = "\n".join(row["case"] for row in rows)
    for part in ("transposed head", "unaligned", "float32 head under autocast", "0 tokens", "CUDA graphs: not run"):
        assert part in cases


@pytest.mark.long
def test_every_stage_rehearsed(check, tmp_path):
    done, rows = rehearse(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["workload"]["stage"] for row in rows} == set(check.stage.STAGES)
    assert not [row["case"] for row in rows if check.stage.FAILED in row["case"]]
    assert_no_row_hides_another(check, rows)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["raise", "hang", "crash", "wrong numbers"])
def test_a_fault_in_every_stage_is_reported_and_the_rest_continues(check, tmp_path, fault):
    done, rows = rehearse(tmp_path, script=ROOT / "tests" / "faulty_gpu_check.py", fault=fault)
    assert done.returncode == 1, done.stdout + done.stderr
    for name in check.stage.STAGES:
        of_stage = [row for row in rows if row["workload"].get("stage") == name]
        missed = [row for row in of_stage if row["ratio"] is not None and check.stage.AT_MOST in row["case"]]
        missed = [row for row in missed if not row["ratio"] <= float(row["case"].partition(check.stage.AT_MOST)[2])]
        failed = [row for row in of_stage if check.stage.FAILED in row["case"]]
        assert missed if fault == "wrong numbers" else len(failed) == 1, (name, of_stage)
        assert len(of_stage) > 1 or name in ("drop-in", "out-of-memory"), name
