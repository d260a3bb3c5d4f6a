"""Copies of a modelling file, as with `trust_remote_code`, leave the modules that they import unchanged."""

from __future__ import annotations

import collections
import importlib.util
import pathlib
import sys
import types

import pytest
import torch

import moefx

from ..models import hf
from ..models.hf_table import CASES

pytestmark = [pytest.mark.hf, pytest.mark.skipif(not hf.INSTALLED, reason="needs transformers")]


def _copy_of(name: str) -> types.ModuleType:
    """Import a copy of the modelling file under a name outside any library."""
    spec = importlib.util.find_spec(hf._module_of(CASES[name], "modeling"))
    assert spec is not None and spec.origin is not None
    module = types.ModuleType(f"remote_modeling_{name}")
    module.__package__, module.__file__ = spec.parent, spec.origin
    sys.modules[module.__name__] = module
    exec(compile(pathlib.Path(spec.origin).read_text(), f"<remote {name}>", "exec"), vars(module))
    return module


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["kind"] == "lm"][4:24])
def test_explain_leaves_the_activations_as_they_are(name):
    from transformers.activations import ACT2FN

    if not hf._is_available(CASES[name]):
        pytest.skip("this transformers does not have it")
    module = _copy_of(name)
    names = dict(vars(module))
    stored = list(collections.OrderedDict.items(ACT2FN))
    model = getattr(module, CASES[name]["cls"])(hf.make_config(name))
    moefx.explain(model, example_inputs={"input_ids": torch.randint(3, 100, (2, 9))})
    now = list(collections.OrderedDict.items(ACT2FN))
    assert [key for key, _ in now] == [key for key, _ in stored]
    assert all(a is b for (_, a), (_, b) in zip(now, stored, strict=True))
    assert all(vars(module).get(key) is value for key, value in names.items()) and vars(module).keys() == names.keys()
    assert getattr(module, CASES[name]["cls"])(hf.make_config(name)) is not None
