"""Writes the numbers of README.md and kernels/README.md from the kept rows; `--check` compares only.

Of rows with the same bench, contender, case and machine the newest counts; of a head's case, the newest run. The head
ops stand in kernels/README.md, everything else in README.md.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bars import FROZEN, GROWTH, Bar, bars, latest_runs, tokens_of
from rows import kept

ROOT = Path(__file__).parents[1]
README, KERNELS_README = ROOT / "README.md", ROOT / "kernels" / "README.md"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
EMPTY = "No row is kept yet; `make bench` makes them."

Row = dict[str, Any]


def main() -> int:
    """Rewrites the block between the markers of each document; with `--check` returns 1 where that would change it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is behind the rows")
    check = parser.parse_args().check
    behind = 0
    for path, block in blocks(kept()).items():
        text = path.read_text()
        renewed = with_block(text, block)
        if check and renewed != text:
            print(f"{path.relative_to(ROOT)} is behind bench/results: run `make table`", file=sys.stderr)
            behind = 1
        if not check:
            path.write_text(renewed)
    return behind


def blocks(rows: Iterable[Row]) -> dict[Path, str]:
    """What stands in each document."""
    of: dict[str, list[Row]] = {"linear_logprob": [], "gpu_check": []}
    others: list[Row] = []
    for row in rows:
        of.get(row["bench"], others).append(row)
    head = [head_tables(of["linear_logprob"]), *([tables(of["gpu_check"])] if of["gpu_check"] else [])]
    return {README: tables(others), KERNELS_README: "\n\n".join(head)}


def with_block(text: str, block: str) -> str:
    """`text` with what is between the two markers replaced."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError(f"the document needs the lines {START} and {END}, in this order")
    return f"{before}{START}\n{block}\n{END}{after}"


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
    lines = [
        f"**{run[0]['bench']}**",
        "",
        "| case | contender | seconds, median (min to max, n) | peak memory, MB | time |",
        "| --- | --- | --- | --- | --- |",
        *map(_line, run),
        "",
        _certificate(run[0]),
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    seconds, memory = row["seconds"], row["peak_memory_mb"]
    time = "{median:.4g} ({min:.4g} to {max:.4g}, {n})".format(**seconds) if seconds else "–"
    ratio = f"{row['ratio']:.2f} of {row['ratio_to']}" if row["ratio"] is not None else "–"
    if row.get("parts"):
        time += ": " + ", ".join(f"{name} {value:.3g}" for name, value in row["parts"].items())
    return f"| {row['case']} | {row['contender']} | {time} | {'–' if memory is None else f'{memory:,.0f}'} | {ratio} |"


# ---- the head ops ----------------------------------------------------------------------------------------------------


def head_tables(rows: Iterable[Row]) -> str:
    """The bars, the seconds and memory behind them, growth over tokens, and the birth certificates."""
    runs = latest_runs(rows)
    if not runs:
        return EMPTY
    found = bars(row for run in runs.values() for row in run.values())
    cases = {key: run for key, run in runs.items() if key[1] != GROWTH}
    growing = {key: run for key, run in runs.items() if key[1] == GROWTH}
    parts = [_bar_table([bar for bar in found if bar.mode != GROWTH]), _contender_table(cases)]
    for (head, _), run in growing.items():
        parts += [_growth_table(head, run), _bar_table([bar for bar in found if bar.mode == GROWTH])]
    parts.append("\n\n".join(dict.fromkeys(_certificate(row) for run in runs.values() for row in run.values())))
    return "\n\n".join(part for part in parts if part)


def _bar_table(found: list[Bar]) -> str:
    """A line for each head, mode and op; a column for each bar."""
    if not found:
        return ""
    names = list(dict.fromkeys(bar.name for bar in found))
    lines: dict[tuple[str, str, str], dict[str, Bar]] = {}
    for bar in found:
        lines.setdefault((bar.head, bar.mode, bar.contender), {})[bar.name] = bar
    header = ("head", "case", "op", *names)
    return _markdown(header, [(*key, *(_inequality(line.get(name)) for name in names)) for key, line in lines.items()])


def _inequality(bar: Bar | None) -> str:
    if bar is None:
        return ""
    return f"{bar.figure:.2f} ≤ {bar.bound:g}" if bar.met else f"**{bar.figure:.2f} > {bar.bound:g}**"


def _contender_table(cases: dict[tuple[str, str], dict[str, Row]]) -> str:
    """A line for each contender; a column for each head and mode."""
    if not cases:
        return ""
    names = dict.fromkeys(name for run in cases.values() for name in run)
    header = ("contender", *(f"{head}, {'frozen' if mode == FROZEN else 'trained'}" for head, mode in cases))
    return _markdown(header, [(name, *(_measured(run.get(name)) for run in cases.values())) for name in names])


def _growth_table(head: str, run: dict[str, Row]) -> str:
    """A line for each contender; a column for each number of tokens."""
    names = dict.fromkeys(row["contender"] for row in run.values())
    tokens = sorted({tokens_of(row) for row in run.values()})
    header = (f"{head}, {FROZEN}", *(f"T = {t:,}" for t in tokens))
    return _markdown(header, [(name, *(_measured(run.get(f"{name}, {t:,}")) for t in tokens)) for name in names])


def _measured(row: Row | None) -> str:
    if row is None:
        return ""
    seconds, memory = row["seconds"]["median"], row["peak_memory_mb"]
    return f"{seconds:.3g} s" if memory is None else f"{seconds:.3g} s, {memory:,.0f} MB"


def _markdown(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    header = list(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines))


def _certificate(row: Row) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    return f"{_host(row)}. {versions}. Commit {row['commit']}, {row['date'][:10]}: `{row['command']}`"


def _host(row: Row) -> str:
    machine = row["machine"]
    power = f" ({machine['gpu_power_limit']})" if "gpu_power_limit" in machine else ""
    gpu = f"{machine['gpu']}{power}, " if "gpu" in machine else ""
    return f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"


if __name__ == "__main__":
    sys.exit(main())
