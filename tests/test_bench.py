"""The kept rows and the table made from them."""

import html
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"

pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="the sources are not here: a wheel is tested")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The modules of bench/, imported as its scripts import them, with an empty results folder."""
    monkeypatch.syspath_prepend(BENCH)
    import bars
    import bench_quickstart
    import curve
    import machine
    import rows
    import table

    results = rows.RESULTS
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    yield SimpleNamespace(
        bars=bars, curve=curve, machine=machine, quickstart=bench_quickstart, results=results, rows=rows, table=table
    )
    for name in ("bars", "bench_quickstart", "curve", "machine", "rows", "table"):
        sys.modules.pop(name)


WORKLOAD = {"task": "sums", "prompts": 4, "group_size": 8, "max_completion_tokens": 24, "reward": "random"}


def row(**fields):
    seconds = {"median": 2.0, "min": 1.5, "max": 2.5, "n": 3}
    machine = {"cpu": "A processor", "cores": 2, "memory_gib": 24.0}
    return {
        "bench": "step",
        "contender": "ours",
        "workload": WORKLOAD,
        "case": "4 x 8",
        "seconds": seconds,
        "peak_memory_mb": 1234.5,
        "ratio_to": "rival",
        "ratio": 0.5,
        "machine": machine,
        "versions": {"torch": "2.0"},
        "commit": "abc",
        "date": "2026-01-02T00:00:00Z",
        "command": "python bench/bench_step.py",
        "observed": {"groups": 4, "groups_without_signal": 1},
    } | fields


def test_every_kept_row_has_its_origin_and_its_workload(bench):
    for path in (BENCH / "results").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            assert set(found) - set(bench.rows.OPTIONAL) == set(bench.rows.FIELDS), path
            assert all((found["commit"], found["command"], found["machine"]["cpu"])), path
            bench.rows.refuse_nested_workload(found["workload"])


def test_a_row_comes_back_as_it_was_kept(bench):
    path = bench.rows.keep(row())
    assert path.name == "2026-01-02-a-processor.jsonl"
    assert bench.rows.kept_rows() == [row()]


@pytest.mark.parametrize("wrong", [{"gpu": "none"}, {"seconds": ...}], ids=["unknown", "missing"])
def test_a_row_with_other_fields_is_refused(bench, wrong):
    bad = {name: value for name, value in row(**wrong).items() if value is not ...}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        bench.rows.keep(bad)


@pytest.mark.parametrize("workload", [{}, {"sizes": {"tokens": 3}}, {"sizes": [1, 2]}])
def test_a_workload_is_names_with_single_values(bench, workload):
    with pytest.raises(ValueError, match="workload: expected names with single values"):
        bench.rows.keep(row(workload=workload))


def test_the_newest_of_rows_with_the_same_workload_counts_whatever_was_observed(bench):
    old = row(ratio=0.9, case="mean 17.6", observed={"groups": 9, "groups_without_signal": 0})
    new = row(ratio=0.4, case="mean 18.5", date="2026-03-04T00:00:00Z")
    text = bench.table.step_table([old, new])
    assert "| ours | 2 (1.5 to 2.5, n = 3) | 1,234 | 1 of 4 | 0.40 |" in text
    assert "0.90" not in text
    assert "time / rival" in text


@pytest.mark.parametrize(
    "other", [{"workload": WORKLOAD | {"prompts": 2}}, {"contender": "theirs"}, {"machine": {"cpu": "B", "cores": 8}}]
)
def test_rows_of_another_workload_contender_or_machine_stay(bench, other):
    later = row(**({"date": "2026-03-04T00:00:00Z"} | other))
    later["machine"] = {"memory_gib": 1.0} | later["machine"]
    assert len(bench.rows.newest([row(), later])) == 2


def test_a_column_that_is_blank_throughout_is_not_shown(bench):
    text = bench.table.step_table([row(ratio=None, ratio_to=None, peak_memory_mb=None)])
    assert "time" not in text.partition("\n| ---")[0]
    assert "memory" not in text
    text = bench.table.step_table([row(ratio=None, ratio_to=None), row(contender="theirs")])
    assert "| ours | 2 (1.5 to 2.5, n = 3) | 1,234 | 1 of 4 | – |" in text


def test_no_table_of_the_documents_has_a_blank_column(bench):
    for path in bench.table.DOCUMENTS:
        for found in bench.table.BLOCK.finditer(path.read_text()):
            for lines in re.findall(r"(?:^\|.*\n)+", found[2], re.MULTILINE):
                body = [line.strip("|\n").split("|") for line in lines.splitlines()[2:]]
                blank = [cells for cells in zip(*body, strict=True) if not any(c.strip(" –") for c in cells)]
                assert not blank, f"{path.name}, {found[1]}"


def test_conditions_stand_once_and_runs_get_letters(bench):
    other = row(contender="theirs", commit="def", command="python bench/bench_step.py --rounds 9")
    text = bench.table.step_table([row(), other])
    assert text.count("A processor, 2 cores") == 1
    assert text.count("- run a: commit `abc`") == text.count("- run b: commit `def`") == 1
    assert "| 0.50 | a |" in text
    assert "| 0.50 | b |" in text


def test_rows_of_two_machines_name_theirs(bench):
    other = row(machine={"cpu": "Another", "cores": 8, "memory_gib": 64.0, "gpu": "A GPU"}, ratio=None, seconds=None)
    text = bench.table.step_table([row(), other])
    assert "A GPU, Another" in text
    assert "| ours | – | 1,234 |" in text


def test_the_table_of_a_gpu_has_what_was_timed_beside_its_prediction(bench):
    workload = {"stage": "times", "part": "a", "check": "time"}
    timed = row(bench="gpu_check", workload=workload, case="T = 8; at most 1.5", expected={"seconds": 1.6}, ratio=1.2)
    compared = row(bench="gpu_check", workload=workload | {"check": "bits"}, case="same bits", seconds=None)
    text = bench.table.gpu_table([timed, compared])
    assert "Stage times" in text
    assert "| T = 8 | ours | 2 (1.5 to 2.5, n = 3) | 1.25 | 1,234 |" in text
    assert "same bits" not in text


def test_a_table_stands_between_its_markers_only(bench):
    text = "before\n<!-- rows: trl -->\nstale\n<!-- end of rows -->\nafter"
    renewed = bench.table.with_tables(text, [])
    assert renewed == f"before\n<!-- rows: trl -->\n{bench.table.EMPTY}\n<!-- end of rows -->\nafter"
    with pytest.raises(ValueError, match="found none"):
        bench.table.with_tables("no markers", [])
    with pytest.raises(ValueError, match="trll"):
        bench.table.with_tables(text.replace("trl", "trll"), [])


def test_the_results_show_every_benchmark(bench):
    shown = {found[1] for found in bench.table.BLOCK.finditer(bench.table.RESULTS.read_text())}
    assert shown == set(bench.table.TABLES) - {"headline", "cards"}
    rows = [json.loads(line) for path in bench.results.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert {found["bench"] for found in rows} <= shown


def test_the_readme_has_six_rows_with_the_peers_beside_ours(bench, monkeypatch):
    monkeypatch.setattr(bench.rows, "RESULTS", bench.results)
    lines = [line for line in bench.table.headline(bench.rows.kept_rows()).splitlines() if line.startswith("|")][2:]
    assert len(lines) == 6
    assert all("MB" in line for line in lines if "preference_loss" not in line)


def test_the_picture_shows_the_newest_curve_that_is_kept(bench, monkeypatch):
    monkeypatch.setattr(bench.rows, "RESULTS", bench.results)
    wanted = bench.curve.description(bench.curve.newest_curve())
    for path in bench.curve.PICTURES:
        (drawn,) = re.findall(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL)
        assert json.loads(html.unescape(drawn)) == json.loads(wanted), f"{path.name}: run bench/curve.py"


def test_a_finished_run_becomes_a_row_with_its_curve(bench, tmp_path):
    metrics = [{"step": n, "success": n / 4, "peak_memory_mb": 10.04} for n in (1, 2, 3)]
    evaluations = [{"step": step, "success": share, "samples": 5} for step, share in ((0, 0.2), (3, 0.8))]
    for name, found in (("metrics", metrics), ("evaluations", evaluations)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    made = bench.quickstart.row_of(tmp_path, 12.5)
    assert made["curve"] == {
        "step": [1, 2, 3],
        "success": [0.25, 0.5, 0.75],
        "held_out_step": [0, 3],
        "held_out": [0.2, 0.8],
    }
    assert (made["seconds"]["median"], made["contender"]) == (12.5, "amir train quickstart")
    assert made["observed"]["sampled_success"] == [0.25, 0.5]
    assert made["case"] == "one-digit sums, 3 steps: sampled success 0.25 to 0.50, held-out 0.20 to 0.80 (5 samples)"
    assert bench.quickstart.row_of(tmp_path, 3.0)["seconds"]["median"] == 3.0


def test_the_documented_row_can_be_kept(bench, tmp_path):
    snippet = re.search(r"```python\n(.*?)```", (BENCH / "README.md").read_text(), re.DOTALL)[1]
    if not (ROOT / ".git").exists():
        pytest.skip("a row names its commit: not a git checkout")
    exec(snippet, {})
    (kept,) = bench.rows.kept_rows()
    assert kept["seconds"] == {"median": 0.11, "min": 0.1, "max": 0.12, "n": 3}
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", kept["commit"])
    assert kept["versions"]["torch"]
