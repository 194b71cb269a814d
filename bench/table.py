"""Writes the tables of the documents from the kept rows; `--check` changes nothing and compares.

The text between the lines `<!-- rows: NAME -->` and `<!-- end of rows -->` of a document is generated here. Of rows
with equal `rows.key` the newest is shown; the tables of a head show its newest run.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bars import DEAD, FROZEN, FUSED, GROWTH, OURS, Bar, bars, latest_runs, tokens_of
from rows import Row, host_of, kept_rows, newest

ROOT = Path(__file__).parents[1]
README, RESULTS, HARDWARE = ROOT / "README.md", ROOT / "bench" / "RESULTS.md", ROOT / "docs" / "hardware.md"
DOCUMENTS = (README, RESULTS, HARDWARE)
BLOCK = re.compile(r"^<!-- rows: ([a-z_]+) -->\n(.*?)^<!-- end of rows -->$", re.MULTILINE | re.DOTALL)
EMPTY = "No rows are kept yet; `make bench` makes them."
BLANK = "–"

Column = tuple[str, Callable[[Row], str]]


def main() -> int:
    """Rewrites every table; with `--check`, returns 1 if that would change a document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is behind the rows")
    check = parser.parse_args().check
    rows, behind = kept_rows(), 0
    for path in DOCUMENTS:
        text = path.read_text()
        renewed = with_tables(text, rows)
        if check and renewed != text:
            print(f"{path.relative_to(ROOT)} is behind bench/results: run `make table`", file=sys.stderr)
            behind = 1
        if not check:
            path.write_text(renewed)
    return behind


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """`text` with new tables; ValueError for a document without a table, or with an unknown one."""
    names = [match[1] for match in BLOCK.finditer(text)]
    unknown = set(names) - set(TABLES)
    if not names or unknown:
        raise ValueError(f"expected `<!-- rows: NAME -->` with NAME of {', '.join(TABLES)}; found {names or 'none'}")
    return BLOCK.sub(lambda match: f"<!-- rows: {match[1]} -->\n{TABLES[match[1]](rows)}\n<!-- end of rows -->", text)


# ---- cells ---------------------------------------------------------------------------------------------------------


def time(row: Row) -> str:
    """Median seconds with the range and the number of measurements."""
    seconds = row["seconds"]
    if not seconds:
        return ""
    if seconds["n"] == 1:
        return figure(seconds["median"])
    return f"{figure(seconds['median'])} ({figure(seconds['min'])} to {figure(seconds['max'])}, n = {seconds['n']})"


def figure(seconds: float) -> str:
    """Three digits, without an exponent."""
    return f"{seconds:.3g}" if seconds >= 0.001 else f"{seconds:.6f}"


def megabytes(row: Row) -> str:
    """Peak memory in MB."""
    return "" if row["peak_memory_mb"] is None else f"{row['peak_memory_mb']:,.0f}"


def gigabytes(row: Row | None) -> str:
    """Peak memory in GB."""
    return "" if row is None or row["peak_memory_mb"] is None else f"{row['peak_memory_mb'] / 1000:.1f}"


def ratio(row: Row) -> str:
    """The ratio of the time to that of another contender in the same run."""
    return "" if row["ratio"] is None else f"{row['ratio']:.2f}" if row["ratio"] >= 0.01 else f"{row['ratio']:.1g}"


def size(name: str, header: str) -> Column:
    """A size of the workload."""
    return header, lambda row: plain(row["workload"].get(name))


def seen(name: str, header: str) -> Column:
    """A count or mean that the run observed."""
    return header, lambda row: plain(row.get("observed", {}).get(name))


def part(name: str) -> Column:
    """Seconds of a part of the time."""
    return f"{name}, s", lambda row: f"{row['parts'][name]:.3g}" if name in row.get("parts", {}) else ""


