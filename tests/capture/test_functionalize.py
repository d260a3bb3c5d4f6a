"""Functional forms of in-place ops."""

from __future__ import annotations

import torch

from moefx.capture.tracing.functionalize import find_functional_form

aten = torch.ops.aten


def test_defaults_of_in_place_ops_are_passed_to_functional_forms():
    x = torch.zeros(1000)
    form, args, kwargs = find_functional_form(aten.bernoulli_.float, (x,), {}, [])
    assert 300 < form(*args, **kwargs).sum() < 700
    form, args, kwargs = find_functional_form(aten.bernoulli_.float, (x, 1.0), {}, [])
    assert form(*args, **kwargs).sum() == 1000
    form, args, kwargs = find_functional_form(aten.add_.Tensor, (x, x), {}, [])
    assert form is aten.add.Tensor and not kwargs
