"""The public surface: `__all__` is what is there, and each reference has its op's name and signature."""

import inspect
import subprocess
import sys
import types

import pytest

import amir_kernels
from amir_kernels import reference

FUNCTIONS = sorted(name for name in amir_kernels.__all__ if isinstance(getattr(amir_kernels, name), types.FunctionType))
WITHOUT_REFERENCE = {"supports", "workspace_of"}
"""they describe a model or a call and compute nothing"""


def test_all_is_what_is_there():
    public = {
        name
        for name, value in vars(amir_kernels).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(amir_kernels.__all__)


def test_the_reference_and_the_modules_are_there_after_one_import():
    """The function `linear_logprob` hides the folder of its name as an attribute, not for imports from it."""
    code = (
        "import amir_kernels\n"
        "assert callable(amir_kernels.reference.linear_logprob)\n"
        "from amir_kernels.linear_logprob import LogprobEntropy, linear_logprob, linear_policy_loss\n"
        "from amir_kernels.linear_logprob.tiling import TileSize\n"
        "assert linear_logprob is amir_kernels.linear_logprob\n"
        "assert linear_policy_loss is amir_kernels.linear_policy_loss\n"
        "from amir_kernels.policy_loss import MAX_LOG_RATIO\n"
        "from amir_kernels.preference_loss import PairRule, preference_terms\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in WITHOUT_REFERENCE])
def test_reference_has_the_same_signature(name):
    op = inspect.signature(getattr(amir_kernels, name))
    ours = {key: parameter for key, parameter in op.parameters.items() if key not in ("backend", "workspace_bytes")}
    theirs = {
        key: parameter
        for key, parameter in inspect.signature(getattr(reference, name)).parameters.items()
        if key not in ("backend", "workspace_bytes")
    }
    assert list(ours) == list(theirs)
    for key, parameter in ours.items():
        assert (parameter.kind, parameter.default) == (theirs[key].kind, theirs[key].default), key


@pytest.mark.parametrize("name", amir_kernels.__all__)
def test_everything_public_says_what_it_is(name):
    value = getattr(amir_kernels, name)
    if callable(value):
        assert value.__doc__
        assert value.__doc__.strip().endswith((".", ":", "```")) or "\n" in value.__doc__
        if inspect.isfunction(value):
            assert value.__module__.startswith("amir_kernels.")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_catch_all_arguments(name):
    kinds = {parameter.kind for parameter in inspect.signature(getattr(amir_kernels, name)).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