def plain(value: Any) -> str:
    """A value of a row in a cell."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " → ".join(plain(part) for part in value)
    return f"{value:,}" if isinstance(value, int) else str(value)


CONTENDER: Column = ("contender", lambda row: row["contender"])
SECONDS: Column = ("seconds, median", time)
MEMORY: Column = ("peak memory, MB", megabytes)


def compared(rows: Sequence[Row]) -> Column:
    """The ratio of times; the header names the other contender if it is the same in all rows."""
    rivals = {row["ratio_to"] for row in rows if row["ratio_to"]}
    if len(rivals) == 1:
        return f"time / {rivals.pop()}", ratio
    return "time", lambda row: f"{ratio(row)} of {row['ratio_to']}" if row["ratio_to"] else ""


# ---- tables --------------------------------------------------------------------------------------------------------


def section(
    rows: Iterable[Row],
    columns: Sequence[Column],
    title: Callable[[dict[str, Any]], str] | None = None,
    compares: bool = True,
) -> str:
    """Tables of the newest rows, one per `title` of a workload and one line per row, with their conditions below."""
    shown = newest(rows)
    if not shown:
        return EMPTY
    runs = letters(shown)
    run: list[Column] = [("run", lambda row: runs[_run(row)])] if len(runs) > 1 else []
    groups: dict[str, list[Row]] = {}
    for row in shown:
        groups.setdefault(title(row["workload"]) if title else "", []).append(row)
    parts = []
    for words, group in groups.items():
        of_rival = [compared(group)] if compares else []
        parts += [f"**{words[0].upper()}{words[1:]}**"] if words else []
        parts.append(listing(group, [*columns, *of_rival, *run]))
    return "\n\n".join([*parts, conditions(shown)])


def listing(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """One line per row, without columns that are blank throughout."""
    cells = [[value(row) for row in rows] for _, value in columns]
    full = [(header, column) for (header, _), column in zip(columns, cells, strict=True) if any(column)]
    return markdown([header for header, _ in full], zip(*(column for _, column in full), strict=True))


def pivot(rows: Sequence[Row], columns: Sequence[Column], cell: Callable[[Row | None], str]) -> str:
    """A line for each workload, a column for each contender."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines: dict[str, dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(str(row["workload"]), {})[row["contender"]] = row
    firsts = [next(iter(line.values())) for line in lines.values()]
    sizes = [(header, [value(row) for row in firsts]) for header, value in columns]
    cells_by_contender = [(name, [cell(line.get(name)) for line in lines.values()]) for name in names]
    full = [(header, cells) for header, cells in (*sizes, *cells_by_contender) if any(cells)]
    return markdown([header for header, _ in full], zip(*(cells for _, cells in full), strict=True))


