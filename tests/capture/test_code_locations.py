"""Errors are attributed to the program, to a refusal, or to a bug of moefx."""

from __future__ import annotations

import pytest

from moefx.capture.environment.code_locations import is_internal_error, suppress_program_errors
from moefx.capture.sizes.symbolic_sizes import NumberNotTaken
from moefx.errors import CaptureError, MoefxError, Refused
from moefx.util.user_code import PACKAGE_DIR


def run_in_package(code: str, **names):
    """Run code as part of a file of moefx."""
    exec(compile(code, f"{PACKAGE_DIR}/some_module.py", "exec"), names)


def raise_error(error):
    raise error


@pytest.mark.parametrize("error", [RuntimeError("no"), AssertionError("no"), KeyError("no")])
def test_errors_of_the_program_are_suppressed(error):
    with suppress_program_errors():
        raise_error(error)


@pytest.mark.parametrize("refusal", [Refused("no"), CaptureError("no"), NumberNotTaken("no")])
def test_refusals_are_suppressed_by_name_only(refusal):
    with suppress_program_errors(MoefxError):
        raise_error(refusal)
    with pytest.raises(type(refusal)), suppress_program_errors():
        raise_error(refusal)


@pytest.mark.parametrize("bug", ["assert False", "{}[0]", "{}.pop(0)", "None.name", "missing"])
def test_bugs_of_moefx_are_not_suppressed(bug):
    with pytest.raises(Exception) as raised, suppress_program_errors(MoefxError):
        run_in_package(bug)
    assert is_internal_error(raised.value)


LACKING = "class Lacking:\n    def __getattr__(self, key): raise AttributeError(key)\nfound.append(Lacking())"


def test_missing_attribute_is_an_error_of_the_code_that_reads_it():
    found = []
    run_in_package(LACKING, found=found)
    with suppress_program_errors():
        found[0].name  # noqa: B018
    with pytest.raises(AttributeError), suppress_program_errors():
        run_in_package("found[0].name", found=found)


def test_an_op_that_fails_in_the_package_is_no_bug():
    with suppress_program_errors():  # like a probe with an index out of bounds
        run_in_package("import torch; torch.zeros(2).index_select(0, torch.tensor([5]))")
