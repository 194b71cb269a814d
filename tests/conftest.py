"""Kernels are interpreted in the test process, before anything defines one; every test starts from the same seed."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores, and threads that wait for each other on a shared core spin: one thread each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from amir_kernels._interpreter import use_torch_products
from parity import Parity

ON_ONE_WORKER = {f"tests/test_{name}.py" for name in ("inspect", "nothing_lost", "server", "trl_parity")}
"""Files whose tests share what takes long to make. Of the others each test goes to whichever worker is free."""

use_torch_products()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-parity", action="store_true", help="keep the differences to the peers that are measured")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (`-n`). The groups of pytest-xdist 3.8 itself (`--dist loadgroup`) miss pytest 9.2's ids."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in ON_ONE_WORKER else nodeid

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs `amir ARGUMENTS` in this process, in `tmp_path`; gives exit code, stdout and stderr."""
    import amir.__main__

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["amir", *arguments])
        with pytest.raises(SystemExit) as ended:
            amir.__main__.main()
        torch.set_num_threads(threads)
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture(scope="session")
def parity(request: pytest.FixtureRequest) -> Iterator[Parity]:
    """Where the parity tests hand in their differences."""
    found = Parity(request.config.getoption("--keep-parity"))
    yield found
    if found.keep:
        found.write()
