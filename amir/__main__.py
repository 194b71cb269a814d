"""The `amir` command: trains a run, lists the shipped recipes, checks what this machine can run."""

import contextlib
import functools
import importlib.metadata
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer

    from .config import RunConfig
    from .config_reader import config_yaml, load_config, recipe_names, resolved
    from .errors import ConfigError, RunDirectoryLost, RunStopped
except ModuleNotFoundError as missing:
    if missing.name not in ("typer", "pydantic", "yaml"):
        raise
    print(f"amir: the trainer needs {missing.name}: pip install 'amir-grpo[train]'", file=sys.stderr)
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from .distributed import Ranks
    from .rewards import Rewards
    from .run.notices import Notices
    from .tasks import Task

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

FAILED, WRONG_USAGE = 1, 2


_FIRST_RANK = "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0"


def _how_to_continue(path: Path | None) -> str:
    """What to do after a run in `path` ended early; only the first rank has a path."""
    if path is None:
        return ""
    if (path / "config.yaml").exists():
        return ". The run's records are kept; add --resume to the same command to continue from the latest checkpoint"
    return ". The run had not started; the same command starts it"


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"amir {importlib.metadata.version('amir-grpo')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    run: Annotated[str, typer.Argument(help="a YAML file or the name of a shipped recipe")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a setting; may be repeated")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run from its latest checkpoint")] = False,
    resume_if_present: Annotated[
        bool, typer.Option("--resume-if-present", help="continue the run if there is one, otherwise start it")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the resolved configuration and exit")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="try data, prompts, rewards and the model's configuration without weights")
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", min=1, metavar="N", help="share the work among N processes of this machine")
    ] = 1,
) -> None:
    """Trains a run. Every setting is validated before anything is loaded."""
    config = load_config(run, set_) if _FIRST_RANK else None
    if processes > 1 and not (dry_run or check):
        raise typer.Exit(_run_in_processes(processes, run, set_ or [], resume, resume_if_present))
    if dry_run and config:
        typer.echo(_dry_run(config), nl=False)
    if dry_run:
        return
    if _FIRST_RANK:  # torchrun ends the others, which may be waiting for this one in code that Python cannot interrupt
        _interrupt_on_signals()
    if check:
        if config:
            _check(run, config, resume=resume, if_present=resume_if_present)
        return
    path = None
    if config:
        path, resume = _announced_folder(run, config, resume=resume, if_present=resume_if_present)
    try:
        _train(path, config, resume=resume)
    except KeyboardInterrupt:
        if _FIRST_RANK:
            typer.echo(f"amir: interrupted{_how_to_continue(path)}", err=True)
        raise typer.Exit(FAILED) from None
    except RunDirectoryLost as error:
        typer.echo(f"amir: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except (OSError, RunStopped) as error:
        typer.echo(f"amir: {error}{_how_to_continue(path)}", err=True)
        raise typer.Exit(FAILED) from None


def _run_in_processes(count: int, run: str, overrides: list[str], resume: bool, resume_if_present: bool) -> int:
    """The exit code of `amir train` in `count` processes; ConfigError if torchrun has started this one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(f"--processes {count}: torchrun has started the processes already; leave --processes out")
    from .run.processes import run_in_processes

    flags = {"--resume": resume, "--resume-if-present": resume_if_present}
    words = [f"--set={override}" for override in overrides] + [flag for flag, is_set in flags.items() if is_set]
    try:
        return run_in_processes(count, ["train", run, *words])
    except RunStopped as error:
        typer.echo(f"amir: {error}. If the run had started, its records are kept, and --resume continues it", err=True)
        return FAILED


def _dry_run(config: RunConfig) -> str:
    """The configuration as YAML, resolved where that needs no torch; a comment says how a run chooses the rest."""
    lines = config_yaml(resolved(config)).splitlines()
    return "".join(f"{line}{CHOSEN_BY_A_RUN.get(line, '')}\n" for line in lines)


CHOSEN_BY_A_RUN = {
    "device: auto": "  # cuda where torch finds a GPU, otherwise cpu",
    "dtype: auto": "  # bfloat16 on a GPU, float32 on a CPU",
    "threads: null": "  # torch's default",
    "output_dir: null": "  # the first folder under runs/ without a run",
}
"""Comments on settings whose values depend on the machine; config.yaml of the run has the values."""


@app.command()
def recipes() -> None:
    """Lists the shipped recipes."""
    for name in recipe_names():
        config = load_config(name)
        typer.echo(f"{name:16s} {config.model}, {config.task.name}, {config.loss_type}, {config.max_steps} steps")


@app.command()
def doctor() -> None:
    """Reports what this machine can run and which packages are missing."""
    from .doctor import findings

    for line in findings():
        typer.echo(line)


@app.command()
def dynamics(
    beta: Annotated[float, typer.Option("--beta", help="coefficient of the KL penalty")],
    p_ref: Annotated[float, typer.Option("--p-ref", help="success probability of the reference policy")],
    start: Annotated[
        float | None, typer.Option("--start", help="of the first policy; default: the reference's")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=10_000, help="iterations to print")] = 10,
    alpha: Annotated[
        float, typer.Option("--alpha", help="the reference's share of the penalty: 1 alone, 0 previous policy alone")
    ] = 1.0,
    epsilon: Annotated[float, typer.Option("--epsilon", help="added to the variance of the rewards")] = 1e-5,
    normalization: Annotated[str, typer.Option("--normalization", help="of the advantages: std or none")] = "std",
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="draw a .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Predicts the success probability of iterated GRPO with binary rewards (arXiv 2503.06639)."""
    import json

    from .theory import Recurrence, report

    if plot:
        report.refuse_picture_name(plot)
    recurrence = Recurrence(beta, p_ref, alpha, epsilon, normalization)  # type: ignore[arg-type]
    description = report.describe(recurrence, p_ref if start is None else start, steps)
    if as_json:
        typer.echo(json.dumps(description))
    else:
        typer.echo("\n".join(report.report_lines(description)))
    if plot:
        try:
            report.draw(recurrence, description, plot)
        except OSError as error:
            typer.echo(f"amir: --plot {plot}: cannot be written ({error.strerror})", err=True)
            raise typer.Exit(FAILED) from None
        typer.echo(f"picture: {plot}", err=as_json)


def _interrupt_on_signals() -> None:
    """Makes SIGTERM, and SIGHUP of a closed terminal, interrupt this process as Ctrl-C does, unless it ignores them."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def _chosen_folder(run: str, config: RunConfig, *, resume: bool, if_present: bool) -> tuple[Path, bool]:
    """The run's folder, checked, and whether the run in it is resumed."""
    from .run.directory import check_run_directory, choose_output_dir, has_run

    path = choose_output_dir(Path(run).stem, config, resume=resume or if_present, if_present=if_present)
    resume = resume or (if_present and has_run(path))
    check_run_directory(path, config, resume=resume)
    return path, resume


def _announced_folder(run: str, config: RunConfig, *, resume: bool, if_present: bool) -> tuple[Path, bool]:
    from .policy.smollm2 import awaits_conversion

    path, resume = _chosen_folder(run, config, resume=resume, if_present=if_present)
    once = "; its weights are converted once, in about a minute" if awaits_conversion(config.model) else ""
    typer.echo(f"run directory: {path}{' (resuming)' if resume else ''}")
    typer.echo(f"loading torch, the model and the task ...{once}")
    return path, resume


@contextlib.contextmanager
def _data_and_rewards(config: RunConfig) -> Iterator[tuple["Task", "Rewards"]]:
    """The examples and the reward functions of a run. They need no torch, so mistakes in them are reported at once."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported, which the library datasets does
    from .rewards import Rewards
    from .tasks import load_task

    task = load_task(config.task)
    with Rewards(config.rewards, task.columns) as rewards:
        yield task, rewards


def _check(run: str, config: RunConfig, *, resume: bool, if_present: bool) -> None:
    path, resume = _chosen_folder(run, config, resume=resume, if_present=if_present)
    typer.echo(f"run directory: {path}{' (resuming)' if resume else ''}")
    with _data_and_rewards(config) as (task, rewards):
        _quiet_libraries()
        from .run.check import findings
        from .run.notices import library_notices

        with library_notices() as notices:
            notices.pass_to(typer.echo)
            for line in findings(config, task, rewards):
                typer.echo(line)


def _train(path: Path | None, config: RunConfig | None, *, resume: bool) -> None:
    """Trains; the other ranks get the configuration and the folder from rank 0."""
    with contextlib.ExitStack() as stack:
        task, rewards = stack.enter_context(_data_and_rewards(config)) if config else (None, None)
        _quiet_libraries()
        from .distributed import joined_ranks
        from .run.notices import library_notices

        notices = stack.enter_context(library_notices())
        if config:
            stack.callback(notices.pass_rest_to, functools.partial(typer.echo, err=True))
        ranks = stack.enter_context(joined_ranks())
        path, config, resume = ranks.gather((path, config, resume))[0]
        _train_with(ranks, notices, path, config, resume, task, rewards)


def _quiet_libraries() -> None:
    """Keeps progress bars and a needless notice out of a run's output."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported, which torch does
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # When PEFT imports it on a CPU with AVX512-BF16, it warns that Hugging Face's package `kernels` is not installed.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _train_with(
    ranks: "Ranks",
    notices: "Notices",
    path: Path,
    config: RunConfig,
    resume: bool,
    task: "Task | None",
    rewards: "Rewards | None",
) -> None:
    import torch

    from .policy.load import load_policy
    from .run.check import refuse_without_weights
    from .run.directory import ReadOnlyRunDirectory, RunDirectory
    from .run.display import NullDisplay, Terminal, draw_curves
    from .tasks import load_task
    from .trainer import Trainer

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with ranks.raise_on_all_ranks():
        task = task or load_task(config.task)
        if ranks.first:
            refuse_without_weights(config, task)
    policy = load_policy(config, ranks)
    with ranks.raise_on_all_ranks():
        directory = RunDirectory(path, config, resume=resume) if ranks.first else ReadOnlyRunDirectory(path)
    display = Terminal(config.max_steps, path / "tensorboard", directory.log) if ranks.first else NullDisplay()
    with directory, display:
        with ranks.raise_on_all_ranks():
            trainer = Trainer(config, policy, task, directory, display, reward_functions=rewards)
        notices.pass_to(trainer.log)
        if resume:
            trainer.resume()
        trainer.train()
    if not ranks.first:
        return
    if config.max_steps == 0:
        typer.echo(f"evaluation: {path / 'evaluations.jsonl'}")
        return
    try:
        typer.echo(f"curves: {draw_curves(path)}")
    except OSError as error:
        typer.echo(
            f"curves.png cannot be written ({error.strerror or error}); training is finished, and metrics.jsonl has "
            "the values of every step"
        )
    trained = "trained" if trainer.health.trained else "untrained"
    typer.echo(f"{trained} {trainer.result}: {path / trainer.result}")
    here = Path(os.path.relpath(sys.executable)).parent
    typer.echo(f"next: {here / 'tensorboard'} --logdir {path / 'tensorboard'}, or {here / 'amir'} train gsm8k-smoke")


def main() -> None:
    """Entry point. Exit codes: 0 for a finished run, 1 for a failed run, 2 for wrong usage or invalid settings."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"amir: {error}", err=True)
        sys.exit(WRONG_USAGE)


if __name__ == "__main__":
    main()
