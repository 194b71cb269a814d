"""The whole project on a GPU, in 8 minutes: numerics, our kernels beside bare products, peers, the trainer's step.

    python bench/gpu_check.py --out rows.jsonl

It needs torch and triton; it runs from the tree, without an installation and without a network. Each stage has its own
process and its own limit. A crash, a hang, a missing peer is a row that says so, and the rest continues. Rows are
written and printed as they are made. A case that ends in "; at most x" has the bound x for its `ratio`; `expected` in a
row is what was predicted, and a difference of more than 15% is flagged.

Wheels that `make gpu-wheels` gathered in `.wheels` are unpacked and come first on the path. `--rehearse` runs
everything on a CPU with tiny sizes: kernels in Triton's interpreter, times with the torch backend; its figures mean
nothing. Returns 0 if all is well, 1 if one of our parts failed or a bound is missed, 2 if it cannot run.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_stages.carried import import_path
from gpu_stages.runner import run_stage, serve
from gpu_stages.stage import STAGES, Report, Row, failed

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / ".wheels"
SLOWER = 8.0
"""Limits of a rehearsal over those on a GPU: the interpreter takes half a second for a launch."""


def main() -> int:
    """Runs all stages or the named ones and prints what the rows amount to."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no stage outlives this process
    options = parse_arguments()
    if options.inside:
        return serve(options.inside, options.skip, options.rehearse)
    if options.list:
        print("\n".join(f"{name}: at most {stage.seconds:g} s" for name, stage in STAGES.items()))
        return 0
    if not options.rehearse and not has_gpu():
        print("gpu_check: torch finds no GPU here; --rehearse runs everything tiny on the CPU", file=sys.stderr)
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = Report(print_now)
    with tempfile.TemporaryDirectory() as folder, options.out.open("a" if options.stage else "w") as file:
        paths, unsuited = import_path(ROOT, options.wheels, Path(folder))
        sys.path[:0] = map(str, paths)
        run_stages(options, paths, unsuited, report, writer(file.write, file.flush))
    print(f"{report.rows} rows in {options.out}; {report.bad} of them fail the check")
    return int(report.bad > 0)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", ".")) / "gpu_check.jsonl"
    parser.add_argument("--out", type=Path, default=default, help="rows go here; by default into $OUT")
    parser.add_argument(
        "--stage", nargs="+", choices=STAGES, metavar="NAME", help="only these; their rows are added to the file"
    )
    parser.add_argument("--list", action="store_true", help="print the stages and their limits")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="a folder of wheels; by default .wheels")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--inside", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def has_gpu() -> bool:
    """Whether torch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def print_now(text: str) -> None:
    """Prints at once, so that a run that is stopped has shown what it found."""
    print(text, flush=True)


def writer(write: Callable[[str], object], flush: Callable[[], object]) -> Callable[[Row], None]:
    """Writes rows with machine, versions, commit, date and command, which are read once."""
    from machine import row_origin

    origin = row_origin()

    def keep(row: Row) -> None:
        write(json.dumps(row | origin) + "\n")
        flush()

    return keep


def run_stages(
    options: argparse.Namespace,
    paths: Sequence[Path],
    unsuited: dict[str, str],
    report: Report,
    keep: Callable[[Row], None],
) -> None:
    """Each stage in its processes, which import from `paths` first; `unsuited` are wheels that are not on them."""

    def record(row: Row, own: bool) -> None:
        report.add(row, own)
        keep(row)

    for name, reason in unsuited.items():
        record(failed("wheel", name, reason), False)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"TRITON_INTERPRET": "1"} if options.rehearse else {}
    for name in options.stage or STAGES:
        command = [sys.executable, sys.argv[0], "--inside", name, *(["--rehearse"] if options.rehearse else [])]
        began = time.monotonic()
        print_now(f"==== {name}")
        run_stage(name, command, environment, record, SLOWER if options.rehearse else 1.0)
        print_now(f"==== {name}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
