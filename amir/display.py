"""Live progress in the terminal, and the picture of a run's curves."""

import json
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter


class Silence:
    """The display of the ranks that are not the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def begin(self, finished_steps: int) -> None:
        """Nothing."""

    def step(self, metrics: dict[str, Any]) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""


class Terminal:
    """A progress bar under a line a step; the lines alone where there is no terminal."""

    def __init__(self, total_steps: int, tensorboard: Path) -> None:
        self.console = Console()
        self._tensorboard = tensorboard
        columns: list[ProgressColumn] = [BarColumn(bar_width=20), MofNCompleteColumn()]
        columns += [TextColumn("{task.description}"), TimeRemainingColumn(compact=True)]
        self._progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task: TaskID = self._progress.add_task("evaluating and sampling", total=total_steps)
        self._writer: SummaryWriter | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        if self._writer:
            self._writer.close()

    def begin(self, finished_steps: int) -> None:
        """Starts the bar and TensorBoard's file after the steps that are done."""
        self._progress.update(self._task, completed=finished_steps)
        self._writer = SummaryWriter(str(self._tensorboard), purge_step=finished_steps + 1)

    def step(self, metrics: dict[str, Any]) -> None:
        """Shows one step and adds it to TensorBoard."""
        shares = {"reward": metrics["reward"], "success": metrics["success"], "equal": metrics["zero_variance_share"]}
        shown = "  ".join(f"{name} {value:.2f}" for name, value in shares.items() if value is not None)
        summary = (
            f"{shown}  pairs {metrics['pairs']:3d}  {metrics['completion_tokens']:.0f} tokens  "
            f"{metrics['tokens_per_second']:.0f} tok/s  {metrics['peak_memory_mb'] / 1000:.1f} GB"
        )
        self._progress.update(self._task, completed=metrics["step"], description=summary)
        line = f"step {metrics['step']:4d}  {summary}  {metrics['step_seconds']:.1f} s"
        self.console.print(line, highlight=False, soft_wrap=True)
        for name, value in metrics.items():
            if self._writer and value is not None:
                self._writer.add_scalar(name, value, metrics["step"])

    def say(self, text: str) -> None:
        """Shows a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


CURVES = ("pairs", "grad_norm", "pair_grad_share", "zero_gradient_share", "step_seconds")


def draw_curves(run: Path) -> Path:
    """Draws the run's curves from metrics.jsonl and evaluations.jsonl into curves.png; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = _rows(run / "metrics.jsonl")
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    first = "reward" if all(row["success"] is None for row in rows) else "success"
    for axis, name in zip(axes.flat, (first, *CURVES), strict=True):
        axis.plot([row["step"] for row in rows], [row[name] for row in rows], marker=".", label="sampled in training")
        axis.set_title(name)
        axis.set_xlabel("step")
        if name != "reward":
            axis.set_ylim(bottom=0)
    evaluations = _rows(run / "evaluations.jsonl")
    if evaluations:
        points = ([row["step"] for row in evaluations], [row.get(first) for row in evaluations])
        axes.flat[0].plot(*points, "s--", label="held out")
        axes.flat[0].legend()
    if first == "success":
        axes.flat[0].set_ylim(0, 1)
    figure.suptitle(run.name)
    figure.savefig(run / "curves.png", dpi=110)
    pyplot.close(figure)
    return run / "curves.png"


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
