"""The list of probes: names, and reasons to run again."""

from __future__ import annotations

import inspect

from moefx.matching.probes.probe_list import PROBES


def test_a_probe_that_runs_again_says_why():
    seen = set()
    for probe in PROBES:
        assert bool(probe.again) == (probe.name in seen), probe.name
        assert probe.protects_from and inspect.getdoc(probe.run), probe.name
        seen.add(probe.name)
