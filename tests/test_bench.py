"""The kept rows and the table made from them."""

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
    import machine
    import rows
    import table

    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    yield SimpleNamespace(bars=bars, machine=machine, rows=rows, table=table)
    for name in ("bars", "machine", "rows", "table"):
        sys.modules.pop(name)


def row(**fields):
    seconds = {"median": 2.0, "min": 1.5, "max": 2.5, "n": 3}
    machine = {"cpu": "A processor", "cores": 2, "memory_gib": 24.0}
    return {
        "bench": "step",
        "contender": "ours",
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
    } | fields


def test_every_kept_row_has_its_birth_certificate(bench):
    for path in (BENCH / "results").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            assert set(found) - set(bench.rows.OPTIONAL) == set(bench.rows.FIELDS), path
            assert all((found["commit"], found["command"], found["machine"]["cpu"])), path


def test_a_row_comes_back_as_it_was_kept(bench):
    path = bench.rows.keep(row())
    assert path.name == "2026-01-02-a-processor.jsonl"
    assert bench.rows.kept() == [row()]


@pytest.mark.parametrize("wrong", [{"gpu": "none"}, {"seconds": ...}], ids=["unknown", "missing"])
def test_a_row_with_other_fields_is_refused(bench, wrong):
    bad = {name: value for name, value in row(**wrong).items() if value is not ...}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        bench.rows.keep(bad)


def test_the_newest_of_like_rows_counts(bench):
    old, new = row(ratio=0.9), row(ratio=0.4, date="2026-03-04T00:00:00Z")
    text = bench.table.tables([old, new])
    assert "0.40 of rival" in text
    assert "0.90" not in text
    assert "2 (1.5 to 2.5, 3) | 1,234 |" in text


def test_rows_of_two_machines_stay_apart(bench):
    other = row(machine={"cpu": "Another", "cores": 8, "memory_gib": 64.0, "gpu": "A GPU"}, ratio=None, seconds=None)
    text = bench.table.tables([row(), other])
    assert text.count("**step**") == 2
    assert "A GPU, Another" in text
    assert "| – |" in text


def test_the_table_stands_between_the_markers_only(bench):
    text = f"before\n{bench.table.START}\nstale\n{bench.table.END}\nafter"
    renewed = bench.table.with_block(text, bench.table.EMPTY)
    assert renewed == f"before\n{bench.table.START}\n{bench.table.EMPTY}\n{bench.table.END}\nafter"
    with pytest.raises(ValueError, match="bench:start"):
        bench.table.with_block("no markers", "")


def test_the_documented_row_can_be_kept(bench, tmp_path):
    snippet = re.search(r"```python\n(.*?)```", (BENCH / "README.md").read_text(), re.DOTALL)[1]
    if not (ROOT / ".git").exists():
        pytest.skip("a row names its commit: not a git checkout")
    exec(snippet, {})
    (kept,) = bench.rows.kept()
    assert kept["seconds"] == {"median": 0.11, "min": 0.1, "max": 0.12, "n": 3}
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", kept["commit"])
    assert kept["versions"]["torch"]
