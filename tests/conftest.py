"""Kernels are interpreted in the test process, before anything defines one; every test starts from the same seed."""

import os

os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores, and threads that wait for each other on a shared core spin: one thread each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch

from parity import Parity


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-parity", action="store_true", help="keep the differences to the peers that are measured")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def parity(request: pytest.FixtureRequest) -> Iterator[Parity]:
    """Where the parity tests hand in their differences."""
    found = Parity(request.config.getoption("--keep-parity"))
    yield found
    if found.keep:
        found.write()
