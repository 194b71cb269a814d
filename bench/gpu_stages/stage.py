"""The list of stages, the parts of a stage, and the rows that they yield. Imports no torch: the parent runs on it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rows import timing

Row = dict[str, Any]

FAILED, NOT_RUN = ": failed: ", ": not run: "
"""In the case of a row without a number: the work failed, or it could not be started here."""
AT_MOST = "; at most "
"""In a case: the bound of the row's `ratio` follows."""
TOLERANCE = 0.15
"""Relative difference of a measurement from its prediction above which it is flagged."""


class Stage(NamedTuple):
    """A module of this package by name, and the seconds after which it is stopped."""

    module: str
    seconds: float


STAGES = {
    "calibration": Stage("calibration", 60),
    "correctness": Stage("correctness", 80),
    "odd-shapes": Stage("odd_shapes", 60),
    "times": Stage("op_times", 40),
    "peers": Stage("op_peers", 60),
    "step": Stage("trainer_step", 80),
    "drop-in": Stage("trl_drop_in", 40),
    "layers": Stage("model_layers", 30),
    "out-of-memory": Stage("out_of_memory", 30),
}
"""In this order, ours first. The limits add up to 8 minutes."""


@dataclass(frozen=True)
class Part:
    """A piece of a stage. If it crashes or takes longer than its limit, the stage continues with the next part."""

    name: str
    rows: Callable[[], Iterator[Row]]
    seconds: float = 60
    own: bool = True
    """whether its failure fails the check; False for peers and sweeps"""


class Ratio(NamedTuple):
    """The ratio of a row: to what, its value, and its bound."""

    to: str
    value: float
    at_most: float | None = None


def make_row(
    contender: str,
    case: str,
    workload: dict[str, Any],
    *,
    seconds: Sequence[float] = (),
    memory: float | None = None,
    ratio: Ratio | None = None,
    expected: Mapping[str, float] | None = None,
    observed: Mapping[str, float] | None = None,
) -> Row:
    """A row without its stage, machine, versions, commit and date. `expected` is what `rates.predict` returns."""
    row = {
        "bench": "gpu_check",
        "contender": contender,
        "workload": workload,
        "case": f"{case}{AT_MOST}{ratio.at_most:.3g}" if ratio and ratio.at_most is not None else case,
        "seconds": timing(seconds) if seconds else None,
        "peak_memory_mb": memory,
        "ratio_to": ratio and ratio.to,
        "ratio": ratio and ratio.value,
    }
    extra = {"expected": expected, "observed": observed}
    return row | {name: values for name, values in extra.items() if values is not None}


def failed(contender: str, case: str, reason: str) -> Row:
    """A row for work that failed."""
    return make_row(contender, f"{case}{FAILED}{reason}", {"check": case})


def not_run(contender: str, case: str, reason: str) -> Row:
    """A row for work that this machine cannot do: a package or a second GPU is missing."""
    return make_row(contender, f"{case}{NOT_RUN}{reason}", {"check": case})


def message_of(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def deviations(row: Row) -> dict[str, float]:
    """Measured over predicted, by name, where they differ by more than `TOLERANCE`."""
    expected, ratios = row.get("expected") or {}, {}
    measured = {
        "seconds": row["seconds"] and row["seconds"]["median"],
        "peak_memory_mb": row["peak_memory_mb"],
    }
    for name, value in measured.items():
        if value and expected.get(name) and abs(value / expected[name] - 1) > TOLERANCE:
            ratios[name] = value / expected[name]
    return ratios


class Report:
    """What the rows amount to: prints each as it comes, and counts what fails the check."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self.rows = self.bad = 0
        self._print = print_line

    def add(self, row: Row, own: bool = True) -> None:
        """Prints a row; counts it if it fails the check: work of ours that failed, or a bound that is missed."""
        self.rows += 1
        case, _, bound = row["case"].partition(AT_MOST)
        where = f"{row['contender']}: {case}"
        if FAILED in case:
            self.bad += own
            self._print(f"FAILED  {where}")
        elif NOT_RUN in case:
            self._print(f"not run {where}")
        elif bound:
            met = row["ratio"] <= float(bound)
            self.bad += not met
            self._print(f"{'met' if met else 'MISSED':7} {row['ratio']:.3g} <= {bound}  {where} / {row['ratio_to']}")
        else:
            self._print(f"        {figures(row)}  {where}")
        for name, ratio in deviations(row).items():
            self._print(f"DIFFERS {ratio:.2f} times the predicted {name}: {where}")


def figures(row: Row) -> str:
    """Seconds and memory of a row in words."""
    parts = [f"{row['seconds']['median']:.3g} s"] if row["seconds"] else []
    parts += [f"{row['peak_memory_mb']:,.0f} MB"] if row["peak_memory_mb"] is not None else []
    parts += [f"ratio {row['ratio']:.3g}"] if row["ratio"] is not None else []
    parts += [f"{name} {value:.4g}" for name, value in row.get("observed", {}).items()]
    return ", ".join(parts)


def in_stage(rows: Iterable[Row], stage: str, part: str) -> Iterator[Row]:
    """The rows with their stage and part in the workload."""
    for row in rows:
        yield row | {"workload": {"stage": stage, "part": part} | row["workload"]}
