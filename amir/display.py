"""Live progress in the terminal, and the picture of a run's curves."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
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
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from .config import RunStopped


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


class _Output(Console):
    """The terminal, or what the output was sent to."""

    def on_broken_pipe(self) -> None:
        """RunStopped instead of an end without a word."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()
        raise RunStopped("what read the output has closed it")


class Terminal:
    """A progress bar under a line a step; the lines alone where there is no terminal."""

    def __init__(self, total_steps: int, tensorboard: Path, log: Callable[[str], None]) -> None:
        self.console = _Output()
        self._events: Path | None = (
            tensorboard / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        )
        self._log = log
        columns: list[ProgressColumn] = [BarColumn(bar_width=20), MofNCompleteColumn()]
        columns += [TextColumn("{task.description}"), TimeRemainingColumn(compact=True)]
        self._progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task: TaskID = self._progress.add_task("evaluating and sampling", total=total_steps)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, finished_steps: int) -> None:
        """Starts the bar and TensorBoard's file after the steps that are done."""
        self._progress.update(self._task, completed=finished_steps)
        first = finished_steps + 1  # TensorBoard forgets what earlier files have from this step on
        restart = Event(step=first, session_log=SessionLog(status=SessionLog.START))
        self._append(Event(step=first, file_version="brain.Event:2"), restart)

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
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if value is not None]
        self._append(Event(step=metrics["step"], summary=Summary(value=values)))

    def say(self, text: str) -> None:
        """Shows a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _append(self, *events: Event) -> None:
        """Adds to TensorBoard's file. One that cannot be written is said, and the run goes on: it is a view only."""
        if self._events is None:
            return
        try:
            self._events.parent.mkdir(exist_ok=True)
            with self._events.open("ab") as file:
                for event in events:
                    event.wall_time = time.time()
                    RecordWriter(file).write(event.SerializeToString())
        except OSError as error:
            text = f"{self._events}: cannot be written ({error.strerror}); metrics.jsonl has what TensorBoard lacks"
            self._events = None
            self._log(text)
            self.say(text)


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
