"""The `amir` command: train a run, list the shipped ones, say what this machine can do."""

import importlib.metadata
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .config import ConfigError, RunConfig, RunLost, RunStopped, config_yaml, load_config, recipe_names

if TYPE_CHECKING:
    from .ranks import Ranks

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

FAILED, WRONG_USAGE = 1, 2


_FIRST_RANK = "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0"


def _way_on(path: Path | None) -> str:
    """What to do after a run in `path` ended early; ranks that are not the first do not know."""
    if path is None:
        return ""
    if (path / "config.yaml").exists():
        return "; what was written before is kept: the same command with --resume goes on from the latest checkpoint"
    return "; the run had not begun: the same command starts it"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"amir {importlib.metadata.version('amir-grpo')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    pass


@app.command()
def train(
    run: Annotated[str, typer.Argument(help="a YAML file or the name of a shipped recipe")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a setting")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the latest checkpoint")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the resolved config and stop")] = False,
) -> None:
    """Trains a run; every setting is checked before anything is loaded."""
    config = load_config(run, set_) if _FIRST_RANK else None
    if dry_run and config:
        typer.echo(config_yaml(config), nl=False)
    if dry_run:
        return
    path = _announced_folder(run, config, resume=resume) if config else None
    try:
        _train(path, config, resume=resume)
    except KeyboardInterrupt:
        if _FIRST_RANK:
            typer.echo(f"amir: interrupted{_way_on(path)}", err=True)
        raise typer.Exit(FAILED) from None
    except RunLost as error:
        typer.echo(f"amir: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except (OSError, RunStopped) as error:
        typer.echo(f"amir: {error}{_way_on(path)}", err=True)
        raise typer.Exit(FAILED) from None


@app.command()
def recipes() -> None:
    """Lists the shipped runs."""
    for name in recipe_names():
        config = load_config(name)
        typer.echo(f"{name:16s} {config.model}, {config.task.name}, {config.loss_type}, {config.max_steps} steps")


@app.command()
def doctor() -> None:
    """Says what this machine can run and what is missing."""
    from .doctor import findings

    for line in findings():
        typer.echo(line)


def _announced_folder(run: str, config: RunConfig, *, resume: bool) -> Path:
    from .rundir import check_run_directory, choose_output_dir

    path = choose_output_dir(Path(run).stem, config, resume=resume)
    check_run_directory(path, config, resume=resume)
    typer.echo(f"run directory: {path}")
    typer.echo("loading torch, the model and the task ...")
    return path


def _train(path: Path | None, config: RunConfig | None, *, resume: bool) -> None:
    """Trains; ranks that are not the first get config and folder from it."""
    from transformers.utils import logging

    from .ranks import joined_ranks

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|peft|torch")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with joined_ranks() as ranks:
        _train_with(ranks, *ranks.gather((path, config))[0], resume=resume)


def _train_with(ranks: "Ranks", path: Path, config: RunConfig, *, resume: bool) -> None:
    import torch

    from .display import Silence, Terminal, draw_curves
    from .load import load_policy
    from .rundir import ForeignDirectory, RunDirectory
    from .tasks import TASKS
    from .trainer import Trainer

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    task = ranks.together(lambda: TASKS[config.task.name](config.task))
    policy = load_policy(config, ranks)
    directory = ranks.together(
        lambda: RunDirectory(path, config, resume=resume) if ranks.first else ForeignDirectory(path)
    )
    display = Terminal(config.max_steps, path / "tensorboard", directory.log) if ranks.first else Silence()
    with directory, display:
        trainer = ranks.together(lambda: Trainer(config, policy, task, directory, display))
        if resume:
            ranks.together(trainer.resume)
        trainer.train()
    if not ranks.first:
        return
    try:
        typer.echo(f"curves: {draw_curves(path)}")
    except OSError as error:
        typer.echo(f"curves.png cannot be written ({error.strerror or error}); metrics.jsonl has every step")
    typer.echo(f"trained {trainer.result}: {path / trainer.result}")
    here = Path(os.path.relpath(sys.executable)).parent
    typer.echo(f"next: {here / 'tensorboard'} --logdir {path / 'tensorboard'}, or {here / 'amir'} train gsm8k-smoke")


def main() -> None:
    """Entry point; exit codes: 0 done, 1 failed, 2 wrong usage or config."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"amir: {error}", err=True)
        sys.exit(WRONG_USAGE)


if __name__ == "__main__":
    main()
