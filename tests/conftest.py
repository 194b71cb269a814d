"""Kernels are interpreted in the test process, before anything defines one; every test starts from the same seed."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
