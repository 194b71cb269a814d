"""Writes the README's table of numbers from the kept rows: `python bench/table.py`, or `--check` to compare only.

Of rows with the same bench, contender, case and machine the newest counts.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rows import kept

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
EMPTY = "No row is kept yet; `make bench` makes them."

Row = dict[str, Any]


def main() -> int:
    """Rewrites the block between the markers; with `--check` returns 1 where that would change it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the README is behind the rows")
    check = parser.parse_args().check
    text = README.read_text()
    renewed = with_tables(text, kept())
    if check and renewed != text:
        print(f"{README.name} is behind bench/results: run `make table`", file=sys.stderr)
        return 1
    if not check:
        README.write_text(renewed)
    return 0


def with_tables(text: str, rows: Iterable[Row]) -> str:
    """`text` with the block between the two markers replaced by the tables of `rows`."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError(f"the README needs the lines {START} and {END}, in this order")
    return f"{before}{START}\n{tables(rows)}\n{END}{after}"


def tables(rows: Iterable[Row]) -> str:
    """One table for each run of a benchmark, the birth certificate below it."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in newest(rows):
        runs.setdefault((row["bench"], _host(row), row["commit"], row["date"][:10], row["command"]), []).append(row)
    return "\n\n".join(_table(run) for _, run in sorted(runs.items())) or EMPTY


def newest(rows: Iterable[Row]) -> list[Row]:
    """Of rows alike in bench, contender, case and machine the last; in the order they were kept."""
    return list({(row["bench"], row["contender"], row["case"], _host(row)): row for row in rows}.values())


def _table(run: list[Row]) -> str:
    head = run[0]
    versions = ", ".join(f"{name} {number}" for name, number in head["versions"].items())
    lines = [
        f"**{head['bench']}**",
        "",
        "| case | contender | seconds, median (min to max, n) | peak memory, MB | time |",
        "| --- | --- | --- | --- | --- |",
        *map(_line, run),
        "",
        f"{_host(head)}. {versions}. Commit {head['commit']}, {head['date'][:10]}: `{head['command']}`",
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    seconds, memory = row["seconds"], row["peak_memory_mb"]
    time = "{median:.4g} ({min:.4g} to {max:.4g}, {n})".format(**seconds) if seconds else "–"
    ratio = f"{row['ratio']:.2f} of {row['ratio_to']}" if row["ratio"] is not None else "–"
    return f"| {row['case']} | {row['contender']} | {time} | {'–' if memory is None else f'{memory:,.0f}'} | {ratio} |"


def _host(row: Row) -> str:
    machine = row["machine"]
    power = f" ({machine['gpu_power_limit']})" if "gpu_power_limit" in machine else ""
    gpu = f"{machine['gpu']}{power}, " if "gpu" in machine else ""
    return f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"


if __name__ == "__main__":
    sys.exit(main())
