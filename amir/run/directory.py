"""The run directory: configuration, metrics, completions, checkpoints. No record in it is overwritten or lost.

config.yaml        the resolved configuration
run.json           what the run is made of, and each process of it: command, versions, machine
metrics.jsonl      one line per step
evaluations.jsonl  one line per evaluation
completions/       every sampled completion with its rewards, one file per step
checkpoints/       step-N folders
tensorboard/       the metrics for TensorBoard
log.txt            the messages of the run, dated
superseded/        records of steps that a resumed run repeated
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import yaml
from filelock import FileLock, Timeout
from pydantic import ValidationError

from ..config import PagedSampling, RunConfig, ServerSampling
from ..config_reader import config_yaml, resolved
from ..errors import ConfigError, RunDirectoryLost


class RunDirectory:
    """Opens and locks a run directory; with `resume` it must have a run, otherwise it must not.

    Messages are written, and the folder is kept, only after `start`: a run that never starts leaves nothing.
    """

    def __init__(self, path: Path, config: RunConfig, *, resume: bool = False) -> None:
        self.path = path
        check_run_directory(path, config, resume=resume)
        self.began = self._recorded_begin() or datetime.now().astimezone()
        self._config = config
        self._started = resume
        self._unwritten: list[str] = []
        self._created = [folder for folder in [path, *path.parents] if not folder.exists()]
        self._lock = FileLock(path / ".lock")
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"output_dir = {str(path)!r}: another process is using it; wait for that run, or name another folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"output_dir = {str(path)!r}: cannot be written to ({error.strerror}); expected a writable folder"
            ) from None

    def start(
        self,
        config: RunConfig | None = None,
        process: dict[str, Any] | None = None,
        contents: dict[str, Any] | None = None,
    ) -> None:
        """Writes config.yaml and run.json; from now on a new run in this folder is refused.

        `config`: with the values of this machine. `process` and `contents`: what run.json says of this process and of
        what the run is made of.
        """
        (self.path / "completions").mkdir(exist_ok=True)
        if process is not None:
            self._describe(process, contents or {})
        write_atomically(self.path / "config.yaml", config_yaml(config or resolved(self._config)))
        self._started = True
        for text in self._unwritten:
            self.log(text)

    def _describe(self, process: dict[str, Any], contents: dict[str, Any]) -> None:
        """Adds a process to run.json, and replaces the contents that it has of the run."""
        processes = [*self.description().get("processes", []), process]
        described = {"began": self.began.isoformat(), "seed": self._config.seed, "contents": contents}
        described["processes"] = processes
        write_atomically(self.path / "run.json", json.dumps(described, indent=2, ensure_ascii=False) + "\n")

    def description(self) -> dict[str, Any]:
        """What run.json says; no processes if there is none."""
        path = self.path / "run.json"
        try:
            described = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"processes": []}
            if not isinstance(described["processes"], list) or not isinstance(described.get("contents", {}), dict):
                raise TypeError("expected a list of processes, and contents by name")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{path}: damaged ({error}); restore it, or remove it to resume without it") from None
        return described

    def _recorded_begin(self) -> datetime | None:
        began = self.description().get("began")
        try:
            return None if began is None else datetime.fromisoformat(began)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{self.path / 'run.json'}: began = {began!r}: expected a date; restore the file"
            ) from None

    def check(self, config: RunConfig) -> None:
        """ConfigError if the run in this folder has other settings; `config` with the values of this machine."""
        check_run_directory(self.path, config, resume=True)

    @property
    def checkpoints(self) -> Path:
        """The folder of step-N checkpoints."""
        return self.path / "checkpoints"

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Moves the records after `step` (all records for step 0) to superseded/; the run records those steps again.

        Also moves the completions of an evaluation that was not finished. Returns the remaining rows of metrics.jsonl.
        """

        def late(recorded: int) -> bool:
            return recorded > step or step == 0

        archive = self.path / "superseded" / time.strftime("%Y%m%d-%H%M%S")
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            rows = _rows(self.path / name)
            if any(late(row["step"]) for row in rows):
                _write_lines(archive / name, [row for row in rows if late(row["step"])])
            if (self.path / name).exists():
                _write_lines(self.path / name, [row for row in rows if not late(row["step"])])
        evaluated = self.evaluations()
        for file in sorted((self.path / "completions").glob("*.jsonl")):
            named = re.fullmatch(r"(step|eval)-(\d+)", file.stem)
            if named and (late(int(named[2])) or (named[1] == "eval" and int(named[2]) not in evaluated)):
                archive.mkdir(parents=True, exist_ok=True)
                file.rename(archive / file.name)
        return _rows(self.path / "metrics.jsonl")

    def evaluations(self) -> dict[int, float]:
        """The score of each evaluated step: its success, or where no answer is judged, its mean reward."""
        rows = _rows(self.path / "evaluations.jsonl")
        name = "reward" if all(row.get("success") is None for row in rows) else "success"
        scores = {row["step"]: row.get(name) for row in rows}
        for step, score in scores.items():
            if not isinstance(score, int | float | None):
                raise ConfigError(
                    f"{self.path / 'evaluations.jsonl'}: step {step} has {name} = {score!r:.60}; expected a number or "
                    "null; correct or remove the line"
                )
        return {step: -math.inf if score is None else score for step, score in scores.items()}

    def record(self, name: str, row: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl or evaluations.jsonl and forces it to disk."""
        self._check_exists()
        path = self.path / f"{name}.jsonl"
        with _named(path), path.open("a", encoding="utf-8") as file:
            file.write(_json_line(row))
            file.flush()
            os.fsync(file.fileno())

    def record_completions(self, kind: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Writes completions/KIND-STEP.jsonl, one line per completion."""
        self._check_exists()
        _write_lines(self.path / "completions" / f"{kind}-{step:06d}.jsonl", rows)

    def log(self, text: str) -> None:
        """Appends a dated line to log.txt; lines from before the start are written at the start."""
        if not self._started:
            self._unwritten.append(text)
            return
        self._check_exists()
        with _named(self.path / "log.txt"), (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _check_exists(self) -> None:
        """RunDirectoryLost if the run directory is no longer at its path; it is not created again."""
        if self._started and not has_run(self.path):
            raise RunDirectoryLost(
                f"{self.path}: the run directory was deleted or moved. Move it back and add --resume to the same "
                "command; if it is gone, the same command starts again from step 1"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with contextlib.suppress(OSError, RunDirectoryLost):
                self.log(f"stopped by {kind.__name__ if kind else ''}: {error}")
        self.close()
        if isinstance(error, OSError):
            self._check_exists()

    def close(self) -> None:
        """Releases the lock; removes the folder if the run never started and this object created it."""
        if not self._started:
            (self.path / ".lock").unlink(missing_ok=True)
        self._lock.release()
        for folder in self._created if not self._started else ():
            if not any(folder.iterdir()):
                folder.rmdir()


class ReadOnlyRunDirectory(RunDirectory):
    """The run directory on ranks that are not the first: they read checkpoints and write nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began = datetime.now().astimezone()
        self._started = False

    def start(
        self,
        config: RunConfig | None = None,
        process: dict[str, Any] | None = None,
        contents: dict[str, Any] | None = None,
    ) -> None:
        """Writes nothing: the first rank creates the folder."""

    def description(self) -> dict[str, Any]:
        """Empty: the first rank has it."""
        return {}

    def check(self, config: RunConfig) -> None:
        """Checks nothing: the first rank does."""

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Changes nothing: the first rank does. Returns no rows."""
        return []

    def evaluations(self) -> dict[int, float]:
        """None: the first rank knows them."""
        return {}

    def record(self, name: str, row: dict[str, Any]) -> None:
        """Writes nothing."""

    def record_completions(self, kind: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Writes nothing: the first rank has the completions of every rank."""

    def log(self, text: str) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Writes nothing."""


def choose_output_dir(name: str, config: RunConfig, *, resume: bool, if_present: bool = False) -> Path:
    """`output_dir`, or the first runs/NAME, runs/NAME-2, ... without a run.

    With `resume`, the last run of these settings. If there is none, the last run, whose settings are then refused by
    name; or with `if_present`, a new folder.
    """
    if config.output_dir is not None:
        return Path(config.output_dir).expanduser()
    first = Path("runs") / name
    taken: list[Path] = []
    while has_run(candidate := first if not taken else first.with_name(f"{name}-{len(taken) + 1}")):
        taken.append(candidate)
    if not resume:
        return candidate
    same = (path for path in reversed(taken) if next(_refused_changes(path, config), None) is None)
    return next(same, candidate if if_present or not taken else taken[-1])


def has_run(path: Path) -> bool:
    """Whether a run has started in the folder."""
    return (path / "config.yaml").exists()


def write_atomically(path: Path, text: str) -> None:
    """Writes a temporary file, then renames it: a reader sees the old or the new text, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with _named(path), temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError of a write, for instance of a full disk, that does not have it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    write_atomically(path, "".join(map(_json_line, rows)))


def _json_line(row: dict[str, Any]) -> str:
    """A row as a line of JSON, which has neither NaN nor infinity: they become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the complete lines; an incomplete last line, which a crash can leave, is ignored."""
    text = path.read_bytes() if path.exists() else b""
    rows = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error}); correct or remove the line") from None
        if not isinstance(rows[-1], dict) or not isinstance(rows[-1].get("step"), int):
            raise ConfigError(
                f"{path}, line {number}: expected an object with an integer 'step', got {rows[-1]!r:.60}; "
                "correct or remove the line"
            )
    return rows


MAY_CHANGE = {"max_steps", "save_steps", "save_total_limit", "eval_steps", "eval_prompts", "eval_samples"}
MAY_CHANGE |= {"micro_batch_tokens", "gradient_checkpointing", "offload_activations", "term_gradient_steps"}
MAY_CHANGE |= {"output_dir", "threads", "rewards.timeout_seconds"}
MAY_CHANGE |= {f"sampler.{key}" for kind in (PagedSampling, ServerSampling) for key in kind.model_fields}
MAY_CHANGE -= {"sampler.name", "sampler.dialect"}
"""Settings that a resumed run may change: length, time limits, saving, evaluation and memory. Others define the run."""


RECORDS = ("metrics.jsonl", "evaluations.jsonl", "checkpoints")
"""What a run has written once it has taken a step or evaluated."""


def check_run_directory(path: Path, config: RunConfig, *, resume: bool) -> None:
    """ConfigError if the folder cannot be written to, or has a run, or with `resume` has none. Writes nothing."""
    try:
        existing = next(parent for parent in [path.absolute(), *path.absolute().parents] if parent.exists())
    except OSError as error:
        raise ConfigError(f"output_dir = {str(path)!r}: {error.strerror}; name another output_dir") from None
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(
            f"output_dir = {str(path)!r}: {str(existing)!r} is not a writable folder; name another output_dir"
        )
    if not has_run(path) and (record := next((path / name for name in RECORDS if (path / name).exists()), None)):
        raise ConfigError(
            f"output_dir = {str(path)!r}: it has {record.name} of a run and no config.yaml, which a run cannot be "
            "resumed without; restore that file and add --resume, or name another folder"
        )
    if not resume:
        if has_run(path):
            raise ConfigError(
                f"output_dir = {str(path)!r}: it already has a run; add --resume to continue it, or name another folder"
            )
        return
    if not has_run(path):
        raise ConfigError(f"output_dir = {str(path)!r}: it has no run to resume; leave out --resume to start one")
    for key, before, now in _refused_changes(path, config):
        raise ConfigError(
            f"{key} = {now!r}: the run in {str(path)!r} has {before!r}, and a resumed run must keep it; it may "
            f"change {', '.join(sorted(MAY_CHANGE))}"
        )


def _refused_changes(path: Path, config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """The settings that differ from those of the run in a folder and may not: dotted name, value there, value now."""
    for key, before, now in _changes(_saved_settings(path), yaml.safe_load(config_yaml(resolved(config)))):
        if key not in MAY_CHANGE and not (key in ("device", "dtype") and "auto" in (before, now)):
            yield key, before, now


def _saved_settings(path: Path) -> dict[str, Any]:
    """The settings in config.yaml, resolved; those of another version of amir as they are."""
    try:
        saved = dict(yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"{path / 'config.yaml'}: cannot be read ({error.strerror}); make it readable to resume"
        ) from None
    except (yaml.YAMLError, TypeError, ValueError):
        raise ConfigError(
            f"{path / 'config.yaml'}: damaged, not a YAML mapping; restore the run's configuration there to resume"
        ) from None
    try:
        return yaml.safe_load(config_yaml(resolved(RunConfig.model_validate(saved))))
    except ValidationError:
        return saved


def _changes(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The differences of two configurations: dotted name and both values; list entries have the name of the list."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in now | before:
            yield from _changes(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for entry_before, entry_now in zip(before, now, strict=True):
            yield from _changes(entry_before, entry_now, name)
    elif before != now:
        yield name, before, now
