"""Recognise integers that may be choices of experts by their shapes: per token, or per sequence."""

from __future__ import annotations

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.tracing.capture_result import Capture
from ..facts.graph_nodes import depends_on_routing
from .parameter_uses import ParameterUses


def has_integer_choices(uses: ParameterUses) -> bool:
    """Return whether the capture computes integers with several entries per token from floats."""
    shapes = (n.meta["val"].shape for n in uses.outputs if isinstance(n.meta.get("val"), FakeTensor))
    tokens = math.prod(next(shapes, ())[:-1])
    return any(
        isinstance(val := n.meta.get("val"), torch.Tensor)
        and not isinstance(val, FakeTensor)
        and val.dtype != torch.bool
        and val.numel() > tokens > 1
        and depends_on_routing(n)
        for n in uses.capture.nodes
    )


def has_sequence_choices(capture: Capture) -> bool:
    """Return whether some integers have one entry or a few per sequence.

    A few sequences may all select the same experts.
    """
    dims = list(capture.sizes.dims.values())
    has_axis = len(dims) > 1 or (bool(dims) and capture.sizes.tokens > dims[0])
    return has_axis and any(
        isinstance(val := n.meta.get("val"), torch.Tensor)
        and not isinstance(val, FakeTensor)
        and val.dtype != torch.bool
        and val.shape[:1] == (dims[0],)
        and val.dim() <= 2
        and tuple(val.shape) != tuple(dims)
        for n in capture.nodes
    )
