"""Runs the reward functions of a run: each of the user's in its own process with a time limit, the shipped ones here.

A user's function is called once for all completions of a step, with keywords: `prompts` and `completions` (texts, or
lists of messages with `conversational`), `answers`, `completion_ids` (lists of token ids), and every column of the
task's rows, each a list with one value per completion. It gets the keywords that its signature names, or all of them if
it has `**kwargs`. If named, it also gets `response_prefixes`, what the chat template began each response with, and
`rows`, the whole row of each completion. It returns one number per completion; None or NaN leaves that completion
unscored.
"""

from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Protocol, Self

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from ..config import CALL_SECONDS, JUDGE_SECONDS, NEED_ANSWERS, RewardSettings
from ..errors import ConfigError, RewardError, RunStopped
from ..rewards import worker
from ..tasks.task import Example
from .correctness import Correctness
from .processes import RewardContext, in_reward_process
from .shaping import SHAPING

START_SECONDS = 300.0
"""Time limit for the start of a function's process, including its imports."""

OURS = ("prompts", "completions", "answers", "completion_ids")
"""Keywords that a column of the same name does not replace."""

NAMED_ONLY = ("response_prefixes", "rows")
"""Keywords for functions whose signature names them; `**` alone does not get them."""


class RewardFunction(Protocol):
    """A user's reward function, called once for all completions of a step."""

    def __call__(self, **columns: Any) -> Sequence[float | None]:
        """One number per completion; None or NaN leaves it unscored.

        Keywords, each a list: `prompts`, `completions`, `answers`, `completion_ids`, and the columns of the task's
        rows; a function gets those that its signature names.
        """


@dataclass(frozen=True)
class Scores:
    """Scores by function and completion, NaN for an unscored one, and notes to report."""

    values: list[list[float]]  # [F][B]
    notes: list[str]


