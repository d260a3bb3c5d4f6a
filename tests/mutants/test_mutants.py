"""Every mutant of a plain MoE block is refused, or rewritten and equal, by the proof alone.

Mutants in `outcomes.txt` keep their outcome: `python -m tests.mutants.run --record` writes it.
"""

from __future__ import annotations

import pytest

from .run import check_all, read_outcomes, select, try_all

SAMPLE = 8
PARTS = 64  # workers share them, and each ends within its timeout on a slow machine


def report(chosen):
    verdicts = list(try_all(chosen))
    recorded = read_outcomes()
    bad = [str(v) for v in verdicts if v.trace or v.outcome != recorded.get(v.mutant.name, v.outcome)]
    assert not bad, f"{len(bad)} of {len(chosen)}:\n" + "\n".join(bad)
    return verdicts


def test_the_suite_is_large_enough():
    assert len(select([])) >= 500
    assert len({m.name for m in select([], full=True)}) == len(select([], full=True))


def test_mutants_differ_from_their_base():
    assert check_all(select([], sample=SAMPLE)) == []


@pytest.mark.timeout(1200)
def test_a_sample_of_mutants_is_refused_or_equal():
    verdicts = report(select([], sample=SAMPLE)[1::2])
    assert {v.outcome for v in verdicts} == {"rewritten", "refused"}


@pytest.mark.timeout(1200)
def test_equivalent_mutants_are_equal():
    report([m for m in select([]) if m.mutation.same][1:4])


@pytest.mark.exhaustive
def test_all_mutants_differ_from_their_base():
    assert check_all(select([], full=True)) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # probing sizes of a loop over tokens takes minutes
@pytest.mark.parametrize("part", range(PARTS))
def test_all_mutants_are_refused_or_equal(part):
    report(select([])[part::PARTS])
