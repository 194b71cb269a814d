"""The kept rows: one JSON object a line in bench/results, written by the benchmarks, read by table.py.

Two rows measure the same thing where `key` is equal: the benchmark, the contender, the workload with all of its sizes,
and the machine. The newest of them counts; the others stay in the file as history.
"""

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIELDS = (
    "bench",
    "contender",
    "workload",
    "case",
    "seconds",
    "peak_memory_mb",
    "ratio_to",
    "ratio",
    "machine",
    "versions",
    "commit",
    "date",
    "command",
)
OPTIONAL = ("parts", "observed", "expected", "curve")
"""`parts`: seconds by name, of the parts of a time. `observed`: counts and means of the run, by name. `expected`: what
was predicted, by name. `curve`: equally long lists by name, one value per step."""

Row = dict[str, Any]


def timing(seconds: Sequence[float]) -> dict[str, float]:
    """The `seconds` field of a row from the single measurements: median, min, max, and their number `n`."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "n": len(seconds)}


def keep(row: Row) -> Path:
    """Appends `row` to the file of its day and machine, and returns that file.

    A row with a missing or unknown field is refused, and so is a workload whose values are not single values.
    """
    missing, unknown = set(FIELDS) - set(row), set(row) - {*FIELDS, *OPTIONAL}
    if missing or unknown:
        raise ValueError(
            f"a row has the fields {', '.join(FIELDS)}; missing: {sorted(missing)}, unknown: {sorted(unknown)}"
        )
    refuse_nested_workload(row["workload"])
    RESULTS.mkdir(exist_ok=True)
    host = row["machine"].get("gpu") or row["machine"]["cpu"]
    path = RESULTS / f"{row['date'][:10]}-{re.sub('[^a-z0-9]+', '-', host.lower()).strip('-')}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return path


def refuse_nested_workload(workload: dict[str, Any]) -> None:
    """ValueError unless every value of a workload is a single one: text, a number, a bool or None."""
    nested = {name: value for name, value in workload.items() if not isinstance(value, str | int | float | None)}
    if nested or not workload:
        raise ValueError(f"workload: expected names with single values, found {nested or 'none'}")


def kept_rows() -> list[Row]:
    """Every kept row, oldest first."""
    lines = [line for path in RESULTS.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda row: row["date"])


def key(row: Row) -> tuple[str, str, str, str]:
    """The measured thing of a row: rows with equal keys differ only in date and commit."""
    return row["bench"], row["contender"], json.dumps(row["workload"], sort_keys=True), host_of(row)


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each key, in the order of the first rows."""
    return list({key(row): row for row in rows}.values())


def host_of(row: Row) -> str:
    """The machine of a row, in words."""
    machine = row["machine"]
    power = f" ({machine['gpu_power_limit']})" if "gpu_power_limit" in machine else ""
    gpu = f"{machine['gpu']}{power}, " if "gpu" in machine else ""
    return f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
