"""What `import amir` offers: every name, lazily, without torch until one of them is used; a run from Python."""

import subprocess
import sys

import pytest

pytest.importorskip("pydantic", reason="needs the extra `train`")

import amir

LEAST_SECONDS = """
import sys, time
began = time.perf_counter()
import amir
seconds = time.perf_counter() - began
amir.RunConfig, amir.load_config("quickstart")
loaded = {"torch", "triton", "transformers", "peft"} & set(sys.modules)
print(seconds, *loaded)
"""


def test_every_name_that_is_offered_is_there():
    assert set(amir.__all__) == set(amir._MODULES)
    for name in amir.__all__:
        assert getattr(amir, name).__doc__, name
    assert {"Trainer", "RunConfig", "load_config", "load_policy", "RewardFunction", "Sampler"} <= set(dir(amir))


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(AttributeError, match=r"no attribute 'Trainr'; it offers .*Trainer"):
        amir.Trainr  # noqa: B018


def test_importing_amir_takes_less_than_a_third_of_a_second_and_no_torch():
    """The least of three fresh processes, so that a busy machine is no fault of the package."""
    lines = [
        subprocess.run([sys.executable, "-c", LEAST_SECONDS], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    assert all(len(line) == 1 for line in lines), f"loaded: {lines}"
    assert min(float(line[0]) for line in lines) < 0.3
