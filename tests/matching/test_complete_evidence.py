"""Further captures complete the evidence of a proof: see `moefx.matching.prove.complete_evidence`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moefx.errors import Refused
from moefx.matching import prove
from moefx.matching.prove import complete_evidence


class Proof:
    """A proof with three captures in which only one of two kinds of experts ran.

    Args:
        complete: for each further capture, whether both kinds run.
        sizes: the number of tokens of each further capture.
    """

    def __init__(self, complete, sizes):
        self.evidence = SimpleNamespace(forms=[])
        self.further, self.num_made, self.max_experts = list(zip(complete, sizes, strict=True)), 0, 4
        self.arguments = SimpleNamespace(dims=("S",))
        self.size_choice = SimpleNamespace(choose=lambda tokens, seed: {"S": self.further[self.num_made][1]})
        for tokens in (29, 25, 13):
            self.add_form(make_form(False, {"S": tokens}))
        self.evidence.reference = self.evidence.forms[0]

    def add_form(self, form, may_relift=False):
        self.evidence.forms.append(form)
        self.evidence.sizes = tuple(form.sizes for form in self.evidence.forms)

    def capture_and_lift(self, routing, sizes):
        is_complete, _ = self.further[self.num_made]
        self.num_made += 1
        return make_form(is_complete, sizes)


def make_form(is_complete, sizes):
    groups = [SimpleNamespace(ids=[0]), SimpleNamespace(ids=[1] if is_complete else [])]
    return SimpleNamespace(
        groups=groups, sizes=sizes, unrouted_value=None, cut=SimpleNamespace(meta={"source": "m.py:3"})
    )


def test_captures_are_added_until_three_are_complete():
    proof = Proof([True, False, True, True, True], [21, 22, 23, 24, 25])
    assert complete_evidence(proof) == [3, 5, 6] and proof.num_made == 4


def test_the_last_capture_counts():
    complete = [False] * (prove._MAX_EXTRA_CAPTURES - 3) + [True] * 3
    proof = Proof(complete, range(20, 20 + prove._MAX_EXTRA_CAPTURES))
    assert len(complete_evidence(proof)) == 3 and proof.num_made == prove._MAX_EXTRA_CAPTURES


def test_too_few_complete_captures_are_counted():
    proof = Proof([True] * 2 + [False] * (prove._MAX_EXTRA_CAPTURES - 2), range(20, 20 + prove._MAX_EXTRA_CAPTURES))
    with pytest.raises(Refused, match=r"2 of 11 captures use all 2 kinds of experts at once, .* 3 \(m.py:3\)"):
        complete_evidence(proof)


def test_complete_captures_of_the_same_sizes_are_no_evidence():
    proof = Proof([True] * prove._MAX_EXTRA_CAPTURES, [21] * prove._MAX_EXTRA_CAPTURES)
    with pytest.raises(Refused, match=r"the 8 of 11 captures .* do not differ enough in their sizes \(S=21\)"):
        complete_evidence(proof)
