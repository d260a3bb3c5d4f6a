"""Settings of all tests: Triton's interpreter on machines without a GPU, samples of cases, contracts of ops.

Triton reads its setting at its first import. On a machine with a GPU, only tests that request it tune kernels.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.pop("MOEFX_AUTOTUNE", None)

try:
    import hypothesis
except ImportError:  # hypothesis is optional on machines with a GPU
    pass
else:
    # No deadline: the first call of an op takes longer, and so do all calls on a busy machine.
    hypothesis.settings.register_profile("moefx", deadline=None)
    hypothesis.settings.load_profile("moefx")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test with the mark `sampled(n)` as exhaustive, except each n-th case.

    If several marks apply, the smallest n counts: a case with its own mark `sampled(1)` is never exhaustive.
    """
    seen = Counter[str]()
    for item in items:
        steps = [mark.args[0] for mark in item.iter_markers("sampled")]
        if not steps:
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % min(steps):
            item.add_marker("exhaustive")
        seen[test] += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--each", type=int, default=1, metavar="N", help="run each N-th of the selected tests only")


class _EachNth:
    """Deselect all tests but each N-th, after `-m` and `-k`. Keep tests with the mark `every_version`."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        step = config.getoption("--each")
        is_kept = [not i % step or item.get_closest_marker("every_version") is not None for i, item in enumerate(items)]
        config.hook.pytest_deselected(items=[item for item, keep in zip(items, is_kept, strict=True) if not keep])
        items[:] = [item for item, keep in zip(items, is_kept, strict=True) if keep]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_EachNth())


@pytest.fixture(scope="session", autouse=True)
def _check_results_of_ops() -> Iterator[None]:
    """Compare the results of every op, in this process, with its contract."""
    from .op_contracts import check_every_run  # imports Triton: after the setting above

    with pytest.MonkeyPatch.context() as monkeypatch:
        check_every_run(monkeypatch)
        yield