class Rewards:
    """The reward functions of a run. Close it, or use it in `with`, to end their processes."""

    def __init__(self, settings: Sequence[RewardSettings], columns: Sequence[str] = ()) -> None:
        self.settings = list(settings)
        self.names = [s.label for s in settings]
        self.weights = [s.weight for s in settings]
        self.timeouts = 0
        """number of function calls and answer comparisons that were ended at their time limit"""
        _refuse_recursion(self.settings)
        for s in self.settings:
            _refuse_arguments(s)
        limits = [s.timeout_seconds for s in settings if s.name == "correctness" and s.timeout_seconds]
        self.correctness = Correctness(limits[0] if limits else JUDGE_SECONDS)
        offered = [*OURS, *(c for c in columns if c not in OURS)]
        self.notes = _hidden_columns(columns) if any(s.function for s in settings) else []
        """lines to report before the run starts"""
        self._functions = {s.label: _Function(s, offered) for s in settings if s.function is not None}
        try:
            for function in self._functions.values():
                function.check()
        except ConfigError:
            self.close()
            raise

    def __call__(self, examples: Sequence[Example], completions: list[str], completion_ids: list[list[int]]) -> Scores:
        """Scores of the completions; `examples` has the example of each.

        Shipped rewards read the whole response: what the chat template began it with, and the completion.
        """
        pending = [f.begin(examples, completions, completion_ids) for f in self._functions.values()]
        notes: list[str] = []
        responses = [example.response_prefix + text for example, text in zip(examples, completions, strict=True)]
        inputs = {"completions": responses, "lengths": [len(ids) for ids in completion_ids]}
        uncompared = self.correctness.uncompared
        if NEED_ANSWERS & {s.name for s in self.settings}:
            inputs["correct"] = self.correctness(responses, [example.answer or "" for example in examples])
        if judged_late := self.correctness.uncompared - uncompared:
            notes.append(
                f"reward correctness: {judged_late} answers could not be compared within "
                f"{self.correctness.timeout_seconds:g} s and count as wrong; a larger timeout_seconds allows more time"
            )
        values = {name: self._shipped(s, inputs) for name, s in zip(self.names, self.settings, strict=True) if s.name}
        for function, future in zip(self._functions.values(), pending, strict=True):
            result, note = function.end(future, len(completions))
            values[function.name] = result
            notes += [note] if note else []
            self.timeouts += note is not None
        self.timeouts += judged_late
        return Scores([values[name] for name in self.names], notes)

    def _shipped(self, settings: RewardSettings, inputs: dict[str, Any]) -> list[float]:
        if settings.name == "correctness":
            return inputs["correct"]
        function = SHAPING[settings.name or ""]
        keywords = worker.accepted_keywords(function, settings.arguments, list(inputs))
        return function(**{name: inputs[name] for name in keywords}, **settings.arguments)

    def close(self) -> None:
        """Ends every process."""
        self.correctness.close()
        for function in self._functions.values():
            function.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Function:
    """A user's function in its own process, which is killed at the time limit and started again."""

    def __init__(self, settings: RewardSettings, offered: list[str]) -> None:
        self.name = settings.label
        self._settings, self._offered = settings, offered
        self._seconds = settings.timeout_seconds or CALL_SECONDS
        self._pool = ProcessPool(1, initializer=worker.prepare, context=RewardContext())
        self._started = self._import()

    def check(self) -> None:
        """Waits until the function is imported; ConfigError if it cannot be imported or called."""
        error = self._error_of(self._started, START_SECONDS)
        if error is not None:
            reason = f"its import took longer than {START_SECONDS:.0f} s" if _is_timeout(error) else error
            raise ConfigError(
                f"rewards: function {self._settings.function!r}: {reason}; expected a function that takes "
                "`completions` (docs/data-and-rewards.md)"
            )
        self._keywords = self._started.result()

    def begin(
        self, examples: Sequence[Example], completions: list[str], completion_ids: list[list[int]]
    ) -> ProcessFuture:
        """Starts a call."""
        chat = self._settings.conversational
        offered: dict[str, Any] = {
            "prompts": [e.chat() if chat else e.question for e in examples],
            "completions": [[{"role": "assistant", "content": text}] for text in completions] if chat else completions,
            "answers": [e.answer for e in examples],
            "completion_ids": completion_ids,
            "response_prefixes": [e.response_prefix for e in examples],
            "rows": [e.columns for e in examples],
        }
        own = [name for name in self._keywords if name in self._offered and name not in OURS]
        columns = {name: [e.columns.get(name) for e in examples] for name in own}
        keywords = {name: (offered | columns)[name] for name in self._keywords} | self._settings.arguments
        work = (self._settings.function, len(completions), keywords)
        return self._pool.schedule(worker.call, args=work, timeout=self._seconds)

    def end(self, future: ProcessFuture, count: int) -> tuple[list[float], str | None]:
        """The call's rewards; all NaN, and a note, if it reached the time limit. RunStopped if it failed."""
        error = self._error_of(future, self._seconds + START_SECONDS)
        if error is None:
            return future.result(), None
        if _is_timeout(error):
            self._import()
            return [float("nan")] * count, (
                f"reward {self.name}: the call took longer than {self._seconds:g} s and was ended, so it scored none "
                f"of the {count} completions; a larger timeout_seconds allows more time"
            )
        if isinstance(error, ProcessExpired):
            error = RuntimeError(f"ended its process (exit code {error.exitcode}); expected a returned list of rewards")
        raise RunStopped(f"reward {self.name} ({self._settings.function}) {error}")

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _import(self) -> ProcessFuture:
        work = (self._settings.function, self._settings.arguments, self._offered, NAMED_ONLY)
        return self._pool.schedule(worker.parameters, args=work, timeout=START_SECONDS)

    def _error_of(self, future: ProcessFuture, seconds: float) -> BaseException | None:
        try:
            return future.exception(timeout=seconds)
        except FutureTimeout as late:
            future.cancel()
            return late


def _hidden_columns(columns: Sequence[str]) -> list[str]:
    """A note for each column that has the name of one of the run's own keywords."""
    return [
        f"the data has a column {name!r}, which reward functions do not get as `{name}`, because that is the run's "
        "own; rename the column, or read it from the keyword `rows`"
        for name in columns
        if name in OURS
    ]


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, FutureTimeout)


def _refuse_recursion(settings: list[RewardSettings]) -> None:
    """ConfigError in the process of a reward function, whose file would be imported by process after process."""
    functions = [s.function for s in settings if s.function is not None]
    if functions and in_reward_process():
        raise ConfigError(
            f"rewards: function {functions[0]!r}: its process would start another one for it, because the imported "
            "file starts a run; put what starts the run under `if __name__ == '__main__':`, or the function into "
            "another file"
        )


def _refuse_arguments(settings: RewardSettings) -> None:
    """ConfigError if a shipped reward does not accept its arguments."""
    if settings.name == "correctness" and settings.arguments:
        raise ConfigError(
            f"rewards: correctness takes no arguments, got {', '.join(settings.arguments)}; leave `arguments` out"
        )
    if settings.name in SHAPING:
        trial: dict[str, Any] = {"completions": [""], "correct": [0.0], "lengths": [1]}
        function = SHAPING[settings.name]
        try:
            keywords = worker.accepted_keywords(function, settings.arguments, list(trial))
            worker.floats(function(**{k: trial[k] for k in keywords}, **settings.arguments), 1)
        except (RewardError, TypeError, ValueError) as error:
            raise ConfigError(f"rewards: {settings.name}: {error}") from None