def markdown(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A table; an empty cell is a dash."""
    header = list(header)
    filled = ([cell or BLANK for cell in cells] for cells in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *filled))


# ---- where rows come from ------------------------------------------------------------------------------------------


def _run(row: Row) -> tuple[str, ...]:
    return row["commit"], row["date"][:10], row["command"], host_of(row), _versions(row)


def _versions(row: Row) -> str:
    return ", ".join(f"{name} {number}" for name, number in row["versions"].items())


def letters(rows: Iterable[Row]) -> dict[tuple[str, ...], str]:
    """A letter for each run, in order of appearance."""
    return {run: chr(ord("a") + number) for number, run in enumerate(dict.fromkeys(map(_run, rows)))}


def conditions(rows: Sequence[Row]) -> str:
    """Machine and versions once, and a line for each run: commit, date, command."""
    runs = letters(rows)
    places = list(dict.fromkeys(run[3:] for run in runs))
    if len(places) == 1:
        machine = f"{places[0][0]}; {places[0][1]}."
        descriptions = {run: f"commit `{run[0]}`, {run[1]}: `{run[2]}`" for run in runs}
    else:
        machine = "Several machines."
        descriptions = {run: f"commit `{run[0]}`, {run[1]}, {run[3]}; {run[4]}: `{run[2]}`" for run in runs}
    if len(runs) == 1:
        (only,) = descriptions.values()
        return f"{machine} Made at {only}"
    return "\n".join([machine, "", *(f"- run {runs[run]}: {words}" for run, words in descriptions.items())])


# ---- the benchmarks ------------------------------------------------------------------------------------------------


def of(bench: str, all_rows: Iterable[Row], **sizes: Any) -> list[Row]:
    """The rows of a benchmark whose workload has these sizes."""
    return [row for row in all_rows if row["bench"] == bench and sizes.items() <= row["workload"].items()]


def quickstart_table(rows: Sequence[Row]) -> str:
    """The success of the quick start."""
    success = (seen("sampled_success", "success, sampled"), seen("held_out_success", "success, held out"))
    columns = (CONTENDER, size("steps", "steps"), *success, SECONDS, MEMORY)
    return section(of("quickstart", rows), columns, compares=False)


def step_table(rows: Sequence[Row]) -> str:
    """A training step beside TRL's."""

    def title(workload: dict[str, Any]) -> str:
        reward = {"random": "random rewards"}.get(workload["reward"], f"reward: {workload['reward']}")
        return (
            f"{workload['task']}, {workload['prompts']} × {workload['group_size']} completions of up to "
            f"{workload['max_completion_tokens']} tokens, {reward}"
        )

    parts = [part(name) for name in ("rollout", "scoring", "forward", "backward")]
    signal = ("groups without signal", lambda row: "{groups_without_signal} of {groups}".format(**row["observed"]))
    columns = (CONTENDER, SECONDS, *parts, MEMORY, seen("mean_completion_tokens", "mean completion tokens"), signal)
    return section(of("step", rows), columns, title)


def packing_table(rows: Sequence[Row]) -> str:
    """The packed training pass beside padded rows."""
    sizes = (size("prompt_tokens", "prompt tokens"), size("prompt_to_completion", "prompt / completion"))
    columns = (*sizes, CONTENDER, seen("tokens_computed", "tokens computed"), SECONDS, MEMORY)
    return section(of("packing", rows), columns)


def memory_table(rows: Sequence[Row]) -> str:
    """Counted peak memory: one line per step, one column per head."""
    shown = newest(of("memory", rows))
    if not shown:
        return EMPTY
    return f"{pivot(shown, (size('model', 'model'), *memory_columns()), gigabytes)}\n\n{conditions(shown)}"


def memory_columns() -> tuple[Column, ...]:
    """The columns in which the counted steps differ."""
    return (
        size("weights", "frozen weights"),
        ("trained", lambda row: f"LoRA r {row['workload']['lora_r']}" if row["workload"]["lora_r"] else "every weight"),
        size("completion_tokens", "completion tokens"),
        size("micro_batch_tokens", "micro-batch tokens"),
        ("layers", layers),
    )


def layers(row: Row) -> str:
    """How the activations of layers are saved."""
    workload = row["workload"]
    return "offloaded" if workload["offloaded"] else "checkpointed" if workload["checkpointed"] else "kept"


def cards_table(rows: Sequence[Row]) -> str:
    """Peak memory of the trainer's step with checkpointed layers, by size of the micro-batch."""
    shown = newest(of("memory", rows, checkpointed=True, offloaded=False, completion_tokens=1024))
    shown = [row for row in shown if row["contender"] == "amir"]
    if not shown:
        return EMPTY
    tokens = sorted({row["workload"]["micro_batch_tokens"] for row in shown})
    lines: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in shown:
        workload = row["workload"]
        trained = "LoRA" if workload["lora_r"] else "every weight"
        lines.setdefault((workload["model"], workload["weights"], trained), {})[workload["micro_batch_tokens"]] = row
    cells = [(*line, *(gigabytes(by_tokens.get(n)) for n in tokens)) for line, by_tokens in sorted(lines.items())]
    return markdown(("model", "frozen weights", "trained", *(f"{n:,} tokens" for n in tokens)), cells)


def trl_table(rows: Sequence[Row]) -> str:
    """TRL's trainer with its own head and with ours."""

    def title(workload: dict[str, Any]) -> str:
        dead = f", {workload['zero_advantage_rows']} of {workload['completions']} completions without advantage"
        return workload["work"] + ("" if workload["work"] == "log-probs" else dead)

    return section(of("trl", rows), (CONTENDER, SECONDS, MEMORY), title)


def preference_loss_table(rows: Sequence[Row]) -> str:
    """The pair term by itself, and within a training pass."""

    def title(workload: dict[str, Any]) -> str:
        if workload["what"] == "the op":
            return "The op, forward and backward"
        tokens = f"{workload['prompt_tokens']} + {workload['completion_tokens']} tokens"
        return f"Within a training pass of {workload['model']}, {workload['dtype']}, LoRA r 16, {tokens}"

    sizes = (size("rows", "rows"), size("group_size", "group size"), size("pairs", "pairs"))
    return section(of("preference_loss", rows), (*sizes, CONTENDER, SECONDS, MEMORY), title)


def gpu_table(rows: Sequence[Row]) -> str:
    """What was timed on a GPU, a table each stage, beside its prediction; comparisons of results are not shown."""

    def predicted(row: Row) -> str:
        seconds = row.get("expected", {}).get("seconds")
        return f"{row['seconds']['median'] / seconds:.2f}" if seconds else ""

    timed = [row for row in of("gpu_check", rows) if row["seconds"]]
    case = ("case", lambda row: row["case"].partition("; at most ")[0])
    columns = (case, CONTENDER, SECONDS, ("time / predicted", predicted), MEMORY)
    return section(timed, columns, lambda workload: f"Stage {workload['stage']}", compares=False)


# ---- the head ops ----------------------------------------------------------------------------------------------------


def head_tables(rows: Iterable[Row]) -> str:
    """The bounds, the measured seconds and memory, growth over tokens, and the conditions."""
    runs = latest_runs(rows)
    if not runs:
        return EMPTY
    all_rows = [row for run in runs.values() for row in run.values()]
    measured = bars(all_rows)
    cases = {key: run for key, run in runs.items() if key[1] != GROWTH}
    growing = {key: run for key, run in runs.items() if key[1] == GROWTH}
    of_cases, of_growth = ([bar for bar in measured if (bar.mode == GROWTH) == grown] for grown in (False, True))
    parts = [
        "**Ratios and their bounds** (bold where the bound is missed)",
        _bar_table(of_cases),
        "**Seconds and memory of one loss, forward and backward**",
        _contender_table(cases, all_rows),
    ]
    for (head, _), run in growing.items():
        parts += [
            f"**Growth with the number of tokens T, {head}, {FROZEN}**",
            _growth_table(run),
            _bar_table(of_growth),
        ]
    parts.append(conditions(all_rows))
    return "\n\n".join(part for part in parts if part)


def _bar_table(measured: list[Bar]) -> str:
    """A line for each head, mode and op; a column for each bar."""
    if not measured:
        return ""
    names = list(dict.fromkeys(bar.name for bar in measured))
    lines: dict[tuple[str, str, str], dict[str, Bar]] = {}
    for bar in measured:
        lines.setdefault((bar.head, bar.mode, bar.contender), {})[bar.name] = bar
    cells = [(*key, *(_inequality(line.get(name)) for name in names)) for key, line in lines.items()]
    return markdown(("head", "case", "op", *names), cells)


def _inequality(bar: Bar | None) -> str:
    if bar is None:
        return ""
    return f"{bar.figure:.2f} ≤ {bar.bound:g}" if bar.met else f"**{bar.figure:.2f} > {bar.bound:g}**"


def _contender_table(cases: dict[tuple[str, str], dict[str, Row]], all_rows: Sequence[Row]) -> str:
    """A line for each head and mode; a column for each contender, ours first and the bare products last."""
    if not cases:
        return ""
    names = dict.fromkeys(name for run in cases.values() for name in run)
    ours = [name for name in (FUSED, OURS, DEAD) if name in names]
    products = sorted(name for name in names if name.startswith("bare"))
    ordered = [*ours, *(name for name in names if name not in (*ours, *products)), *products]
    runs = letters(all_rows)
    lines = [
        (head, mode, *(measured(run.get(name)) for name in ordered), runs[_run(next(iter(run.values())))])
        for (head, mode), run in cases.items()
    ]
    width = None if len(runs) > 1 else -1
    return markdown(("head", "case", *ordered, "run")[:width], (line[:width] for line in lines))


def _growth_table(run: dict[str, Row]) -> str:
    """A line for each contender; a column for each number of tokens."""
    names = dict.fromkeys(row["contender"] for row in run.values())
    tokens = sorted({tokens_of(row) for row in run.values()})
    lines = [(name, *(measured(run.get(f"{name}, {t:,}")) for t in tokens)) for name in names]
    return markdown(("contender", *(f"T = {t:,}" for t in tokens)), lines)


def measured(row: Row | None) -> str:
    """Seconds and memory in one cell."""
    if row is None:
        return ""
    seconds = row["seconds"]["median"]
    spent = f"{seconds:.3g} s" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"
    return f"{spent}, {megabytes(row)} MB" if megabytes(row) else spent


# ---- the README ----------------------------------------------------------------------------------------------------

PEERS = ("full logits", ("Liger", "Liger compiled"), "TRL, best chunk")


def headline(rows: Sequence[Row]) -> str:
    """Six rows: four of ops, two of a whole step."""
    heads = {(head.split()[0], mode): run for (head, mode), run in latest_runs(rows).items() if mode != GROWTH}
    lines: list[tuple[str, ...]] = []
    used: list[Row] = []
    for model, mode, op in HEADS:
        run = heads[model, mode]
        used += run.values()
        sizes = run[op]["workload"]
        shape = f"{sizes['tokens']:,} tokens, H = {sizes['hidden_size']}, V = {sizes['vocabulary']:,}"
        lines.append((f"`{op}`, {mode}", shape, measured(run[op]), *(measured(fastest(run, peer)) for peer in PEERS)))
    (eager, ours) = newest(of("preference_loss", rows, rows=512, group_size=8))
    used.append(ours)
    lines.append(("`preference_loss`", "512 scores, groups of 8", measured(ours), measured(eager), "", ""))
    for task in STEPS:
        contenders = {row["contender"]: row for row in newest(of("step", rows, **task))}
        used += contenders.values()
        sizes = contenders["amir"]["workload"]
        shape = (
            f"{sizes['prompts']} × {sizes['group_size']} completions of up to {sizes['max_completion_tokens']} tokens"
        )
        name = f"a whole GRPO step, {sizes['task'].split(' with ')[0]}"
        lines.append((name, shape, measured(contenders["amir"]), "", "", measured(contenders["trl"])))
    places = dict.fromkeys(f"{host_of(row)}, float32, torch {row['versions']['torch']}" for row in used)
    header = ("operation", "shape", "ours", "eager, full logits", "Liger", "TRL")
    return f"{markdown(header, lines)}\n\n{'; '.join(places)}."


HEADS = (
    ("Qwen2.5-0.5B", "frozen head", "linear_policy_loss"),
    ("Gemma-3", "frozen head", "linear_policy_loss"),
    ("Qwen2.5-0.5B", "trained head", "linear_logprob"),
)
STEPS: tuple[dict[str, Any], ...] = (
    {"task": "one-digit sums", "reward": "last number right"},
    {"task": "GSM8K with a worked example before each question", "reward": "random"},
)


def fastest(run: dict[str, Row], names: str | tuple[str, ...]) -> Row | None:
    """The row with the least median among these contenders."""
    candidates = [run[name] for name in ((names,) if isinstance(names, str) else names) if name in run]
    return min(candidates, key=lambda row: row["seconds"]["median"], default=None)


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "headline": headline,
    "quickstart": quickstart_table,
    "step": step_table,
    "linear_logprob": head_tables,
    "preference_loss": preference_loss_table,
    "packing": packing_table,
    "memory": memory_table,
    "cards": cards_table,
    "trl": trl_table,
    "gpu_check": gpu_table,
}


if __name__ == "__main__":
    sys.exit(main())
