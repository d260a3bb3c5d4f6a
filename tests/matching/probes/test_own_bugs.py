"""Bugs of moefx in the capture of a probe raise, and are not treated as errors of the program."""

from __future__ import annotations

import pytest
import torch

from moefx.capture.arguments.argument_interpretations import interpret_arguments
from moefx.capture.arguments.size_collisions import ModelNumbers
from moefx.matching.proof import evidence
from moefx.matching.proof.proof_state import ProofState
from moefx.matching.prove import prove
from moefx.util.user_code import PACKAGE_DIR

from ...blocks import D, E, Loop, Mlp


class Asking(Loop):
    def __init__(self):
        super().__init__(Mlp)

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            if len(t) > 0:
                out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
        return out


class ChosenByArgument(Asking):
    def forward(self, x, ids):
        return self.mixed(x, torch.ones(len(x), 1), (ids % E)[:, None])


CODE = """
def fail(nodes):
    captures.append(nodes)
    assert len(captures) != last
    return find_conditions(nodes)
"""


@pytest.mark.parametrize(
    ("block", "last"), [(Asking, 4), (Asking, 9), (ChosenByArgument, 1), (ChosenByArgument, 7), (ChosenByArgument, 12)]
)
def test_a_bug_in_a_capture_is_raised(monkeypatch, block, last):
    names = {"find_conditions": evidence.find_conditions, "captures": [], "last": last}
    exec(compile(CODE, f"{PACKAGE_DIR}/bug.py", "exec"), names)
    monkeypatch.setattr(evidence, "find_conditions", names["fail"])
    model, args = block(), (torch.zeros(5, D), torch.arange(5))[: 1 + (block is ChosenByArgument)]
    proof = ProofState(model, next(iter(interpret_arguments(args, {}, ModelNumbers.of(model)))))
    with pytest.raises(AssertionError):
        prove(proof)
    assert len(names["captures"]) == last
