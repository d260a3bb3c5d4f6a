"""Functional forms of what a program does in place."""

from __future__ import annotations

import torch

from moefx.capture.functionalize import find_functional_form

aten = torch.ops.aten


def test_what_an_op_takes_by_default_and_its_other_form_asks_for():
    x = torch.zeros(1000)
    form, args, kwargs = find_functional_form(aten.bernoulli_.float, (x,), {}, [])
    assert 300 < form(*args, **kwargs).sum() < 700
    form, args, kwargs = find_functional_form(aten.bernoulli_.float, (x, 1.0), {}, [])
    assert form(*args, **kwargs).sum() == 1000
    form, args, kwargs = find_functional_form(aten.add_.Tensor, (x, x), {}, [])
    assert form is aten.add.Tensor and not kwargs
