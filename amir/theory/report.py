"""What `amir dynamics` prints, draws and writes for one setting of the recurrence."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .recurrence import Recurrence, log_odds, probability

PICTURES = (".png", ".svg", ".pdf")
CURVE_POINTS = 400


def describe(recurrence: Recurrence, start: float, steps: int) -> dict[str, Any]:
    """The setting, the trajectory, the fixed points and the limit, as JSON has them."""
    return asdict(recurrence) | {
        "start": start,
        "trajectory": recurrence.trajectory(start, steps),
        "fixed_points": [asdict(point) | {"p": point.p, "stable": point.stable} for point in recurrence.fixed_points()],
        "limit": list(recurrence.limit(start)),
    }


def report_lines(description: dict[str, Any]) -> list[str]:
    """The same in words."""
    lines = ["iteration  success probability"]
    lines += [f"{iteration:9d}  {p:.6f}" for iteration, p in enumerate(description["trajectory"])]
    lines += [_point_line(**point) for point in description["fixed_points"]]
    return [*lines, _limit_line(description["start"], description["limit"], mirror=description["alpha"] == 0)]


def _point_line(p: float, log_odds: float, derivative: float, stable: bool) -> str:
    kind = "stable" if stable else "unstable"
    return f"fixed point {p:.6f} (log-odds {log_odds:.3f}): {kind}, derivative {derivative:.3f}"


def _limit_line(start: float, limit: list[float], *, mirror: bool) -> str:
    if mirror:
        return f"from {start:g} the probability approaches 1: no penalty to the reference bounds its log-odds"
    if len(limit) == 1:
        return f"from {start:g} the iterations converge to {limit[0]:.6f}"
    if len(limit) == 2:
        return f"from {start:g} the iterations alternate between {limit[0]:.6f} and {limit[1]:.6f}"
    return f"from {start:g} the iterations neither converge nor alternate between two values"


def refuse_picture_name(path: Path) -> None:
    """ConfigError for a kind of picture that cannot be drawn."""
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"--plot {path}: expected a file name that ends in {', '.join(PICTURES)}")


def draw(recurrence: Recurrence, description: dict[str, Any], path: Path) -> None:
    """Draws the iteration as a function of the probability, with its fixed points, and the trajectory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    before = [(i + 0.5) / CURVE_POINTS for i in range(CURVE_POINTS)]
    left.plot(before, [probability(recurrence.step(log_odds(p))) for p in before], label="after one iteration")
    left.plot([0, 1], [0, 1], ":", color="gray", label="unchanged")
    for point in description["fixed_points"]:
        left.plot(point["p"], point["p"], "o" if point["stable"] else "x", color="black")
    left.set(xlabel="success probability before", ylabel="after", title="stable: dot, unstable: cross")
    left.legend()
    right.plot(description["trajectory"], marker=".")
    right.axhline(recurrence.p_ref, color="gray", linestyle=":", label="reference policy")
    right.set(xlabel="iteration", ylabel="success probability", ylim=(0, 1))
    right.legend()
    figure.savefig(path)
