"""Gathers the wheels that let `gpu_check.py` run the trainer and the peers on a machine without a network.

    python bench/gather_wheels.py --python 3.12 --platform x86_64

For each wanted package, in the order of their worth, its needs are read from the environment that this runs in (`make
install` and `make bench` make it), at the versions installed here. torch, triton and what the machine has are left to
the machine; libraries inside a wheel that are built for another toolkit than its torch are left out. So is a package
whose wheels do not fit into the limit with those before it, and one without a wheel for that Python: the list at the
end says which, and why.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WANTED = (
    *("transformers", "peft", "pydantic", "typer", "rich", "pyyaml", "jinja2", "pebble", "httpx2"),
    *("math-verify", "sympy", "gguf", "trl", "liger-kernel", "bitsandbytes", "datasets"),
)
"""What the trainer imports, then the peers, then what is large."""
THERE = ("torch", "triton", "numpy", "pandas", "pyarrow", "setuptools")
"""What the machine must have: too large to travel. Versions are not compared."""
LIMIT_MIB = 64
TOOLKIT_LIBRARY = re.compile(r"_((?:cuda|rocm|xpu)\d+)\.so$")
MANYLINUX = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)


class Machine(NamedTuple):
    """The Python, the processor and the toolkit of torch that the wheels are for."""

    python: str
    platform: str
    toolkit: str

    def pip_options(self) -> list[str]:
        """pip's words for it: wheels for any Python, and for Linux."""
        names = [f"manylinux_2_{minor}_{self.platform}" for minor in MANYLINUX]
        names += [f"manylinux2014_{self.platform}", f"manylinux1_{self.platform}", f"linux_{self.platform}"]
        platforms = [option for name in names for option in ("--platform", name)]
        return ["--only-binary=:all:", "--python-version", self.python, "--implementation", "cp", *platforms]

    def environment(self) -> dict[str, str]:
        """The markers of its requirements."""
        return {name: str(value) for name, value in default_environment().items()} | {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "platform_machine": self.platform,
            "platform_system": "Linux",
            "sys_platform": "linux",
            "extra": "",
        }


def main() -> int:
    """Gathers, and prints what travels and what is left out; returns 1 if a wanted package is left out."""
    options = parse_arguments()
    machine = Machine(options.python, options.platform, options.toolkit)
    there: set[str] = {canonicalize_name(name) for name in (*THERE, *options.there)}
    options.into.mkdir(parents=True, exist_ok=True)
    for old in options.into.glob("*.whl"):
        old.unlink()
    left_out = gather(options.packages, machine, there, options.into, options.limit * 2**20)
    total = sum(path.stat().st_size for path in options.into.glob("*.whl"))
    print(f"{len(list(options.into.glob('*.whl')))} wheels, {total / 2**20:.1f} MiB, in {options.into}")
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    return int(bool(left_out))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=WANTED, help=f"by default {', '.join(WANTED)}")
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[1] / ".wheels")
    parser.add_argument("--python", default="3.12", help="of the machine that they are for")
    parser.add_argument("--platform", default="x86_64", help="its processor")
    parser.add_argument("--toolkit", default="cuda130", help="of its torch, as wheels name it")
    parser.add_argument("--there", nargs="*", default=[], help=f"what it has, beside {', '.join(THERE)}")
    parser.add_argument("--limit", type=int, default=LIMIT_MIB, help="MiB of all wheels together")
    return parser.parse_args(arguments)


def gather(wanted: Sequence[str], machine: Machine, there: set[str], into: Path, limit: int) -> dict[str, str]:
    """Downloads each wanted package with its needs as long as all fit; the packages left out, with the reason."""
    held: set[str] = set()
    left_out = {}
    for name in wanted:
        try:
            new = {pin for pin in pins(name, machine, there) if pin not in held}
        except PackageNotFoundError as error:
            left_out[name] = f"{error.name} is not installed here, so its version is not known"
            continue
        with tempfile.TemporaryDirectory() as folder:
            problem = download(sorted(new), machine, Path(folder))
            wheels = [trim(path, machine.toolkit) for path in Path(folder).glob("*.whl")]
            size = sum(path.stat().st_size for path in (*wheels, *into.glob("*.whl")))
            if problem is None and size > limit:
                problem = f"with it the wheels would take {size / 2**20:.1f} of {limit / 2**20:.0f} MiB"
            if problem is not None:
                left_out[name] = problem
                continue
            for path in wheels:
                (into / path.name).write_bytes(path.read_bytes())
        held |= new
    return left_out


def pins(name: str, machine: Machine, there: set[str]) -> Iterator[str]:
    """`name==version` of a package and all that it needs on that machine, as installed here."""
    waiting, seen = [Requirement(name)], set()
    while waiting:
        requirement = waiting.pop()
        key = canonicalize_name(requirement.name), tuple(sorted(requirement.extras))
        if key in seen or key[0] in there:
            continue
        seen.add(key)
        installed = distribution(requirement.name)
        yield f"{key[0]}=={installed.version.partition('+')[0]}"
        for line in installed.requires or ():
            need = Requirement(line)
            if any(need.marker is None or applies(need, machine, extra) for extra in ("", *requirement.extras)):
                waiting.append(need)


def applies(need: Requirement, machine: Machine, extra: str) -> bool:
    """Whether a requirement with a marker counts on that machine."""
    assert need.marker is not None
    return need.marker.evaluate(machine.environment() | {"extra": extra})


def trim(wheel: Path, toolkit: str) -> Path:
    """The wheel without the libraries that are built for another toolkit."""
    with zipfile.ZipFile(wheel) as archive:
        members = archive.infolist()
        wanted = [
            member for member in members if (TOOLKIT_LIBRARY.search(member.filename) or ["", toolkit])[1] == toolkit
        ]
        if len(wanted) == len(members):
            return wheel
        smaller = wheel.with_suffix(".smaller")
        with zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as smaller_archive:
            for member in wanted:
                smaller_archive.writestr(member, archive.read(member))
    return smaller.replace(wheel)


def download(pinned: Sequence[str], machine: Machine, folder: Path) -> str | None:
    """Fetches exactly these wheels; what went wrong, in pip's words, or None."""
    if not pinned:
        return None
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += [*machine.pip_options(), "--dest", str(folder), *pinned]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return None if done.returncode == 0 else (lines or [f"pip ended with {done.returncode}"])[-1]


if __name__ == "__main__":
    sys.exit(main())
