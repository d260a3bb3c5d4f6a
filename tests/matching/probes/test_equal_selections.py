"""Numbers that equal the expert index: ops that keep it under every routing."""

from __future__ import annotations

import pytest
import torch

from moefx.capture.concolic import capture_block
from moefx.capture.tracing.concrete_routing import Routing
from moefx.matching.facts.integer_ranges import IntegerRanges
from moefx.matching.probes.equal_selections import _changes_nothing

from ...blocks import Block, D, E

OPS = {
    "times one": (lambda ids: ids * 1, True),
    "plus zero": (lambda ids: 0 + ids, True),
    "the larger of two equal ones": (lambda ids: torch.maximum(ids, ids), True),
    "limits beyond the experts": (lambda ids: ids.clamp(0, E - 1), True),
    "modulo the experts": (lambda ids: ids % E, True),
    "times two": (lambda ids: ids * 2, False),
    "a limit that only the last expert exceeds": (lambda ids: ids.clamp(max=E - 2), False),
    "modulo fewer": (lambda ids: ids % (E - 1), False),
    "moved": (lambda ids: ids.flip(-1), False),
    "of unbounded counts": (lambda ids: ids.sum(0) * 1, False),
}


@pytest.mark.parametrize(("op", "expected"), OPS.values(), ids=OPS)
def test_ops_that_keep_the_expert_index(op, expected):
    block = Block(lambda b, x: op(b.gate(x).topk(2).indices))
    capture = capture_block(block, (torch.zeros(5, D, device="meta"),), {}, Routing())
    assert _changes_nothing(capture.out, IntegerRanges.with_more_tokens(capture)) is expected
