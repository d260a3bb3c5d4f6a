"""Run Triton's kernels in its interpreter on machines without a GPU; Triton reads the setting at its first import.

On a machine with a GPU, only tests that request it tune kernels.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.pop("MOEFX_AUTOTUNE", None)

try:
    import hypothesis
except ImportError:  # a machine with a GPU need not have it
    pass
else:
    # The first call of an op, or other work on the machine, is no failure.
    hypothesis.settings.register_profile("moefx", deadline=None)
    hypothesis.settings.load_profile("moefx")


@pytest.hookimpl(tryfirst=True)  # before those that `-m` names are chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that has the mark `sampled(n)`, all but each n-th are exhaustive; one that has a
    mark `sampled(1)` of its own never is."""
    seen = Counter[str]()
    for item in items:
        every = [mark.args[0] for mark in item.iter_markers("sampled")]
        if not every:
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % min(every):
            item.add_marker("exhaustive")
        seen[test] += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--each", type=int, default=1, metavar="N", help="run each N-th of the selected tests only")


class _EachNth:
    """Deselect all but each N-th test, after `-m` and `-k` have selected. Tests with the mark `every_version` stay."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        each = config.getoption("--each")
        stays = [not i % each or item.get_closest_marker("every_version") is not None for i, item in enumerate(items)]
        config.hook.pytest_deselected(items=[item for item, stay in zip(items, stays, strict=True) if not stay])
        items[:] = [item for item, stay in zip(items, stays, strict=True) if stay]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_EachNth())
