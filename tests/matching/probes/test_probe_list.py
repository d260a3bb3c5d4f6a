"""The list of probes: names, reasons to run again, and headers that name the programs that each refuses."""

from __future__ import annotations

import inspect
import sys

import pytest

from moefx.matching.probes.probe_list import PROBES


def test_a_repeated_probe_has_a_reason():
    seen = set()
    for probe in PROBES:
        assert bool(probe.again) == (probe.name in seen), probe.name
        assert probe.protects_from and inspect.getdoc(probe.run), probe.name
        seen.add(probe.name)


@pytest.mark.parametrize("name", sorted({probe.run.__module__ for probe in PROBES}))
def test_each_probe_shows_a_program_that_it_protects_from(name):
    header = inspect.getdoc(sys.modules[name])
    assert header and "Protects from" in header and "::\n\n    " in header
