"""The kept rows: one JSON object a line in bench/results, written by the benchmarks, read by table.py."""

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIELDS = (
    "bench",
    "contender",
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
OPTIONAL = ("parts",)
"""`parts`: seconds by name, of what a time is made of."""


def timing(seconds: Sequence[float]) -> dict[str, float]:
    """The `seconds` field of a row from the single measurements: median, min, max, and their number `n`."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "n": len(seconds)}


def keep(row: dict[str, Any]) -> Path:
    """Appends `row` to the file of its day and machine, and returns that file; other fields than FIELDS are refused."""
    missing, unknown = set(FIELDS) - set(row), set(row) - {*FIELDS, *OPTIONAL}
    if missing or unknown:
        raise ValueError(
            f"a row has the fields {', '.join(FIELDS)}; missing: {sorted(missing)}, unknown: {sorted(unknown)}"
        )
    RESULTS.mkdir(exist_ok=True)
    host = row["machine"].get("gpu") or row["machine"]["cpu"]
    path = RESULTS / f"{row['date'][:10]}-{re.sub('[^a-z0-9]+', '-', host.lower()).strip('-')}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return path


def kept() -> list[dict[str, Any]]:
    """Every kept row, oldest first."""
    lines = [line for path in RESULTS.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda row: row["date"])
