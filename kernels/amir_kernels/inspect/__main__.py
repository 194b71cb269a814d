"""The command line: `python -m amir_kernels.inspect --help`."""

import argparse
import json
import sys

from . import __doc__ as description
from . import inspect_kernels
from .launches import DTYPES, VOCABULARY

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100")


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Prints the facts; returns the exit status, 1 if a kernel spills registers."""
    parser = argparse.ArgumentParser(prog="python -m amir_kernels.inspect", description=description)
    parser.add_argument(
        "--arch", default=["sm_90"], nargs="+", choices=ARCHITECTURES, help="architectures to compile for"
    )
    parser.add_argument("--dtype", default=["bf16"], nargs="+", choices=DTYPES, help="dtypes of hidden states and head")
    parser.add_argument("--hidden", type=_size, default=2048, help="hidden size H")
    parser.add_argument("--vocabulary", type=_size, default=VOCABULARY, help="vocabulary V")
    parser.add_argument("--only", nargs="+", help="starts of kernel names, for example stats_kernel")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of text")
    options = parser.parse_args(arguments)
    rows = [
        row
        for architecture in options.arch
        for dtype in options.dtype
        for row in inspect_kernels(architecture, dtype, options.hidden, options.vocabulary, options.only)
    ]
    if not rows:
        parser.error(
            f"argument --only: no kernel's name starts with {' or '.join(options.only)}; leave it out to list all"
        )
    if options.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row.pop('kernel')} ({row.pop('form')})")
            print("\n".join(f"    {name:32} {value}" for name, value in row.items()))
    return int(any(row["spill_bytes"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
