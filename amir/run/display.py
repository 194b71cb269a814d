"""Progress in the terminal, TensorBoard's file, and the plot of a run's curves."""

import contextlib
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
)
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ..errors import RunStopped
from .metrics import tag


class Display(Protocol):
    """Where progress is shown."""

    def begin(self, finished_steps: int) -> None:
        """The run starts, after `finished_steps` steps of earlier processes."""

    def phase(self, name: str) -> None:
        """The step enters a phase: sampling, rewarding, the training pass."""

    def progress(self, done: int, total: int) -> None:
        """`done` of the `total` micro-batches of the phase are done."""

    def step(self, metrics: dict[str, Any]) -> None:
        """A step is finished and has these metrics."""

    def evaluation(self, metrics: dict[str, Any]) -> None:
        """An evaluation on held-out prompts has these metrics."""

    def message(self, text: str) -> None:
        """A line for the user."""


class NullDisplay:
    """Shows nothing: for ranks that are not the first, and for runs inside other programs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def begin(self, finished_steps: int) -> None:
        """Shows nothing."""

    def phase(self, name: str) -> None:
        """Shows nothing."""

    def progress(self, done: int, total: int) -> None:
        """Shows nothing."""

    def step(self, metrics: dict[str, Any]) -> None:
        """Shows nothing."""

    def evaluation(self, metrics: dict[str, Any]) -> None:
        """Shows nothing."""

    def message(self, text: str) -> None:
        """Shows nothing."""


class _Output(Console):
    """The terminal, or the file or program that reads the output."""

    def on_broken_pipe(self) -> None:
        """RunStopped; rich itself would exit without a message."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()
        raise RunStopped("the program that reads this output closed the pipe; expected one that reads to the end")


class Terminal:
    """A progress bar below one line per step; only the lines if the output is not a terminal."""

    def __init__(self, total_steps: int, tensorboard: Path, log: Callable[[str], None]) -> None:
        self.console = _Output()
        self._events: Path | None = (
            tensorboard / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        )
        self._log = log
        self._total = total_steps
        self._last_steps: deque[float] = deque(maxlen=10)
        self._phase = "starting"
        columns: list[ProgressColumn] = [BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("steps")]
        columns += [TextColumn("{task.description}"), TextColumn("{task.fields[time_left]}")]
        self._progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task: TaskID = self._progress.add_task(self._phase, total=total_steps, time_left="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, finished_steps: int) -> None:
        """Starts the progress bar and TensorBoard's file after `finished_steps`."""
        self._progress.update(self._task, completed=finished_steps)
        first = finished_steps + 1 if finished_steps else 0  # TensorBoard drops what earlier files have from here on
        restart = Event(step=first, session_log=SessionLog(status=SessionLog.START))
        self._append(Event(step=first, file_version="brain.Event:2"), restart)

    def phase(self, name: str) -> None:
        """Shows the phase of the step beside the bar."""
        self._phase = name
        self._progress.update(self._task, description=name)

    def progress(self, done: int, total: int) -> None:
        """Shows the current micro-batch beside the bar."""
        self._progress.update(self._task, description=f"{self._phase}, micro-batch {done + 1}/{total}")

    def step(self, metrics: dict[str, Any]) -> None:
        """Shows the line of a step and writes its metrics to TensorBoard's file."""
        shares = {"reward": metrics["reward"], "success": metrics["success"], "equal": metrics["zero_variance_share"]}
        shown = "  ".join(f"{name} {value:.2f}" for name, value in shares.items() if value is not None)
        summary = (
            f"{shown}  pairs {metrics['pairs']:3d}  {metrics['completion_tokens']:.0f} tokens  "
            f"{metrics['tokens_per_second']:.0f} tok/s  {metrics['peak_memory_mb'] / 1000:.1f} GB"
        )
        self._last_steps.append(metrics["step_seconds"])
        time_left = self._time_left(metrics["step"])
        self._progress.update(self._task, completed=metrics["step"], time_left=time_left)
        line = f"step {metrics['step']:4d}/{self._total}  {summary}  {metrics['step_seconds']:.1f} s  {time_left}"
        self.console.print(line.rstrip(), highlight=False, soft_wrap=True)
        self._show_in_tensorboard(metrics, tag)

    def evaluation(self, metrics: dict[str, Any]) -> None:
        """Writes the metrics of an evaluation to TensorBoard's file."""
        self._show_in_tensorboard(metrics, "eval/{}".format)

    def _time_left(self, step: int) -> str:
        """Time left to the last step, at the mean time of the latest steps; evaluations are not counted."""
        seconds = mean(self._last_steps) * (self._total - step)
        return f"{timedelta(seconds=round(seconds))} left" if step < self._total else ""

    def message(self, text: str) -> None:
        """Shows a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _show_in_tensorboard(self, metrics: dict[str, Any], tag_of: Callable[[str], str]) -> None:
        values = [
            Summary.Value(tag=tag_of(name), simple_value=value)
            for name, value in metrics.items()
            if value is not None and name != "step"
        ]
        self._append(Event(step=metrics["step"], summary=Summary(value=values)))

    def _append(self, *events: Event) -> None:
        """Appends to TensorBoard's file. If it cannot be written, the run reports it once and continues."""
        if self._events is None:
            return
        try:
            self._events.parent.mkdir(exist_ok=True)
            with self._events.open("ab") as file:
                for event in events:
                    event.wall_time = time.time()
                    RecordWriter(file).write(event.SerializeToString())
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            text = f"{self._events}: {reason}; the run continues without TensorBoard, and metrics.jsonl has every value"
            self._events = None
            self._log(text)
            self.message(text)


PANELS = (
    "success",
    "reward",
    "completion_tokens",
    "truncated_share",
    "kl",
    "entropy",
    "clip_share",
    "grad_norm",
    "pairs",
    "pair_grad_share",
    "zero_gradient_share",
    "step_seconds",
)
"""The metrics in curves.png, in rows of four; one that a run does not have is left out."""


def draw_curves(run: Path) -> Path:
    """Plots metrics.jsonl and evaluations.jsonl as curves.png; returns its path."""
    from matplotlib.figure import Figure

    rows, evaluations = _rows(run / "metrics.jsonl"), _rows(run / "evaluations.jsonl")
    names = [name for name in PANELS if any(row.get(name) is not None for row in rows)]
    lines = math.ceil(len(names) / 4)
    figure = Figure(figsize=(16, 3.2 * lines))
    margins = {"left": 0.04, "right": 0.99, "bottom": 0.16 / lines, "top": 1 - 0.24 / lines}
    axes = figure.subplots(lines, 4, squeeze=False, gridspec_kw=margins | {"wspace": 0.16, "hspace": 0.42})
    for axis, name in zip(axes.flat, names, strict=False):
        _draw_panel(axis, name, rows, evaluations)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    figure.suptitle(run.name, parse_math=False)
    figure.savefig(run / "curves.png", dpi=80)
    return run / "curves.png"


def _draw_panel(axis: Any, name: str, rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    axis.plot([row["step"] for row in rows], [row.get(name) for row in rows], marker=".", label="sampled in training")
    axis.set_title(name)
    axis.set_xlabel("step")
    held_out = [row for row in evaluations if row.get(name) is not None]
    if held_out:
        axis.plot([row["step"] for row in held_out], [row[name] for row in held_out], "s--", label="held out")
        axis.legend()
    if name != "reward":
        axis.set_ylim(bottom=0)
    if name == "success":
        axis.set_ylim(0, 1)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
