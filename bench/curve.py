"""Draws docs/quickstart-light.svg and docs/quickstart-dark.svg: the quick start's success by step, from its kept row.

It uses the newest row of `bench_quickstart.py` that has a curve. The picture's description has the commit and the
numbers as JSON, for a test.
"""

import json
from pathlib import Path
from typing import Any

from rows import kept_rows

DOCS = Path(__file__).parents[1] / "docs"
LIGHT = {"text": "#24292f", "grid": "#d0d7de", "sampled": "#0969da", "held out": "#bc4c00"}
DARK = {"text": "#e6edf3", "grid": "#30363d", "sampled": "#58a6ff", "held out": "#ffa657"}
PICTURES = {DOCS / "quickstart-light.svg": LIGHT, DOCS / "quickstart-dark.svg": DARK}


def newest_curve() -> dict[str, Any]:
    """The newest kept row that has a curve."""
    curves = [row for row in kept_rows() if "curve" in row]
    if not curves:
        raise SystemExit("no kept row has a curve: run bench/bench_quickstart.py")
    return curves[-1]


def description(row: dict[str, Any]) -> str:
    """The numbers of the picture, as JSON."""
    return json.dumps({"commit": row["commit"], "curve": row["curve"]})


def draw(row: dict[str, Any], path: Path, colours: dict[str, str]) -> None:
    """One picture on a transparent background."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "quickstart", "svg.fonttype": "none", "font.size": 10}
    from matplotlib import pyplot

    curve, text = row["curve"], colours["text"]
    figure, axes = pyplot.subplots(figsize=(7.2, 2.7), layout="constrained")
    axes.plot(curve["step"], curve["success"], color=colours["sampled"], marker=".", label="sampled in training")
    axes.plot(
        curve["held_out_step"],
        curve["held_out"],
        color=colours["held out"],
        marker="D",
        linestyle="none",
        label="held-out sums",
    )
    for step, value in zip(curve["held_out_step"], curve["held_out"], strict=True):
        axes.annotate(
            f"{value:.2f}",
            (step, value),
            xytext=(8, -9),
            textcoords="offset points",
            color=colours["held out"],
            weight="bold",
        )
    axes.set(xlabel="optimizer step", ylabel="success rate", ylim=(0, 1.05), xlim=(-0.5, max(curve["step"]) + 2.5))
    axes.grid(color=colours["grid"], linewidth=0.8)
    axes.tick_params(colors=text, length=0)
    axes.xaxis.label.set_color(text)
    axes.yaxis.label.set_color(text)
    axes.spines[:].set_visible(False)
    axes.legend(loc="lower right", frameon=False, labelcolor=text)
    figure.savefig(path, transparent=True, metadata={"Date": None, "Description": description(row)})
    pyplot.close(figure)


def main() -> None:
    """Draws both pictures."""
    row = newest_curve()
    for path, colours in PICTURES.items():
        draw(row, path, colours)


if __name__ == "__main__":
    main()
